//! Writes the rows of a Parquet file as JSON lines.
//!
//! Integers, decimals and doubles keep their value. A JSON column (logical type JSON) is embedded. Absent members of a struct are null
//! in Parquet, where all rows have the same members; null members are therefore left out. Nulls in lists and maps stay.
//!
//! | Parquet | JSON |
//! |---|---|
//! | decimal | number with all its digits |
//! | float that is not finite | null, as pandas and `datasets` write it |
//! | binary without a text type | base64 |
//! | date, time | `2024-01-31`, `23:59:59.999999` |
//! | timestamp | `2024-01-31T23:59:59.999999Z`; without `Z` if it has no time zone |
//! | map | object |

use std::fmt::Write as _;
use std::fs::File;
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use chrono::{DateTime, NaiveTime};
use gym_core::message::json_string;
use parquet::basic::{ConvertedType, LogicalType, TimeUnit};
use parquet::data_type::Decimal;
use parquet::file::reader::{FileReader as _, SerializedFileReader};
use parquet::record::{Field, Row};
use parquet::schema::types::Type;
use serde_json::value::RawValue;

use crate::collect::files::fix_of_unopened;
use crate::collect::input::error::InputError;

/// Writes at most `rows_max` rows of a file, one per line, and returns their number.
///
/// # Errors
/// [`InputError::File`] if the file is not valid, [`InputError::Row`] if a row has no JSON.
pub(super) fn write_lines(path: &Path, rows_max: u64, writer: &mut impl Write) -> Result<u64, InputError> {
    caught(path, || write_all(path, rows_max, writer))
}

/// Checks that a file is complete: its metadata, which are at its end. No row is read.
///
/// # Errors
/// [`InputError::File`].
pub(super) fn check(path: &Path) -> Result<(), InputError> {
    caught(path, || open(path).map(drop))
}

/// The crate panics at some damaged files.
fn caught<T>(path: &Path, read: impl FnOnce() -> Result<T, InputError>) -> Result<T, InputError> {
    catch_unwind(AssertUnwindSafe(read)).unwrap_or_else(|_| {
        Err(InputError::file(
            path,
            "its metadata is damaged, or has a form that is not supported; download or write it again",
        ))
    })
}

fn open(path: &Path) -> Result<SerializedFileReader<File>, InputError> {
    let invalid = |problem: String| InputError::file(path, problem);
    let file = File::open(path).map_err(|error| {
        let fix = fix_of_unopened(path, &error, "name a Parquet file with --input");
        invalid(format!("cannot read the input: {error}\n  fix: {fix}"))
    })?;
    SerializedFileReader::new(file)
        .map_err(|error| invalid(format!("it is no complete Parquet file: {error}; download or write it again")))
}

fn write_all(path: &Path, rows_max: u64, writer: &mut impl Write) -> Result<u64, InputError> {
    let reader = open(path)?;
    let schema = reader.metadata().file_metadata().schema().clone();
    let rows = reader.get_row_iter(None).map_err(|error| InputError::file(path, unreadable(&error)))?;
    let mut line = String::new();
    let mut written = 0;
    for row in rows.take(usize::try_from(rows_max).unwrap_or(usize::MAX)) {
        let wrong = |problem| InputError::row(path.display().to_string(), written + 1, problem);
        let row = row.map_err(|error| wrong(unreadable(&error)))?;
        line.clear();
        object(Some(&schema), &row, &mut line).map_err(wrong)?;
        line.push('\n');
        writer.write_all(line.as_bytes()).map_err(|error| InputError::io("write the rows of the input", error))?;
        written += 1;
    }
    Ok(written)
}

fn unreadable(error: &parquet::errors::ParquetError) -> String {
    format!(
        "{error}; the file is damaged, or compressed with something else than snappy or zstd: write it again with one of these"
    )
}

/// Appends a struct. `of` is its type; `None` if it is not known.
fn object(of: Option<&Type>, row: &Row, out: &mut String) -> Result<(), String> {
    out.push('{');
    let mut first = true;
    for (at, (name, field)) in row.get_column_iter().enumerate() {
        if matches!(field, Field::Null) {
            continue;
        }
        if !std::mem::take(&mut first) {
            out.push(',');
        }
        out.push_str(&json_string(name));
        out.push(':');
        let member = of.filter(|of| of.is_group()).and_then(|of| of.get_fields().get(at));
        value(member.map(AsRef::as_ref), field, out).map_err(|problem| format!("{name}: {problem}"))?;
    }
    out.push('}');
    Ok(())
}

fn value(of: Option<&Type>, field: &Field, out: &mut String) -> Result<(), String> {
    let logical = of.and_then(|of| of.get_basic_info().logical_type_ref());
    match field {
        Field::Null => out.push_str("null"),
        Field::Bool(value) => push(value, out),
        Field::Byte(value) => push(value, out),
        Field::Short(value) => push(value, out),
        Field::UByte(value) => push(value, out),
        Field::UShort(value) => push(value, out),
        Field::UInt(value) => push(value, out),
        Field::ULong(value) => push(value, out),
        Field::Int(value) => integer(logical, (*value).into(), out)?,
        Field::Long(value) => integer(logical, *value, out)?,
        Field::Float16(value) => float(f64::from(*value), out),
        Field::Float(value) => float(f64::from(*value), out),
        Field::Double(value) => float(*value, out),
        Field::Decimal(value) => decimal(value, out),
        Field::Str(text) if of.is_some_and(is_json) => {
            let parsed: &RawValue =
                serde_json::from_str(text).map_err(|error| format!("it is no valid JSON: {error}"))?;
            // Outside of strings, which cannot contain one, a line break is white space.
            out.extend(parsed.get().chars().map(|c| if matches!(c, '\n' | '\r') { ' ' } else { c }));
        }
        Field::Str(text) => out.push_str(&json_string(text)),
        Field::Bytes(bytes) => out.push_str(&json_string(&BASE64_STANDARD.encode(bytes.data()))),
        Field::Date(days) => moment(i64::from(*days) * 86_400, 0, "%Y-%m-%d", "", out)?,
        Field::TimeMillis(value) => time(TimeUnit::MILLIS, (*value).into(), out)?,
        Field::TimeMicros(value) => time(TimeUnit::MICROS, *value, out)?,
        Field::TimestampMillis(value) => timestamp(logical, TimeUnit::MILLIS, *value, out)?,
        Field::TimestampMicros(value) => timestamp(logical, TimeUnit::MICROS, *value, out)?,
        Field::Group(row) => object(of, row, out)?,
        Field::ListInternal(list) => {
            let element = of.and_then(element);
            out.push('[');
            for (at, field) in list.elements().iter().enumerate() {
                if at > 0 {
                    out.push(',');
                }
                value(element, field, out)?;
            }
            out.push(']');
        }
        Field::MapInternal(map) => {
            let pair = of.filter(|of| of.is_group()).and_then(|of| of.get_fields().first());
            let member = |at: usize| pair.filter(|pair| pair.is_group())?.get_fields().get(at).map(AsRef::as_ref);
            out.push('{');
            for (at, (key, field)) in map.entries().iter().enumerate() {
                if at > 0 {
                    out.push(',');
                }
                let mut text = String::new();
                value(member(0), key, &mut text)?;
                // A member has a text for its name.
                out.push_str(&if text.starts_with('"') { text } else { json_string(&text) });
                out.push(':');
                value(member(1), field, out)?;
            }
            out.push('}');
        }
    }
    Ok(())
}

/// Returns the type of a list's elements: `list (LIST) { repeated group list { element } }`, or an older form without the group.
fn element(list: &Type) -> Option<&Type> {
    if list.get_basic_info().converted_type() != ConvertedType::LIST || !list.is_group() {
        return Some(list);
    }
    let repeated = list.get_fields().first()?;
    let older = !repeated.is_group()
        || repeated.get_fields().len() != 1
        || repeated.name() == "array"
        || repeated.name().ends_with("_tuple");
    if older { Some(repeated) } else { repeated.get_fields().first().map(AsRef::as_ref) }
}

fn is_json(of: &Type) -> bool {
    of.get_basic_info().converted_type() == ConvertedType::JSON
        || matches!(of.get_basic_info().logical_type_ref(), Some(LogicalType::Json))
}

fn push(value: &impl std::fmt::Display, out: &mut String) {
    // Writing to a string cannot fail.
    let _ = write!(out, "{value}");
}

fn float(value: f64, out: &mut String) {
    match serde_json::Number::from_f64(value) {
        Some(number) => push(&number, out),
        None => out.push_str("null"),
    }
}

/// Appends an integer, or the time for which it stands: the crate converts only the older annotations.
fn integer(logical: Option<&LogicalType>, value: i64, out: &mut String) -> Result<(), String> {
    match logical {
        Some(LogicalType::Timestamp(of)) => timestamp(logical, of.unit, value, out),
        Some(LogicalType::Time(of)) => time(of.unit, value, out),
        _ => {
            push(&value, out);
            Ok(())
        }
    }
}

fn timestamp(logical: Option<&LogicalType>, unit: TimeUnit, value: i64, out: &mut String) -> Result<(), String> {
    let zone = match logical {
        Some(LogicalType::Timestamp(of)) if of.is_adjusted_to_u_t_c => "Z",
        _ => "",
    };
    let (per_second, form) = unit_form(unit, "%Y-%m-%dT%H:%M:%S");
    let nanos = value.rem_euclid(per_second) * (1_000_000_000 / per_second);
    moment(value.div_euclid(per_second), nanos, &form, zone, out)
}

/// Returns the units of a second, and the form with as many decimals.
fn unit_form(unit: TimeUnit, form: &str) -> (i64, String) {
    let (per_second, digits) = match unit {
        TimeUnit::MILLIS => (1_000, 3),
        TimeUnit::MICROS => (1_000_000, 6),
        TimeUnit::NANOS => (1_000_000_000, 9),
    };
    (per_second, format!("{form}%.{digits}f"))
}

fn moment(seconds: i64, nanos: i64, form: &str, zone: &str, out: &mut String) -> Result<(), String> {
    let moment = u32::try_from(nanos).ok().and_then(|nanos| DateTime::from_timestamp(seconds, nanos));
    let moment = moment.ok_or_else(|| format!("{seconds} s since 1970 is no date"))?;
    let _ = write!(out, "\"{}{zone}\"", moment.format(form));
    Ok(())
}

fn time(unit: TimeUnit, value: i64, out: &mut String) -> Result<(), String> {
    let (per_second, form) = unit_form(unit, "%H:%M:%S");
    let nanos = value.rem_euclid(per_second) * (1_000_000_000 / per_second);
    let seconds = u32::try_from(value.div_euclid(per_second)).ok();
    let time = seconds.zip(u32::try_from(nanos).ok());
    let time = time.and_then(|(seconds, nanos)| NaiveTime::from_num_seconds_from_midnight_opt(seconds, nanos));
    let time = time.ok_or_else(|| format!("{value} is no time of day"))?;
    let _ = write!(out, "\"{}\"", time.format(&form));
    Ok(())
}

/// Appends all digits: `-12.50`.
fn decimal(value: &Decimal, out: &mut String) {
    // The crate writes `12.` for a whole number.
    let text = Field::Decimal(value.clone()).to_string();
    out.push_str(text.trim_end_matches('.'));
}

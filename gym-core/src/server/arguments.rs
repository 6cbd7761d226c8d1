//! Parses the arguments of a tool call, and describes invalid arguments with the messages of NeMo Gym's own servers.
//!
//! The agent passes the body of a 422 to the model, so its text is part of the environment. A policy that was trained against the
//! Python servers has seen exactly these messages. They are those of FastAPI and pydantic in lax mode, where `"5"`, `5.0` and
//! `true` are integers.

use crate::message::{RawObject, Response, json_string, json_string_length};
use crate::server::ValidationProblem;
use serde_json::value::RawValue;
use serde_json::{Value, json};

/// Reads the arguments of one call. Take each argument, then respond with [`Arguments::refusal`] if any result was `None`.
///
/// ```
/// use gym_core::RawObject;
/// use gym_core::server::Arguments;
///
/// let call = RawObject::parse(r#"{"city": 5}"#)?;
/// let mut arguments = Arguments::of(&call);
/// assert_eq!(arguments.take::<String>("city"), None);
/// assert_eq!(
///     arguments.refusal().message.head.to_bytes(),
///     r#"{"detail":[{"type":"string_type","loc":["body","city"],"msg":"Input should be a valid string","input":5}]}"#
/// );
/// # Ok::<(), gym_core::message::JsonError>(())
/// ```
#[derive(Debug)]
pub struct Arguments<'a> {
    body: &'a RawObject,
    errors: ArgumentErrors,
}

/// The errors found so far, and the current location in the arguments.
#[derive(Debug, Default)]
pub struct ArgumentErrors {
    /// Steps below `body`, each as JSON text.
    location: Vec<String>,
    details: Vec<ValidationProblem>,
}

/// A type that an argument can have: `String`, `bool`, `f64`, `i64`, `u64`, `i128`, and `Vec` and `Option` of these. With the
/// feature `schemars`, `Json` takes any type that derives `Deserialize` and `JsonSchema`.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be the type of a tool's argument",
    label = "write `u64` or `i64` for an integer, `f64` for a float, `String` for a text",
    note = "the types are `String`, `bool`, `f64`, `i64`, `u64`, `i128`, and `Vec` and `Option` of these",
    note = "any other type `T` is `Json<T>` of `gym_core::server`, with the feature `schemars` and `#[derive(Deserialize, JsonSchema)]`"
)]
pub trait Argument: Sized {
    /// Reads the JSON text of a value. Returns `None` after noting at least one problem.
    fn read(text: &str, errors: &mut ArgumentErrors) -> Option<Self>;

    /// Returns the JSON schema of the type, as the model reads it.
    fn schema() -> Value;

    /// Returns the value for an argument that a call lacks. `None` makes the argument required, which is the default.
    #[must_use]
    fn if_missing() -> Option<Self> {
        None
    }
}

impl<'a> Arguments<'a> {
    /// Creates a reader of the body of a call.
    #[must_use]
    pub fn of(body: &'a RawObject) -> Self {
        Self { body, errors: ArgumentErrors::default() }
    }

    /// Returns an argument. If it is missing or has another type, records the problem and returns `None`.
    pub fn take<T: Argument>(&mut self, name: &str) -> Option<T> {
        self.errors.location.push(json_string(name));
        let value = match self.body.get(name) {
            Some(text) => T::read(str::from_utf8(&text).unwrap_or_default(), &mut self.errors),
            None => T::if_missing().or_else(|| {
                self.errors.note("missing", "Field required", str::from_utf8(self.body.text()).unwrap_or_default())
            }),
        };
        self.errors.location.pop();
        value
    }

    /// Returns the 422 response that lists all recorded problems.
    #[must_use]
    pub fn refusal(&self) -> Response {
        ValidationProblem::response(&self.errors.details)
    }
}

impl ArgumentErrors {
    fn note<T>(&mut self, kind: &str, message: &str, input: &str) -> Option<T> {
        self.note_with(kind, message, input, None)
    }

    /// Records a problem. `context` is the JSON text of the key `ctx`.
    fn note_with<T>(&mut self, kind: &str, message: &str, input: &str, context: Option<&str>) -> Option<T> {
        self.details.push(ValidationProblem::at(kind, &self.location, message, &as_python_writes(input), context));
        None
    }
}

impl Argument for String {
    fn read(text: &str, errors: &mut ArgumentErrors) -> Option<Self> {
        serde_json::from_str(text).ok().or_else(|| errors.note("string_type", "Input should be a valid string", text))
    }

    fn schema() -> Value {
        json!({"type": "string"})
    }
}

impl Argument for bool {
    fn read(text: &str, errors: &mut ArgumentErrors) -> Option<Self> {
        const PARSE: &str = "Input should be a valid boolean, unable to interpret input";
        let known = match text.as_bytes().first() {
            Some(b't') => Some(true),
            Some(b'f') => Some(false),
            Some(b'"') => {
                let inner: String = serde_json::from_str(text).unwrap_or_default();
                match bool_in_string(&inner) {
                    Some(flag) => Some(flag),
                    None => return errors.note("bool_parsing", PARSE, text),
                }
            }
            Some(b'-' | b'0'..=b'9') => match text.parse::<f64>().unwrap_or(f64::NAN) {
                1.0 => Some(true),
                0.0 => Some(false),
                number if number.fract() == 0.0 => return errors.note("bool_parsing", PARSE, text),
                _ => None,
            },
            _ => None,
        };
        known.or_else(|| errors.note("bool_type", "Input should be a valid boolean", text))
    }

    fn schema() -> Value {
        json!({"type": "boolean"})
    }
}

impl Argument for f64 {
    fn read(text: &str, errors: &mut ArgumentErrors) -> Option<Self> {
        const PARSE: &str = "Input should be a valid number, unable to parse string as a number";
        match text.as_bytes().first() {
            Some(b't') => Some(1.0),
            Some(b'f') => Some(0.0),
            Some(b'"') => {
                let inner: String = serde_json::from_str(text).unwrap_or_default();
                float_in_string(inner.trim()).or_else(|| errors.note("float_parsing", PARSE, text))
            }
            Some(b'-' | b'0'..=b'9') => text.parse().ok(),
            _ => None,
        }
        .or_else(|| match text.starts_with('"') {
            true => None,
            false => errors.note("float_type", "Input should be a valid number", text),
        })
    }

    fn schema() -> Value {
        json!({"type": "number"})
    }
}

const SIZE: &str = "Unable to parse input string as an integer, exceeded maximum size";

impl Argument for i128 {
    fn read(text: &str, errors: &mut ArgumentErrors) -> Option<Self> {
        const PARSE: &str = "Input should be a valid integer, unable to parse string as an integer";
        const FRACTION: &str = "Input should be a valid integer, got a number with a fractional part";
        match text.as_bytes().first() {
            Some(b't') => Some(1),
            Some(b'f') => Some(0),
            Some(b'"') => {
                let inner: String = serde_json::from_str(text).unwrap_or_default();
                integer_in_string(&inner).or_else(|| errors.note("int_parsing", PARSE, text))
            }
            Some(b'-' | b'0'..=b'9') if text.contains(['.', 'e', 'E']) => {
                let number: f64 = text.parse().unwrap_or(f64::NAN);
                if number.fract() != 0.0 {
                    errors.note("int_from_float", FRACTION, text)
                } else if number.abs() < i64::MAX as f64 {
                    Some(number as Self)
                } else {
                    errors.note("int_parsing_size", SIZE, text)
                }
            }
            // Python's integers are unbounded; `i128`, with 38 digits, is the bound here.
            Some(b'-' | b'0'..=b'9') => text.parse().ok().or_else(|| errors.note("int_parsing_size", SIZE, text)),
            _ => errors.note("int_type", "Input should be a valid integer", text),
        }
    }

    fn schema() -> Value {
        json!({"type": "integer"})
    }
}

impl Argument for i64 {
    fn read(text: &str, errors: &mut ArgumentErrors) -> Option<Self> {
        let number = i128::read(text, errors)?;
        Self::try_from(number).ok().or_else(|| errors.note("int_parsing_size", SIZE, text))
    }

    fn schema() -> Value {
        json!({"type": "integer"})
    }
}

impl Argument for u64 {
    fn read(text: &str, errors: &mut ArgumentErrors) -> Option<Self> {
        let number = i128::read(text, errors)?;
        if number < 0 {
            let message = "Input should be greater than or equal to 0";
            return errors.note_with("greater_than_equal", message, text, Some(r#"{"ge":0}"#));
        }
        Self::try_from(number).ok().or_else(|| errors.note("int_parsing_size", SIZE, text))
    }

    fn schema() -> Value {
        json!({"type": "integer", "minimum": 0})
    }
}

/// An optional argument: `None` if the call lacks it, or if it is `null`.
impl<T: Argument> Argument for Option<T> {
    fn read(text: &str, errors: &mut ArgumentErrors) -> Option<Self> {
        if text == "null" { Some(None) } else { T::read(text, errors).map(Some) }
    }

    fn schema() -> Value {
        T::schema()
    }

    fn if_missing() -> Option<Self> {
        Some(None)
    }
}

/// An argument of a type that derives `serde::Deserialize` and `schemars::JsonSchema`.
///
/// Its errors have serde's messages, because pydantic's depend on a Python class that does not exist here.
#[cfg(feature = "schemars")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Json<T>(pub T);

#[cfg(feature = "schemars")]
impl<T: serde::de::DeserializeOwned + schemars::JsonSchema> Argument for Json<T> {
    fn read(text: &str, errors: &mut ArgumentErrors) -> Option<Self> {
        match serde_json::from_str(text) {
            Ok(value) => Some(Self(value)),
            Err(error) => errors.note("value_error", &format!("Value error, {error}"), text),
        }
    }

    fn schema() -> Value {
        // Subschemas are inlined, because a tool's parameters cannot contain definitions.
        let mut settings = schemars::generate::SchemaSettings::default();
        settings.inline_subschemas = true;
        settings.meta_schema = None;
        let mut schema = settings.into_generator().into_root_schema_for::<T>().to_value();
        schema.as_object_mut().map(|schema| schema.shift_remove("title"));
        schema
    }
}

impl<T: Argument> Argument for Vec<T> {
    fn read(text: &str, errors: &mut ArgumentErrors) -> Option<Self> {
        let Ok(items) = serde_json::from_str::<Vec<&RawValue>>(text) else {
            return errors.note("list_type", "Input should be a valid list", text);
        };
        let mut values = Self::with_capacity(items.len());
        for (at, item) in items.iter().enumerate() {
            errors.location.push(at.to_string());
            values.extend(T::read(item.get(), errors));
            errors.location.pop();
        }
        (values.len() == items.len()).then_some(values)
    }

    fn schema() -> Value {
        json!({"type": "array", "items": T::schema()})
    }
}

/// Parses a boolean in the spellings that pydantic accepts, in any case: `1`, `on`, `t`, `true`, `y`, `yes`, and their opposites.
#[must_use]
pub fn bool_in_string(text: &str) -> Option<bool> {
    match text.to_ascii_lowercase().as_str() {
        "1" | "on" | "t" | "true" | "y" | "yes" => Some(true),
        "0" | "off" | "f" | "false" | "n" | "no" => Some(false),
        _ => None,
    }
}

/// Parses a number as Python's `float` does: single underscores are allowed inside.
fn float_in_string(text: &str) -> Option<f64> {
    if text.starts_with('_') || text.ends_with('_') || text.contains("__") {
        return None;
    }
    text.replace('_', "").parse().ok()
}

/// Parses digits with an optional sign, single underscores between them, surrounding whitespace, and a trailing `.0`.
fn integer_in_string(text: &str) -> Option<i128> {
    let text = text.trim();
    let whole = match text.split_once('.') {
        Some((whole, zeros)) if !zeros.is_empty() && zeros.bytes().all(|digit| digit == b'0') => whole,
        Some(_) => return None,
        None => text,
    };
    let digits = whole.strip_prefix(['+', '-']).unwrap_or(whole);
    let grouped = digits.split('_').all(|group| !group.is_empty() && group.bytes().all(|byte| byte.is_ascii_digit()));
    grouped.then(|| whole.replace('_', "").parse().ok()).flatten()
}

/// Returns JSON text as Python's `json` writes it after parsing: no whitespace, exact integers, floats by their `repr`.
fn as_python_writes(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let length = match first {
            '"' => json_string_length(rest),
            '-' | '0'..='9' => {
                rest.find(|c: char| !matches!(c, '0'..='9' | '.' | 'e' | 'E' | '+' | '-')).unwrap_or(rest.len())
            }
            _ => first.len_utf8(),
        };
        let (token, after) = rest.split_at(length);
        match first {
            // A lone surrogate has no UTF-8 form; its escape is kept unchanged.
            '"' => out.push_str(
                &serde_json::from_str::<String>(token).map_or_else(|_| token.to_owned(), |s| json_string(&s)),
            ),
            '-' | '0'..='9' => out.push_str(&number_as_python_writes(token)),
            ' ' | '\t' | '\n' | '\r' => {}
            _ => out.push(first),
        }
        rest = after;
    }
    out
}

/// Returns the shortest digits that parse to the same number. If two are equally short and near, returns the even one. Numbers
/// below 1e-4 and from 1e16 have an exponent of at least two digits.
fn number_as_python_writes(token: &str) -> String {
    if !token.contains(['.', 'e', 'E']) {
        return if token == "-0" { "0".into() } else { token.into() };
    }
    let Ok(number) = token.parse::<f64>() else { return token.into() };
    // Uses serde_json's digits: the standard library rounds a tie up, Python to even.
    let Some(written) = serde_json::Number::from_f64(number.abs()).map(|number| number.to_string()) else {
        return token.into();
    };
    let (mantissa, exponent) = written.split_once('e').unwrap_or((&written, "0"));
    let (whole, part) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let all = format!("{whole}{part}");
    let significant = all.trim_start_matches('0');
    let leading = all.len() - significant.len();
    let digits = significant.trim_end_matches('0');
    let sign = if number.is_sign_negative() { "-" } else { "" };
    if digits.is_empty() {
        return format!("{sign}0.0");
    }
    // The exponent of the first digit.
    let exponent = exponent.parse::<i32>().unwrap_or_default() + (whole.len() as i32 - leading as i32) - 1;
    if !(-4..16).contains(&exponent) {
        let (first, rest) = digits.split_at(1);
        let point = if rest.is_empty() { "" } else { "." };
        let exponent_sign = if exponent < 0 { '-' } else { '+' };
        return format!("{sign}{first}{point}{rest}e{exponent_sign}{:02}", exponent.abs());
    }
    if exponent < 0 {
        return format!("{sign}0.{}{digits}", "0".repeat(exponent.unsigned_abs() as usize - 1));
    }
    let places = exponent as usize + 1;
    let (whole, part) = digits.split_at(places.min(digits.len()));
    let part = if part.is_empty() { "0" } else { part };
    format!("{sign}{whole:0<places$}.{part}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_written_as_python_writes_them() {
        for (ours, theirs) in [
            ("1E5", "100000.0"),
            ("1.50", "1.5"),
            ("0.0001", "0.0001"),
            ("0.00001", "1e-05"),
            ("1e15", "1000000000000000.0"),
            ("1e16", "1e+16"),
            ("123456789012345680.0", "1.2345678901234568e+17"),
            ("-0.0", "-0.0"),
            ("-0", "0"),
            ("1526794260651234.25", "1526794260651234.2"),
            ("100.125e1", "1001.25"),
            ("1e999", "1e999"),
            ("0.00025", "0.00025"),
            ("5e-324", "5e-324"),
            ("1.7976931348623157e308", "1.7976931348623157e+308"),
            ("123456789012345678901234567890", "123456789012345678901234567890"),
        ] {
            assert_eq!(as_python_writes(ours), theirs);
        }
    }

    fn kind_of<T: Argument>(text: &str) -> Result<T, String> {
        let body = RawObject::parse(format!(r#"{{"a":{text}}}"#)).unwrap();
        let mut arguments = Arguments::of(&body);
        arguments.take("a").ok_or_else(|| {
            // Not parsed, because the input can be a number that JSON allows and Rust does not.
            let body = String::from_utf8(arguments.refusal().message.head.to_bytes().to_vec()).unwrap();
            body.split('"').nth(5).unwrap().to_owned()
        })
    }

    /// Recorded from pydantic 2.14, in lax mode over what Python's `json` reads.
    #[test]
    fn booleans_and_numbers_are_read_as_pydantic_reads_them() {
        for text in ["true", "1", "1.0", r#""TRUE""#, r#""Yes""#, r#""on""#, r#""t""#, r#""1""#] {
            assert_eq!(kind_of(text), Ok(true), "{text}");
        }
        for text in ["2", "-1", "2.0", r#"" yes""#, r#""1.0""#, r#""""#] {
            assert_eq!(kind_of::<bool>(text), Err("bool_parsing".into()), "{text}");
        }
        for text in ["0.5", "1e400", "null", "[]", "{}"] {
            assert_eq!(kind_of::<bool>(text), Err("bool_type".into()), "{text}");
        }
        for (text, number) in [
            ("1", 1.0),
            ("true", 1.0),
            (r#"" 1.5 ""#, 1.5),
            (r#""1_000.5""#, 1000.5),
            (r#"".5""#, 0.5),
            (r#""+1""#, 1.0),
            (r#""-Infinity""#, f64::NEG_INFINITY),
            ("1e400", f64::INFINITY),
        ] {
            assert_eq!(kind_of(text), Ok(number), "{text}");
        }
        for text in [r#""1__0""#, r#""_1""#, r#""""#, r#""1,5""#, r#""0x10""#, r#""1e""#] {
            assert_eq!(kind_of::<f64>(text), Err("float_parsing".into()), "{text}");
        }
        assert_eq!(kind_of::<f64>("null"), Err("float_type".into()));
        assert_eq!(kind_of::<u64>("-1.0"), Err("greater_than_equal".into()));
        assert_eq!(kind_of::<i64>("9223372036854775808"), Err("int_parsing_size".into()));
        assert_eq!(kind_of::<Option<i64>>("null"), Ok(None));
        assert_eq!(kind_of::<Option<i64>>(r#""x""#), Err("int_parsing".into()));
    }

    #[test]
    fn an_optional_argument_may_be_absent() {
        let body = RawObject::parse("{}").unwrap();
        let mut arguments = Arguments::of(&body);
        assert_eq!(arguments.take::<Option<String>>("note"), Some(None));
        assert_eq!(arguments.take::<String>("item"), None);
    }

    #[test]
    fn every_problem_is_listed_with_its_place() {
        let body = RawObject::parse(r#"{"a": ["x", 1, null]}"#).unwrap();
        let mut arguments = Arguments::of(&body);
        assert_eq!((arguments.take::<Vec<i128>>("a"), arguments.take::<i128>("b")), (None, None));
        let detail: serde_json::Value = serde_json::from_slice(&arguments.refusal().message.head.to_bytes()).unwrap();
        let places: Vec<String> =
            detail["detail"].as_array().unwrap().iter().map(|entry| entry["loc"].to_string()).collect();
        assert_eq!(places, [r#"["body","a",0]"#, r#"["body","a",2]"#, r#"["body","b"]"#]);
    }
}

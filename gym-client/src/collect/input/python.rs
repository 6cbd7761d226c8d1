//! Formats JSON values as Python's `str`, `repr` and `json.dumps` do, for strings that NeMo Gym builds with them.

use std::fmt::Write;

use gym_core::rollout::metrics::JsonFields;
use serde_json::value::RawValue;

/// A JSON value by kind; its elements are not parsed yet.
pub(crate) enum PythonValue<'a> {
    Null,
    Bool(bool),
    Int(&'a str),
    Float(f64),
    Text(String),
    List(Vec<&'a str>),
    Dict(JsonFields<'a>),
}

impl<'a> PythonValue<'a> {
    pub(crate) fn parse(raw: &'a str) -> Result<Self, serde_json::Error> {
        let raw = raw.trim();
        Ok(match raw.as_bytes().first() {
            Some(b'n') => serde_json::from_str::<()>(raw).map(|()| Self::Null)?,
            Some(b't' | b'f') => Self::Bool(serde_json::from_str(raw)?),
            Some(b'"') => Self::Text(serde_json::from_str(raw)?),
            Some(b'[') => {
                Self::List(serde_json::from_str::<Vec<&'a RawValue>>(raw)?.into_iter().map(RawValue::get).collect())
            }
            Some(b'{') => Self::Dict(JsonFields::parse(raw)?),
            _ => {
                let raw = serde_json::from_str::<&'a RawValue>(raw)?.get();
                match raw {
                    "-0" => Self::Int("0"),
                    _ if raw.bytes().any(|byte| matches!(byte, b'.' | b'e' | b'E')) => {
                        Self::Float(raw.parse().unwrap_or(f64::NAN))
                    }
                    _ => Self::Int(raw),
                }
            }
        })
    }
}

/// Returns `repr(value)` of a float: the shortest digits that parse to the same value, with an exponent outside 1e-4 …
/// 1e16.
pub(crate) fn float_repr(value: f64) -> String {
    if value.is_nan() {
        return "nan".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let plain = format!("{value}");
        if plain.contains('.') { plain } else { plain + ".0" }
    } else {
        let sign = if exponent < 0 { '-' } else { '+' };
        format!("{digits}e{sign}{:02}", exponent.unsigned_abs())
    }
}

/// Limit of nesting: each level is a recursive call, and hostile input must not overflow the stack.
const DEPTH_MAX: usize = 128;

fn deeper(depth: usize) -> Result<usize, serde_json::Error> {
    if depth < DEPTH_MAX { Ok(depth + 1) } else { Err(serde::de::Error::custom("the value is nested too deeply")) }
}

/// Returns `json.dumps` of a dict: separators `", "` and `": "`, and characters outside ASCII escaped.
pub(crate) fn dumps<'f>(fields: impl Iterator<Item = (&'f str, &'f str)>) -> Result<String, serde_json::Error> {
    let mut text = String::new();
    push_dict_dumps(fields, &mut text, 0)?;
    Ok(text)
}

/// Appends items between two brackets, separated by a comma and a space, as `repr` and `json.dumps` do.
fn push_joined<T>(
    brackets: &str,
    items: impl IntoIterator<Item = T>,
    into: &mut String,
    mut push: impl FnMut(T, &mut String) -> Result<(), serde_json::Error>,
) -> Result<(), serde_json::Error> {
    let (open, close) = brackets.split_at(1);
    into.push_str(open);
    for (place, item) in items.into_iter().enumerate() {
        if place > 0 {
            into.push_str(", ");
        }
        push(item, into)?;
    }
    into.push_str(close);
    Ok(())
}

fn push_dict_dumps<'f>(
    fields: impl Iterator<Item = (&'f str, &'f str)>,
    into: &mut String,
    depth: usize,
) -> Result<(), serde_json::Error> {
    push_joined("{}", fields, into, |(key, value), into| {
        dumps_text(key, into);
        into.push_str(": ");
        push_dumps(value, into, depth)
    })
}

fn push_dumps(raw: &str, into: &mut String, depth: usize) -> Result<(), serde_json::Error> {
    let depth = deeper(depth)?;
    match PythonValue::parse(raw)? {
        PythonValue::Null => into.push_str("null"),
        PythonValue::Bool(value) => into.push_str(if value { "true" } else { "false" }),
        PythonValue::Int(text) => into.push_str(text),
        PythonValue::Float(value) => into.push_str(&float_repr(value)),
        PythonValue::Text(text) => dumps_text(&text, into),
        PythonValue::List(items) => push_joined("[]", items, into, |item, into| push_dumps(item, into, depth))?,
        PythonValue::Dict(members) => push_dict_dumps(members.iter(), into, depth)?,
    }
    Ok(())
}

fn dumps_text(text: &str, into: &mut String) {
    into.push('"');
    for character in text.chars() {
        match character {
            '"' => into.push_str("\\\""),
            '\\' => into.push_str("\\\\"),
            '\n' => into.push_str("\\n"),
            '\r' => into.push_str("\\r"),
            '\t' => into.push_str("\\t"),
            '\u{8}' => into.push_str("\\b"),
            '\u{c}' => into.push_str("\\f"),
            ' '..='~' => into.push(character),
            _ => {
                for unit in character.encode_utf16(&mut [0; 2]) {
                    write!(into, "\\u{unit:04x}").expect("a String takes any text");
                }
            }
        }
    }
    into.push('"');
}

/// Returns `str(value)`; integers beyond 64 bits are floats, as in NeMo Gym's parser.
pub(crate) fn str_of(raw: &str) -> Result<String, serde_json::Error> {
    Ok(match PythonValue::parse(raw)? {
        PythonValue::Text(text) => text,
        _ => repr(raw)?,
    })
}

/// Returns `repr(value)`.
pub(crate) fn repr(raw: &str) -> Result<String, serde_json::Error> {
    let mut text = String::new();
    push_repr(raw, &mut text, 0)?;
    Ok(text)
}

fn push_repr(raw: &str, into: &mut String, depth: usize) -> Result<(), serde_json::Error> {
    let depth = deeper(depth)?;
    match PythonValue::parse(raw)? {
        PythonValue::Null => into.push_str("None"),
        PythonValue::Bool(value) => into.push_str(if value { "True" } else { "False" }),
        PythonValue::Int(text) if text.parse::<i64>().is_ok() || text.parse::<u64>().is_ok() => into.push_str(text),
        PythonValue::Int(text) => into.push_str(&float_repr(text.parse().unwrap_or(f64::NAN))),
        PythonValue::Float(value) => into.push_str(&float_repr(value)),
        PythonValue::Text(text) => repr_text(&text, into),
        PythonValue::List(items) => push_joined("[]", items, into, |item, into| push_repr(item, into, depth))?,
        PythonValue::Dict(members) => push_joined("{}", members.iter(), into, |(key, value), into| {
            repr_text(key, into);
            into.push_str(": ");
            push_repr(value, into, depth)
        })?,
    }
    Ok(())
}

fn repr_text(text: &str, into: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    into.push(quote);
    for character in text.chars() {
        let code = character as u32;
        match character {
            '\\' => into.push_str("\\\\"),
            '\n' => into.push_str("\\n"),
            '\r' => into.push_str("\\r"),
            '\t' => into.push_str("\\t"),
            _ if character == quote => {
                into.push('\\');
                into.push(quote);
            }
            _ if is_printable(character) => into.push(character),
            _ => match code {
                0..=0xff => write!(into, "\\x{code:02x}"),
                0x100..=0xffff => write!(into, "\\u{code:04x}"),
                _ => write!(into, "\\U{code:08x}"),
            }
            .expect("a String takes any text"),
        }
    }
    into.push(quote);
}

/// Returns `str.isprintable` of one character. Rust's debug escapes use the same Unicode categories. The preceding `x`
/// keeps Rust from escaping combining marks, which Python prints.
fn is_printable(character: char) -> bool {
    matches!(character, '\'' | '"' | '\\') || format!("x{character}").escape_debug().nth(1) != Some('\\')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_spelled_as_python_does() {
        for (value, spelled) in [
            (0.1, "0.1"),
            (1e5, "100000.0"),
            (1e16, "1e+16"),
            (1.5e-5, "1.5e-05"),
            (1e-4, "0.0001"),
            (9_007_199_254_740_993.0, "9007199254740992.0"),
            (-0.0, "-0.0"),
            (1e100, "1e+100"),
        ] {
            assert_eq!(float_repr(value), spelled);
        }
    }

    #[test]
    fn a_text_of_brackets_is_refused_and_does_not_end_the_stack() {
        let deep = "[".repeat(100_000) + &"]".repeat(100_000);
        assert!(repr(&deep).unwrap_err().to_string().contains("nested too deeply"));
        assert!(push_dumps(&deep, &mut String::new(), 0).is_err());
    }

    #[test]
    fn reprs_are_spelled_as_python_does() {
        for (raw, spelled) in [
            (r#"["a","it's","\"","'\"",null,true,1E5]"#, r#"['a', "it's", '"', '\'"', None, True, 100000.0]"#),
            (
                r#"{"é":"\u0000\u200b😀e\u0301","n":12345678901234567890123}"#,
                "{'é': '\\x00\\u200b😀e\u{301}', 'n': 1.2345678901234568e+22}",
            ),
        ] {
            assert_eq!(repr(raw).unwrap(), spelled);
        }
    }
}

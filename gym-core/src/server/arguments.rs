//! Reads a tool's arguments and says what is wrong with them in the words that NeMo Gym's own servers use.
//!
//! The agent hands the body of a 422 to the model, so its text is part of the environment: a policy trained against the
//! Python servers has seen exactly these sentences. They are FastAPI's and pydantic's (lax mode: `"5"`, `5.0` and `true`
//! are integers), recorded from the originals by `tests/python/golden_envs.py`.

use crate::base::error::Result;
use crate::message::{Message, RawObject, Response, Status};
use serde_json::value::RawValue;

/// The arguments of one call. Take what you need, then answer with [`Arguments::refusal`] if something was not there.
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
    /// Steps below `body`, each as a JSON text.
    location: Vec<String>,
    details: Vec<String>,
}

/// A type that an argument can have.
pub trait Argument: Sized {
    /// Reads a value's JSON text; `None` with at least one problem noted if it is not one.
    fn read(text: &str, errors: &mut ArgumentErrors) -> Option<Self>;
}

impl<'a> Arguments<'a> {
    /// Of that body.
    #[must_use]
    pub fn of(body: &'a RawObject) -> Self {
        Self { body, errors: ArgumentErrors::default() }
    }

    /// The argument of that name; `None`, with the reason noted, if it is missing or of another type.
    pub fn take<T: Argument>(&mut self, name: &str) -> Option<T> {
        self.errors.location.push(quote(name));
        let value = match self.body.get(name) {
            Some(text) => T::read(str::from_utf8(&text).unwrap_or_default(), &mut self.errors),
            None => self.errors.note("missing", "Field required", str::from_utf8(self.body.text()).unwrap_or_default()),
        };
        self.errors.location.pop();
        value
    }

    /// The 422 that names everything noted.
    #[must_use]
    pub fn refusal(&self) -> Response {
        let body = format!("{{\"detail\":[{}]}}", self.errors.details.join(","));
        Response::new(Status(422), Message::json(body))
    }
}

impl ArgumentErrors {
    fn note<T>(&mut self, kind: &str, message: &str, input: &str) -> Option<T> {
        let location: String = self.location.iter().map(|step| format!(",{step}")).collect();
        self.details.push(format!(
            r#"{{"type":"{kind}","loc":["body"{location}],"msg":"{message}","input":{}}}"#,
            as_python_writes(input)
        ));
        None
    }
}

impl Argument for String {
    fn read(text: &str, errors: &mut ArgumentErrors) -> Option<Self> {
        serde_json::from_str(text).ok().or_else(|| errors.note("string_type", "Input should be a valid string", text))
    }
}

impl Argument for i128 {
    fn read(text: &str, errors: &mut ArgumentErrors) -> Option<Self> {
        const SIZE: &str = "Unable to parse input string as an integer, exceeded maximum size";
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
            // Python has no largest integer; 38 digits are ours.
            Some(b'-' | b'0'..=b'9') => text.parse().ok().or_else(|| errors.note("int_parsing_size", SIZE, text)),
            _ => errors.note("int_type", "Input should be a valid integer", text),
        }
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
}

/// What a tool gives: JSON for the model to read, or a whole answer.
pub trait ToolReply {
    /// The answer.
    ///
    /// # Errors
    /// When it cannot be written as JSON.
    fn into_response(self) -> Result<Response>;
}

impl ToolReply for Response {
    fn into_response(self) -> Result<Response> {
        Ok(self)
    }
}

impl ToolReply for RawObject {
    fn into_response(self) -> Result<Response> {
        Ok(Response::json(self))
    }
}

impl ToolReply for serde_json::Value {
    fn into_response(self) -> Result<Response> {
        Ok(Response::json(self.to_string()))
    }
}

impl<T: ToolReply> ToolReply for Result<T> {
    fn into_response(self) -> Result<Response> {
        self.and_then(T::into_response)
    }
}

/// Writes [`ResourcesServer::call_tool`](super::ResourcesServer::call_tool): a tool's name and its typed arguments stand once.
#[macro_export]
macro_rules! tools {
    (|$this:ident, $cx:ident, $session:ident| $(
        $(#[$doc:meta])*
        $tool:ident ( $($argument:ident : $type:ty),* $(,)? ) => $answer:expr
    ),+ $(,)?) => {
        async fn call_tool(
            &$this,
            $cx: &$crate::CallContext,
            $session: &$crate::SessionId,
            tool: &str,
            arguments: &$crate::RawObject,
        ) -> $crate::Result<$crate::Response> {
            let mut call = $crate::server::Arguments::of(arguments);
            match tool {
                $(
                    stringify!($tool) => {
                        $( let $argument = call.take::<$type>(stringify!($argument)); )*
                        #[allow(irrefutable_let_patterns)]
                        let ($(Some($argument),)*) = ($($argument,)*) else { return Ok(call.refusal()) };
                        $crate::server::ToolReply::into_response($answer)
                    }
                )+
                _ => Err($crate::server::unknown_tool(tool)),
            }
        }
    };
}

/// Digits with an optional sign, single underscores between them, blanks around and `.0` after.
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

fn quote(text: &str) -> String {
    serde_json::to_string(text).unwrap_or_default()
}

/// A JSON text as Python's `json` writes it after reading it: no blanks, integers to the digit, floats by their `repr`.
fn as_python_writes(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let length = match first {
            '"' => string_length(rest),
            '-' | '0'..='9' => {
                rest.find(|c: char| !matches!(c, '0'..='9' | '.' | 'e' | 'E' | '+' | '-')).unwrap_or(rest.len())
            }
            _ => first.len_utf8(),
        };
        let (token, after) = rest.split_at(length);
        match first {
            // A lone surrogate has no text of its own; it stays as it was written.
            '"' => {
                out.push_str(&serde_json::from_str::<String>(token).map_or_else(|_| token.to_owned(), |s| quote(&s)))
            }
            '-' | '0'..='9' => out.push_str(&number_as_python_writes(token)),
            ' ' | '\t' | '\n' | '\r' => {}
            _ => out.push(first),
        }
        rest = after;
    }
    out
}

fn string_length(text: &str) -> usize {
    let mut escaped = false;
    for (at, byte) in text.bytes().enumerate().skip(1) {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b'"' => return at + 1,
            _ => {}
        }
    }
    text.len()
}

/// Shortest digits that read back the same, of two as short and as near the even one; an exponent of at least two digits
/// below 1e-4 and from 1e16 on.
fn number_as_python_writes(token: &str) -> String {
    if !token.contains(['.', 'e', 'E']) {
        return if token == "-0" { "0".into() } else { token.into() };
    }
    let Ok(number) = token.parse::<f64>() else { return token.into() };
    // The digits are serde_json's: the standard library's rounds a tie up, Python's to even.
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
    // Of the first digit.
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

//! The types of the values of a request, as pydantic reads them in its lax mode: a number may be in a string.

use serde_json::Value;

/// The type of a value.
#[derive(Clone, Copy)]
enum Kind {
    Flag,
    Whole,
    Number,
    Text,
    Texts,
    Object,
    TextOrObject,
    /// A string for each key.
    Metadata,
    /// No stream is collected: false.
    NoStream,
}

/// The types of the keys that are checked here. `input`, `tools` and `tool_choice` have checks of their own.
const KINDS: &[(&str, Kind)] = &[
    ("background", Kind::Flag),
    ("conversation", Kind::TextOrObject),
    ("include", Kind::Texts),
    ("instructions", Kind::Text),
    ("max_output_tokens", Kind::Whole),
    ("max_tool_calls", Kind::Whole),
    ("metadata", Kind::Metadata),
    ("model", Kind::Text),
    ("parallel_tool_calls", Kind::Flag),
    ("previous_response_id", Kind::Text),
    ("prompt", Kind::Object),
    ("prompt_cache_key", Kind::Text),
    ("reasoning", Kind::Object),
    ("safety_identifier", Kind::Text),
    ("service_tier", Kind::Text),
    ("store", Kind::Flag),
    ("stream", Kind::NoStream),
    ("stream_options", Kind::Object),
    ("temperature", Kind::Number),
    ("text", Kind::Object),
    ("top_logprobs", Kind::Whole),
    ("top_p", Kind::Number),
    ("truncation", Kind::Text),
    ("user", Kind::Text),
];

/// Decides on a number.
type Accepts = fn(f64) -> bool;

/// The numbers that engines accept; vLLM has no highest temperature, and -1 tokens are no limit for llama.cpp. The schema of the Responses API
/// has no ranges.
const RANGES: [(&str, Accepts, &str); 3] = [
    ("max_output_tokens", |tokens| tokens >= 1.0 || tokens == -1.0, "write 1 or more, or remove it"),
    ("temperature", |temperature| temperature >= 0.0, "write 0 or more, such as 0.7"),
    ("top_p", |mass| (0.0..=1.0).contains(&mass), "write a number from 0 to 1, such as 0.95"),
];

/// Texts that pydantic reads as a boolean, in lower case.
const FLAGS: [&str; 12] = ["0", "1", "f", "false", "n", "no", "off", "on", "t", "true", "y", "yes"];

/// Characters of a value that a message shows.
const SHOWN_CHARS: usize = 60;

/// Checks the type of a key's value, and its range. `null` passes: it means the default.
///
/// # Errors
/// The path below the key, and the problem with its fix.
pub(super) fn check(key: &str, text: &str) -> Result<(), (String, String)> {
    let Some((_, kind)) = KINDS.iter().find(|known| known.0 == key) else { return Ok(()) };
    let Ok(value) = serde_json::from_str::<Value>(text) else { return Ok(()) };
    if value.is_null() {
        return Ok(());
    }
    let (fits, wanted) = match kind {
        Kind::Flag => (is_flag(&value), "write true or false"),
        Kind::Whole => (is_whole(&value), "write a whole number, such as 512"),
        Kind::Number => (is_number(&value), "write a number, such as 0.7"),
        Kind::Text => (value.is_string(), "write a string"),
        Kind::Texts => {
            (value.as_array().is_some_and(|items| items.iter().all(Value::is_string)), "write a list of strings")
        }
        Kind::Object => (value.is_object(), fix_of_object(key)),
        Kind::TextOrObject => (value.is_string() || value.is_object(), "write a string or an object"),
        Kind::NoStream => (value == false, "remove it: a rollout gets the whole response"),
        Kind::Metadata => {
            let Some(members) = value.as_object() else {
                return Err((
                    String::new(),
                    problem(&value, "write an object of strings, such as {\"name\": \"value\"}"),
                ));
            };
            return match members.iter().find(|(_, member)| !member.is_string()) {
                Some((name, member)) => {
                    let quoted = Value::from(member.to_string());
                    let fix = match quoted.to_string().chars().count() <= SHOWN_CHARS {
                        true => format!("write a string: {quoted}"),
                        false => "write a string that holds it".to_owned(),
                    };
                    Err((format!(".{name}"), problem(member, &fix)))
                }
                None => Ok(()),
            };
        }
    };
    if !fits {
        return Err((String::new(), problem(&value, wanted)));
    }
    let range = RANGES.iter().find(|(of, ..)| *of == key);
    match range.filter(|(_, accepts, _)| numeric(&value).is_some_and(|number| !accepts(number))) {
        Some((.., wanted)) => Err((String::new(), problem(&value, wanted))),
        None => Ok(()),
    }
}

/// Returns the text about a value of a wrong type.
pub(super) fn problem(value: &Value, fix: &str) -> String {
    let text = value.to_string();
    let mut shown: String = text.chars().take(SHOWN_CHARS).collect();
    if shown.len() < text.len() {
        shown.push('…');
    }
    let kind = match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    };
    match value {
        Value::Null => format!("is null; {fix}"),
        _ => format!("is {kind}: {shown}; {fix}"),
    }
}

fn fix_of_object(key: &str) -> &'static str {
    match key {
        "reasoning" => "write an object, such as {\"effort\": \"low\"}",
        "text" => "write an object, such as {\"format\": {\"type\": \"text\"}}",
        _ => "write an object",
    }
}

fn is_flag(value: &Value) -> bool {
    match value {
        Value::Bool(_) => true,
        Value::Number(number) => number.as_f64().is_some_and(|number| number == 0.0 || number == 1.0),
        Value::String(text) => FLAGS.contains(&text.to_lowercase().as_str()),
        _ => false,
    }
}

fn is_number(value: &Value) -> bool {
    value.is_number() || numeric(value).is_some()
}

/// Returns the number that pydantic reads; `None` also for one that is too large for a double.
fn numeric(value: &Value) -> Option<f64> {
    match value {
        Value::Bool(flag) => Some(f64::from(u8::from(*flag))),
        Value::Number(number) => number.as_f64(),
        Value::String(text) => number_of(text),
        _ => None,
    }
}

fn is_whole(value: &Value) -> bool {
    match value {
        Value::Bool(_) => true,
        // A number too large for a double is whole.
        Value::Number(number) => number.as_f64().is_none_or(|number| number.fract() == 0.0),
        Value::String(text) => number_of(text).is_some_and(|number| number.fract() == 0.0),
        _ => false,
    }
}

/// Reads a number in a string as Python does: with blanks around it, and `_` between digits.
fn number_of(text: &str) -> Option<f64> {
    let text = text.trim();
    let between_digits = |(at, _): (usize, &str)| {
        let digit = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_digit);
        digit(at.checked_sub(1).and_then(|before| text.as_bytes().get(before))) && digit(text.as_bytes().get(at + 1))
    };
    if !text.match_indices('_').all(between_digits) {
        return None;
    }
    text.replace('_', "").parse().ok()
}

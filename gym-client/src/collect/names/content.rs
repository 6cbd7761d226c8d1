//! The check of the content of a message in a row: the members and the types that people confuse with those of chat completions.

use serde_json::{Map, Value};

use crate::config::nearest_name;

/// The types of content parts in the Responses API, and `input_video`, which engines accept too.
const PARTS: [&str; 5] = ["input_text", "input_image", "input_file", "input_audio", "input_video"];
/// Types of parts in chat completions, with those that they are here.
const OF_CHAT: [(&str, &str); 6] = [
    ("audio", "input_audio"),
    ("file", "input_file"),
    ("image", "input_image"),
    ("image_url", "input_image"),
    ("text", "input_text"),
    ("video_url", "input_video"),
];
const FORM: &str = r#"{"type": "input_text", "text": "…"}"#;

/// Checks a message of a user, the system or a developer: models accept more forms of what they have written. Types that resemble no known
/// one pass, because an engine may have them.
///
/// # Errors
/// The path below the message, and the problem with its fix.
pub(super) fn check(message: &Map<String, Value>) -> Result<(), (String, String)> {
    let parts = match message.get("content") {
        Some(Value::Array(parts)) => parts,
        Some(_) => return Ok(()),
        None => return Err((String::new(), absent(message, "content", r#""content": "…""#))),
    };
    parts.iter().enumerate().try_for_each(|(index, part)| {
        part_of(part).map_err(|(below, problem)| (format!(".content[{index}]{below}"), problem))
    })
}

fn part_of(part: &Value) -> Result<(), (String, String)> {
    let Value::Object(members) = part else { return Err((String::new(), format!("is no object; write {FORM}"))) };
    let kind = match members.get("type") {
        Some(Value::String(kind)) => kind.as_str(),
        Some(other) => return Err((".type".to_owned(), format!("is {other}; write \"input_text\""))),
        None => return Err((String::new(), absent(members, "type", FORM))),
    };
    let of_chat = OF_CHAT.iter().find(|(of_chat, _)| *of_chat == kind).map(|(_, here)| format!("write `{here}`"));
    let near = || nearest_name(kind, PARTS).map(|near| format!("did you mean `{near}`?"));
    match of_chat.or_else(near).filter(|_| !PARTS.contains(&kind)) {
        Some(fix) => Err((".type".to_owned(), format!("is \"{kind}\"; {fix}"))),
        None if kind == "input_text" && !members.contains_key("text") => {
            Err((String::new(), absent(members, "text", FORM)))
        }
        None => Ok(()),
    }
}

/// Returns the problem of a member that is absent, or misspelled.
fn absent(members: &Map<String, Value>, wanted: &str, form: &str) -> String {
    match nearest_name(wanted, members.keys().map(String::as_str)) {
        Some(near) => format!("has no {wanted}; write `{wanted}` for `{near}`"),
        None => format!("has no {wanted}; add it: {form}"),
    }
}

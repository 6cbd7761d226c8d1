//! Writes the merged configuration: as YAML that OmegaConf reads into an equal mapping, and as JSON with masked
//! secrets.

use crate::config::yaml::float::yaml_float;
use crate::config::yaml::node::{Key, Node, Tree};
use crate::config::yaml::parser;

/// The text in the place of a secret.
pub const MASK: &str = "****";

/// Writes YAML that OmegaConf's loader reads into equal values.
pub(crate) fn yaml(root: &Node) -> String {
    let mut out = String::new();
    block(root, 0, &mut out);
    if !out.ends_with('\n') {
        out.push('\n');
    }
    out
}

fn block(node: &Node, indent: usize, out: &mut String) {
    match &node.value {
        Tree::Map(map) if !map.0.is_empty() => {
            for (key, value) in &map.0 {
                out.extend(std::iter::repeat_n(' ', indent));
                out.push_str(&key_text(key));
                out.push(':');
                below(value, indent + 2, out);
            }
        }
        Tree::List(items) if !items.is_empty() => {
            for value in items {
                out.extend(std::iter::repeat_n(' ', indent));
                out.push('-');
                below(value, indent + 2, out);
            }
        }
        _ => out.push_str(&scalar(node)),
    }
}

fn below(value: &Node, indent: usize, out: &mut String) {
    let nested = match &value.value {
        Tree::Map(map) => !map.0.is_empty(),
        Tree::List(items) => !items.is_empty(),
        _ => false,
    };
    if nested {
        out.push('\n');
        block(value, indent, out);
    } else {
        out.push(' ');
        out.push_str(&scalar(value));
        out.push('\n');
    }
}

fn scalar(node: &Node) -> String {
    match &node.value {
        Tree::Null => "null".to_owned(),
        Tree::Bool(flag) => flag.to_string(),
        Tree::Int(int) => int.to_string(),
        Tree::Float(float) => yaml_float(*float),
        Tree::Text(text) => text_scalar(text),
        Tree::List(_) => "[]".to_owned(),
        Tree::Map(_) => "{}".to_owned(),
    }
}

fn key_text(key: &Key) -> String {
    match key {
        Key::Text(text) => text_scalar(text),
        Key::Int(int) => int.to_string(),
        Key::Bool(flag) => flag.to_string(),
        Key::Float(float) => yaml_float(*float),
    }
}

/// Writes a string without quotes if every loader reads it as this string, else in double quotes.
fn text_scalar(text: &str) -> String {
    let plain = text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_' || c == '/')
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-' | b'.' | b'/'))
        && matches!(parser::resolve(text), Tree::Text(_))
        && !matches!(text, "y" | "Y" | "n" | "N");
    if plain {
        return text.to_owned();
    }
    let mut out = String::from("\"");
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\t' => out.push_str("\\t"),
            '\r' => out.push_str("\\r"),
            // Characters that YAML readers reject or fold when they are not escaped.
            c if c.is_control()
                || matches!(c, '\u{a0}' | '\u{2028}' | '\u{2029}' | '\u{feff}' | '\u{fffe}' | '\u{ffff}') =>
            {
                out.push_str(&format!("\\u{:04x}", u32::from(c)));
            }
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

/// Returns `true` if the value of this key is a secret.
#[must_use]
pub fn is_secret_key(key: &str) -> bool {
    let key = key.to_lowercase();
    let key = key.strip_suffix('s').unwrap_or(&key);
    ["key", "token", "secret", "password", "passwd", "passphrase", "credential", "header", "authorization"]
        .iter()
        .any(|ending| key.ends_with(ending))
}

/// Replaces the values of secret keys with `****`, in mappings at any depth.
pub fn mask(value: &mut serde_json::Value) {
    use serde_json::Value;
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                if is_secret_key(key) {
                    // `max_output_tokens: 256` is not a secret; a key, password or secret that is a number is one.
                    cover(value, !key.to_lowercase().trim_end_matches('s').ends_with("token"));
                } else {
                    mask(value);
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(mask),
        Value::String(text) => {
            if let Some(masked) = without_password(text) {
                *text = masked;
            }
        }
        _ => {}
    }
}

fn cover(value: &mut serde_json::Value, numbers: bool) {
    use serde_json::Value;
    match value {
        Value::String(text) if text.is_empty() => {}
        Value::String(text) => MASK.clone_into(text),
        Value::Number(_) if numbers => *value = Value::from(MASK),
        Value::Array(items) => items.iter_mut().for_each(|item| cover(item, numbers)),
        Value::Object(map) => map.values_mut().for_each(|item| cover(item, numbers)),
        _ => {}
    }
}

/// Returns `https://user:password@host` without the password.
fn without_password(text: &str) -> Option<String> {
    let (scheme, rest) = text.split_once("://")?;
    let authority = rest.split(['/', '?', '#']).next()?;
    let (login, _) = authority.rsplit_once('@')?;
    let (user, _) = login.split_once(':')?;
    Some(format!("{scheme}://{user}:{MASK}{}", &rest[login.len()..]))
}

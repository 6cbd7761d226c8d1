//! Rows that are JSON and that `serde_json` does not read as values: a lone surrogate in a string, a number beyond a double, two hundred nested
//! lists. Their writers are Python programs and models; a person must be able to look at them all the same.

use gym_core::message::json_string_length;

/// Maximum depth that is kept; `serde_json` reads 127 levels.
const DEPTH_MAX: usize = 100;

/// Returns a text that `serde_json` reads as a value, if `json` is JSON: a lone surrogate becomes U+FFFD, a number beyond a double a string, and
/// what is nested too deeply the string `…`.
pub(super) fn repaired(json: &[u8]) -> String {
    let text = String::from_utf8_lossy(json);
    let (mut out, mut rest, mut depth) = (String::with_capacity(text.len()), &*text, 0_usize);
    while let Some(first) = rest.chars().next() {
        let shown = depth <= DEPTH_MAX;
        let length = match first {
            '"' => {
                let length = json_string_length(rest);
                if shown {
                    push_string(&mut out, &rest[..length]);
                }
                length
            }
            '-' | '0'..='9' => {
                let number = |c: char| c.is_ascii_alphanumeric() || matches!(c, '+' | '-' | '.');
                let length = rest.find(|c| !number(c)).unwrap_or(rest.len());
                let quotes = if rest[..length].parse().is_ok_and(f64::is_finite) { "" } else { "\"" };
                if shown {
                    out.extend([quotes, &rest[..length], quotes]);
                }
                length
            }
            _ => {
                match first {
                    '[' | '{' => depth += 1,
                    ']' | '}' => depth = depth.saturating_sub(1),
                    _ => {}
                }
                if shown && depth > DEPTH_MAX {
                    out.push_str("\"…\"");
                } else if shown {
                    out.push(first);
                }
                first.len_utf8()
            }
        };
        rest = &rest[length..];
    }
    out
}

/// Adds a string in quotes, with U+FFFD for each surrogate that is not one of a pair.
fn push_string(out: &mut String, text: &str) {
    let unit = |at: usize| {
        let digits = text.get(at..at + 6)?.strip_prefix("\\u")?;
        u32::from_str_radix(digits, 16).ok()
    };
    let mut at = 0;
    while let Some(found) = text[at..].find('\\') {
        out.push_str(&text[at..at + found]);
        at += found;
        let length = match unit(at) {
            Some(0xD800..0xDC00) if matches!(unit(at + 6), Some(0xDC00..0xE000)) => 12,
            Some(0xD800..0xE000) => {
                out.push('\u{FFFD}');
                at += 6;
                continue;
            }
            Some(_) => 6,
            None => text[at..].chars().take(2).map(char::len_utf8).sum(),
        };
        out.push_str(&text[at..at + length]);
        at += length;
    }
    out.push_str(&text[at..]);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn what_serde_json_does_not_read_is_replaced() {
        let deep = format!(r#"{{"a":{}1{},"b":2}}"#, "[".repeat(200), "]".repeat(200));
        assert!(serde_json::from_str::<Value>(&deep).is_err());
        let value: Value = serde_json::from_str(&repaired(deep.as_bytes())).unwrap();
        assert_eq!(value["b"], 2);
        assert!(value["a"].to_string().contains('…'));
        for (odd, expected) in [
            (
                r#"["\ud83d","\ud83d\ude00","\ude00x","\\ud83d","\ud83d\ud83d\ude00"]"#,
                json!(["\u{FFFD}", "😀", "\u{FFFD}x", "\\ud83d", "\u{FFFD}😀"]),
            ),
            (r#"[1e400,-1e400,1e40,"1e400"]"#, json!(["1e400", "-1e400", 1e40, "1e400"])),
        ] {
            assert_eq!(serde_json::from_str::<Value>(&repaired(odd.as_bytes())).unwrap(), expected, "{odd}");
        }
        assert_eq!(serde_json::from_str::<Value>(&repaired(b"[\"\xff\"]")).unwrap(), json!(["\u{FFFD}"]));
    }

    proptest! {
        #[test]
        fn no_text_panics_and_what_is_read_stays(text in ".{0,60}", json in "[\\[\\]{}\",:0-9eE.+\\\\ud-]{0,60}") {
            for text in [&text, &json] {
                let repaired = repaired(text.as_bytes());
                if let Ok(value) = serde_json::from_str::<Value>(text) {
                    prop_assert_eq!(serde_json::from_str::<Value>(&repaired).unwrap(), value);
                }
            }
        }
    }
}

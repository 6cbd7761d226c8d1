//! Numbers and truth values of raw JSON, as Python and statistics see them.

/// Returns `true` if Python would treat the JSON value as true: all but `null`, `false`, zero and empty values.
#[must_use]
pub fn is_truthy(raw: &str) -> bool {
    match raw.as_bytes().first() {
        None | Some(b'n' | b'f') => false,
        Some(b'"') => raw != "\"\"",
        Some(b'[' | b'{') => raw[1..raw.len() - 1].bytes().any(|byte| !byte.is_ascii_whitespace()),
        Some(b't') => true,
        Some(_) => Number::parse(raw).is_none_or(|number| number.value != 0.0),
    }
}

/// A JSON number or boolean as statistics see it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Number {
    /// Its value; `true` is 1.
    pub value: f64,
    /// Whether Python would hold it as an `int`.
    pub integer: bool,
}

impl Number {
    /// The number in `raw`, or `None` if `raw` is neither a number nor a boolean.
    #[must_use]
    pub fn parse(raw: &str) -> Option<Self> {
        match raw.as_bytes().first()? {
            b't' => Some(Self { value: 1.0, integer: true }),
            b'f' => Some(Self { value: 0.0, integer: true }),
            b'-' | b'0'..=b'9' => {
                let integer = !raw.bytes().any(|byte| matches!(byte, b'.' | b'e' | b'E'));
                raw.parse().ok().map(|value| Self { value, integer })
            }
            _ => None,
        }
    }

    /// The raw text to write for this number: booleans become 1 and 0.
    #[must_use]
    pub fn text(raw: &str) -> Option<&str> {
        Self::parse(raw)?;
        Some(match raw {
            "true" => "1",
            "false" => "0",
            other => other,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn truth_is_pythons() {
        for raw in ["null", "false", "0", "-0.0", "0e5", "\"\"", "[]", "{ }"] {
            assert!(!is_truthy(raw), "{raw}");
        }
        for raw in ["true", "1", "-0.5", "\"0\"", "[0]", "{\"a\":0}"] {
            assert!(is_truthy(raw), "{raw}");
        }
    }
}

//! The fields of a JSON object, in order, with unparsed values.
//!
//! Statistics and the collector read a handful of keys of rows that may be megabytes, and skip everything else. Values
//! stay slices of the row's own text, so a caller can splice them bit for bit.
//!
//! Three properties distinguish these fields from [`RawObject`](crate::RawObject), which is for messages. They borrow
//! from a line in a buffer that the next line reuses, while a raw object owns its text. They check the whole grammar,
//! because the text comes from a user's file or is written to one, while a raw object leaves training arrays unchecked.
//! And a repeated key keeps its first position, as in the statistics of NeMo Gym.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

/// The top-level fields of one JSON object, in the order of their first appearance; of a repeated key the last value
/// counts, as in every common JSON parser.
#[derive(Clone, Debug, Default)]
pub struct JsonFields<'a> {
    fields: Vec<(Cow<'a, str>, &'a str)>,
    /// Position by key, for more than [`SCANNED_MAX`] fields; a scan is faster for few fields, and quadratic for many.
    positions: HashMap<Cow<'a, str>, usize>,
}

/// Up to this number of fields, a key is found by a scan.
const SCANNED_MAX: usize = 32;

impl<'a> JsonFields<'a> {
    /// Reads the object in `text`; the error names the cause and the column.
    pub fn parse(text: &'a str) -> Result<Self, serde_json::Error> {
        serde_json::from_str(text)
    }

    /// The raw text of the value of `key`.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&'a str> {
        self.position(key).map(|position| self.fields[position].1)
    }

    fn position(&self, key: &str) -> Option<usize> {
        if self.fields.len() <= SCANNED_MAX {
            self.fields.iter().position(|(name, _)| name == key)
        } else {
            self.positions.get(key).copied()
        }
    }

    /// Key and raw value of each field, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &'a str)> {
        self.fields.iter().map(|(name, value)| (name.as_ref(), *value))
    }

    /// Sets `key` to `value` at its position, or appends it, as a Python dict does.
    pub fn set(&mut self, key: impl Into<Cow<'a, str>>, value: &'a str) {
        let key = key.into();
        if let Some(position) = self.position(&key) {
            self.fields[position].1 = value;
            return;
        }
        self.fields.push((key, value));
        match self.fields.len() - 1 {
            SCANNED_MAX => {
                self.positions =
                    self.fields.iter().enumerate().map(|(position, (key, _))| (key.clone(), position)).collect();
            }
            position if position > SCANNED_MAX => {
                self.positions.insert(self.fields[position].0.clone(), position);
            }
            _ => {}
        }
    }

    /// Number of fields.
    #[must_use]
    pub fn len(&self) -> usize {
        self.fields.len()
    }

    /// Returns `true` if the object is `{}`.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.fields.is_empty()
    }
}

struct Key<'a>(Cow<'a, str>);

impl<'de> Deserialize<'de> for Key<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Text;
        impl<'de> Visitor<'de> for Text {
            type Value = Key<'de>;
            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a key")
            }
            fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Key<'de>, E> {
                Ok(Key(Cow::Borrowed(text)))
            }
            fn visit_str<E>(self, text: &str) -> Result<Key<'de>, E> {
                Ok(Key(Cow::Owned(text.to_owned())))
            }
        }
        deserializer.deserialize_str(Text)
    }
}

impl<'de> Deserialize<'de> for JsonFields<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Object;
        impl<'de> Visitor<'de> for Object {
            type Value = JsonFields<'de>;
            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a JSON object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<JsonFields<'de>, A::Error> {
                let mut found = JsonFields::default();
                while let Some(Key(key)) = map.next_key()? {
                    let value: &'de RawValue = map.next_value()?;
                    found.set(key, value.get());
                }
                Ok(found)
            }
        }
        deserializer.deserialize_map(Object)
    }
}

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
    fn a_repeated_key_keeps_its_first_place_and_its_last_value() {
        let members = JsonFields::parse(r#" {"a":1,"b":[1 , 2],"\u0061":2E5} "#).unwrap();
        let seen: Vec<_> = members.iter().collect();
        assert_eq!(seen, [("a", "2E5"), ("b", "[1 , 2]")]);
    }

    #[test]
    fn many_members_are_found_as_few_are() {
        let text: String = (0..200).map(|n| format!(r#""k{}":{n},"#, n % 150)).collect();
        let text = format!("{{{}}}", text.trim_end_matches(','));
        let members = JsonFields::parse(&text).unwrap();
        assert_eq!(members.len(), 150);
        for n in 0..150 {
            let last = if n < 50 { n + 150 } else { n };
            assert_eq!(members.get(&format!("k{n}")), Some(last.to_string().as_str()));
        }
        assert_eq!(members.get("k150"), None);
    }

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

//! A JSON object's members as they came: unparsed values, in order, with their place in the text.
//!
//! Statistics and the collector look at a handful of keys of rows that may be megabytes; everything else is skipped over,
//! never built. Values stay slices of the row's own text, so a caller can splice them bit for bit.
//!
//! Not a [`RawObject`](crate::RawObject), which is for messages. Members are borrowed from a line in a buffer that the next line
//! reuses, where a raw object owns its text. They are read by the whole grammar, because what is read here is a user's file or is
//! written to one, where a raw object leaves training arrays unread. And a repeated key keeps its first place, which is the order
//! in which NeMo Gym writes its statistics.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

/// The top-level members of one JSON object, in the order of their first appearance; of a repeated key the last value
/// counts, as in every common JSON parser.
#[derive(Clone, Debug, Default)]
pub struct Members<'a> {
    members: Vec<(Cow<'a, str>, &'a str)>,
    /// Place by key, once there are many; a scan is faster for few, and quadratic for a hostile many.
    places: HashMap<Cow<'a, str>, usize>,
}

/// Up to so many members are scanned.
const SCANNED_MAX: usize = 32;

impl<'a> Members<'a> {
    /// Reads the object in `text`; the error says what is wrong and at which column.
    pub fn parse(text: &'a str) -> Result<Self, serde_json::Error> {
        serde_json::from_str(text)
    }

    /// The raw text of the value of `key`.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&'a str> {
        self.place(key).map(|place| self.members[place].1)
    }

    fn place(&self, key: &str) -> Option<usize> {
        if self.members.len() <= SCANNED_MAX {
            self.members.iter().position(|(name, _)| name == key)
        } else {
            self.places.get(key).copied()
        }
    }

    /// Key and raw value of each member, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &'a str)> {
        self.members.iter().map(|(name, value)| (name.as_ref(), *value))
    }

    /// Sets `key` to `value` where it stands, or appends it, as a Python dict does.
    pub fn set(&mut self, key: impl Into<Cow<'a, str>>, value: &'a str) {
        let key = key.into();
        if let Some(place) = self.place(&key) {
            self.members[place].1 = value;
            return;
        }
        self.members.push((key, value));
        match self.members.len() - 1 {
            SCANNED_MAX => {
                self.places = self.members.iter().enumerate().map(|(place, (key, _))| (key.clone(), place)).collect();
            }
            place if place > SCANNED_MAX => {
                self.places.insert(self.members[place].0.clone(), place);
            }
            _ => {}
        }
    }

    /// How many members there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.members.len()
    }

    /// Whether the object is `{}`.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
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

impl<'de> Deserialize<'de> for Members<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Object;
        impl<'de> Visitor<'de> for Object {
            type Value = Members<'de>;
            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a JSON object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Members<'de>, A::Error> {
                let mut found = Members::default();
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

/// Whether Python would call the JSON value true: everything but `null`, `false`, zero and the empty ones.
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
        let members = Members::parse(r#" {"a":1,"b":[1 , 2],"\u0061":2E5} "#).unwrap();
        let seen: Vec<_> = members.iter().collect();
        assert_eq!(seen, [("a", "2E5"), ("b", "[1 , 2]")]);
    }

    #[test]
    fn many_members_are_found_as_few_are() {
        let text: String = (0..200).map(|n| format!(r#""k{}":{n},"#, n % 150)).collect();
        let text = format!("{{{}}}", text.trim_end_matches(','));
        let members = Members::parse(&text).unwrap();
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

//! Fields of a JSON object that borrow from a line, in order, with unparsed values.
//!
//! Statistics and the collector read a few keys of rows that may be megabytes, and skip everything else. Values stay slices of
//! the row's own text, so a caller can splice them bit for bit.
//!
//! [`RawObject`](crate::RawObject) owns its text; these fields borrow from a line in a buffer that the next line reuses. Both
//! come from the same index of the text. Two rules differ, because the text comes from a user's file or is written to one. The
//! whole grammar is checked, training arrays included. A repeated key keeps its first position, as in the statistics of NeMo Gym.

use std::borrow::Cow;
use std::collections::HashMap;

use super::index;
use super::scan::{Field, Key};

/// The top-level fields of one JSON object, in the order of their first appearance. The last value of a repeated key is used, as
/// in every common JSON parser.
#[derive(Clone, Debug, Default)]
pub struct JsonFields<'a> {
    fields: Vec<(Cow<'a, str>, &'a str)>,
    /// Position by key, for more than [`SCANNED_MAX`] fields; a scan is faster for few fields, and quadratic for many.
    positions: HashMap<Cow<'a, str>, usize>,
}

/// Up to this number of fields, a key is found by a scan.
const SCANNED_MAX: usize = 32;

impl<'a> JsonFields<'a> {
    /// Indexes the object in `text`.
    ///
    /// # Errors
    /// The error of the parser, with the cause and the column, if the text is not one JSON object.
    pub fn parse(text: &'a str) -> Result<Self, serde_json::Error> {
        let mut found = Self::default();
        for Field { key, value } in index::members(text.as_bytes())? {
            let key = match key {
                Key::Plain(range) => Cow::Borrowed(&text[range]),
                Key::Decoded(key) => Cow::Owned(key.into()),
            };
            found.set(key, &text[value]);
        }
        Ok(found)
    }

    /// Returns the raw text of the value of `key`.
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

    /// Iterates over the key and raw value of each field, in order.
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

    /// Returns the number of fields.
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
}

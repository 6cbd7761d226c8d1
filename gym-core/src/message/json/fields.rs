//! Fields of a JSON object that borrow from a line, in order, with unparsed values.
//!
//! Statistics and the collector read a few keys of rows that may be megabytes, and skip everything else. Values stay slices of
//! the row's own text, so a caller can splice them bit for bit.
//!
//! [`RawObject`](crate::RawObject) owns its text; these fields borrow from a line in a buffer that the next line reuses. Both
//! come from the same index of the text. Two rules differ, because the text comes from a user's file or is written to one. The
//! whole grammar is checked, training arrays included. A repeated key keeps its first position, as in the statistics of NeMo Gym.
//!
//! [`RawObject::edit`](crate::RawObject::edit) writes a rope that shares large parts, and its index. A line that is copied into a reused buffer
//! needs neither, so [`FieldEdit`] has a writer of its own: one loop for both outputs would be longer than the two.

use std::borrow::Cow;
use std::collections::HashMap;

use super::index;
use super::scan::{Field, Key, push_json_string};

/// The top-level fields of one JSON object, in the order of their first appearance. The last value of a repeated key is used, as
/// in every common JSON parser.
#[derive(Clone, Debug)]
pub struct JsonFields<'a> {
    text: &'a str,
    fields: Vec<(Cow<'a, str>, &'a str)>,
    /// Position by key, for more than [`SCANNED_MAX`] fields; a scan is faster for few fields, and quadratic for many.
    positions: HashMap<Cow<'a, str>, usize>,
}

/// Up to this number of fields, a key is found by a scan.
const SCANNED_MAX: usize = 32;

impl Default for JsonFields<'_> {
    fn default() -> Self {
        Self { text: "{}", fields: Vec::new(), positions: HashMap::new() }
    }
}

impl<'a> JsonFields<'a> {
    /// Indexes the object in `text`.
    ///
    /// # Errors
    /// The error of the parser, with the cause and the column, if the text is not one JSON object.
    pub fn parse(text: &'a str) -> Result<Self, serde_json::Error> {
        let mut found = Self { text, ..Self::default() };
        for Field { key, value } in index::members(text.as_bytes())? {
            let key = match key {
                Key::Plain(range) => Cow::Borrowed(&text[range]),
                Key::Decoded(key) => Cow::Owned(key.into()),
            };
            found.add(key, &text[value]);
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

    /// Starts an edit, which replaces values in place and adds fields at the end.
    pub fn edit(&self) -> FieldEdit<'_> {
        FieldEdit { fields: self, changes: Vec::new() }
    }

    /// Returns the text of the object with one field set.
    #[must_use]
    pub fn with(&self, key: &str, value: &str) -> String {
        let mut edit = self.edit();
        edit.set(key, value);
        edit.to_text()
    }

    fn add(&mut self, key: Cow<'a, str>, value: &'a str) {
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

/// Changes to the fields of an object that are not written yet, in the order in which Python would set them in a dict.
#[derive(Debug)]
#[must_use = "an edit does nothing until it is written"]
pub struct FieldEdit<'a> {
    fields: &'a JsonFields<'a>,
    changes: Vec<(&'a str, &'a str)>,
}

impl<'a> FieldEdit<'a> {
    /// Sets a key to a JSON text: in place if the object has the key, else at the end.
    pub fn set(&mut self, key: &'a str, value: &'a str) {
        match self.changes.iter_mut().find(|(other, _)| *other == key) {
            Some(change) => change.1 = value,
            None => self.changes.push((key, value)),
        }
    }

    /// Appends the changed text. Bytes of other fields, and of their spacing, are unchanged.
    pub fn push_to(&self, into: &mut String) {
        let text = self.fields.text;
        let (mut replaced, mut added) = (Vec::new(), Vec::new());
        for (key, value) in &self.changes {
            match self.fields.get(key) {
                // Both slices lie in the same string, so the difference of the pointers is the value's offset.
                Some(old) => replaced.push((old.as_ptr() as usize - text.as_ptr() as usize, old.len(), value)),
                None => added.push((key, value)),
            }
        }
        replaced.sort_unstable_by_key(|(start, ..)| *start);
        let end = text.rfind('}').map_or(text.len(), |brace| text[..brace].trim_end().len());
        let mut done = 0;
        for (start, length, value) in replaced {
            into.push_str(&text[done..start]);
            into.push_str(value);
            done = start + length;
        }
        into.push_str(&text[done..end]);
        let mut separator = if self.fields.is_empty() { "" } else { "," };
        for (key, value) in added {
            into.push_str(separator);
            push_json_string(into, key);
            into.push(':');
            into.push_str(value);
            separator = ",";
        }
        into.push('}');
    }

    /// Returns the changed text.
    #[must_use]
    pub fn to_text(&self) -> String {
        let mut text = String::with_capacity(self.fields.text.len() + 64);
        self.push_to(&mut text);
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn edited(text: &str, changes: &[(&str, &str)]) -> String {
        let fields = JsonFields::parse(text).unwrap();
        let mut edit = fields.edit();
        for (key, value) in changes {
            edit.set(key, value);
        }
        edit.to_text()
    }

    #[test]
    fn untouched_text_stays_bit_for_bit() {
        let text = r#"{ "n" : 1E5, "a":12345678901234567890123 ,"u":"\u00e9", "b":{"c":[ ]} }"#;
        assert_eq!(
            edited(text, &[("a", "1"), ("z", "2"), ("z", "3")]),
            r#"{ "n" : 1E5, "a":1 ,"u":"\u00e9", "b":{"c":[ ]},"z":3}"#
        );
        assert_eq!(edited("{ }", &[("z", "2"), ("y", "[]")]), r#"{"z":2,"y":[]}"#);
        assert_eq!(JsonFields::default().with("a", "1"), r#"{"a":1}"#);
    }

    #[test]
    fn of_a_repeated_key_the_value_that_counts_is_replaced() {
        assert_eq!(edited(r#"{"a":1,"b":2,"a":3}"#, &[("a", "9"), ("b", "8")]), r#"{"a":1,"b":8,"a":9}"#);
    }

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

//! The positions of the values of an object's top-level keys in its text.

use std::fmt;
use std::ops::Range;

use serde::de::{DeserializeSeed, Deserializer as _, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::scan::{self, Field, Key};
use crate::base::error::Error;

/// The error for a text that is not a JSON object: the cause and the position.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message} at byte {offset}")]
pub struct JsonError {
    /// Byte position in the text.
    pub offset: usize,
    /// The cause.
    pub message: String,
}

impl From<JsonError> for Error {
    fn from(error: JsonError) -> Self {
        Self::invalid(format!("not a JSON object: {error}"))
    }
}

/// The top-level keys of a JSON object; of repeated keys, only the last.
#[derive(Default)]
pub(super) struct Index {
    pub(super) fields: Vec<Field>,
    pub(super) shadowed: bool,
}

pub(super) fn index(text: &[u8]) -> Result<Index, JsonError> {
    let mut fields = members(text).map_err(|error| json_error(text, &error))?;
    let members = fields.len();
    drop_shadowed(text, &mut fields);
    Ok(Index { shadowed: fields.len() < members, fields })
}

/// Returns the members of an object in the order of the text, repeated keys included. The grammar of the whole text is checked.
pub(super) fn members(text: &[u8]) -> Result<Vec<Field>, serde_json::Error> {
    scan::members(text).map_or_else(|| members_parsed(text), Ok)
}

/// Returns the members from the general parser, for texts that the scan does not accept.
pub(super) fn members_parsed(text: &[u8]) -> Result<Vec<Field>, serde_json::Error> {
    let mut deserializer = serde_json::Deserializer::from_slice(text);
    let fields = deserializer.deserialize_map(Parser { base: text.as_ptr() as usize })?;
    deserializer.end().map(|()| fields)
}

pub(super) fn json_error(text: &[u8], error: &serde_json::Error) -> JsonError {
    let line_start = text
        .iter()
        .enumerate()
        .filter(|(_, byte)| **byte == b'\n')
        .map(|(at, _)| at + 1)
        .nth(error.line().wrapping_sub(2));
    let offset = if error.line() <= 1 { 0 } else { line_start.unwrap_or(0) } + error.column().saturating_sub(1);
    let full = error.to_string();
    let message = full.split(" at line ").next().unwrap_or(&full).to_owned();
    JsonError { offset: offset.min(text.len()), message }
}

struct Parser {
    base: usize,
}

impl Parser {
    /// Returns the position of a borrowed part of the text.
    fn range(&self, part: &str) -> Range<usize> {
        let start = part.as_ptr() as usize - self.base;
        start..start + part.len()
    }
}

impl<'de> Visitor<'de> for Parser {
    type Value = Vec<Field>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Vec<Field>, A::Error> {
        let mut fields = Vec::with_capacity(16);
        while let Some(key) = map.next_key_seed(KeySeed(&self))? {
            let value: &'de RawValue = map.next_value()?;
            fields.push(Field { key, value: self.range(value.get()) });
        }
        Ok(fields)
    }
}

/// Drops all but the last of repeated keys, as Python's `json` does.
fn drop_shadowed(text: &[u8], fields: &mut Vec<Field>) {
    fn key<'a>(text: &'a [u8], field: &'a Field) -> &'a [u8] {
        field.key.bytes(text)
    }
    // Rows have a dozen keys: comparing all pairs costs less than the memory for a sort.
    if fields.len() <= 24 {
        let is_new = |at: usize| fields[..at].iter().all(|before| key(text, before) != key(text, &fields[at]));
        if (1..fields.len()).all(is_new) {
            return;
        }
    }
    // A sort, so that a hostile object of a million keys costs n log n.
    let mut order: Vec<usize> = (0..fields.len()).collect();
    order.sort_by(|a, b| key(text, &fields[*a]).cmp(key(text, &fields[*b])).then(a.cmp(b)));
    let shadowed: Vec<usize> = order
        .windows(2)
        .filter(|pair| key(text, &fields[pair[0]]) == key(text, &fields[pair[1]]))
        .map(|pair| pair[0])
        .collect();
    if !shadowed.is_empty() {
        let mut at = 0;
        let shadowed: std::collections::BTreeSet<usize> = shadowed.into_iter().collect();
        fields.retain(|_| {
            at += 1;
            !shadowed.contains(&(at - 1))
        });
    }
}

struct KeySeed<'a>(&'a Parser);

impl<'de> DeserializeSeed<'de> for KeySeed<'_> {
    type Value = Key;

    fn deserialize<D: serde::Deserializer<'de>>(self, deserializer: D) -> Result<Key, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl<'de> Visitor<'de> for KeySeed<'_> {
    type Value = Key;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_borrowed_str<E>(self, key: &'de str) -> Result<Key, E> {
        Ok(Key::Plain(self.0.range(key)))
    }

    fn visit_str<E>(self, key: &str) -> Result<Key, E> {
        Ok(Key::Decoded(key.into()))
    }
}

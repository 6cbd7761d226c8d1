//! A JSON object as it came. What nobody touches stays as it was, bit for bit.
//!
//! Rollouts carry 23-digit integers, `1E5`, unknown fields and megabytes of token ids. Parsing them into values and printing
//! them again loses the first two and costs milliseconds per megabyte; so a [`RawObject`] keeps the text and an index of its
//! top-level keys. One reads what one names ([`RawObject::view`]) and changes what one names ([`RawObject::edit`]).

mod edit;
mod hollow;
mod scan;
mod view;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use serde::de::{DeserializeOwned, DeserializeSeed, Deserializer as _, MapAccess, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::error::{Error, Result};
use hollow::Hollow;

pub use edit::Edit;

/// A JSON object as it came: its text, and where each top-level key's value lies in it.
///
/// ```
/// use gym_core::RawObject;
/// let row = RawObject::parse(r#"{"n": 1E5, "id": 12345678901234567890123, "x": null}"#)?;
/// let scored = row.edit().set("reward", "1.0").to_rope().to_bytes();
/// assert_eq!(scored, r#"{"n": 1E5, "id": 12345678901234567890123, "x": null,"reward":1.0}"#);
/// # Ok::<(), gym_core::JsonError>(())
/// ```
///
/// Cheap to clone: clones share text and index. In a [`Rope`](crate::Rope) it keeps its index, so whoever gets the rope in
/// memory need not parse it again.
#[derive(Clone)]
pub struct RawObject {
    text: Bytes,
    hollow: Option<Arc<Hollow>>,
    fields: Arc<[Field]>,
    /// Whether the text has values that do not count, because their key comes again.
    shadowed: bool,
}

/// A top-level key and where its value is; ranges are positions in the skeleton if there is one, else in the text.
#[derive(Clone, Debug, PartialEq)]
struct Field {
    key: Key,
    value: Range<usize>,
}

#[derive(Clone, Debug, PartialEq)]
enum Key {
    /// Without escapes: a range of the skeleton.
    Plain(Range<usize>),
    Decoded(Box<str>),
}

impl Key {
    /// Its UTF-8. To compare keys is what is done most, and needs no look at whether it is one.
    fn bytes<'a>(&'a self, indexed: &'a [u8]) -> &'a [u8] {
        match self {
            Self::Plain(range) => &indexed[range.clone()],
            Self::Decoded(key) => key.as_bytes(),
        }
    }

    /// The same key in a text where what was at `from` is at `to`.
    fn moved(&self, from: usize, to: usize) -> Self {
        match self {
            // Wrapping, because in a large text, whose positions nobody uses, they may be anything.
            Self::Plain(range) => {
                let moved = |at: usize| at.wrapping_sub(from).wrapping_add(to);
                Self::Plain(moved(range.start)..moved(range.end))
            }
            Self::Decoded(key) => Self::Decoded(key.clone()),
        }
    }
}

/// Why a text is not the JSON object that was expected, and where.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message} at byte {offset}")]
pub struct JsonError {
    /// Byte position in the text.
    pub offset: usize,
    /// What was expected or found.
    pub message: String,
}

impl From<JsonError> for Error {
    fn from(error: JsonError) -> Self {
        Self::invalid(format!("not a JSON object: {error}"))
    }
}

impl RawObject {
    /// Indexes the top-level keys of a JSON object. Arrays of token ids and log-probabilities in a large text are checked
    /// for their alphabet only; their grammar is checked when somebody reads them.
    ///
    /// # Errors
    /// When the text is not one JSON object.
    pub fn parse(text: impl Into<Bytes>) -> Result<Self, JsonError> {
        let text = text.into();
        if let Some(hollow) = Hollow::of(&text)
            && let Ok(index) = index(hollow.skeleton())
        {
            return Ok(Self::new(text, Some(hollow), index));
        }
        let index = index(&text)?;
        Ok(Self::new(text, None, index))
    }

    fn new(text: Bytes, hollow: Option<Hollow>, index: Index) -> Self {
        Self { text, hollow: hollow.map(Arc::new), fields: index.fields.into(), shadowed: index.shadowed }
    }

    /// The object that a value serialises to.
    ///
    /// # Errors
    /// When the value is not one that JSON can hold as an object.
    pub fn from_value(value: &impl Serialize) -> Result<Self> {
        let text = serde_json::to_vec(value).map_err(|error| Error::internal("cannot serialise").caused_by(error))?;
        Ok(Self::parse(text)?)
    }

    /// Checks the grammar of what [`RawObject::parse`] checked for its alphabet only.
    ///
    /// # Errors
    /// When a training array is not JSON.
    pub fn check(&self) -> Result<(), JsonError> {
        if self.hollow.is_none() {
            return Ok(());
        }
        serde_json::from_slice::<serde::de::IgnoredAny>(&self.text)
            .map(drop)
            .map_err(|error| json_error(&self.text, &error))
    }

    /// `{}`.
    #[must_use]
    pub fn empty() -> Self {
        Self::new(Bytes::from_static(b"{}"), None, Index::default())
    }

    /// The text as it came.
    #[must_use]
    pub fn text(&self) -> &Bytes {
        &self.text
    }

    /// The text as it came.
    #[must_use]
    pub fn into_text(self) -> Bytes {
        self.text
    }

    /// The top-level keys, in order.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.fields.iter().map(|field| self.key(field))
    }

    /// Whether the key is there.
    #[must_use]
    pub fn contains(&self, key: &str) -> bool {
        self.find(key).is_some()
    }

    /// The value's own text; the last of equal keys.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<Bytes> {
        self.find(key).map(|field| self.text.slice(self.original(&field.value)))
    }

    /// The value of a key, read as `T`; `None` when the key is absent.
    ///
    /// # Errors
    /// `InvalidArgument` naming the key when the value is not a `T`.
    pub fn get_as<T: DeserializeOwned>(&self, key: &str) -> Result<Option<T>> {
        let Some(text) = self.get(key) else { return Ok(None) };
        serde_json::from_slice(&text)
            .map(Some)
            .map_err(|error| Error::invalid(format!("`{key}` cannot be read")).caused_by(error))
    }

    /// The object under a key, sharing this one's text; `None` when the key is absent.
    ///
    /// # Errors
    /// When the value is not an object.
    pub fn get_object(&self, key: &str) -> Result<Option<Self>, JsonError> {
        let Some(field) = self.find(key) else { return Ok(None) };
        let original = self.original(&field.value);
        let text = self.text.slice(original.clone());
        let hollow = self.hollow.as_ref().map(|hollow| hollow.slice(&field.value));
        let index = index(hollow.as_ref().map_or(&text, |hollow| hollow.skeleton()))
            .map_err(|error| JsonError { offset: original.start, ..error })?;
        Ok(Some(Self::new(text, hollow, index)))
    }

    /// Reads what `T` names; other keys cost nothing.
    ///
    /// # Errors
    /// `InvalidArgument` when a key that `T` names is missing or has another shape.
    pub fn view<T: DeserializeOwned>(&self) -> Result<T> {
        view::view(self).map_err(|error| Error::invalid("the object cannot be read").caused_by(error))
    }

    /// Like [`RawObject::view`], for readers who do not want the training arrays: those of a large text are seen as empty
    /// lists, which makes reading a megabyte cost what its few kilobytes of prose cost.
    ///
    /// # Errors
    /// As [`RawObject::view`].
    pub fn outline<T: DeserializeOwned>(&self) -> Result<T> {
        let wrong = || Error::invalid("the object cannot be read");
        // Checked as one text: of bytes, the parser would check each string.
        let text = std::str::from_utf8(self.indexed()).map_err(|error| wrong().caused_by(error))?;
        serde_json::from_str(text).map_err(|error| wrong().caused_by(error))
    }

    /// The same text with some keys replaced in place, added at the end, or removed.
    pub fn edit(&self) -> Edit<'_> {
        Edit::new(self)
    }

    fn find(&self, key: &str) -> Option<&Field> {
        let indexed = self.indexed();
        self.fields.iter().find(|field| field.key.bytes(indexed) == key.as_bytes())
    }

    fn key<'a>(&'a self, field: &'a Field) -> &'a str {
        std::str::from_utf8(field.key.bytes(self.indexed())).unwrap_or_default()
    }

    /// What the index points into.
    fn indexed(&self) -> &Bytes {
        self.hollow.as_ref().map_or(&self.text, |hollow| hollow.skeleton())
    }

    fn original(&self, range: &Range<usize>) -> Range<usize> {
        match &self.hollow {
            Some(hollow) => hollow.original(range.start)..hollow.original(range.end),
            None => range.clone(),
        }
    }
}

impl Default for RawObject {
    fn default() -> Self {
        Self::empty()
    }
}

impl fmt::Debug for RawObject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = &self.text[..self.text.len().min(200)];
        write!(f, "RawObject({} bytes: {})", self.text.len(), String::from_utf8_lossy(shown))
    }
}

impl PartialEq for RawObject {
    fn eq(&self, other: &Self) -> bool {
        self.text == other.text
    }
}

impl Serialize for RawObject {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let text = std::str::from_utf8(&self.text).map_err(serde::ser::Error::custom)?;
        let raw: &RawValue = serde_json::from_str(text).map_err(serde::ser::Error::custom)?;
        raw.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for RawObject {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let raw = Box::<RawValue>::deserialize(deserializer)?;
        Self::parse(String::from(Box::<str>::from(raw))).map_err(serde::de::Error::custom)
    }
}

/// The top-level keys of a JSON object; of equal keys only the last.
#[derive(Default)]
struct Index {
    fields: Vec<Field>,
    shadowed: bool,
}

fn index(text: &[u8]) -> Result<Index, JsonError> {
    let mut fields = match scan::members(text) {
        Some(fields) => fields,
        None => members_parsed(text)?,
    };
    let members = fields.len();
    drop_shadowed(text, &mut fields);
    Ok(Index { shadowed: fields.len() < members, fields })
}

/// The members by the general parser, for what the scan leaves to it.
fn members_parsed(text: &[u8]) -> Result<Vec<Field>, JsonError> {
    let mut deserializer = serde_json::Deserializer::from_slice(text);
    let fields = deserializer
        .deserialize_map(Parser { base: text.as_ptr() as usize })
        .and_then(|fields| deserializer.end().map(|()| fields))
        .map_err(|error| json_error(text, &error))?;
    Ok(fields)
}

fn json_error(text: &[u8], error: &serde_json::Error) -> JsonError {
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
    /// Where a borrowed part of the text lies in it.
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

/// Appends a text as a JSON string.
pub fn push_json_string(into: &mut String, text: &str) {
    // Nearly every key is its own JSON.
    if scan::is_plain(text) {
        into.push('"');
        into.push_str(text);
        into.push('"');
    } else {
        into.push_str(&serde_json::Value::from(text).to_string());
    }
}

/// Of equal keys the last counts, as in Python's `json`.
fn drop_shadowed(text: &[u8], fields: &mut Vec<Field>) {
    fn key<'a>(text: &'a [u8], field: &'a Field) -> &'a [u8] {
        field.key.bytes(text)
    }
    // Rows have a dozen keys: comparing each with each costs less than the memory for a sort.
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

#[cfg(test)]
mod tests;

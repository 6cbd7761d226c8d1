//! A JSON object in its original text, bit for bit.
//!
//! Rollouts contain 23-digit integers, `1E5`, unknown fields and megabytes of token ids. Parsing them into values and printing the
//! values loses the first two and costs milliseconds per megabyte. A [`RawObject`] therefore keeps the text and an index of its
//! top-level keys. [`RawObject::view`] reads named keys, and [`RawObject::edit`] changes named keys.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::elided::ElidedJson;
use super::index::{Index, JsonError, index, json_error};
use super::scan::Field;
use crate::base::error::{Error, Result};

/// A JSON object: its text, and the position of the value of each top-level key.
///
/// ```
/// use gym_core::RawObject;
/// let row = RawObject::parse(r#"{"n": 1E5, "id": 12345678901234567890123, "x": null}"#)?;
/// let scored = row.edit().set("reward", "1.0").to_rope().to_bytes();
/// assert_eq!(scored, r#"{"n": 1E5, "id": 12345678901234567890123, "x": null,"reward":1.0}"#);
/// # Ok::<(), gym_core::message::JsonError>(())
/// ```
///
/// Cheap to clone: clones share text and index, and are as small as a pointer. A [`Rope`](crate::Rope) of an object keeps the index, so a
/// receiver in the same process does not parse it again.
#[derive(Clone)]
pub struct RawObject(Arc<IndexedText>);

/// The text of an object and its index. Shared as a whole, because a rollout that waits for its model has a dozen clones of its objects.
struct IndexedText {
    text: Bytes,
    elided: Option<Box<ElidedJson>>,
    fields: Box<[Field]>,
    shadowed: bool,
}

impl RawObject {
    /// Indexes the top-level keys of a JSON object. Arrays of token ids and log-probabilities in a large text are checked
    /// for their alphabet only; their grammar is checked when they are read.
    ///
    /// # Errors
    /// If the text is not one JSON object.
    pub fn parse(text: impl Into<Bytes>) -> Result<Self, JsonError> {
        let text = text.into();
        if let Some(elided) = ElidedJson::of(&text)
            && let Ok(index) = index(elided.skeleton())
        {
            return Ok(Self::new(text, Some(elided), index));
        }
        let index = index(&text)?;
        Ok(Self::new(text, None, index))
    }

    pub(super) fn new(text: Bytes, elided: Option<ElidedJson>, index: Index) -> Self {
        let (elided, fields) = (elided.map(Box::new), index.fields.into());
        Self(Arc::new(IndexedText { text, elided, fields, shadowed: index.shadowed }))
    }

    pub(super) fn fields(&self) -> &[Field] {
        &self.0.fields
    }

    /// Returns `true` if the text is large and has training arrays, which are unchecked.
    pub(super) fn is_elided(&self) -> bool {
        self.0.elided.is_some()
    }

    /// Returns `true` if the text has values that are ignored because their key is repeated later.
    pub(super) fn is_shadowed(&self) -> bool {
        self.0.shadowed
    }

    /// Serializes a value as an object.
    ///
    /// # Errors
    /// If the value does not serialize to a JSON object.
    pub fn from_value(value: &impl Serialize) -> Result<Self> {
        let text = serde_json::to_vec(value).map_err(|error| Error::internal("cannot serialise").caused_by(error))?;
        Ok(Self::parse(text)?)
    }

    /// Checks the grammar of the training arrays, of which [`RawObject::parse`] checks the alphabet only.
    ///
    /// # Errors
    /// If a training array is not JSON.
    pub fn check(&self) -> Result<(), JsonError> {
        if self.0.elided.is_none() {
            return Ok(());
        }
        serde_json::from_slice::<serde::de::IgnoredAny>(&self.0.text)
            .map(drop)
            .map_err(|error| json_error(&self.0.text, &error))
    }

    /// Creates the object `{}`.
    #[must_use]
    pub fn empty() -> Self {
        Self::new(Bytes::from_static(b"{}"), None, Index::default())
    }

    /// Returns the original text.
    #[must_use]
    pub fn text(&self) -> &Bytes {
        &self.0.text
    }

    /// Returns the original text without a copy.
    #[must_use]
    pub fn into_text(self) -> Bytes {
        match Arc::try_unwrap(self.0) {
            Ok(last) => last.text,
            Err(shared) => shared.text.clone(),
        }
    }

    /// Returns the top-level keys, in order.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.0.fields.iter().map(|field| self.key(field))
    }

    /// Returns `true` if the object has the key.
    #[must_use]
    pub fn contains(&self, key: &str) -> bool {
        self.find(key).is_some()
    }

    /// Returns the text of the value of a key; of a repeated key, the last value.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<Bytes> {
        self.find(key).map(|field| self.0.text.slice(self.original(&field.value)))
    }

    /// Deserializes the value of a key; `None` if the key is absent.
    ///
    /// # Errors
    /// `InvalidArgument` with the key if the value is not a `T`.
    pub fn get_as<T: DeserializeOwned>(&self, key: &str) -> Result<Option<T>> {
        let Some(text) = self.get(key) else { return Ok(None) };
        serde_json::from_slice(&text)
            .map(Some)
            .map_err(|error| Error::invalid(format!("`{key}` cannot be read")).caused_by(error))
    }

    /// Returns the object that is the value of a key, without a copy of the text; `None` if the key is absent.
    ///
    /// # Errors
    /// If the value is not an object.
    pub fn get_object(&self, key: &str) -> Result<Option<Self>, JsonError> {
        let Some(field) = self.find(key) else { return Ok(None) };
        let original = self.original(&field.value);
        let text = self.0.text.slice(original.clone());
        let elided = self.0.elided.as_ref().map(|elided| elided.slice(&field.value));
        let index = index(elided.as_ref().map_or(&text, |elided| elided.skeleton()))
            .map_err(|error| JsonError { offset: original.start, ..error })?;
        Ok(Some(Self::new(text, elided, index)))
    }

    /// Like [`RawObject::view`], without the training arrays: in a large text, they are read as empty lists. Reading a megabyte
    /// then costs only as much as its few kilobytes of other text.
    ///
    /// # Errors
    /// The errors of [`RawObject::view`].
    pub fn outline<T: DeserializeOwned>(&self) -> Result<T> {
        let wrong = || Error::invalid("the object cannot be read");
        // Checked as one text: if given bytes, the parser would check each string.
        let text = std::str::from_utf8(self.indexed()).map_err(|error| wrong().caused_by(error))?;
        serde_json::from_str(text).map_err(|error| wrong().caused_by(error))
    }

    pub(super) fn find(&self, key: &str) -> Option<&Field> {
        let indexed = self.indexed();
        self.0.fields.iter().find(|field| field.key.bytes(indexed) == key.as_bytes())
    }

    pub(super) fn key<'a>(&'a self, field: &'a Field) -> &'a str {
        std::str::from_utf8(field.key.bytes(self.indexed())).unwrap_or_default()
    }

    /// Returns the text that the index refers to.
    pub(super) fn indexed(&self) -> &Bytes {
        self.0.elided.as_ref().map_or(&self.0.text, |elided| elided.skeleton())
    }

    pub(super) fn original(&self, range: &Range<usize>) -> Range<usize> {
        match &self.0.elided {
            Some(elided) => elided.original(range.start)..elided.original(range.end),
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
        let shown = &self.0.text[..self.0.text.len().min(200)];
        write!(f, "RawObject({} bytes: {})", self.0.text.len(), String::from_utf8_lossy(shown))
    }
}

impl PartialEq for RawObject {
    fn eq(&self, other: &Self) -> bool {
        self.0.text == other.0.text
    }
}

impl Serialize for RawObject {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let text = std::str::from_utf8(&self.0.text).map_err(serde::ser::Error::custom)?;
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

//! Changes named keys of an indexed object. The rest of the text is unchanged, and large parts are shared instead of copied.

use std::borrow::Cow;
use std::ops::Range;

use bytes::{BufMut, Bytes, BytesMut};
use serde::Serialize;

use super::index::{Index, JsonError};
use super::object::RawObject;
use super::rope::Rope;
use super::scan::{self, Field, Key};
use crate::base::error::{Error, Result};

/// Minimum length at which a part shares the original text; shorter parts are copied into one piece. A copy of 16 kB costs about
/// as much as writing one more piece to a socket.
const SHARE_BYTES_MIN: usize = 16 << 10;

/// Changes to a [`RawObject`] that are not applied yet.
#[derive(Debug)]
#[must_use = "an edit does nothing until it is turned into a text"]
pub struct Edit<'a> {
    object: &'a RawObject,
    changes: Vec<Change>,
}

/// The number of keys that a collector sets in a row.
const CHANGES: usize = 8;

/// A key and its new value.
#[derive(Debug)]
struct Change {
    key: Cow<'static, str>,
    to: NewValue,
}

#[derive(Debug)]
enum NewValue {
    Removed,
    /// Text from the caller, not checked to be JSON.
    Text(Bytes),
    /// Text that was serialized or parsed as JSON.
    Json(Bytes),
}

impl NewValue {
    fn text(&self) -> Option<&Bytes> {
        match self {
            Self::Removed => None,
            Self::Text(text) | Self::Json(text) => Some(text),
        }
    }

    fn is_json(&self) -> bool {
        match self {
            Self::Removed | Self::Json(_) => true,
            Self::Text(text) => scan::is_value(text),
        }
    }
}

impl RawObject {
    /// Starts an edit, which replaces keys in place, adds keys at the end, or removes keys.
    pub fn edit(&self) -> Edit<'_> {
        Edit { object: self, changes: Vec::with_capacity(CHANGES) }
    }
}

impl<'a> Edit<'a> {
    /// Sets a key to a JSON text: in place if the object has the key, else at the end.
    pub fn set(mut self, key: impl Into<Cow<'static, str>>, json: impl Into<Bytes>) -> Self {
        self.change(key.into(), NewValue::Text(json.into()));
        self
    }

    /// Sets a key to a serialized value.
    ///
    /// # Errors
    /// If the value cannot be serialized.
    pub fn set_value(mut self, key: impl Into<Cow<'static, str>>, value: &(impl Serialize + ?Sized)) -> Result<Self> {
        let json = serde_json::to_vec(value).map_err(|error| Error::internal("cannot serialise").caused_by(error))?;
        self.change(key.into(), NewValue::Json(json.into()));
        Ok(self)
    }

    /// Sets a key to another object, whose text is not checked again.
    pub fn set_object(mut self, key: impl Into<Cow<'static, str>>, object: RawObject) -> Self {
        let text = object.text();
        // Not if the text has blanks around it, or if its training arrays are unchecked.
        let known = !object.is_elided() && text.starts_with(b"{") && text.ends_with(b"}");
        self.change(key.into(), if known { NewValue::Json } else { NewValue::Text }(object.into_text()));
        self
    }

    /// Sets a key to a text that is JSON by construction, so that it is not checked.
    pub(crate) fn set_json(mut self, key: impl Into<Cow<'static, str>>, json: impl Into<Bytes>) -> Self {
        self.change(key.into(), NewValue::Json(json.into()));
        self
    }

    /// Sets a key to the value that another object has for it. Does nothing if the other object does not have the key.
    pub fn copy(self, key: impl Into<Cow<'static, str>>, from: &RawObject) -> Self {
        let key = key.into();
        match from.get(&key) {
            // The training arrays of a large object are unchecked.
            Some(value) if from.is_elided() => self.set(key, value),
            Some(value) => self.set_json(key, value),
            None => self,
        }
    }

    /// Removes a key.
    pub fn remove(mut self, key: impl Into<Cow<'static, str>>) -> Self {
        self.change(key.into(), NewValue::Removed);
        self
    }

    fn change(&mut self, key: Cow<'static, str>, to: NewValue) {
        match self.changes.iter_mut().find(|change| change.key == key) {
            Some(change) => change.to = to,
            None => self.changes.push(Change { key, to }),
        }
    }

    /// Returns the changed text. Large unchanged parts share the original text; a small text keeps an index.
    #[must_use]
    pub fn to_rope(&self) -> Rope {
        let object = self.object;
        let (text, indexed) = (object.text(), object.indexed());
        let added = |change: &Change| change.key.len() + change.to.text().map_or(0, Bytes::len) + 4;
        let bytes = text.len() + self.changes.iter().map(added).sum::<usize>();
        // Reserves capacity for all of a small text. In a large text, the pieces between shared ones are seldom longer.
        let mut out = RopeBuilder { rope: Rope::new(), small: BytesMut::with_capacity(bytes.min(SHARE_BYTES_MIN)) };
        let mut fields = Vec::with_capacity(object.fields().len() + self.changes.len());
        // The text is copied or shared up to `done`. The unchanged members from there to the end of the last one follow.
        let mut done = 0;
        let mut end = text.iter().position(|byte| *byte == b'{').map_or(0, |at| at + 1);
        let mut first = true;
        for field in object.fields().iter() {
            let range = object.original(&field.value);
            let changed = self.changes.iter().find(|change| change.key.as_bytes() == field.key.bytes(indexed));
            let changed = changed.map(|change| change.to.text());
            if let Some(None) = changed {
                out.share(text, done..end);
                done = range.end;
            } else {
                if first && done > 0 {
                    done = skip_separator(text, done);
                }
                // The new position of the byte at `done`; wrapping, see `Key::moved`.
                let moved = |at: usize| at.wrapping_sub(done).wrapping_add(out.small.len());
                let (key, start) = (field.key.moved(done, out.small.len()), moved(range.start));
                let value = match changed.flatten() {
                    None => start..moved(range.end),
                    Some(json) => {
                        out.share(text, done..range.start);
                        out.share(json, 0..json.len());
                        done = range.end;
                        start..start.wrapping_add(json.len())
                    }
                };
                fields.push(Field { key, value });
                first = false;
            }
            end = range.end;
        }
        out.share(text, done..end);
        let absent = |change: &&Change| !object.contains(&change.key);
        for change in self.changes.iter().filter(absent) {
            let Some(json) = change.to.text() else { continue };
            if !first {
                out.small.put_u8(b',');
            }
            let key = out.key(&change.key);
            let start = out.small.len();
            out.share(json, 0..json.len());
            fields.push(Field { key, value: start..out.small.len() });
            first = false;
        }
        out.share(text, end..text.len());
        let rope = out.finish();
        // The positions are valid for one small piece; the reader of several pieces parses them.
        let indexed = bytes < SHARE_BYTES_MIN && !object.is_elided() && !object.is_shadowed();
        if indexed && self.changes.iter().all(|change| change.to.is_json()) {
            return RawObject::new(rope.to_bytes(), None, Index { fields, shadowed: false }).into();
        }
        rope
    }

    /// Returns the changed object.
    ///
    /// # Errors
    /// If a text given to [`Edit::set`] is not JSON.
    pub fn to_object(&self) -> Result<RawObject, JsonError> {
        self.to_rope().to_object()
    }
}

/// Returns the position after the comma that follows a removed first field.
fn skip_separator(text: &[u8], from: usize) -> usize {
    let rest = &text[from..];
    let blank = rest.iter().take_while(|byte| byte.is_ascii_whitespace()).count();
    if rest.get(blank) == Some(&b',') { from + blank + 1 } else { from }
}

/// Collects pieces: small ones are copied together, large ones are shared.
struct RopeBuilder {
    rope: Rope,
    small: BytesMut,
}

impl RopeBuilder {
    fn share(&mut self, text: &Bytes, piece: Range<usize>) {
        if piece.len() < SHARE_BYTES_MIN {
            self.small.put_slice(&text[piece]);
        } else {
            self.rope.push(self.small.split().freeze());
            self.rope.push(text.slice(piece));
        }
    }

    /// Adds a key and its colon.
    fn key(&mut self, key: &str) -> Key {
        let start = self.small.len() + 1;
        if scan::is_plain(key) {
            self.small.put_u8(b'"');
            self.small.put_slice(key.as_bytes());
            self.small.put_slice(b"\":");
            return Key::Plain(start..start + key.len());
        }
        self.small.put_slice(serde_json::to_string(key).unwrap_or_default().as_bytes());
        self.small.put_u8(b':');
        Key::Decoded(key.into())
    }

    fn finish(mut self) -> Rope {
        self.rope.push(self.small.freeze());
        self.rope
    }
}

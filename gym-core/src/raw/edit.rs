//! Changes named keys of an indexed object. The rest of its text stays as it was, and large parts of it where they are.

use std::borrow::Cow;

use bytes::{BufMut, Bytes, BytesMut};
use serde::Serialize;

use super::{Field, Index, JsonError, Key, RawObject, scan};
use crate::error::{Error, Result};
use crate::message::Rope;

/// Below this a splice copies into one piece; above, it shares the text it came from. A copy of 16 kB costs about as much
/// as writing one more piece to a socket.
const SHARE_BYTES_MIN: usize = 16 << 10;

/// Changes to a [`RawObject`], not applied yet.
#[derive(Debug)]
#[must_use = "an edit does nothing until it is turned into a text"]
pub struct Edit<'a> {
    object: &'a RawObject,
    /// A key and its new value's JSON text; `None` removes it.
    changes: Vec<(Cow<'static, str>, Option<Bytes>)>,
}

impl<'a> Edit<'a> {
    pub(super) fn new(object: &'a RawObject) -> Self {
        Self { object, changes: Vec::new() }
    }

    /// Sets a key to a JSON text: in place if the key is there, else at the end.
    pub fn set(mut self, key: impl Into<Cow<'static, str>>, json: impl Into<Bytes>) -> Self {
        self.change(key.into(), Some(json.into()));
        self
    }

    /// Sets a key to what `value` serialises to.
    ///
    /// # Errors
    /// When the value cannot be serialised.
    pub fn set_value(self, key: impl Into<Cow<'static, str>>, value: &(impl Serialize + ?Sized)) -> Result<Self> {
        let json = serde_json::to_vec(value).map_err(|error| Error::internal("cannot serialise").caused_by(error))?;
        Ok(self.set(key, json))
    }

    /// Removes a key.
    pub fn remove(mut self, key: impl Into<Cow<'static, str>>) -> Self {
        self.change(key.into(), None);
        self
    }

    fn change(&mut self, key: Cow<'static, str>, json: Option<Bytes>) {
        match self.changes.iter_mut().find(|(known, _)| *known == key) {
            Some((_, value)) => *value = json,
            None => self.changes.push((key, json)),
        }
    }

    /// The changed text. Large untouched parts are shared with the original; a small text is indexed already.
    #[must_use]
    pub fn to_rope(&self) -> Rope {
        let object = self.object;
        let text = &object.text;
        let change = |(key, json): &(Cow<'_, str>, Option<Bytes>)| key.len() + json.as_ref().map_or(0, Bytes::len) + 4;
        let bytes = text.len() + self.changes.iter().map(change).sum::<usize>();
        // Room for all of a small text; of a large one the pieces between the shared ones are seldom longer.
        let mut out = Pieces { rope: Rope::new(), small: BytesMut::with_capacity(bytes.min(SHARE_BYTES_MIN)) };
        let mut fields = Vec::with_capacity(object.fields.len() + self.changes.len());
        // The text is copied or shared up to `done`.
        let mut done = text.iter().position(|byte| *byte == b'{').map_or(0, |at| at + 1);
        out.share(text.slice(..done));
        let mut first = true;
        for field in object.fields.iter() {
            let range = object.original(&field.value);
            let changed = self.changes.iter().find(|(key, _)| key == object.key(field)).map(|(_, json)| json);
            if !matches!(changed, Some(None)) {
                // From the end of the last field: the separator, the key and the value as they came.
                let from = if first { skip_separator(text, done) } else { done };
                let key = field.key.moved(from, out.small.len());
                out.share(text.slice(from..range.start));
                let start = out.small.len();
                out.share(changed.cloned().flatten().unwrap_or_else(|| text.slice(range.clone())));
                fields.push(Field { key, value: start..out.small.len() });
                first = false;
            }
            done = range.end;
        }
        for (key, json) in &self.changes {
            let Some(json) = json else { continue };
            if object.contains(key) {
                continue;
            }
            if !first {
                out.small.put_u8(b',');
            }
            let quoted = serde_json::to_string(key).unwrap_or_default();
            let start = out.small.len() + 1;
            let escaped = quoted.len() > key.len() + 2;
            let key = if escaped { Key::Decoded((**key).into()) } else { Key::Plain(start..start + key.len()) };
            out.small.put_slice(quoted.as_bytes());
            out.small.put_u8(b':');
            let start = out.small.len();
            out.share(json.clone());
            fields.push(Field { key, value: start..out.small.len() });
            first = false;
        }
        out.share(text.slice(done..));
        let rope = out.finish();
        // The positions are those in one small piece; where there is more to it, whoever reads it parses it.
        let indexed = bytes < SHARE_BYTES_MIN && object.hollow.is_none() && !object.shadowed;
        if indexed && self.changes.iter().filter_map(|(_, json)| json.as_ref()).all(|json| scan::is_value(json)) {
            return RawObject::new(rope.to_bytes(), None, Index { fields, shadowed: false }).into();
        }
        rope
    }

    /// The changed object.
    ///
    /// # Errors
    /// When a text given to [`Edit::set`] was not JSON.
    pub fn to_object(&self) -> Result<RawObject, JsonError> {
        self.to_rope().to_object()
    }
}

/// After a removed first field, the comma (and space) that separated it from the next one.
fn skip_separator(text: &[u8], from: usize) -> usize {
    let rest = &text[from..];
    let blank = rest.iter().take_while(|byte| byte.is_ascii_whitespace()).count();
    if rest.get(blank) == Some(&b',') { from + blank + 1 } else { from }
}

/// Collects pieces: small ones are copied together, large ones are shared.
struct Pieces {
    rope: Rope,
    small: BytesMut,
}

impl Pieces {
    fn share(&mut self, piece: Bytes) {
        if piece.len() < SHARE_BYTES_MIN {
            self.small.put_slice(&piece);
        } else {
            self.rope.push(self.small.split().freeze());
            self.rope.push(piece);
        }
    }

    fn finish(mut self) -> Rope {
        self.rope.push(self.small.freeze());
        self.rope
    }
}

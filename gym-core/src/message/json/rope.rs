//! Text in one or more byte slices, spliced without a copy and serialized on demand.

use std::fmt;

use bytes::{Bytes, BytesMut};

use super::index::JsonError;
use super::lazy::LazyValue;
use super::object::RawObject;

use self::OtherPieces::{Lazy, Many, Object};
use self::Pieces::{One, Other};

/// A rope: text in one or more byte slices, so that a reply can be spliced from parts of the request without a copy.
///
/// ```
/// use bytes::Bytes;
/// use gym_core::Rope;
///
/// let task = Bytes::from_static(br#"{"id": 7}"#);
/// let mut reply = Rope::from(r#"{"task": "#);
/// reply.push(task.clone());
/// reply.push(Bytes::from_static(br#", "reward": 1.0}"#));
/// assert_eq!(reply.to_bytes(), r#"{"task": {"id": 7}, "reward": 1.0}"#);
/// // A piece is the memory that it was made of.
/// assert_eq!(reply.pieces()[1].as_ptr(), task.as_ptr());
/// ```
#[derive(Clone, Default)]
pub struct Rope(Pieces);

/// Two enums instead of one, because the space in [`Bytes`] that is never used can tell two variants apart and no more: together they are as
/// small as [`Bytes`].
#[derive(Clone)]
enum Pieces {
    One(Bytes),
    Other(OtherPieces),
}

#[derive(Clone)]
enum OtherPieces {
    Many(Vec<Bytes>),
    Lazy(LazyValue),
    /// One piece that was parsed in this process.
    Object(RawObject),
}

impl Default for Pieces {
    fn default() -> Self {
        Self::One(Bytes::new())
    }
}

impl Rope {
    /// Creates a rope without bytes.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends a piece; empty pieces are dropped.
    pub fn push(&mut self, piece: Bytes) {
        if piece.is_empty() {
            return;
        }
        match &mut self.0 {
            One(one) if one.is_empty() => *one = piece,
            One(one) => self.0 = Other(Many(vec![std::mem::take(one), piece])),
            Other(Many(many)) => many.push(piece),
            Other(Lazy(head)) => self.0 = Other(Many(vec![head.text().clone(), piece])),
            Other(Object(object)) => self.0 = Other(Many(vec![object.text().clone(), piece])),
        }
    }

    /// Creates a rope from a value, which is serialized when its text is first read. Within one process, that never happens.
    ///
    /// `write` cannot fail; it returns no bytes for a value that cannot be serialized, which the reader then rejects.
    #[must_use]
    pub fn lazy<T: Send + Sync + 'static>(value: T, write: fn(&T) -> Bytes) -> Self {
        Self(Other(Lazy(LazyValue::new(value, write))))
    }

    /// Returns `true` if the rope holds a value instead of text, serialized or not.
    #[must_use]
    pub fn is_lazy(&self) -> bool {
        matches!(self.0, Other(Lazy(_)))
    }

    /// Returns the value, if the rope was created by [`Rope::lazy`] from a `T`.
    #[must_use]
    pub fn value<T: 'static>(&self) -> Option<&T> {
        match &self.0 {
            Other(Lazy(head)) => head.value(),
            _ => None,
        }
    }

    /// Takes the value, without a copy.
    ///
    /// # Errors
    /// Returns the rope if it was not created from a `T`, or if a clone of it is alive.
    pub fn try_into_value<T: Send + Sync + 'static>(self) -> Result<T, Self> {
        match self.0 {
            Other(Lazy(head)) => head.try_take().map_err(|head| Self(Other(Lazy(head)))),
            written => Err(Self(written)),
        }
    }

    /// Returns the pieces, in order.
    #[must_use]
    pub fn pieces(&self) -> &[Bytes] {
        match &self.0 {
            One(one) => std::slice::from_ref(one),
            Other(Many(many)) => many,
            Other(Lazy(head)) => std::slice::from_ref(head.text()),
            Other(Object(object)) => std::slice::from_ref(object.text()),
        }
    }

    /// Returns the length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.pieces().iter().map(Bytes::len).sum()
    }

    /// Returns `true` if the rope has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the text in one piece. Copies it only if there are several pieces.
    #[must_use]
    pub fn to_bytes(&self) -> Bytes {
        match &self.0 {
            One(one) => one.clone(),
            Other(Lazy(head)) => head.text().clone(),
            Other(Object(object)) => object.text().clone(),
            Other(Many(many)) => {
                let mut whole = BytesMut::with_capacity(self.len());
                many.iter().for_each(|piece| whole.extend_from_slice(piece));
                whole.freeze()
            }
        }
    }
}

impl Rope {
    /// Returns `true` if the rope has the index of the object from which it was created.
    #[cfg(test)]
    pub(crate) fn is_parsed(&self) -> bool {
        matches!(self.0, Other(Object(_)))
    }

    /// Returns the text as a JSON object. Costs nothing if the rope was created from one in this process.
    ///
    /// # Errors
    /// If the text is not one JSON object.
    pub fn to_object(&self) -> Result<RawObject, JsonError> {
        match &self.0 {
            Other(Object(object)) => Ok(object.clone()),
            _ => RawObject::parse(self.to_bytes()),
        }
    }
}

impl From<RawObject> for Rope {
    fn from(object: RawObject) -> Self {
        Self(Other(Object(object)))
    }
}

impl From<Bytes> for Rope {
    fn from(bytes: Bytes) -> Self {
        Self(One(bytes))
    }
}

impl From<Vec<u8>> for Rope {
    fn from(bytes: Vec<u8>) -> Self {
        Bytes::from(bytes).into()
    }
}

impl From<String> for Rope {
    fn from(text: String) -> Self {
        Bytes::from(text).into()
    }
}

impl From<&'static str> for Rope {
    fn from(text: &'static str) -> Self {
        Bytes::from_static(text.as_bytes()).into()
    }
}

impl FromIterator<Bytes> for Rope {
    fn from_iter<I: IntoIterator<Item = Bytes>>(pieces: I) -> Self {
        let mut rope = Self::new();
        pieces.into_iter().for_each(|piece| rope.push(piece));
        rope
    }
}

impl fmt::Debug for Rope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            // Formatting must not serialize the value.
            Other(Lazy(_)) => f.write_str("Rope(lazy)"),
            _ => write!(f, "Rope({} bytes in {})", self.len(), self.pieces().len()),
        }
    }
}

impl PartialEq for Rope {
    fn eq(&self, other: &Self) -> bool {
        self.to_bytes() == other.to_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rope_of_one_piece_is_not_copied() {
        let bytes = Bytes::from(vec![7; 100]);
        let rope = Rope::from(bytes.clone());
        assert_eq!(rope.to_bytes().as_ptr(), bytes.as_ptr());
        let both: Rope = [bytes.clone(), Bytes::new(), bytes].into_iter().collect();
        assert_eq!((both.len(), both.pieces().len()), (200, 2));
    }

    #[test]
    fn a_value_is_written_when_its_text_is_asked_for_and_taken_without_a_copy_otherwise() {
        let write = |text: &String| Bytes::from(format!("\"{text}\""));
        let rope = Rope::lazy("seven".to_owned(), write);
        assert!(rope.is_lazy() && rope.value::<u32>().is_none());
        let address = rope.value::<String>().unwrap().as_ptr();
        let shared = rope.clone();
        let rope = rope.try_into_value::<String>().unwrap_err();
        assert_eq!((shared.len(), &shared.to_bytes()[..]), (7, &b"\"seven\""[..]));
        drop(shared);
        let taken = rope.try_into_value::<String>().unwrap();
        assert_eq!(taken.as_ptr(), address);
    }
}

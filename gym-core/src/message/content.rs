//! The body of a request or response: a head and zero or more binary segments, which are never joined into one buffer.

use std::borrow::Cow;

use bytes::Bytes;

use super::json::Rope;

/// The media type of a message head.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub enum ContentType {
    /// `application/json`.
    #[default]
    Json,
    /// `text/plain; charset=utf-8`.
    Text,
    /// Buffered server-sent events, `text/event-stream`.
    EventStream,
    /// Any other media type.
    Other(Cow<'static, str>),
}

impl ContentType {
    /// Returns the media type.
    #[must_use]
    pub fn as_str(&self) -> &str {
        match self {
            Self::Json => "application/json",
            Self::Text => "text/plain; charset=utf-8",
            Self::EventStream => "text/event-stream",
            Self::Other(name) => name,
        }
    }

    /// Returns the content type of a media type; parameters of JSON are dropped.
    #[must_use]
    pub fn from_media_type(text: &str) -> Self {
        let name = text.split(';').next().unwrap_or_default().trim();
        if name.eq_ignore_ascii_case("application/json") {
            Self::Json
        } else if name.eq_ignore_ascii_case("text/event-stream") {
            Self::EventStream
        } else if text == "text/plain; charset=utf-8" {
            Self::Text
        } else {
            Self::Other(Cow::Owned(text.into()))
        }
    }
}

/// A message head and binary segments, never joined into one buffer. Cheap to clone.
///
/// ```
/// use bytes::Bytes;
/// use gym_core::Message;
///
/// let mut message = Message::json(r#"{"rows": 2}"#);
/// message.segments.push(Bytes::from_static(&[1, 0]));
/// assert_eq!(message.len(), 13);
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Message {
    /// The media type of the head.
    pub content_type: ContentType,
    /// Small structured part, usually a JSON object.
    pub head: Rope,
    /// Large binary parts, in order.
    pub segments: Vec<Bytes>,
}

impl Message {
    /// Creates a message with a JSON head and no segments.
    #[must_use]
    pub fn json(head: impl Into<Rope>) -> Self {
        Self { content_type: ContentType::Json, head: head.into(), segments: Vec::new() }
    }

    /// Creates a message with a plain text head and no segments.
    #[must_use]
    pub fn text(head: impl Into<Rope>) -> Self {
        Self { content_type: ContentType::Text, head: head.into(), segments: Vec::new() }
    }

    /// Returns the number of bytes of head and segments.
    #[must_use]
    pub fn len(&self) -> usize {
        self.head.len() + self.segments.iter().map(Bytes::len).sum::<usize>()
    }

    /// Returns `true` if head and segments are empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0 && self.segments.is_empty()
    }
}

//! What a call carries: a head and zero or more binary segments. Nobody on the path flattens them.

use std::borrow::Cow;

use bytes::Bytes;

use super::json::Rope;

/// How the head of a message is to be read.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub enum ContentType {
    /// `application/json`.
    #[default]
    Json,
    /// `text/plain; charset=utf-8`.
    Text,
    /// Buffered server-sent events, `text/event-stream`.
    EventStream,
    /// Anything else, by its media type.
    Other(Cow<'static, str>),
}

impl ContentType {
    /// The media type.
    #[must_use]
    pub fn as_str(&self) -> &str {
        match self {
            Self::Json => "application/json",
            Self::Text => "text/plain; charset=utf-8",
            Self::EventStream => "text/event-stream",
            Self::Other(name) => name,
        }
    }

    /// The content type of that media type; parameters of JSON are dropped.
    #[must_use]
    pub fn from_media_type(text: &str) -> Self {
        match text.split(';').next().unwrap_or_default().trim() {
            "application/json" => Self::Json,
            "text/event-stream" => Self::EventStream,
            _ if text == "text/plain; charset=utf-8" => Self::Text,
            _ => Self::Other(Cow::Owned(text.into())),
        }
    }
}

/// A head and binary segments. Cheap to clone; never flattened.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Message {
    /// How to read the head.
    pub content_type: ContentType,
    /// Small structured part, usually a JSON object.
    pub head: Rope,
    /// Large binary parts, in order.
    pub segments: Vec<Bytes>,
}

impl Message {
    /// A JSON head without segments.
    #[must_use]
    pub fn json(head: impl Into<Rope>) -> Self {
        Self { content_type: ContentType::Json, head: head.into(), segments: Vec::new() }
    }

    /// A plain text head without segments.
    #[must_use]
    pub fn text(head: impl Into<Rope>) -> Self {
        Self { content_type: ContentType::Text, head: head.into(), segments: Vec::new() }
    }

    /// Bytes of head and segments together.
    #[must_use]
    pub fn len(&self) -> usize {
        self.head.len() + self.segments.iter().map(Bytes::len).sum::<usize>()
    }

    /// Whether there is neither head nor segment.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0 && self.segments.is_empty()
    }
}

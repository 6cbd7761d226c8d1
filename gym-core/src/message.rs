//! What a call carries: a head and zero or more binary segments. Nobody on the path flattens them.

use std::borrow::Cow;
use std::fmt;

use bytes::{Bytes, BytesMut};

use crate::context::CallContext;
use crate::error::{Code, Error, Execution, Result};
use crate::raw::{JsonError, RawObject};
use crate::transport::PeerInfo;
use crate::unwritten::UnwrittenHead;

/// Text in one or more pieces, so that a reply can be spliced from what came in without a copy.
#[derive(Clone, Default)]
pub struct Rope(Pieces);

#[derive(Clone)]
enum Pieces {
    One(Bytes),
    Many(Vec<Bytes>),
    Unwritten(UnwrittenHead),
    /// One piece that somebody in this process has parsed.
    Object(RawObject),
}

impl Default for Pieces {
    fn default() -> Self {
        Self::One(Bytes::new())
    }
}

impl Rope {
    /// No bytes.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a piece at the end; empty ones are dropped.
    pub fn push(&mut self, piece: Bytes) {
        if piece.is_empty() {
            return;
        }
        match &mut self.0 {
            Pieces::One(one) if one.is_empty() => *one = piece,
            Pieces::One(one) => self.0 = Pieces::Many(vec![std::mem::take(one), piece]),
            Pieces::Many(many) => many.push(piece),
            Pieces::Unwritten(head) => self.0 = Pieces::Many(vec![head.text().clone(), piece]),
            Pieces::Object(object) => self.0 = Pieces::Many(vec![object.text().clone(), piece]),
        }
    }

    /// The text of a value, written when somebody first asks for it: within one process nobody does.
    ///
    /// `write` cannot fail; what it leaves empty is for the reader to refuse.
    #[must_use]
    pub fn unwritten<T: Send + Sync + 'static>(value: T, write: fn(&T) -> Bytes) -> Self {
        Self(Pieces::Unwritten(UnwrittenHead::new(value, write)))
    }

    /// Whether it is still the value it will be written from.
    #[must_use]
    pub fn is_unwritten(&self) -> bool {
        matches!(self.0, Pieces::Unwritten(_))
    }

    /// The value it is the text of, if it was made by [`Rope::unwritten`] from a `T`.
    #[must_use]
    pub fn value<T: 'static>(&self) -> Option<&T> {
        match &self.0 {
            Pieces::Unwritten(head) => head.value(),
            _ => None,
        }
    }

    /// The value it is the text of, without a copy.
    ///
    /// # Errors
    /// Itself when it was not made from a `T`, or when a clone of it is alive.
    pub fn try_into_value<T: Send + Sync + 'static>(self) -> Result<T, Self> {
        match self.0 {
            Pieces::Unwritten(head) => head.try_take().map_err(|head| Self(Pieces::Unwritten(head))),
            written => Err(Self(written)),
        }
    }

    /// The pieces in order.
    #[must_use]
    pub fn pieces(&self) -> &[Bytes] {
        match &self.0 {
            Pieces::One(one) => std::slice::from_ref(one),
            Pieces::Many(many) => many,
            Pieces::Unwritten(head) => std::slice::from_ref(head.text()),
            Pieces::Object(object) => std::slice::from_ref(object.text()),
        }
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.pieces().iter().map(Bytes::len).sum()
    }

    /// Whether there is nothing in it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The text in one piece: free when it is one already, a copy otherwise.
    #[must_use]
    pub fn to_bytes(&self) -> Bytes {
        match &self.0 {
            Pieces::One(one) => one.clone(),
            Pieces::Unwritten(head) => head.text().clone(),
            Pieces::Object(object) => object.text().clone(),
            Pieces::Many(many) => {
                let mut whole = BytesMut::with_capacity(self.len());
                many.iter().for_each(|piece| whole.extend_from_slice(piece));
                whole.freeze()
            }
        }
    }
}

impl Rope {
    /// Whether it has the index of the object that it was made of.
    #[cfg(test)]
    pub(crate) fn is_parsed(&self) -> bool {
        matches!(self.0, Pieces::Object(_))
    }

    /// The text as a JSON object: free when it was made of one, and not since written to a wire.
    ///
    /// # Errors
    /// When the text is not one JSON object.
    pub fn to_object(&self) -> Result<RawObject, JsonError> {
        match &self.0 {
            Pieces::Object(object) => Ok(object.clone()),
            _ => RawObject::parse(self.to_bytes()),
        }
    }
}

impl From<RawObject> for Rope {
    fn from(object: RawObject) -> Self {
        Self(Pieces::Object(object))
    }
}

impl From<Bytes> for Rope {
    fn from(bytes: Bytes) -> Self {
        Self(Pieces::One(bytes))
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
            // To look at it must not write it.
            Pieces::Unwritten(_) => f.write_str("Rope(unwritten)"),
            _ => write!(f, "Rope({} bytes in {})", self.len(), self.pieces().len()),
        }
    }
}

impl PartialEq for Rope {
    fn eq(&self, other: &Self) -> bool {
        self.to_bytes() == other.to_bytes()
    }
}

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

/// Pairs of a lower-case name and a value, in order; a name may repeat (`set-cookie` does). Headers over HTTP.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Metadata(Vec<(Cow<'static, str>, String)>);

impl Metadata {
    /// No pairs.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a pair at the end. Names are lower case.
    pub fn push(&mut self, name: impl Into<Cow<'static, str>>, value: impl Into<String>) {
        self.0.push((name.into(), value.into()));
    }

    /// The first value of that name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&str> {
        self.iter().find(|(known, _)| *known == name).map(|(_, value)| value)
    }

    /// Every value of that name, in order.
    pub fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        self.iter().filter(move |(known, _)| *known == name).map(|(_, value)| value)
    }

    /// All pairs, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(name, value)| (name.as_ref(), value.as_str()))
    }

    /// Keeps the pairs whose name passes.
    pub fn retain(&mut self, mut keep: impl FnMut(&str) -> bool) {
        self.0.retain(|(name, _)| keep(name));
    }

    /// Number of pairs.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// What is asked for, as HTTP names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[allow(missing_docs)] // The names are HTTP's own.
pub enum Verb {
    Get,
    Head,
    #[default]
    Post,
    Put,
    Patch,
    Delete,
    Options,
}

impl Verb {
    /// Every verb.
    pub const ALL: [Self; 7] = [Self::Get, Self::Head, Self::Post, Self::Put, Self::Patch, Self::Delete, Self::Options];

    /// The upper-case name.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Get => "GET",
            Self::Head => "HEAD",
            Self::Post => "POST",
            Self::Put => "PUT",
            Self::Patch => "PATCH",
            Self::Delete => "DELETE",
            Self::Options => "OPTIONS",
        }
    }

    /// The verb of that name, if there is one.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|verb| verb.as_str() == name)
    }
}

impl fmt::Display for Verb {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A path with an optional query, such as `/v1/responses`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Route(Cow<'static, str>);

impl Route {
    /// A route known when the program is written.
    #[must_use]
    pub const fn from_static(route: &'static str) -> Self {
        Self(Cow::Borrowed(route))
    }

    /// Path and query as they travel.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The path without the query.
    #[must_use]
    pub fn path(&self) -> &str {
        // Byte by byte: routes are too short for a search to pay.
        let end = self.0.bytes().position(|byte| byte == b'?').unwrap_or(self.0.len());
        &self.0[..end]
    }

    /// The query without the question mark.
    #[must_use]
    pub fn query(&self) -> Option<&str> {
        self.0.split_once('?').map(|(_, query)| query)
    }
}

impl From<&'static str> for Route {
    fn from(route: &'static str) -> Self {
        Self::from_static(route)
    }
}

impl From<String> for Route {
    fn from(route: String) -> Self {
        Self(Cow::Owned(route))
    }
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// One call on its way to a handler.
#[derive(Clone, Debug)]
pub struct Request {
    /// What is asked for.
    pub verb: Verb,
    /// Of whom, within the peer.
    pub route: Route,
    /// Deadline, cancellation, trace, metadata.
    pub context: CallContext,
    /// Who called; filled in by the accepting transport, never sent.
    pub peer: Option<PeerInfo>,
    /// What is carried.
    pub message: Message,
}

impl Request {
    /// A `POST` of a JSON text.
    #[must_use]
    pub fn post(context: CallContext, route: impl Into<Route>, json: impl Into<Rope>) -> Self {
        Self { verb: Verb::Post, route: route.into(), context, peer: None, message: Message::json(json) }
    }

    /// A `GET` without a body.
    #[must_use]
    pub fn get(context: CallContext, route: impl Into<Route>) -> Self {
        Self { verb: Verb::Get, route: route.into(), context, peer: None, message: Message::default() }
    }
}

/// The status of a complete answer, with HTTP's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Status(pub u16);

impl Status {
    /// 200.
    pub const OK: Self = Self(200);

    /// Whether it is one of 200 to 299.
    #[must_use]
    pub fn is_success(self) -> bool {
        (200..300).contains(&self.0)
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The metadata name that says whether an answer that is an error was refused before running.
pub const EXECUTION_METADATA: &str = "x-gym-execution";
/// The metadata name that carries an error's code.
pub const CODE_METADATA: &str = "x-gym-code";

/// A complete answer, whatever it says: 404 and 500 too.
#[derive(Clone, Debug)]
pub struct Response {
    /// How it went.
    pub status: Status,
    /// Ordered pairs, such as `set-cookie`.
    pub metadata: Metadata,
    /// What is carried.
    pub message: Message,
}

impl Response {
    /// 200 with a JSON text.
    #[must_use]
    pub fn json(head: impl Into<Rope>) -> Self {
        Self::new(Status::OK, Message::json(head))
    }

    /// 200 with a plain text.
    #[must_use]
    pub fn text(head: impl Into<Rope>) -> Self {
        Self::new(Status::OK, Message::text(head))
    }

    /// An answer without metadata.
    #[must_use]
    pub fn new(status: Status, message: Message) -> Self {
        Self { status, metadata: Metadata::new(), message }
    }

    /// Itself if it is a success, else the error that it stands for.
    ///
    /// # Errors
    /// The code and execution that the answer carries; an answer of a foreign server, which carries neither, is `Finished`
    /// with the code of its status.
    pub fn into_result(self) -> Result<Self> {
        if self.status.is_success() {
            return Ok(self);
        }
        let code = self
            .metadata
            .get(CODE_METADATA)
            .and_then(Code::from_name)
            .unwrap_or_else(|| Code::from_status(self.status.0));
        let execution =
            self.metadata.get(EXECUTION_METADATA).and_then(Execution::from_name).unwrap_or(Execution::Finished);
        let body = self.message.head.to_bytes();
        // Long enough for a Python traceback's last lines, short enough for a log line.
        let shown = String::from_utf8_lossy(&body[..body.len().min(2_000)]).into_owned();
        Err(Error::new(code, execution, format!("answered {}: {shown}", self.status)))
    }

    /// How a handler's error travels, on every transport: status, code and execution, and the text as a JSON string, which
    /// is the form that NeMo Gym's servers give a 500.
    #[must_use]
    pub fn from_error(error: &Error) -> Self {
        let text = serde_json::to_string(&error.to_string()).unwrap_or_else(|_| "\"\"".into());
        let mut response = Self::new(Status(error.code().status()), Message::json(text));
        response.metadata.push(CODE_METADATA, error.code().as_str());
        response.metadata.push(EXECUTION_METADATA, error.execution().as_str());
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_travels_as_an_answer_and_comes_back_the_same() {
        for code in Code::ALL {
            for execution in [Execution::NotStarted, Execution::Unknown, Execution::Finished] {
                let error = Response::from_error(&Error::new(code, execution, "no room")).into_result().unwrap_err();
                assert_eq!((error.code(), error.execution()), (code, execution));
                assert!(error.message().contains("no room"));
            }
        }
    }

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
        let rope = Rope::unwritten("seven".to_owned(), write);
        assert!(rope.is_unwritten() && rope.value::<u32>().is_none());
        let address = rope.value::<String>().unwrap().as_ptr();
        let shared = rope.clone();
        let rope = rope.try_into_value::<String>().unwrap_err();
        assert_eq!((shared.len(), &shared.to_bytes()[..]), (7, &b"\"seven\""[..]));
        drop(shared);
        let taken = rope.try_into_value::<String>().unwrap();
        assert_eq!(taken.as_ptr(), address);
    }

    #[test]
    fn a_route_splits_at_the_question_mark() {
        let route = Route::from_static("/a/b?x=1&y");
        assert_eq!((route.path(), route.query()), ("/a/b", Some("x=1&y")));
    }
}

//! A request: verb, route, context and message.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use super::content::{ContentType, Message};
use super::context::CallContext;
use super::json::Rope;
use super::response::{Response, Status};

/// The HTTP method of a request.
///
/// ```
/// use gym_core::{CallContext, Request, Verb};
///
/// let mut request = Request::post(CallContext::default(), "/tasks/7", r#"{"answer": "4"}"#);
/// request.verb = Verb::Put;
/// assert_eq!(format!("{} {}", request.verb, request.route), "PUT /tasks/7");
/// ```
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
    /// All verbs.
    pub const ALL: [Self; 7] = [Self::Get, Self::Head, Self::Post, Self::Put, Self::Patch, Self::Delete, Self::Options];

    /// Returns the name in upper case.
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

    /// Returns the verb of a name in upper case.
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
///
/// ```
/// use gym_core::Route;
///
/// const VERIFY: Route = Route::from_static("/verify");
/// let page = Route::from(format!("/tasks?page={}", 2));
/// assert_eq!((page.path(), page.query()), ("/tasks", Some("page=2")));
/// assert_eq!((VERIFY.path(), VERIFY.query()), ("/verify", None));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Route(Cow<'static, str>);

impl Route {
    /// Creates a route from a constant, without an allocation.
    #[must_use]
    pub const fn from_static(route: &'static str) -> Self {
        Self(Cow::Borrowed(route))
    }

    /// Returns path and query as they are sent.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the path without the query.
    #[must_use]
    pub fn path(&self) -> &str {
        // Byte by byte: routes are too short for a vectorized search.
        let end = self.0.bytes().position(|byte| byte == b'?').unwrap_or(self.0.len());
        &self.0[..end]
    }

    /// Returns the query without the question mark.
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

/// A request to a handler.
///
/// ```
/// use gym_core::{CallContext, Request};
///
/// let request = Request::post(CallContext::default(), "/verify?strict=1", r#"{"answer": "4"}"#);
/// assert_eq!((request.route.path(), request.route.query()), ("/verify", Some("strict=1")));
/// ```
#[derive(Clone, Debug)]
pub struct Request {
    /// The HTTP method.
    pub verb: Verb,
    /// Path and query.
    pub route: Route,
    /// Deadline, cancellation, trace, metadata.
    pub context: CallContext,
    /// The caller; set by the accepting transport, never sent.
    pub peer: Option<PeerInfo>,
    /// The body.
    pub message: Message,
}

impl Request {
    /// Creates a `POST` of a JSON text.
    #[must_use]
    pub fn post(context: CallContext, route: impl Into<Route>, json: impl Into<Rope>) -> Self {
        Self { verb: Verb::Post, route: route.into(), context, peer: None, message: Message::json(json) }
    }

    /// Creates a `GET` without a body.
    #[must_use]
    pub fn get(context: CallContext, route: impl Into<Route>) -> Self {
        Self { verb: Verb::Get, route: route.into(), context, peer: None, message: Message::default() }
    }

    /// Returns the rejection of a request that changes the state of a server without authentication, if a page that a person opens could have
    /// made their browser send it: it has the header `Origin` (RFC 6454), or a body that is not JSON, which browsers send without asking the
    /// server first.
    #[must_use]
    pub fn reject_browsers(&self) -> Option<Response> {
        let (status, detail) = if self.context.metadata.get("origin").is_some() {
            (403, "web pages may not change anything here: send the request without the header `Origin`".to_owned())
        } else if self.message.content_type != ContentType::Json {
            let sent = self.message.content_type.as_str().escape_debug();
            (415, format!("the body is `{sent}`: send JSON, with the header `content-type: application/json`"))
        } else {
            return None;
        };
        let body = serde_json::json!({"detail": detail}).to_string();
        Some(Response::new(Status(status), Message::json(body)))
    }
}

/// The peer of an accepted connection, as far as the transport knows it.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct PeerInfo {
    /// The address of the peer, in the transport's notation.
    pub address: Arc<str>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_route_splits_at_the_question_mark() {
        let route = Route::from_static("/a/b?x=1&y");
        assert_eq!((route.path(), route.query()), ("/a/b", Some("x=1&y")));
    }
}

//! The parts of a call that are sent as headers.
//!
//! Metadata consists of the end-to-end headers, in order, with names in lower case. The transport reserves these headers in both
//! directions:
//!
//! - of one connection: `connection` and the headers that it names, `keep-alive`, `proxy-…`, `te`, `trailer`,
//!   `transfer-encoding`, `upgrade`, `expect`, `host`;
//! - of the body: `content-length`, `content-type`;
//! - of the context's fields: `x-gym-timeout-ms`, `x-gym-incarnation` of a request, `traceparent`;
//! - of one hop's software, which would mislead the next hop: `accept-encoding`, `date` and `server`.

use std::borrow::Cow;
use std::time::Duration;

use gym_core::message::frame::FRAME_MEDIA_TYPE;
use gym_core::message::{ContentType, TraceContext};
use gym_core::rollout::EPISODE_METADATA;
use gym_core::transport::INCARNATION_METADATA;
use gym_core::{CallContext, Error, Incarnation, Message, Metadata, Result};
use http::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use tokio::time::Instant;

/// The remaining time of a call, in whole milliseconds.
pub(crate) const TIMEOUT: HeaderName = HeaderName::from_static("x-gym-timeout-ms");
pub(crate) const INCARNATION: HeaderName = HeaderName::from_static(INCARNATION_METADATA);
const EPISODE: HeaderName = HeaderName::from_static(EPISODE_METADATA);
pub(crate) const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
/// The media type of a frame's head, if it is not JSON.
pub(crate) const FRAMED_HEAD: HeaderName = HeaderName::from_static("x-gym-head-type");

/// A longer remaining time counts as unlimited; this bound keeps instants from overflowing.
const TIMEOUT_MS_MAX: u64 = 365 * 24 * 3_600 * 1_000;

/// Returns `true` if the transport reserves a header, which is then neither sent from nor received into metadata.
fn is_own(name: &str) -> bool {
    matches!(
        name,
        "accept-encoding"
            | "connection"
            | "content-length"
            | "content-type"
            | "date"
            | "expect"
            | "host"
            | "keep-alive"
            | "proxy-authenticate"
            | "proxy-authorization"
            | "proxy-connection"
            | "server"
            | "te"
            | "trailer"
            | "traceparent"
            | "transfer-encoding"
            | "upgrade"
            | "x-gym-head-type"
            | "x-gym-timeout-ms"
    )
}

/// The share of the remaining time that a caller keeps for the response, and the most that it keeps.
const RESPONSE_SHARE: u32 = 20;
const RESPONSE_TIME_MAX: Duration = Duration::from_millis(500);

/// Returns the remaining time of a call, as it is sent to the peer: less than the caller waits. The peer's deadline then passes first, and its
/// response says which wait was the innermost. With equal deadlines, the caller would give up before that response arrives.
pub(crate) fn timeout_ms(context: &CallContext) -> u64 {
    let left = context.remaining();
    // Rounded down: the peer must never assume more time than its caller waits.
    u64::try_from((left - (left / RESPONSE_SHARE).min(RESPONSE_TIME_MAX)).as_millis()).unwrap_or(u64::MAX)
}

/// Returns `true` if `text` is a valid name of a header.
pub(crate) fn is_name(text: &str) -> bool {
    HeaderName::from_bytes(text.as_bytes()).is_ok()
}

/// Returns `true` if `text` is a valid value of a header.
pub(crate) fn is_value(text: &str) -> bool {
    text.bytes().all(|byte| byte == b'\t' || (b' '..=b'~').contains(&byte))
}

/// Returns the metadata to send, without the reserved names and `but`.
pub(crate) fn end_to_end<'a>(metadata: &'a Metadata, but: Option<&'a str>) -> impl Iterator<Item = (&'a str, &'a str)> {
    metadata.iter().filter(move |(name, _)| !is_own(name) && Some(*name) != but)
}

/// Writes the metadata of a response.
pub(crate) fn put_metadata(metadata: &Metadata, headers: &mut HeaderMap) -> Result<()> {
    for (name, value) in end_to_end(metadata, None) {
        let wrong = |what| Error::invalid(format!("metadata `{name}` has a {what} that no HTTP header can have"));
        let header = match name {
            // Headers of nearly every call, matched without a lookup in the table of known names.
            "cookie" => http::header::COOKIE,
            "set-cookie" => http::header::SET_COOKIE,
            INCARNATION_METADATA => INCARNATION,
            EPISODE_METADATA => EPISODE,
            _ => HeaderName::from_bytes(name.as_bytes()).map_err(|_| wrong("name"))?,
        };
        let value = HeaderValue::from_str(value).map_err(|_| wrong("value"))?;
        headers.append(header, value);
    }
    Ok(())
}

/// Writes the content type of a response's message.
pub(crate) fn put_content_type(message: &Message, headers: &mut HeaderMap) -> Result<()> {
    let (media_type, of_head) = content_type(message)?;
    for (name, value) in [(CONTENT_TYPE, media_type), (FRAMED_HEAD, of_head)] {
        let value = match value {
            None => continue,
            Some("application/json") => HeaderValue::from_static("application/json"),
            Some(other) => HeaderValue::from_str(other).map_err(|_| not_a_media_type(other))?,
        };
        headers.insert(name, value);
    }
    Ok(())
}

/// Returns the media type of a message's body, and that of its head if the body is a frame and the head is not JSON.
pub(crate) fn content_type(message: &Message) -> Result<(Option<&str>, Option<&str>)> {
    let head = message.content_type.as_str();
    if message.content_type != ContentType::Json && !is_value(head) {
        return Err(not_a_media_type(head));
    }
    Ok(match (message.segments.is_empty(), &message.content_type) {
        (true, ContentType::Json) if message.is_empty() => (None, None),
        (true, _) => (Some(head), None),
        (false, ContentType::Json) => (Some(FRAME_MEDIA_TYPE), None),
        (false, _) => (Some(FRAME_MEDIA_TYPE), Some(head)),
    })
}

fn not_a_media_type(text: &str) -> Error {
    Error::invalid(format!("content type `{}` is not a media type", text.escape_debug()))
}

/// Parses the context of a call, including its metadata.
pub(crate) fn context_of(headers: &HeaderMap, default_deadline: Duration) -> Result<CallContext> {
    let timeout = match number(headers, &TIMEOUT)? {
        Some(left_ms) => Duration::from_millis(left_ms.min(TIMEOUT_MS_MAX)),
        None => default_deadline,
    };
    let mut context = CallContext::until(Instant::now() + timeout);
    context.incarnation = number(headers, &INCARNATION)?.map(Incarnation);
    context.trace = text(headers, &TRACEPARENT).and_then(TraceContext::from_traceparent).unwrap_or_default();
    let pairs = || headers.iter().map(|(name, value)| (name.as_str(), value.as_bytes()));
    context.metadata = metadata_of(pairs, Some(INCARNATION_METADATA));
    Ok(context)
}

/// Parses metadata, without the reserved names and `but`.
pub(crate) fn metadata_of<'a, I>(headers: impl Fn() -> I, but: Option<&str>) -> Metadata
where
    I: Iterator<Item = (&'a str, &'a [u8])>,
{
    let mut metadata = Metadata::new();
    let is_connection = |(name, _): &(&str, _)| name.eq_ignore_ascii_case("connection");
    // Between servers of this SDK there is none.
    let has_connection = headers().any(|header| is_connection(&header));
    let of_connection = |name: &str| {
        let connection = headers().filter(is_connection);
        let mut named = connection.flat_map(|(_, value)| value.split(|byte| *byte == b',')).map(<[u8]>::trim_ascii);
        named.any(|one| one.eq_ignore_ascii_case(name.as_bytes()))
    };
    for (name, value) in headers() {
        let name = match name.bytes().any(|byte| byte.is_ascii_uppercase()) {
            true => Cow::Owned(name.to_ascii_lowercase()),
            false => Cow::Borrowed(name),
        };
        if !is_own(&name) && Some(&*name) != but && !(has_connection && of_connection(&name)) {
            let value = match std::str::from_utf8(value) {
                Ok(value) => Cow::Borrowed(value),
                Err(_) => String::from_utf8_lossy(value),
            };
            metadata.push(metadata_name(&name), value);
        }
    }
    metadata
}

/// Avoids copying the names that most calls carry.
fn metadata_name(name: &str) -> Cow<'static, str> {
    const FREQUENT: [&str; 10] = [
        "accept",
        "authorization",
        "cookie",
        "set-cookie",
        "user-agent",
        "vary",
        gym_core::message::CODE_METADATA,
        gym_core::message::EXECUTION_METADATA,
        EPISODE_METADATA,
        INCARNATION_METADATA,
    ];
    match FREQUENT.into_iter().find(|known| *known == name) {
        Some(known) => Cow::Borrowed(known),
        None => Cow::Owned(name.to_owned()),
    }
}

/// Returns the media type of the body, and that of the head if the body is a frame.
pub(crate) fn media_types_of(headers: &HeaderMap) -> (Option<&str>, Option<&str>) {
    (text(headers, &CONTENT_TYPE), text(headers, &FRAMED_HEAD))
}

fn text<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}

fn number(headers: &HeaderMap, name: &HeaderName) -> Result<Option<u64>> {
    let Some(value) = headers.get(name) else { return Ok(None) };
    let number = value.to_str().ok().and_then(|text| text.trim_ascii().parse().ok());
    match number {
        Some(number) => Ok(Some(number)),
        None => Err(Error::invalid(format!("header `{name}` is {value:?}; it must be a whole number"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metadata_of(headers: &HeaderMap) -> Metadata {
        super::metadata_of(|| headers.iter().map(|(name, value)| (name.as_str(), value.as_bytes())), None)
    }

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(*name, HeaderValue::from_bytes(value.as_bytes()).unwrap());
        }
        headers
    }

    #[test]
    fn what_belongs_to_one_hop_is_no_metadata() {
        let metadata = metadata_of(&headers(&[
            ("host", "a"),
            ("connection", "keep-alive, X-Mine"),
            ("x-mine", "1"),
            ("content-length", "2"),
            ("cookie", "a=1"),
            ("x-other", "ü"),
        ]));
        assert_eq!(metadata.iter().collect::<Vec<_>>(), [("cookie", "a=1"), ("x-other", "ü")]);
    }

    #[test]
    fn a_repeated_name_keeps_its_values_in_order() {
        let mut metadata = Metadata::new();
        for value in ["a=1; Path=/", "b=2"] {
            metadata.push("set-cookie", value);
        }
        let mut wire = HeaderMap::new();
        put_metadata(&metadata, &mut wire).unwrap();
        assert_eq!(metadata_of(&wire), metadata);
    }

    #[test]
    fn metadata_that_is_no_header_is_named() {
        let mut metadata = Metadata::new();
        metadata.push("x-split", "a\r\nhost: b");
        let error = put_metadata(&metadata, &mut HeaderMap::new()).unwrap_err();
        assert!(error.to_string().contains("x-split"), "{error}");
    }

    #[test]
    fn a_timeout_that_is_no_number_is_named() {
        let error = context_of(&headers(&[("x-gym-timeout-ms", "soon")]), Duration::ZERO).unwrap_err();
        assert!(error.to_string().contains("x-gym-timeout-ms"), "{error}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_timeout_of_any_size_is_an_instant() {
        let context = context_of(&headers(&[("x-gym-timeout-ms", "18446744073709551615")]), Duration::ZERO).unwrap();
        assert_eq!(context.remaining(), Duration::from_millis(TIMEOUT_MS_MAX));
    }
    #[tokio::test(start_paused = true)]
    async fn a_peer_has_less_time_than_its_caller_waits_so_that_its_error_still_arrives() {
        for (left_ms, sent_ms) in [(0, 0), (1, 0), (100, 95), (1_000, 950), (10_000, 9_500), (7_200_000, 7_199_500)] {
            let context = CallContext::within(Duration::from_millis(left_ms));
            assert_eq!(timeout_ms(&context), sent_ms, "{left_ms}");
        }
    }
}

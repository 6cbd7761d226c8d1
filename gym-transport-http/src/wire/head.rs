//! Writes the header sections of requests and parses those of responses (RFC 9112).
//!
//! Reads and writes the bytes on the wire directly. Between two servers of this SDK, a header map would be built only to be
//! taken apart at both ends of every hop.

use std::mem::MaybeUninit;

use gym_core::transport::INCARNATION_METADATA;
use gym_core::{Code, Error, Metadata, Request, Result, Verb};
use http::Uri;
use httparse::{Header, ParserConfig, Status};

use crate::wire::body::BodyFormat;
use crate::wire::headers::{
    FRAMED_HEAD, INCARNATION, TIMEOUT, TRACEPARENT, content_type, end_to_end, is_name, is_value, metadata_of,
    timeout_ms,
};

/// Maximum number of headers in one response, the same as in hyper.
pub(crate) const HEADERS_MAX: usize = 100;

/// Maximum length of a route that is sent without being parsed; longer ones can exceed the limit of URIs.
const PLAIN_ROUTE_BYTES_MAX: usize = 256;

/// Maximum size of one response's header section. Cookies of several servers take a few thousand bytes.
pub(crate) const HEAD_BYTES_MAX: usize = 64 << 10;

/// Writes the header section of a request with a body of `length` bytes for `host`. All routes begin with `prefix`. `host` and
/// `prefix` were checked with their endpoint.
///
/// # Errors
/// `InvalidArgument`, with the value that HTTP cannot send.
pub(crate) fn write_request(request: &Request, host: &str, prefix: &str, length: usize) -> Result<Vec<u8>> {
    let (route, context) = (request.route.as_str(), &request.context);
    if !is_route(route) {
        return Err(Error::invalid(format!("route `{}` is not a path that HTTP can send", route.escape_debug())));
    }
    let mut head = Vec::with_capacity(512);
    for part in [request.verb.as_str(), " ", prefix, route, " HTTP/1.1\r\n"] {
        head.extend_from_slice(part.as_bytes());
    }
    put_header(&mut head, "host", host);
    // Without it, any coding is acceptable (RFC 9110, section 12.5.3), and this client decodes none.
    put_header(&mut head, "accept-encoding", "identity");
    let (media_type, of_head) = content_type(&request.message)?;
    for (name, value) in [("content-type", media_type), (FRAMED_HEAD.as_str(), of_head)] {
        if let Some(value) = value {
            put_header(&mut head, name, value);
        }
    }
    // A method that usually has a body announces a length of 0 if there is none.
    if length > 0 || matches!(request.verb, Verb::Post | Verb::Put | Verb::Patch) {
        put_number(&mut head, "content-length", length as u64);
    }
    put_number(&mut head, TIMEOUT.as_str(), timeout_ms(context));
    if let Some(incarnation) = context.incarnation {
        put_number(&mut head, INCARNATION.as_str(), incarnation.0);
    }
    if let Some(trace) = context.trace.to_traceparent() {
        put_header(&mut head, TRACEPARENT.as_str(), &trace);
    }
    for (name, value) in end_to_end(&context.metadata, Some(INCARNATION_METADATA)) {
        let wrong = |what| Error::invalid(format!("metadata `{name}` has a {what} that no HTTP header can have"));
        if !is_name(name) {
            return Err(wrong("name"));
        }
        if !is_value(value) {
            return Err(wrong("value"));
        }
        put_header(&mut head, name, value);
    }
    head.extend_from_slice(b"\r\n");
    Ok(head)
}

/// Returns `true` if HTTP can send the route. Most routes have only the characters of names, and need no parser.
fn is_route(route: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'/' | b'_' | b'-' | b'.');
    let plain = route.len() <= PLAIN_ROUTE_BYTES_MAX && route.bytes().all(is_plain);
    route.starts_with('/') && (plain || !route.contains('#') && Uri::try_from(route).is_ok())
}

fn put_number(head: &mut Vec<u8>, name: &str, number: u64) {
    put_header(head, name, itoa::Buffer::new().format(number));
}

fn put_header(head: &mut Vec<u8>, name: &str, value: &str) {
    for part in [name, ": ", value, "\r\n"] {
        head.extend_from_slice(part.as_bytes());
    }
}

/// The header section of a response.
#[derive(Debug, PartialEq)]
pub(crate) struct ResponseHead {
    /// Length of the header section.
    pub(crate) bytes: usize,
    pub(crate) status: u16,
    pub(crate) length: BodyLength,
    /// `true` if the peer keeps the connection open after the response.
    pub(crate) keeps_alive: bool,
    pub(crate) format: BodyFormat,
    pub(crate) metadata: Metadata,
}

/// The end of a response's body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BodyLength {
    Exactly(u64),
    Chunked,
    UntilClose,
}

impl ResponseHead {
    /// Parses the header section at the start of `input`; returns `None` if it is incomplete.
    ///
    /// # Errors
    /// `DataLoss`, unknown, if it is not HTTP.
    pub(crate) fn read(input: &[u8], verb: Verb) -> Result<Option<Self>> {
        let mut headers = [const { MaybeUninit::uninit() }; HEADERS_MAX];
        let mut answer = httparse::Response::new(&mut []);
        let parsed = ParserConfig::default().parse_response_with_uninit_headers(&mut answer, input, &mut headers);
        let bytes = match parsed.map_err(not_http)? {
            Status::Complete(bytes) => bytes,
            Status::Partial if input.len() >= HEAD_BYTES_MAX => return Err(not_http("its head does not end")),
            Status::Partial => return Ok(None),
        };
        let (status, headers) = (answer.code.unwrap_or_default(), &*answer.headers);
        if status == 101 {
            return Err(not_http("it changes to a protocol that nobody asked for"));
        }
        let pairs = || headers.iter().map(|header| (header.name, header.value));
        let says = |option: &str| listed(headers, "connection").any(|one| one.eq_ignore_ascii_case(option.as_bytes()));
        let keeps_alive = if answer.version == Some(1) { !says("close") } else { says("keep-alive") };
        let length = body_length(headers, status, verb)?;
        let format = BodyFormat::of(text(headers, "content-type"), text(headers, FRAMED_HEAD.as_str()));
        Ok(Some(Self { bytes, status, length, keeps_alive, format, metadata: metadata_of(pairs, None) }))
    }

    /// Returns `true` if the final response is still to come.
    pub(crate) fn is_interim(&self) -> bool {
        self.status < 200
    }
}

/// Returns the length of the body (RFC 9112, section 6.3).
fn body_length(headers: &[Header<'_>], status: u16, verb: Verb) -> Result<BodyLength> {
    if verb == Verb::Head || status < 200 || status == 204 || status == 304 {
        return Ok(BodyLength::Exactly(0));
    }
    if let Some(last) = listed(headers, "transfer-encoding").last() {
        return Ok(if last.eq_ignore_ascii_case(b"chunked") { BodyLength::Chunked } else { BodyLength::UntilClose });
    }
    let mut length = None;
    for one in listed(headers, "content-length") {
        let digits = Some(one).filter(|one| one.iter().all(u8::is_ascii_digit));
        let number = digits.and_then(|digits| std::str::from_utf8(digits).ok()?.parse::<u64>().ok());
        match number {
            Some(number) if length.is_none_or(|known| known == number) => length = Some(number),
            _ => return Err(not_http("its content-length is no length")),
        }
    }
    Ok(length.map_or(BodyLength::UntilClose, BodyLength::Exactly))
}

/// Returns the members of a list header, over all its lines.
fn listed<'a>(headers: &'a [Header<'a>], name: &'a str) -> impl Iterator<Item = &'a [u8]> {
    let lines = headers.iter().filter(move |header| header.name.eq_ignore_ascii_case(name));
    lines.flat_map(|header| header.value.split(|byte| *byte == b',')).map(<[u8]>::trim_ascii)
}

fn text<'a>(headers: &[Header<'a>], name: &str) -> Option<&'a str> {
    let header = headers.iter().find(|header| header.name.eq_ignore_ascii_case(name))?;
    std::str::from_utf8(header.value).ok()
}

/// Returns the error of a peer that does not respond with HTTP.
pub(crate) fn not_http(why: impl std::fmt::Display) -> Error {
    Error::unknown(Code::DataLoss, format!("what came back is not HTTP: {why}"))
}

#[cfg(test)]
mod tests {
    use gym_core::Message;

    use super::*;

    fn read(head: &str) -> Result<Option<ResponseHead>> {
        ResponseHead::read(head.as_bytes(), Verb::Post)
    }

    fn of(head: &str) -> ResponseHead {
        read(&format!("HTTP/1.1 200 OK\r\n{head}\r\n")).unwrap().expect(head)
    }

    #[test]
    fn a_head_is_read_once_it_is_all_there() {
        let whole = "HTTP/1.1 404 Not Found\r\nSet-Cookie: a=1\r\nset-cookie: b=2\r\nContent-Length: 3\r\n\r\nabc";
        let end = whole.len() - 3;
        for part in 0..end {
            assert_eq!(read(&whole[..part]).unwrap(), None, "{part}");
        }
        let head = read(whole).unwrap().unwrap();
        assert_eq!((head.bytes, head.status, head.length, head.keeps_alive), (end, 404, BodyLength::Exactly(3), true));
        assert_eq!(head.metadata.iter().collect::<Vec<_>>(), [("set-cookie", "a=1"), ("set-cookie", "b=2")]);
    }

    #[test]
    fn where_a_body_ends_is_what_the_specification_says() {
        for (head, extent) in [
            ("content-length: 5\r\n", BodyLength::Exactly(5)),
            ("content-length: 5, 5\r\ncontent-length: 5\r\n", BodyLength::Exactly(5)),
            ("content-length: 5\r\ntransfer-encoding: gzip, Chunked\r\n", BodyLength::Chunked),
            ("transfer-encoding: chunked\r\ntransfer-encoding: gzip\r\n", BodyLength::UntilClose),
            ("", BodyLength::UntilClose),
        ] {
            assert_eq!(of(head).length, extent, "{head}");
        }
        for head in ["content-length: 5\r\ncontent-length: 6", "content-length: +5", "content-length: "] {
            let error = read(&format!("HTTP/1.1 200 OK\r\n{head}\r\n\r\n")).unwrap_err();
            assert_eq!(error.code(), Code::DataLoss, "{head}");
        }
        let empty = ResponseHead::read(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n", Verb::Head).unwrap().unwrap();
        assert_eq!(empty.length, BodyLength::Exactly(0));
        assert_eq!(read("HTTP/1.1 304 Not Modified\r\n\r\n").unwrap().unwrap().length, BodyLength::Exactly(0));
    }

    #[test]
    fn a_connection_stays_unless_the_peer_or_its_age_says_otherwise() {
        assert!(of("").keeps_alive && !of("Connection: x, Close\r\n").keeps_alive);
        let old = |head: &str| read(&format!("HTTP/1.0 200 OK\r\n{head}\r\n")).unwrap().unwrap().keeps_alive;
        assert!(!old("") && old("connection: Keep-Alive\r\n"));
    }

    #[test]
    fn what_is_no_answer_is_said_to_be_none() {
        let endless = format!("HTTP/1.1 200 OK\r\nx: {}", "y".repeat(HEAD_BYTES_MAX));
        for text in ["SSH-2.0-OpenSSH_9.9\r\n\r\n", "HTTP/1.1 101 Switching Protocols\r\n\r\n", &endless] {
            let error = read(text).unwrap_err();
            assert_eq!((error.code(), error.execution()), (Code::DataLoss, gym_core::Execution::Unknown));
        }
    }

    #[test]
    fn a_request_without_a_body_says_so_where_one_is_usual() {
        let mut request = Request::get(gym_core::CallContext::default(), "/x?y=1");
        let head = |request: &Request| {
            let length = request.message.len();
            String::from_utf8(write_request(request, "a:1", "/p", length).unwrap()).unwrap()
        };
        let text = head(&request);
        assert!(text.starts_with("GET /p/x?y=1 HTTP/1.1\r\nhost: a:1\r\n") && !text.contains("content-"), "{text}");
        request.verb = Verb::Post;
        assert!(head(&request).contains("\r\ncontent-length: 0\r\n"));
        request.message = Message::json("{}");
        assert!(head(&request).contains("\r\ncontent-type: application/json\r\ncontent-length: 2\r\n"));
    }
}

//! Headers that precede a message: pure conversions between bytes and values.
//!
//! ```text
//! request   lengths | time left u64, µs | reply bytes u64 | flags u8 | verb u8 | incarnation u64? | trace u128, span u64?
//!           | route | media type | metadata
//! response  lengths | status u16 | media type | metadata
//! failed    code u8 | execution u8 | text
//! ```
//!
//! Little endian. `lengths` is the prefix of [`frame`](crate::message::frame), which a transport removes first, with
//! [`Lengths::take`](crate::message::frame::Lengths::take). A text is `length u32 | bytes`. Metadata is `count u32` and pairs of
//! texts.

use std::borrow::Cow;
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use tokio::time::Instant;

use crate::base::error::{Code, Error, Execution, Result};
use crate::message::PeerInfo;
use crate::message::frame::put_prefix;
use crate::message::{CallContext, Incarnation, TraceContext};
use crate::message::{ContentType, Message, Metadata, Request, Response, Route, Status, Verb};

/// Maximum bytes of a header: lengths of 65,536 segments, and as much again for metadata.
pub const HEADER_BYTES_MAX: usize = 1 << 20;
/// Maximum bytes of the reason why a call has no response.
pub const FAILED_BYTES_MAX: usize = (16 << 10) + 2;

/// Maximum remaining time. A longer time has the same effect, and could overflow an instant.
const TIME_LEFT_MAX: Duration = Duration::from_secs(365 * 24 * 3_600);

const HAS_INCARNATION: u8 = 1;
const HAS_TRACE: u8 = 2;
const IS_SAMPLED: u8 = 4;

/// The header of a request, which precedes its message.
#[derive(Clone, Debug)]
pub struct RequestHeader {
    /// The HTTP method.
    pub verb: Verb,
    /// Path and query.
    pub route: Route,
    /// Deadline, trace, metadata, and the limit of the reply: the bytes that the caller reserves for it.
    pub context: CallContext,
    /// The media type of the message head.
    pub content_type: ContentType,
}

/// Writes a request's header after `headroom` zeros. `reply_bytes_max` is the capacity that was reserved for the reply.
#[must_use]
pub fn put_request(
    headroom: usize,
    verb: Verb,
    route: &Route,
    context: &CallContext,
    reply_bytes_max: usize,
    message: &Message,
) -> BytesMut {
    let trace = Some(context.trace).filter(|trace| trace.trace_id != 0);
    let flags = [
        (context.incarnation.is_some(), HAS_INCARNATION),
        (trace.is_some(), HAS_TRACE),
        (trace.is_some_and(|trace| trace.sampled), IS_SAMPLED),
    ];
    let mut header = begin(headroom, message);
    // Rounded down: the peer must never assume more time than its caller waits.
    header.put_u64_le(u64::try_from(context.remaining().as_micros()).unwrap_or(u64::MAX));
    header.put_u64_le(reply_bytes_max as u64);
    header.put_u8(flags.into_iter().filter(|(is, _)| *is).map(|(_, flag)| flag).sum());
    header.put_u8(u8::try_from(Verb::ALL.iter().position(|known| *known == verb).unwrap_or(0)).unwrap_or(0));
    if let Some(incarnation) = context.incarnation {
        header.put_u64_le(incarnation.0);
    }
    if let Some(trace) = trace {
        header.put_u128_le(trace.trace_id);
        header.put_u64_le(trace.span_id);
    }
    put_text(route.as_str(), &mut header);
    put_content_type(&message.content_type, &mut header);
    put_metadata(&context.metadata, &mut header);
    header
}

impl RequestHeader {
    /// Reads the header after the lengths.
    ///
    /// # Errors
    /// `DataLoss` if the bytes were not written by [`put_request`].
    pub fn read(mut from: Bytes) -> Result<Self> {
        let left = Duration::from_micros(number64(&mut from)?).min(TIME_LEFT_MAX);
        let mut context = CallContext::until(Instant::now() + left);
        context.reply_bytes_max = size(&mut from)?;
        let (flags, verb) = (number8(&mut from)?, number8(&mut from)?);
        let verb = Verb::ALL.get(usize::from(verb)).copied().ok_or_else(|| malformed(format!("verb {verb}")))?;
        if flags & HAS_INCARNATION != 0 {
            context.incarnation = Some(Incarnation(number64(&mut from)?));
        }
        if flags & HAS_TRACE != 0 {
            let trace_id = from.try_get_u128_le().map_err(|_| short())?;
            let (span_id, sampled) = (number64(&mut from)?, flags & IS_SAMPLED != 0);
            context.trace = TraceContext { trace_id, span_id, sampled };
        }
        let route = Route::from(text(&mut from)?);
        let content_type = content_type(&mut from)?;
        context.metadata = metadata(&mut from)?;
        done(&from)?;
        Ok(Self { verb, route, context, content_type })
    }

    /// Creates the request after its message has arrived.
    #[must_use]
    pub fn into_request(self, peer: PeerInfo, head: Bytes, segments: Vec<Bytes>) -> Request {
        let Self { verb, route, context, content_type } = self;
        Request {
            verb,
            route,
            context,
            peer: Some(peer),
            message: Message { content_type, head: head.into(), segments },
        }
    }
}

/// The header of a response, which precedes its message.
#[derive(Clone, Debug)]
pub struct ResponseHeader {
    /// The HTTP status.
    pub status: Status,
    /// The media type of the message head.
    pub content_type: ContentType,
    /// Ordered name and value pairs.
    pub metadata: Metadata,
}

/// Writes the header of a response after `headroom` zeros.
#[must_use]
pub fn put_response(headroom: usize, response: &Response) -> BytesMut {
    let mut header = begin(headroom, &response.message);
    header.put_u16_le(response.status.0);
    put_content_type(&response.message.content_type, &mut header);
    put_metadata(&response.metadata, &mut header);
    header
}

impl ResponseHeader {
    /// Reads the header after the lengths.
    ///
    /// # Errors
    /// `DataLoss` if the bytes were not written by [`put_response`].
    pub fn read(mut from: Bytes) -> Result<Self> {
        let status = Status(from.try_get_u16_le().map_err(|_| short())?);
        let header = Self { status, content_type: content_type(&mut from)?, metadata: metadata(&mut from)? };
        done(&from)?;
        Ok(header)
    }

    /// Creates the response after its message has arrived.
    #[must_use]
    pub fn into_response(self, head: Bytes, segments: Vec<Bytes>) -> Response {
        let Self { status, content_type, metadata } = self;
        Response { status, metadata, message: Message { content_type, head: head.into(), segments } }
    }
}

/// Writes the reason why a call has no response, after `headroom` zeros. A message that is too long is truncated.
#[must_use]
pub fn put_failed(headroom: usize, error: &Error) -> BytesMut {
    let said = error.message().as_bytes();
    let said = &said[..said.len().min(FAILED_BYTES_MAX - 2)];
    let mut reason = BytesMut::with_capacity(headroom + 2 + said.len());
    reason.put_bytes(0, headroom);
    reason.put_u8(u8::try_from(Code::ALL.iter().position(|code| *code == error.code()).unwrap_or(0)).unwrap_or(0));
    reason.put_u8(match error.execution() {
        Execution::NotStarted => 0,
        Execution::Unknown => 1,
        Execution::Finished => 2,
    });
    reason.put_slice(said);
    reason
}

/// Reads the reason why a call has no response.
///
/// # Errors
/// `DataLoss` if the bytes were not written by [`put_failed`].
pub fn read_failed(mut from: Bytes) -> Result<Error> {
    let (code, execution) = (number8(&mut from)?, number8(&mut from)?);
    let code = Code::ALL.get(usize::from(code)).copied().ok_or_else(|| malformed(format!("code {code}")))?;
    let execution = match execution {
        0 => Execution::NotStarted,
        1 => Execution::Unknown,
        2 => Execution::Finished,
        other => return Err(malformed(format!("execution {other}"))),
    };
    Ok(Error::new(code, execution, String::from_utf8_lossy(&from).into_owned()))
}

/// Creates the error for malformed bytes, which end the connection.
pub fn malformed(said: impl Into<Cow<'static, str>>) -> Error {
    Error::unknown(Code::DataLoss, said)
}

fn short() -> Error {
    malformed("a header that ends too early")
}

fn done(from: &Bytes) -> Result<()> {
    if from.is_empty() { Ok(()) } else { Err(malformed(format!("a header with {} bytes too many", from.len()))) }
}

/// Begins a header with the headroom and the lengths.
fn begin(headroom: usize, message: &Message) -> BytesMut {
    let mut header = BytesMut::with_capacity(256 + 8 * message.segments.len());
    header.put_bytes(0, headroom);
    put_prefix(message, &mut header);
    header
}

fn put_text(text: &str, to: &mut BytesMut) {
    to.put_u32_le(u32::try_from(text.len()).unwrap_or(u32::MAX));
    to.put_slice(text.as_bytes());
}

/// Writes the media type. JSON, which nearly every message is, is written as an empty text.
fn put_content_type(content_type: &ContentType, to: &mut BytesMut) {
    put_text(if *content_type == ContentType::Json { "" } else { content_type.as_str() }, to);
}

fn put_metadata(metadata: &Metadata, to: &mut BytesMut) {
    to.put_u32_le(u32::try_from(metadata.len()).unwrap_or(u32::MAX));
    for (name, value) in metadata.iter() {
        put_text(name, to);
        put_text(value, to);
    }
}

fn text(from: &mut Bytes) -> Result<String> {
    let length = number32(from)? as usize;
    if from.len() < length {
        return Err(short());
    }
    let text = String::from_utf8(from.split_to(length).into());
    text.map_err(|_| malformed("a text that is not UTF-8"))
}

fn content_type(from: &mut Bytes) -> Result<ContentType> {
    let text = text(from)?;
    Ok(if text.is_empty() { ContentType::Json } else { ContentType::from_media_type(&text) })
}

fn metadata(from: &mut Bytes) -> Result<Metadata> {
    let count = number32(from)?;
    let mut metadata = Metadata::new();
    // Nothing is allocated for the count: missing bytes end the loop.
    for _ in 0..count {
        metadata.push(text(from)?, text(from)?);
    }
    Ok(metadata)
}

fn number8(from: &mut Bytes) -> Result<u8> {
    from.try_get_u8().map_err(|_| short())
}

pub(super) fn number32(from: &mut Bytes) -> Result<u32> {
    from.try_get_u32_le().map_err(|_| short())
}

pub(super) fn number64(from: &mut Bytes) -> Result<u64> {
    from.try_get_u64_le().map_err(|_| short())
}

pub(super) fn size(from: &mut Bytes) -> Result<usize> {
    Ok(usize::try_from(number64(from)?).unwrap_or(usize::MAX))
}

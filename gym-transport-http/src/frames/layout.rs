//! What stands on the wire: pure functions between bytes and words.
//!
//! ```text
//! frame     kind u8 | zero u8 | zero u16 | length u32 | call u64 | length bytes
//! request   lengths | time left u64, µs | reply room u64 | flags u8 | verb u8 | incarnation u64? | trace u128, span u64?
//!           | route | media type | metadata
//! response  lengths | status u16 | media type | metadata
//! failed    code u8 | execution u8 | text
//! ```
//!
//! Little endian. `lengths` is the prefix of [`gym_core::frame`]; a text is `length u32 | bytes`, metadata `count u32` and pairs
//! of texts. The first [`CHUNK_BYTES`] of a message follow its header at once, the others in body frames.

use std::borrow::Cow;
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use gym_core::frame::put_prefix;
use gym_core::{
    CallContext, Code, ContentType, Error, Execution, Incarnation, Message, Metadata, Response, Result, Route, Status,
    TraceContext, Verb,
};
use tokio::time::Instant;

use super::config::FramesConfig;

/// Bytes of a frame before its own.
pub(super) const FRAME_BYTES: usize = 16;
/// A message longer than this is cut, and what is urgent goes between the pieces: at 1 GB/s a heartbeat or a cancel waits a
/// millisecond, and the frame's own 16 bytes and the reads they cost are lost in the noise.
pub(super) const CHUNK_BYTES: usize = 1 << 20;
/// The largest header: lengths of 65,536 segments, and as much again for metadata.
pub(super) const HEADER_BYTES_MAX: usize = 1 << 20;
/// The longest text of a failure.
const FAILURE_BYTES_MAX: usize = 16 << 10;
const MAGIC: u32 = u32::from_le_bytes(*b"GYMC");
const VERSION: u32 = 1;
const GREETING_BYTES: usize = 48;

/// A time beyond this is the same as for ever, and keeps instants from overflowing.
const TIME_LEFT_MAX: Duration = Duration::from_secs(365 * 24 * 3_600);

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// The first one each way: versions and limits.
    Greeting,
    /// A call's header, its first chunk behind it.
    Request,
    /// An answer's header, its first chunk behind it.
    Response,
    /// A further chunk of the message that was begun last.
    Body,
    /// The caller has left.
    Cancel,
    /// The call has no answer, and why.
    Failed,
    /// I am here.
    Heartbeat,
    /// From the server: no new calls please. From the client: none will come.
    Drain,
}

impl Kind {
    const ALL: [Self; 8] = [
        Self::Greeting,
        Self::Request,
        Self::Response,
        Self::Body,
        Self::Cancel,
        Self::Failed,
        Self::Heartbeat,
        Self::Drain,
    ];

    /// The longest that a frame of this kind may announce.
    fn length_max(self) -> usize {
        match self {
            Self::Greeting => GREETING_BYTES,
            Self::Request | Self::Response => HEADER_BYTES_MAX,
            Self::Body => CHUNK_BYTES,
            Self::Failed => FAILURE_BYTES_MAX + 2,
            Self::Cancel | Self::Heartbeat | Self::Drain => 0,
        }
    }
}

/// The first bytes of every frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FrameHead {
    pub(super) kind: Kind,
    pub(super) length: usize,
    pub(super) call: u64,
}

impl FrameHead {
    /// Reads the first bytes of a frame; what it announces is within the bound of its kind.
    pub(super) fn read(bytes: [u8; FRAME_BYTES]) -> Result<Self> {
        let mut from = &bytes[..];
        let (number, zeros) = (from.get_u8(), (from.get_u8(), from.get_u16_le()));
        let (length, call) = (from.get_u32_le() as usize, from.get_u64_le());
        let kind = Kind::ALL.get(usize::from(number)).copied().filter(|_| zeros == (0, 0));
        let kind = kind.ok_or_else(|| malformed(format!("no frame begins with {:02x?}", &bytes[..4])))?;
        if length > kind.length_max() {
            return Err(malformed(format!("a {kind:?} frame of {length} bytes; {} is the most", kind.length_max())));
        }
        Ok(Self { kind, length, call })
    }

    pub(super) fn write(self, to: &mut BytesMut) {
        to.put_u8(self.kind as u8);
        to.put_bytes(0, 3);
        to.put_u32_le(u32::try_from(self.length).expect("lengths are bounded by kind"));
        to.put_u64_le(self.call);
    }
}

/// A frame that is complete with its first bytes.
pub(super) fn bare(kind: Kind, call: u64) -> Bytes {
    let mut bytes = BytesMut::with_capacity(FRAME_BYTES);
    FrameHead { kind, length: 0, call }.write(&mut bytes);
    bytes.freeze()
}

/// The first bytes of a further chunk.
pub(super) fn body_head(call: u64, length: usize) -> Bytes {
    let mut bytes = BytesMut::with_capacity(FRAME_BYTES);
    FrameHead { kind: Kind::Body, length, call }.write(&mut bytes);
    bytes.freeze()
}

/// Puts the call's number into a frame that is written already.
pub(super) fn number_frame(frame: &mut [u8], call: u64) {
    frame[FRAME_BYTES - 8..FRAME_BYTES].copy_from_slice(&call.to_le_bytes());
}

/// What each end tells the other first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Greeting {
    pub(super) calls_max: usize,
    pub(super) segments_max: usize,
    pub(super) request_bytes_in_flight_max: usize,
    pub(super) message_bytes_max: usize,
    pub(super) head_bytes_max: usize,
    pub(super) silence_max: Duration,
}

impl Greeting {
    pub(super) fn of(config: &FramesConfig) -> Self {
        Self {
            calls_max: config.calls_max,
            segments_max: config.segments_max,
            request_bytes_in_flight_max: config.request_bytes_in_flight_max,
            message_bytes_max: config.message_bytes_max,
            head_bytes_max: config.head_bytes_max,
            silence_max: config.silence_max,
        }
    }

    pub(super) fn frame(&self) -> Bytes {
        let mut bytes = BytesMut::with_capacity(FRAME_BYTES + GREETING_BYTES);
        FrameHead { kind: Kind::Greeting, length: GREETING_BYTES, call: 0 }.write(&mut bytes);
        bytes.put_u32_le(MAGIC);
        bytes.put_u32_le(VERSION);
        bytes.put_u32_le(u32::try_from(self.calls_max).unwrap_or(u32::MAX));
        bytes.put_u32_le(u32::try_from(self.segments_max).unwrap_or(u32::MAX));
        bytes.put_u64_le(self.request_bytes_in_flight_max as u64);
        bytes.put_u64_le(self.message_bytes_max as u64);
        bytes.put_u64_le(self.head_bytes_max as u64);
        bytes.put_u64_le(u64::try_from(self.silence_max.as_millis()).unwrap_or(u64::MAX));
        bytes.freeze()
    }

    pub(super) fn read(mut from: Bytes) -> Result<Self> {
        let (magic, version) = (number32(&mut from)?, number32(&mut from)?);
        if magic != MAGIC || version != VERSION {
            let said = format!("greeting {magic:#010x} of version {version}; this side speaks version {VERSION}");
            return Err(malformed(said));
        }
        let greeting = Self {
            calls_max: number32(&mut from)? as usize,
            segments_max: number32(&mut from)? as usize,
            request_bytes_in_flight_max: size(&mut from)?,
            message_bytes_max: size(&mut from)?,
            head_bytes_max: size(&mut from)?,
            silence_max: Duration::from_millis(number64(&mut from)?),
        };
        if greeting.calls_max == 0 || greeting.silence_max.is_zero() {
            return Err(malformed("a greeting that takes no calls or bears no silence"));
        }
        Ok(greeting)
    }
}

/// What a request says of itself before its message.
#[derive(Clone, Debug)]
pub(super) struct RequestHeader {
    pub(super) verb: Verb,
    pub(super) route: Route,
    pub(super) context: CallContext,
    pub(super) content_type: ContentType,
}

const HAS_INCARNATION: u8 = 1;
const HAS_TRACE: u8 = 2;
const IS_SAMPLED: u8 = 4;

/// The request's frame up to its message. `reply_bytes_max` is the room that was reserved.
pub(super) fn request_frame(
    call: u64,
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
    let mut frame = begin(message);
    // Rounded down: the peer must never believe that it has longer than its caller waits.
    frame.put_u64_le(u64::try_from(context.remaining().as_micros()).unwrap_or(u64::MAX));
    frame.put_u64_le(reply_bytes_max as u64);
    frame.put_u8(flags.into_iter().filter(|(is, _)| *is).map(|(_, flag)| flag).sum());
    frame.put_u8(u8::try_from(Verb::ALL.iter().position(|known| *known == verb).unwrap_or(0)).unwrap_or(0));
    if let Some(incarnation) = context.incarnation {
        frame.put_u64_le(incarnation.0);
    }
    if let Some(trace) = trace {
        frame.put_u128_le(trace.trace_id);
        frame.put_u64_le(trace.span_id);
    }
    put_text(route.as_str(), &mut frame);
    put_content_type(&message.content_type, &mut frame);
    put_metadata(&context.metadata, &mut frame);
    end(Kind::Request, call, frame)
}

impl RequestHeader {
    /// Reads what follows the lengths.
    pub(super) fn read(mut from: Bytes) -> Result<Self> {
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
}

/// What an answer says of itself before its message.
#[derive(Clone, Debug)]
pub(super) struct ResponseHeader {
    pub(super) status: Status,
    pub(super) content_type: ContentType,
    pub(super) metadata: Metadata,
}

/// The answer's frame up to its message.
pub(super) fn response_frame(call: u64, response: &Response) -> BytesMut {
    let mut frame = begin(&response.message);
    frame.put_u16_le(response.status.0);
    put_content_type(&response.message.content_type, &mut frame);
    put_metadata(&response.metadata, &mut frame);
    end(Kind::Response, call, frame)
}

impl ResponseHeader {
    /// Reads what follows the lengths.
    pub(super) fn read(mut from: Bytes) -> Result<Self> {
        let status = Status(from.try_get_u16_le().map_err(|_| short())?);
        let header = Self { status, content_type: content_type(&mut from)?, metadata: metadata(&mut from)? };
        done(&from)?;
        Ok(header)
    }
}

/// A call that has no answer.
pub(super) fn failed_frame(call: u64, error: &Error) -> Bytes {
    let said = error.message().as_bytes();
    let said = &said[..said.len().min(FAILURE_BYTES_MAX)];
    let mut frame = BytesMut::with_capacity(FRAME_BYTES + 2 + said.len());
    FrameHead { kind: Kind::Failed, length: 2 + said.len(), call }.write(&mut frame);
    frame.put_u8(u8::try_from(Code::ALL.iter().position(|code| *code == error.code()).unwrap_or(0)).unwrap_or(0));
    frame.put_u8(match error.execution() {
        Execution::NotStarted => 0,
        Execution::Unknown => 1,
        Execution::Finished => 2,
    });
    frame.put_slice(said);
    frame.freeze()
}

/// Why a call has no answer.
pub(super) fn read_failed(mut from: Bytes) -> Result<Error> {
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

/// Bytes that no peer of ours sends.
pub(super) fn malformed(said: impl Into<Cow<'static, str>>) -> Error {
    Error::unknown(Code::DataLoss, said)
}

fn short() -> Error {
    malformed("a header that ends too early")
}

fn done(from: &Bytes) -> Result<()> {
    if from.is_empty() { Ok(()) } else { Err(malformed(format!("a header with {} bytes too many", from.len()))) }
}

/// Leaves room for the frame's first bytes, and writes the lengths.
fn begin(message: &Message) -> BytesMut {
    let mut frame = BytesMut::with_capacity(256 + 8 * message.segments.len());
    frame.put_bytes(0, FRAME_BYTES);
    put_prefix(message, &mut frame);
    frame
}

/// Writes the frame's first bytes. One beyond `HEADER_BYTES_MAX` is the caller's to refuse.
fn end(kind: Kind, call: u64, mut frame: BytesMut) -> BytesMut {
    let length = frame.len() - FRAME_BYTES;
    let mut head = BytesMut::with_capacity(FRAME_BYTES);
    FrameHead { kind, length, call }.write(&mut head);
    frame[..FRAME_BYTES].copy_from_slice(&head);
    frame
}

fn put_text(text: &str, to: &mut BytesMut) {
    to.put_u32_le(u32::try_from(text.len()).unwrap_or(u32::MAX));
    to.put_slice(text.as_bytes());
}

/// JSON, which nearly every message is, is the empty text.
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
    // Nothing is reserved for the count: what is not there ends it.
    for _ in 0..count {
        metadata.push(text(from)?, text(from)?);
    }
    Ok(metadata)
}

fn number8(from: &mut Bytes) -> Result<u8> {
    from.try_get_u8().map_err(|_| short())
}

fn number32(from: &mut Bytes) -> Result<u32> {
    from.try_get_u32_le().map_err(|_| short())
}

fn number64(from: &mut Bytes) -> Result<u64> {
    from.try_get_u64_le().map_err(|_| short())
}

fn size(from: &mut Bytes) -> Result<usize> {
    Ok(usize::try_from(number64(from)?).unwrap_or(usize::MAX))
}

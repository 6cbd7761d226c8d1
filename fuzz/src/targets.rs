//! The targets, with one function each.

use bytes::Bytes;
use gym_core::message::frame::{self, Lengths};
use gym_core::message::{ContentType, TraceContext};
use gym_core::transport::mux::header::{put_failed, put_request, put_response, read_failed};
use gym_core::transport::mux::{self, Handshake, RequestHeader, ResponseHeader};
use gym_core::{CallContext, Message, Metadata, Route, Verb};
use gym_transport_rdma::fuzzing;

use crate::Target;

/// Small, so that inputs of a few hundred bytes reach every limit.
const LIMITS: frame::MessageLimits = frame::MessageLimits::new(1 << 10, 16, 4 << 10);

/// The strings of an error, and the fixed cost of a call.
const FIXED_BYTES: usize = 2 << 10;

/// The fixed cost of a calling end.
const CALLER_BYTES: usize = 8 << 10;

/// The buffers with which a connection reads frames: its staging buffer, which grows to the largest header, and a message within
/// the limits.
const CONNECTION_BYTES: usize =
    (64 << 10) + gym_core::transport::mux::header::HEADER_BYTES_MAX + 2 * LIMITS.message_bytes_max;

/// All targets.
pub const TARGETS: &[Target] = &[
    Target {
        name: "message",
        read: message,
        // Eight bytes announce a segment: its length and its slice take 40 bytes, and the serialization for comparison as much
        // again.
        allowed: |input| FIXED_BYTES + 12 * input,
    },
    Target {
        name: "header",
        read: header,
        // Eight bytes can be a pair of metadata, which takes 48 bytes in a list that doubles; parsed twice for comparison.
        allowed: |input| FIXED_BYTES + 32 * input,
    },
    Target {
        name: "bootstrap",
        read: bootstrap,
        // Two hexadecimal digits per byte; strings are copied when they are parsed, and serialized again for comparison.
        allowed: |input| FIXED_BYTES + 16 * input,
    },
    Target {
        name: "ucx_requests",
        read: ucx_requests,
        // Five bytes can describe a first chunk: a message within its limits, and its state.
        allowed: |input| FIXED_BYTES + 8 * LIMITS.message_bytes_max * (1 + input),
    },
    Target {
        name: "ucx_responses",
        read: ucx_responses,
        // As for requests. A call takes two bytes of input, and needs its header, the state of its task and its strings.
        allowed: |input| CALLER_BYTES + 8 * LIMITS.message_bytes_max * (1 + input),
    },
    Target { name: "frames", read: frames, allowed: |input| FIXED_BYTES + CONNECTION_BYTES + 32 * input },
];

/// Parses a complete framed message, as in an HTTP body.
fn message(input: &Bytes) {
    for limits in [LIMITS, frame::MessageLimits::default()] {
        if let Ok(message) = frame::decode(input.clone(), &limits, ContentType::Json) {
            assert!(message.len() <= limits.message_bytes_max);
            // The reserved field is ignored.
            let again = frame::encode(&message).to_bytes();
            assert!(again.len() == input.len() && again[8..] == input[8..], "what was read is what was written");
        }
    }
}

/// Parses the header of a message on an ordered connection; the first byte selects its kind.
fn header(input: &Bytes) {
    let Some(first) = input.first() else { return };
    let input = input.slice(1..);
    match first % 4 {
        0 => {
            if let Ok(header) = RequestHeader::read(input) {
                let message = Message { content_type: header.content_type.clone(), ..Message::default() };
                let room = header.context.reply_bytes_max;
                let again = put_request(0, header.verb, &header.route, &header.context, room, &message);
                let again = RequestHeader::read(behind_the_lengths(again.freeze()));
                assert_eq!(said(&again.expect("what was written is read")), said(&header));
            }
        }
        1 => {
            if let Ok(header) = ResponseHeader::read(input) {
                let before = (header.status, header.content_type.clone(), header.metadata.clone());
                let again = put_response(0, &header.into_response(Bytes::new(), Vec::new()));
                let again = ResponseHeader::read(behind_the_lengths(again.freeze())).expect("what was written is read");
                assert_eq!((again.status, again.content_type, again.metadata), before);
            }
        }
        2 => {
            if let Ok(error) = read_failed(input) {
                let again = read_failed(put_failed(0, &error).freeze()).expect("what was written is read");
                assert_eq!((again.code(), again.execution()), (error.code(), error.execution()));
            }
        }
        _ => {
            if let Ok(greeting) = Handshake::read(input.clone()) {
                let mut again = bytes::BytesMut::with_capacity(Handshake::BYTES);
                greeting.put(&mut again);
                assert_eq!(again, input);
            }
        }
    }
}

fn behind_the_lengths(mut written: Bytes) -> Bytes {
    Lengths::take(&mut written, &frame::MessageLimits::default()).expect("a header begins with lengths");
    written
}

/// Returns all fields of a request's header except the remaining time.
fn said(header: &RequestHeader) -> (Verb, &Route, &ContentType, &Metadata, TraceContext, usize) {
    let CallContext { trace, metadata, reply_bytes_max, .. } = &header.context;
    // A trace without an id counts as no trace.
    let trace = Some(*trace).filter(|trace| trace.trace_id != 0).unwrap_or_default();
    (header.verb, &header.route, &header.content_type, metadata, trace, *reply_bytes_max)
}

/// Parses a connection's bytes in reads of the length that the first byte specifies.
fn frames(input: &Bytes) {
    let Some((first, came)) = input.split_first() else { return };
    if let Ok(landed) = gym_transport_http::frames::testing::read_frames(came, &LIMITS, usize::from(*first) + 1) {
        assert!(landed <= came.len(), "{landed} bytes of messages in {} bytes", came.len());
    }
}

/// Parses one of the two strings of the UCX bootstrap, or the prefix of an active message, selected by the first byte.
fn bootstrap(input: &Bytes) {
    let Some((first, came)) = input.split_first() else { return };
    let again = |written: String, read: fn(&[u8]) -> gym_core::Result<String>| {
        assert_eq!(read(written.as_bytes()).expect("what was written is read"), written);
    };
    match first % 3 {
        0 => {
            if let Ok(written) = fuzzing::read_bootstrap_request(came) {
                again(written, fuzzing::read_bootstrap_request);
            }
        }
        1 => {
            if let Ok(written) = fuzzing::read_bootstrap_response(came) {
                again(written, fuzzing::read_bootstrap_response);
            }
        }
        _ => {
            if let Some(written) = fuzzing::read_prefix(came) {
                // Four reserved bytes are ignored.
                assert!(written.len() == came.len() && written[..20] == came[..20] && written[24..] == came[24..]);
            }
        }
    }
}

/// Passes active messages to an answering end of UCX: first chunks, further chunks in any order, cancels, and payloads that
/// complete later.
fn ucx_requests(input: &Bytes) {
    let _ = fuzzing::take_requests(input, &LIMITS);
}

/// Passes active messages to a calling end of UCX: complete or chunked responses, and failures, while callers start and disconnect.
fn ucx_responses(input: &Bytes) {
    let mut limits = mux::ConnectionLimits::default();
    limits.head_bytes_max = LIMITS.head_bytes_max;
    limits.segments_max = LIMITS.segments_max;
    limits.message_bytes_max = LIMITS.message_bytes_max;
    let _ = fuzzing::take_responses(input, &limits);
}

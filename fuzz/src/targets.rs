//! The readers, one function each.

use bytes::Bytes;
use gym_core::message::frame::{self, Lengths};
use gym_core::message::{ContentType, TraceContext};
use gym_core::transport::mux::header::{put_failed, put_request, put_response, read_failed};
use gym_core::transport::mux::{self, Handshake, RequestHeader, ResponseHeader};
use gym_core::{CallContext, Message, Metadata, Route, Verb};
use gym_transport_rdma::fuzzing;

use crate::Target;

/// Small, so that inputs of a few hundred bytes reach every limit.
const LIMITS: frame::MessageLimits =
    frame::MessageLimits { head_bytes_max: 1 << 10, segments_max: 16, message_bytes_max: 4 << 10 };

/// The texts of an error, and what a call has besides what came.
const FIXED_BYTES: usize = 2 << 10;

/// What a calling end has before anything comes.
const CALLER_BYTES: usize = 8 << 10;

/// What one connection keeps to read frames: its staging buffer, which grows to the largest header, and a message within the
/// limits.
const CONNECTION_BYTES: usize =
    (64 << 10) + gym_core::transport::mux::header::HEADER_BYTES_MAX + 2 * LIMITS.message_bytes_max;

/// All readers.
pub const TARGETS: &[Target] = &[
    Target {
        name: "message",
        read: message,
        // Eight bytes announce a segment: its length and its slice take 40, and as much again to write it for comparison.
        allowed: |input| FIXED_BYTES + 12 * input,
    },
    Target {
        name: "header",
        read: header,
        // Eight bytes are a pair of metadata, which takes 48 in a list that doubles; read twice for comparison.
        allowed: |input| FIXED_BYTES + 32 * input,
    },
    Target {
        name: "bootstrap",
        read: bootstrap,
        // Two hexadecimal digits a byte; texts are copied as they are read, and written again for comparison.
        allowed: |input| FIXED_BYTES + 16 * input,
    },
    Target {
        name: "ucx_requests",
        read: ucx_requests,
        // Five bytes may describe a first chunk: a message within its bounds, and what is kept of it.
        allowed: |input| FIXED_BYTES + 8 * LIMITS.message_bytes_max * (1 + input),
    },
    Target {
        name: "ucx_responses",
        read: ucx_responses,
        // As for requests. A call that is made takes two bytes of input, and needs its header, its task's state and its texts.
        allowed: |input| CALLER_BYTES + 8 * LIMITS.message_bytes_max * (1 + input),
    },
    Target { name: "frames", read: frames, allowed: |input| FIXED_BYTES + CONNECTION_BYTES + 32 * input },
];

/// A whole framed message, as it lies in an HTTP body.
fn message(input: &Bytes) {
    for limits in [LIMITS, frame::MessageLimits::default()] {
        if let Ok(message) = frame::decode(input.clone(), &limits, ContentType::Json) {
            assert!(message.len() <= limits.message_bytes_max);
            // The reserved field is not looked at.
            let again = frame::encode(&message).to_bytes();
            assert!(again.len() == input.len() && again[8..] == input[8..], "what was read is what was written");
        }
    }
}

/// What stands before a message on an ordered connection; the first byte says what it is.
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

/// All that a request's header says but the time that is left.
fn said(header: &RequestHeader) -> (Verb, &Route, &ContentType, &Metadata, TraceContext, usize) {
    let CallContext { trace, metadata, reply_bytes_max, .. } = &header.context;
    // A trace without an id is none.
    let trace = Some(*trace).filter(|trace| trace.trace_id != 0).unwrap_or_default();
    (header.verb, &header.route, &header.content_type, metadata, trace, *reply_bytes_max)
}

/// A connection's bytes, cut into reads of the length that the first byte says.
fn frames(input: &Bytes) {
    let Some((first, came)) = input.split_first() else { return };
    if let Ok(landed) = gym_transport_http::frames::testing::read_frames(came, &LIMITS, usize::from(*first) + 1) {
        assert!(landed <= came.len(), "{landed} bytes of messages in {} bytes", came.len());
    }
}

/// The two texts by which UCX's ends come to know each other, and the prefix of an active message; the first byte says which.
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
                // Four reserved bytes are not looked at.
                assert!(written.len() == came.len() && written[..20] == came[..20] && written[24..] == came[24..]);
            }
        }
    }
}

/// Active messages to an answering end of UCX: first chunks, further chunks in any order, cancels, and payloads that complete later.
fn ucx_requests(input: &Bytes) {
    let _ = fuzzing::take_requests(input, &LIMITS);
}

/// Active messages to a calling end of UCX: responses, whole or in chunks, failures, and callers that come and leave meanwhile.
fn ucx_responses(input: &Bytes) {
    let limits = mux::ConnectionLimits {
        head_bytes_max: LIMITS.head_bytes_max,
        segments_max: LIMITS.segments_max,
        message_bytes_max: LIMITS.message_bytes_max,
        ..mux::ConnectionLimits::default()
    };
    let _ = fuzzing::take_responses(input, &limits);
}

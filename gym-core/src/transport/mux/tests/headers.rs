//! Tests that written headers are read, and that foreign bytes are rejected.

use proptest::prelude::*;

use super::super::header::{FAILED_BYTES_MAX, put_failed, put_request, put_response, read_failed};
use super::*;
use crate::base::error::{Code, Execution};
use crate::message::{ContentType, Metadata, Response, Route, Status, Verb};
use crate::message::{Incarnation, TraceContext};

fn pairs() -> impl Strategy<Value = Vec<(String, String)>> {
    prop::collection::vec((".{0,12}", ".{0,12}"), 0..4)
}

fn metadata(pairs: &[(String, String)]) -> Metadata {
    let mut metadata = Metadata::new();
    for (name, value) in pairs {
        metadata.push(name.clone(), value.clone());
    }
    metadata
}

fn message(sizes: &[usize]) -> Message {
    let segments = sizes.iter().map(|size| Bytes::from(vec![1; *size])).collect();
    Message { content_type: ContentType::Json, head: "{}".into(), segments }
}

proptest! {
    #[test]
    fn a_request_is_read_as_it_was_written(
        (route, verb, headroom) in ("/[a-z/]{0,20}", 0..Verb::ALL.len(), 0..40_usize),
        (incarnation, trace_id, span_id, sampled) in any::<(Option<u64>, u128, u64, bool)>(),
        (reply, pairs, sizes) in (any::<u32>(), pairs(), prop::collection::vec(0..99_usize, 0..4)),
    ) {
        let mut context = CallContext::within(LONG_TIMEOUT);
        context.incarnation = incarnation.map(Incarnation);
        context.trace = TraceContext { trace_id, span_id, sampled };
        context.metadata = metadata(&pairs);
        let message = message(&sizes);
        let header = put_request(headroom, Verb::ALL[verb], &Route::from(route.clone()), &context, reply as usize, &message);
        prop_assert!(header[..headroom].iter().all(|byte| *byte == 0));
        let mut header = header.freeze().split_off(headroom);
        let lengths = Lengths::take(&mut header, &crate::message::frame::MessageLimits::default()).unwrap();
        prop_assert_eq!((lengths.head, lengths.segments), (2, sizes));
        let read = RequestHeader::read(header).unwrap();
        prop_assert_eq!((read.route.as_str(), read.verb), (route.as_str(), Verb::ALL[verb]));
        prop_assert_eq!(read.context.incarnation, context.incarnation);
        prop_assert_eq!(read.context.reply_bytes_max, reply as usize);
        prop_assert_eq!(&read.context.metadata, &context.metadata);
        prop_assert!(read.context.remaining() <= LONG_TIMEOUT && read.content_type == ContentType::Json);
        if trace_id != 0 {
            prop_assert_eq!(read.context.trace, context.trace);
        }
    }

    #[test]
    fn an_answer_is_read_as_it_was_written(status in 100..600_u16, pairs in pairs(), kind in "[a-z]{1,9}/[a-z]{1,9}") {
        let mut message = message(&[3]);
        message.content_type = ContentType::from_media_type(&kind);
        let written = Response { status: Status(status), metadata: metadata(&pairs), message };
        let mut header = put_response(0, &written).freeze();
        Lengths::take(&mut header, &crate::message::frame::MessageLimits::default()).unwrap();
        let read = ResponseHeader::read(header).unwrap();
        let message = &written.message;
        let read = read.into_response(message.head.to_bytes(), message.segments.clone());
        prop_assert_eq!((read.status, read.metadata, read.message), (written.status, written.metadata, written.message));
    }

    #[test]
    fn no_bytes_make_a_reader_panic(mut bytes in prop::collection::vec(any::<u8>(), 0..300), at in any::<usize>()) {
        let valid = put_request(0, Verb::Post, &Route::from_static("/x"), &CallContext::default(), 9, &message(&[1]));
        let mut valid = valid.freeze();
        Lengths::take(&mut valid, &crate::message::frame::MessageLimits::default()).unwrap();
        // Arbitrary bytes, and a valid header whose end is replaced by arbitrary bytes.
        let anything = Bytes::from(bytes.clone());
        let mut mixed = valid[..at % valid.len()].to_vec();
        mixed.append(&mut bytes);
        for bytes in [anything, mixed.into()] {
            let _ = (RequestHeader::read(bytes.clone()), ResponseHeader::read(bytes.clone()));
            let _ = (Handshake::read(bytes.clone()), read_failed(bytes));
        }
    }
}

#[test]
fn a_failure_keeps_its_code_and_execution_and_the_beginning_of_its_text() {
    for code in Code::ALL {
        for execution in [Execution::NotStarted, Execution::Unknown, Execution::Finished] {
            let said = "x".repeat(20_000);
            let reason = put_failed(5, &Error::new(code, execution, said.clone())).freeze().split_off(5);
            assert!(reason.len() <= FAILED_BYTES_MAX);
            let read = read_failed(reason).unwrap();
            assert_eq!((read.code(), read.execution()), (code, execution));
            assert!(said.starts_with(read.message()) && read.message().len() > 10_000);
        }
    }
}

#[test]
fn a_handshake_is_read_as_it_was_written_and_one_that_takes_nothing_is_refused() {
    let limits = ConnectionLimits { calls_max: 5, segments_max: 6, ..ConnectionLimits::default() };
    let written = |limits: &ConnectionLimits| {
        let mut bytes = BytesMut::new();
        Handshake::of(limits).put(&mut bytes);
        assert_eq!(bytes.len(), Handshake::BYTES);
        bytes.freeze()
    };
    assert_eq!(Handshake::read(written(&limits)).unwrap(), Handshake::of(&limits));
    for refused in [
        ConnectionLimits { calls_max: 0, ..limits.clone() },
        ConnectionLimits { silence_max: Duration::ZERO, ..limits.clone() },
    ] {
        assert_eq!(Handshake::read(written(&refused)).unwrap_err().code(), Code::DataLoss);
    }
    let mut other = written(&limits).to_vec();
    other[4] = 9;
    assert!(Handshake::read(other.into()).unwrap_err().to_string().contains("version 9"));
}

//! Sends messages through a send queue and the reassembly without a fabric: the test delivers the posted messages.

use std::sync::Arc;
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use futures_util::FutureExt;
use gym_core::message::frame::MessageLimits;
use gym_core::message::{ContentType, PeerInfo};
use gym_core::transport::mux::header::{put_request, put_response};
use gym_core::transport::mux::{
    self, AnsweringEnd, CapacityPermit, Flush, Handshake, MessageSender as _, MuxLink, RequestHeader,
};
use gym_core::transport::{Link as _, PathInfo, Reply, handler_fn};
use gym_core::{CallContext, Code, Error, Message, Request, Response, Result, Rope, Route, Status, Verb};
use parking_lot::Mutex;
use proptest::prelude::*;
use tokio::sync::Semaphore;

use crate::fabric::{ActiveMessage, Delivery, Disposition, EagerBytes, Lanes, Payload};
use crate::memory::{Pool, PoolOptions};
use crate::messaging::answering::request_queue::RequestQueue;
use crate::messaging::calling::CallingEvents;
use crate::messaging::header::{AmHeader, AmKind};
use crate::messaging::layout::CUT_BYTES;
use crate::messaging::reassembly::Reassembly;
use crate::messaging::reassembly::message::CompleteMessage;
use crate::messaging::send_queue::{Carrier, EndRole, UcxSendQueue};

/// Records posted messages.
#[derive(Clone, Debug, Default)]
struct Recorder(Arc<Mutex<Vec<Kept>>>);

struct Kept(AmHeader, ActiveMessage);

impl std::fmt::Debug for Kept {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} of {} bytes", self.0, self.1.payload.len())
    }
}

impl Carrier for Recorder {
    fn post(&self, message: ActiveMessage) -> Result<()> {
        let am = AmHeader::read(&message.header)?;
        assert_eq!(message.delivery, am.kind.delivery());
        self.0.lock().push(Kept(am, message));
        Ok(())
    }

    fn close(&self, _grace: Duration) {}
}

impl Recorder {
    /// Takes the posted messages and completes their sends.
    fn take(&self) -> Vec<(AmHeader, Bytes)> {
        let mut taken = Vec::new();
        loop {
            let kept = std::mem::take(&mut *self.0.lock());
            if kept.is_empty() {
                return taken;
            }
            for Kept(am, mut message) in kept {
                if let Some(done) = message.done.take() {
                    done(Ok(()));
                }
                taken.push((am, message.payload));
            }
        }
    }

    fn kinds(&self) -> Vec<(AmKind, u64)> {
        self.0.lock().iter().map(|Kept(am, _)| (am.kind, am.call)).collect()
    }
}

fn requests() -> RequestQueue {
    RequestQueue::new(Reassembly::new(MessageLimits::default(), usize::MAX))
}

fn send_queue(recorder: &Recorder, cut: usize) -> UcxSendQueue<Recorder> {
    UcxSendQueue::new(recorder.clone(), cut, EndRole::Answering)
}

fn message(sizes: &[usize]) -> Message {
    let part = |(at, size): (usize, &usize)| (0..*size).map(|byte| (byte * 31 + at) as u8).collect::<Vec<_>>();
    let mut parts = sizes.iter().enumerate().map(part);
    let head: Vec<u8> = parts.next().unwrap_or_default();
    // Two slices, as in a head that was spliced.
    let half = head.len() / 2;
    let head: Rope =
        [Bytes::copy_from_slice(&head[..half]), Bytes::copy_from_slice(&head[half..])].into_iter().collect();
    Message { content_type: ContentType::Json, head, segments: parts.map(Bytes::from).collect() }
}

fn post(send_queue: &UcxSendQueue<Recorder>, message: &Message, metadata_bytes: usize) -> u64 {
    let mut context = CallContext::default();
    context.metadata.push("long", "m".repeat(metadata_bytes));
    let header = put_request(0, Verb::Post, &Route::from_static("/x"), &context, 9, message);
    send_queue.post_request(header, message, CapacityPermit::default(), Flush::Now, |_| Ok(())).unwrap()
}

/// Delivers active messages to a request queue. Short ones are eager and borrowed; longer ones are announced and land
/// in the order of `turns`.
fn deliver(
    requests: &mut RequestQueue,
    messages: Vec<(AmHeader, Bytes)>,
    cut: usize,
    turns: &[usize],
) -> Result<Vec<(u64, CompleteMessage<RequestHeader>)>> {
    let (mut out, mut landing, pool) = (Vec::new(), Vec::new(), Pool::new(PoolOptions::default()));
    for (am, bytes) in messages {
        let payload = if bytes.len() >= cut {
            Payload::Announced(bytes.len() as u64)
        } else {
            Payload::Eager(EagerBytes::Borrowed(&bytes))
        };
        match am.kind {
            AmKind::Request | AmKind::HeaderRest => {
                if let Some(first_chunk) = requests.begin(am, &payload)? {
                    requests.keep(first_chunk)?;
                }
            }
            AmKind::Chunk => {
                if let Disposition::Land { key } = requests.chunk(am, &payload)? {
                    landing.push((key, pool.copy(&bytes)?));
                }
            }
            AmKind::Cancel => {
                requests.cancel(am.call)?;
            }
            other => panic!("{other:?}"),
        }
        out.extend(std::iter::from_fn(|| requests.next()));
    }
    for turn in turns.iter().copied().chain(std::iter::repeat(0)) {
        if landing.is_empty() {
            break;
        }
        let (key, bytes) = landing.swap_remove(turn % landing.len());
        requests.landed(key, bytes);
        out.extend(std::iter::from_fn(|| requests.next()));
    }
    Ok(out)
}

fn sizes() -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(prop_oneof![4 => 0..300_usize, 2 => 900..1_500_usize, 1 => 2_000..9_000_usize], 1..9)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn messages_arrive_as_they_were_posted_and_in_that_order_whichever_chunk_lands_first(
        shapes in prop::collection::vec((sizes(), prop_oneof![3 => 0..40_usize, 1 => 1_000..9_000_usize]), 1..8),
        turns in prop::collection::vec(any::<usize>(), 0..40),
        cut in 1_024..3_000_usize,
    ) {
        let recorder = Recorder::default();
        let queue = send_queue(&recorder, cut);
        let sent: Vec<_> = shapes.iter().map(|(sizes, metadata)| {
            let message = message(sizes);
            (post(&queue, &message, *metadata), message, *metadata)
        }).collect();
        let messages = recorder.take();
        for (am, bytes) in &messages {
            let alone = sent.iter().flat_map(|(_, message, _)| &message.segments).any(|segment| segment.as_ptr() == bytes.as_ptr());
            prop_assert!(bytes.len() < cut || am.kind == AmKind::Chunk, "only chunks are announced");
            prop_assert!(bytes.len() < cut || alone || am.first == 1, "large segments leave from where they lie");
        }
        let mut requests = requests();
        let landed = deliver(&mut requests, messages, cut, &turns).unwrap();
        prop_assert_eq!(landed.len(), sent.len());
        for ((call, landed), (sent_call, sent, metadata)) in landed.into_iter().zip(sent) {
            prop_assert_eq!(call, sent_call);
            prop_assert_eq!(landed.header.context.metadata.get("long").unwrap().len(), metadata);
            prop_assert!(landed.segments.iter().all(|segment| segment.is_empty() || segment.as_ptr().addr() % 64 == 0));
            prop_assert!(landed.head == sent.head.to_bytes() && landed.segments == sent.segments);
        }
        prop_assert!(requests.is_at_rest());
    }

    #[test]
    fn no_messages_make_the_reassembly_panic_or_keep_what_did_not_come(
        messages in prop::collection::vec(
            (0..6_u8, 0..3_000_u32, prop_oneof![Just(2_048_u32), any::<u32>()], 0..4_u64, prop::collection::vec(any::<u8>(), 0..80)),
            1..12,
        ),
        valid in any::<bool>(),
        announced in any::<u64>(),
    ) {
        let mut requests = requests();
        let recorder = Recorder::default();
        post(&send_queue(&recorder, 1 << 10), &message(&[3, 5_000]), 1);
        let first_chunk = recorder.take().remove(0);
        if valid {
            deliver(&mut requests, vec![first_chunk], 1 << 10, &[]).unwrap();
        }
        for (kind, first, second, call, bytes) in messages {
            let kind = [AmKind::Request, AmKind::HeaderRest, AmKind::Chunk, AmKind::Cancel][usize::from(kind) % 4];
            let am = AmHeader { kind, first, second, call };
            let announced = Payload::Announced(announced);
            let _ = requests.chunk(AmHeader { kind: AmKind::Chunk, ..am }, &announced);
            let _ = deliver(&mut requests, vec![(am, bytes.into())], usize::MAX, &[]);
        }
    }
}

#[test]
fn a_header_is_read_as_it_was_written_and_another_is_refused() {
    for number in 0..=u8::MAX {
        let mut bytes = BytesMut::from(&AmHeader { kind: AmKind::Chunk, first: 7, second: 8, call: 9 }.write()[..]);
        bytes[0] = number;
        match AmHeader::read(&bytes) {
            Ok(am) => assert_eq!((am.write(), am.kind as u8), (bytes.clone().freeze(), number)),
            Err(_) => assert!(number > AmKind::Pong as u8),
        }
        bytes.put_u8(0);
        AmHeader::read(&bytes).unwrap_err();
        AmHeader::read(&bytes[..19]).unwrap_err();
    }
}

#[test]
fn the_fabric_has_a_bounded_number_of_messages_at_a_time() {
    let recorder = Recorder::default();
    let queue = send_queue(&recorder, 1 << 10);
    for _ in 0..1_000 {
        post(&queue, &message(&[2]), 0);
    }
    assert!(recorder.kinds().len() < 1_000, "the others wait");
    let calls: Vec<_> = recorder.take().iter().map(|(am, _)| am.call).collect();
    assert_eq!(calls, (1..=1_000).collect::<Vec<_>>());
}

#[test]
fn a_request_that_has_not_begun_is_taken_back_and_one_that_has_is_cancelled() {
    let recorder = Recorder::default();
    let queue = send_queue(&recorder, 1 << 10);
    // More chunks than the fabric accepts at once.
    let large = message(&[[2].as_slice(), &[2_000; 300]].concat());
    for message in [&large, &message(&[3]), &large] {
        post(&queue, message, 0);
    }
    queue.cancel(2, CapacityPermit::default());
    queue.cancel(1, CapacityPermit::default());
    queue.cancel(77, CapacityPermit::default());
    let before = recorder.kinds().len();
    let taken = recorder.take();
    let of = |call| taken.iter().filter(|(am, _)| am.call == call).map(|(am, _)| am.kind).collect::<Vec<_>>();
    assert!(of(2).is_empty(), "nothing of it has left");
    assert_eq!(
        of(1).iter().filter(|kind| **kind != AmKind::Cancel).count(),
        before - 2,
        "the rest of it does not leave"
    );
    assert!(of(1).contains(&AmKind::Cancel) && of(77) == [AmKind::Cancel], "it may have left long ago");
    let chunks = of(3).iter().filter(|kind| **kind == AmKind::Chunk).count();
    assert_eq!(
        chunks, 301,
        "whole: every segment, and the head, which does not fit into the first chunk after such a long header"
    );
}

#[test]
fn a_cancelled_request_holds_nobody_up_whether_it_comes_before_its_cancel_or_after() {
    let (recorder, mut requests) = (Recorder::default(), requests());
    let queue = send_queue(&recorder, 1 << 10);
    for message in [message(&[2, 5_000]), message(&[3]), message(&[4, 5_000]), message(&[5])] {
        post(&queue, &message, 0);
    }
    let mut messages = recorder.take();
    // Only the first chunk of call 1 has arrived. The cancellation of call 3 has overtaken its request.
    assert_eq!(messages.remove(1).0.kind, AmKind::Chunk);
    messages.insert(2, (AmHeader::bare(AmKind::Cancel, 3), Bytes::new()));
    messages.push((AmHeader::bare(AmKind::Cancel, 1), Bytes::new()));
    let landed = deliver(&mut requests, messages, 1 << 10, &[]).unwrap();
    assert_eq!(landed.iter().map(|(call, _)| *call).collect::<Vec<_>>(), [2, 4]);
    assert!(requests.is_at_rest());
}

#[test]
fn a_chunk_that_is_not_as_announced_or_comes_twice_is_refused() {
    let opened = || {
        let (recorder, mut requests) = (Recorder::default(), requests());
        post(&send_queue(&recorder, 1 << 10), &message(&[2, 5_000, 6_000]), 0);
        let mut messages = recorder.take();
        deliver(&mut requests, vec![messages.remove(0)], 1 << 10, &[]).unwrap();
        requests
    };
    let chunk = |first| AmHeader { first, ..AmHeader::bare(AmKind::Chunk, 1) };
    let refused = |requests: &mut RequestQueue, am, length| {
        requests.chunk(am, &Payload::Announced(length)).unwrap_err().to_string()
    };
    assert!(refused(&mut opened(), chunk(1), 5_001).contains("5001 bytes"));
    assert!(refused(&mut opened(), chunk(3), 5_000).contains("chunk 3"));
    assert!(refused(&mut opened(), chunk(0), 5_000).contains("twice"));
    let mut requests = opened();
    assert!(matches!(requests.chunk(chunk(2), &Payload::Announced(6_000)).unwrap(), Disposition::Land { .. }));
    assert!(refused(&mut requests, chunk(2), 6_000).contains("twice"));
    let unknown = AmHeader { call: 2, ..chunk(1) };
    assert!(
        matches!(requests.chunk(unknown, &Payload::Announced(u64::MAX)).unwrap(), Disposition::Done),
        "the call is unknown"
    );
}

#[test]
fn a_first_chunk_that_says_too_much_is_refused_before_anything_is_kept() {
    let request = |first, second| AmHeader { first, second, ..AmHeader::bare(AmKind::Request, 1) };
    let cut = u32::try_from(*CUT_BYTES.start()).unwrap();
    for (am, said) in [
        (request(2 << 20, cut), "a header of 2097152 bytes"),
        (request(40, 0), "cut at 0 bytes"),
        (request(40, u32::MAX), "cut at"),
    ] {
        let error = requests().begin(am, &Payload::Eager(EagerBytes::Borrowed(&[0; 99]))).unwrap_err();
        assert!(error.to_string().contains(said), "{error}");
    }
    let error = requests().begin(request(40, cut), &Payload::Announced(40)).unwrap_err();
    assert!(error.to_string().contains("announced"), "{error}");
    assert_eq!(AmKind::Request.delivery(), Delivery::Ordered);
}

#[test]
fn what_lands_for_a_message_that_was_given_up_is_not_put_into_another_of_its_number() {
    let mut reassembly = Reassembly::<RequestHeader>::new(MessageLimits::default(), usize::MAX);
    let begin = |reassembly: &mut Reassembly<RequestHeader>, segment: usize| {
        let recorder = Recorder::default();
        post(&send_queue(&recorder, 1 << 10), &message(&[2, segment]), 0);
        let (am, payload) = recorder.take().remove(0);
        let first_chunk = reassembly.begin(am, &Payload::Eager(EagerBytes::Owned(payload))).unwrap().unwrap();
        assert!(reassembly.keep(first_chunk).unwrap().is_none(), "its segment is to come");
        let chunk = AmHeader { first: 1, ..AmHeader::bare(AmKind::Chunk, am.call) };
        let Disposition::Land { key } = reassembly.chunk(chunk, &Payload::Announced(segment as u64)).unwrap() else {
            panic!("it is wanted")
        };
        (key, Bytes::from(vec![0; segment]))
    };
    let first = begin(&mut reassembly, 5_000);
    assert!(reassembly.forget(1, CapacityPermit::default()));
    let second = begin(&mut reassembly, 6_000);
    assert!(reassembly.landed(first.0, first.1).is_none(), "of the message that was given up");
    let (call, landed) = reassembly.landed(second.0, second.1).unwrap();
    assert_eq!((call, landed.segments[0].len()), (1, 6_000));
}

#[test]
fn a_message_that_begins_again_while_it_is_on_its_way_is_refused() {
    let recorder = Recorder::default();
    post(&send_queue(&recorder, 1 << 10), &message(&[2, 5_000]), 0);
    let (am, payload) = recorder.take().remove(0);
    let (mut reassembly, payload) = (
        Reassembly::<RequestHeader>::new(MessageLimits::default(), usize::MAX),
        Payload::Eager(EagerBytes::Owned(payload)),
    );
    let first_chunk = reassembly.begin(am, &payload).unwrap().unwrap();
    reassembly.keep(first_chunk).unwrap();
    assert!(reassembly.begin(am, &payload).unwrap_err().to_string().contains("begins again"));
}

#[test]
fn a_request_whose_number_came_already_is_refused() {
    let recorder = Recorder::default();
    post(&send_queue(&recorder, 1 << 10), &message(&[2, 5_000]), 0);
    let (am, payload) = recorder.take().remove(0);
    let (mut requests, payload) = (requests(), Payload::Eager(EagerBytes::Owned(payload)));
    assert!(requests.begin(am, &payload).unwrap().is_some());
    assert!(requests.begin(am, &payload).unwrap_err().to_string().contains("call 1 after call 1"));
}

/// Returns the first chunk of a message with one large segment, with this call number.
fn first_chunk_of(call: u64, segment: usize) -> (AmHeader, Bytes) {
    let recorder = Recorder::default();
    post(&send_queue(&recorder, 1 << 10), &message(&[2, segment]), 0);
    let (am, payload) = recorder.take().remove(0);
    (AmHeader { call, ..am }, payload)
}

#[test]
fn messages_that_do_not_go_on_are_bounded() {
    let mut requests = requests();
    let refused =
        (1..10_000).find_map(|call| deliver(&mut requests, vec![first_chunk_of(call, 5_000)], 1 << 10, &[]).err());
    assert_eq!(refused.unwrap().code(), Code::ResourceExhausted);
}

#[test]
fn what_lands_for_nobody_is_bounded_in_number_and_in_bytes() {
    for (bytes_max, most) in [(usize::MAX, 10_000), (1_000_000, 202)] {
        let mut reassembly = Reassembly::<RequestHeader>::new(MessageLimits::default(), bytes_max);
        let mut give_up = |call| {
            let (am, payload) = first_chunk_of(call, 5_000);
            let first_chunk = reassembly.begin(am, &Payload::Eager(EagerBytes::Owned(payload)))?.unwrap();
            reassembly.keep(first_chunk)?;
            reassembly
                .chunk(AmHeader { first: 1, ..AmHeader::bare(AmKind::Chunk, call) }, &Payload::Announced(5_000))?;
            reassembly.forget(call, CapacityPermit::default());
            Ok(())
        };
        let refused: Error = (1..=most).find_map(|call| give_up(call).err()).expect("it is refused at last");
        assert_eq!(refused.code(), Code::ResourceExhausted);
    }
}

#[tokio::test]
async fn answers_and_refusals_that_the_network_does_not_take_are_bounded() {
    let recorder = Recorder::default();
    let mut limits = mux::ConnectionLimits::default();
    limits.calls_max = 4;
    let handler = Arc::new(handler_fn(|_| async { Ok(Response::new(Status::OK, message(&[2, 5_000]))) }));
    let calls = Arc::new(Semaphore::new(9));
    let (theirs, peer) = (Handshake::of(&limits), PeerInfo::default());
    let end = AnsweringEnd::new(send_queue(&recorder, 1 << 10), limits, theirs, calls, handler, peer);
    let _ending = end.end_on_drop();
    let mut last_call = 0;
    let mut ask = |turn: usize| {
        last_call += 1;
        let header =
            put_request(0, Verb::Post, &Route::from_static("/x"), &CallContext::default(), 9_999, &message(&[0]));
        let mut header = header.freeze();
        gym_core::message::frame::Lengths::take(&mut header, &MessageLimits::default()).unwrap();
        let header = RequestHeader::read(header)?;
        if end.on_opening(last_call, &header, 0)? && turn.is_multiple_of(2) {
            end.on_request(last_call, header, Bytes::new(), Vec::new());
        }
        Ok(())
    };
    for turn in 0..5_000 {
        ask(turn).expect("the network takes everything");
        tokio::task::yield_now().await;
        recorder.take();
    }
    let mut refused: Option<Error> = None;
    for turn in 0..5_000 {
        refused = refused.or(ask(turn).err());
        tokio::task::yield_now().await;
    }
    assert_eq!(refused.expect("it is refused at last").code(), Code::ResourceExhausted);
}

/// A calling end whose peer is the test.
struct Calling {
    caller: Arc<CallingEvents<Recorder>>,
    link: MuxLink<UcxSendQueue<Recorder>>,
}

impl Calling {
    fn new(limits: mux::ConnectionLimits) -> Self {
        let mut handshake = BytesMut::new();
        Handshake::of(&limits).put(&mut handshake);
        let (caller, mut established) = CallingEvents::new(limits, 1 << 10);
        caller.on_opened(&Recorder::default(), &Lanes::default());
        let calling = AmHeader::bare(AmKind::Handshake, 0);
        caller.on_message(&calling.write(), &Payload::Eager(EagerBytes::Borrowed(&handshake))).unwrap();
        let end = established.try_recv().unwrap().unwrap().end;
        Self { caller, link: MuxLink::new(end, PathInfo::new("ucx", "peer", true)) }
    }

    fn start(&self) -> Option<Result<Reply>> {
        let request = Request::post(CallContext::within(Duration::from_secs(60)), "/x", "{}");
        self.link.send(request).now_or_never()
    }

    fn hear(&self, am: AmHeader, payload: &Payload<'_>) -> Result<Disposition> {
        self.caller.on_message(&am.write(), payload)
    }

    /// Delivers the beginning of a response, whose one large segment then starts to land.
    fn begin(&self, call: u64, segment: usize) -> (u64, Bytes) {
        let recorder = Recorder::default();
        let response = Response::new(Status::OK, message(&[2, segment]));
        send_queue(&recorder, 1 << 10).post_response(
            call,
            put_response(0, &response),
            &response.message,
            CapacityPermit::default(),
            Flush::Now,
        );
        let (am, payload) = recorder.take().remove(0);
        self.hear(am, &Payload::Eager(EagerBytes::Owned(payload))).unwrap();
        let Disposition::Land { key } = self.chunk(call, segment) else { panic!("it is wanted") };
        (key, Bytes::from(vec![0; segment]))
    }

    fn chunk(&self, call: u64, segment: usize) -> Disposition {
        let chunk = AmHeader { first: 1, ..AmHeader::bare(AmKind::Chunk, call) };
        self.hear(chunk, &Payload::Announced(segment as u64)).unwrap()
    }
}

#[test]
fn an_answer_that_is_given_up_is_forgotten_and_keeps_its_room_until_it_has_landed() {
    let mut limits = mux::ConnectionLimits::default();
    limits.reply_bytes_in_flight_max = 1 << 20;
    let calling = Calling::new(limits);
    let reply = calling.start().expect("there is room").unwrap();
    let (key, bytes) = calling.begin(1, 5_000);
    drop(reply);
    assert!(matches!(calling.chunk(1, 5_000), Disposition::Done), "the response is not wanted any more");
    assert!(calling.start().is_none(), "what lands takes the room");
    calling.caller.on_landed(key, bytes);
    let reply = calling.start().expect("there is room again").unwrap();
    drop(reply);
    assert!(calling.start().is_some(), "nothing of it was on its way");
}

#[test]
fn a_call_does_not_fail_within_its_answer_nor_for_a_long_reason() {
    let calling = Calling::new(mux::ConnectionLimits::default());
    let _replies = [calling.start(), calling.start()];
    let failed = |call, reason: &[u8]| {
        let error = calling.hear(AmHeader::bare(AmKind::Failed, call), &Payload::Eager(EagerBytes::Borrowed(reason)));
        error.unwrap_err().to_string()
    };
    calling.begin(1, 5_000);
    assert!(failed(1, &[0, 0]).contains("within its response"));
    assert!(failed(2, &[0; 1 << 20]).contains("1048576 bytes"));
}

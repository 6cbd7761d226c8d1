//! Messages through an outbox and an inbox without a fabric: what is posted here is taken there by the test.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use futures_util::FutureExt;
use gym_core::frame::Limits;
use gym_core::mux::header::{put_request, put_response};
use gym_core::mux::{self, AnsweringEnd, Greeting, MuxLink, Outbox as _, RequestHeader, Room};
use gym_core::{
    CallContext, Code, ContentType, Error, Link as _, Message, PathInfo, PeerInfo, Reply, Request, Response, Result,
    Rope, Route, Status, Verb, handler_fn,
};
use proptest::prelude::*;
use tokio::sync::Semaphore;

use super::assembly::Landed;
use super::caller::Caller;
use super::desk::Desk;
use super::inbox::{CUT_BYTES, Inbox};
use super::outbox::{Answers, Carrier, Outbox};
use super::wire::{Kind, Wire};
use crate::fabric::{Arrived, Disposition, Lane, Lanes, Parcel, Payload};
use crate::pool::{Pool, PoolOptions};

/// Keeps what is posted.
#[derive(Clone, Debug, Default)]
struct Shelf(Arc<Mutex<Vec<Kept>>>);

struct Kept(Wire, Parcel);

impl std::fmt::Debug for Kept {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} of {} bytes", self.0, self.1.payload.len())
    }
}

impl Carrier for Shelf {
    fn post(&self, parcel: Parcel) -> Result<()> {
        let wire = Wire::read(&parcel.header)?;
        assert_eq!(parcel.lane, wire.kind.lane());
        self.0.lock().unwrap().push(Kept(wire, parcel));
        Ok(())
    }

    fn close(&self, _grace: Duration) {}
}

impl Shelf {
    /// What was posted, taken by the network.
    fn take(&self) -> Vec<(Wire, Bytes)> {
        let mut taken = Vec::new();
        loop {
            let kept = std::mem::take(&mut *self.0.lock().unwrap());
            if kept.is_empty() {
                return taken;
            }
            for Kept(wire, mut parcel) in kept {
                if let Some(done) = parcel.done.take() {
                    done(Ok(()));
                }
                taken.push((wire, parcel.payload));
            }
        }
    }

    fn kinds(&self) -> Vec<(Kind, u64)> {
        self.0.lock().unwrap().iter().map(|Kept(wire, _)| (wire.kind, wire.call)).collect()
    }
}

fn pool() -> Pool {
    Pool::new(PoolOptions::default())
}

fn desk() -> Desk {
    Desk::new(Inbox::new(Limits::default(), usize::MAX, pool()))
}

fn outbox(shelf: &Shelf, cut: usize) -> Outbox<Shelf> {
    Outbox::new(shelf.clone(), cut, Answers::Given)
}

fn message(sizes: &[usize]) -> Message {
    let part = |(at, size): (usize, &usize)| (0..*size).map(|byte| (byte * 31 + at) as u8).collect::<Vec<_>>();
    let mut parts = sizes.iter().enumerate().map(part);
    let head: Vec<u8> = parts.next().unwrap_or_default();
    // In two pieces, as a head that was spliced is.
    let half = head.len() / 2;
    let head: Rope =
        [Bytes::copy_from_slice(&head[..half]), Bytes::copy_from_slice(&head[half..])].into_iter().collect();
    Message { content_type: ContentType::Json, head, segments: parts.map(Bytes::from).collect() }
}

fn post(outbox: &Outbox<Shelf>, message: &Message, metadata_bytes: usize) -> u64 {
    let mut context = CallContext::default();
    context.metadata.push("long", "m".repeat(metadata_bytes));
    let header = put_request(0, Verb::Post, &Route::from_static("/x"), &context, 9, message);
    outbox.post_request(header, message, Room::default(), false, |_| Ok(())).unwrap()
}

/// Hands parcels to a desk. Eager ones come borrowed; longer ones are announced and land in the order of `turns`.
fn deliver(
    desk: &mut Desk,
    parcels: Vec<(Wire, Bytes)>,
    cut: usize,
    turns: &[usize],
) -> Result<Vec<(u64, Landed<RequestHeader>)>> {
    let (mut out, mut landing) = (Vec::new(), Vec::new());
    for (wire, bytes) in parcels {
        let payload = if bytes.len() >= cut {
            Payload::Announced(bytes.len() as u64)
        } else {
            Payload::Here(Arrived::Borrowed(&bytes))
        };
        match wire.kind {
            Kind::Request | Kind::Header => {
                if let Some(opening) = desk.begin(wire, &payload)? {
                    desk.keep(opening)?;
                }
            }
            Kind::Piece => {
                if let Disposition::Land { key, mut buffer } = desk.piece(wire, &payload)? {
                    buffer.copy_from_slice(&bytes);
                    landing.push((key, buffer.freeze()));
                }
            }
            Kind::Cancel => {
                desk.cancel(wire.call)?;
            }
            other => panic!("{other:?}"),
        }
        out.extend(std::iter::from_fn(|| desk.next()));
    }
    for turn in turns.iter().copied().chain(std::iter::repeat(0)) {
        if landing.is_empty() {
            break;
        }
        let (key, bytes) = landing.swap_remove(turn % landing.len());
        desk.landed(key, bytes);
        out.extend(std::iter::from_fn(|| desk.next()));
    }
    Ok(out)
}

fn sizes() -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(prop_oneof![4 => 0..300_usize, 2 => 900..1_500_usize, 1 => 2_000..9_000_usize], 1..9)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn messages_arrive_as_they_were_posted_and_in_that_order_whichever_piece_lands_first(
        shapes in prop::collection::vec((sizes(), prop_oneof![3 => 0..40_usize, 1 => 1_000..9_000_usize]), 1..8),
        turns in prop::collection::vec(any::<usize>(), 0..40),
        cut in 1_024..3_000_usize,
    ) {
        let shelf = Shelf::default();
        let outbox = outbox(&shelf, cut);
        let sent: Vec<_> = shapes.iter().map(|(sizes, metadata)| {
            let message = message(sizes);
            (post(&outbox, &message, *metadata), message, *metadata)
        }).collect();
        let parcels = shelf.take();
        for (wire, bytes) in &parcels {
            let alone = sent.iter().flat_map(|(_, message, _)| &message.segments).any(|segment| segment.as_ptr() == bytes.as_ptr());
            prop_assert!(bytes.len() < cut || wire.kind == Kind::Piece, "only pieces are announced");
            prop_assert!(bytes.len() < cut || alone || wire.first == 1, "large segments leave from where they lie");
        }
        let mut desk = desk();
        let landed = deliver(&mut desk, parcels, cut, &turns).unwrap();
        prop_assert_eq!(landed.len(), sent.len());
        for ((call, landed), (sent_call, sent, metadata)) in landed.into_iter().zip(sent) {
            prop_assert_eq!(call, sent_call);
            prop_assert_eq!(landed.header.context.metadata.get("long").unwrap().len(), metadata);
            prop_assert!(landed.segments.iter().all(|segment| segment.is_empty() || segment.as_ptr().addr() % 64 == 0));
            prop_assert!(landed.head == sent.head.to_bytes() && landed.segments == sent.segments);
        }
        prop_assert!(desk.is_at_rest());
    }

    #[test]
    fn no_parcels_make_an_inbox_panic_or_keep_what_did_not_come(
        parcels in prop::collection::vec(
            (0..6_u8, 0..3_000_u32, prop_oneof![Just(2_048_u32), any::<u32>()], 0..4_u64, prop::collection::vec(any::<u8>(), 0..80)),
            1..12,
        ),
        valid in any::<bool>(),
        announced in any::<u64>(),
    ) {
        let mut desk = desk();
        let shelf = Shelf::default();
        post(&outbox(&shelf, 1 << 10), &message(&[3, 5_000]), 1);
        let opening = shelf.take().remove(0);
        if valid {
            deliver(&mut desk, vec![opening], 1 << 10, &[]).unwrap();
        }
        for (kind, first, second, call, bytes) in parcels {
            let kind = [Kind::Request, Kind::Header, Kind::Piece, Kind::Cancel][usize::from(kind) % 4];
            let wire = Wire { kind, first, second, call };
            let announced = Payload::Announced(announced);
            let _ = desk.piece(Wire { kind: Kind::Piece, ..wire }, &announced);
            let _ = deliver(&mut desk, vec![(wire, bytes.into())], usize::MAX, &[]);
        }
    }
}

#[test]
fn a_parcels_header_is_read_as_it_was_written_and_another_is_refused() {
    for number in 0..=u8::MAX {
        let mut bytes = BytesMut::from(&Wire { kind: Kind::Piece, first: 7, second: 8, call: 9 }.write()[..]);
        bytes[0] = number;
        match Wire::read(&bytes) {
            Ok(wire) => assert_eq!((wire.write(), wire.kind as u8), (bytes.clone().freeze(), number)),
            Err(_) => assert!(number > Kind::Pong as u8),
        }
        bytes.put_u8(0);
        Wire::read(&bytes).unwrap_err();
        Wire::read(&bytes[..19]).unwrap_err();
    }
}

#[test]
fn the_fabric_has_a_bounded_number_of_parcels_at_a_time() {
    let shelf = Shelf::default();
    let outbox = outbox(&shelf, 1 << 10);
    for _ in 0..1_000 {
        post(&outbox, &message(&[2]), 0);
    }
    assert!(shelf.kinds().len() < 1_000, "the others wait");
    let calls: Vec<_> = shelf.take().iter().map(|(wire, _)| wire.call).collect();
    assert_eq!(calls, (1..=1_000).collect::<Vec<_>>());
}

#[test]
fn a_request_that_has_not_begun_is_taken_back_and_one_that_has_is_cancelled() {
    let shelf = Shelf::default();
    let outbox = outbox(&shelf, 1 << 10);
    // More pieces than the fabric takes at once.
    let large = message(&[[2].as_slice(), &[2_000; 300]].concat());
    for message in [&large, &message(&[3]), &large] {
        post(&outbox, message, 0);
    }
    outbox.cancel(2, Room::default());
    outbox.cancel(1, Room::default());
    outbox.cancel(77, Room::default());
    let before = shelf.kinds().len();
    let taken = shelf.take();
    let of = |call| taken.iter().filter(|(wire, _)| wire.call == call).map(|(wire, _)| wire.kind).collect::<Vec<_>>();
    assert!(of(2).is_empty(), "nothing of it has left");
    assert_eq!(of(1).iter().filter(|kind| **kind != Kind::Cancel).count(), before - 2, "the rest of it does not leave");
    assert!(of(1).contains(&Kind::Cancel) && of(77) == [Kind::Cancel], "it may have left long ago");
    let pieces = of(3).iter().filter(|kind| **kind == Kind::Piece).count();
    assert_eq!(
        pieces, 301,
        "whole: every segment, and the head, for which the opening has no room beside so long a header"
    );
}

#[test]
fn a_cancelled_request_holds_nobody_up_whether_it_comes_before_its_cancel_or_after() {
    let (shelf, mut desk) = (Shelf::default(), desk());
    let outbox = outbox(&shelf, 1 << 10);
    for message in [message(&[2, 5_000]), message(&[3]), message(&[4, 5_000]), message(&[5])] {
        post(&outbox, &message, 0);
    }
    let mut parcels = shelf.take();
    // Of the first the opening alone has come; the cancel of the third has overtaken it.
    assert_eq!(parcels.remove(1).0.kind, Kind::Piece);
    parcels.insert(2, (Wire::bare(Kind::Cancel, 3), Bytes::new()));
    parcels.push((Wire::bare(Kind::Cancel, 1), Bytes::new()));
    let landed = deliver(&mut desk, parcels, 1 << 10, &[]).unwrap();
    assert_eq!(landed.iter().map(|(call, _)| *call).collect::<Vec<_>>(), [2, 4]);
    assert!(desk.is_at_rest());
}

#[test]
fn a_piece_that_is_not_as_announced_or_comes_twice_is_refused() {
    let opened = || {
        let (shelf, mut desk) = (Shelf::default(), desk());
        post(&outbox(&shelf, 1 << 10), &message(&[2, 5_000, 6_000]), 0);
        let mut parcels = shelf.take();
        deliver(&mut desk, vec![parcels.remove(0)], 1 << 10, &[]).unwrap();
        desk
    };
    let piece = |first| Wire { first, ..Wire::bare(Kind::Piece, 1) };
    let refused =
        |desk: &mut Desk, wire, length| desk.piece(wire, &Payload::Announced(length)).unwrap_err().to_string();
    assert!(refused(&mut opened(), piece(1), 5_001).contains("5001 bytes"));
    assert!(refused(&mut opened(), piece(3), 5_000).contains("piece 3"));
    assert!(refused(&mut opened(), piece(0), 5_000).contains("twice"));
    let mut desk = opened();
    assert!(matches!(desk.piece(piece(2), &Payload::Announced(6_000)).unwrap(), Disposition::Land { .. }));
    assert!(refused(&mut desk, piece(2), 6_000).contains("twice"));
    let unknown = Wire { call: 2, ..piece(1) };
    assert!(
        matches!(desk.piece(unknown, &Payload::Announced(u64::MAX)).unwrap(), Disposition::Done),
        "nobody wants it"
    );
}

#[test]
fn an_opening_that_says_too_much_is_refused_before_anything_is_kept() {
    let request = |first, second| Wire { first, second, ..Wire::bare(Kind::Request, 1) };
    let cut = u32::try_from(*CUT_BYTES.start()).unwrap();
    for (wire, said) in [
        (request(2 << 20, cut), "a header of 2097152 bytes"),
        (request(40, 0), "cut at 0 bytes"),
        (request(40, u32::MAX), "cut at"),
    ] {
        let error = desk().begin(wire, &Payload::Here(Arrived::Borrowed(&[0; 99]))).unwrap_err();
        assert!(error.to_string().contains(said), "{error}");
    }
    let error = desk().begin(request(40, cut), &Payload::Announced(40)).unwrap_err();
    assert!(error.to_string().contains("announced"), "{error}");
    assert_eq!(Kind::Request.lane(), Lane::Ordered);
}

#[test]
fn what_lands_for_a_message_that_was_given_up_is_not_put_into_another_of_its_number() {
    let mut inbox = Inbox::<RequestHeader>::new(Limits::default(), usize::MAX, pool());
    let begin = |inbox: &mut Inbox<RequestHeader>, segment: usize| {
        let shelf = Shelf::default();
        post(&outbox(&shelf, 1 << 10), &message(&[2, segment]), 0);
        let (wire, payload) = shelf.take().remove(0);
        let opening = inbox.begin(wire, &Payload::Here(Arrived::Owned(payload))).unwrap().unwrap();
        assert!(inbox.keep(opening).unwrap().is_none(), "its segment is to come");
        let piece = Wire { first: 1, ..Wire::bare(Kind::Piece, wire.call) };
        let Disposition::Land { key, buffer } = inbox.piece(piece, &Payload::Announced(segment as u64)).unwrap() else {
            panic!("it is wanted")
        };
        (key, buffer.freeze())
    };
    let first = begin(&mut inbox, 5_000);
    assert!(inbox.forget(1, Room::default()));
    let second = begin(&mut inbox, 6_000);
    assert!(inbox.landed(first.0, first.1).is_none(), "of the message that was given up");
    let (call, landed) = inbox.landed(second.0, second.1).unwrap();
    assert_eq!((call, landed.segments[0].len()), (1, 6_000));
}

#[test]
fn a_message_that_begins_again_while_it_is_on_its_way_is_refused() {
    let shelf = Shelf::default();
    post(&outbox(&shelf, 1 << 10), &message(&[2, 5_000]), 0);
    let (wire, payload) = shelf.take().remove(0);
    let (mut inbox, payload) =
        (Inbox::<RequestHeader>::new(Limits::default(), usize::MAX, pool()), Payload::Here(Arrived::Owned(payload)));
    let opening = inbox.begin(wire, &payload).unwrap().unwrap();
    inbox.keep(opening).unwrap();
    assert!(inbox.begin(wire, &payload).unwrap_err().to_string().contains("begins again"));
}

#[test]
fn a_request_whose_number_came_already_is_refused() {
    let shelf = Shelf::default();
    post(&outbox(&shelf, 1 << 10), &message(&[2, 5_000]), 0);
    let (wire, payload) = shelf.take().remove(0);
    let (mut desk, payload) = (desk(), Payload::Here(Arrived::Owned(payload)));
    assert!(desk.begin(wire, &payload).unwrap().is_some());
    assert!(desk.begin(wire, &payload).unwrap_err().to_string().contains("call 1 after call 1"));
}

/// The opening of a message with one large segment, under another number.
fn opening_of(call: u64, segment: usize) -> (Wire, Bytes) {
    let shelf = Shelf::default();
    post(&outbox(&shelf, 1 << 10), &message(&[2, segment]), 0);
    let (wire, payload) = shelf.take().remove(0);
    (Wire { call, ..wire }, payload)
}

#[test]
fn messages_that_do_not_go_on_are_bounded() {
    let mut desk = desk();
    let refused = (1..10_000).find_map(|call| deliver(&mut desk, vec![opening_of(call, 5_000)], 1 << 10, &[]).err());
    assert_eq!(refused.unwrap().code(), Code::ResourceExhausted);
}

#[test]
fn what_lands_for_nobody_is_bounded_in_number_and_in_bytes() {
    for (bytes_max, most) in [(usize::MAX, 10_000), (1_000_000, 202)] {
        let mut inbox = Inbox::<RequestHeader>::new(Limits::default(), bytes_max, pool());
        let mut give_up = |call| {
            let (wire, payload) = opening_of(call, 5_000);
            let opening = inbox.begin(wire, &Payload::Here(Arrived::Owned(payload)))?.unwrap();
            inbox.keep(opening)?;
            inbox.piece(Wire { first: 1, ..Wire::bare(Kind::Piece, call) }, &Payload::Announced(5_000))?;
            inbox.forget(call, Room::default());
            Ok(())
        };
        let refused: Error = (1..=most).find_map(|call| give_up(call).err()).expect("it is refused at last");
        assert_eq!(refused.code(), Code::ResourceExhausted);
    }
}

#[tokio::test]
async fn answers_and_refusals_that_the_network_does_not_take_are_bounded() {
    let shelf = Shelf::default();
    let limits = mux::Limits { calls_max: 4, ..mux::Limits::default() };
    let handler = Arc::new(handler_fn(|_| async { Ok(Response::new(Status::OK, message(&[2, 5_000]))) }));
    let calls = Arc::new(Semaphore::new(9));
    let (theirs, peer) = (Greeting::of(&limits), PeerInfo::default());
    let end = AnsweringEnd::new(outbox(&shelf, 1 << 10), limits, theirs, calls, handler, peer);
    let _ending = end.end_on_drop();
    let mut last_call = 0;
    let mut ask = |turn: usize| {
        last_call += 1;
        let header =
            put_request(0, Verb::Post, &Route::from_static("/x"), &CallContext::default(), 9_999, &message(&[0]));
        let mut header = header.freeze();
        gym_core::frame::Lengths::take(&mut header, &Limits::default()).unwrap();
        let header = RequestHeader::read(header)?;
        if end.on_opening(last_call, &header, 0)? && turn.is_multiple_of(2) {
            end.on_request(last_call, header, Bytes::new(), Vec::new());
        }
        Ok(())
    };
    for turn in 0..5_000 {
        ask(turn).expect("the network takes everything");
        tokio::task::yield_now().await;
        shelf.take();
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
    caller: Arc<Caller<Shelf>>,
    link: MuxLink<Outbox<Shelf>>,
}

impl Calling {
    fn new(limits: mux::Limits) -> Self {
        let mut greeting = BytesMut::new();
        Greeting::of(&limits).put(&mut greeting);
        let (caller, mut greeted) = Caller::new(limits, 1 << 10, pool());
        caller.on_opened(&Shelf::default(), &Lanes::default());
        let calling = Wire::bare(Kind::Greeting, 0);
        caller.on_message(&calling.write(), &Payload::Here(Arrived::Borrowed(&greeting))).unwrap();
        let end = greeted.try_recv().unwrap().unwrap().end;
        Self { caller, link: MuxLink::new(end, PathInfo::new("ucx", "peer", true)) }
    }

    fn start(&self) -> Option<Result<Reply>> {
        let request = Request::post(CallContext::within(Duration::from_secs(60)), "/x", "{}");
        self.link.send(request).now_or_never()
    }

    fn hear(&self, wire: Wire, payload: &Payload<'_>) -> Result<Disposition> {
        self.caller.on_message(&wire.write(), payload)
    }

    /// The answer of a call begins, and its one large segment begins to land.
    fn begin(&self, call: u64, segment: usize) -> (u64, Bytes) {
        let shelf = Shelf::default();
        let response = Response::new(Status::OK, message(&[2, segment]));
        outbox(&shelf, 1 << 10).post_response(
            call,
            put_response(0, &response),
            &response.message,
            Room::default(),
            false,
        );
        let (wire, payload) = shelf.take().remove(0);
        self.hear(wire, &Payload::Here(Arrived::Owned(payload))).unwrap();
        let Disposition::Land { key, buffer } = self.piece(call, segment) else { panic!("it is wanted") };
        (key, buffer.freeze())
    }

    fn piece(&self, call: u64, segment: usize) -> Disposition {
        let piece = Wire { first: 1, ..Wire::bare(Kind::Piece, call) };
        self.hear(piece, &Payload::Announced(segment as u64)).unwrap()
    }
}

#[test]
fn an_answer_that_is_given_up_is_forgotten_and_keeps_its_room_until_it_has_landed() {
    let calling = Calling::new(mux::Limits { reply_bytes_in_flight_max: 1 << 20, ..mux::Limits::default() });
    let reply = calling.start().expect("there is room").unwrap();
    let (key, bytes) = calling.begin(1, 5_000);
    drop(reply);
    assert!(matches!(calling.piece(1, 5_000), Disposition::Done), "nobody wants what comes now");
    assert!(calling.start().is_none(), "what lands takes the room");
    calling.caller.on_landed(key, bytes);
    let reply = calling.start().expect("there is room again").unwrap();
    drop(reply);
    assert!(calling.start().is_some(), "nothing of it was on its way");
}

#[test]
fn a_call_does_not_fail_within_its_answer_nor_for_a_long_reason() {
    let calling = Calling::new(mux::Limits::default());
    let _replies = [calling.start(), calling.start()];
    let failed = |call, reason: &[u8]| {
        let error = calling.hear(Wire::bare(Kind::Failed, call), &Payload::Here(Arrived::Borrowed(reason)));
        error.unwrap_err().to_string()
    };
    calling.begin(1, 5_000);
    assert!(failed(1, &[0, 0]).contains("within its answer"));
    assert!(failed(2, &[0; 1 << 20]).contains("1048576 bytes"));
}

//! Bytes on the wire: written frames are read back however sockets split them, and foreign bytes are rejected.

use std::io::{self, IoSlice};
use std::sync::Arc;

use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use gym_core::message::ContentType;
use gym_core::message::frame::MessageLimits;
use gym_core::transport::mux::header::read_failed;
use gym_core::transport::mux::{CapacityPermit, Flush, MessageSender, RequestHeader, ResponseHeader};
use gym_core::{Code, Message, Response, Status};
use parking_lot::Mutex;
use proptest::prelude::*;

use super::places::Shelf;
use super::{request_frame, request_header, response_frame};
use crate::frames::buffers::ReceiveBufferPool;
use crate::frames::codec::decoder::{Decoder, Event};
use crate::frames::codec::frame::{CHUNK_BYTES, FrameHeader, FrameKind, bare};
use crate::frames::connection::send_queue::{FrameSendQueue, OutgoingMessage};
use crate::frames::connection::socket::WriteHalf;

/// Accepts this many bytes at a time, and records their addresses.
#[derive(Clone, Debug)]
struct Sink {
    wire: Arc<Mutex<Wire>>,
    at_a_time: usize,
}

#[derive(Debug, Default)]
struct Wire {
    bytes: Vec<u8>,
    places: Vec<usize>,
    /// Number of bytes that it accepts before it is full.
    room: usize,
}

impl Sink {
    fn new(at_a_time: usize, room: usize) -> Self {
        Self { wire: Arc::new(Mutex::new(Wire { room, ..Wire::default() })), at_a_time }
    }
}

#[async_trait]
impl WriteHalf for Sink {
    fn try_write(&self, pieces: &[IoSlice<'_>]) -> io::Result<usize> {
        let mut wire = self.wire.lock();
        let mut left = self.at_a_time.min(wire.room);
        let before = left;
        for piece in pieces {
            let taken = piece.len().min(left);
            if taken > 0 {
                wire.places.push(piece.as_ptr() as usize);
            }
            wire.bytes.extend_from_slice(&piece[..taken]);
            left -= taken;
        }
        wire.room -= before - left;
        if before == left { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(before - left) }
    }

    async fn writable(&self) -> io::Result<()> {
        tokio::task::yield_now().await;
        self.wire.lock().room = usize::MAX;
        Ok(())
    }

    fn shut(&self) {}
}

fn decoder(already: &[u8]) -> Decoder {
    Decoder::new(MessageLimits::default(), ReceiveBufferPool::new(1 << 20), already)
}

fn outgoing_request(call: u64, message: &Message) -> OutgoingMessage {
    OutgoingMessage::new(call, request_frame(call, message), message, CapacityPermit::default())
}

/// Decodes bytes in pieces of the given size, and passes the events to `take`.
fn decode(bytes: &[u8], at_a_time: usize, mut take: impl FnMut(&mut Decoder, Event)) -> gym_core::Result<bool> {
    let mut decoder = decoder(&[]);
    let mut left = bytes;
    loop {
        while let Some(event) = decoder.next()? {
            take(&mut decoder, event);
        }
        let space = decoder.space();
        assert!(!space.is_empty());
        let count = space.len().min(at_a_time).min(left.len());
        if count == 0 {
            return Ok(decoder.is_at_rest());
        }
        space[..count].copy_from_slice(&left[..count]);
        left = &left[count..];
        decoder.advance(count);
    }
}

/// Returns the kept messages, and the number of skipped ones.
fn messages(bytes: &[u8], at_a_time: usize, keep: impl Fn(u64) -> bool) -> Vec<(u64, Message)> {
    let (mut landed, mut lent) = (Vec::new(), 0);
    let at_rest = decode(bytes, at_a_time, |decoder, event| match event {
        Event::Start(start) => {
            RequestHeader::read(start.header).unwrap();
            if keep(start.call) {
                decoder.keep();
            }
        }
        // Every other one lands in memory of the receiver.
        Event::Segment(start) if start.segment % 2 == 0 => {
            lent += 1;
            decoder.place(Shelf::new(&[start.length]).lend(0));
        }
        Event::Segment(_) => {}
        Event::Complete(message) => {
            let (head, segments) = (message.head.into(), message.segments);
            landed.push((message.call, Message { content_type: ContentType::Json, head, segments }));
        }
        other => panic!("{other:?}"),
    });
    assert!(at_rest.unwrap(), "nothing is left over");
    let direct =
        |(_, message): &(u64, Message)| message.segments.iter().step_by(2).filter(|part| part.len() >= 4_096).count();
    assert_eq!(lent, landed.iter().map(direct).sum::<usize>(), "the receiver is asked for each large segment");
    landed
}

fn sized(sizes: &[usize]) -> Message {
    let part = |(at, size): (usize, &usize)| (0..*size).map(|byte| (byte * 31 + at) as u8).collect::<Vec<_>>();
    let mut parts = sizes.iter().enumerate().map(part);
    let head = parts.next().unwrap_or_default().into();
    Message { content_type: ContentType::Json, head, segments: parts.map(Bytes::from).collect() }
}

fn sizes() -> impl Strategy<Value = Vec<usize>> {
    let size = prop_oneof![4 => 0..200_usize, 2 => 1_000..9_000_usize, 1 => 60_000..80_000_usize];
    prop::collection::vec(size, 0..5)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn messages_are_read_as_they_were_posted(
        shapes in prop::collection::vec(sizes(), 1..8),
        (write, read, skipped) in (1_usize..100_000, 1_usize..100_000, 0..8_u64),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let sent: Vec<_> = shapes.iter().map(|sizes| sized(sizes)).collect();
        let sink = Sink::new(write.max(read / 50), 10_000);
        let send_queue = FrameSendQueue::new(Box::new(sink.clone()));
        for (call, message) in sent.iter().enumerate() {
            send_queue.post(outgoing_request(call as u64, message), [Flush::Now, Flush::Soon, Flush::Later][call % 3]);
        }
        runtime.block_on(async {
            tokio::select! { error = send_queue.run() => panic!("{error}"), () = until_idle(&send_queue) => {} }
        });
        let wire = sink.wire.lock().bytes.clone();
        let landed = messages(&wire, read, |call| call != skipped);
        let awaited: Vec<_> = sent.into_iter().enumerate()
            .map(|(call, message)| (call as u64, message)).filter(|(call, _)| *call != skipped).collect();
        prop_assert!(landed == awaited);
    }

    #[test]
    fn no_bytes_make_the_decoder_panic_or_allocate_what_did_not_come(
        mut bytes in prop::collection::vec(any::<u8>(), 0..600),
        begun in 0..4_u8,
        at_a_time in 1_usize..700,
    ) {
        let message = sized(&[20, 100]);
        let valid = match begun {
            0 => BytesMut::new(),
            1 => BytesMut::from(&bare(FrameKind::Heartbeat, 0)[..]),
            2 => request_frame(1, &message),
            _ => response_frame(1, &Response::new(Status::OK, message)),
        };
        // A valid beginning with one changed byte, followed by random bytes.
        let mut wire = valid.to_vec();
        if let (Some(at), false) = (bytes.first().map(|byte| usize::from(*byte)), wire.is_empty()) {
            let length = wire.len();
            wire[at % length] ^= bytes.get(1).copied().unwrap_or(1);
        }
        wire.append(&mut bytes);
        let mut kept = 0;
        let _ = decode(&wire, at_a_time, |decoder, event| match event {
            Event::Start(start) => {
                let _ = (RequestHeader::read(start.header.clone()), ResponseHeader::read(start.header));
                if start.total <= 1 << 20 {
                    decoder.keep();
                }
            }
            Event::Complete(message) => kept += message.head.len() + message.segments.iter().map(Bytes::len).sum::<usize>(),
            Event::Failed(_, payload) => { let _ = read_failed(payload); }
            _ => {}
        });
        prop_assert!(kept <= wire.len());
    }
}

/// Waits until the capacity of every message is released, which is the last step of sending.
async fn until_idle(send_queue: &FrameSendQueue) {
    while !send_queue.is_idle() {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn what_is_urgent_goes_between_the_chunks_and_no_message_overtakes_another() {
    let sink = Sink::new(50_000, 60_000);
    let send_queue = FrameSendQueue::new(Box::new(sink.clone()));
    let large = sized(&[10, 5 * CHUNK_BYTES]);
    send_queue.post(outgoing_request(1, &large), Flush::Now);
    send_queue.post(outgoing_request(2, &sized(&[5])), Flush::Now);
    // The socket is full within the first chunk.
    send_queue.post_urgent(bare(FrameKind::Cancel, 77));
    tokio::select! { error = send_queue.run() => panic!("{error}"), () = until_idle(&send_queue) => {} }
    let wire = sink.wire.lock().bytes.clone();
    let mut seen = Vec::new();
    let at_rest = decode(&wire, usize::MAX, |decoder, event| {
        seen.push(match event {
            Event::Start(start) => {
                decoder.keep();
                format!("opening {}", start.call)
            }
            Event::Complete(message) => format!("landed {}", message.call),
            Event::Cancel(call) => format!("cancel {call}"),
            Event::Segment(_) => return,
            other => panic!("{other:?}"),
        });
    });
    assert!(at_rest.unwrap());
    assert_eq!(seen, ["opening 1", "cancel 77", "landed 1", "opening 2", "landed 2"]);
    let cancel = wire.windows(16).position(|window| window == &bare(FrameKind::Cancel, 77)[..]).unwrap();
    assert!(cancel < CHUNK_BYTES + 1_000, "after the chunk that was under way, at {cancel}");
}

#[tokio::test(start_paused = true)]
async fn held_messages_are_written_together_when_one_may_not_wait_or_their_time_is_over() {
    let sink = Sink::new(usize::MAX, usize::MAX);
    let send_queue = FrameSendQueue::new(Box::new(sink.clone()));
    let post = |call, flush| send_queue.post(outgoing_request(call, &sized(&[5])), flush);
    let calls = || {
        let mut seen = Vec::new();
        let wire = std::mem::take(&mut sink.wire.lock().bytes);
        decode(&wire, usize::MAX, |decoder, event| match event {
            Event::Start(_) => decoder.keep(),
            Event::Complete(message) => seen.push(message.call),
            other => panic!("{other:?}"),
        })
        .unwrap();
        seen
    };
    let mut running = Box::pin(send_queue.run());
    let mut run_for =
        async |time| assert!(tokio::time::timeout(time, &mut running).await.is_err(), "the socket takes all");
    let instant = std::time::Duration::from_micros(500);
    for call in 1..=3 {
        post(call, Flush::Later);
    }
    run_for(instant).await;
    assert_eq!(calls(), [0; 0]);
    send_queue.flush();
    assert_eq!(calls(), [1, 2, 3], "flushed");
    post(4, Flush::Later);
    post(5, Flush::Now);
    assert_eq!(calls(), [4, 5], "the next does not wait");
    post(6, Flush::Later);
    post(7, Flush::Soon);
    run_for(instant).await;
    assert_eq!(calls(), [6, 7], "nor does one that is sent soon");
    post(42, Flush::Soon);
    post(43, Flush::Later);
    run_for(instant).await;
    assert_eq!(calls(), [42, 43], "and it is not made to wait by those behind it");
    for call in 8..=40 {
        post(call, Flush::Later);
    }
    assert_eq!(calls(), (8..40).collect::<Vec<_>>(), "as many as may wait");
    run_for(std::time::Duration::from_millis(3)).await;
    assert_eq!(calls(), [40], "after its time");
    send_queue.post(outgoing_request(41, &sized(&[5_000])), Flush::Later);
    assert_eq!(calls(), [41], "a large message does not wait");
}

#[tokio::test]
async fn large_parts_are_written_from_where_they_lie() {
    let sink = Sink::new(usize::MAX, usize::MAX);
    let send_queue = FrameSendQueue::new(Box::new(sink.clone()));
    let message = sized(&[4_000, 100_000, 200_000]);
    send_queue.post(outgoing_request(1, &message), Flush::Now);
    let places = sink.wire.lock().places.clone();
    let parts = message.head.pieces().iter().chain(&message.segments);
    for part in parts {
        assert!(places.contains(&(part.as_ptr() as usize)), "copied on the way");
    }
}

#[tokio::test]
async fn a_request_that_has_not_begun_is_taken_back_and_one_that_has_is_cancelled_behind_it() {
    let sink = Sink::new(usize::MAX, 100_000);
    let send_queue = FrameSendQueue::new(Box::new(sink.clone()));
    let large = sized(&[0, 3 * CHUNK_BYTES]);
    for message in [&large, &sized(&[3]), &large] {
        send_queue
            .post_request(request_header(message), message, CapacityPermit::default(), Flush::Now, |_| Ok(()))
            .unwrap();
    }
    send_queue.cancel(2, CapacityPermit::default());
    send_queue.cancel(1, CapacityPermit::default());
    tokio::select! { error = send_queue.run() => panic!("{error}"), () = until_idle(&send_queue) => {} }
    let wire = sink.wire.lock().bytes.clone();
    let mut seen = Vec::new();
    decode(&wire, 70_000, |decoder, event| match event {
        Event::Start(_) => decoder.keep(),
        Event::Complete(message) => seen.push(("landed", message.call)),
        Event::Cancel(call) => seen.push(("cancel", call)),
        Event::Segment(_) => {}
        other => panic!("{other:?}"),
    })
    .unwrap();
    assert_eq!(seen, [("landed", 1), ("cancel", 1), ("landed", 3)]);
}

#[test]
fn a_frame_that_announces_too_much_is_refused_before_anything_is_allocated() {
    let refused = |kind, length| {
        let mut bytes = BytesMut::new();
        FrameHeader { kind, length, call: 1 }.write(&mut bytes);
        decode(&bytes, usize::MAX, |_, _| {}).unwrap_err()
    };
    for kind in [
        FrameKind::Request,
        FrameKind::Response,
        FrameKind::Failed,
        FrameKind::Handshake,
        FrameKind::Cancel,
        FrameKind::Heartbeat,
    ] {
        let error = refused(kind, u32::MAX as usize);
        assert_eq!(error.code(), Code::DataLoss, "{error}");
        assert!(error.to_string().contains(&format!("{kind:?}")), "{error}");
    }
    assert!(refused(FrameKind::Body, 1).to_string().contains("where none can be"));
    let mut limits = MessageLimits::default();
    limits.message_bytes_max = 10;
    let frame = request_frame(1, &sized(&[5, 6]));
    let mut decoder = Decoder::new(limits, ReceiveBufferPool::new(0), &frame);
    let error = decoder.next().unwrap_err();
    assert_eq!(error.code(), Code::ResourceExhausted);
    assert!(error.to_string().contains("message_bytes_max = 10"), "{error}");
}

//! Send queue of a connection: splits messages into chunks and posts them in order, a limited number at a time.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use gym_core::transport::mux::{self, CapacityPermit, ConnectionLimits, Handshake, ResponseHeader};
use gym_core::{Code, Message, Result};
use parking_lot::Mutex;

use crate::fabric::{ActiveMessage, Connection, Delivery, SentCallback, URGENT_BYTES_MAX};
use crate::messaging::IN_FLIGHT_MAX;
use crate::messaging::header::{AmHeader, AmKind};
use crate::messaging::layout::ChunkLayout;
use crate::messaging::reassembly::Reassembly;
use crate::messaging::round_trips::{RoundTripHistogram, RoundTrips};

/// Time for which a closed connection may still send.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// Posts active messages; implemented by a fabric's connection and by tests.
pub(crate) trait Carrier: fmt::Debug + Send + Sync + 'static {
    fn post(&self, message: ActiveMessage) -> Result<()>;

    fn close(&self, grace: Duration);
}

impl Carrier for Connection {
    fn post(&self, message: ActiveMessage) -> Result<()> {
        Self::post(self, message)
    }

    fn close(&self, grace: Duration) {
        Self::close(self, grace);
    }
}

/// Sending half of a connection. Cheap to clone.
#[derive(Debug)]
pub(crate) struct UcxSendQueue<C = Connection>(Arc<SendQueueShared<C>>);

impl<C> Clone for UcxSendQueue<C> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

/// Weak reference to a connection for statistics.
#[derive(Debug)]
pub(crate) struct ConnectionWatch<C = Connection>(Weak<SendQueueShared<C>>);

impl<C> ConnectionWatch<C> {
    /// Calls `inspect` with the connection and its round trips. Returns `None` if the connection has ended.
    pub(crate) fn inspect<T>(&self, inspect: impl FnOnce(&C, RoundTrips) -> T) -> Option<T> {
        self.0.upgrade().map(|shared| inspect(&shared.carrier, shared.round_trips.round_trips()))
    }
}

#[derive(Debug)]
struct SendQueueShared<C> {
    carrier: C,
    /// Size from which a part of a message is a chunk of its own.
    cut: usize,
    role: EndRole,
    state: Mutex<QueueState>,
    round_trips: RoundTripHistogram,
}

/// End of the connection at which the queue is.
#[derive(Debug)]
pub(crate) enum EndRole {
    /// Sends requests and receives responses. Cancelling a call discards the part of its response that has arrived.
    Calling(Arc<Mutex<Reassembly<ResponseHeader>>>),
    /// Sends responses.
    Answering,
}

#[derive(Debug, Default)]
struct QueueState {
    queue: VecDeque<QueuedMessage>,
    /// Active messages in the fabric.
    posted: usize,
    /// A thread is posting.
    posting: bool,
    closed: bool,
    last_call: u64,
}

/// An active message that waits to be posted.
#[derive(Debug)]
struct QueuedMessage {
    am: AmHeader,
    payload: Bytes,
    /// Released when all chunks of the message have been sent.
    permit: CapacityPermit,
}

impl<C: Carrier> UcxSendQueue<C> {
    /// Creates a queue. A segment of `cut` bytes or more is sent as a chunk of its own, without a copy.
    pub(crate) fn new(carrier: C, cut: usize, role: EndRole) -> Self {
        Self(Arc::new(SendQueueShared {
            carrier,
            cut,
            role,
            state: Mutex::default(),
            round_trips: RoundTripHistogram::new(),
        }))
    }

    /// Posts the handshake, the first message of the answering end.
    pub(crate) fn post_handshake(&self, limits: &ConnectionLimits) {
        let mut payload = BytesMut::with_capacity(Handshake::BYTES);
        Handshake::of(limits).put(&mut payload);
        let am = AmHeader::bare(AmKind::Handshake, 0);
        self.0.state.lock().queue.push_back(QueuedMessage {
            am,
            payload: payload.freeze(),
            permit: CapacityPermit::default(),
        });
        self.0.post_queued();
    }

    /// Responds to a heartbeat.
    pub(crate) fn echo(&self, sent_at: u64) {
        self.urgent(AmHeader::bare(AmKind::Pong, sent_at), Bytes::new());
    }

    /// Records the response to a heartbeat.
    pub(crate) fn echoed(&self, sent_at: u64) {
        self.0.round_trips.echo(sent_at);
    }

    /// Returns a watch that does not keep the connection alive.
    pub(crate) fn watch(&self) -> ConnectionWatch<C> {
        ConnectionWatch(Arc::downgrade(&self.0))
    }

    fn urgent(&self, am: AmHeader, payload: Bytes) {
        self.post_urgent(am, payload, None);
    }

    fn post_urgent(&self, am: AmHeader, payload: Bytes, done: Option<SentCallback>) {
        if self.0.state.lock().closed {
            return;
        }
        let message = ActiveMessage { header: am.write(), payload, delivery: Delivery::Urgent, done };
        self.0.close_if_rejected(self.0.carrier.post(message));
    }
}

impl<C: Carrier> SendQueueShared<C> {
    /// Posts messages until the fabric holds [`IN_FLIGHT_MAX`]. One thread at a time does so, which keeps the order.
    fn post_queued(self: &Arc<Self>) {
        loop {
            let item = {
                let mut state = self.state.lock();
                if state.posting || state.posted >= IN_FLIGHT_MAX {
                    return;
                }
                let Some(item) = state.queue.pop_front() else { return };
                state.posted += 1;
                state.posting = true;
                item
            };
            let QueuedMessage { am, payload, permit } = item;
            let shared = Arc::clone(self);
            let done = move |_| {
                drop(permit);
                shared.state.lock().posted -= 1;
                shared.post_queued();
            };
            let message =
                ActiveMessage { header: am.write(), payload, delivery: am.kind.delivery(), done: Some(Box::new(done)) };
            let posted = self.carrier.post(message);
            self.state.lock().posting = false;
            self.close_if_rejected(posted);
        }
    }

    /// Closes the connection if the fabric's queue is full. A fabric that has ended has already reported it.
    fn close_if_rejected(&self, posted: Result<()>) {
        if let Err(error) = posted
            && error.code() != Code::Unavailable
        {
            tracing::warn!(%error, "fabric rejected a message; closing the connection");
            self.carrier.close(Duration::ZERO);
        }
    }
}

impl<C: Carrier> mux::MessageSender for UcxSendQueue<C> {
    const HEADROOM: usize = 0;

    fn post_request(
        &self,
        header: BytesMut,
        message: &Message,
        permit: CapacityPermit,
        _flush: mux::Flush,
        register: impl FnOnce(u64) -> Result<()>,
    ) -> Result<u64> {
        // Split before taking the lock, because splitting copies.
        let cut = SplitMessage::new(AmKind::Request, header, message, self.0.cut);
        let call = {
            let mut state = self.0.state.lock();
            let call = state.last_call + 1;
            register(call)?;
            state.last_call = call;
            if !state.closed {
                cut.queue(call, &permit, &mut state.queue);
            }
            call
        };
        self.0.post_queued();
        Ok(call)
    }

    fn post_response(
        &self,
        call: u64,
        header: BytesMut,
        message: &Message,
        permit: CapacityPermit,
        _flush: mux::Flush,
    ) {
        let cut = SplitMessage::new(AmKind::Response, header, message, self.0.cut);
        {
            let mut state = self.0.state.lock();
            if state.closed {
                return;
            }
            cut.queue(call, &permit, &mut state.queue);
        }
        self.0.post_queued();
    }

    fn post_failed(&self, call: u64, mut reason: BytesMut, permit: CapacityPermit) {
        reason.truncate(URGENT_BYTES_MAX);
        let done = move |_| drop(permit);
        self.post_urgent(AmHeader::bare(AmKind::Failed, call), reason.freeze(), Some(Box::new(done)));
    }

    fn cancel(&self, call: u64, reply: CapacityPermit) {
        if let EndRole::Calling(reassembly) = &self.0.role {
            reassembly.lock().forget(call, reply);
        }
        let (begun, taken) = {
            let mut state = self.0.state.lock();
            if state.closed {
                return;
            }
            // Requests are queued in the order of their call numbers, with the chunks of each request adjacent.
            let start = state.queue.partition_point(|item| item.am.call < call);
            let end = state.queue.partition_point(|item| item.am.call <= call);
            let begun = state.queue.range(start..end).next().is_none_or(|item| item.am.kind != AmKind::Request);
            // A header whose first part was sent must be completed, because later messages follow it.
            let more = state.queue.range(start..end).take_while(|item| item.am.kind == AmKind::HeaderRest).count();
            let taken: Vec<_> = state.queue.drain(start + if begun { more } else { 0 }..end).collect();
            (begun, taken)
        };
        drop(taken);
        if begun {
            // The cancellation may overtake the request; the peer then remembers it.
            self.urgent(AmHeader::bare(AmKind::Cancel, call), Bytes::new());
        }
    }

    fn post_drain(&self) {
        self.urgent(AmHeader::bare(AmKind::Drain, 0), Bytes::new());
    }

    fn post_heartbeat(&self) {
        self.urgent(AmHeader::bare(AmKind::Ping, self.0.round_trips.now()), Bytes::new());
    }

    fn close(&self) {
        let queue = {
            let mut state = self.0.state.lock();
            state.closed = true;
            std::mem::take(&mut state.queue)
        };
        drop(queue);
        self.0.carrier.close(CLOSE_TIMEOUT);
    }
}

/// A message split into chunks, without a call number.
struct SplitMessage {
    first_chunk: (AmHeader, Bytes),
    /// Rest of the header, then the other chunks.
    rest: Vec<(AmHeader, Bytes)>,
}

impl SplitMessage {
    fn new(kind: AmKind, mut header: BytesMut, message: &Message, cut: usize) -> Self {
        let head = message.head.len();
        let first_chunk = AmHeader {
            first: u32::try_from(header.len()).unwrap_or(u32::MAX),
            second: u32::try_from(cut).unwrap_or(u32::MAX),
            ..AmHeader::bare(kind, 0)
        };
        if message.segments.is_empty() && header.len() + head < cut {
            // The common case. The layout would be a single chunk.
            message.head.pieces().iter().for_each(|bytes| header.extend_from_slice(bytes));
            return Self { first_chunk: (first_chunk, header.freeze()), rest: Vec::new() };
        }
        let mut chunks = gather(header, message, cut).into_iter();
        let mut header = chunks.next().unwrap_or_default();
        // A payload shorter than `cut` is never announced, and a first chunk must not be announced.
        let first = header.split_to(header.len().min(cut - 1));
        let mut rest = Vec::with_capacity(chunks.len());
        while !header.is_empty() {
            rest.push((AmHeader::bare(AmKind::HeaderRest, 0), header.split_to(header.len().min(cut - 1))));
        }
        let chunk = |(place, payload)| (AmHeader { first: place, ..AmHeader::bare(AmKind::Chunk, 0) }, payload);
        rest.extend((1..).zip(chunks).map(chunk));
        Self { first_chunk: (first_chunk, first), rest }
    }

    fn queue(self, call: u64, permit: &CapacityPermit, queue: &mut VecDeque<QueuedMessage>) {
        let item = |(am, payload)| QueuedMessage { am: AmHeader { call, ..am }, payload, permit: permit.clone() };
        queue.push_back(item(self.first_chunk));
        queue.extend(self.rest.into_iter().map(item));
    }
}

/// Returns the chunks of a message. Large parts are not copied. Small parts are copied together, the first ones after
/// the header.
fn gather(header: BytesMut, message: &Message, cut: usize) -> Vec<Bytes> {
    let head = message.head.len();
    let lengths = std::iter::once(head).chain(message.segments.iter().map(Bytes::len));
    let layout = ChunkLayout::new(header.len(), lengths, cut);
    let mut gathered = vec![BytesMut::new(); layout.chunks.len()];
    gathered[0] = header;
    let mut alone = vec![None; layout.chunks.len()];
    for (part, &(chunk, start)) in layout.positions.iter().enumerate() {
        let bytes = part.checked_sub(1).map(|segment| &message.segments[segment]);
        let length = bytes.map_or(head, Bytes::len);
        if length >= cut {
            alone[chunk] = Some(bytes.map_or_else(|| message.head.to_bytes(), Bytes::clone));
            continue;
        }
        let chunk = &mut gathered[chunk];
        if length > 0 {
            chunk.resize(start, 0);
        }
        match bytes {
            Some(bytes) => chunk.extend_from_slice(bytes),
            None => message.head.pieces().iter().for_each(|bytes| chunk.extend_from_slice(bytes)),
        }
    }
    alone.into_iter().zip(gathered).map(|(alone, gathered)| alone.unwrap_or_else(|| gathered.freeze())).collect()
}

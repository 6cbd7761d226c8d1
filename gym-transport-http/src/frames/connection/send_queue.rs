//! The send queue of a connection. The task that holds its write batch writes to the socket.
//!
//! A sender takes the batch and writes at once if no other task holds the batch, without a hop through another task. Otherwise its
//! message stays in the queue, and the holder writes it. When the socket is full, the batch moves to the writer task, which waits.
//!
//! Messages of a caller that starts many calls and waits for none yet are held for a moment ([`Flush::Later`]), so that the peer wakes once
//! for many of them.
//!
//! Messages are sent whole, one after another, in the order in which they were posted. This keeps calls in order and requires
//! only one partly received message per connection. Only frames without a message (cancel, failed, heartbeat, drain) are sent
//! between the chunks of a message.

use std::collections::VecDeque;
use std::fmt;
use std::io::{self, IoSlice};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use gym_core::transport::mux::{self, CapacityPermit, Flush};
use gym_core::{Message, Result};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

use crate::frames::codec::frame::{CHUNK_BYTES, FRAME_BYTES, FrameKind, bare, body_head, framed, number_frame};
use crate::frames::connection::socket::WriteHalf;

/// Maximum number of slices that one system call writes. The kernel accepts 1,024; more than some dozens bring no gain.
const PIECES_MAX: usize = 64;
/// Number of bytes that a caller writes itself before the writer task takes over: a caller's task should not transfer gigabytes.
const INLINE_BYTES_MAX: usize = 256 << 10;
/// A message up to this size is copied behind its header, which is cheaper than a slice of its own.
const JOINED_BYTES_MAX: usize = 2 << 10;
/// Number of messages that wait for others at most. The peer wakes once for all of them; twice as many save little more.
const HELD_MAX: usize = 32;
/// How long a message waits for others at most; the shortest time of tokio's timers.
const HELD_FOR_MAX: Duration = Duration::from_millis(1);

/// A message to send.
pub(crate) struct OutgoingMessage {
    call: u64,
    /// The frame with its header, not yet numbered; sent before `pieces`.
    frame: BytesMut,
    /// Head and segments, unchanged.
    pieces: VecDeque<Bytes>,
    /// Bytes of the message that were not yet moved into a batch.
    left: usize,
    begun: bool,
    /// Released when the last byte has been written.
    _room: CapacityPermit,
}

impl OutgoingMessage {
    pub(crate) fn new(call: u64, mut frame: BytesMut, message: &Message, room: CapacityPermit) -> Self {
        let parts = message.head.pieces().iter().chain(&message.segments);
        let (mut pieces, mut left) = (VecDeque::new(), message.len());
        if left <= JOINED_BYTES_MAX {
            parts.for_each(|part| frame.extend_from_slice(part));
            left = 0;
        } else {
            pieces = parts.filter(|part| !part.is_empty()).cloned().collect();
        }
        Self { call, frame, pieces, left, begun: false, _room: room }
    }

    /// Returns a frame that is queued behind other messages.
    fn bare(kind: FrameKind, call: u64) -> Self {
        let frame = BytesMut::from(&bare(kind, call)[..]);
        Self { call, frame, pieces: VecDeque::new(), left: 0, begun: false, _room: CapacityPermit::default() }
    }

    fn number(&mut self, call: u64) {
        self.call = call;
        number_frame(&mut self.frame, call);
    }
}

/// The send queue of one connection.
pub(crate) struct FrameSendQueue {
    socket: Box<dyn WriteHalf>,
    state: Mutex<QueueState>,
    /// Notified when the batch is in `waiting`, when there is something for the writer task to take, or when messages begin to be held.
    writer: Notify,
}

struct QueueState {
    urgent: VecDeque<(Bytes, CapacityPermit)>,
    queue: VecDeque<OutgoingMessage>,
    /// `None` while a task writes.
    batch: Option<WriteBatch>,
    /// The batch while it waits for the writer task.
    waiting: Option<WriteBatch>,
    /// When the writer task takes messages that wait for others; `None` if there are none, or if something else writes them before.
    held_until: Option<Instant>,
    /// `true` if something was sent since the last heartbeat was due.
    sent_since_heartbeat: bool,
    closed: bool,
    /// The number of the next request.
    next_call: u64,
    /// An error that a caller received while it wrote; the writer task reports it.
    broken: Option<io::Error>,
}

/// Slices to write next, in order. Holding the batch is also the right to write.
#[derive(Default)]
struct WriteBatch {
    pieces: VecDeque<Bytes>,
    /// `true` if something was written since the last flush.
    unflushed: bool,
}

enum WriteOutcome {
    Idle,
    Full(WriteBatch),
    Spent(WriteBatch),
}

impl FrameSendQueue {
    pub(crate) fn new(socket: Box<dyn WriteHalf>) -> Self {
        let state = QueueState {
            urgent: VecDeque::new(),
            queue: VecDeque::new(),
            batch: Some(WriteBatch::default()),
            waiting: None,
            held_until: None,
            sent_since_heartbeat: false,
            closed: false,
            next_call: 1,
            broken: None,
        };
        Self { socket, state: Mutex::new(state), writer: Notify::new() }
    }

    /// Sends a message after all messages that were posted before.
    pub(crate) fn post(&self, outgoing: OutgoingMessage, flush: Flush) {
        let mut state = self.state.lock();
        if state.closed {
            return;
        }
        state.queue.push_back(outgoing);
        self.start_writing(state, flush);
    }

    /// Sends a frame without a message, before queued messages and between the chunks of a message that has begun.
    pub(crate) fn post_urgent(&self, frame: Bytes) {
        self.push_urgent(frame, CapacityPermit::default());
    }

    fn push_urgent(&self, frame: Bytes, room: CapacityPermit) {
        let mut state = self.state.lock();
        if !state.closed {
            state.urgent.push_back((frame, room));
            self.start_writing(state, Flush::Now);
        }
    }

    /// Returns `true` if everything that was posted so far has been written.
    #[cfg(test)]
    pub(crate) fn is_idle(&self) -> bool {
        let state = self.state.lock();
        state.batch.is_some() && state.queue.is_empty() && state.urgent.is_empty()
    }

    /// Writes the remaining data of callers whenever the socket accepts more; returns the socket's error.
    pub(crate) async fn run(&self) -> io::Error {
        loop {
            self.writer.notified().await;
            while let Some(until) = self.held_until() {
                if timeout_at(until, self.writer.notified()).await.is_err() {
                    break;
                }
            }
            // Runs after the tasks that are about to post something too, so that one system call writes everything.
            tokio::task::yield_now().await;
            let taken = {
                let mut state = self.state.lock();
                if let Some(error) = state.broken.take() {
                    return error;
                }
                state.waiting.take().or_else(|| state.batch.take())
            };
            let Some(mut batch) = taken else { continue };
            loop {
                match self.pump(batch, CHUNK_BYTES) {
                    Ok(WriteOutcome::Idle) => break,
                    Ok(WriteOutcome::Spent(back)) => {
                        batch = back;
                        tokio::task::yield_now().await;
                    }
                    Ok(WriteOutcome::Full(back)) => {
                        batch = back;
                        if let Err(error) = self.socket.writable().await {
                            return error;
                        }
                    }
                    Err(error) => return error,
                }
            }
        }
    }

    /// Ensures that the queue is written: by this caller, by the holder of the batch, or by the writer task.
    fn start_writing(&self, mut state: MutexGuard<'_, QueueState>, flush: Flush) {
        if state.batch.is_none() {
            return;
        }
        match flush {
            Flush::Later if state.may_hold() => {
                // Those before it are held too, or the writer task is about to take all.
                if state.queue.len() == 1 {
                    state.held_until = Some(Instant::now() + HELD_FOR_MAX);
                    drop(state);
                    self.writer.notify_one();
                }
                return;
            }
            Flush::Soon => {
                state.held_until = None;
                drop(state);
                self.writer.notify_one();
                return;
            }
            Flush::Later | Flush::Now => {}
        }
        let Some(batch) = state.batch.take() else { return };
        drop(state);
        match self.pump(batch, INLINE_BYTES_MAX) {
            Ok(WriteOutcome::Idle) => {}
            Ok(WriteOutcome::Full(batch) | WriteOutcome::Spent(batch)) => {
                self.state.lock().waiting = Some(batch);
                self.writer.notify_one();
            }
            Err(error) => {
                self.state.lock().broken = Some(error);
                self.writer.notify_one();
            }
        }
    }

    /// Writes until the queue is empty, the socket is full, or about `bytes_max` were written.
    fn pump(&self, mut batch: WriteBatch, bytes_max: usize) -> io::Result<WriteOutcome> {
        let mut written = 0;
        loop {
            if batch.pieces.is_empty() {
                if batch.unflushed {
                    match self.socket.try_flush() {
                        Ok(()) => batch.unflushed = false,
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                            return Ok(WriteOutcome::Full(batch));
                        }
                        Err(error) => return Err(error),
                    }
                }
                let mut state = self.state.lock();
                state.refill(&mut batch);
                if batch.pieces.is_empty() {
                    state.batch = Some(batch);
                    state.held_until = None;
                    return Ok(WriteOutcome::Idle);
                }
            }
            if written >= bytes_max {
                return Ok(WriteOutcome::Spent(batch));
            }
            match self.socket.try_write(&batch.slices()) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => {
                    written += count;
                    batch.unflushed = true;
                    batch.advance(count);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(WriteOutcome::Full(batch)),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Returns until when the writer task waits for further messages.
    fn held_until(&self) -> Option<Instant> {
        let state = self.state.lock();
        state.held_until.filter(|_| state.waiting.is_none() && state.broken.is_none())
    }
}

impl mux::MessageSender for FrameSendQueue {
    const HEADROOM: usize = FRAME_BYTES;

    fn post_request(
        &self,
        header: BytesMut,
        message: &Message,
        room: CapacityPermit,
        flush: Flush,
        register: impl FnOnce(u64) -> Result<()>,
    ) -> Result<u64> {
        let mut outgoing = OutgoingMessage::new(0, framed(FrameKind::Request, 0, header), message, room);
        let mut state = self.state.lock();
        let call = state.next_call;
        register(call)?;
        state.next_call += 1;
        outgoing.number(call);
        state.queue.push_back(outgoing);
        self.start_writing(state, flush);
        Ok(call)
    }

    fn post_response(&self, call: u64, header: BytesMut, message: &Message, room: CapacityPermit, flush: Flush) {
        self.post(OutgoingMessage::new(call, framed(FrameKind::Response, call, header), message, room), flush);
    }

    fn flush(&self) {
        let state = self.state.lock();
        if state.held_until.is_some() {
            self.start_writing(state, Flush::Now);
        }
    }

    fn post_failed(&self, call: u64, reason: BytesMut, room: CapacityPermit) {
        self.push_urgent(framed(FrameKind::Failed, call, reason).freeze(), room);
    }

    fn cancel(&self, call: u64, _reply: CapacityPermit) {
        let mut state = self.state.lock();
        if state.closed {
            return;
        }
        // Requests are posted in the order of their numbers.
        match state.queue.binary_search_by_key(&call, |outgoing| outgoing.call) {
            Ok(at) if state.queue[at].begun => {
                let cancel = OutgoingMessage::bare(FrameKind::Cancel, call);
                state.queue.insert(at + 1, cancel);
            }
            Ok(at) => {
                state.queue.remove(at);
            }
            Err(_) => {
                state.urgent.push_back((bare(FrameKind::Cancel, call), CapacityPermit::default()));
                self.start_writing(state, Flush::Now);
            }
        }
    }

    fn post_drain(&self) {
        self.post_urgent(bare(FrameKind::Drain, 0));
    }

    fn post_heartbeat(&self) {
        let mut state = self.state.lock();
        if !state.closed && !std::mem::take(&mut state.sent_since_heartbeat) && state.urgent.is_empty() {
            state.urgent.push_back((bare(FrameKind::Heartbeat, 0), CapacityPermit::default()));
            self.start_writing(state, Flush::Now);
        }
    }

    fn close(&self) {
        let unsent = {
            let mut state = self.state.lock();
            state.closed = true;
            (std::mem::take(&mut state.urgent), std::mem::take(&mut state.queue), state.waiting.take())
        };
        drop(unsent);
        self.socket.shut();
    }
}

impl fmt::Debug for FrameSendQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FrameSendQueue({:?}, {} messages wait)", self.socket, self.state.lock().queue.len())
    }
}

impl QueueState {
    /// Returns `true` if the newest message is small and few wait with it.
    fn may_hold(&self) -> bool {
        self.queue.len() < HELD_MAX && self.queue.back().is_some_and(|newest| newest.left == 0)
    }

    /// Moves the next slices into the batch: everything urgent, then up to a chunk of messages.
    fn refill(&mut self, batch: &mut WriteBatch) {
        batch.pieces.extend(self.urgent.drain(..).map(|(frame, _room)| frame));
        let mut bytes = 0;
        while let Some(outgoing) = self.queue.front_mut()
            && bytes < CHUNK_BYTES
            && batch.pieces.len() < PIECES_MAX
        {
            bytes += outgoing.take_chunk(&mut batch.pieces);
            if outgoing.left == 0 {
                self.queue.pop_front();
            } else {
                // Urgent frames may be sent before its next chunk.
                break;
            }
        }
        self.sent_since_heartbeat |= !batch.pieces.is_empty();
    }
}

impl OutgoingMessage {
    /// Moves the next chunk to the batch, and returns the number of its bytes.
    fn take_chunk(&mut self, to: &mut VecDeque<Bytes>) -> usize {
        let chunk = self.left.min(CHUNK_BYTES);
        if self.begun {
            to.push_back(body_head(self.call, chunk));
        } else {
            self.begun = true;
            to.push_back(std::mem::take(&mut self.frame).freeze());
        }
        self.left -= chunk;
        let mut wanted = chunk;
        while wanted > 0
            && let Some(piece) = self.pieces.front_mut()
        {
            let part = piece.split_to(piece.len().min(wanted));
            wanted -= part.len();
            to.push_back(part);
            if piece.is_empty() {
                self.pieces.pop_front();
            }
        }
        FRAME_BYTES + chunk
    }
}

impl WriteBatch {
    fn slices(&self) -> Vec<IoSlice<'_>> {
        self.pieces.iter().take(PIECES_MAX).map(|piece| IoSlice::new(piece)).collect()
    }

    fn advance(&mut self, mut count: usize) {
        while let Some(piece) = self.pieces.front_mut() {
            if count < piece.len() {
                piece.advance(count);
                return;
            }
            count -= piece.len();
            self.pieces.pop_front();
        }
    }
}

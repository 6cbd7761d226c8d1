//! The writing end: what is to leave, in order, and who holds the pen.
//!
//! Whoever has something to send writes it at once if the pen is free, without a hop through another task; while somebody else
//! writes, it is left in the queue and taken along. When the socket is full, the pen goes to the writer task, which waits.
//!
//! Messages leave one after another, whole, in the order in which they were posted: this is what keeps calls in order, and it
//! needs one partly received message per connection. Only frames without a message (cancel, failed, heartbeat, drain) go
//! between the chunks of one.

use std::collections::VecDeque;
use std::fmt;
use std::io::{self, IoSlice};
use std::sync::{Mutex, MutexGuard, PoisonError};

use bytes::{Buf, Bytes, BytesMut};
use gym_core::mux::{self, Room};
use gym_core::{Message, Result};
use tokio::sync::Notify;

use super::layout::{CHUNK_BYTES, FRAME_BYTES, Kind, bare, body_head, framed, number_frame};
use super::socket::WriteHalf;

/// Pieces that one system call writes. The kernel takes 1,024; beyond some dozens nothing is gained.
const PIECES_MAX: usize = 64;
/// What a caller writes itself before it leaves the rest to the writer task: a caller's task is not to move gigabytes.
const INLINE_BYTES_MAX: usize = 256 << 10;
/// A message up to this size is copied behind its header: cheaper than a piece of its own.
const JOINED_BYTES_MAX: usize = 2 << 10;

/// A message on its way out.
pub(super) struct Parcel {
    call: u64,
    /// The frame with its header, not numbered yet; sent before `pieces`.
    frame: BytesMut,
    /// Head and segments as they are.
    pieces: VecDeque<Bytes>,
    /// Bytes of the message that are still to be taken.
    left: usize,
    begun: bool,
    /// Given back when the last byte is on its way.
    _room: Room,
}

impl Parcel {
    pub(super) fn new(call: u64, mut frame: BytesMut, message: &Message, room: Room) -> Self {
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

    /// A frame that has to wait for its turn.
    fn bare(kind: Kind, call: u64) -> Self {
        let frame = BytesMut::from(&bare(kind, call)[..]);
        Self { call, frame, pieces: VecDeque::new(), left: 0, begun: false, _room: Room::default() }
    }

    fn number(&mut self, call: u64) {
        self.call = call;
        number_frame(&mut self.frame, call);
    }
}

/// What is to leave one connection.
pub(super) struct FramesOutbox {
    socket: Box<dyn WriteHalf>,
    state: Mutex<State>,
    /// The pen lies in `waiting`, or there is something for the writer to pick up.
    writer: Notify,
}

struct State {
    urgent: VecDeque<(Bytes, Room)>,
    queue: VecDeque<Parcel>,
    /// None while somebody writes.
    pen: Option<Pen>,
    /// The pen, left for the writer task.
    waiting: Option<Pen>,
    /// Something has left since the last heartbeat was due.
    has_spoken: bool,
    closed: bool,
    /// The number of the next request.
    next_call: u64,
    /// What a caller met while it wrote; the writer task reports it.
    broken: Option<io::Error>,
}

/// Pieces that are next on the wire, in order.
#[derive(Default)]
struct Pen {
    pieces: VecDeque<Bytes>,
}

enum Pumped {
    Idle,
    Full(Pen),
    Spent(Pen),
}

impl FramesOutbox {
    pub(super) fn new(socket: Box<dyn WriteHalf>) -> Self {
        let state = State {
            urgent: VecDeque::new(),
            queue: VecDeque::new(),
            pen: Some(Pen::default()),
            waiting: None,
            has_spoken: false,
            closed: false,
            next_call: 1,
            broken: None,
        };
        Self { socket, state: Mutex::new(state), writer: Notify::new() }
    }

    /// Sends a message after all that were posted before. `crowded`: others will follow at once, so it is left to the writer
    /// task, which writes many with one system call.
    pub(super) fn post(&self, parcel: Parcel, crowded: bool) {
        let mut state = self.lock();
        if state.closed {
            return;
        }
        state.queue.push_back(parcel);
        self.begin(state, crowded);
    }

    /// Sends a frame without a message, before messages that have not begun and between the chunks of one that has.
    pub(super) fn post_urgent(&self, frame: Bytes) {
        self.hurry(frame, Room::default());
    }

    fn hurry(&self, frame: Bytes, room: Room) {
        let mut state = self.lock();
        if !state.closed {
            state.urgent.push_back((frame, room));
            self.begin(state, false);
        }
    }

    /// Whether everything posted so far has left.
    #[cfg(test)]
    pub(super) fn is_idle(&self) -> bool {
        let state = self.lock();
        state.pen.is_some() && state.queue.is_empty() && state.urgent.is_empty()
    }

    /// Writes what callers leave, whenever the socket takes more; ends with the socket's error.
    pub(super) async fn run(&self) -> io::Error {
        loop {
            self.writer.notified().await;
            // Behind the tasks that are about to post something too: one system call for all of them.
            tokio::task::yield_now().await;
            let taken = {
                let mut state = self.lock();
                if let Some(error) = state.broken.take() {
                    return error;
                }
                state.waiting.take().or_else(|| state.pen.take())
            };
            let Some(mut pen) = taken else { continue };
            loop {
                match self.pump(pen, CHUNK_BYTES) {
                    Ok(Pumped::Idle) => break,
                    Ok(Pumped::Spent(back)) => {
                        pen = back;
                        tokio::task::yield_now().await;
                    }
                    Ok(Pumped::Full(back)) => {
                        pen = back;
                        if let Err(error) = self.socket.writable().await {
                            return error;
                        }
                    }
                    Err(error) => return error,
                }
            }
        }
    }

    /// Has somebody write: this caller, the one who holds the pen, or the writer task.
    fn begin(&self, mut state: MutexGuard<'_, State>, crowded: bool) {
        if state.pen.is_none() {
            return;
        }
        if crowded {
            drop(state);
            self.writer.notify_one();
            return;
        }
        let Some(pen) = state.pen.take() else { return };
        drop(state);
        match self.pump(pen, INLINE_BYTES_MAX) {
            Ok(Pumped::Idle) => {}
            Ok(Pumped::Full(pen) | Pumped::Spent(pen)) => {
                self.lock().waiting = Some(pen);
                self.writer.notify_one();
            }
            Err(error) => {
                self.lock().broken = Some(error);
                self.writer.notify_one();
            }
        }
    }

    /// Writes until there is nothing left, the socket is full, or about `bytes_max` have left.
    fn pump(&self, mut pen: Pen, bytes_max: usize) -> io::Result<Pumped> {
        let mut written = 0;
        loop {
            if pen.pieces.is_empty() {
                let mut state = self.lock();
                state.refill(&mut pen);
                if pen.pieces.is_empty() {
                    state.pen = Some(pen);
                    return Ok(Pumped::Idle);
                }
            }
            if written >= bytes_max {
                return Ok(Pumped::Spent(pen));
            }
            match self.socket.try_write(&pen.slices()) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => {
                    written += count;
                    pen.advance(count);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Pumped::Full(pen)),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl mux::Outbox for FramesOutbox {
    const HEADROOM: usize = FRAME_BYTES;

    fn post_request(
        &self,
        header: BytesMut,
        message: &Message,
        room: Room,
        crowded: bool,
        register: impl FnOnce(u64) -> Result<()>,
    ) -> Result<u64> {
        let mut parcel = Parcel::new(0, framed(Kind::Request, 0, header), message, room);
        let mut state = self.lock();
        let call = state.next_call;
        register(call)?;
        state.next_call += 1;
        parcel.number(call);
        state.queue.push_back(parcel);
        self.begin(state, crowded);
        Ok(call)
    }

    fn post_response(&self, call: u64, header: BytesMut, message: &Message, room: Room, crowded: bool) {
        self.post(Parcel::new(call, framed(Kind::Response, call, header), message, room), crowded);
    }

    fn post_failed(&self, call: u64, reason: BytesMut, room: Room) {
        self.hurry(framed(Kind::Failed, call, reason).freeze(), room);
    }

    fn cancel(&self, call: u64, _reply: Room) {
        let mut state = self.lock();
        if state.closed {
            return;
        }
        // Requests are posted in the order of their numbers.
        match state.queue.binary_search_by_key(&call, |parcel| parcel.call) {
            Ok(at) if state.queue[at].begun => {
                let cancel = Parcel::bare(Kind::Cancel, call);
                state.queue.insert(at + 1, cancel);
            }
            Ok(at) => {
                state.queue.remove(at);
            }
            Err(_) => {
                state.urgent.push_back((bare(Kind::Cancel, call), Room::default()));
                self.begin(state, false);
            }
        }
    }

    fn post_drain(&self) {
        self.post_urgent(bare(Kind::Drain, 0));
    }

    fn post_heartbeat(&self) {
        let mut state = self.lock();
        if !state.closed && !std::mem::take(&mut state.has_spoken) && state.urgent.is_empty() {
            state.urgent.push_back((bare(Kind::Heartbeat, 0), Room::default()));
            self.begin(state, false);
        }
    }

    fn close(&self) {
        let unsent = {
            let mut state = self.lock();
            state.closed = true;
            (std::mem::take(&mut state.urgent), std::mem::take(&mut state.queue), state.waiting.take())
        };
        drop(unsent);
        self.socket.shut();
    }
}

impl fmt::Debug for FramesOutbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FramesOutbox({:?}, {} messages wait)", self.socket, self.lock().queue.len())
    }
}

impl State {
    /// Gives the pen what is next: everything urgent, then up to a chunk of messages.
    fn refill(&mut self, pen: &mut Pen) {
        pen.pieces.extend(self.urgent.drain(..).map(|(frame, _room)| frame));
        let mut bytes = 0;
        while let Some(parcel) = self.queue.front_mut()
            && bytes < CHUNK_BYTES
            && pen.pieces.len() < PIECES_MAX
        {
            bytes += parcel.take_chunk(&mut pen.pieces);
            if parcel.left == 0 {
                self.queue.pop_front();
            } else {
                // What is urgent may go before its next chunk.
                break;
            }
        }
        self.has_spoken |= !pen.pieces.is_empty();
    }
}

impl Parcel {
    /// Moves the next chunk to the wire; the number of its bytes.
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

impl Pen {
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

//! A worker of its own for each peer on this host.
//!
//! All who write to a worker over shared memory write into one queue of it: a place is taken, filled, and then marked as
//! full. A peer that is killed or stopped between the two blocks the queue for everybody behind it, and for as long as the
//! worker lives. So every connection over shared memory has its worker, which takes its messages and ends with it; what a
//! peer's death does to a queue happens to its own connection.
//!
//! ```text
//!  opened ──▶ free ──▶ taken ──▶ leaving ──▶ gone
//!               └─────▶ given up ─────────────▲
//! ```
//!
//! A worker that is destroyed answers nobody: what the peer has announced to it would wait for ever, and what was announced
//! to the peer may still be read by it. So a berth that is left stays until both ends have said that nothing of theirs is
//! under way ([`Kind::Last`]), or the peer's process has ended. One that goes earlier, because its fabric ends or its peer says
//! nothing for too long, says so ([`Kind::Destroyed`]): then the peer's need not stay either.
//!
//! An address names the memory of its worker by a number, the descriptor's, which means something else when the worker is gone:
//! whoever comes by it then maps, and writes, what it finds there. So a berth whose address was told stays as long as somebody
//! may come by it, and nobody comes later ([`Berth::address`]). Only the end of the fabric does not wait for that.
#![allow(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::fmt;
use std::os::fd::BorrowedFd;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use gym_core::{Code, Error, Result, raise_descriptors};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::time::Instant;

use super::handle::{Command, Shared};
use super::inbox::{Inbound, Inbox};
use super::peer::Sending;
use super::process::Process;
use super::state::State;
use super::wire::{Kind, MESSAGE_ID, Prefix};
use super::{ConnectionId, FabricOptions};
use crate::sys::Library;
use crate::ucx::{Armed, Context, Endpoint, Others, Outgoing, Protocol, Worker};

/// How long a berth that is left is waited for by a shutdown, or stays for a peer that never was one.
pub(super) const LEAVE_BERTH_WITHIN: Duration = Duration::from_secs(1);
/// What a berth takes of the process's descriptors: UCX's, and the one of the peer's process.
const BERTH_DESCRIPTORS: usize = 7;
/// How long one stays in which nothing of ours is under way, for the peer to say the same.
const PATIENCE: Duration = Duration::from_secs(60);

/// A place for one peer on this host: a worker of its own. It is used by one [`connect`](super::Fabric::connect) or
/// [`expect`](super::Fabric::expect), and given up when its last clone is dropped unused, or its time is over.
#[derive(Clone)]
pub struct Berth(Arc<Reserved>);

struct Reserved {
    id: BerthId,
    address: Bytes,
    told: Arc<AtomicBool>,
    shared: Arc<Shared>,
}

/// Names a berth within its fabric.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct BerthId(u64);

impl Berth {
    /// What the peer connects to. Some hundred bytes, to be handed over to that peer only, which must not use it later than the
    /// berth's time and a second: from here on the berth stays so long, whatever becomes of it, unless a connection has opened.
    #[must_use]
    pub fn address(&self) -> &Bytes {
        self.0.told.store(true, Ordering::Relaxed);
        &self.0.address
    }

    /// The peer will not use the address: it has refused, and the berth need not stay for it.
    pub fn withdraw(&self) {
        self.0.told.store(false, Ordering::Relaxed);
    }

    pub(super) fn id(&self) -> BerthId {
        self.0.id
    }
}

impl fmt::Debug for Berth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Berth({})", self.0.id.0)
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        // Refused: the fabric has ended.
        let _ = self.shared.queue.push_always(Command::GiveUp(self.id), true);
    }
}

/// An address as a peer is told it: `version u8 | process u32, little endian | UCX's address`.
struct Address {
    process: u32,
    worker: Bytes,
}

const ADDRESS_VERSION: u8 = 1;
const ADDRESS_PREFIX_BYTES: usize = 5;

impl Address {
    fn ours(worker: &Worker) -> Bytes {
        let mut bytes = BytesMut::with_capacity(ADDRESS_PREFIX_BYTES + worker.address().len());
        bytes.put_u8(ADDRESS_VERSION);
        bytes.put_u32_le(std::process::id());
        bytes.put_slice(worker.address());
        bytes.freeze()
    }

    fn read(bytes: &Bytes) -> Option<Self> {
        let (&[version, ref process @ ..], worker) = bytes.split_first_chunk::<ADDRESS_PREFIX_BYTES>()?;
        let there = version == ADDRESS_VERSION && !worker.is_empty();
        there.then(|| Self { process: u32::from_le_bytes(*process), worker: bytes.slice_ref(worker) })
    }
}

/// The workers of all berths, for the thread to go round without the state.
pub(super) type Workers = Rc<RefCell<Vec<Rc<Worker>>>>;

/// All berths of a fabric.
pub(super) struct Berths {
    shared: Arc<Shared>,
    settings: Settings,
    /// Only shared memory is in it: a worker opens every device of its context. Opened with the first berth.
    context: Option<Rc<Context>>,
    inbox: Rc<Inbox>,
    state: Weak<RefCell<State>>,
    places: HashMap<BerthId, Place>,
    workers: Workers,
    next: u64,
}

/// What a berth's context is opened with.
pub(super) struct Settings {
    library: &'static Library,
    /// `None`: the fabric's transports have no shared memory.
    settings: Option<Vec<(String, String)>>,
    max: usize,
}

impl Settings {
    pub(super) fn new(library: &'static Library, options: &FabricOptions) -> Self {
        let settings = options.berth_settings(&library.info().version);
        let descriptors = usize::try_from(raise_descriptors()).unwrap_or(usize::MAX);
        let max = options.shared_memory_peers_max.min(descriptors / 2 / BERTH_DESCRIPTORS);
        Self { library, settings, max }
    }
}

struct Place {
    worker: Rc<Worker>,
    process: Process,
    /// Its time.
    until: Instant,
    /// Somebody may come by its address.
    told: Arc<AtomicBool>,
    /// The peer has said its last word.
    peer_left: bool,
    /// The peer's worker is destroyed.
    peer_destroyed: bool,
    stage: Stage,
}

enum Stage {
    Free,
    /// Nobody here wants it any more.
    GivenUp,
    Taken(ConnectionId),
    Leaving(Leaving),
}

/// A berth without a connection.
struct Leaving {
    own: ConnectionId,
    endpoint: Option<Endpoint>,
    peer: ConnectionId,
    sending: Rc<Sending>,
    was_open: bool,
    since: Instant,
    last: Rc<Cell<Last>>,
}

/// How far our last word is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Last {
    NotSaid,
    UnderWay,
    Taken,
}

/// A connection that takes a berth leaves this behind.
pub(super) struct Left {
    pub(super) endpoint: Option<Endpoint>,
    pub(super) peer: ConnectionId,
    pub(super) sending: Rc<Sending>,
    pub(super) was_open: bool,
}

impl Leaving {
    /// Each operation that UCX has not ended, in either direction, holds a reference.
    fn has_operations(&self) -> bool {
        Rc::strong_count(&self.sending) > 1
    }

    /// Says that nothing of ours is under way any more, and nothing will be. One that never was open may be no peer at all.
    fn say_last(&self) {
        let Some(endpoint) = self.endpoint.as_ref().filter(|_| self.was_open) else {
            return self.last.set(Last::Taken);
        };
        self.last.set(Last::UnderWay);
        let last = Rc::clone(&self.last);
        endpoint.send(self.message(Kind::Last), None, move |_| last.set(Last::Taken));
    }

    /// Says that the worker is destroyed next, if the peer makes room for it at once.
    fn say_destroyed(&self) {
        if let Some(endpoint) = self.endpoint.as_ref().filter(|_| self.was_open) {
            endpoint.send(self.message(Kind::Destroyed), None, |_| {});
        }
    }

    fn message(&self, kind: Kind) -> Outgoing {
        let (header, header_bytes) = Prefix { receiver: self.peer, sequence: 0, kind }.encode(&[]);
        let (payload, protocol) = (Bytes::new(), Protocol::Eager);
        Outgoing { id: MESSAGE_ID, header, header_bytes, payload, protocol, reply: false }
    }

    fn has_said_last(&self) -> bool {
        self.last.get() == Last::Taken
    }
}

impl Place {
    /// Whether somebody may still come by its address, unless a connection has opened.
    fn is_sought(&self, now: Instant) -> bool {
        self.told.load(Ordering::Relaxed) && now < self.until + LEAVE_BERTH_WITHIN
    }

    /// Whether the peer reads and writes nothing any more.
    fn peer_is_over(&self) -> bool {
        self.peer_destroyed || self.process.has_ended()
    }

    /// Whether nobody needs it any more.
    fn is_over(&self, now: Instant) -> bool {
        match &self.stage {
            Stage::Free => now >= self.until && !self.is_sought(now),
            Stage::GivenUp => !self.is_sought(now),
            Stage::Taken(_) => false,
            Stage::Leaving(leaving) => {
                let since = now.duration_since(leaving.since);
                let agreed = self.peer_left && leaving.has_said_last();
                // Only a hello can be under way to one that never was a peer.
                let without_hello = leaving.endpoint.is_none() || since >= LEAVE_BERTH_WITHIN;
                let nobody = !leaving.was_open && without_hello && !self.is_sought(now);
                agreed || nobody || self.peer_is_over() || (!leaving.has_operations() && since >= PATIENCE)
            }
        }
    }

    /// Whether its time is kept, and a shutdown waits for it.
    fn is_awaited(&self, now: Instant) -> bool {
        match &self.stage {
            Stage::Free => true,
            Stage::GivenUp => false,
            Stage::Taken(_) => self.process.has_ended(),
            Stage::Leaving(leaving) => self.peer_is_over() || now.duration_since(leaving.since) < LEAVE_BERTH_WITHIN,
        }
    }

    /// Whether it may go at the very end, although nothing was agreed.
    fn may_go(&self) -> bool {
        match &self.stage {
            Stage::Free | Stage::GivenUp => true,
            Stage::Taken(_) => false,
            Stage::Leaving(leaving) => !leaving.was_open || !leaving.has_operations() || self.peer_is_over(),
        }
    }

    /// Destroys the worker. To be called when it [is over](Place::is_over) or [may go](Place::may_go).
    fn go(self) {
        if let Stage::Leaving(leaving) = &self.stage
            && !(self.peer_left && leaving.has_said_last())
            && !self.peer_is_over()
        {
            leaving.say_destroyed();
        }
        let Self { worker, stage, .. } = self;
        // SAFETY: of the reasons to let it go each means that nothing is left which somebody might still use: both ends have
        // said so, or ours knows of nothing; only a hello was sent, without a payload; the peer's worker is destroyed, or its
        // process has ended. The peer vouches for what it says and for the number of its process. A lie lets payloads be freed that it still copies, which
        // only a process can that may read and write our memory anyway.
        unsafe { worker.abandon() };
        if let Stage::Leaving(Leaving { endpoint: Some(endpoint), .. }) = stage {
            endpoint.give_back();
        }
    }
}

impl Berths {
    pub(super) fn new(shared: Arc<Shared>, settings: Settings, inbox: Rc<Inbox>, state: Weak<RefCell<State>>) -> Self {
        let (places, workers) = (HashMap::new(), Workers::default());
        Self { shared, settings, context: None, inbox, state, places, workers, next: 0 }
    }

    pub(super) fn workers(&self) -> Workers {
        Rc::clone(&self.workers)
    }

    /// Opens one, for so long unless somebody takes it.
    pub(super) fn open(&mut self, within: Duration) -> Result<Berth> {
        let refused = |code, said: String| Error::not_started(code, said);
        if self.places.len() >= self.settings.max {
            self.shared.counters.berths_refused.add(1);
            let said = format!("{} connections share memory with this process already", self.places.len());
            return Err(refused(Code::ResourceExhausted, said));
        }
        let id = BerthId(self.next);
        let worker = self.worker(id).map_err(|said| refused(Code::Unavailable, said))?;
        self.next += 1;
        let address = Address::ours(&worker);
        self.workers.borrow_mut().push(Rc::clone(&worker));
        let (until, told) = (Instant::now() + within, Arc::new(AtomicBool::new(false)));
        let (process, reserved) = (Process::Unknown, Arc::clone(&told));
        self.places.insert(
            id,
            Place { worker, process, until, told, peer_left: false, peer_destroyed: false, stage: Stage::Free },
        );
        self.shared.counters.berths_opened.add(1);
        Ok(Berth(Arc::new(Reserved { id, address, told: reserved, shared: Arc::clone(&self.shared) })))
    }

    fn worker(&mut self, id: BerthId) -> Result<Rc<Worker>, String> {
        let context = if let Some(context) = &self.context {
            Rc::clone(context)
        } else {
            let none = || "the transports that this process may use have no shared memory".to_owned();
            let settings = self.settings.settings.as_ref().ok_or_else(none)?;
            let opened = Context::open(self.settings.library, settings);
            let context = opened.map_err(|(what, status)| format!("{what}: {status}"))?;
            Rc::clone(self.context.insert(context))
        };
        let worker = Worker::open(&context).map_err(|(what, status)| format!("{what}: {status}"))?;
        let inbound =
            Inbound::new(Rc::clone(&self.inbox), Weak::clone(&self.state), Arc::clone(&self.shared), Some(id));
        let received = worker.receive(MESSAGE_ID, Box::new(inbound), Others::Lower);
        received.map_err(|status| format!("receive messages: {status}"))?;
        Ok(worker)
    }

    /// Its connection has come: a worker, and what of the peer's address is UCX's.
    pub(super) fn take(
        &mut self,
        berth: &Berth,
        connection: ConnectionId,
        peer: &Bytes,
    ) -> Result<(Rc<Worker>, Bytes), &'static str> {
        let place = self.places.get_mut(&berth.id()).ok_or("its time is over")?;
        match place.stage {
            Stage::Free if Instant::now() < place.until => {}
            Stage::Free | Stage::GivenUp => return Err("its time is over"),
            Stage::Taken(_) | Stage::Leaving(_) => return Err("it is taken"),
        }
        let address = Address::read(peer).ok_or("the peer's address is none")?;
        place.process = Process::watch(address.process);
        place.stage = Stage::Taken(connection);
        Ok((Rc::clone(&place.worker), address.worker))
    }

    /// Nobody will take it, unless somebody has.
    pub(super) fn give_up(&mut self, id: BerthId) {
        let Some(place) = self.places.get_mut(&id).filter(|place| matches!(place.stage, Stage::Free)) else { return };
        place.stage = Stage::GivenUp;
        if place.is_over(Instant::now()) {
            self.remove(id);
        }
    }

    /// Its connection has ended.
    pub(super) fn leave(&mut self, id: BerthId, left: Left) {
        let Some(place) = self.places.get_mut(&id) else { return };
        let Stage::Taken(own) = place.stage else { return };
        let Left { endpoint, peer, sending, was_open } = left;
        let (since, last) = (Instant::now(), Rc::new(Cell::new(Last::NotSaid)));
        place.stage = Stage::Leaving(Leaving { own, endpoint, peer, sending, was_open, since, last });
    }

    /// The peer of this connection has said its last word. Of any other it is not heard here.
    pub(super) fn peer_left(&mut self, id: BerthId, connection: ConnectionId, destroyed: bool) {
        let Some(place) = self.places.get_mut(&id) else { return };
        let own = match &place.stage {
            Stage::Taken(own) | Stage::Leaving(Leaving { own, .. }) => *own,
            Stage::Free | Stage::GivenUp => return,
        };
        if own == connection {
            place.peer_left = true;
            place.peer_destroyed |= destroyed;
        }
    }

    /// Gives up all that nobody has taken, at once.
    pub(super) fn give_up_all(&mut self) {
        self.remove_where(|place| matches!(place.stage, Stage::Free | Stage::GivenUp));
    }

    /// Goes on with those that are left, and says whose peer has ended: everything that it sent has come by then.
    pub(super) fn keep_time(&mut self, now: Instant) -> Vec<ConnectionId> {
        let mut lost = Vec::new();
        for place in self.places.values() {
            match &place.stage {
                Stage::Taken(connection) if place.process.has_ended() => lost.push(*connection),
                Stage::Leaving(leaving) if leaving.last.get() == Last::NotSaid && !leaving.has_operations() => {
                    leaving.say_last();
                }
                Stage::Free | Stage::GivenUp | Stage::Taken(_) | Stage::Leaving(_) => {}
            }
        }
        self.remove_where(|place| place.is_over(now));
        self.look_at_processes();
        lost
    }

    /// Notes whose process has ended. It is acted on only a round later: what the peer sent before lies in the worker's queue.
    fn look_at_processes(&mut self) {
        let watched: Vec<_> =
            self.places.iter().filter_map(|(id, place)| Some((*id, place.process.descriptor()?))).collect();
        if watched.is_empty() {
            return;
        }
        let mut descriptors: Vec<_> = watched.iter().map(|(_, watched)| PollFd::new(watched, PollFlags::IN)).collect();
        let found = poll(&mut descriptors, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap_or(0);
        if found == 0 {
            return;
        }
        let ended = watched.iter().zip(&descriptors).filter(|(_, descriptor)| !descriptor.revents().is_empty());
        let ended: Vec<_> = ended.map(|((id, _), _)| *id).collect();
        for id in ended {
            if let Some(place) = self.places.get_mut(&id) {
                place.process = Process::Ended;
            }
        }
    }

    /// Whether something is to happen soon that no descriptor announces.
    pub(super) fn is_awaited(&self, now: Instant) -> bool {
        self.places.values().any(|place| place.is_awaited(now))
    }

    /// Arms the workers before a sleep, and adds those that then wake it up. Returns whether one of them is busy: it has
    /// something to do, or waits for its peer to make room. One that is left keeps nobody awake for that; a tick sees to it.
    pub(super) fn arm<'a>(&'a self, armed: &mut Vec<&'a Worker>) -> bool {
        let mut busy = false;
        for place in self.places.values() {
            match if place.worker.is_armed() { Ok(Armed::Yes) } else { place.worker.arm() } {
                Ok(Armed::Yes) => armed.push(&place.worker),
                Ok(Armed::Busy) => busy |= matches!(place.stage, Stage::Free | Stage::Taken(_)),
                Err(status) => tracing::debug!(%status, "arm a berth's worker"),
            }
        }
        busy
    }

    /// What is readable when a peer's process has ended.
    pub(super) fn processes(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.places.values().filter_map(|place| place.process.descriptor())
    }

    fn remove(&mut self, id: BerthId) {
        let Some(place) = self.places.remove(&id) else { return };
        self.workers.borrow_mut().retain(|worker| !Rc::ptr_eq(worker, &place.worker));
        self.shared.counters.berths_closed.add(1);
        place.go();
    }

    fn remove_where(&mut self, over: impl Fn(&Place) -> bool) {
        let over: Vec<_> = self.places.iter().filter(|(_, place)| over(place)).map(|(id, _)| *id).collect();
        for id in over {
            self.remove(id);
        }
    }

    /// The last. Returns whether all could be given back; the others are leaked, with the context.
    pub(super) fn give_back(mut self) -> bool {
        // One that ended a moment ago may not have been seen yet.
        self.look_at_processes();
        self.remove_where(Place::may_go);
        self.workers.borrow_mut().clear();
        let clean = self.places.is_empty();
        std::mem::forget(self.places);
        clean
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_read_as_it_was_written_and_rubbish_is_none() {
        let read = |bytes: &[u8]| Address::read(&Bytes::copy_from_slice(bytes));
        let address = read(&[1, 2, 1, 0, 0, 7, 8]).expect("an address");
        assert_eq!((address.process, &address.worker[..]), (0x102, &[7, 8][..]));
        for rubbish in [&[][..], &[1, 0, 0, 0, 0], &[0; 100], &[2, 2, 1, 0, 0, 7]] {
            assert!(read(rubbish).is_none(), "{rubbish:?}");
        }
    }
}

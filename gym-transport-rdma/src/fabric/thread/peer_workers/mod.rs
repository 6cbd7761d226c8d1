//! Dedicated UCX workers, one for each peer on this host.
//!
//! All peers that write to a worker over shared memory share one queue. A writer reserves a slot, fills it, and then
//! marks it as full. A peer that is killed or stopped between these steps blocks the queue for all others, for as long
//! as the worker exists. Therefore every connection over shared memory has its own worker, which receives its messages
//! and ends with it. The death of a peer then blocks only its own connection.
//!
//! ```text
//!  opened ──▶ free ──▶ taken ──▶ closing ──▶ destroyed
//!               └─────▶ released ─────────────▲
//! ```
//!
//! A destroyed worker responds to no peer. Messages that the peer has announced to it would wait permanently, and the
//! peer may still read messages that were announced to the peer. Therefore a worker whose connection has ended is kept
//! until both ends report that they have no operation in flight ([`MessageKind::Finished`]). The end of the peer's
//! process also suffices. A worker may be destroyed earlier, because its fabric ends or its peer is silent for too
//! long. It reports that ([`MessageKind::WorkerDestroyed`]), and the peer need not keep its own worker.
//!
//! An address refers to the memory of its worker by a descriptor number, which is reused once the worker is destroyed.
//! A peer that then connects to the address maps and writes unrelated memory. Therefore a worker whose address was
//! advertised is kept for as long as the peer may connect, and the peer does not connect later
//! ([`PeerWorker::address`]). Only the end of the fabric does not wait for that.

mod address;
mod process;
pub(crate) mod slot;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use bytes::Bytes;
use gym_core::base::raise_descriptors;
use gym_core::{Code, Error, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::time::Instant;

use crate::fabric::handle::command::FabricShared;
use crate::fabric::handle::peer_worker::{PeerWorker, PeerWorkerId};
use crate::fabric::library::refused;
use crate::fabric::options::FabricOptions;
use crate::fabric::protocol::identity::ConnectionId;
use crate::fabric::protocol::prefix::MESSAGE_ID;
#[cfg(doc)]
use crate::fabric::protocol::prefix::MessageKind;
use crate::fabric::thread::peer_workers::address::Address;
use crate::fabric::thread::peer_workers::process::PeerProcess;
use crate::fabric::thread::peer_workers::slot::{ClosedConnection, ClosingSlot, FinalMessage, Slot, SlotStage};
use crate::sys::Library;
use crate::ucx::{Armed, Context, Receiver, UnhandledIds, Worker};

/// File descriptors per peer worker: UCX's, and that of the peer's process.
const PEER_WORKER_DESCRIPTORS: usize = 7;

/// The UCX workers of all peer workers, which the thread polls without borrowing the state.
pub(crate) type Workers = Rc<RefCell<Vec<Rc<Worker>>>>;

/// Creates the receiver of a peer worker's messages.
pub(crate) type ReceiverOf = Box<dyn Fn(PeerWorkerId) -> Box<dyn Receiver>>;

/// All peer workers of a fabric.
pub(crate) struct PeerWorkers {
    shared: Arc<FabricShared>,
    settings: SharedMemorySettings,
    /// Context with shared memory only, because a worker opens every device of its context. Opened with the first peer
    /// worker.
    context: Option<Rc<Context>>,
    receiver: ReceiverOf,
    slots: HashMap<PeerWorkerId, Slot>,
    workers: Workers,
    next: u64,
}

/// Settings of the context of peer workers.
pub(crate) struct SharedMemorySettings {
    library: &'static Library,
    /// `None`: the fabric's transports have no shared memory.
    settings: Option<Vec<(String, String)>>,
    max: usize,
}

impl SharedMemorySettings {
    pub(crate) fn new(library: &'static Library, options: &FabricOptions) -> Self {
        let settings = options.shared_memory_settings(&library.info().version);
        let descriptors = usize::try_from(raise_descriptors()).unwrap_or(usize::MAX);
        let max = options.shared_memory_peers_max.min(descriptors / 2 / PEER_WORKER_DESCRIPTORS);
        Self { library, settings, max }
    }
}

impl PeerWorkers {
    pub(crate) fn new(shared: Arc<FabricShared>, settings: SharedMemorySettings, receiver: ReceiverOf) -> Self {
        let (slots, workers) = (HashMap::new(), Workers::default());
        Self { shared, settings, context: None, receiver, slots, workers, next: 0 }
    }

    pub(crate) fn workers(&self) -> Workers {
        Rc::clone(&self.workers)
    }

    /// Opens a peer worker, kept for `within` unless a connection takes it.
    ///
    /// # Errors
    /// `ResourceExhausted` if there are too many workers, `Unavailable` if UCX cannot open one. Both `NotStarted`.
    pub(crate) fn open(&mut self, within: Duration) -> Result<PeerWorker> {
        let refused = |code, reason: String| Error::not_started(code, reason);
        if self.slots.len() >= self.settings.max {
            self.shared.counters.peer_workers_refused.add(1);
            let reason = format!(
                "{} connections share memory with this process; raise shared_memory_peers_max or the limit on file descriptors",
                self.slots.len()
            );
            return Err(refused(Code::ResourceExhausted, reason));
        }
        let id = PeerWorkerId(self.next);
        let worker = self.worker(id).map_err(|reason| refused(Code::Unavailable, reason))?;
        self.next += 1;
        let address = Address::ours(&worker);
        self.workers.borrow_mut().push(Rc::clone(&worker));
        let (until, advertised) = (Instant::now() + within, Arc::new(AtomicBool::new(false)));
        let (process, reserved) = (PeerProcess::Unknown, Arc::clone(&advertised));
        self.slots.insert(
            id,
            Slot {
                worker,
                process,
                until,
                advertised,
                peer_finished: false,
                peer_destroyed: false,
                stage: SlotStage::Free,
            },
        );
        self.shared.counters.peer_workers_opened.add(1);
        Ok(PeerWorker::new(id, address, reserved, Arc::clone(&self.shared)))
    }

    fn worker(&mut self, id: PeerWorkerId) -> Result<Rc<Worker>, String> {
        let context = if let Some(context) = &self.context {
            Rc::clone(context)
        } else {
            let none = || "the transports that this process may use have no shared memory".to_owned();
            let settings = self.settings.settings.as_ref().ok_or_else(none)?;
            let opened = Context::open(self.settings.library, settings);
            let context = opened.map_err(|(what, status)| format!("{what}: {status}"))?;
            Rc::clone(self.context.insert(context))
        };
        let worker = Worker::open(&context).map_err(|reason| refused(reason).to_string())?;
        let received = worker.receive(MESSAGE_ID, (self.receiver)(id), UnhandledIds::Lower);
        received.map_err(|status| format!("receive messages: {status}"))?;
        Ok(worker)
    }

    /// Assigns a worker to its connection. Returns the worker and the UCX part of the peer's address.
    ///
    /// # Errors
    /// The reason: the worker's time is over, another connection uses it, or the peer's address is malformed.
    pub(crate) fn take(
        &mut self,
        peer_worker: &PeerWorker,
        connection: ConnectionId,
        peer: &Bytes,
    ) -> Result<(Rc<Worker>, Bytes), &'static str> {
        let slot = self.slots.get_mut(&peer_worker.id()).ok_or("its time is over")?;
        match slot.stage {
            SlotStage::Free if Instant::now() < slot.until => {}
            SlotStage::Free | SlotStage::Released => return Err("its time is over"),
            SlotStage::Taken(_) | SlotStage::Closing(_) => return Err("another connection uses it"),
        }
        let address = Address::read(peer).ok_or("the peer's address is malformed")?;
        slot.process = PeerProcess::watch(address.process);
        slot.stage = SlotStage::Taken(connection);
        Ok((Rc::clone(&slot.worker), address.worker))
    }

    /// Releases a worker, unless a connection has taken it.
    pub(crate) fn release(&mut self, id: PeerWorkerId) {
        let Some(slot) = self.slots.get_mut(&id).filter(|slot| matches!(slot.stage, SlotStage::Free)) else { return };
        slot.stage = SlotStage::Released;
        if slot.is_over(Instant::now()) {
            self.remove(id);
        }
    }

    /// Moves a worker whose connection has ended to the closing stage.
    pub(crate) fn begin_close(&mut self, id: PeerWorkerId, closed: ClosedConnection) {
        let Some(slot) = self.slots.get_mut(&id) else { return };
        let SlotStage::Taken(own) = slot.stage else { return };
        let ClosedConnection { endpoint, peer, operations, was_open } = closed;
        let (since, final_message) = (Instant::now(), Rc::new(Cell::new(FinalMessage::NotSent)));
        slot.stage =
            SlotStage::Closing(ClosingSlot { own, endpoint, peer, operations, was_open, since, final_message });
    }

    /// Records that the peer of this connection has finished. The same message for another connection is ignored.
    pub(crate) fn peer_finished(&mut self, id: PeerWorkerId, connection: ConnectionId, destroyed: bool) {
        let Some(slot) = self.slots.get_mut(&id) else { return };
        let own = match &slot.stage {
            SlotStage::Taken(own) | SlotStage::Closing(ClosingSlot { own, .. }) => *own,
            SlotStage::Free | SlotStage::Released => return,
        };
        if own == connection {
            slot.peer_finished = true;
            slot.peer_destroyed |= destroyed;
        }
    }

    /// Releases all workers that no connection has taken, at once.
    pub(crate) fn release_all(&mut self) {
        self.remove_where(|slot| matches!(slot.stage, SlotStage::Free | SlotStage::Released));
    }

    /// Continues closing, and returns the connections whose peer process has ended. Everything that the peer sent has
    /// arrived by then.
    pub(crate) fn check_timers(&mut self, now: Instant) -> Vec<ConnectionId> {
        let mut lost = Vec::new();
        for slot in self.slots.values() {
            match &slot.stage {
                SlotStage::Taken(connection) if slot.process.has_ended() => lost.push(*connection),
                SlotStage::Closing(closing)
                    if closing.final_message.get() == FinalMessage::NotSent && !closing.has_operations() =>
                {
                    closing.send_final();
                }
                SlotStage::Free | SlotStage::Released | SlotStage::Taken(_) | SlotStage::Closing(_) => {}
            }
        }
        self.remove_where(|slot| slot.is_over(now));
        self.poll_processes();
        lost
    }

    /// Records which peer processes have ended. This takes effect one round later, because the worker's queue still
    /// holds messages that the peer sent before.
    fn poll_processes(&mut self) {
        let watched: Vec<_> =
            self.slots.iter().filter_map(|(id, slot)| Some((*id, slot.process.descriptor()?))).collect();
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
            if let Some(slot) = self.slots.get_mut(&id) {
                slot.process = PeerProcess::Ended;
            }
        }
    }

    /// Whether a timer is pending that no descriptor announces.
    pub(crate) fn is_awaited(&self, now: Instant) -> bool {
        self.slots.values().any(|slot| slot.is_awaited(now))
    }

    /// Arms the workers before a sleep, and adds those that can end it to `armed`.
    ///
    /// Returns whether one of them is busy: it has work, or waits for space in the queue of its peer. A closing worker
    /// does not prevent the sleep; a tick handles it.
    pub(crate) fn arm<'a>(&'a self, armed: &mut Vec<&'a Worker>) -> bool {
        let mut busy = false;
        for slot in self.slots.values() {
            match if slot.worker.is_armed() { Ok(Armed::Yes) } else { slot.worker.arm() } {
                Ok(Armed::Yes) => armed.push(&slot.worker),
                Ok(Armed::Busy) => busy |= matches!(slot.stage, SlotStage::Free | SlotStage::Taken(_)),
                Err(status) => tracing::debug!(%status, "arm a peer worker"),
            }
        }
        busy
    }

    /// Descriptors that become readable when a peer's process ends.
    pub(crate) fn processes(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.slots.values().filter_map(|slot| slot.process.descriptor())
    }

    fn remove(&mut self, id: PeerWorkerId) {
        let Some(slot) = self.slots.remove(&id) else { return };
        self.workers.borrow_mut().retain(|worker| !Rc::ptr_eq(worker, &slot.worker));
        self.shared.counters.peer_workers_closed.add(1);
        slot.destroy();
    }

    fn remove_where(&mut self, over: impl Fn(&Slot) -> bool) {
        let over: Vec<_> = self.slots.iter().filter(|(_, slot)| over(slot)).map(|(id, _)| *id).collect();
        for id in over {
            self.remove(id);
        }
    }

    /// Closes all workers at the end. Returns whether all could be closed; the others are leaked, with the context.
    pub(crate) fn destroy(mut self) -> bool {
        // A process that ended a moment ago may not be recorded yet.
        self.poll_processes();
        self.remove_where(Slot::can_be_destroyed);
        self.workers.borrow_mut().clear();
        let clean = self.slots.is_empty();
        std::mem::forget(self.slots);
        clean
    }
}

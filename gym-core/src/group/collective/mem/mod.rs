//! The backend `mem`: ranks that are tasks or threads of one process.
//!
//! The last rank to call an operation performs it for all: it has every buffer at hand. A large operation is divided among blocking threads
//! instead, a slice each, so that no thread of the runtime is held and all cores add.

mod room;
mod work;

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;

use crate::base::error::{Code, Error, Execution, Result};
use crate::group::collective::buffer::Buffer;
use crate::group::collective::communicator::{Collectives, Communicator};
use crate::group::collective::meeting::{Meeting, identities};
use crate::group::collective::operation::{Collective, has};
use crate::group::collective::report::{CollectiveReport, CollectiveTotals};
use crate::group::collective::transfer::{DevicePath, DevicePathSlot, Transfer};
use crate::group::layout::Rank;
use crate::message::CallContext;
use room::Room;

/// Name and epoch of a meeting.
type Key = (Arc<str>, u64);

/// The backend `mem`. Clones share their meetings, and ranks meet if they join clones of one another.
///
/// A meeting is forgotten when all of its ranks have left it, or when none of them waits for it any more.
#[derive(Clone, Default)]
pub struct InProcessCollectives(Arc<Registry>);

#[derive(Default)]
struct Registry {
    rooms: Mutex<HashMap<Key, Arc<Room>>>,
    totals: Mutex<BTreeMap<Rank, Arc<CollectiveTotals>>>,
}

/// The seat of a rank in a room. Dropping it gives the seat up, also while the rank still waits for others to join.
struct InProcessCommunicator {
    registry: Arc<Registry>,
    room: Arc<Room>,
    meeting: Meeting,
    totals: Arc<CollectiveTotals>,
    facts: Vec<Arc<str>>,
    path: DevicePathSlot,
}

impl InProcessCollectives {
    /// Creates a backend without meetings.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the number of meetings that a rank waits for or takes part in.
    #[must_use]
    pub fn meetings(&self) -> usize {
        self.0.lock().len()
    }

    fn sit_down(&self, meeting: Meeting) -> Result<InProcessCommunicator> {
        let mut rooms = self.0.lock();
        let room = match rooms.entry((Arc::clone(&meeting.name), meeting.epoch)) {
            Entry::Vacant(entry) => Arc::clone(entry.insert(Arc::new(Room::new(&meeting)))),
            Entry::Occupied(entry) => {
                let room = entry.get();
                meeting.check_same_seats(&identities(room.seats()))?;
                Arc::clone(room)
            }
        };
        if !room.sit_down(&meeting) {
            let why = format!("rank {} has joined before; only a newer epoch has another meeting", meeting.rank);
            return Err(Error::not_started(Code::AlreadyExists, why));
        }
        let totals = self.0.totals_of(meeting.rank);
        let (registry, facts, path) = (Arc::clone(&self.0), Vec::new(), DevicePathSlot::default());
        Ok(InProcessCommunicator { registry, room, meeting, totals, facts, path })
    }
}

#[async_trait]
impl Collectives for InProcessCollectives {
    fn name(&self) -> &'static str {
        "mem"
    }

    fn report(&self, rank: Rank) -> CollectiveReport {
        // A room may be dropped here, which takes no lock.
        let rooms: Vec<(Key, Arc<Room>)> =
            self.0.lock().iter().map(|(key, room)| (key.clone(), Arc::clone(room))).collect();
        let mut report = CollectiveReport::default();
        for ((name, epoch), room) in rooms {
            if let Ok(meeting) = Meeting::new(name, epoch, rank, room.seats()) {
                report.waiting.extend(room.waiting(meeting.position()));
            }
        }
        report.waiting.sort_by_key(|waiting| std::cmp::Reverse(waiting.elapsed_ms));
        self.0.totals_of(rank).report(&mut report);
        report
    }

    async fn join(&self, cx: &CallContext, meeting: Meeting) -> Result<Arc<dyn Communicator>> {
        let subject = format!("join {meeting} as rank {}", meeting.rank);
        let joined = async {
            cx.check()?;
            let mut communicator = self.sit_down(meeting)?;
            let formed = cx.bound(Execution::NotStarted, async {
                communicator.room.formed().await;
                Ok(())
            });
            if let Err(late) = formed.await {
                let missing = communicator.ranks_at(communicator.room.not_joined());
                let why = format!("{}; {} not joined", late.message(), has(&missing));
                return Err(Error::not_started(late.code(), why));
            }
            communicator.facts = communicator.room.facts();
            Ok(communicator)
        };
        match joined.await {
            Ok(communicator) => Ok(Arc::new(communicator)),
            Err(error) => Err(error.about(subject)),
        }
    }
}

#[async_trait]
impl Communicator for InProcessCommunicator {
    fn meeting(&self) -> &Meeting {
        &self.meeting
    }

    fn start(&self, cx: &CallContext, operation: Collective, buffer: Buffer) -> Transfer {
        self.room.start((&self.meeting, &self.totals), cx, operation, (buffer, &self.path))
    }

    fn facts(&self) -> &[Arc<str>] {
        &self.facts
    }

    fn set_device_path(&self, path: Arc<dyn DevicePath>) -> Result<()> {
        self.path.set(path)
    }

    fn abort(&self, why: Error) {
        self.room.abort(why);
    }

    async fn closed(&self) -> Error {
        self.room.closed().await
    }
}

impl InProcessCommunicator {
    fn ranks_at(&self, positions: Vec<usize>) -> Vec<Rank> {
        positions.into_iter().map(|position| self.meeting.seats[position].rank).collect()
    }
}

impl Drop for InProcessCommunicator {
    fn drop(&mut self) {
        if self.room.has_failed() {
            self.totals.count_abort();
        }
        // The registry is locked first, so that no rank sits down in a room that is about to be forgotten.
        let mut rooms = self.registry.lock();
        if self.room.leave(self.meeting.position()) {
            rooms.remove(&(Arc::clone(&self.meeting.name), self.meeting.epoch));
        }
    }
}

impl Registry {
    fn lock(&self) -> MutexGuard<'_, HashMap<Key, Arc<Room>>> {
        self.rooms.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn totals_of(&self, rank: Rank) -> Arc<CollectiveTotals> {
        let mut totals = self.totals.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(totals.entry(rank).or_default())
    }
}

impl fmt::Debug for InProcessCollectives {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "InProcessCollectives({} meetings)", self.meetings())
    }
}

impl fmt::Debug for InProcessCommunicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "InProcessCommunicator(rank {} of {})", self.meeting.rank, self.meeting)
    }
}

//! The backend `mem`: ranks that are tasks or threads of one process.
//!
//! The last rank to call an operation performs it for all: it has every buffer at hand. A large operation is divided among blocking threads
//! instead, a slice each, so that no thread of the runtime is held and all cores add.

mod participants;
mod work;

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use parking_lot::Mutex;

use crate::base::error::{Code, Error, Execution, Result};
use crate::group::collective::buffer::Buffer;
use crate::group::collective::communicator::{Collectives, Communicator};
use crate::group::collective::meeting::{Meeting, identities};
use crate::group::collective::operation::{Collective, has};
use crate::group::collective::report::{CollectiveReport, CollectiveTotals};
use crate::group::collective::transfer::{DevicePath, DevicePathSlot, Transfer};
use crate::group::layout::Rank;
use crate::message::CallContext;
use participants::Participants;

/// Name and epoch of a meeting.
type Key = (Arc<str>, u64);

/// The backend `mem`. Clones share their meetings, and ranks meet if they join clones of one another.
///
/// A meeting is forgotten when all of its ranks have left it, or when none of them waits for it any more.
#[derive(Clone, Default)]
pub struct InProcessCollectives(Arc<Registry>);

#[derive(Default)]
struct Registry {
    meetings: Mutex<HashMap<Key, Arc<Participants>>>,
    totals: Mutex<BTreeMap<Rank, Arc<CollectiveTotals>>>,
}

/// The seat of a rank in a meeting. Dropping it gives the seat up, also while the rank still waits for others to join.
struct InProcessCommunicator {
    registry: Arc<Registry>,
    participants: Arc<Participants>,
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
        self.0.meetings.lock().len()
    }

    fn sit_down(&self, meeting: Meeting) -> Result<InProcessCommunicator> {
        let mut meetings = self.0.meetings.lock();
        let participants = match meetings.entry((Arc::clone(&meeting.name), meeting.epoch)) {
            Entry::Vacant(entry) => Arc::clone(entry.insert(Arc::new(Participants::new(&meeting)))),
            Entry::Occupied(entry) => {
                let participants = entry.get();
                meeting.check_same_seats(&identities(participants.seats()))?;
                Arc::clone(participants)
            }
        };
        if !participants.sit_down(&meeting) {
            let why = format!("rank {} has joined before; only a newer epoch has another meeting", meeting.rank);
            return Err(Error::not_started(Code::AlreadyExists, why));
        }
        let totals = self.0.totals_of(meeting.rank);
        let (registry, facts, path) = (Arc::clone(&self.0), Vec::new(), DevicePathSlot::default());
        Ok(InProcessCommunicator { registry, participants, meeting, totals, facts, path })
    }
}

#[async_trait]
impl Collectives for InProcessCollectives {
    fn name(&self) -> &'static str {
        "mem"
    }

    fn report(&self, rank: Rank) -> CollectiveReport {
        // A meeting may be dropped here, which takes no lock.
        let meetings: Vec<(Key, Arc<Participants>)> =
            self.0.meetings.lock().iter().map(|(key, participants)| (key.clone(), Arc::clone(participants))).collect();
        let mut report = CollectiveReport::default();
        for ((name, epoch), participants) in meetings {
            if let Ok(meeting) = Meeting::new(name, epoch, rank, participants.seats()) {
                report.waiting.extend(participants.waiting(meeting.position()));
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
                communicator.participants.formed().await;
                Ok(())
            });
            if let Err(late) = formed.await {
                let missing = communicator.ranks_at(communicator.participants.not_joined());
                let why = format!("{}; {} not joined", late.message(), has(&missing));
                return Err(Error::not_started(late.code(), why));
            }
            communicator.facts = communicator.participants.facts();
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
        self.participants.start((&self.meeting, &self.totals), cx, operation, (buffer, &self.path))
    }

    fn facts(&self) -> &[Arc<str>] {
        &self.facts
    }

    fn set_device_path(&self, path: Arc<dyn DevicePath>) -> Result<()> {
        self.path.set(path)
    }

    fn abort(&self, why: Error) {
        self.participants.abort(why);
    }

    async fn closed(&self) -> Error {
        self.participants.closed().await
    }
}

impl InProcessCommunicator {
    fn ranks_at(&self, positions: Vec<usize>) -> Vec<Rank> {
        positions.into_iter().map(|position| self.meeting.seats[position].rank).collect()
    }
}

impl Drop for InProcessCommunicator {
    fn drop(&mut self) {
        if self.participants.has_failed() {
            self.totals.count_abort();
        }
        // The registry is locked first, so that no rank joins a meeting that is about to be forgotten.
        let mut meetings = self.registry.meetings.lock();
        if self.participants.leave(self.meeting.position()) {
            meetings.remove(&(Arc::clone(&self.meeting.name), self.meeting.epoch));
        }
    }
}

impl Registry {
    fn totals_of(&self, rank: Rank) -> Arc<CollectiveTotals> {
        let mut totals = self.totals.lock();
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

//! The state of a pool: its queue, who waits, and which workers take work, are suspect, or are lost.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use gym_core::registry::MISSED_MAX;
use gym_core::rollout::FailureClass;
use gym_core::rollout::work::{LostWork, WorkId, WorkQueue, WorkQueueOptions, WorkerId};
use gym_core::{Code, Error, Incarnation, Request, Response, Result};
use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;

use crate::work::members::ListedMembers;
use crate::work::pool::WorkKind;

#[derive(Debug)]
pub(super) struct PoolState {
    pub(super) queue: WorkQueue,
    /// In order, so that a closed pool wakes its callers in order.
    pub(super) calls: BTreeMap<WorkId, PendingCall>,
    /// The waiting poll of each worker.
    pub(super) polls: BTreeMap<Arc<str>, WaitingPoll>,
    /// The member that each worker is, if it is one.
    pub(super) memberships: BTreeMap<Arc<str>, WorkingMember>,
    /// Suspect workers that a warning has named.
    pub(super) suspects: BTreeSet<Arc<str>>,
    /// The head server's list; `None` if the pool follows none, or has heard nothing yet.
    pub(super) members: Option<ListedMembers>,
    /// The workers that take work without being members; `None` if any may.
    pub(super) admitted: Option<BTreeSet<String>>,
    /// The time at which the sweeper wakes next.
    pub(super) armed: Option<Instant>,
    pub(super) workers_lost: u64,
    pub(super) late: u64,
    /// Items that each worker has finished.
    pub(super) finished: BTreeMap<Arc<str>, u64>,
    /// A warning has said that no worker takes work.
    pub(super) told_of_no_worker: bool,
    /// The pool takes no more calls, and its workers stop.
    pub(super) closed: bool,
}

/// A call whose caller waits.
#[derive(Debug)]
pub(super) struct PendingCall {
    pub(super) server: Box<str>,
    pub(super) request: Request,
    pub(super) kind: WorkKind,
    pub(super) done: oneshot::Sender<Result<Response>>,
}

/// The member of a cluster that a worker is.
#[derive(Clone, Copy, Debug)]
pub(super) struct WorkingMember {
    pub(super) incarnation: Incarnation,
    /// Time between two heartbeats; zero if the worker is of a version that does not tell it.
    pub(super) heartbeat: Duration,
}

#[derive(Debug)]
pub(super) struct WaitingPoll {
    pub(super) who: WorkerId,
    pub(super) number: u64,
    pub(super) wake: Arc<Notify>,
}

impl PoolState {
    pub(super) fn new(options: WorkQueueOptions) -> Self {
        Self {
            queue: WorkQueue::new(options),
            calls: BTreeMap::new(),
            polls: BTreeMap::new(),
            memberships: BTreeMap::new(),
            suspects: BTreeSet::new(),
            members: None,
            admitted: None,
            armed: None,
            finished: BTreeMap::new(),
            workers_lost: 0,
            late: 0,
            told_of_no_worker: false,
            closed: false,
        }
    }

    /// Wakes the waiting polls that can be answered.
    pub(super) fn wake_workers(&mut self) {
        while let Some((who, number)) = self.queue.call() {
            if let Some(poll) = self.polls.get(&who.name)
                && poll.number == number
            {
                poll.wake.notify_one();
            }
        }
    }

    /// Returns `true` if the worker of this name gets no new work.
    pub(super) fn pauses(&self, name: &str) -> bool {
        self.pauses_member(name, self.memberships.get(name).copied())
    }

    /// Checks that a worker may take work.
    pub(super) fn admits(&self, name: &str, member: Option<WorkingMember>) -> Result<()> {
        if self.admitted.as_ref().is_none_or(|admitted| admitted.contains(name)) {
            return Ok(());
        }
        match member {
            None => Err(Error::not_started(
                Code::FailedPrecondition,
                "this pool can be reached from other machines, and gives work only to members of its cluster\n  fix: start the process with \
                 --worker --head-url URL instead of --pull-from, or let the collector listen at --dispatch-host 127.0.0.1",
            )),
            // It takes work already; its head server may have been restarted.
            Some(member) if self.memberships.get(name).is_some_and(|known| known.incarnation == member.incarnation) => {
                Ok(())
            }
            Some(member) if !self.members.as_ref().is_some_and(|listed| listed.lists(name, member.incarnation)) => {
                let text = format!("the head server has not told this pool of the member {name} yet");
                Err(Error::not_started(Code::Unavailable, text))
            }
            Some(_) => Ok(()),
        }
    }

    pub(super) fn pauses_member(&self, name: &str, member: Option<WorkingMember>) -> bool {
        let (Some(listed), Some(member)) = (&self.members, member) else { return false };
        !listed.serves(name, member.incarnation)
    }

    /// Returns the time at which a worker is suspect here, because it has missed polls for longer than two heartbeats. `None` if it is no member:
    /// it is lost before.
    fn silent_at(&self, name: &str) -> Option<Instant> {
        let heartbeat = self.memberships.get(name)?.heartbeat;
        let options = self.queue.options();
        Some(self.queue.heard(name)? + (heartbeat * MISSED_MAX).max(options.wait_max + options.silence_max))
    }

    /// Returns the time at which the sweeper has something to do for this worker.
    pub(super) fn due(&self, name: &str) -> Option<Instant> {
        let silent = self.silent_at(name).filter(|_| !self.suspects.contains(name));
        [self.queue.due(name), silent].into_iter().flatten().min()
    }

    /// Returns why a worker is suspect, and when its work moves. What the head server says counts first: `rgym workers` shows the same.
    pub(super) fn suspect(&self, now: Instant, name: &str) -> Option<String> {
        let member = self.memberships.get(name)?;
        let listed = self.members.as_ref();
        if let Some(why) = listed.and_then(|listed| listed.suspect(now, name, member.incarnation)) {
            return Some(why);
        }
        self.silent_at(name).filter(|at| *at <= now)?;
        let (silent, left) = (now - self.queue.heard(name)?, self.queue.due(name)?.saturating_duration_since(now));
        let heard = listed.is_some_and(|listed| listed.serves(name, member.incarnation));
        let link = if heard { ", and the head server hears it: its way to this process is cut" } else { "" };
        Some(format!(
            "it has not asked for work for {:.1} s{link}; gone in {:.0} s unless it returns",
            silent.as_secs_f64(),
            left.as_secs_f64()
        ))
    }

    /// Names the workers that have become suspect, and those that are back.
    pub(super) fn name_suspects(&mut self, now: Instant) {
        for name in self.memberships.keys().cloned().collect::<Vec<_>>() {
            self.name_suspect(now, &name);
        }
    }

    pub(super) fn name_suspect(&mut self, now: Instant, name: &Arc<str>) {
        match self.suspect(now, name) {
            Some(why) if self.suspects.insert(Arc::clone(name)) => {
                tracing::warn!(worker = %name, why, "a worker is suspect and gets no new work");
            }
            None if self.suspects.remove(name) => tracing::info!(worker = %name, "a suspect worker is back"),
            _ => {}
        }
    }

    pub(super) fn pause_workers(&mut self) {
        let all = self.memberships.keys().filter_map(|name| self.queue.worker(name).cloned());
        for who in all.collect::<Vec<_>>() {
            let paused = self.pauses(&who.name);
            self.queue.pause(&who, paused);
        }
    }

    /// Ends the work of a member that is gone.
    pub(super) fn member_lost(&mut self, name: &str, member: Incarnation, why: &str) {
        if self.memberships.get(name).is_some_and(|known| known.incarnation == member)
            && let Some(who) = self.queue.worker(name).cloned()
        {
            let lost = self.queue.lost(&who);
            self.end_lost(&who, lost, why);
        }
    }

    pub(super) fn answer(&mut self, id: WorkId, result: Result<Response>) {
        if let Some(call) = self.calls.remove(&id) {
            // The caller may have left.
            drop(call.done.send(result));
        }
    }

    pub(super) fn end_lost(&mut self, who: &WorkerId, lost: LostWork, why: &str) {
        if let Some(poll) = self.polls.remove(&who.name) {
            poll.wake.notify_one();
        }
        self.memberships.remove(&who.name);
        self.suspects.remove(&who.name);
        self.finished.remove(&who.name);
        if lost == LostWork::default() {
            return;
        }
        tracing::warn!(worker = %who.name, ended = lost.ended.len(), again = lost.again.len(), why, "a worker was lost");
        self.workers_lost += 1;
        for id in lost.ended {
            let error = Error::unknown(Code::Unavailable, format!("worker {} was lost: {why}", who.name));
            self.answer(id, Err(error.with_class(FailureClass::WorkerLost)));
        }
    }
}

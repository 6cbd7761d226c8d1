//! Records the ground truth of a group: the ranks that live, what they ran, and what the controller was told. Any disagreement is a violation.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use gym_core::testing::SimNet;
use gym_core::{Code, Execution};
use gym_group::RankEvent;
use gym_group::{ExitCause, GroupError, Rank, WorkerEnv};
use parking_lot::Mutex;
use tokio::time::Instant;

/// The time within which a lease that has ended, or a kill, ends a rank.
pub(super) const MARGIN_TIMEOUT: Duration = Duration::from_millis(50);

/// A rank of a group.
type RankId = (String, Rank);

/// The audit of a run. Cheap to clone; clones share the records.
#[derive(Clone, Debug)]
pub(crate) struct GroupAudit {
    net: SimNet,
    lease: Duration,
    truth: Arc<Mutex<Truth>>,
}

#[derive(Debug, Default)]
struct Truth {
    /// The living incarnation of each rank, with the life of its controller, and its host.
    living: BTreeMap<RankId, BTreeMap<u64, (u64, String)>>,
    /// The life of the current controller, and the ends of the earlier ones.
    controller: u64,
    controllers_ended: BTreeMap<u64, Instant>,
    /// How often each call began and ended at each rank.
    runs: BTreeMap<(u64, Rank), (u32, u32)>,
    /// Ranks at which a call is over and certainly did not start.
    not_started: BTreeSet<(u64, Rank)>,
    next_call: u64,
    calls: Calls,
    /// What the events of each rank have said.
    events: BTreeMap<RankId, Told>,
    groups_ended: BTreeMap<String, Instant>,
    violations: BTreeSet<String>,
    counts: BTreeMap<&'static str, u64>,
}

/// The counts of calls.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Calls {
    pub(crate) begun: u64,
    pub(crate) succeeded: u64,
    pub(crate) failed: u64,
}

/// The last event of a rank.
#[derive(Debug, Default)]
struct Told {
    incarnation: u64,
    stage: Stage,
    host: String,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    #[default]
    Unknown,
    Placed,
    Started,
    Ready,
    Exited,
}

thread_local! {
    /// Workers are created from their environment alone.
    static ENTERED: RefCell<Option<GroupAudit>> = const { RefCell::new(None) };
}

impl GroupAudit {
    pub(super) fn new(net: &SimNet, lease: Duration) -> Self {
        Self { net: net.clone(), lease, truth: Arc::default() }
    }

    /// Makes this the audit of the workers on this thread.
    pub(super) fn enter(&self) {
        ENTERED.set(Some(self.clone()));
    }

    pub(super) fn entered() -> Self {
        ENTERED.with_borrow(Clone::clone).expect("a run has entered its audit")
    }

    pub(super) fn note(&self, actor: &str, event: fmt::Arguments<'_>) {
        self.net.note(actor, event);
    }

    pub(super) fn violation(&self, what: impl fmt::Display) {
        self.net.note("audit", format_args!("VIOLATION {what}"));
        self.truth.lock().violations.insert(what.to_string());
    }

    pub(super) fn violations(&self) -> Vec<String> {
        self.truth.lock().violations.iter().cloned().collect()
    }

    pub(crate) fn count(&self, what: &'static str) {
        *self.truth.lock().counts.entry(what).or_default() += 1;
    }

    pub(super) fn counts(&self) -> BTreeMap<&'static str, u64> {
        self.truth.lock().counts.clone()
    }

    pub(super) fn calls(&self) -> Calls {
        self.truth.lock().calls
    }

    pub(super) fn note_recovery(&self, after: Duration) {
        self.net.note("audit", format_args!("done {after:?} after the faults"));
    }

    pub(super) fn controller_started(&self, life: u64) {
        self.truth.lock().controller = life;
    }

    /// The controller has died: its ranks end with their lease.
    pub(super) fn controller_died(&self) {
        let life = {
            let truth = &mut *self.truth.lock();
            truth.controllers_ended.insert(truth.controller, Instant::now());
            truth.controller
        };
        let this = self.clone();
        tokio::spawn(async move {
            let had = this.ranks_of(life);
            tokio::time::sleep(this.lease + MARGIN_TIMEOUT).await;
            for (group, rank, host) in this.ranks_of(life) {
                this.violation(format_args!(
                    "rank {rank} of {group} on {host} outlives its dead controller by {:?}",
                    this.lease
                ));
            }
            if !had.is_empty() {
                this.count("ranks of a dead controller ended");
            }
        });
    }

    fn ranks_of(&self, life: u64) -> Vec<(String, Rank, String)> {
        let truth = self.truth.lock();
        let all = truth.living.iter().flat_map(|(id, lives)| lives.values().map(move |of| (id, of)));
        all.filter(|(_, (controller, _))| *controller == life)
            .map(|((group, rank), (_, host))| (group.clone(), *rank, host.clone()))
            .collect()
    }

    /// A group was shut down: its ranks have ended, or end with the lease of a lost node.
    pub(super) fn group_ended(&self, group: &str) {
        self.truth.lock().groups_ended.insert(group.to_owned(), Instant::now());
        let (this, group) = (self.clone(), group.to_owned());
        tokio::spawn(async move {
            tokio::time::sleep(this.lease + MARGIN_TIMEOUT).await;
            let living: Vec<RankId> = {
                let truth = this.truth.lock();
                truth
                    .living
                    .iter()
                    .filter(|((of, _), lives)| *of == group && !lives.is_empty())
                    .map(|(id, _)| id.clone())
                    .collect()
            };
            for (group, rank) in living {
                this.violation(format_args!("rank {rank} outlives {group}, which was shut down, by {:?}", this.lease));
            }
        });
    }

    /// A rank is created.
    pub(super) fn born(&self, env: &WorkerEnv, controller: u64, host: String) -> LiveRank {
        let (group, rank, incarnation) = (env.group.to_string(), env.rank, env.incarnation.0);
        self.net.note(&host, format_args!("{group} rank {rank} incarnation {incarnation} lives"));
        let (others, dead) = {
            let truth = &mut *self.truth.lock();
            let lives = truth.living.entry((group.clone(), rank)).or_default();
            let others = lives.clone();
            lives.insert(incarnation, (controller, host.clone()));
            let dead = truth.controllers_ended.get(&controller).map(Instant::elapsed);
            (others, dead)
        };
        if !others.is_empty() {
            self.violation(format_args!(
                "two incarnations of rank {rank} of {group} live: {incarnation} on {host}, and {others:?}"
            ));
        }
        if dead.is_some_and(|dead| dead > self.lease + MARGIN_TIMEOUT) {
            self.violation(format_args!("rank {rank} of {group} starts {dead:?} after the death of its controller"));
        }
        LiveRank { audit: self.clone(), group, rank, incarnation, host }
    }

    fn died(&self, group: &str, rank: Rank, incarnation: u64, host: &str) {
        self.net.note(host, format_args!("{group} rank {rank} incarnation {incarnation} ends"));
        if let Some(lives) = self.truth.lock().living.get_mut(&(group.to_owned(), rank)) {
            lives.remove(&incarnation);
        }
    }

    fn lives(&self, group: &str, rank: Rank, incarnation: u64) -> bool {
        let truth = self.truth.lock();
        truth.living.get(&(group.to_owned(), rank)).is_some_and(|lives| lives.contains_key(&incarnation))
    }

    /// Checks an event that the controller receives.
    pub(super) fn event(&self, group: &str, event: &RankEvent) {
        let (rank, incarnation, stage, host) = match event {
            RankEvent::Placed { rank, incarnation, node, .. } => (*rank, incarnation.0, Stage::Placed, Some(node)),
            RankEvent::Started { rank, incarnation, .. } => (*rank, incarnation.0, Stage::Started, None),
            RankEvent::Ready { rank, incarnation, .. } => (*rank, incarnation.0, Stage::Ready, None),
            RankEvent::Exited { rank, exit } => (*rank, exit.incarnation, Stage::Exited, None),
            _ => return,
        };
        self.net.note("controller", format_args!("{group} is told: rank {rank} incarnation {incarnation} {stage:?}"));
        let mut disorder = None;
        let moved = {
            let truth = &mut *self.truth.lock();
            let told = truth.events.entry((group.to_owned(), rank)).or_default();
            let before = (told.incarnation, told.stage);
            let right = if incarnation == told.incarnation {
                stage > told.stage
            } else {
                // The exit of the old incarnation comes before anything of the next one.
                incarnation > told.incarnation
                    && stage == Stage::Placed
                    && matches!(told.stage, Stage::Exited | Stage::Unknown)
            };
            if !right {
                disorder = Some(format!("{stage:?} of incarnation {incarnation} after {before:?}"));
            }
            (told.incarnation, told.stage) = (incarnation, stage);
            let from = std::mem::take(&mut told.host);
            told.host = host.unwrap_or(&from).clone();
            (stage == Stage::Placed && before.0 > 0).then(|| from != told.host)
        };
        if let Some(disorder) = disorder {
            self.violation(format_args!("the events of rank {rank} of {group} are not in order: {disorder}"));
        }
        if let Some(moved) = moved {
            self.count(if moved { "rank restarted elsewhere" } else { "rank restarted in place" });
        }
        if let RankEvent::Exited { exit, .. } = event {
            match exit.cause {
                ExitCause::NodeLost => {
                    self.count("rank ended with its node");
                    if self.lives(group, rank, incarnation) {
                        // Checked when the next one is born.
                        self.count("rank ended by its lease");
                    }
                }
                _ if self.lives(group, rank, incarnation) => {
                    self.violation(format_args!("rank {rank} of {group} has exited as {exit}, and lives"));
                }
                _ => {}
            }
        }
    }

    /// Begins a call.
    pub(crate) fn call(&self) -> u64 {
        let truth = &mut *self.truth.lock();
        truth.calls.begun += 1;
        truth.next_call += 1;
        truth.next_call
    }

    /// Checks the reply to a call: it ran once at each of these ranks.
    pub(super) fn succeeded(&self, call: u64, ranks: impl Iterator<Item = Rank>) {
        self.truth.lock().calls.succeeded += 1;
        for rank in ranks {
            self.check_finished(call, rank);
        }
    }

    fn check_finished(&self, call: u64, rank: Rank) {
        let runs = self.truth.lock().runs.get(&(call, rank)).copied().unwrap_or_default();
        if runs != (1, 1) {
            self.violation(format_args!(
                "call {call} is reported as done at rank {rank}, and {runs:?} began and ended"
            ));
        }
    }

    /// Checks the error of a call against what ran.
    pub(super) fn failed(&self, call: u64, error: &GroupError, took: Duration, deadline: Duration) {
        self.truth.lock().calls.failed += 1;
        self.note("controller", format_args!("call {call} ends after {took:?}: {:?}", error.cause().code()));
        if took > deadline {
            self.violation(format_args!("call {call} ended after {took:?}, and its deadline was {deadline:?}"));
        }
        if matches!(error.cause().code(), Code::Internal) {
            self.violation(format_args!("call {call} has no typed error: {error}"));
        }
        match error.execution() {
            Execution::NotStarted => self.count("call that did not start"),
            Execution::Unknown => self.count("call whose execution is unknown"),
            Execution::Finished => {}
        }
        for outcome in error.outcomes() {
            let rank = outcome.rank;
            match outcome.execution() {
                Execution::Finished => self.check_finished(call, rank),
                Execution::NotStarted => {
                    let ran = {
                        let truth = &mut *self.truth.lock();
                        truth.not_started.insert((call, rank));
                        truth.runs.contains_key(&(call, rank))
                    };
                    if ran {
                        self.violation(format_args!(
                            "call {call} did not start at rank {rank}, and it ran: {outcome:?}"
                        ));
                    }
                }
                Execution::Unknown => {}
            }
            if outcome.exit.is_some() && took < deadline {
                self.count("call that ended early because its rank ended");
            }
        }
    }

    /// Checks that nothing is left.
    pub(super) fn check_end(&self) {
        let living: Vec<String> = {
            let truth = self.truth.lock();
            let living = truth.living.iter().filter(|(_, lives)| !lives.is_empty());
            living.map(|((group, rank), lives)| format!("rank {rank} of {group}: {lives:?}")).collect()
        };
        for rank in living {
            self.violation(format_args!("a rank lives at the end: {rank}"));
        }
    }
}

/// A rank that lives until this is dropped.
pub(crate) struct LiveRank {
    audit: GroupAudit,
    group: String,
    rank: Rank,
    incarnation: u64,
    host: String,
}

impl LiveRank {
    /// A call begins.
    pub(super) fn runs(&self, call: u64) {
        let Self { audit, rank, host, .. } = self;
        audit.net.note(host, format_args!("rank {rank} runs call {call}"));
        let (begun, refused) = {
            let truth = &mut *audit.truth.lock();
            let runs = truth.runs.entry((call, *rank)).or_default();
            runs.0 += 1;
            (runs.0, truth.not_started.contains(&(call, *rank)))
        };
        if begun > 1 {
            audit.violation(format_args!("call {call} runs {begun} times at rank {rank}"));
        }
        if refused {
            audit.violation(format_args!("call {call} runs at rank {rank} after its error said that it did not start"));
        }
    }

    /// A call ends.
    pub(super) fn ran(&self, call: u64, count: u64) {
        self.audit.net.note(&self.host, format_args!("rank {} has run call {call}, its {count}.", self.rank));
        self.audit.truth.lock().runs.entry((call, self.rank)).or_default().1 += 1;
    }
}

impl Drop for LiveRank {
    fn drop(&mut self) {
        self.audit.died(&self.group, self.rank, self.incarnation, &self.host);
    }
}

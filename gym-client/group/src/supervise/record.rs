//! The supervisor's record of one rank over all its incarnations, and of the ranks that are tied to it. Uses no tasks or processes.

use std::sync::Arc;
use std::time::Duration;

use gym_core::group::{ExitCause, Rank, RankExit, RankState, RankView, WorkerStatus};
use gym_core::{Channel, Endpoint, Incarnation};
use tokio::time::Instant;

use crate::health::{HealthEvent, RankHealth};
use crate::provision::RankPlace;
use crate::supervise::options::GroupOptions;
use crate::supervise::reports::RankReports;

/// The record of one rank.
#[derive(Debug)]
pub(crate) struct RankRecord {
    pub(crate) place: RankPlace,
    /// The name of the node, if its provisioner names it.
    pub(crate) node_name: Option<Arc<str>>,
    pub(crate) incarnation: Incarnation,
    health: RankHealth,
    pub(crate) pid: Option<u32>,
    /// The channel for calls.
    pub(crate) channel: Option<Channel>,
    /// Where the rank serves calls; empty while it is not connected.
    pub(crate) endpoints: Vec<Endpoint>,
    /// The channel for heartbeats, which must not wait behind large messages.
    pub(crate) control: Option<Channel>,
    /// The exit of the last incarnation that ended.
    pub(crate) exit: Option<Arc<RankExit>>,
    pub(crate) last_error: Option<String>,
    /// The reason why the supervisor is killing the current incarnation.
    pub(crate) kill_reason: Option<String>,
    preparation: RestartPreparation,
    /// Consecutive exits, without an incarnation between them that served for longer than `backoff_max`.
    streak: u32,
    healthy_since: Option<Instant>,
    /// The time of the last loss of a node that used a restart.
    node_loss: Option<Instant>,
    /// Shared with the errors of calls, which read them without the record.
    reports: Arc<RankReports>,
    /// `true` if the log says that the rank is stuck.
    pub(crate) stuck: bool,
    pub(crate) probing: bool,
    pub(crate) memory_high: bool,
    /// `true` once the node of this incarnation is about to be taken away.
    pub(crate) draining: bool,
}

/// The state of the preparation (`on_restart`) that a restarted rank needs before it serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RestartPreparation {
    Pending,
    Done,
    Failed,
}

/// The supervisor's next step after an exit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AfterExit {
    /// Restarts the rank after a pause.
    Restart(Duration),
    /// Waits until a restart is requested.
    Rest,
}

impl RankRecord {
    pub(crate) fn new(place: RankPlace) -> Self {
        Self {
            place,
            node_name: None,
            incarnation: Incarnation(1),
            health: RankHealth::starting(),
            pid: None,
            channel: None,
            endpoints: Vec::new(),
            control: None,
            exit: None,
            last_error: None,
            kill_reason: None,
            preparation: RestartPreparation::Pending,
            streak: 0,
            healthy_since: None,
            node_loss: None,
            reports: Arc::default(),
            stuck: false,
            probing: false,
            memory_high: false,
            draining: false,
        }
    }

    pub(crate) fn state(&self) -> RankState {
        self.health.state()
    }

    pub(crate) fn restarts_used(&self) -> u32 {
        self.health.restarts()
    }

    pub(crate) fn note(&mut self, event: HealthEvent, options: &GroupOptions) {
        self.health.note(event, &options.health_policy());
    }

    /// Records that the current incarnation has ended.
    pub(crate) fn ended(&mut self, exit: RankExit, now: Instant, options: &GroupOptions) -> AfterExit {
        let with_node = exit.cause == ExitCause::NodeLost;
        self.ended_with(exit, with_node, now, options)
    }

    /// Records that the current incarnation has ended, `with_node` if its own node or that of a tied rank is lost.
    fn ended_with(&mut self, mut exit: RankExit, with_node: bool, now: Instant, options: &GroupOptions) -> AfterExit {
        let stopped = exit.cause == ExitCause::Stopped;
        // A process that exited by itself was not killed by the supervisor.
        if let Some(why) = self.kill_reason.take().filter(|_| exit.cause == ExitCause::Died && exit.code.is_none()) {
            (exit.cause, exit.detail) = (ExitCause::StartFailed, why);
        }
        self.last_error = (!stopped).then(|| format!("incarnation {} {exit}", exit.incarnation));
        self.exit = Some(Arc::new(exit));
        self.reset();
        self.note(if stopped { HealthEvent::Stopped } else { HealthEvent::Ended }, options);
        if self.state() == RankState::Stopped {
            return AfterExit::Rest;
        }
        let served = self.healthy_since.take().map(|since| now.duration_since(since));
        if served.is_some_and(|served| served > options.backoff_max) {
            self.streak = 0;
        }
        if with_node {
            // When a rack fails, its nodes are noticed one after another. Bounded in time, because a rank may also take down each node on which it starts.
            let shortly = |first: Instant| now.duration_since(first) <= options.backoff_max;
            if served.is_none() && self.node_loss.is_some_and(shortly) {
                self.note(HealthEvent::RestartInterrupted, options);
            } else {
                self.node_loss = Some(now);
            }
        }
        if !options.restart_on_failure || !self.use_restart(options) {
            return AfterExit::Rest;
        }
        let pause = match self.streak {
            // It has served, so it is likely to serve again.
            0 if served.is_some() => Duration::ZERO,
            streak => options.backoff_min.saturating_mul(1_u32.checked_shl(streak).unwrap_or(u32::MAX)),
        };
        self.streak = self.streak.saturating_add(1);
        AfterExit::Restart(pause.min(options.backoff_max))
    }

    /// Takes one restart from the budget. If none is left, retires the rank and returns `false`.
    pub(crate) fn use_restart(&mut self, options: &GroupOptions) -> bool {
        self.note(HealthEvent::RestartGranted, options);
        self.health.restart_granted()
    }

    /// Records that the next incarnation starts, and returns it.
    pub(crate) fn restarting(&mut self, options: &GroupOptions) -> Incarnation {
        self.reset();
        self.incarnation = Incarnation(self.incarnation.0 + 1);
        self.note(HealthEvent::RestartBegun, options);
        self.incarnation
    }

    /// Records that the rank is connected.
    pub(crate) fn reached(&mut self, channel: Channel, endpoints: Vec<Endpoint>, control: Channel, now: Instant) {
        self.channel = Some(channel);
        self.endpoints = endpoints;
        self.control = Some(control);
        self.reports.heard(self.incarnation, now, None);
    }

    /// Takes a rank that serves out of service until it is prepared again.
    fn outdated(&mut self, options: &GroupOptions) {
        self.note(HealthEvent::Outdated, options);
        self.preparation = RestartPreparation::Pending;
    }

    /// Records the result of `on_restart`.
    pub(crate) fn prepared(&mut self, prepared: Result<(), String>) {
        match prepared {
            // The rank has ended in the meantime; its exit is the better error.
            _ if self.state() != RankState::Stale => {}
            Ok(()) => self.preparation = RestartPreparation::Done,
            Err(error) => (self.preparation, self.last_error) = (RestartPreparation::Failed, Some(error)),
        }
    }

    /// Returns `true` if `on_restart` failed in this incarnation.
    pub(crate) fn preparation_failed(&self) -> bool {
        self.preparation == RestartPreparation::Failed
    }

    /// Marks the rank as ready for calls.
    pub(crate) fn serve(&mut self, now: Instant, options: &GroupOptions) {
        self.note(HealthEvent::Ready, options);
        self.healthy_since = Some(now);
    }

    /// Records the result of a probe. Returns `true` if the state changed.
    pub(crate) fn probed(&mut self, answer: Option<WorkerStatus>, now: Instant, options: &GroupOptions) -> bool {
        self.probing = false;
        let before = self.state();
        if let Some(report) = answer {
            self.reports.heard(self.incarnation, now, Some(report));
            self.note(HealthEvent::Probed { ok: true }, options);
        } else if self.silence(now) > options.silence_max {
            self.note(HealthEvent::Probed { ok: false }, options);
        }
        self.state() != before
    }

    /// Records the process of the current incarnation.
    pub(crate) fn started(&mut self, pid: Option<u32>) {
        self.pid = pid;
        if let (Some(pid), None) = (pid, &self.node_name) {
            self.reports.started(self.incarnation, pid);
        }
    }

    /// Moves the last heartbeat by a pause of this process, in which no rank was asked.
    pub(crate) fn forgive(&self, pause: Duration) {
        self.reports.forgive(pause);
    }

    /// Returns the time since the last heartbeat, or since the connection; `None` for a rank that is not connected.
    pub(crate) fn heartbeat_age(&self, now: Instant) -> Option<Duration> {
        self.reports.last_heard().map(|heard| now.duration_since(heard))
    }

    /// Returns the time since the last heartbeat; zero for a rank that is not connected.
    pub(crate) fn silence(&self, now: Instant) -> Duration {
        self.heartbeat_age(now).unwrap_or_default()
    }

    /// Returns what the last heartbeat told.
    pub(crate) fn report(&self) -> Option<WorkerStatus> {
        self.reports.status()
    }

    pub(crate) fn reports(&self) -> Arc<RankReports> {
        Arc::clone(&self.reports)
    }

    pub(crate) fn member(&self) -> RankView {
        let member = RankView::starting(self.place.rank, self.incarnation).in_state(self.state());
        let mut member = match (&self.channel, &self.control) {
            (Some(channel), Some(control)) => member.reached_over(channel.clone()).asked_over(control.clone()),
            _ => member,
        };
        member.exit.clone_from(&self.exit);
        member.draining = self.draining;
        member
    }

    fn reset(&mut self) {
        (self.channel, self.control, self.pid) = (None, None, None);
        self.endpoints.clear();
        (self.probing, self.memory_high, self.preparation) = (false, false, RestartPreparation::Pending);
        (self.kill_reason, self.stuck, self.draining) = (None, false, false);
        self.reports.ended();
    }
}

/// The effects of an exit on the rank and on the ranks that are tied to it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct GroupExit {
    pub(crate) next: AfterExit,
    /// The tied ranks, which the group counts as dead; their processes must be killed.
    pub(crate) others: Vec<(Rank, Incarnation)>,
}

/// Returns the records of the ranks that are tied to `rank`, including its own.
pub(crate) fn tied(records: &mut [RankRecord], rank: Rank) -> impl Iterator<Item = &mut RankRecord> {
    let tied = records.get(rank as usize).map(|record| record.place.tied);
    records.iter_mut().filter(move |record| Some(record.place.tied) == tied)
}

/// Takes one restart from the budget of each record. Retires all records without restarts left, not only the first.
pub(crate) fn use_restarts<'a>(records: impl Iterator<Item = &'a mut RankRecord>, options: &GroupOptions) -> bool {
    records.map(|record| record.use_restart(options)).filter(|granted| !granted).count() == 0
}

/// Records that an incarnation of `rank` has ended, and with it those of the ranks that are tied to it. An incomplete model
/// cannot run, and the other ranks would wait for this one inside a collective. Tied ranks share their budget, pauses and
/// restarts. Returns `None` if nothing changed.
pub(crate) fn ended(
    records: &mut [RankRecord],
    rank: Rank,
    exit: RankExit,
    now: Instant,
    options: &GroupOptions,
) -> Option<GroupExit> {
    let record = records.get_mut(rank as usize).filter(|record| record.incarnation.0 == exit.incarnation)?;
    if let (RankState::Dead | RankState::Retired, Some(known)) = (record.state(), &mut record.exit) {
        if known.incarnation == exit.incarnation {
            // The rank was killed with a rank to which it is tied; now its own process has ended.
            let RankExit { code, signal, stderr_tail, .. } = exit;
            let known = Arc::make_mut(known);
            (known.code, known.signal, known.stderr_tail) = (code, signal, stderr_tail);
        } else {
            // The rank was already marked as dead because its preparation failed, which is not an exit. This is the exit.
            record.exit = Some(Arc::new(exit));
            record.reset();
        }
        return None;
    }
    let with_node = exit.cause == ExitCause::NodeLost;
    let next = record.ended(exit.clone(), now, options);
    let exit = record.exit.as_deref().cloned().unwrap_or(exit);
    let mut others = Vec::new();
    if record.state() != RankState::Stopped {
        for other in
            tied(records, rank).filter(|record| record.place.rank != rank && record.state() != RankState::Stopped)
        {
            others.push((other.place.rank, other.incarnation));
            other.ended_with(RankExit::tied(other.incarnation, rank, &exit), with_node, now, options);
        }
    }
    Some(GroupExit { next, others })
}

/// Lets the ranks tied to `rank` serve once all of them are connected and, after a restart, prepared. Returns the ranks to prepare
/// now.
pub(crate) fn serve_when_complete(
    records: &mut [RankRecord],
    rank: Rank,
    now: Instant,
    options: &GroupOptions,
) -> Vec<RankView> {
    let all = |records: &mut [RankRecord], is: fn(&RankRecord) -> bool| tied(records, rank).all(|record| is(record));
    let waits = |record: &RankRecord| matches!(record.state(), RankState::Starting | RankState::Restarting);
    if all(records, |record| record.state() == RankState::Stale && record.preparation == RestartPreparation::Done) {
        tied(records, rank).for_each(|record| record.serve(now, options));
    } else if tied(records, rank).all(|record| waits(record) && record.channel.is_some()) {
        let stale = options.on_restart.is_some() && all(records, |record| record.incarnation > Incarnation(1));
        if stale {
            tied(records, rank).for_each(|record| record.note(HealthEvent::Loaded, options));
            return tied(records, rank).map(|record| record.member()).collect();
        }
        tied(records, rank).for_each(|record| record.serve(now, options));
    }
    Vec::new()
}

/// Takes ranks that serve out of service, with the ranks tied to them. Returns those to prepare together now, by the ranks that are tied.
pub(crate) fn outdated(records: &mut [RankRecord], ranks: &[Rank], options: &GroupOptions) -> Vec<Vec<RankView>> {
    let mut unprepared: Vec<Vec<RankView>> = Vec::new();
    for rank in ranks {
        let serves = |record: &RankRecord| matches!(record.state(), RankState::Healthy | RankState::Suspect);
        if tied(records, *rank).any(|record| serves(record)) {
            tied(records, *rank).for_each(|record| record.outdated(options));
            unprepared.push(tied(records, *rank).map(|record| record.member()).collect());
        }
    }
    unprepared
}

#[cfg(test)]
mod tests {
    use super::*;
    use gym_client::transport::Transports;

    fn record() -> RankRecord {
        RankRecord::new(RankPlace::on_one_node(0, 1))
    }

    fn died(record: &RankRecord) -> RankExit {
        RankExit::new(record.incarnation, ExitCause::Died)
    }

    #[test]
    fn pauses_double_up_to_the_longest_and_then_the_rank_is_retired() {
        let options = GroupOptions::new(Transports::new()).restarting(7);
        let (mut record, now) = (record(), Instant::now());
        for seconds in [1, 2, 4, 8, 16, 30, 30] {
            let exit = died(&record);
            assert_eq!(record.ended(exit, now, &options), AfterExit::Restart(Duration::from_secs(seconds)));
            assert_eq!(record.state(), RankState::Dead);
            record.restarting(&options);
        }
        let exit = died(&record);
        assert_eq!(record.ended(exit, now, &options), AfterExit::Rest);
        assert_eq!(
            (record.state(), record.restarts_used(), record.incarnation),
            (RankState::Retired, 7, Incarnation(8))
        );
    }

    #[test]
    fn the_first_restart_of_a_rank_that_served_begins_at_once_and_the_next_ones_do_not() {
        let options = GroupOptions::new(Transports::new()).restarting(9);
        let (mut record, now) = (record(), Instant::now());
        for seconds in [0, 2, 4] {
            record.serve(now, &options);
            let exit = died(&record);
            let next = record.ended(exit, now + Duration::from_secs(1), &options);
            assert_eq!(next, AfterExit::Restart(Duration::from_secs(seconds)));
            record.restarting(&options);
        }
    }

    #[test]
    fn a_rank_that_served_long_restarts_at_once_but_the_restart_counts() {
        let options = GroupOptions::new(Transports::new()).restarting(9);
        let (mut record, now) = (record(), Instant::now());
        for _ in 0..3 {
            let exit = died(&record);
            record.ended(exit, now, &options);
            record.restarting(&options);
        }
        record.serve(now, &options);
        let exit = died(&record);
        assert_eq!(record.ended(exit, now + Duration::from_secs(31), &options), AfterExit::Restart(Duration::ZERO));
        assert_eq!(record.restarts_used(), 4);
    }

    #[test]
    fn nodes_lost_shortly_after_one_another_use_one_restart() {
        let options = GroupOptions::new(Transports::new()).restarting(2);
        let mut records: Vec<RankRecord> =
            (0..2).map(|rank| RankRecord::new(RankPlace::on_one_node(rank, 2))).collect();
        records[1].place.tied = 0;
        let mut now = Instant::now();
        records.iter_mut().for_each(|record| record.serve(now, &options));
        let mut lose = |rank: usize, after: Duration, served: bool| {
            now += after;
            let exit = RankExit::node_lost(records[rank].incarnation, "node", "it does not respond");
            ended(&mut records, rank as Rank, exit, now, &options).expect("news");
            tied(&mut records, 0).for_each(|record| {
                record.restarting(&options);
            });
            if served {
                tied(&mut records, 0).for_each(|record| record.serve(now, &options));
            }
            [0, 1].map(|rank| (records[rank].restarts_used(), records[rank].state()))
        };
        let (moment, window) = (Duration::from_secs(5), options.backoff_max);
        assert_eq!(lose(0, moment, false), [(1, RankState::Restarting); 2]);
        assert_eq!(lose(1, moment, false), [(1, RankState::Restarting); 2], "the second one interrupts the restart");
        assert_eq!(lose(0, moment, true), [(1, RankState::Healthy); 2]);
        assert_eq!(lose(1, moment, false), [(2, RankState::Restarting); 2], "the ranks had served again");
        assert_eq!(lose(0, window + moment, false), [(2, RankState::Retired); 2], "another failure");
    }

    #[test]
    fn tied_ranks_share_their_ends_pauses_and_budget() {
        let options = GroupOptions::new(Transports::new()).restarting(2);
        let now = Instant::now();
        let mut records: Vec<RankRecord> =
            (0..3).map(|rank| RankRecord::new(RankPlace::on_one_node(rank, 3))).collect();
        records[1].place.tied = 0;
        for (rank, seconds) in [(1, 1), (0, 2)] {
            let exit = died(&records[rank]);
            let ending = ended(&mut records, rank as Rank, exit, now, &options).expect("news");
            assert_eq!(
                ending,
                GroupExit {
                    next: AfterExit::Restart(Duration::from_secs(seconds)),
                    others: vec![(1 - rank as Rank, records[1 - rank].incarnation)]
                }
            );
            let mut late = died(&records[1 - rank]);
            late.signal = Some(9);
            assert_eq!(ended(&mut records, 1 - rank as Rank, late, now, &options), None, "it follows the first");
            let followed = records[1 - rank].exit.as_deref().expect("an end");
            assert_eq!((followed.cause, followed.signal), (ExitCause::Tied, Some(9)));
            tied(&mut records, 0).for_each(|record| {
                record.restarting(&options);
            });
        }
        let exit = died(&records[0]);
        assert_eq!(ended(&mut records, 0, exit, now, &options).map(|ending| ending.next), Some(AfterExit::Rest));
        let told = |record: &RankRecord| (record.state(), record.incarnation, record.restarts_used());
        let retired = (RankState::Retired, Incarnation(3), 2);
        assert_eq!(
            [0, 1, 2].map(|rank| told(&records[rank])),
            [retired, retired, (RankState::Starting, Incarnation(1), 0)]
        );
    }

    #[test]
    fn the_end_of_a_life_that_was_given_up_is_not_written_into_that_of_the_life_before() {
        let (options, now) = (GroupOptions::new(Transports::new()).restarting(1), Instant::now());
        let mut records = vec![record()];
        let first = died(&records[0]);
        ended(&mut records, 0, first, now, &options).expect("news");
        records[0].restarting(&options);
        records[0].note(HealthEvent::Loaded, &options);
        records[0].prepared(Err("no weights".to_owned()));
        assert!(!records[0].use_restart(&options), "its one restart is used");
        let mut second = died(&records[0]);
        second.signal = Some(9);
        assert_eq!(ended(&mut records, 0, second, now, &options), None, "it is retired already");
        let told = records[0].exit.as_deref().map(|exit| (exit.incarnation, exit.signal));
        assert_eq!((records[0].state(), told), (RankState::Retired, Some((2, Some(9)))));
    }

    #[test]
    fn the_exit_of_an_earlier_incarnation_changes_nothing() {
        let (options, now) = (GroupOptions::new(Transports::new()).restarting(9), Instant::now());
        let mut records = vec![record()];
        let first = died(&records[0]);
        ended(&mut records, 0, first.clone(), now, &options).expect("news");
        records[0].restarting(&options);
        let told = |record: &RankRecord| (record.state(), record.incarnation, record.restarts_used());
        let before = told(&records[0]);
        assert_eq!(ended(&mut records, 0, first, now, &options), None, "it is reported twice");
        assert_eq!(told(&records[0]), before);
    }

    #[test]
    fn without_restarts_a_rank_stays_dead_and_a_stopped_one_stopped() {
        let options = GroupOptions::new(Transports::new());
        let (mut dead, mut stopped, now) = (record(), record(), Instant::now());
        let exit = died(&dead);
        assert_eq!((dead.ended(exit, now, &options), dead.state()), (AfterExit::Rest, RankState::Dead));
        let exit = RankExit::new(stopped.incarnation, ExitCause::Stopped);
        assert_eq!((stopped.ended(exit, now, &options), stopped.state()), (AfterExit::Rest, RankState::Stopped));
    }

    #[test]
    fn a_silent_rank_is_suspect_until_it_is_heard_again() {
        let options = GroupOptions::new(Transports::new());
        let (mut record, now) = (record(), Instant::now());
        record.serve(now, &options);
        record.reports.heard(record.incarnation, now, None);
        assert!(!record.probed(None, now + options.silence_max, &options), "not yet");
        assert!(record.probed(None, now + options.silence_max * 2, &options));
        assert_eq!(record.state(), RankState::Suspect);
        let report =
            serde_json::from_str(r#"{"rank":0,"incarnation":1,"waiting":0,"running":[],"succeeded":0,"failed":0}"#);
        assert!(record.probed(Some(report.expect("a report")), now + options.silence_max * 3, &options));
        assert_eq!(record.state(), RankState::Healthy);
    }
}

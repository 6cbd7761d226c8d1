//! What is known of one rank over all its lives, and of those that are tied to it. Pure: no task, no process.

use std::sync::Arc;
use std::time::Duration;

use gym_core::group::{ExitCause, Member, Rank, RankExit, RankState, WorkerStatus};
use gym_core::{Channel, Incarnation};
use tokio::time::Instant;

use crate::group::provision::RankPlace;
use crate::group::supervise::options::GroupOptions;

/// One rank.
#[derive(Debug)]
pub(crate) struct RankRecord {
    pub(crate) place: RankPlace,
    pub(crate) incarnation: Incarnation,
    pub(crate) state: RankState,
    pub(crate) pid: Option<u32>,
    /// For calls.
    pub(crate) channel: Option<Channel>,
    /// For heartbeats, which never wait behind a gigabyte.
    pub(crate) control: Option<Channel>,
    /// How its last life that ended did.
    pub(crate) exit: Option<Arc<RankExit>>,
    /// What went wrong last.
    pub(crate) last_error: Option<String>,
    /// Why its present life is being ended by us.
    pub(crate) kill_reason: Option<String>,
    /// What came of what has to be done after a restart.
    preparation: RestartPreparation,
    pub(crate) restarts_used: u32,
    /// Ends in a row, without a life between them that served long enough to be forgiven.
    streak: u32,
    healthy_since: Option<Instant>,
    /// The time of the last heartbeat.
    pub(crate) last_heartbeat: Option<Instant>,
    pub(crate) report: Option<WorkerStatus>,
    pub(crate) probing: bool,
    pub(crate) memory_high: bool,
}

/// The state of the preparation (`on_restart`) that a restarted rank needs before it serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RestartPreparation {
    Pending,
    Done,
    Failed,
}

/// What follows from the end of a life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AfterExit {
    /// Another life after a pause.
    Restart(Duration),
    /// Nothing by itself.
    Rest,
}

impl RankRecord {
    pub(crate) fn new(place: RankPlace) -> Self {
        Self {
            place,
            incarnation: Incarnation(1),
            state: RankState::Starting,
            pid: None,
            channel: None,
            control: None,
            exit: None,
            last_error: None,
            kill_reason: None,
            preparation: RestartPreparation::Pending,
            restarts_used: 0,
            streak: 0,
            healthy_since: None,
            last_heartbeat: None,
            report: None,
            probing: false,
            memory_high: false,
        }
    }

    /// The present life has ended.
    pub(crate) fn ended(&mut self, mut exit: RankExit, now: Instant, options: &GroupOptions) -> AfterExit {
        let stopped = exit.cause == ExitCause::Stopped;
        // One that left by itself was not ended by us.
        if let Some(why) = self.kill_reason.take().filter(|_| exit.cause == ExitCause::Died && exit.code.is_none()) {
            (exit.cause, exit.detail) = (ExitCause::StartFailed, why);
        }
        self.last_error = (!stopped).then(|| exit.to_string());
        self.exit = Some(Arc::new(exit));
        self.reset();
        if stopped || self.state == RankState::Stopped {
            self.state = RankState::Stopped;
            return AfterExit::Rest;
        }
        self.state = RankState::Dead;
        let served = self.healthy_since.take().map(|since| now.duration_since(since));
        if served.is_some_and(|served| served > options.backoff_max) {
            self.streak = 0;
        }
        if !options.restart_on_failure {
            return AfterExit::Rest;
        }
        if !self.use_restart(options) {
            return AfterExit::Rest;
        }
        let pause = options.backoff_min.saturating_mul(1_u32.checked_shl(self.streak).unwrap_or(u32::MAX));
        self.streak = self.streak.saturating_add(1);
        AfterExit::Restart(pause.min(options.backoff_max))
    }

    /// Takes one restart from the budget; without one left the rank is retired.
    pub(crate) fn use_restart(&mut self, options: &GroupOptions) -> bool {
        if self.restarts_used >= options.max_restarts {
            self.state = RankState::Retired;
            return false;
        }
        self.restarts_used += 1;
        true
    }

    /// The next life begins.
    pub(crate) fn restarting(&mut self) -> Incarnation {
        self.reset();
        self.incarnation = Incarnation(self.incarnation.0 + 1);
        self.state = RankState::Restarting;
        self.incarnation
    }

    /// It can be reached.
    pub(crate) fn reached(&mut self, channel: Channel, control: Channel, now: Instant) {
        self.channel = Some(channel);
        self.control = Some(control);
        self.last_heartbeat = Some(now);
    }

    /// What has to be done after a restart has been, or has failed.
    pub(crate) fn prepared(&mut self, prepared: Result<(), String>) {
        match prepared {
            // It has ended meanwhile, which says more.
            _ if self.state != RankState::Stale => {}
            Ok(()) => self.preparation = RestartPreparation::Done,
            Err(error) => (self.preparation, self.last_error) = (RestartPreparation::Failed, Some(error)),
        }
    }

    /// Whether its preparation after a restart failed.
    pub(crate) fn preparation_failed(&self) -> bool {
        self.preparation == RestartPreparation::Failed
    }

    /// It may be called.
    pub(crate) fn serve(&mut self, now: Instant) {
        self.state = RankState::Healthy;
        self.healthy_since = Some(now);
    }

    /// A look at it came to this. Returns whether its state changed.
    pub(crate) fn probed(&mut self, answer: Option<WorkerStatus>, now: Instant, options: &GroupOptions) -> bool {
        self.probing = false;
        let before = self.state;
        match answer {
            Some(report) => {
                self.last_heartbeat = Some(now);
                self.report = Some(report);
                if self.state == RankState::Suspect {
                    self.state = RankState::Healthy;
                }
            }
            None if self.state == RankState::Healthy && self.silence(now) > options.silence_max => {
                self.state = RankState::Suspect;
            }
            None => {}
        }
        self.state != before
    }

    /// How long nothing was heard of it; zero for a rank from which nothing is expected.
    pub(crate) fn silence(&self, now: Instant) -> Duration {
        self.last_heartbeat.map_or(Duration::ZERO, |last_heartbeat| now.duration_since(last_heartbeat))
    }

    pub(crate) fn member(&self) -> Member {
        let member = Member::starting(self.place.rank, self.incarnation).in_state(self.state);
        let mut member = match &self.channel {
            Some(channel) => member.reached_over(channel.clone()),
            None => member,
        };
        member.exit.clone_from(&self.exit);
        member
    }

    fn reset(&mut self) {
        (self.channel, self.control, self.last_heartbeat, self.report, self.pid) = (None, None, None, None, None);
        (self.probing, self.memory_high, self.preparation) = (false, false, RestartPreparation::Pending);
        self.kill_reason = None;
    }
}

/// What follows from the end of a life for those that are tied to it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct GroupExit {
    pub(crate) next: AfterExit,
    /// They are dead to the group; their processes have to be ended.
    pub(crate) others: Vec<(Rank, Incarnation)>,
}

/// The records of the ranks that are tied to `rank`, itself included.
pub(crate) fn tied(records: &mut [RankRecord], rank: Rank) -> impl Iterator<Item = &mut RankRecord> {
    let tied = records.get(rank as usize).map(|record| record.place.tied);
    records.iter_mut().filter(move |record| Some(record.place.tied) == tied)
}

/// Takes one restart from the budget of each, or retires it: not only of the first that has none left.
pub(crate) fn use_restarts<'a>(records: impl Iterator<Item = &'a mut RankRecord>, options: &GroupOptions) -> bool {
    records.map(|record| record.use_restart(options)).filter(|paid| !paid).count() == 0
}

/// A life of `rank` has ended, and with it those of the ranks that it is tied to: half of a model is of no use, and what the
/// others wait for inside it never comes. They are counted, paused for and restarted as one. `None`: nothing new.
pub(crate) fn ended(
    records: &mut [RankRecord],
    rank: Rank,
    exit: RankExit,
    now: Instant,
    options: &GroupOptions,
) -> Option<GroupExit> {
    let record = records.get_mut(rank as usize).filter(|record| record.incarnation.0 == exit.incarnation)?;
    if let (RankState::Dead | RankState::Retired, Some(known)) = (record.state, &mut record.exit) {
        if known.incarnation == exit.incarnation {
            // It was given up with one that it is tied to; now it is gone as well.
            let RankExit { code, signal, stderr_tail, .. } = exit;
            let known = Arc::make_mut(known);
            (known.code, known.signal, known.stderr_tail) = (code, signal, stderr_tail);
        } else {
            // It was given up because its preparation failed, which is no exit; this is one.
            record.exit = Some(Arc::new(exit));
            record.reset();
        }
        return None;
    }
    let next = record.ended(exit.clone(), now, options);
    let exit = record.exit.as_deref().cloned().unwrap_or(exit);
    let mut others = Vec::new();
    if record.state != RankState::Stopped {
        for other in
            tied(records, rank).filter(|record| record.place.rank != rank && record.state != RankState::Stopped)
        {
            others.push((other.place.rank, other.incarnation));
            other.ended(RankExit::tied(other.incarnation, rank, &exit), now, options);
        }
    }
    Some(GroupExit { next, others })
}

/// Ranks tied to `rank` serve together: once all of them can be reached and, after a restart, are prepared. Returns those that have
/// to be prepared now.
pub(crate) fn serve_when_complete(
    records: &mut [RankRecord],
    rank: Rank,
    now: Instant,
    options: &GroupOptions,
) -> Vec<Member> {
    let all = |records: &mut [RankRecord], is: fn(&RankRecord) -> bool| tied(records, rank).all(|record| is(record));
    let waits = |record: &RankRecord| matches!(record.state, RankState::Starting | RankState::Restarting);
    if all(records, |record| record.state == RankState::Stale && record.preparation == RestartPreparation::Done) {
        tied(records, rank).for_each(|record| record.serve(now));
    } else if tied(records, rank).all(|record| waits(record) && record.channel.is_some()) {
        let stale = options.on_restart.is_some() && all(records, |record| record.incarnation > Incarnation(1));
        if stale {
            tied(records, rank).for_each(|record| record.state = RankState::Stale);
            return tied(records, rank).map(|record| record.member()).collect();
        }
        tied(records, rank).for_each(|record| record.serve(now));
    }
    Vec::new()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::Transports;

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
            assert_eq!(record.state, RankState::Dead);
            record.restarting();
        }
        let exit = died(&record);
        assert_eq!(record.ended(exit, now, &options), AfterExit::Rest);
        assert_eq!((record.state, record.restarts_used, record.incarnation), (RankState::Retired, 7, Incarnation(8)));
    }

    #[test]
    fn a_life_that_served_long_is_followed_by_the_shortest_pause_but_still_counts() {
        let options = GroupOptions::new(Transports::new()).restarting(9);
        let (mut record, now) = (record(), Instant::now());
        for _ in 0..3 {
            let exit = died(&record);
            record.ended(exit, now, &options);
            record.restarting();
        }
        record.serve(now);
        let exit = died(&record);
        assert_eq!(
            record.ended(exit, now + Duration::from_secs(31), &options),
            AfterExit::Restart(Duration::from_secs(1))
        );
        assert_eq!(record.restarts_used, 4);
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
                record.restarting();
            });
        }
        let exit = died(&records[0]);
        assert_eq!(ended(&mut records, 0, exit, now, &options).map(|ending| ending.next), Some(AfterExit::Rest));
        let told = |record: &RankRecord| (record.state, record.incarnation, record.restarts_used);
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
        records[0].restarting();
        records[0].state = RankState::Stale;
        records[0].prepared(Err("no weights".to_owned()));
        assert!(!records[0].use_restart(&options), "its one restart is used");
        let mut second = died(&records[0]);
        second.signal = Some(9);
        assert_eq!(ended(&mut records, 0, second, now, &options), None, "it is retired already");
        let told = records[0].exit.as_deref().map(|exit| (exit.incarnation, exit.signal));
        assert_eq!((records[0].state, told), (RankState::Retired, Some((2, Some(9)))));
    }

    #[test]
    fn without_restarts_a_rank_stays_dead_and_a_stopped_one_stopped() {
        let options = GroupOptions::new(Transports::new());
        let (mut dead, mut stopped, now) = (record(), record(), Instant::now());
        let exit = died(&dead);
        assert_eq!((dead.ended(exit, now, &options), dead.state), (AfterExit::Rest, RankState::Dead));
        let exit = RankExit::new(stopped.incarnation, ExitCause::Stopped);
        assert_eq!((stopped.ended(exit, now, &options), stopped.state), (AfterExit::Rest, RankState::Stopped));
    }

    #[test]
    fn a_silent_rank_is_suspect_until_it_is_heard_again() {
        let options = GroupOptions::new(Transports::new());
        let (mut record, now) = (record(), Instant::now());
        record.serve(now);
        record.last_heartbeat = Some(now);
        assert!(!record.probed(None, now + options.silence_max, &options), "not yet");
        assert!(record.probed(None, now + options.silence_max * 2, &options));
        assert_eq!(record.state, RankState::Suspect);
        let report =
            serde_json::from_str(r#"{"rank":0,"incarnation":1,"waiting":0,"running":[],"succeeded":0,"failed":0}"#);
        assert!(record.probed(Some(report.expect("a report")), now + options.silence_max * 3, &options));
        assert_eq!(record.state, RankState::Healthy);
    }
}

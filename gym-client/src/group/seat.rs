//! What is known of one rank over all its lives, and of those that are tied to it. Pure: no task, no process.

use std::sync::Arc;
use std::time::Duration;

use gym_core::{Channel, ExitCause, Incarnation, Member, Rank, RankExit, RankState, WorkerStatus};
use tokio::time::Instant;

use super::options::GroupOptions;
use crate::provision::RankPlace;

/// One rank.
#[derive(Debug)]
pub(crate) struct Seat {
    pub(crate) place: RankPlace,
    pub(crate) incarnation: Incarnation,
    pub(crate) state: RankState,
    pub(crate) pid: Option<u32>,
    /// For calls.
    pub(crate) channel: Option<Channel>,
    /// For signs of life: a heartbeat never waits behind a gigabyte.
    pub(crate) control: Option<Channel>,
    /// How its last life that ended did.
    pub(crate) exit: Option<Arc<RankExit>>,
    /// What went wrong last.
    pub(crate) last_error: Option<String>,
    /// Why its present life is being ended by us.
    pub(crate) condemned: Option<String>,
    /// What came of what has to be done after a restart.
    fitness: Fitness,
    pub(crate) restarts_used: u32,
    /// Ends in a row, without a life between them that served long enough to be forgiven.
    streak: u32,
    healthy_since: Option<Instant>,
    /// The last sign of life, and what it said.
    pub(crate) heard: Option<Instant>,
    pub(crate) report: Option<WorkerStatus>,
    pub(crate) probing: bool,
    pub(crate) memory_high: bool,
}

/// Whether what has to be done after a restart has been.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fitness {
    Unknown,
    Fit,
    Unfit,
}

/// What follows from the end of a life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// Another life after a pause.
    Restart(Duration),
    /// Nothing by itself.
    Rest,
}

impl Seat {
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
            condemned: None,
            fitness: Fitness::Unknown,
            restarts_used: 0,
            streak: 0,
            healthy_since: None,
            heard: None,
            report: None,
            probing: false,
            memory_high: false,
        }
    }

    /// The present life has ended.
    pub(crate) fn ended(&mut self, mut exit: RankExit, now: Instant, options: &GroupOptions) -> Next {
        let stopped = exit.cause == ExitCause::Stopped;
        // One that left by itself was not ended by us.
        if let Some(why) = self.condemned.take().filter(|_| exit.cause == ExitCause::Died && exit.code.is_none()) {
            (exit.cause, exit.detail) = (ExitCause::StartFailed, why);
        }
        self.last_error = (!stopped).then(|| exit.to_string());
        self.exit = Some(Arc::new(exit));
        self.leave();
        if stopped || self.state == RankState::Stopped {
            self.state = RankState::Stopped;
            return Next::Rest;
        }
        self.state = RankState::Dead;
        let served = self.healthy_since.take().map(|since| now.duration_since(since));
        if served.is_some_and(|served| served > options.backoff_max) {
            self.streak = 0;
        }
        if !options.restart_on_failure {
            return Next::Rest;
        }
        if !self.spend(options) {
            return Next::Rest;
        }
        let pause = options.backoff_min.saturating_mul(1_u32.checked_shl(self.streak).unwrap_or(u32::MAX));
        self.streak = self.streak.saturating_add(1);
        Next::Restart(pause.min(options.backoff_max))
    }

    /// Takes one restart from the budget; without one left the rank is retired.
    pub(crate) fn spend(&mut self, options: &GroupOptions) -> bool {
        if self.restarts_used >= options.max_restarts {
            self.state = RankState::Retired;
            return false;
        }
        self.restarts_used += 1;
        true
    }

    /// The next life begins.
    pub(crate) fn restarting(&mut self) -> Incarnation {
        self.leave();
        self.incarnation = Incarnation(self.incarnation.0 + 1);
        self.state = RankState::Restarting;
        self.incarnation
    }

    /// It can be reached.
    pub(crate) fn reached(&mut self, channel: Channel, control: Channel, now: Instant) {
        self.channel = Some(channel);
        self.control = Some(control);
        self.heard = Some(now);
    }

    /// What has to be done after a restart has been, or has failed.
    pub(crate) fn warmed(&mut self, warmed: Result<(), String>) {
        match warmed {
            // It has ended meanwhile, which says more.
            _ if self.state != RankState::Stale => {}
            Ok(()) => self.fitness = Fitness::Fit,
            Err(error) => (self.fitness, self.last_error) = (Fitness::Unfit, Some(error)),
        }
    }

    /// It failed to be made fit.
    pub(crate) fn is_unfit(&self) -> bool {
        self.fitness == Fitness::Unfit
    }

    /// It may be called.
    pub(crate) fn serve(&mut self, now: Instant) {
        self.state = RankState::Healthy;
        self.healthy_since = Some(now);
    }

    /// A look at it came to this. Returns whether its state changed.
    pub(crate) fn looked(&mut self, answer: Option<WorkerStatus>, now: Instant, options: &GroupOptions) -> bool {
        self.probing = false;
        let before = self.state;
        match answer {
            Some(report) => {
                self.heard = Some(now);
                self.report = Some(report);
                if self.state == RankState::Suspect {
                    self.state = RankState::Healthy;
                }
            }
            None if self.state == RankState::Healthy && self.silent_for(now) > options.silence_max => {
                self.state = RankState::Suspect;
            }
            None => {}
        }
        self.state != before
    }

    /// How long nothing was heard of it; zero for a rank from which nothing is expected.
    pub(crate) fn silent_for(&self, now: Instant) -> Duration {
        self.heard.map_or(Duration::ZERO, |heard| now.duration_since(heard))
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

    fn leave(&mut self) {
        (self.channel, self.control, self.heard, self.report, self.pid) = (None, None, None, None, None);
        (self.probing, self.memory_high, self.fitness) = (false, false, Fitness::Unknown);
        self.condemned = None;
    }
}

/// What follows from the end of a life for those that are tied to it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Ending {
    pub(crate) next: Next,
    /// They are dead to the group; their processes have to be ended.
    pub(crate) others: Vec<(Rank, Incarnation)>,
}

/// The seats of the ranks that are tied to `rank`, itself included.
pub(crate) fn tied(seats: &mut [Seat], rank: Rank) -> impl Iterator<Item = &mut Seat> {
    let tied = seats.get(rank as usize).map(|seat| seat.place.tied);
    seats.iter_mut().filter(move |seat| Some(seat.place.tied) == tied)
}

/// Takes one restart from the budget of each, or retires it: not only of the first that has none left.
pub(crate) fn spend_all<'a>(seats: impl Iterator<Item = &'a mut Seat>, options: &GroupOptions) -> bool {
    seats.map(|seat| seat.spend(options)).filter(|paid| !paid).count() == 0
}

/// A life of `rank` has ended, and with it those of the ranks that it is tied to: half of a model is of no use, and what the
/// others wait for inside it never comes. They are counted, paused for and restarted as one. `None`: nothing new.
pub(crate) fn ended(
    seats: &mut [Seat],
    rank: Rank,
    exit: RankExit,
    now: Instant,
    options: &GroupOptions,
) -> Option<Ending> {
    let seat = seats.get_mut(rank as usize).filter(|seat| seat.incarnation.0 == exit.incarnation)?;
    if let (RankState::Dead | RankState::Retired, Some(known)) = (seat.state, &mut seat.exit) {
        if known.incarnation == exit.incarnation {
            // It was given up with one that it is tied to; now it is gone as well.
            let RankExit { code, signal, stderr_tail, .. } = exit;
            let known = Arc::make_mut(known);
            (known.code, known.signal, known.stderr_tail) = (code, signal, stderr_tail);
        } else {
            // It was given up because it could not be made fit, which is no end; this is.
            seat.exit = Some(Arc::new(exit));
            seat.leave();
        }
        return None;
    }
    let next = seat.ended(exit.clone(), now, options);
    let exit = seat.exit.as_deref().cloned().unwrap_or(exit);
    let mut others = Vec::new();
    if seat.state != RankState::Stopped {
        for other in tied(seats, rank).filter(|seat| seat.place.rank != rank && seat.state != RankState::Stopped) {
            others.push((other.place.rank, other.incarnation));
            other.ended(RankExit::tied(other.incarnation, rank, &exit), now, options);
        }
    }
    Some(Ending { next, others })
}

/// Those tied to `rank` serve together: once all of them can be reached and, after a restart, have been made fit. Returns those
/// that have to be made fit now.
pub(crate) fn gather(seats: &mut [Seat], rank: Rank, now: Instant, options: &GroupOptions) -> Vec<Member> {
    let all = |seats: &mut [Seat], is: fn(&Seat) -> bool| tied(seats, rank).all(|seat| is(seat));
    let waits = |seat: &Seat| matches!(seat.state, RankState::Starting | RankState::Restarting);
    if all(seats, |seat| seat.state == RankState::Stale && seat.fitness == Fitness::Fit) {
        tied(seats, rank).for_each(|seat| seat.serve(now));
    } else if tied(seats, rank).all(|seat| waits(seat) && seat.channel.is_some()) {
        let stale = options.on_restart.is_some() && all(seats, |seat| seat.incarnation > Incarnation(1));
        if stale {
            tied(seats, rank).for_each(|seat| seat.state = RankState::Stale);
            return tied(seats, rank).map(|seat| seat.member()).collect();
        }
        tied(seats, rank).for_each(|seat| seat.serve(now));
    }
    Vec::new()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Transports;

    fn seat() -> Seat {
        Seat::new(RankPlace::on_one_node(0, 1))
    }

    fn died(seat: &Seat) -> RankExit {
        RankExit::new(seat.incarnation, ExitCause::Died)
    }

    #[test]
    fn pauses_double_up_to_the_longest_and_then_the_rank_is_retired() {
        let options = GroupOptions::new(Transports::new()).restarting(7);
        let (mut seat, now) = (seat(), Instant::now());
        for seconds in [1, 2, 4, 8, 16, 30, 30] {
            let exit = died(&seat);
            assert_eq!(seat.ended(exit, now, &options), Next::Restart(Duration::from_secs(seconds)));
            assert_eq!(seat.state, RankState::Dead);
            seat.restarting();
        }
        let exit = died(&seat);
        assert_eq!(seat.ended(exit, now, &options), Next::Rest);
        assert_eq!((seat.state, seat.restarts_used, seat.incarnation), (RankState::Retired, 7, Incarnation(8)));
    }

    #[test]
    fn a_life_that_served_long_is_followed_by_the_shortest_pause_but_still_counts() {
        let options = GroupOptions::new(Transports::new()).restarting(9);
        let (mut seat, now) = (seat(), Instant::now());
        for _ in 0..3 {
            let exit = died(&seat);
            seat.ended(exit, now, &options);
            seat.restarting();
        }
        seat.serve(now);
        let exit = died(&seat);
        assert_eq!(seat.ended(exit, now + Duration::from_secs(31), &options), Next::Restart(Duration::from_secs(1)));
        assert_eq!(seat.restarts_used, 4);
    }

    #[test]
    fn tied_ranks_share_their_ends_pauses_and_budget() {
        let options = GroupOptions::new(Transports::new()).restarting(2);
        let now = Instant::now();
        let mut seats: Vec<Seat> = (0..3).map(|rank| Seat::new(RankPlace::on_one_node(rank, 3))).collect();
        seats[1].place.tied = 0;
        for (rank, seconds) in [(1, 1), (0, 2)] {
            let exit = died(&seats[rank]);
            let ending = ended(&mut seats, rank as Rank, exit, now, &options).expect("news");
            assert_eq!(
                ending,
                Ending {
                    next: Next::Restart(Duration::from_secs(seconds)),
                    others: vec![(1 - rank as Rank, seats[1 - rank].incarnation)]
                }
            );
            let mut late = died(&seats[1 - rank]);
            late.signal = Some(9);
            assert_eq!(ended(&mut seats, 1 - rank as Rank, late, now, &options), None, "it follows the first");
            let followed = seats[1 - rank].exit.as_deref().expect("an end");
            assert_eq!((followed.cause, followed.signal), (ExitCause::Tied, Some(9)));
            tied(&mut seats, 0).for_each(|seat| {
                seat.restarting();
            });
        }
        let exit = died(&seats[0]);
        assert_eq!(ended(&mut seats, 0, exit, now, &options).map(|ending| ending.next), Some(Next::Rest));
        let told = |seat: &Seat| (seat.state, seat.incarnation, seat.restarts_used);
        let retired = (RankState::Retired, Incarnation(3), 2);
        assert_eq!(
            [0, 1, 2].map(|rank| told(&seats[rank])),
            [retired, retired, (RankState::Starting, Incarnation(1), 0)]
        );
    }

    #[test]
    fn the_end_of_a_life_that_was_given_up_is_not_written_into_that_of_the_life_before() {
        let (options, now) = (GroupOptions::new(Transports::new()).restarting(1), Instant::now());
        let mut seats = vec![seat()];
        let first = died(&seats[0]);
        ended(&mut seats, 0, first, now, &options).expect("news");
        seats[0].restarting();
        seats[0].state = RankState::Stale;
        seats[0].warmed(Err("no weights".to_owned()));
        assert!(!seats[0].spend(&options), "its one restart is used");
        let mut second = died(&seats[0]);
        second.signal = Some(9);
        assert_eq!(ended(&mut seats, 0, second, now, &options), None, "it is retired already");
        let told = seats[0].exit.as_deref().map(|exit| (exit.incarnation, exit.signal));
        assert_eq!((seats[0].state, told), (RankState::Retired, Some((2, Some(9)))));
    }

    #[test]
    fn without_restarts_a_rank_stays_dead_and_a_stopped_one_stopped() {
        let options = GroupOptions::new(Transports::new());
        let (mut dead, mut stopped, now) = (seat(), seat(), Instant::now());
        let exit = died(&dead);
        assert_eq!((dead.ended(exit, now, &options), dead.state), (Next::Rest, RankState::Dead));
        let exit = RankExit::new(stopped.incarnation, ExitCause::Stopped);
        assert_eq!((stopped.ended(exit, now, &options), stopped.state), (Next::Rest, RankState::Stopped));
    }

    #[test]
    fn a_silent_rank_is_suspect_until_it_is_heard_again() {
        let options = GroupOptions::new(Transports::new());
        let (mut seat, now) = (seat(), Instant::now());
        seat.serve(now);
        seat.heard = Some(now);
        assert!(!seat.looked(None, now + options.silence_max, &options), "not yet");
        assert!(seat.looked(None, now + options.silence_max * 2, &options));
        assert_eq!(seat.state, RankState::Suspect);
        let report =
            serde_json::from_str(r#"{"rank":0,"incarnation":1,"waiting":0,"running":[],"succeeded":0,"failed":0}"#);
        assert!(seat.looked(Some(report.expect("a report")), now + options.silence_max * 3, &options));
        assert_eq!(seat.state, RankState::Healthy);
    }
}

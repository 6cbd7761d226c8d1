//! The task that keeps a group's ranks: hears what becomes of them, connects to them, looks at them, starts them again.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use gym_core::{
    CallContext, Channel, ConnectOptions, Endpoint, GroupView, Incarnation, Member, Rank, RankExit, RankState, Request,
    Result, Route, STATUS_ROUTE, WorkerStatus,
};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, sleep};

use super::options::GroupOptions;
use super::seat::{self, Next, Seat};
use super::solo::Solo;
use super::turns::{InTurn, Turns};
use crate::provision::{Deployment, RankEvent};

/// A rank that has just said where it serves is reached within this time, or never.
const CONNECT_WAIT: Duration = Duration::from_secs(10);
/// An answer to "how are you" takes microseconds; this leaves room for a machine that swaps.
const LOOK_WAIT: Duration = Duration::from_secs(2);
/// The declared method after a restart loads weights; it may take as long as a start.
const WARM_WAIT: Duration = crate::provision::DEFAULT_START_TIMEOUT;

/// What the group and its supervisor share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) name: Arc<str>,
    pub(super) options: GroupOptions,
    pub(super) deployment: Box<dyn Deployment>,
    pub(super) view: watch::Sender<Arc<GroupView>>,
    pub(super) share: Option<Share>,
    /// In rank order, from 0.
    seats: Mutex<Vec<Seat>>,
}

/// A group's part in the turns on its bundles.
#[derive(Clone, Debug)]
pub(crate) struct Share {
    pub(crate) turns: Turns,
    pub(crate) group: u64,
    pub(crate) bundles: Arc<std::collections::BTreeSet<super::BundleId>>,
}

/// What the group asks of its supervisor.
#[derive(Debug)]
pub(super) enum Command {
    /// Start again whatever has ended; answered with the ranks that are, and those that may not be any more.
    RestartFailed(oneshot::Sender<Restarts>),
}

/// What a wish for restarts came to.
#[derive(Debug, Default)]
pub(super) struct Restarts {
    pub(super) begun: Vec<Rank>,
    pub(super) refused: Vec<Rank>,
}

impl Shared {
    pub(super) fn new(
        name: Arc<str>,
        options: GroupOptions,
        deployment: Box<dyn Deployment>,
        share: Option<Share>,
        seats: Vec<Seat>,
    ) -> Self {
        let members = seats.iter().map(Seat::member).collect();
        let view = watch::Sender::new(Arc::new(GroupView::new(1, members)));
        Self { name, options, deployment, view, share, seats: Mutex::new(seats) }
    }

    pub(super) fn seats(&self) -> MutexGuard<'_, Vec<Seat>> {
        self.seats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes no new calls, and ends all ranks.
    pub(super) async fn stop(&self, grace: Duration) -> Result<()> {
        for seat in self.seats().iter_mut() {
            seat.state = RankState::Stopped;
        }
        self.publish();
        self.deployment.shutdown(grace).await
    }

    /// Shows the world what is known now.
    pub(super) fn publish(&self) {
        let members: Vec<_> = self.seats().iter().map(Seat::member).collect();
        self.view.send_modify(|view| *view = Arc::new(view.with(members)));
    }

    /// Asks a rank how it is.
    pub(super) async fn look(control: &Channel) -> Result<WorkerStatus> {
        let request = Request::get(CallContext::within(LOOK_WAIT), Route::from_static(STATUS_ROUTE));
        let response = control.call(request).await?.into_result()?;
        serde_json::from_slice(&response.message.head.to_bytes())
            .map_err(|error| gym_core::Error::internal("the status cannot be read").caused_by(error))
    }
}

/// What a job of the supervisor's came to.
enum Done {
    Connected(Rank, Incarnation, Result<(Channel, Channel)>),
    Warmed(Rank, Incarnation, Result<()>),
    PauseOver(Rank, Incarnation),
    /// Another life of these was begun, or could not be: the lives before would not go.
    Restarted(Vec<(Rank, Incarnation)>, Result<()>),
    Looked(Rank, Incarnation, Option<WorkerStatus>),
    Nothing,
}

pub(super) struct Supervisor {
    shared: Arc<Shared>,
    jobs: JoinSet<Done>,
    /// Tied groups that are being started again, and those of them that have to be once more.
    restarting: BTreeSet<u32>,
    again: BTreeSet<u32>,
}

impl Supervisor {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self { shared, jobs: JoinSet::new(), restarting: BTreeSet::new(), again: BTreeSet::new() }
    }

    /// Runs until it is dropped, or the deployment is.
    pub(super) async fn run(
        mut self,
        mut events: BoxStream<'static, RankEvent>,
        mut commands: mpsc::Receiver<Command>,
    ) {
        let mut tick = tokio::time::interval(self.shared.options.heartbeat);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! { biased;
                event = events.next() => match event {
                    Some(event) => self.happened(event),
                    None => return,
                },
                Some(done) = self.jobs.join_next(), if !self.jobs.is_empty() => match done {
                    Ok(done) => self.done(done),
                    Err(error) => tracing::error!(group = %self.shared.name, %error, "a job of the supervisor failed"),
                },
                Some(command) = commands.recv() => match command {
                    Command::RestartFailed(reply) => {
                        let _ = reply.send(self.restart_failed());
                    }
                },
                _ = tick.tick() => self.look_at_all(),
            }
        }
    }

    /// Changes the seat of a rank if it is still in that life, and shows it.
    fn change<T>(&self, rank: Rank, incarnation: Incarnation, change: impl FnOnce(&mut Seat) -> T) -> Option<T> {
        let changed = {
            let mut seats = self.shared.seats();
            let seat = seats.get_mut(rank as usize).filter(|seat| seat.incarnation == incarnation)?;
            change(seat)
        };
        self.shared.publish();
        Some(changed)
    }

    fn happened(&mut self, event: RankEvent) {
        let options = self.shared.options.clone();
        match event {
            RankEvent::Started { rank, incarnation, pid } => {
                self.change(rank, incarnation, |seat| seat.pid = pid);
            }
            RankEvent::Ready { rank, incarnation, endpoints } => {
                let transports = options.transports;
                self.jobs.spawn(async move {
                    let connected = connect(&transports, incarnation, &endpoints).await;
                    Done::Connected(rank, incarnation, connected)
                });
            }
            RankEvent::MemoryHigh { rank, incarnation, .. } => {
                self.change(rank, incarnation, |seat| seat.memory_high = true);
            }
            RankEvent::Exited { rank, exit } => {
                tracing::warn!(group = %self.shared.name, rank, incarnation = exit.incarnation, %exit, "a rank ended");
                let incarnation = Incarnation(exit.incarnation);
                let ending = seat::ended(&mut self.shared.seats(), rank, exit, Instant::now(), &options);
                self.shared.publish();
                let Some(seat::Ending { next, others }) = ending else { return };
                self.end(others);
                if let Next::Restart(pause) = next {
                    self.jobs.spawn(async move {
                        sleep(pause).await;
                        Done::PauseOver(rank, incarnation)
                    });
                }
            }
        }
    }

    /// Ends the processes of these. Their ends come as events.
    fn end(&mut self, ranks: Vec<Rank>) {
        for rank in ranks {
            let shared = Arc::clone(&self.shared);
            self.jobs.spawn(async move {
                // One that is not there needs no end.
                let _ = shared.deployment.kill(rank).await;
                Done::Nothing
            });
        }
    }

    fn done(&mut self, done: Done) {
        let options = self.shared.options.clone();
        match done {
            Done::Connected(rank, incarnation, Ok((channel, control))) => {
                let channel = match &self.shared.share {
                    Some(Share { turns, group, bundles }) => {
                        InTurn::channel(channel, turns.clone(), *group, Arc::clone(bundles))
                    }
                    None => channel,
                };
                self.change(rank, incarnation, |seat| {
                    // One that has ended meanwhile, with those it is tied to, has nothing left to reach.
                    if matches!(seat.state, RankState::Starting | RankState::Restarting) {
                        seat.reached(channel, control, Instant::now());
                    }
                });
                self.gather(rank);
            }
            Done::Connected(rank, incarnation, Err(error)) => {
                // It cannot be used. Its end comes as an event, and is treated like any other.
                let why = format!("it cannot be reached where it says that it serves: {error}");
                if self.change(rank, incarnation, |seat| seat.condemned = Some(why)).is_some() {
                    self.end(vec![rank]);
                }
            }
            Done::Warmed(rank, incarnation, warmed) => {
                if let Err(error) = &warmed {
                    tracing::error!(group = %self.shared.name, rank, %error, "a restarted rank could not be made fit");
                }
                self.change(rank, incarnation, |seat| match warmed {
                    Ok(()) => seat.warmed(),
                    Err(error) => seat.last_error = Some(error.to_string()),
                });
                self.gather(rank);
            }
            Done::PauseOver(rank, incarnation) => self.restart(rank, incarnation),
            Done::Restarted(lives, begun) => {
                self.restarted(&lives);
                if let (Err(error), Some(&(rank, life))) = (begun, lives.first()) {
                    // No event comes of a life that was never begun, and all that are tied end with one.
                    let exit = RankExit::start_failed(life, format!("it could not be started again: {error}"));
                    self.happened(RankEvent::Exited { rank, exit });
                }
            }
            Done::Looked(rank, incarnation, answer) => {
                let changed = {
                    let mut seats = self.shared.seats();
                    let seat = seats.get_mut(rank as usize).filter(|seat| seat.incarnation == incarnation);
                    seat.is_some_and(|seat| seat.looked(answer, Instant::now(), &options))
                };
                if changed {
                    self.shared.publish();
                }
            }
            Done::Nothing => {}
        }
    }

    /// Lets a rank and those tied to it serve, or be made fit, if they are all there.
    fn gather(&mut self, rank: Rank) {
        let unfit = seat::gather(&mut self.shared.seats(), rank, Instant::now(), &self.shared.options);
        self.shared.publish();
        let Some(on_restart) = self.shared.options.on_restart.clone() else { return };
        for member in unfit {
            let (name, on_restart) = (Arc::clone(&self.shared.name), Arc::clone(&on_restart));
            self.jobs.spawn(async move {
                let Member { rank, incarnation, .. } = member;
                let warmed = match Solo::of(name, member) {
                    Ok(solo) => on_restart(solo, CallContext::within(WARM_WAIT)).await.map_err(Into::into),
                    Err(error) => Err(error),
                };
                Done::Warmed(rank, incarnation, warmed)
            });
        }
    }

    /// Starts the life after `last` of a rank and of those tied to it, unless somebody has already.
    fn restart(&mut self, rank: Rank, last: Incarnation) {
        let lives: Vec<(Rank, Incarnation)> = {
            let mut seats = self.shared.seats();
            let due = |seat: &Seat| seat.incarnation == last && seat.state == RankState::Dead;
            let Some(tied) = seats.get(rank as usize).filter(|seat| due(seat)).map(|seat| seat.place.tied) else {
                return;
            };
            // What is being started cannot be ended before it is there.
            if !self.restarting.insert(tied) {
                self.again.insert(tied);
                return;
            }
            seat::tied(&mut seats, rank).map(|seat| (seat.place.rank, seat.restarting())).collect()
        };
        self.shared.publish();
        let shared = Arc::clone(&self.shared);
        self.jobs.spawn(async move {
            // What keeps a single one from starting comes as an event.
            let begun = shared.deployment.restart(&CallContext::default(), &lives).await;
            Done::Restarted(lives, begun)
        });
    }

    /// Those that were started again may have been given up meanwhile.
    fn restarted(&mut self, lives: &[(Rank, Incarnation)]) {
        let Some(&(rank, life)) = lives.first() else { return };
        let (tied, over) = {
            let seats = self.shared.seats();
            let Some(seat) = seats.get(rank as usize) else { return };
            (seat.place.tied, matches!(seat.state, RankState::Dead | RankState::Retired))
        };
        self.restarting.remove(&tied);
        if self.again.remove(&tied) {
            self.restart(rank, life);
        } else if over {
            self.end(lives.iter().map(|(rank, _)| *rank).collect());
        }
    }

    fn restart_failed(&mut self) -> Restarts {
        let mut restarts = Restarts::default();
        let options = self.shared.options.clone();
        let mut due = Vec::new();
        {
            let mut seats = self.shared.seats();
            let firsts: BTreeSet<(u32, Rank)> = seats.iter().map(|seat| (seat.place.tied, seat.place.rank)).collect();
            let mut seen = BTreeSet::new();
            for (_, rank) in firsts.into_iter().filter(|(tied, _)| seen.insert(*tied)) {
                let ranks: Vec<Rank> = seat::tied(&mut seats, rank).map(|seat| seat.place.rank).collect();
                // Those that are tied are in the same state, but for one that failed to become fit: as good as dead.
                let unfit = seat::tied(&mut seats, rank)
                    .any(|seat| seat.state == RankState::Stale && seat.last_error.is_some());
                let pending = options.restart_on_failure;
                let seat = &seats[rank as usize];
                let (state, incarnation) = (seat.state, seat.incarnation);
                let allowed = match state {
                    // Its restart is paid for and waits for its pause, which ends now.
                    RankState::Dead if pending => true,
                    RankState::Dead => seat::spend_all(seat::tied(&mut seats, rank), &options),
                    RankState::Stale if unfit => {
                        seat::tied(&mut seats, rank).for_each(|seat| seat.state = RankState::Dead);
                        seat::spend_all(seat::tied(&mut seats, rank), &options)
                    }
                    RankState::Retired => false,
                    _ => continue,
                };
                if allowed {
                    due.push((rank, incarnation));
                    restarts.begun.extend(ranks);
                } else {
                    restarts.refused.extend(ranks);
                }
            }
        }
        for (rank, incarnation) in due {
            self.restart(rank, incarnation);
        }
        restarts.begun.sort_unstable();
        restarts.refused.sort_unstable();
        self.shared.publish();
        restarts
    }

    /// A look at every rank that can be reached and is not looked at yet.
    fn look_at_all(&mut self) {
        let mut looks: Vec<(Rank, Incarnation, Channel)> = Vec::new();
        for seat in self.shared.seats().iter_mut().filter(|seat| !seat.probing) {
            if let Some(control) = seat.control.clone() {
                seat.probing = true;
                looks.push((seat.place.rank, seat.incarnation, control));
            }
        }
        for (rank, incarnation, control) in looks {
            self.jobs.spawn(async move { Done::Looked(rank, incarnation, Shared::look(&control).await.ok()) });
        }
    }
}

async fn connect(
    transports: &crate::Transports,
    incarnation: Incarnation,
    endpoints: &[Endpoint],
) -> Result<(Channel, Channel)> {
    let cx = CallContext::within(CONNECT_WAIT);
    let options = ConnectOptions::to_incarnation(incarnation);
    let calls = transports.connect_ordered(&cx, endpoints, &options).await?;
    let control = transports.connect(&cx, endpoints, &options).await?;
    Ok((calls, control))
}

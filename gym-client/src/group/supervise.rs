//! The task that keeps a group's ranks: hears what becomes of them, connects to them, looks at them, starts them again.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use gym_core::{
    CallContext, Channel, ConnectOptions, Endpoint, GroupView, Incarnation, Rank, RankState, Request, Result, Route,
    STATUS_ROUTE, WorkerStatus,
};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, sleep};

use super::options::GroupOptions;
use super::seat::{Next, Seat};
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
    Looked(Rank, Incarnation, Option<WorkerStatus>),
    Nothing,
}

pub(super) struct Supervisor {
    shared: Arc<Shared>,
    jobs: JoinSet<Done>,
}

impl Supervisor {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self { shared, jobs: JoinSet::new() }
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
                let next = self.change(rank, incarnation, |seat| seat.ended(exit, Instant::now(), &options));
                if let Some(Next::Restart(pause)) = next {
                    self.jobs.spawn(async move {
                        sleep(pause).await;
                        Done::PauseOver(rank, incarnation)
                    });
                }
            }
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
                let reached = self.change(rank, incarnation, |seat| {
                    let stale = seat.reached(channel, control, Instant::now(), &options);
                    stale.then(|| seat.member())
                });
                if let (Some(Some(member)), Some(on_restart)) = (reached, options.on_restart) {
                    let name = Arc::clone(&self.shared.name);
                    self.jobs.spawn(async move {
                        let warmed = match Solo::of(name, member) {
                            Ok(solo) => on_restart(solo, CallContext::within(WARM_WAIT)).await.map_err(Into::into),
                            Err(error) => Err(error),
                        };
                        Done::Warmed(rank, incarnation, warmed)
                    });
                }
            }
            Done::Connected(rank, incarnation, Err(error)) => {
                self.change(rank, incarnation, |seat| seat.last_error = Some(error.to_string()));
                // It cannot be used. Its end comes as an event, and is treated like any other.
                let shared = Arc::clone(&self.shared);
                self.jobs.spawn(async move {
                    let _ = shared.deployment.kill(rank).await;
                    Done::Nothing
                });
            }
            Done::Warmed(rank, incarnation, warmed) => {
                if let Err(error) = &warmed {
                    tracing::error!(group = %self.shared.name, rank, %error, "a restarted rank could not be made fit");
                }
                self.change(rank, incarnation, |seat| match warmed {
                    Ok(()) => seat.serve(Instant::now()),
                    Err(error) => seat.last_error = Some(error.to_string()),
                });
            }
            Done::PauseOver(rank, incarnation) => self.restart(rank, incarnation),
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

    /// Starts the life after `last`, unless somebody has already.
    fn restart(&mut self, rank: Rank, last: Incarnation) {
        let begun = self.change(rank, last, |seat| (seat.state == RankState::Dead).then(|| seat.restarting()));
        if let Some(Some(incarnation)) = begun {
            let shared = Arc::clone(&self.shared);
            self.jobs.spawn(async move {
                // What keeps it from starting comes as an event.
                if let Err(error) = shared.deployment.restart(&CallContext::default(), rank, incarnation).await {
                    tracing::error!(group = %shared.name, rank, %error, "a rank could not be started again");
                }
                Done::Nothing
            });
        }
    }

    fn restart_failed(&mut self) -> Restarts {
        let mut restarts = Restarts::default();
        let options = self.shared.options.clone();
        let mut due = Vec::new();
        for seat in self.shared.seats().iter_mut() {
            let (rank, state) = (seat.place.rank, seat.state);
            // A stale rank that failed to become fit is as good as dead.
            let unfit = state == RankState::Stale && seat.last_error.is_some();
            let pending = state == RankState::Dead && options.restart_on_failure;
            match state {
                // Its restart is paid for and waits for its pause, which ends now.
                RankState::Dead if pending => due.push((rank, seat.incarnation)),
                RankState::Dead => {
                    if seat.spend(&options) {
                        due.push((rank, seat.incarnation));
                    } else {
                        restarts.refused.push(rank);
                    }
                }
                RankState::Stale if unfit => {
                    if seat.spend(&options) {
                        seat.state = RankState::Dead;
                        due.push((rank, seat.incarnation));
                    } else {
                        restarts.refused.push(rank);
                    }
                }
                RankState::Retired => restarts.refused.push(rank),
                _ => {}
            }
        }
        for (rank, incarnation) in due {
            self.restart(rank, incarnation);
            restarts.begun.push(rank);
        }
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

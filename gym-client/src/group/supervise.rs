//! The task that keeps a group's ranks: hears what becomes of them, connects to them, looks at them, starts them again.

use std::collections::BTreeSet;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::stream::BoxStream;
use futures_util::{FutureExt, StreamExt};
use gym_core::{
    CallContext, Channel, ConnectOptions, Endpoint, Error, Gate, GroupView, Incarnation, Rank, RankExit, RankState,
    Request, Result, Route, STATUS_ROUTE, WorkerStatus,
};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, sleep};

use super::apart::Apart;
use super::options::GroupOptions;
use super::seat::{self, Next, Seat};
use super::turns::Share;
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
    pub(super) share: Option<Arc<Share>>,
    /// In rank order, from 0.
    seats: Mutex<Vec<Seat>>,
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
        Self { name, options, deployment, view, share: share.map(Arc::new), seats: Mutex::new(seats) }
    }

    /// What each of its calls passes.
    pub(super) fn gate(&self) -> Option<Arc<dyn Gate>> {
        self.share.clone().map(|share| share as Arc<dyn Gate>)
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
            .map_err(|error| Error::internal("the status cannot be read").caused_by(error))
    }
}

/// What a job of the supervisor's came to.
enum Done {
    Connected(Rank, Incarnation, Result<(Channel, Channel)>),
    /// These, which are tied, were to be made fit.
    Warmed(Vec<(Rank, Incarnation)>, Result<()>),
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
                let connecting = async move { connect(&transports, incarnation, &endpoints).await };
                self.spawn(connecting, move |connected| Done::Connected(rank, incarnation, connected));
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

    /// Has a job done. Others' code runs in it (transports, provisioners, methods): its panic is a failure, which is told like any
    /// other, since somebody waits for what came of the job.
    fn spawn<T>(
        &mut self,
        job: impl Future<Output = Result<T>> + Send + 'static,
        done: impl FnOnce(Result<T>) -> Done + Send + 'static,
    ) {
        let job = AssertUnwindSafe(job).catch_unwind();
        self.jobs.spawn(async move {
            let outcome = job.await.unwrap_or_else(|panic| {
                let text = panic.downcast_ref::<String>().map(String::as_str);
                let text = text.or_else(|| panic.downcast_ref::<&'static str>().copied()).unwrap_or("not a text");
                Err(Error::internal(format!("it panicked: {text}")))
            });
            done(outcome)
        });
    }

    /// Ends the processes of these. Their ends come as events.
    fn end(&mut self, lives: Vec<(Rank, Incarnation)>) {
        for (rank, life) in lives {
            let shared = Arc::clone(&self.shared);
            self.jobs.spawn(async move {
                // One that is not there needs no end, and the next one is not meant.
                let _ = shared.deployment.kill(rank, Some(life)).await;
                Done::Nothing
            });
        }
    }

    fn done(&mut self, done: Done) {
        let options = self.shared.options.clone();
        match done {
            Done::Connected(rank, incarnation, Ok((channel, control))) => {
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
                    self.end(vec![(rank, incarnation)]);
                }
            }
            Done::Warmed(lives, warmed) => {
                let ranks: Vec<Rank> = lives.iter().map(|(rank, _)| *rank).collect();
                if let Err(error) = &warmed {
                    tracing::error!(group = %self.shared.name, ?ranks, %error, "restarted ranks could not be made fit");
                }
                let warmed = warmed.map_err(|error| error.to_string());
                for (rank, incarnation) in lives {
                    self.change(rank, incarnation, |seat| seat.warmed(warmed.clone()));
                }
                if let Some(rank) = ranks.first() {
                    self.gather(*rank);
                }
            }
            Done::PauseOver(rank, incarnation) => self.restart(rank, incarnation),
            Done::Restarted(lives, begun) => {
                self.restarted(&lives);
                if let (Err(error), Some(&(rank, life))) = (begun, lives.first()) {
                    // No event comes of a life that was never begun, and all that are tied end with one.
                    let exit = RankExit::start_failed(life, format!("it could not be started again: {error}"));
                    self.happened(RankEvent::Exited { rank, exit });
                    // Some may have been begun, this one among them.
                    self.end(lives);
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
        if unfit.is_empty() {
            return;
        }
        let lives = unfit.iter().map(|member| (member.rank, member.incarnation)).collect();
        // By one call: they may meet inside it.
        let apart = Apart::of(Arc::clone(&self.shared.name), unfit, self.shared.gate());
        let warming = async move { on_restart(apart?, CallContext::within(WARM_WAIT)).await.map_err(Error::from) };
        self.spawn(warming, |warmed| Done::Warmed(lives, warmed));
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
        let again = lives.clone();
        // What keeps a single one from starting comes as an event.
        let restarting = async move { shared.deployment.restart(&CallContext::default(), &again).await };
        self.spawn(restarting, |begun| Done::Restarted(lives, begun));
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
            self.end(lives.to_vec());
        }
    }

    fn restart_failed(&mut self) -> Restarts {
        let mut restarts = Restarts::default();
        let options = self.shared.options.clone();
        let (mut due, mut over) = (Vec::new(), Vec::new());
        {
            let mut seats = self.shared.seats();
            let firsts: BTreeSet<(u32, Rank)> = seats.iter().map(|seat| (seat.place.tied, seat.place.rank)).collect();
            let mut seen = BTreeSet::new();
            for (_, rank) in firsts.into_iter().filter(|(tied, _)| seen.insert(*tied)) {
                let lives: Vec<_> =
                    seat::tied(&mut seats, rank).map(|seat| (seat.place.rank, seat.incarnation)).collect();
                let ranks = lives.iter().map(|(rank, _)| *rank);
                // Those that are tied are in the same state, but for one that failed to become fit: as good as dead.
                let unfit = seat::tied(&mut seats, rank).any(|seat| seat.state == RankState::Stale && seat.is_unfit());
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
                    // Those that are unfit live on until they are ended.
                    over.extend(lives.iter().copied().filter(|_| unfit));
                }
            }
        }
        for (rank, incarnation) in due {
            self.restart(rank, incarnation);
        }
        self.end(over);
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
            let look = async move { Shared::look(&control).await };
            self.spawn(look, move |looked| Done::Looked(rank, incarnation, looked.ok()));
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

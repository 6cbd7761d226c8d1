//! Ranks as tasks and threads of this process: for all-in-one programs, for tests, for a laptop.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::join_all;
use futures_util::stream::BoxStream;
use gym_core::{
    CallContext, Code, Error, ExitCause, InProcess, Incarnation, Listener, Rank, RankExit, Result, WorkerEnv,
    WorkerHost,
};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use super::events::{EventLog, RankEvent};
use super::usage::Usage;
use super::workers::Workers;
use super::{Deployment, LaunchSpec, MeetingPoint, Provisioner, RankPlace, of_rank};

/// Starts ranks in this process; they are reached through the switchboard, by names of their own.
///
/// Their environment variables are in [`WorkerEnv::variables`] only: a process has one environment.
#[derive(Clone, Debug)]
pub struct InProcessRanks {
    workers: Workers,
    switchboard: InProcess,
}

impl InProcessRanks {
    /// Ranks with these worker types, reached through `switchboard`, which the controller's transports must have too.
    #[must_use]
    pub fn new(workers: Workers, switchboard: InProcess) -> Self {
        Self { workers, switchboard }
    }
}

#[async_trait]
impl Provisioner for InProcessRanks {
    async fn launch(&self, cx: &CallContext, spec: LaunchSpec) -> Result<Box<dyn Deployment>> {
        cx.check()?;
        let subject = format!("start group {}", spec.group);
        self.workers.kind(&spec.worker).map_err(|error| error.about(subject.clone()))?;
        if spec.memory_limit_bytes.is_some() {
            let message = "a memory limit needs processes; ranks in one process share its memory";
            return Err(Error::not_started(Code::Unimplemented, message).about(subject));
        }
        let meeting = MeetingPoint::hold(spec.ranks.len(), &spec.ports).map_err(|error| error.about(subject))?;
        // Groups of one name may follow each other faster than the old one's names come free.
        static LAUNCHES: AtomicU64 = AtomicU64::new(1);
        let shared = Arc::new(Shared {
            launch: LAUNCHES.fetch_add(1, Ordering::Relaxed),
            workers: self.workers.clone(),
            switchboard: self.switchboard.clone(),
            spec,
            meeting,
            log: EventLog::new(),
            living: Mutex::default(),
        });
        for place in &shared.spec.ranks {
            Shared::start(&shared, place.clone(), Incarnation(1));
        }
        Ok(Box::new(InProcessDeployment(shared)))
    }
}

#[derive(Debug)]
struct InProcessDeployment(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    launch: u64,
    workers: Workers,
    switchboard: InProcess,
    spec: LaunchSpec,
    meeting: MeetingPoint,
    log: EventLog,
    living: Mutex<BTreeMap<Rank, Life>>,
}

/// A rank's present life: a task that makes the worker, serves it, and says how it ended.
#[derive(Debug)]
struct Life {
    incarnation: Incarnation,
    end: End,
    task: AbortOnDropHandle<()>,
}

/// How a life is ended from outside.
#[derive(Clone, Debug, Default)]
struct End {
    /// Calls that run may finish.
    ask: CancellationToken,
    kill: CancellationToken,
}

impl Shared {
    fn start(this: &Arc<Self>, place: RankPlace, incarnation: Incarnation) {
        let (rank, end) = (place.rank, End::default());
        let (shared, ends) = (Arc::clone(this), end.clone());
        let task = AbortOnDropHandle::new(tokio::spawn(async move {
            shared.log.push(RankEvent::Started { rank, incarnation, pid: None });
            let exit = shared.live(&place, incarnation, &ends).await;
            shared.log.push(RankEvent::Exited { rank, exit });
        }));
        this.lock().insert(rank, Life { incarnation, end, task });
    }

    async fn live(&self, place: &RankPlace, incarnation: Incarnation, end: &End) -> RankExit {
        let made = tokio::select! { biased;
            () = end.kill.cancelled() => return RankExit::new(incarnation, ExitCause::Died),
            () = end.ask.cancelled() => return RankExit::new(incarnation, ExitCause::Stopped),
            made = tokio::time::timeout(self.spec.start_timeout, self.make(place, incarnation)) => made,
        };
        let (host, listener) = match made {
            Ok(Ok(made)) => made,
            Ok(Err(error)) => return RankExit::start_failed(incarnation, error.to_string()),
            Err(_) => return RankExit::not_ready(incarnation, self.spec.start_timeout),
        };
        let endpoints = listener.endpoints().to_vec();
        self.log.push(RankEvent::Ready { rank: place.rank, incarnation, endpoints });
        // A kill breaks the connections below; until then calls that run have all the time they want.
        let serving = crate::serve(listener, Arc::new(host.clone()), end.ask.clone(), Duration::MAX);
        tokio::select! { biased;
            () = end.kill.cancelled() => {
                host.kill();
                RankExit::new(incarnation, ExitCause::Died)
            }
            _ = serving => {
                let _ = host.stop(Duration::ZERO).await;
                RankExit::new(incarnation, ExitCause::Stopped)
            }
        }
    }

    async fn make(&self, place: &RankPlace, incarnation: Incarnation) -> Result<(WorkerHost, Box<dyn Listener>)> {
        let kind = self.workers.kind(&self.spec.worker)?;
        let (variables, init) = of_rank(kind, &self.spec, place, &self.meeting.rendezvous)?;
        let mut env = WorkerEnv::new(Arc::clone(&self.spec.group), place.rank, place.world_size);
        env.local_rank = place.local_rank;
        env.node_rank = place.node_rank;
        env.incarnation = incarnation;
        env.variables = variables;
        let host = kind.start(env, init).await?;
        let name = format!("{}.{}/{}/{incarnation}", self.spec.group, self.launch, place.rank);
        Ok((host, Box::new(self.switchboard.listen(&name)?)))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<Rank, Life>> {
        self.living.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn no_such(&self, rank: Rank) -> Error {
        Error::not_started(Code::NotFound, format!("group {} has no rank {rank}", self.spec.group))
    }
}

impl Life {
    /// Ends it as a crash would, without asking first: it must not look like a stop. Returns when it is over.
    async fn kill(self) {
        self.end.kill.cancel();
        let _ = self.task.await;
    }

    /// Ends it, and returns when it is over.
    async fn finish(self, grace: Duration) {
        let Self { end, task, .. } = self;
        end.ask.cancel();
        let mut task = task;
        if tokio::time::timeout(grace, &mut task).await.is_err() {
            end.kill.cancel();
            let _ = task.await;
        }
    }
}

#[async_trait]
impl Deployment for InProcessDeployment {
    fn events(&self) -> BoxStream<'static, RankEvent> {
        self.0.log.stream()
    }

    async fn restart(&self, cx: &CallContext, lives: &[(Rank, Incarnation)]) -> Result<()> {
        cx.check()?;
        let place_of = |rank: Rank| self.0.spec.ranks.iter().find(|place| place.rank == rank).cloned();
        let places =
            lives.iter().map(|(rank, life)| Ok((place_of(*rank).ok_or_else(|| self.0.no_such(*rank))?, *life)));
        let places = places.collect::<Result<Vec<_>>>()?;
        let old: Vec<Life> = {
            let mut living = self.0.lock();
            lives.iter().filter_map(|(rank, _)| living.remove(rank)).collect()
        };
        join_all(old.into_iter().map(Life::kill)).await;
        for (place, life) in places {
            Shared::start(&self.0, place, life);
        }
        Ok(())
    }

    async fn kill(&self, rank: Rank) -> Result<()> {
        let life = self.0.lock().remove(&rank);
        let life = life.ok_or_else(|| self.0.no_such(rank))?;
        tracing::debug!(group = %self.0.spec.group, rank, incarnation = %life.incarnation, "killed");
        life.kill().await;
        Ok(())
    }

    fn usage(&self) -> BTreeMap<Rank, Usage> {
        BTreeMap::new()
    }

    async fn shutdown(&self, grace: Duration) -> Result<()> {
        let lives = std::mem::take(&mut *self.0.lock());
        join_all(lives.into_values().map(|life| life.finish(grace))).await;
        Ok(())
    }
}

//! Ranks as child processes of this one, on this machine.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::{join_all, try_join_all};
use futures_util::stream::BoxStream;
use gym_core::cluster::ProfilerRequest;
use gym_core::{CallContext, Code, Error, Incarnation, Ladder, Rank, RankExit, Result};
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::task::AbortOnDropHandle;

use super::events::{EventLog, RankEvent};
use super::gpu::GpuMeter;
use super::handshake::{Assignment, token};
use super::listen::{Doors, Listen};
use super::process::{Birth, Process, Switchboard};
use super::usage::{Meter, Units, Usage};
use super::workers::{Workers, entered};
use super::{Deployment, LaunchSpec, MeetingPoint, Provisioner, RankPlace, of_rank};
use crate::launch::family::Stat;
use crate::launch::{Launcher, LineSink, prefixed};

/// Pause between two samples of a group with a memory limit that only sampling keeps. A pass costs some ten microseconds for
/// each process of the machine; a worker that allocates 1 GB/s is seen within 250 MB of its limit.
const GUARD_PERIOD: Duration = Duration::from_millis(250);
/// Pause between two samples that are for reading only.
const SAMPLE_PERIOD: Duration = Duration::from_secs(1);
/// Share of the limit from which on a warning is due.
const HIGH_SHARE: f64 = 0.9;

/// Starts ranks as processes of the running program, or of another one that registers the same worker types.
///
/// Worker types whose name fits `NRL_NSYS_WORKER_PATTERNS` (of the group's variables, or this process's) run under Nsight Systems, see
/// [`ProfilerRequest`].
#[derive(Clone, Debug)]
pub struct Local {
    workers: Workers,
    options: LocalOptions,
}

/// How local processes are run.
#[derive(Clone)]
#[non_exhaustive]
pub struct LocalOptions {
    /// The program that becomes workers; its `main` must call [`Workers::enter`] first. Default: the running one, which stays
    /// right when its file is replaced meanwhile.
    pub program: Option<PathBuf>,
    /// How the workers are reached.
    pub listen: Listen,
    /// Where the workers' output goes. Default: our standard error, each line with its worker's name.
    pub lines: LineSink,
}

impl Default for LocalOptions {
    fn default() -> Self {
        Self { program: None, listen: Listen::default(), lines: prefixed(std::io::stderr()) }
    }
}

impl fmt::Debug for LocalOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalOptions")
            .field("program", &self.program)
            .field("listen", &self.listen)
            .finish_non_exhaustive()
    }
}

impl Local {
    /// Processes of the running program, with these worker types.
    #[must_use]
    pub fn new(workers: Workers) -> Self {
        Self { workers, options: LocalOptions::default() }
    }

    /// The same with other options.
    #[must_use]
    pub fn with(mut self, options: LocalOptions) -> Self {
        self.options = options;
        self
    }
}

#[async_trait]
impl Provisioner for Local {
    async fn launch(&self, cx: &CallContext, mut spec: LaunchSpec) -> Result<Box<dyn Deployment>> {
        cx.check()?;
        let subject = format!("start group {}", spec.group);
        self.workers.kind(&spec.worker).map_err(|error| error.about(subject.clone()))?;
        if self.options.program.is_none() && !entered() {
            let message = "call Workers::enter() as the first line of main, so that this program can become a worker, \
                           or name a program that does in LocalOptions::program";
            return Err(Error::not_started(Code::FailedPrecondition, message).about(subject));
        }
        let asked = |name: &str| spec.variables.get(name).cloned().or_else(|| std::env::var(name).ok());
        let profiler = ProfilerRequest::from_variables(asked)
            .map_err(|error| Error::invalid(error.to_string()).about(subject.clone()))?;
        let runner = profiler.and_then(|profiler| profiler.command_for(&spec.worker)).unwrap_or_default();
        let board = Switchboard::default();
        let launcher = Launcher::builder().lines(board.sink(Arc::clone(&self.options.lines))).build();
        let launcher = launcher
            .map_err(|error| Error::not_started(Code::FailedPrecondition, error.to_string()).about(subject.clone()))?;
        let meeting =
            MeetingPoint::hold(spec.ranks.len(), &spec.ports).map_err(|error| error.about(subject.clone()))?;
        let doors = Doors::open(self.options.listen, spec.ladder.as_ref()).map_err(|error| error.about(subject))?;
        if matches!(doors, Doors::Ucx(_)) {
            // So that the workers' environment has what UCX reads at its load.
            spec.ladder.get_or_insert_with(Ladder::auto);
        }
        let shared = Arc::new(Shared {
            workers: self.workers.clone(),
            program: match &self.options.program {
                Some(program) => program.clone(),
                // Under a runner that link is the runner's.
                None if !runner.is_empty() => std::env::current_exe()
                    .map_err(|error| Error::internal("cannot find this program's file").caused_by(error))?,
                None => Path::new("/proc/self/exe").to_owned(),
            },
            runner,
            doors,
            spec,
            meeting,
            launcher,
            board,
            log: EventLog::new(),
            living: Mutex::default(),
        });
        join_all(shared.spec.ranks.iter().map(|place| shared.start(place, Incarnation(1)))).await;
        let sampler = AbortOnDropHandle::new(tokio::spawn(sample(Arc::clone(&shared))));
        Ok(Box::new(LocalDeployment { shared, _sampler: sampler }))
    }
}

/// The processes of one group.
#[derive(Debug)]
struct LocalDeployment {
    shared: Arc<Shared>,
    _sampler: AbortOnDropHandle<()>,
}

struct Shared {
    workers: Workers,
    program: PathBuf,
    runner: Vec<String>,
    doors: Doors,
    spec: LaunchSpec,
    meeting: MeetingPoint,
    launcher: Launcher,
    board: Switchboard,
    log: EventLog,
    living: Mutex<BTreeMap<Rank, Life>>,
}

/// A rank's present process, and what it was last seen to use.
#[derive(Debug)]
struct Life {
    process: Arc<Process>,
    meter: Meter,
    usage: Option<Usage>,
    warned: bool,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("group", &self.spec.group).field("living", &self.living).finish_non_exhaustive()
    }
}

impl Shared {
    fn living(&self) -> MutexGuard<'_, BTreeMap<Rank, Life>> {
        self.living.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts one life. A failure is an event like any other end.
    async fn start(&self, place: &RankPlace, incarnation: Incarnation) {
        let started = match self.birth(place, incarnation) {
            Ok(birth) => Process::start(&self.launcher, &self.board, &self.log, birth).await,
            Err(error) => Err(RankExit::start_failed(incarnation, error.to_string())),
        };
        match started {
            Ok(process) => {
                let meter = Meter::new(i32::try_from(process.pid).unwrap_or(0));
                let life = Life { process: Arc::new(process), meter, usage: None, warned: false };
                self.living().insert(place.rank, life);
            }
            Err(exit) => self.log.push(RankEvent::Exited { rank: place.rank, exit }),
        }
    }

    fn birth(&self, place: &RankPlace, incarnation: Incarnation) -> Result<Birth> {
        let kind = self.workers.kind(&self.spec.worker)?;
        let (environment, init) = of_rank(kind, &self.spec, place, &self.meeting.rendezvous)?;
        Ok(Birth {
            name: place.name.clone(),
            program: self.program.clone(),
            runner: self.runner.clone(),
            environment,
            assignment: Assignment {
                worker: self.spec.worker.clone(),
                group: self.spec.group.to_string(),
                rank: place.rank,
                world_size: place.world_size,
                local_rank: place.local_rank,
                node_rank: place.node_rank,
                incarnation: incarnation.0,
                token: token(),
                door: self.doors.of(place.rank, incarnation),
                init,
            },
            memory_limit_bytes: self.spec.memory_limit_bytes,
            start_timeout: self.spec.start_timeout,
        })
    }

    fn process(&self, rank: Rank) -> Option<Arc<Process>> {
        self.living().get(&rank).map(|life| Arc::clone(&life.process))
    }

    /// One sample of every life; kills those that use more than they may.
    fn measure(&self, processes: &BTreeMap<i32, Stat>, gpu: Option<&GpuMeter>, now: Instant, units: Units) {
        for (rank, life) in self.living().iter_mut() {
            life.usage = life.meter.sample(processes, gpu, now, units);
            let (Some(usage), Some(limit_bytes)) = (life.usage, life.process.limit()) else { continue };
            let resident_bytes = usage.resident_bytes;
            if life.process.sampled_limit().is_some() && resident_bytes > limit_bytes {
                life.process.exceeded(resident_bytes, limit_bytes);
            }
            #[expect(clippy::cast_precision_loss, reason = "a threshold of a tenth")]
            if !life.warned && resident_bytes as f64 > HIGH_SHARE * limit_bytes as f64 {
                life.warned = true;
                let incarnation = life.process.incarnation;
                tracing::warn!(group = %self.spec.group, rank, resident_bytes, limit_bytes, "nearly at its memory limit");
                self.log.push(RankEvent::MemoryHigh { rank: *rank, incarnation, resident_bytes, limit_bytes });
            }
        }
    }
}

/// Measures until it is aborted.
async fn sample(shared: Arc<Shared>) {
    let units = Units::of_this_machine();
    let gpu = GpuMeter::start();
    let period = if shared.spec.memory_limit_bytes.is_some() { GUARD_PERIOD } else { SAMPLE_PERIOD };
    let mut tick = tokio::time::interval(period);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tick.tick().await;
        // Reading `/proc` may wait for a lock of the kernel's; not on a thread that answers calls.
        let Ok(Ok(processes)) = tokio::task::spawn_blocking(Stat::all).await else { continue };
        shared.measure(&processes, gpu.as_ref(), Instant::now(), units);
    }
}

fn no_such(rank: Rank, group: &str) -> Error {
    Error::not_started(Code::NotFound, format!("group {group} has no rank {rank}"))
}

#[async_trait]
impl Deployment for LocalDeployment {
    fn events(&self) -> BoxStream<'static, RankEvent> {
        self.shared.log.stream()
    }

    async fn restart(&self, cx: &CallContext, lives: &[(Rank, Incarnation)]) -> Result<()> {
        cx.check()?;
        let shared = &self.shared;
        let place_of = |rank: Rank| {
            let place = shared.spec.ranks.iter().find(|place| place.rank == rank);
            place.ok_or_else(|| no_such(rank, &shared.spec.group))
        };
        let places = lives.iter().map(|(rank, life)| Ok((place_of(*rank)?, *life))).collect::<Result<Vec<_>>>()?;
        let old: Vec<Arc<Process>> = lives.iter().filter_map(|(rank, _)| shared.process(*rank)).collect();
        try_join_all(old.iter().map(|process| process.stop(Duration::ZERO)))
            .await
            .map_err(|error| Error::internal(error.to_string()))?;
        join_all(places.into_iter().map(|(place, life)| shared.start(place, life))).await;
        Ok(())
    }

    async fn kill(&self, rank: Rank, life: Option<Incarnation>) -> Result<()> {
        let process = self.shared.process(rank).filter(|process| life.is_none_or(|life| process.incarnation == life));
        let process = process.ok_or_else(|| no_such(rank, &self.shared.spec.group))?;
        process.crash().map_err(|error| Error::internal(format!("kill rank {rank}")).caused_by(error))
    }

    fn usage(&self) -> BTreeMap<Rank, Usage> {
        self.shared.living().iter().filter_map(|(rank, life)| Some((*rank, life.usage?))).collect()
    }

    async fn shutdown(&self, grace: Duration) -> Result<()> {
        let processes: Vec<Arc<Process>> =
            self.shared.living().values().map(|life| Arc::clone(&life.process)).collect();
        let stopped = join_all(processes.iter().map(|process| process.stop(grace))).await;
        let closed = self.shared.launcher.shutdown(grace).await;
        stopped
            .into_iter()
            .chain([closed])
            .collect::<Result<(), _>>()
            .map_err(|error| Error::internal(error.to_string()).about(format!("stop group {}", self.shared.spec.group)))
    }
}

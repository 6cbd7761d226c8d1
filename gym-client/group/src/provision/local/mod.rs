//! Runs ranks as child processes on this machine.

mod address;
mod affinity;
mod cgroup;
mod handshake;
mod process;
mod worker;

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use address::ListenAddresses;
use async_trait::async_trait;
use futures_util::future::{join_all, try_join_all};
use futures_util::stream::BoxStream;
use gym_client::launch::ProcessTree;
use gym_client::launch::{Launcher, LineSink, prefixed};
use gym_core::base::process::{OWN_PROGRAM, ProcessTable};
use gym_core::base::raise_descriptors;
use gym_core::group::{Rank, RankExit};
use gym_core::transport::TransportPolicy;
use gym_core::{CallContext, Code, Error, Incarnation, Result};
use handshake::{WorkerAssignment, token};
use parking_lot::Mutex;
use process::{PendingHandshakes, ProcessStart, RankProcess};
use serde_json::value::RawValue;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;
use worker::entered;

use crate::placement::{CommunicationBackend, ProfilerRequest};
use crate::provision::deployment::{Deployment, LaunchSpec, Provisioner, Reservation, ReserveRequest};
use crate::provision::events::{EventLog, RankEvent};
use crate::provision::machine::{MachineReservation, PreparedRanks, PreparesRanks};
use crate::provision::place::{GpuFolder, HeldPlace, RankPlace, Rendezvous};
use crate::provision::variables::RankEnvironment;
use crate::provision::workers::{Workers, start_inputs};
use crate::usage::gpu::GpuSampler;
use crate::usage::process::{ProcessSample, ProcessUsage, UsageMeter};

pub(super) use {handshake::WORKER_ROLE, worker::set_entered};

/// Pause between two samples of a group whose memory limit is enforced only by sampling. A sample costs some ten microseconds for
/// each process of the machine. A worker that allocates 1 GB/s is detected within 250 MB of its limit.
const GUARD_INTERVAL: Duration = Duration::from_millis(250);
/// Pause between two samples that are only reported.
const SAMPLE_INTERVAL: Duration = Duration::from_secs(1);
/// Default time between SIGTERM and SIGKILL for the ranks of a program that died.
const ORPHAN_TIMEOUT: Duration = Duration::from_secs(3);
/// The pause after a look is at least this many times as long as the look. The proportional size of a rank with 100 GB in small pages takes seconds.
const REST: u32 = 4;

/// Starts ranks as processes of the running program, or of another program that registers the same worker types.
///
/// Worker types whose name matches `NRL_NSYS_WORKER_PATTERNS` run under Nsight Systems; see [`ProfilerRequest`]. The variable is
/// read from the group's variables, or else from this process.
///
/// ```no_run
/// use gym_client::launch::prefixed;
/// use gym_group::placement::ClusterSpec;
/// use gym_group::prelude::*;
/// use gym_group::{Local, LocalOptions, VirtualCluster, WorkerKind, Workers};
/// # struct Counter(u64);
/// # worker! {
/// #     impl Worker for Counter as counter {
/// #         fn start(_: WorkerEnv, from: u64) -> Result<Self> { Ok(Self(from)) }
/// #         exclusive async fn add(&mut self, _: &CallContext, call: Payload<u64>) -> Result<Payload<u64>> {
/// #             self.0 += call.value;
/// #             Ok(self.0.into())
/// #         }
/// #     }
/// # }
///
/// fn main() -> Result<(), Box<dyn std::error::Error>> {
///     let workers = Workers::new().with("counter", WorkerKind::of::<Counter>());
///     workers.enter(); // the first line: in a worker process it does not return
///     let mut options = LocalOptions::default();
///     options.lines = prefixed(std::fs::File::create("workers.log")?);
///     let cluster = VirtualCluster::new(ClusterSpec::new([8]), Local::new(workers).with(options))?;
///     // … the groups of the cluster
///     Ok(())
/// }
/// ```
#[derive(Clone, Debug)]
pub struct Local {
    workers: Workers,
    options: LocalOptions,
}

/// Options of local worker processes, with an example at [`Local`].
#[derive(Clone)]
#[non_exhaustive]
pub struct LocalOptions {
    /// The program to run as workers; its `main` must call [`Workers::enter`] first. Default: the running program, even if its
    /// file has been replaced.
    pub program: Option<PathBuf>,
    /// The host of the workers' listen addresses. Default: none; workers listen at Unix sockets that only this user can open.
    pub host: Option<String>,
    /// The transport policy if the group's configuration has none. Default: [`TransportPolicy::unconfigured`].
    pub transport: TransportPolicy,
    /// Receives the workers' output. Default: our standard error, each line with its worker's name.
    pub lines: LineSink,
    /// Time between SIGTERM and SIGKILL for the ranks of a program that died.
    pub(super) orphan_grace: Duration,
}

impl Default for LocalOptions {
    fn default() -> Self {
        Self {
            program: None,
            host: None,
            transport: TransportPolicy::unconfigured(),
            lines: prefixed(std::io::stderr()),
            orphan_grace: ORPHAN_TIMEOUT,
        }
    }
}

impl fmt::Debug for LocalOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalOptions").field("program", &self.program).field("host", &self.host).finish_non_exhaustive()
    }
}

impl Local {
    /// Creates a provisioner that runs the current program with these worker types.
    #[must_use]
    pub fn new(workers: Workers) -> Self {
        Self { workers, options: LocalOptions::default() }
    }

    /// Replaces the options.
    #[must_use]
    pub fn with(mut self, options: LocalOptions) -> Self {
        self.options = options;
        self
    }
}

#[async_trait]
impl Provisioner for Local {
    async fn reserve(&self, cx: &CallContext, request: &ReserveRequest) -> Result<Arc<dyn Reservation>> {
        MachineReservation::reserve(self.clone(), cx, request).await
    }
}

#[async_trait]
impl PreparesRanks for Local {
    async fn prepare(
        &self,
        cx: &CallContext,
        mut spec: LaunchSpec,
        rendezvous: Rendezvous,
        held: Option<HeldPlace>,
    ) -> Result<Arc<dyn PreparedRanks>> {
        cx.check()?;
        let subject = format!("start group {}", spec.group);
        self.workers.kind(&spec.worker).map_err(|error| error.about(subject.clone()))?;
        if self.options.program.is_none() && !entered() {
            let message = "call Workers::enter() as the first line of main, so that this program can become a worker, \
                           or name a program that does in LocalOptions::program";
            return Err(Error::not_started(Code::FailedPrecondition, message).about(subject));
        }
        let given = [Some(&spec.variables), spec.controller.as_ref()];
        let asked = |name: &str| {
            let given = given.iter().flatten().find_map(|variables| variables.get(name));
            given.cloned().or_else(|| std::env::var(name).ok())
        };
        // A rank takes seven: its output, its process, and its connections.
        raise_descriptors();
        let profiler = ProfilerRequest::from_variables(asked)
            .map_err(|error| Error::invalid(error.to_string()).about(subject.clone()))?;
        let runner = profiler.and_then(|profiler| profiler.command_for(&spec.worker)).unwrap_or_default();
        let handshakes = PendingHandshakes::default();
        let lines = handshakes.sink(Arc::clone(&self.options.lines));
        let launcher = Launcher::builder().lines(lines).orphan_grace(self.options.orphan_grace);
        // However this program ends, nobody gets these GPUs before the ranks have ended.
        let gpus = spec.ranks.iter().flat_map(|place| &place.gpus);
        let launcher = launcher.locks(GpuFolder::of_this_machine().rank_files(gpus)).build();
        let launcher = launcher
            .map_err(|error| Error::not_started(Code::FailedPrecondition, error.to_string()).about(subject.clone()))?;
        let policy = spec.transport_policy.get_or_insert_with(|| self.options.transport.clone()).clone();
        let transports = self.workers.transports().with_policy(policy);
        transports.check_required().await.map_err(|error| error.about(subject.clone()))?;
        // Who asks for TCP does not get Unix sockets.
        let loopback = (spec.collectives.backend == CommunicationBackend::Tcp).then_some("127.0.0.1");
        let host = self.options.host.as_deref().or(loopback);
        let addresses = ListenAddresses::open(host, &transports).map_err(|error| error.about(subject))?;
        let state = Arc::new(LocalState {
            workers: self.workers.clone(),
            program: match &self.options.program {
                Some(program) => program.clone(),
                // Under a runner, that link points to the runner.
                None if !runner.is_empty() => std::env::current_exe()
                    .map_err(|error| Error::internal("cannot find this program's file").caused_by(error))?,
                None => Path::new(OWN_PROGRAM).to_owned(),
            },
            runner,
            addresses,
            spec,
            rendezvous: Mutex::new(rendezvous),
            launcher,
            handshakes,
            log: EventLog::new(),
            live: Mutex::default(),
        });
        let sampler = AbortOnDropHandle::new(tokio::spawn(sample(Arc::clone(&state))));
        Ok(Arc::new(LocalDeployment { state, _held: held, _sampler: sampler }))
    }

    fn now(&self) -> Duration {
        gym_core::base::process::since_boot()
    }
}

/// The processes of one group.
#[derive(Debug)]
struct LocalDeployment {
    state: Arc<LocalState>,
    /// The ports of the rendezvous and the GPUs, if this process holds them for the group.
    _held: Option<HeldPlace>,
    _sampler: AbortOnDropHandle<()>,
}

struct LocalState {
    workers: Workers,
    program: PathBuf,
    runner: Vec<String>,
    addresses: ListenAddresses,
    spec: LaunchSpec,
    rendezvous: Mutex<Rendezvous>,
    launcher: Launcher,
    handshakes: PendingHandshakes,
    log: EventLog,
    live: Mutex<BTreeMap<Rank, LocalRank>>,
}

/// The current process of a rank, and its last sampled usage.
#[derive(Debug)]
struct LocalRank {
    process: Arc<RankProcess>,
    meter: UsageMeter,
    usage: Option<ProcessUsage>,
    warned: bool,
}

impl fmt::Debug for LocalState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalState").field("group", &self.spec.group).field("live", &self.live).finish_non_exhaustive()
    }
}

impl LocalState {
    /// Starts one incarnation. If it fails, the failure is reported as an exit event.
    async fn start(&self, place: &RankPlace, incarnation: Incarnation) {
        let started = match self.process_start(place, incarnation) {
            Ok(process_start) => RankProcess::start(&self.launcher, &self.handshakes, &self.log, process_start).await,
            Err(error) => Err(RankExit::start_failed(incarnation, error.to_string())),
        };
        match started {
            Ok(process) => {
                let meter = UsageMeter::default();
                let started = LocalRank { process: Arc::new(process), meter, usage: None, warned: false };
                self.live.lock().insert(place.rank, started);
            }
            Err(exit) => self.log.push(RankEvent::Exited { rank: place.rank, exit }),
        }
    }

    /// Returns what a rank is started with.
    fn inputs(&self, place: &RankPlace) -> Result<(RankEnvironment, Box<RawValue>)> {
        let kind = self.workers.kind(&self.spec.worker)?;
        let rendezvous = self.rendezvous.lock().clone();
        start_inputs(kind, &self.workers.transports(), &self.spec, place, &rendezvous)
    }

    fn process_start(&self, place: &RankPlace, incarnation: Incarnation) -> Result<ProcessStart> {
        let (environment, init) = self.inputs(place)?;
        Ok(ProcessStart {
            name: place.name.clone(),
            program: self.program.clone(),
            runner: self.runner.clone(),
            environment: environment.into_variables(),
            assignment: WorkerAssignment {
                worker: self.spec.worker.clone(),
                group: self.spec.group.to_string(),
                rank: place.rank,
                world_size: place.world_size,
                local_rank: place.local_rank,
                node_rank: place.node_rank,
                incarnation: incarnation.0,
                token: token(),
                address: self.addresses.of(place.rank, incarnation),
                collectives: self.spec.collectives,
                init,
            },
            memory_limit_bytes: self.spec.memory_limit_bytes,
            start_timeout: self.spec.start_timeout,
        })
    }

    fn place(&self, rank: Rank) -> Result<&RankPlace> {
        let place = self.spec.ranks.iter().find(|place| place.rank == rank);
        place.ok_or_else(|| no_such(rank, &self.spec.group))
    }

    fn process(&self, rank: Rank) -> Option<Arc<RankProcess>> {
        self.live.lock().get(&rank).map(|live| Arc::clone(&live.process))
    }

    /// Returns what the next samples need: which processes, and above which memory it is measured precisely.
    fn looks(&self) -> Vec<RankLook> {
        let live = self.live.lock();
        let look = |(rank, live): (&Rank, &LocalRank)| RankLook {
            rank: *rank,
            incarnation: live.process.incarnation,
            tree: live.process.tree(),
            precise_above: live.process.limit().map_or(u64::MAX, high_bytes),
        };
        live.iter().map(look).collect()
    }

    /// Adds a sample of an incarnation, and kills it if it exceeds its limit.
    fn measure(&self, look: &RankLook, sample: Option<&ProcessSample>, gpu: Option<&GpuSampler>, now: Instant) {
        let (mut live, RankLook { rank, incarnation, .. }) = (self.live.lock(), look);
        let Some(live) = live.get_mut(rank).filter(|live| live.process.incarnation == *incarnation) else { return };
        live.usage = sample.map(|sample| live.meter.add(sample, gpu, now));
        let (Some(usage), Some(limit_bytes)) = (live.usage, live.process.limit()) else { return };
        let resident_bytes = usage.counted_bytes.unwrap_or(usage.resident_bytes);
        if live.process.sampled_limit().is_some() && resident_bytes > limit_bytes {
            live.process.exceeded(resident_bytes, limit_bytes);
        }
        if !live.warned && resident_bytes > high_bytes(limit_bytes) {
            live.warned = true;
            let (rank, incarnation) = (*rank, *incarnation);
            tracing::warn!(group = %self.spec.group, rank, resident_bytes, limit_bytes, "nearly at its memory limit");
            self.log.push(RankEvent::MemoryHigh { rank, incarnation, resident_bytes, limit_bytes });
        }
    }
}

/// The next sample of a rank.
struct RankLook {
    rank: Rank,
    incarnation: Incarnation,
    tree: ProcessTree,
    precise_above: u64,
}

/// Returns nine tenths of a limit: the memory above which a warning is reported, and above which it is measured precisely.
fn high_bytes(limit_bytes: u64) -> u64 {
    limit_bytes - limit_bytes / 10
}

/// Takes samples until it is aborted.
async fn sample(state: Arc<LocalState>) {
    let gpu = GpuSampler::shared();
    let period = if state.spec.memory_limit_bytes.is_some() { GUARD_INTERVAL } else { SAMPLE_INTERVAL };
    loop {
        let (begin, looks) = (Instant::now(), state.looks());
        let take = move || {
            let table = ProcessTable::read()?;
            let take = |look: RankLook| {
                let sample = ProcessSample::take(&table, &look.tree, look.precise_above);
                (look, sample)
            };
            Ok::<_, std::io::Error>(looks.into_iter().map(take).collect::<Vec<_>>())
        };
        // Reading `/proc` may wait for a kernel lock, so it does not run on a thread that answers calls.
        if let Ok(Ok(taken)) = tokio::task::spawn_blocking(take).await {
            let now = Instant::now();
            taken.iter().for_each(|(look, sample)| state.measure(look, sample.as_ref(), gpu.as_deref(), now));
        }
        tokio::time::sleep(period.max(begin.elapsed() * REST)).await;
    }
}

fn no_such(rank: Rank, group: &str) -> Error {
    Error::not_started(Code::NotFound, format!("group {group} has no rank {rank}"))
}

#[async_trait]
impl PreparedRanks for LocalDeployment {
    async fn start(&self, incarnations: &[(Rank, Incarnation)], rendezvous: Option<Rendezvous>) -> Result<()> {
        let state = &self.state;
        let places = incarnations
            .iter()
            .map(|(rank, incarnation)| Ok((state.place(*rank)?, *incarnation)))
            .collect::<Result<Vec<_>>>()?;
        if let Some(rendezvous) = rendezvous {
            *state.rendezvous.lock() = rendezvous;
        }
        let started =
            |rank: Rank, incarnation| state.process(rank).is_some_and(|process| process.incarnation >= incarnation);
        let due = places.into_iter().filter(|(place, incarnation)| !started(place.rank, *incarnation));
        join_all(due.map(|(place, incarnation)| state.start(place, incarnation))).await;
        Ok(())
    }

    async fn end(&self, ranks: &[Rank]) -> Result<()> {
        let old: Vec<Arc<RankProcess>> = ranks.iter().filter_map(|rank| self.state.process(*rank)).collect();
        let ended = try_join_all(old.iter().map(|process| process.stop(Duration::ZERO))).await;
        ended.map(drop).map_err(|error| Error::internal(error.to_string()))
    }

    /// See [`Launcher::lease`].
    async fn lease(&self, until: Duration) {
        self.state.launcher.lease(until).await;
    }
}

#[async_trait]
impl Deployment for LocalDeployment {
    fn events(&self) -> BoxStream<'static, RankEvent> {
        self.state.log.stream()
    }

    async fn restart(&self, cx: &CallContext, incarnations: &[(Rank, Incarnation)]) -> Result<()> {
        cx.check()?;
        incarnations.iter().try_for_each(|(rank, _)| self.state.place(*rank).map(drop))?;
        self.end(&incarnations.iter().map(|(rank, _)| *rank).collect::<Vec<_>>()).await?;
        self.start(incarnations, None).await
    }

    async fn kill(&self, rank: Rank, incarnation: Option<Incarnation>) -> Result<()> {
        let process = self
            .state
            .process(rank)
            .filter(|process| incarnation.is_none_or(|incarnation| process.incarnation == incarnation));
        let process = process.ok_or_else(|| no_such(rank, &self.state.spec.group))?;
        process.crash().map_err(|error| Error::internal(format!("kill rank {rank}")).caused_by(error))
    }

    fn usage(&self) -> BTreeMap<Rank, ProcessUsage> {
        self.state.live.lock().iter().filter_map(|(rank, live)| Some((*rank, live.usage?))).collect()
    }

    async fn environment(&self, cx: &CallContext, rank: Rank) -> Result<RankEnvironment> {
        cx.check()?;
        Ok(self.state.inputs(self.state.place(rank)?)?.0)
    }

    async fn shutdown(&self, grace: Duration) -> Result<()> {
        let processes: Vec<Arc<RankProcess>> =
            self.state.live.lock().values().map(|live| Arc::clone(&live.process)).collect();
        let stopped = join_all(processes.iter().map(|process| process.stop(grace))).await;
        let closed = self.state.launcher.shutdown(grace).await;
        stopped
            .into_iter()
            .chain([closed])
            .collect::<Result<(), _>>()
            .map_err(|error| Error::internal(error.to_string()).about(format!("stop group {}", self.state.spec.group)))
    }
}

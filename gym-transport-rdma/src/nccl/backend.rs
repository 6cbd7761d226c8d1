//! NCCL as a backend of collective operations.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};

use async_trait::async_trait;
use bytes::Bytes;
use gym_core::group::Rank;
use gym_core::group::collective::{
    Agreed, Buffer, Call, CollectiveReport, Collectives, Communicator, DeviceMemory, DevicePath, Meeting, Memory,
    Transfer,
};
use gym_core::{CallContext, Code, Error, Execution, Handler, Result};
use serde::{Deserialize, Serialize};

use crate::machine::LoadOptions;
use crate::nccl::cuda::CudaDevice;
use crate::nccl::engine::Engine;
use crate::nccl::failure::{again, no_gpu};
use crate::nccl::path::{NcclPath, RankDevice};
use crate::nccl::raw::Communication;
use crate::nccl::{NcclError, NcclVersion, UniqueId};

/// Which libraries and which GPU a rank uses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct NcclOptions {
    /// Where NCCL is. Default: as [`Nccl::load`](crate::nccl::Nccl::load) searches it.
    pub nccl: LoadOptions,
    /// Where the library of CUDA's driver is. Default: as [`CudaDevice::open`] searches it.
    pub cuda: LoadOptions,
    /// The number of the GPU among those that `CUDA_VISIBLE_DEVICES` leaves. Default: 0, because a rank sees its own GPU only.
    pub device: u32,
    /// The settings that all ranks must share, by name: they compare them when they join. Default: none.
    pub settings: BTreeMap<String, String>,
    /// Lets ranks have one GPU, which is refused otherwise. NCCL itself allows it only with `NCCL_MULTI_RANK_GPU_ENABLE=1`, as an experiment; it is slow, and
    /// meant for tests. Default: `false`.
    pub share_gpu: bool,
}

/// The backend `nccl`: memory of a GPU goes over NCCL, host memory over another backend, which also forms meetings, compares what ranks call, and spreads the
/// first failure.
///
/// - **Before NCCL begins,** ranks compare their versions of NCCL, their GPUs and the settings that must agree. They tell each other when they join, at no cost.
/// - **No rank begins alone.** An operation is handed to NCCL when all ranks have called it, so ranks that call different things, or that never call, are
///   found by the host backend, with its error, and nothing waits on a GPU.
/// - **A failure ends all ranks.** NCCL alone leaves the others waiting for ever. Here the first cause aborts NCCL's communicator on every rank; the transfers
///   return their memory when the GPU no longer uses it. An abort that takes over 5 s ends the process, with exit code 70.
/// - Results have the same bits on every rank. The order of a sum is NCCL's, so it may differ from the host's by rounding.
#[derive(Debug)]
pub struct NcclCollectives {
    host: Arc<dyn Collectives>,
    gpu: Arc<Gpu>,
}

/// The GPU of a rank, which is opened once.
struct Gpu {
    opened: OnceLock<Arc<RankDevice>>,
    needed: Needed,
}

enum Needed {
    Always,
    /// Why it cannot be opened.
    Missing(String),
    /// Returns the options if the rank uses GPUs.
    IfUsed(Box<Options>),
}

type Options = dyn Fn() -> Option<NcclOptions> + Send + Sync;

/// Facts that a rank tells the others when it joins.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Facts {
    /// The code of its version, the identity of its GPU, its settings, and, of the first rank, the id of the communicator.
    Uses { version: u32, gpu: [u8; 16], settings: BTreeMap<String, String>, id: Option<Vec<u8>> },
    /// Why it does not use NCCL.
    Without(String),
}

impl NcclCollectives {
    /// Loads the libraries, and opens the GPU. A meeting of which a rank cannot use NCCL is refused.
    ///
    /// # Errors
    /// `FailedPrecondition` if a library cannot be loaded, or if there is no such GPU.
    pub fn open(host: Arc<dyn Collectives>, options: &NcclOptions) -> Result<Self> {
        let opened = OnceLock::from(RankDevice::open(options)?);
        Ok(Self { host, gpu: Arc::new(Gpu { opened, needed: Needed::Always }) })
    }

    /// Meets the other ranks only to tell them that this one cannot use NCCL, and why: all of them get that error at once.
    #[must_use]
    pub fn missing(host: Arc<dyn Collectives>, why: impl Into<String>) -> Self {
        Self { host, gpu: Arc::new(Gpu { opened: OnceLock::new(), needed: Needed::Missing(why.into()) }) }
    }

    /// Uses NCCL in the meetings whose ranks all use GPUs. `options` tells whether this rank does, and how, each time that it joins a meeting; the libraries are
    /// loaded and the GPU is opened then, and not before. Where a rank does not use NCCL, operations on device memory are rejected with the reason; host memory is
    /// not affected.
    #[must_use]
    pub fn if_used(
        host: Arc<dyn Collectives>,
        options: impl Fn() -> Option<NcclOptions> + Send + Sync + 'static,
    ) -> Self {
        Self { host, gpu: Arc::new(Gpu { opened: OnceLock::new(), needed: Needed::IfUsed(Box::new(options)) }) }
    }

    /// Returns the GPU, to put memory there; `None` if it was not opened.
    #[must_use]
    pub fn device(&self) -> Option<&CudaDevice> {
        self.gpu.opened.get().map(|rank| &rank.device)
    }

    async fn join_nccl(&self, cx: &CallContext, host: &Arc<dyn Communicator>) -> Result<()> {
        let rank = self.gpu.opened.get();
        let id = match agreed(&**host, rank.is_some_and(|rank| rank.share_gpu)) {
            Ok(id) => id,
            Err(why) if matches!(self.gpu.needed, Needed::IfUsed(_)) => {
                return host.set_device_path(Arc::new(NoPath(why.message().to_owned())));
            }
            Err(error) => return Err(error),
        };
        let rank = rank.ok_or_else(|| Error::internal("the rank has told that it uses a GPU"))?;
        let (path, answer) = NcclPath::join(host, rank, id)?;
        let answer = async {
            tokio::select! {
                biased;
                joined = answer => joined.map_err(|_| Error::internal("the thread of the device has ended"))?,
                cause = host.closed() => Err(cause),
            }
        };
        cx.bound(Execution::NotStarted, answer).await.inspect_err(|error| path.abort(again(error)))?;
        host.set_device_path(path)
    }
}

impl Gpu {
    /// Returns what the rank tells the others. The first one makes the id by which they find each other. Blocks while libraries are loaded.
    fn facts(&self, is_first: bool) -> Result<Facts> {
        let rank = match (self.opened.get(), &self.needed) {
            (Some(rank), _) => rank,
            (None, Needed::Missing(why)) => return Ok(Facts::Without(why.clone())),
            (None, Needed::Always) => return Err(Error::internal("the GPU was opened before")),
            (None, Needed::IfUsed(options)) => {
                let Some(options) = options() else {
                    return Ok(Facts::Without("its program has registered no device provider for cuda".to_owned()));
                };
                let opened = RankDevice::open(&options)?;
                self.opened.get_or_init(|| opened)
            }
        };
        let cannot = |error: &dyn fmt::Display| Error::not_started(Code::FailedPrecondition, error.to_string());
        let nccl = rank.communication.nccl();
        let version = nccl.version().map_err(|error| cannot(&error))?.code();
        let gpu = rank.device.uuid().map_err(|error| cannot(&error))?;
        let id = is_first.then(|| nccl.unique_id()).transpose().map_err(|error| cannot(&error))?;
        let id = id.map(|id| id.as_bytes().to_vec());
        Ok(Facts::Uses { version, gpu, settings: rank.settings.clone(), id })
    }
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Gpu").field(&self.opened).finish()
    }
}

impl RankDevice {
    fn open(options: &NcclOptions) -> Result<Arc<Self>> {
        let cannot = |error: NcclError| Error::not_started(Code::FailedPrecondition, error.to_string());
        let communication = Communication::load(&options.nccl).map_err(cannot)?;
        let device = CudaDevice::open(&options.cuda, options.device).map_err(|error| no_gpu(options.device, &error))?;
        let engine = Engine::start(device.clone(), communication.clone())?;
        let (settings, share_gpu) = (options.settings.clone(), options.share_gpu);
        let numbers = AtomicU64::new(1);
        Ok(Arc::new(Self { communication, device, engine, numbers, settings, share_gpu }))
    }
}

/// Compares what the ranks have told, before NCCL waits for them. Returns the id.
fn agreed(host: &dyn Communicator, share_gpu: bool) -> Result<UniqueId> {
    let meeting = host.meeting();
    let differ = |why: String| Error::not_started(Code::FailedPrecondition, why);
    let mut ranks = Vec::with_capacity(meeting.world_size());
    for (seat, facts) in meeting.seats.iter().zip(host.facts()) {
        match serde_json::from_str(facts) {
            Ok(Facts::Uses { version, gpu, settings, id }) => ranks.push((seat.rank, version, gpu, settings, id)),
            Ok(Facts::Without(why)) => return Err(differ(format!("rank {} does not use NCCL: {why}", seat.rank))),
            Err(_) => {
                return Err(differ(format!(
                    "rank {} does not use NCCL: its build lacks the feature `nccl`",
                    seat.rank
                )));
            }
        }
    }
    let Some((first, version, _, settings, id)) = ranks.first() else {
        return Err(Error::internal("the ranks of a meeting tell each other nothing"));
    };
    for (rank, other, _, others, _) in &ranks[1..] {
        if other != version {
            let [version, other] = [version, other].map(|code| NcclVersion::from_code(*code));
            return Err(differ(format!(
                "rank {first} has NCCL {version}, and rank {rank} has NCCL {other}; give all ranks one version"
            )));
        }
        let names = settings.keys().chain(others.keys());
        if let Some(name) = names.into_iter().find(|name| settings.get(*name) != others.get(*name)) {
            let has = |settings: &BTreeMap<String, String>| match settings.get(name) {
                Some(value) => format!("{name}={value}"),
                None => format!("no {name}"),
            };
            let (own, others) = (has(settings), has(others));
            return Err(differ(format!(
                "rank {first} has {own}, and rank {rank} has {others}; set the same on all ranks"
            )));
        }
    }
    for (at, (rank, _, gpu, ..)) in ranks.iter().enumerate() {
        if let Some((twin, ..)) = ranks[..at].iter().find(|(_, _, other, ..)| other == gpu).filter(|_| !share_gpu) {
            return Err(differ(format!(
                "ranks {twin} and {rank} have one GPU; give each rank its own (num_gpus, CUDA_VISIBLE_DEVICES)"
            )));
        }
    }
    let id = id.as_deref().and_then(|id| id.try_into().ok());
    id.map(UniqueId::new).ok_or_else(|| Error::internal(format!("rank {first} has sent no unique id")))
}

#[async_trait]
impl Collectives for NcclCollectives {
    fn name(&self) -> &'static str {
        if matches!(self.gpu.needed, Needed::IfUsed(_)) { self.host.name() } else { "nccl" }
    }

    async fn join(&self, cx: &CallContext, meeting: Meeting) -> Result<Arc<dyn Communicator>> {
        // A rank that cannot use NCCL says why, so that the others need not wait for it.
        let (gpu, is_first) = (Arc::clone(&self.gpu), meeting.position() == 0);
        let facts = match gpu.opened.get() {
            Some(_) => gpu.facts(is_first),
            None => {
                let opening = tokio::task::spawn_blocking(move || gpu.facts(is_first));
                opening.await.map_err(|error| Error::internal(error.to_string()))?
            }
        };
        let facts = facts.unwrap_or_else(|error| Facts::Without(error.to_string()));
        let facts = serde_json::to_string(&facts).map_err(|error| Error::internal(error.to_string()))?;
        let host = self.host.join(cx, meeting.telling(facts)).await?;
        // Once joined, whoever does not go on must end the others, too.
        let mut leaving = Leaving(Some(Arc::clone(&host)));
        let joined = self.join_nccl(cx, &host).await;
        leaving.0 = None;
        match joined {
            Ok(()) => Ok(host),
            Err(error) => {
                // Another rank may have found it first, and all return the first cause.
                host.abort(error);
                Err(host.closed().await)
            }
        }
    }

    fn handler(&self) -> Option<Arc<dyn Handler>> {
        self.host.handler()
    }

    fn report(&self, rank: Rank) -> CollectiveReport {
        self.host.report(rank)
    }
}

/// Why the ranks of a meeting do not use NCCL.
#[derive(Debug)]
struct NoPath(String);

impl DevicePath for NoPath {
    fn name(&self) -> &'static str {
        "none"
    }

    fn check(&self, _: &Call, memory: &dyn DeviceMemory) -> Result<()> {
        let why = format!("{memory:?} cannot be moved: {}; copy it to the host", self.0);
        Err(Error::not_started(Code::FailedPrecondition, why))
    }

    fn note(&self, _: &Call) -> Result<Bytes> {
        Ok(Bytes::new())
    }

    fn start(&self, agreed: Agreed, memory: Box<dyn DeviceMemory>) -> Transfer {
        let (completion, transfer) = Transfer::new();
        let buffer = Buffer::new(agreed.call.dtype, Memory::Device(memory));
        completion.finish(buffer, Err(Error::internal("every call is rejected before it starts")));
        transfer
    }

    fn abort(&self, _: Error) {}
}

/// A rank that has met the others and may still leave.
struct Leaving(Option<Arc<dyn Communicator>>);

impl Drop for Leaving {
    fn drop(&mut self) {
        if let Some(host) = self.0.take() {
            let rank = host.meeting().rank;
            host.abort(Error::not_started(Code::Unavailable, format!("rank {rank} has left while NCCL was joining")));
        }
    }
}

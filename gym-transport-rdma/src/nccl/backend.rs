//! NCCL as a backend of collective operations.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use bytes::BytesMut;
use gym_core::group::collective::{Buffer, Collective, CollectiveReport, Collectives, Communicator, Meeting};
use gym_core::group::{DType, Rank};
use gym_core::{CallContext, Code, Error, Execution, Handler, Result};
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use crate::machine::LoadOptions;
use crate::nccl::communicator::{Inner, NcclCommunicator, RankDevice, on_failure};
use crate::nccl::cuda::CudaDevice;
use crate::nccl::engine::{Command, Engine};
use crate::nccl::failure::again;
use crate::nccl::raw::Communication;
use crate::nccl::{UNIQUE_ID_BYTES, UniqueId};

/// Bytes in which a rank tells what must be known before it joins: its version of NCCL, and its GPU.
const FACTS_BYTES: usize = 20;

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
    /// Lets ranks have one GPU, which is refused otherwise. NCCL itself allows it only with `NCCL_MULTI_RANK_GPU_ENABLE=1`, as an experiment; it is slow, and
    /// meant for tests. Default: `false`.
    pub share_gpu: bool,
}

/// The backend `nccl`: memory of a GPU goes over NCCL, host memory over another backend, which also forms meetings, compares what ranks call, and spreads the
/// first failure.
///
/// - **No rank begins alone.** An operation is handed to NCCL when all ranks have called it, so ranks that call different things, or that never call, are
///   found by the host backend, with its error, and nothing waits on a GPU.
/// - **A failure ends all ranks.** NCCL alone leaves the others waiting for ever. Here the first cause aborts NCCL's communicator on every rank; the transfers
///   return their memory when the GPU no longer uses it. An abort that takes over 5 s ends the process, with exit code 70.
/// - Results have the same bits on every rank. The order of a sum is NCCL's, so it may differ from the host's by rounding.
#[derive(Debug)]
pub struct NcclCollectives {
    host: Arc<dyn Collectives>,
    rank: Arc<RankDevice>,
    share_gpu: bool,
}

impl NcclCollectives {
    /// Loads the libraries, and opens the GPU.
    ///
    /// # Errors
    /// `FailedPrecondition` if a library cannot be loaded, or if there is no such GPU.
    pub fn open(host: Arc<dyn Collectives>, options: &NcclOptions) -> Result<Self> {
        let cannot = |why: String| Error::not_started(Code::FailedPrecondition, why);
        let communication = Communication::load(&options.nccl).map_err(|error| cannot(error.to_string()))?;
        let device = CudaDevice::open(&options.cuda, options.device).map_err(|error| {
            cannot(format!("no GPU {}: {error}; `rgym doctor` says what is missing", options.device))
        })?;
        let engine = Engine::start(device.clone(), communication.clone())?;
        let numbers = AtomicU64::new(1);
        let rank = Arc::new(RankDevice { communication, device, engine, numbers });
        Ok(Self { host, rank, share_gpu: options.share_gpu })
    }

    /// Returns the GPU, to put memory there.
    #[must_use]
    pub fn device(&self) -> &CudaDevice {
        &self.rank.device
    }

    /// Compares versions and GPUs before NCCL waits for them, and hands the id of the first rank to all.
    async fn prepare(&self, cx: &CallContext, host: &dyn Communicator) -> Result<UniqueId> {
        let nccl = self.rank.communication.nccl();
        let internal = |error: String| Error::not_started(Code::FailedPrecondition, error);
        let version = nccl.version().map_err(|error| internal(error.to_string()))?;
        let uuid = self.rank.device.uuid().map_err(|error| internal(error.to_string()))?;
        let mut facts = BytesMut::with_capacity(FACTS_BYTES);
        facts.extend_from_slice(&version.code().to_le_bytes());
        facts.extend_from_slice(&uuid);
        let told = host.start(cx, Collective::AllGather, Buffer::host(DType::U8, facts)).await;
        told.result?;
        let all = told.buffer.host_bytes().unwrap_or_default();
        let seats = &host.meeting().seats;
        for (position, facts) in all.chunks(FACTS_BYTES).enumerate() {
            let code = facts.first_chunk().map_or(0, |code| u32::from_le_bytes(*code));
            let rank = seats.get(position).map_or(0, |seat| seat.rank);
            if code != version.code() {
                let other = crate::nccl::NcclVersion::from_code(code);
                let why = format!(
                    "rank {} has NCCL {version}, and rank {rank} has NCCL {other}; give all ranks one version",
                    host.meeting().rank
                );
                return Err(Error::not_started(Code::FailedPrecondition, why));
            }
            let twin = all.chunks(FACTS_BYTES).position(|other| other.get(4..) == facts.get(4..));
            if let Some(twin) = twin.filter(|twin| *twin != position && !self.share_gpu) {
                let twin = seats.get(twin).map_or(0, |seat| seat.rank);
                let why = format!(
                    "ranks {twin} and {rank} have one GPU; give each rank its own (num_gpus, CUDA_VISIBLE_DEVICES)"
                );
                return Err(Error::not_started(Code::FailedPrecondition, why));
            }
        }
        let id = if host.meeting().position() == 0 {
            let id = nccl.unique_id().map_err(|error| internal(error.to_string()))?;
            BytesMut::from(&id.as_bytes()[..])
        } else {
            BytesMut::zeroed(UNIQUE_ID_BYTES)
        };
        let root = seats.first().map_or(0, |seat| seat.rank);
        let id = host.start(cx, Collective::Broadcast { root }, Buffer::host(DType::U8, id)).await;
        id.result?;
        let bytes = id.buffer.host_bytes().and_then(|bytes| bytes.try_into().ok());
        bytes.map(UniqueId::new).ok_or_else(|| Error::internal("the first rank has sent no unique id"))
    }
}

#[async_trait]
impl Collectives for NcclCollectives {
    fn name(&self) -> &'static str {
        "nccl"
    }

    async fn join(&self, cx: &CallContext, meeting: Meeting) -> Result<Arc<dyn Communicator>> {
        let host = self.host.join(cx, meeting).await?;
        // Once joined, whoever does not go on must end the others, too.
        let mut leaving = Leaving(Some(Arc::clone(&host)));
        let joined = self.join_nccl(cx, &host).await;
        leaving.0 = None;
        joined.inspect_err(|error| {
            host.abort(again(error));
        })
    }

    fn handler(&self) -> Option<Arc<dyn Handler>> {
        self.host.handler()
    }

    fn report(&self, rank: Rank) -> CollectiveReport {
        self.host.report(rank)
    }
}

impl NcclCollectives {
    async fn join_nccl(&self, cx: &CallContext, host: &Arc<dyn Communicator>) -> Result<Arc<dyn Communicator>> {
        let id = Box::new(self.prepare(cx, &**host).await?);
        let all = self.rank.numbers.fetch_add(1, Ordering::Relaxed);
        let (joined, answer) = oneshot::channel();
        let (world_size, position) = (host.meeting().world_size(), host.meeting().position());
        let on_failure = on_failure(host);
        let join = Command::Join { comm: all, id, world_size, position, on_failure, joined };
        self.rank.engine.tell(join).map_err(|(_, error)| error)?;
        let inner = Arc::new(Inner {
            host: Arc::clone(host),
            rank: Arc::clone(&self.rank),
            all,
            runtime: Handle::current(),
            places: Mutex::default(),
            aborted: AtomicBool::new(false),
        });
        let answer = async {
            tokio::select! {
                biased;
                joined = answer => joined.map_err(|_| Error::internal("the thread of the device has ended"))?,
                cause = host.closed() => Err(cause),
            }
        };
        if let Err(error) = cx.bound(Execution::NotStarted, answer).await {
            inner.abort(again(&error)).await;
            return Err(error);
        }
        Ok(Arc::new(NcclCommunicator(inner)))
    }
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

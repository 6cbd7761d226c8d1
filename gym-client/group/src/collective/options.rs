//! How the ranks of a group meet.

use std::sync::Arc;

use async_trait::async_trait;
use gym_core::group::Rank;
use gym_core::group::collective::{Collectives, Communicator, Meeting, Peers};
use gym_core::{CallContext, Code, Error, Result};
use serde::{Deserialize, Serialize};

use super::host::Sharing;
use crate::placement::CommunicationBackend;

/// How the ranks of a group meet for collective operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct CollectiveOptions {
    /// The way between ranks. Default: [`CommunicationBackend::Auto`].
    pub backend: CommunicationBackend,
    /// Lets [`Peers::gradients`] send sums of `F32` as bf16. Default: `false`.
    pub compress_gradients: bool,
    /// Lets ranks of one node meet in memory that they share, if the backend is `auto` or `host`. Default: `true`.
    pub share_memory: bool,
    /// The bytes of memory that each rank shares with the other ranks of its node for tensors, in each meeting: what
    /// [`Communicator::allocate`](gym_core::group::collective::Communicator::allocate) gives. Default: 0, so that it gives private memory.
    pub shared_bytes: usize,
}

impl Default for CollectiveOptions {
    fn default() -> Self {
        let backend = CommunicationBackend::default();
        Self { backend, compress_gradients: false, share_memory: true, shared_bytes: 0 }
    }
}

impl CollectiveOptions {
    /// Returns the peers of a rank. `backend` is used unless the options name one that is not in this build.
    pub(crate) fn peers(self, group: &Arc<str>, rank: Rank, backend: Arc<dyn Collectives>) -> Peers {
        let backend = match self.backend {
            CommunicationBackend::Nccl => over_nccl(backend),
            #[cfg(feature = "nccl")]
            CommunicationBackend::Auto => super::nccl::if_used(backend),
            _ => backend,
        };
        Peers::new(Arc::clone(group), rank, backend).compressing_gradients(self.compress_gradients)
    }

    /// Returns whether ranks of one node share memory.
    pub(crate) fn sharing(self) -> Sharing {
        match self.backend {
            CommunicationBackend::Auto | CommunicationBackend::Host if self.share_memory => Sharing::IfPossible,
            CommunicationBackend::Shm => Sharing::Always,
            _ => Sharing::Never,
        }
    }

    /// Writes a warning if ranks that meet will get an error.
    pub(crate) fn warn(self, group: &str) {
        if self.backend == CommunicationBackend::Nccl && cfg!(not(feature = "nccl")) {
            tracing::warn!(group, "{WITHOUT_NCCL}; calls are not affected");
        }
    }
}

const WITHOUT_NCCL: &str = "communication_backend 'nccl' needs a build with the feature `nccl`, and this build has none: collective \
                            operations fail; use 'auto' or 'host' for ranks on CPUs";

#[cfg(feature = "nccl")]
fn over_nccl(host: Arc<dyn Collectives>) -> Arc<dyn Collectives> {
    super::nccl::over(host).unwrap_or_else(|error| {
        let fault = super::nccl::fault_of_machine().map(|fault| format!("; {fault}")).unwrap_or_default();
        let why =
            format!("communication_backend 'nccl': {}{fault}; use 'auto' or 'host' for ranks on CPUs", error.message());
        Arc::new(Missing(why))
    })
}

#[cfg(not(feature = "nccl"))]
fn over_nccl(_: Arc<dyn Collectives>) -> Arc<dyn Collectives> {
    Arc::new(Missing(WITHOUT_NCCL.to_owned()))
}

/// The backend of a rank that asks for NCCL and cannot have it.
#[derive(Debug)]
struct Missing(String);

#[async_trait]
impl Collectives for Missing {
    fn name(&self) -> &'static str {
        "nccl"
    }

    async fn join(&self, _: &CallContext, meeting: Meeting) -> Result<Arc<dyn Communicator>> {
        Err(Error::not_started(Code::FailedPrecondition, self.0.clone()).about(format!("join {meeting}")))
    }
}

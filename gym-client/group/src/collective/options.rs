//! How the ranks of a group meet.

use std::sync::Arc;

use gym_core::group::Rank;
use gym_core::group::collective::{Collectives, Peers};
use serde::{Deserialize, Serialize};

use super::host::Sharing;
use super::nccl;
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
            CommunicationBackend::Nccl => nccl::over(backend),
            CommunicationBackend::Auto => nccl::if_used(backend),
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
        if let (CommunicationBackend::Nccl, Some(why)) = (self.backend, nccl::MISSING) {
            tracing::warn!(group, "{why}; calls are not affected");
        }
    }
}

//! Handle of a UCX worker that serves a single peer on this host.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;

use crate::fabric::handle::command::{Command, FabricShared};

/// A UCX worker that serves a single peer on this host.
///
/// One [`connect`](crate::fabric::Fabric::connect) or [`expect`](crate::fabric::Fabric::expect) uses it. An unused
/// worker is released when its last clone is dropped or its time is over.
#[derive(Clone)]
pub struct PeerWorker(Arc<Reservation>);

struct Reservation {
    id: PeerWorkerId,
    address: Bytes,
    /// The peer may connect to `address`.
    advertised: Arc<AtomicBool>,
    shared: Arc<FabricShared>,
}

/// Identifies a peer worker within its fabric.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct PeerWorkerId(pub(crate) u64);

impl PeerWorker {
    pub(crate) fn new(
        id: PeerWorkerId,
        address: Bytes,
        advertised: Arc<AtomicBool>,
        shared: Arc<FabricShared>,
    ) -> Self {
        Self(Arc::new(Reservation { id, address, advertised, shared }))
    }

    /// Returns the address that the peer connects to: some hundred bytes, for this peer only.
    ///
    /// The peer must not use it later than one second after the worker's time is over. From this call on, the worker is
    /// kept that long, unless a connection opens.
    #[must_use]
    pub fn address(&self) -> &Bytes {
        self.0.advertised.store(true, Ordering::Relaxed);
        &self.0.address
    }

    /// Declares that the peer will not use the address, because it has rejected the request. The worker is then
    /// released early.
    pub fn withdraw(&self) {
        self.0.advertised.store(false, Ordering::Relaxed);
    }

    pub(crate) fn id(&self) -> PeerWorkerId {
        self.0.id
    }
}

impl fmt::Debug for PeerWorker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PeerWorker({})", self.0.id.0)
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        // Fails only if the fabric has ended.
        let _ = self.shared.queue.push_always(Command::ReleasePeerWorker(self.id), true);
    }
}

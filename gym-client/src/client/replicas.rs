//! The replicas that a name resolved to.

use std::sync::Arc;

use gym_core::registry::{Instance, Load, Picker};
use gym_core::transport::ConnectOptions;
use gym_core::{Code, Error, Incarnation, Result};
use tokio::time::Instant;

use crate::client::pending::PendingCalls;
use crate::transport::peer::ReconnectingPeer;

/// What a name resolved to.
#[derive(Debug)]
pub(super) struct ReplicaSet {
    pub(super) replicas: Vec<Arc<Replica>>,
    /// Of this name alone: whose turn it is among its replicas is nothing to those of another.
    pub(super) picker: Arc<Picker>,
    /// When the registry last had them.
    pub(super) seen: Instant,
    pub(super) stale_from: Instant,
    /// A call to it failed: it must not be used before the registry was asked again.
    pub(super) doubtful: bool,
}

impl ReplicaSet {
    /// Nobody, for the one call that asked.
    pub(super) fn absent() -> Self {
        let (replicas, picker, now) = (Vec::new(), Arc::default(), Instant::now());
        Self { replicas, picker, seen: now, stale_from: now, doubtful: true }
    }

    /// A replica, if it can be helped none that has `failed`. By rank, which a replica keeps, while its place among those that live now
    /// changes: a weight is a replica's.
    pub(super) fn choose(&self, server: &str, failed: &[u32]) -> Result<Arc<Replica>> {
        let load = |replica: &Arc<Replica>| Load { index: replica.rank as usize, pending: replica.pending.count() };
        let open = self.replicas.iter().filter(|replica| !failed.contains(&replica.rank));
        let chosen = self.picker.pick(&open.map(load).collect::<Vec<_>>());
        // All have failed once: any of them again.
        let chosen = chosen.or_else(|| self.picker.pick(&self.replicas.iter().map(load).collect::<Vec<_>>()));
        let replica = chosen.and_then(|rank| self.replicas.iter().find(|replica| replica.rank as usize == rank));
        replica.cloned().ok_or_else(|| match self.replicas.len() {
            0 => absent(server),
            count => {
                let why = format!("its {count} replicas have weight 0, which is never chosen");
                Error::not_started(Code::Unavailable, why).about(server.to_owned())
            }
        })
    }
}

/// One replica of a server, with its channel.
#[derive(Debug)]
pub(super) struct Replica {
    pub(super) peer: ReconnectingPeer,
    pub(super) incarnation: Incarnation,
    pub(super) rank: u32,
    pub(super) pending: PendingCalls,
}

/// The replica of an instance: the known one, with its channel and counter, when it is still the same life.
pub(super) fn replica(instance: Instance, known: Option<&ReplicaSet>) -> Arc<Replica> {
    let same = known.and_then(|known| {
        known.replicas.iter().find(|replica| {
            replica.rank == instance.rank
                && replica.incarnation == instance.incarnation
                && replica.peer.endpoints() == instance.endpoints
        })
    });
    match same {
        Some(replica) => Arc::clone(replica),
        None => Arc::new(Replica {
            peer: ReconnectingPeer::new(instance.endpoints, ConnectOptions::to_incarnation(instance.incarnation)),
            incarnation: instance.incarnation,
            rank: instance.rank,
            pending: PendingCalls::default(),
        }),
    }
}

/// Nobody of that name is registered. Not `NotFound`: a server that is being restarted is registered again in a moment.
fn absent(server: &str) -> Error {
    Error::not_started(Code::Unavailable, "no server of this name is registered").about(server.to_owned())
}

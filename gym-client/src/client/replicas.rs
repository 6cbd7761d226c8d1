//! The replicas of a server name, as the registry last returned them.

use std::sync::Arc;

use gym_core::registry::{AffinityCounts, AffinityKey, Balance, Instance, Load, Picker};
use gym_core::server::ServerKind;
use gym_core::transport::ConnectOptions;
use gym_core::{Code, Error, Incarnation, Request, Result};
use tokio::time::Instant;

use crate::client::pending::PendingCalls;
use crate::transport::peer::ReconnectingPeer;

/// The replicas of one name.
#[derive(Debug)]
pub(super) struct ReplicaSet {
    pub(super) replicas: Vec<Arc<Replica>>,
    /// Chooses among the replicas of this name only; each name has its own order.
    pub(super) picker: Arc<Picker>,
    /// Time of the registry's last response that listed the replicas.
    pub(super) seen: Instant,
    pub(super) stale_from: Instant,
    /// A call to a replica failed: the next call queries the registry first.
    pub(super) doubtful: bool,
}

impl ReplicaSet {
    /// Creates an empty set, for the one call that queried the registry.
    pub(super) fn absent() -> Self {
        let (replicas, picker, now) = (Vec::new(), Arc::default(), Instant::now());
        Self { replicas, picker, seen: now, stale_from: now, doubtful: true }
    }

    /// Returns the picker of a name that is resolved for the first time. If the program sets no balancing, the replicas of a model are
    /// chosen by affinity, because their caches have the prompts.
    pub(super) fn picker(balance: Option<&Balance>, replicas: &[Arc<Replica>]) -> Arc<Picker> {
        let of_model = replicas.iter().any(|replica| replica.kind == ServerKind::Model);
        let by_kind = || if of_model { Balance::Affinity } else { Balance::default() };
        Arc::new(Picker::new(balance.cloned().unwrap_or_else(by_kind)))
    }

    /// Returns `true` if the calls of a session may go to another replica than its first: model servers keep nothing of a session.
    pub(super) fn moves_sessions(&self) -> bool {
        self.replicas.len() > 1
            && *self.picker.balance() == Balance::Affinity
            && self.replicas.iter().all(|replica| replica.kind == ServerKind::Model)
    }

    /// Returns the choices by affinity so far; `None` without a choice.
    pub(super) fn affinity(&self) -> Option<AffinityCounts> {
        self.picker.affinity().filter(|_| self.replicas.len() > 1)
    }

    /// Chooses a replica; one in `failed` only if all replicas have failed. Replicas are identified by rank, because weights are
    /// assigned to ranks and positions in the list change.
    pub(super) fn choose(
        &self,
        server: &str,
        failed: &[u32],
        request: &Request,
        session: Option<SessionAffinity>,
    ) -> Result<Arc<Replica>> {
        let key = session.map(|session| session.key);
        if let Some(SessionAffinity { key, home: Some(home) }) = session {
            self.picker.remember(key, home as usize);
        }
        let prompt = || AffinityKey::of_request(&request.message.head.to_object().ok()?);
        let pick = |open: &[Load]| self.picker.pick_for(key, prompt, open);
        let load = |replica: &Arc<Replica>| Load { index: replica.rank as usize, pending: replica.pending.count() };
        let open = self.replicas.iter().filter(|replica| !failed.contains(&replica.rank));
        let chosen = pick(&open.map(load).collect::<Vec<_>>());
        // Every replica has failed once: choose among all of them.
        let chosen = chosen.or_else(|| pick(&self.replicas.iter().map(load).collect::<Vec<_>>()));
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

/// The session of a call, for [`ReplicaSet::choose`].
#[derive(Clone, Copy, Debug)]
pub(super) struct SessionAffinity {
    pub(super) key: AffinityKey,
    /// The rank of the replica that sent the last response.
    pub(super) home: Option<u32>,
}

/// One replica of a server, with its channel.
#[derive(Debug)]
pub(super) struct Replica {
    pub(super) peer: ReconnectingPeer,
    pub(super) incarnation: Incarnation,
    pub(super) rank: u32,
    pub(super) kind: ServerKind,
    pub(super) pending: PendingCalls,
}

/// Returns the replica of an instance: the known one, with its channel and counter, if it has the same incarnation and endpoints.
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
            kind: instance.kind,
            pending: PendingCalls::default(),
        }),
    }
}

/// Returns the error of a name without a registered server. `Unavailable` instead of `NotFound`, because a restarting server
/// registers again soon.
fn absent(server: &str) -> Error {
    Error::not_started(Code::Unavailable, "no server of this name is registered").about(server.to_owned())
}

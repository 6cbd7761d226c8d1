//! Reports how a server reaches its peers, and handlers that block a thread, for `/health` and `rgym status`.

use gym_client::transport::PeerPath;
use gym_core::observe::stall::Stall;
use gym_core::transport::Transport;
use serde::{Deserialize, Serialize};

/// Maximum peers in `/health`: more than the servers of a configuration, and few enough for a frequently requested reply.
const PEERS_MAX: usize = 64;

/// The query of `/health` that calls the endpoints of a model server.
pub(crate) const PROBE_QUERY: &str = "probe";

/// The query of `/health` that calls them, and then makes trial calls.
pub(crate) const TRIAL_QUERY: &str = "trial";

/// The path to one peer.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct PeerReport {
    pub(crate) peer: String,
    /// The transport's name; `None` for a connector without one, and for a peer that was not reached.
    pub(crate) transport: Option<String>,
    /// The scheme of the endpoint; empty for a peer that was not reached.
    pub(crate) scheme: String,
    /// The transport's own name for the path.
    pub(crate) lanes: String,
    /// The preferred transports that were rejected.
    pub(crate) refused: Vec<RejectedTransport>,
}

/// A transport that was not used, and the reason.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct RejectedTransport {
    pub(crate) transport: String,
    pub(crate) why: String,
}

/// A handler that blocks a thread of the process.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct StallReport {
    pub(crate) server: String,
    pub(crate) route: String,
    /// The time for which the thread has been blocked.
    pub(crate) seconds: u64,
}

/// Reports the handlers that block a thread now.
pub(crate) fn stalls(current: &[Stall]) -> Vec<StallReport> {
    let report = |stall: &Stall| StallReport {
        server: stall.handler.server.clone(),
        route: stall.handler.route.clone(),
        seconds: stall.lasted.as_secs(),
    };
    current.iter().take(PEERS_MAX).map(report).collect()
}

/// Reports the peers in other processes.
pub(crate) fn reports(peers: &[PeerPath]) -> Vec<PeerReport> {
    peers.iter().filter(|peer| peer.transport != Some(Transport::MEM)).take(PEERS_MAX).map(report).collect()
}

fn report(path: &PeerPath) -> PeerReport {
    let refused = path
        .refused
        .iter()
        .map(|refusal| RejectedTransport { transport: refusal.transport.to_string(), why: refusal.reason.clone() });
    PeerReport {
        peer: path.peer.clone(),
        transport: path.transport.map(|transport| transport.to_string()),
        scheme: path.scheme.to_owned(),
        lanes: path.lanes.clone(),
        refused: refused.collect(),
    }
}

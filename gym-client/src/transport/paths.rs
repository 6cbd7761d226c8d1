//! The connection of this process to each peer, and the reasons why preferred transports were rejected. Logged once, and read by
//! status and metrics.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use gym_core::transport::{PathInfo, Transport};
use parking_lot::{Mutex, MutexGuard};
use serde::Serialize;

use crate::transport::HTTP;

/// Maximum number of recorded peers. Restarted workers have new addresses, so an unbounded list would grow permanently. A longer
/// list would have no reader.
const PEERS_MAX: usize = 1_024;
/// Label under which connections over unnamed transports are counted.
const OTHER: &str = "other";

/// The connection to one peer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct PeerPath {
    /// Its most general endpoint.
    pub peer: String,
    /// The transport; `None` if the connector has not named it, or the peer was not reached.
    pub transport: Option<Transport>,
    /// The transport's scheme; empty for a peer that was not reached.
    pub scheme: &'static str,
    /// The devices that transfer the bytes, as the transport names them; may be empty.
    pub lanes: String,
    /// The transports that were rejected, the most preferred first.
    pub refused: Vec<Refusal>,
}

/// A transport that was not used, and the reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Refusal {
    /// The transport.
    pub transport: Transport,
    /// The reason.
    #[serde(rename = "why")]
    pub reason: String,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.transport, self.reason)
    }
}

impl PeerPath {
    /// Returns the transport's name, or the scheme of a connector that has not named it; `none` for a peer that was not reached.
    #[must_use]
    pub fn transport_name(&self) -> &'static str {
        match self.transport {
            Some(transport) => transport.as_str(),
            None if self.scheme.is_empty() => "none",
            None => self.scheme,
        }
    }
}

/// The records of all peers. Cheap to clone; clones share them.
#[derive(Clone, Debug, Default)]
pub(super) struct Paths(pub(super) Arc<Mutex<PathRecords>>);

#[derive(Debug, Default)]
pub(super) struct PathRecords {
    pub(super) peers: BTreeMap<String, (u64, PeerPath)>,
    /// The number of the latest record; the record with the lowest number is the oldest.
    sequence: u64,
    pub(super) opened: BTreeMap<&'static str, u64>,
    pub(super) refused: BTreeMap<Transport, u64>,
}

impl Paths {
    /// Records the connection to a peer, or the failure to connect, and logs a connection once.
    pub(super) fn record(&self, peer: &str, reached: Option<&PathInfo>, only: Option<Transport>, refused: &[Refusal]) {
        let transport = reached.and_then(|path| path.transport.or(only));
        let scheme = reached.map_or("", |path| path.scheme);
        let lanes = reached.map(|path| path.lanes.to_string()).unwrap_or_default();
        // For a peer that was reached, only the transports that are preferred to the one in use count. An earlier endpoint of the
        // same transport may have been rejected, and less preferred transports were not needed.
        let better = |refusal: &&Refusal| transport.is_none_or(|transport| refusal.transport < transport);
        let refused: Vec<Refusal> = refused.iter().filter(better).cloned().collect();
        let path = PeerPath { peer: peer.to_owned(), transport, scheme, lanes, refused };
        let mut records = self.lock();
        for refusal in &path.refused {
            *records.refused.entry(refusal.transport).or_default() += 1;
        }
        if reached.is_some() {
            *records.opened.entry(transport.map_or(OTHER, Transport::as_str)).or_default() += 1;
        }
        records.sequence += 1;
        let sequence = records.sequence;
        let before = records.peers.insert(peer.to_owned(), (sequence, path.clone()));
        if records.peers.len() > PEERS_MAX {
            let oldest = records.peers.iter().min_by_key(|(_, (sequence, _))| *sequence).map(|(peer, _)| peer.clone());
            oldest.map(|oldest| records.peers.remove(&oldest));
        }
        drop(records);
        // A peer that was not reached is reported by the error.
        if reached.is_some() && before.is_none_or(|(_, before)| before != path) {
            log(&path);
        }
    }

    pub(super) fn all(&self) -> Vec<PeerPath> {
        self.lock().peers.values().map(|(_, path)| path.clone()).collect()
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, PathRecords> {
        self.0.lock()
    }
}

/// Logs the connection. Omits the rejection of the in-process transport, which is normal for a peer in another process.
fn log(path: &PeerPath) {
    let news: Vec<String> =
        path.refused.iter().filter(|refusal| refusal.transport != Transport::MEM).map(ToString::to_string).collect();
    let (peer, transport, lanes) = (&path.peer, path.transport_name(), path.lanes.as_str());
    if news.is_empty() && path.transport.is_none_or(|transport| transport == Transport::MEM || transport == HTTP) {
        tracing::debug!(%peer, transport, "connected");
    } else {
        tracing::info!(%peer, transport, lanes, refused = news.join("; "), "connected");
    }
}

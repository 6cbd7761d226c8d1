//! How the peers of this process are reached, and why not better: told once, read by status and metrics.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use gym_core::{Level, PathInfo};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use serde::Serialize;

use super::climb::levels_of;

/// Peers that are remembered. Restarted workers have new addresses, so without a bound the list would grow for ever; nobody reads
/// a longer one.
const PEERS_MAX: usize = 1_024;
/// How connections are counted that are on no rung.
const OTHER: &str = "other";

/// How one peer is reached.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct PeerPath {
    /// Its most general endpoint.
    pub peer: String,
    /// The rung; `None` for a transport that is on no rung, or a peer that was not reached.
    pub level: Option<Level>,
    /// The transport's scheme; empty for a peer that was not reached.
    pub scheme: &'static str,
    /// What moves the bytes, as the transport names it; may be empty.
    pub lanes: String,
    /// The rungs that were refused, best first.
    pub refused: Vec<Refusal>,
}

/// Why a rung was not used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Refusal {
    /// Which.
    pub level: Level,
    /// Why.
    pub why: String,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.level, self.why)
    }
}

impl PeerPath {
    /// The rung's name, or the scheme of a transport that is on none; `none` for a peer that was not reached.
    #[must_use]
    pub fn over(&self) -> &'static str {
        match self.level {
            Some(level) => level.as_str(),
            None if self.scheme.is_empty() => "none",
            None => self.scheme,
        }
    }
}

/// What is known of all peers. Cheap to clone; clones share it.
#[derive(Clone, Debug, Default)]
pub(super) struct Paths(Arc<Mutex<Known>>);

#[derive(Debug, Default)]
struct Known {
    peers: BTreeMap<String, (u64, PeerPath)>,
    /// Which record is the oldest.
    turn: u64,
    opened: BTreeMap<&'static str, u64>,
    refused: BTreeMap<Level, u64>,
}

impl Paths {
    /// Remembers how a peer was reached, or that it was not, and tells it once.
    pub(super) fn record(&self, peer: &str, reached: Option<&PathInfo>, refused: &[Refusal]) {
        let level = reached.and_then(|path| path.level.or_else(|| only_level(path.scheme)));
        let scheme = reached.map_or("", |path| path.scheme);
        let lanes = reached.map(|path| path.lanes.to_string()).unwrap_or_default();
        // Of a peer that was reached, what is better than that: another endpoint of the same rung may have been refused before
        // this one, and what is below was not needed.
        let better = |refusal: &&Refusal| level.is_none_or(|level| refusal.level < level);
        let refused: Vec<Refusal> = refused.iter().filter(better).cloned().collect();
        let path = PeerPath { peer: peer.to_owned(), level, scheme, lanes, refused };
        let mut known = self.lock();
        for refusal in &path.refused {
            *known.refused.entry(refusal.level).or_default() += 1;
        }
        if reached.is_some() {
            *known.opened.entry(level.map_or(OTHER, Level::as_str)).or_default() += 1;
        }
        known.turn += 1;
        let turn = known.turn;
        let before = known.peers.insert(peer.to_owned(), (turn, path.clone()));
        if known.peers.len() > PEERS_MAX {
            let oldest = known.peers.iter().min_by_key(|(_, (turn, _))| *turn).map(|(peer, _)| peer.clone());
            oldest.map(|oldest| known.peers.remove(&oldest));
        }
        drop(known);
        // A peer that was not reached is told by the error.
        if reached.is_some() && before.is_none_or(|(_, before)| before != path) {
            tell(&path);
        }
    }

    pub(super) fn all(&self) -> Vec<PeerPath> {
        self.lock().peers.values().map(|(_, path)| path.clone()).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The rung of a scheme that has only one.
fn only_level(scheme: &str) -> Option<Level> {
    match levels_of(scheme) {
        [level] => Some(*level),
        _ => None,
    }
}

/// That a peer in another process is not in this one is no news.
fn tell(path: &PeerPath) {
    let news: Vec<String> =
        path.refused.iter().filter(|refusal| refusal.level != Level::InProcess).map(ToString::to_string).collect();
    let (peer, over, lanes) = (&path.peer, path.over(), path.lanes.as_str());
    if news.is_empty() && !path.level.is_some_and(Level::is_ucx) {
        tracing::debug!(%peer, over, "connected");
    } else {
        tracing::info!(%peer, over, lanes, refused = news.join("; "), "connected");
    }
}

/// Reads the peers whenever metrics are asked for: by `level`, connections opened (`gym_transport_connections`) and rungs refused
/// (`gym_transport_refusals`); by `peer`, how it is reached now (`gym_transport_peer`, always 1, with `level` and `lanes`). Register
/// it as a collector.
pub struct PathMetrics(Weak<Mutex<Known>>);

impl PathMetrics {
    pub(super) fn of(paths: &Paths) -> Self {
        Self(Arc::downgrade(&paths.0))
    }
}

impl fmt::Debug for PathMetrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PathMetrics")
    }
}

impl Collector for PathMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let Some(known) = self.0.upgrade() else { return Ok(()) };
        let known = Paths(known);
        let known = known.lock();
        let help = "Connections opened";
        let mut family = encoder.encode_descriptor("gym_transport_connections", help, None, MetricType::Counter)?;
        for (level, count) in &known.opened {
            ConstCounter::new(*count).encode(family.encode_family(&[("level", *level)])?)?;
        }
        let help = "Rungs of the ladder that were refused when a peer was connected to";
        let mut family = encoder.encode_descriptor("gym_transport_refusals", help, None, MetricType::Counter)?;
        for (level, count) in &known.refused {
            ConstCounter::new(*count).encode(family.encode_family(&[("level", level.as_str())])?)?;
        }
        let help = "How a peer is reached (always 1)";
        let mut family = encoder.encode_descriptor("gym_transport_peer", help, None, MetricType::Gauge)?;
        for (_, path) in known.peers.values() {
            let labels = [("peer", path.peer.as_str()), ("level", path.over()), ("lanes", path.lanes.as_str())];
            ConstGauge::new(1_u64).encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }
}

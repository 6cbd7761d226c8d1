//! How a process uses UCX: one fabric, opened when it is first needed, that its connectors and listeners share.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use gym_core::mux::Limits;
use gym_core::{Code, Error, Result};
use tokio::sync::OnceCell;

use crate::fabric::{Connection, ConnectionStats, Fabric, FabricOptions, FabricStats, Lanes};
use crate::pipe::{CUT_BYTES, Outbox, RoundTrips, Watched};
use crate::pool::PoolStats;

/// Limits, timeouts and the fabric of UCX connections.
#[derive(Clone, Debug)]
pub struct UcxConfig {
    /// The library, the transports, how the thread waits. [`FabricOptions::listen`] is where a listener takes peers from other
    /// hosts; without it it takes those of its own. [`FabricOptions::rendezvous_bytes`] is set to `cut_bytes`.
    pub fabric: FabricOptions,
    /// Limits of each connection; each end has its own, and both keep to the smaller.
    pub limits: Limits,
    /// How long connecting may take, bootstrap and greeting included.
    pub connect_timeout: Duration,
    /// Bytes from which on a segment is sent by itself, by rendezvous, from where it lies and into a buffer of the pool; shorter
    /// ones are copied together. 1 KiB to 16 MiB. 64 KiB: a copy of so much takes about as long as the rendezvous' question.
    pub cut_bytes: usize,
}

impl Default for UcxConfig {
    fn default() -> Self {
        Self {
            fabric: FabricOptions::default(),
            limits: Limits::default(),
            connect_timeout: Duration::from_secs(10),
            cut_bytes: 64 << 10,
        }
    }
}

/// UCX in this process: a configuration, and the fabric that is opened with it when it is first needed. Cheap to clone; a
/// library that cannot be loaded is not tried again.
#[derive(Clone)]
pub struct Ucx {
    config: Arc<UcxConfig>,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    fabric: OnceCell<Result<Fabric, String>>,
    watched: Mutex<Vec<(Arc<str>, Watched)>>,
}

impl Ucx {
    /// Nothing is loaded yet.
    #[must_use]
    pub fn new(mut config: UcxConfig) -> Self {
        config.cut_bytes = config.cut_bytes.clamp(*CUT_BYTES.start(), *CUT_BYTES.end());
        config.fabric.rendezvous_bytes = Some(config.cut_bytes);
        Self { config: Arc::new(config), shared: Arc::default() }
    }

    /// The same fabric, with other limits for the connections made with it from now on.
    #[must_use]
    pub fn with_limits(&self, limits: Limits) -> Self {
        let config = UcxConfig { limits, ..UcxConfig::clone(&self.config) };
        Self { config: Arc::new(config), shared: Arc::clone(&self.shared) }
    }

    /// The configuration.
    #[must_use]
    pub fn config(&self) -> &UcxConfig {
        &self.config
    }

    /// The fabric; the first call loads the library and starts its thread.
    ///
    /// # Errors
    /// `Unavailable` when UCX cannot be loaded or opened: what was looked for, and the fix.
    pub async fn fabric(&self) -> Result<&Fabric> {
        let opened = self.shared.fabric.get_or_init(|| async {
            let options = self.config.fabric.clone();
            // It reads files and waits for a thread.
            let opened = tokio::task::spawn_blocking(move || Fabric::open(options)).await;
            opened.map_err(|error| error.to_string())?.map_err(|error| error.to_string())
        });
        opened.await.as_ref().map_err(|said| Error::not_started(Code::Unavailable, said.clone()))
    }

    /// What happened so far, if the fabric is open: for a metrics page.
    #[must_use]
    pub fn stats(&self) -> Option<UcxStats> {
        let fabric = self.shared.fabric.get()?.as_ref().ok()?;
        let mut connections = Vec::new();
        self.shared.watched.lock().unwrap_or_else(PoisonError::into_inner).retain(|(peer, watched)| {
            let seen = watched.look(|connection: &Connection, round_trips| ConnectionReport {
                peer: Arc::clone(peer),
                lanes: connection.lanes().cloned().unwrap_or_default(),
                parcels: connection.stats(),
                round_trips,
            });
            let is_there = seen.is_some();
            connections.extend(seen);
            is_there
        });
        Some(UcxStats { fabric: fabric.stats(), pool: fabric.pool().stats(), connections })
    }

    /// Has a connection in the statistics as long as it lives.
    pub(crate) fn watch(&self, peer: Arc<str>, outbox: &Outbox) {
        let mut watched = self.shared.watched.lock().unwrap_or_else(PoisonError::into_inner);
        watched.retain(|(_, watched)| watched.look(|_, _| ()).is_some());
        watched.push((peer, outbox.watch()));
    }
}

impl From<UcxConfig> for Ucx {
    fn from(config: UcxConfig) -> Self {
        Self::new(config)
    }
}

impl fmt::Debug for Ucx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ucx").field("config", &self.config).finish_non_exhaustive()
    }
}

/// What UCX did in this process.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct UcxStats {
    /// The thread: what woke it, what it dropped and refused.
    pub fabric: FabricStats,
    /// The registered memory.
    pub pool: PoolStats,
    /// The connections that there are, of both directions.
    pub connections: Vec<ConnectionReport>,
}

/// What went over one connection.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ConnectionReport {
    /// The peer.
    pub peer: Arc<str>,
    /// The transports that were really negotiated.
    pub lanes: Lanes,
    /// Parcels and bytes; eager and rendezvous.
    pub parcels: ConnectionStats,
    /// How long signs of life took there and back.
    pub round_trips: RoundTrips,
}

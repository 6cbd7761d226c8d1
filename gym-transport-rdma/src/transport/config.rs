//! Configuration and state of UCX in a process: one fabric, opened on first use, that all connectors and listeners share.

use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use gym_core::transport::mux::ConnectionLimits;
use gym_core::{Code, Error, Result};

use crate::fabric::{Connection, ConnectionStats, Fabric, FabricOptions, FabricStats, Lanes};
use crate::memory::PoolStats;
use crate::messaging::IN_FLIGHT_MAX;
use crate::messaging::layout::CUT_BYTES;
use crate::messaging::round_trips::RoundTrips;
use crate::messaging::send_queue::{ConnectionWatch, UcxSendQueue};

/// Limits, timeouts and the fabric of UCX connections.
#[derive(Clone, Debug)]
pub struct UcxConfig {
    /// The library, the transports, how the thread waits. [`FabricOptions::listen`] is where a listener takes peers from other
    /// hosts; without it it takes those of its own. [`FabricOptions::rendezvous_bytes`] is set to `cut_bytes`,
    /// and [`FabricOptions::reorder_bytes_max`] is raised to 128 times as much if it is less.
    pub fabric: FabricOptions,
    /// Limits of each connection; each end has its own, and both keep to the smaller.
    pub limits: ConnectionLimits,
    /// How long connecting may take, bootstrap and greeting included.
    pub connect_timeout: Duration,
    /// Bytes from which on a segment is sent by itself, by rendezvous, from where it lies and into a buffer of the pool; shorter
    /// ones are copied together. 1 KiB to 16 MiB. 64 KiB: a copy of so much takes about as long as the rendezvous' question.
    /// Both ends need about the same: each has room for 128 of its own size ahead of their turn, and ends the connection of a peer
    /// that sends much longer ones unannounced.
    pub cut_bytes: usize,
}

impl Default for UcxConfig {
    fn default() -> Self {
        Self {
            fabric: FabricOptions::default(),
            limits: ConnectionLimits::default(),
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
    instance: Arc<UcxInstance>,
}

#[derive(Default)]
struct UcxInstance {
    fabric: OpenOnce<Result<Fabric, String>>,
    watched: Mutex<Vec<(Arc<str>, ConnectionWatch)>>,
}

/// Opens a value on first use, once.
struct OpenOnce<T> {
    opened: Arc<OnceLock<T>>,
    /// Whose turn it is to have it opened: the others need no thread to wait in. Held across the wait for that.
    turn: tokio::sync::Mutex<()>,
}

impl<T> Default for OpenOnce<T> {
    fn default() -> Self {
        Self { opened: Arc::default(), turn: tokio::sync::Mutex::default() }
    }
}

impl<T: Send + Sync + 'static> OpenOnce<T> {
    fn seen(&self) -> Option<&T> {
        self.opened.get()
    }

    /// It; `open` may block.
    async fn get(&self, open: impl FnOnce() -> T + Send + 'static) -> Result<&T> {
        if let Some(opened) = self.seen() {
            return Ok(opened);
        }
        let _turn = self.turn.lock().await;
        if self.seen().is_none() {
            let opened = Arc::clone(&self.opened);
            // Kept by the thread that opens it: whoever asked may leave meanwhile, and the next waits for the same.
            let opening = tokio::task::spawn_blocking(move || {
                opened.get_or_init(open);
            });
            opening.await.map_err(|error| Error::internal(format!("open UCX: {error}")))?;
        }
        self.seen().ok_or_else(|| Error::internal("open UCX: nothing was opened"))
    }
}

impl Ucx {
    /// Nothing is loaded yet.
    #[must_use]
    pub fn new(mut config: UcxConfig) -> Self {
        config.cut_bytes = config.cut_bytes.clamp(*CUT_BYTES.start(), *CUT_BYTES.end());
        config.fabric.rendezvous_bytes = Some(config.cut_bytes);
        // What peers with the same settings have on its way unannounced may all come ahead of its turn.
        config.fabric.reorder_bytes_max = config.fabric.reorder_bytes_max.max(IN_FLIGHT_MAX * config.cut_bytes);
        Self { config: Arc::new(config), instance: Arc::default() }
    }

    /// The same fabric, with other limits for the connections made with it from now on.
    #[must_use]
    pub fn with_limits(&self, limits: ConnectionLimits) -> Self {
        let config = UcxConfig { limits, ..UcxConfig::clone(&self.config) };
        Self { config: Arc::new(config), instance: Arc::clone(&self.instance) }
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
        let config = Arc::clone(&self.config);
        let open = move || Fabric::open(config.fabric.clone()).map_err(|error| error.to_string());
        self.instance
            .fabric
            .get(open)
            .await?
            .as_ref()
            .map_err(|said| Error::not_started(Code::Unavailable, said.clone()))
    }

    /// What happened so far, if the fabric is open: for a metrics page.
    #[must_use]
    pub fn stats(&self) -> Option<UcxStats> {
        let fabric = self.instance.fabric.seen()?.as_ref().ok()?;
        let mut connections = Vec::new();
        self.instance.watched.lock().unwrap_or_else(PoisonError::into_inner).retain(|(peer, watched)| {
            let seen = watched.look(|connection: &Connection, round_trips| ConnectionReport {
                peer: Arc::clone(peer),
                lanes: connection.lanes().cloned().unwrap_or_default(),
                messages: connection.stats(),
                round_trips,
            });
            let is_there = seen.is_some();
            connections.extend(seen);
            is_there
        });
        Some(UcxStats { fabric: fabric.stats(), pool: fabric.pool().stats(), connections })
    }

    /// Adds a connection to the statistics for as long as it lives.
    pub(crate) fn watch(&self, peer: Arc<str>, send_queue: &UcxSendQueue) {
        let mut watched = self.instance.watched.lock().unwrap_or_else(PoisonError::into_inner);
        watched.retain(|(_, watched)| watched.look(|_, _| ()).is_some());
        watched.push((peer, send_queue.watch()));
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

/// Statistics of UCX in this process.
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

/// Statistics of one connection.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ConnectionReport {
    /// The peer.
    pub peer: Arc<str>,
    /// The transports that UCX negotiated.
    pub lanes: Lanes,
    /// Active messages and bytes; eager and rendezvous.
    pub messages: ConnectionStats,
    /// Round-trip times of heartbeats.
    pub round_trips: RoundTrips,
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use tokio::sync::oneshot;

    use super::*;

    #[tokio::test]
    async fn it_is_opened_once_although_the_first_who_asked_has_left() {
        let opened = OpenOnce::default();
        let (begin, begun) = oneshot::channel();
        let (release, released) = mpsc::channel::<()>();
        let first = opened.get(move || {
            begin.send(()).unwrap();
            // Ends when the other half is dropped.
            let _ = released.recv();
            "first"
        });
        tokio::select! {
            biased;
            _ = first => panic!("it is held up"),
            begun = begun => begun.unwrap(),
        }
        let (second, ()) = tokio::join!(opened.get(|| "second"), async { drop(release) });
        assert_eq!(*second.unwrap(), "first");
    }
}

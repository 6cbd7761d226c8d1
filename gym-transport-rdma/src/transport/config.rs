//! Configuration and state of UCX in a process: all connectors and listeners share one fabric, which is opened on first
//! use.

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use gym_core::transport::mux::ConnectionLimits;
use gym_core::{Code, Error, Result};
use parking_lot::Mutex;

use crate::fabric::{Connection, ConnectionStats, Fabric, FabricOptions, FabricStats, Lanes};
use crate::memory::PoolStats;
use crate::messaging::IN_FLIGHT_MAX;
use crate::messaging::layout::CUT_BYTES;
use crate::messaging::round_trips::RoundTrips;
use crate::messaging::send_queue::{ConnectionWatch, UcxSendQueue};

/// Limits, timeouts and fabric options of UCX connections.
///
/// ```
/// use gym_transport_rdma::{Ucx, UcxConfig};
///
/// let mut config = UcxConfig::default();
/// // Peers of other hosts connect to this address.
/// config.fabric.listen = Some("10.0.0.7:0".parse()?);
/// config.fabric.devices = Some("mlx5_0:1".to_owned());
/// let ucx = Ucx::new(config); // loads nothing
/// assert!(ucx.stats().is_none());
/// # Ok::<(), std::net::AddrParseError>(())
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct UcxConfig {
    /// The library, the transports, and the waiting strategy of the thread.
    ///
    /// [`FabricOptions::listen`] is the address for peers from other hosts; without it, a listener accepts only peers
    /// on its own host. [`Ucx::new`] sets [`FabricOptions::rendezvous_bytes`] to `cut_bytes`, and raises
    /// [`FabricOptions::reorder_bytes_max`] to at least 128 times `cut_bytes`.
    pub fabric: FabricOptions,
    /// Limits of each connection. Each end has its own, and both keep to the smaller one.
    pub limits: ConnectionLimits,
    /// Maximum time to connect, including bootstrap and handshake. 10 s.
    pub connect_timeout: Duration,
    /// Size in bytes from which a segment is a chunk of its own; from 1 KiB to 16 MiB. 64 KiB.
    ///
    /// Such a chunk is sent by rendezvous, without a copy, into a buffer of the pool. Shorter segments are copied
    /// together: copying 64 KiB takes about as long as the round trip of a rendezvous. Both ends need similar values.
    /// Each end holds up to 128 chunks of its own size out of order. It ends the connection of a peer that sends much
    /// longer ones unannounced.
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

/// UCX in this process: a configuration, and the fabric that is opened with it on first use.
///
/// Cheap to clone. If the library cannot be loaded, later calls return the same error without another attempt.
///
/// ```no_run
/// use gym_transport_rdma::{Ucx, UcxConfig};
///
/// # async fn example() {
/// let ucx = Ucx::new(UcxConfig::default());
/// // Connectors and listeners open the fabric. A program that opens it first learns at its start whether UCX can be loaded.
/// if let Err(error) = ucx.fabric().await {
///     eprintln!("{error}");
/// }
/// # }
/// ```
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
    /// Held while the value is opened, across the wait, so that only one caller occupies a blocking thread.
    opening: tokio::sync::Mutex<()>,
}

impl<T> Default for OpenOnce<T> {
    fn default() -> Self {
        Self { opened: Arc::default(), opening: tokio::sync::Mutex::default() }
    }
}

impl<T: Send + Sync + 'static> OpenOnce<T> {
    fn value(&self) -> Option<&T> {
        self.opened.get()
    }

    /// Returns the value, and opens it first if necessary; `open` may block.
    async fn get(&self, open: impl FnOnce() -> T + Send + 'static) -> Result<&T> {
        if let Some(opened) = self.value() {
            return Ok(opened);
        }
        let _guard = self.opening.lock().await;
        if self.value().is_none() {
            let opened = Arc::clone(&self.opened);
            // The blocking thread stores the value: the caller may be cancelled meanwhile, and the next caller waits
            // for the same value.
            let task = tokio::task::spawn_blocking(move || {
                opened.get_or_init(open);
            });
            task.await.map_err(|error| Error::internal(format!("open UCX: {error}")))?;
        }
        self.value().ok_or_else(|| Error::internal("open UCX: the blocking task stored no result"))
    }
}

impl Ucx {
    /// Creates the configuration. Loads nothing.
    #[must_use]
    pub fn new(mut config: UcxConfig) -> Self {
        config.cut_bytes = config.cut_bytes.clamp(*CUT_BYTES.start(), *CUT_BYTES.end());
        config.fabric.rendezvous_bytes = Some(config.cut_bytes);
        // Everything that peers with the same settings have in flight unannounced may arrive out of order.
        config.fabric.reorder_bytes_max = config.fabric.reorder_bytes_max.max(IN_FLIGHT_MAX * config.cut_bytes);
        Self { config: Arc::new(config), instance: Arc::default() }
    }

    /// Returns a handle to the same fabric with other limits for its later connections.
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

    /// Returns the fabric. The first call loads the library and starts the fabric's thread.
    ///
    /// # Errors
    /// `Unavailable` if UCX cannot be loaded or opened. The message lists the locations that were tried, and the fix.
    pub async fn fabric(&self) -> Result<&Fabric> {
        let config = Arc::clone(&self.config);
        let open = move || Fabric::open(config.fabric.clone()).map_err(|error| error.to_string());
        self.instance
            .fabric
            .get(open)
            .await?
            .as_ref()
            .map_err(|reason| Error::not_started(Code::Unavailable, reason.clone()))
    }

    /// Returns the statistics for a metrics page, or `None` if the fabric is not open.
    #[must_use]
    pub fn stats(&self) -> Option<UcxStats> {
        let fabric = self.instance.fabric.value()?.as_ref().ok()?;
        let mut connections = Vec::new();
        self.instance.watched.lock().retain(|(peer, watched)| {
            let report = watched.inspect(|connection: &Connection, round_trips| ConnectionReport {
                peer: Arc::clone(peer),
                lanes: connection.lanes().cloned().unwrap_or_default(),
                messages: connection.stats(),
                round_trips,
            });
            let is_open = report.is_some();
            connections.extend(report);
            is_open
        });
        Some(UcxStats { fabric: fabric.stats(), pool: fabric.pool().stats(), connections })
    }

    /// Adds a connection to the statistics until it ends.
    pub(crate) fn watch(&self, peer: Arc<str>, send_queue: &UcxSendQueue) {
        let mut watched = self.instance.watched.lock();
        watched.retain(|(_, watched)| watched.inspect(|_, _| ()).is_some());
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
    /// Counters of the fabric's thread.
    pub fabric: FabricStats,
    /// Counters of the memory pool.
    pub pool: PoolStats,
    /// Current connections, of both ends.
    pub connections: Vec<ConnectionReport>,
}

/// Statistics of one connection.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ConnectionReport {
    /// Address of the peer.
    pub peer: Arc<str>,
    /// The transports that UCX negotiated.
    pub lanes: Lanes,
    /// Counters of active messages and bytes, eager and by rendezvous.
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
            // Returns when `release` is dropped.
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

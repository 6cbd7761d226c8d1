//! What a fabric is opened with.

use std::net::SocketAddr;
use std::time::Duration;

use gym_core::{Code, Error};

use super::Driver;
use crate::pool::PoolOptions;
use crate::sys::{LoadError, LoadOptions};

/// What a fabric is opened with. UCX's own environment variables (`UCX_…`) apply where nothing is said here.
#[derive(Clone, Debug)]
pub struct FabricOptions {
    /// Which UCX.
    pub library: LoadOptions,
    /// Name of the thread; at most 15 bytes of it are seen.
    pub name: String,
    /// `UCX_TLS`: the transports that may be used, such as `tcp` or `posix,cma,self`.
    pub transports: Option<String>,
    /// `UCX_NET_DEVICES`: the devices that may be used, such as `lo` or `mlx5_0:1`.
    pub devices: Option<String>,
    /// From how many bytes on a payload goes by rendezvous; shorter ones go with their header. `None`: as UCX thinks best.
    pub rendezvous_bytes: Option<usize>,
    /// Further settings of UCX, by name without `UCX_`.
    pub settings: Vec<(String, String)>,
    /// Where to listen; port 0 takes a free one. `None`: only worker addresses. Choose an address that only peers reach:
    /// UCX neither authenticates nor encrypts, and its tcp listener (seen with 1.13) gives the whole process up when it is
    /// sent something that is not UCX's.
    pub listen: Option<SocketAddr>,
    /// How the thread waits.
    pub driver: Driver,
    /// The CPU that the thread stays on.
    pub cpu: Option<usize>,
    /// Memory that is kept registered.
    pub pool: PoolOptions,
    /// Parcels that may wait for the thread; urgent ones have as much again.
    pub commands_max: usize,
    /// Messages of one connection that may wait for one before them.
    pub held_max: usize,
    /// Peers from the listener that may not have shown a token yet.
    pub strangers_max: usize,
    /// How long each of them may take.
    pub hello_within: Duration,
}

impl Default for FabricOptions {
    fn default() -> Self {
        Self {
            library: LoadOptions::default(),
            name: "gym-fabric".to_owned(),
            transports: None,
            devices: None,
            rendezvous_bytes: None,
            settings: Vec::new(),
            listen: None,
            driver: Driver::default(),
            cpu: None,
            pool: PoolOptions::default(),
            // Callers are bounded by calls and bytes long before this; it only keeps a defect from eating the memory.
            commands_max: 65_536,
            // As many short messages as can overtake one announcement that is a round of the thread late.
            held_max: 4096,
            // One for each worker of a large job that connects in the same moment.
            strangers_max: 1024,
            hello_within: Duration::from_secs(10),
        }
    }
}

impl FabricOptions {
    /// The settings as UCX names them; later ones win.
    pub(super) fn ucx_settings(&self, version: &str) -> Vec<(String, String)> {
        let named = [("TLS", self.transports.clone()), ("NET_DEVICES", self.devices.clone())];
        let named = named.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?)));
        // Without it ids on the wire are bare addresses over shared memory, and a peer that was stopped, was given up and comes
        // back would name an endpoint that is freed. With it a stale id is looked up, not found and dropped.
        // Large parts are fetched where there are fetches (RDMA, memory of one host) and are copied messages elsewhere. What UCX sends
        // over TCP without a copy, puts and messages alike, ends the process with an assertion when its peer dies at the wrong
        // moment (1.13: tcp_ep.c:939, uct_iface.h:884; 3 of 40 runs of the test that kills peers, none of 40 with this).
        // Later versions choose their protocols in another way, and the test does not end them.
        let kept = [("RNDV_SCHEME", "get_zcopy"), ("ZCOPY_THRESH", "inf")];
        // What is copied goes out in parts of 8 KiB by default, each a system call: these make it thrice as fast.
        let parts = [("TCP_TX_SEG_SIZE", "256k"), ("TCP_RX_SEG_SIZE", "256k")];
        let old = kept.into_iter().chain(parts);
        let old = old.filter(|_| version.starts_with("1.13."));
        let fixed = std::iter::once(("PROTO_INDIRECT_ID", "y")).chain(old);
        let fixed = fixed.map(|(name, value)| (name.to_owned(), value.to_owned()));
        fixed.chain(named).chain(self.settings.iter().cloned()).collect()
    }
}

/// Why a fabric cannot be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FabricError {
    /// UCX is not there, or not fit.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// UCX refused something.
    #[error("{what}: {status}")]
    Ucx {
        /// What was asked.
        what: String,
        /// Its words.
        status: String,
    },
    /// The thread cannot be started, or pinned to its CPU.
    #[error("start the fabric's thread: {0}")]
    Thread(#[from] std::io::Error),
}

impl From<FabricError> for Error {
    fn from(error: FabricError) -> Self {
        Self::not_started(Code::Unavailable, error.to_string())
    }
}

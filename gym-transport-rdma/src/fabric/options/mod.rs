//! Options of a fabric, and the UCX settings derived from them.

pub(crate) mod driver;

use std::net::SocketAddr;
use std::time::Duration;

use gym_core::{Code, Error};

use crate::fabric::options::driver::Driver;
use crate::memory::PoolOptions;
use crate::sys::{LoadError, LoadOptions};
use crate::tuning::Unreadable;

/// Options of a fabric. UCX's own environment variables (`UCX_…`) apply to settings that the options leave open.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct FabricOptions {
    /// Location of the UCX library.
    pub library: LoadOptions,
    /// Name of the thread; the system shows at most 15 bytes of it.
    pub name: String,
    /// `UCX_TLS`: allowed transports, such as `tcp` or `posix,cma,self`.
    pub transports: Option<String>,
    /// `UCX_NET_DEVICES`: allowed devices, such as `lo` or `mlx5_0:1`.
    pub devices: Option<String>,
    /// Size in bytes from which a payload is sent by rendezvous; shorter ones are sent with their header. `None`: UCX
    /// decides.
    pub rendezvous_bytes: Option<usize>,
    /// Additional UCX settings, by name without `UCX_`.
    pub settings: Vec<(String, String)>,
    /// Address to listen on; port 0 selects a free port. `None`: only peers on this host can connect.
    ///
    /// Choose an address that only trusted peers can reach. UCX neither authenticates nor encrypts, and its TCP
    /// listener (observed with 1.13) aborts the process when it receives bytes that are not UCX's.
    pub listen: Option<SocketAddr>,
    /// Waiting strategy of the thread.
    pub driver: Driver,
    /// CPU that the thread is pinned to.
    pub cpu: Option<usize>,
    /// Limits of the memory pool.
    pub pool: PoolOptions,
    /// Maximum messages that wait for the thread. Urgent messages have a queue of the same size. 65,536.
    pub commands_max: usize,
    /// Maximum messages of one connection that its peer has not received. One more ends the connection. 32,768.
    pub unsent_max: usize,
    /// Maximum messages of one connection held out of order. 4,096.
    pub reorder_max: usize,
    /// Maximum bytes of eager payloads of these messages. 64 MiB. The peer's `rendezvous_bytes` bounds what it sends
    /// unannounced, so both ends need similar values.
    pub reorder_bytes_max: usize,
    /// Maximum peers of the listener that have not shown a token. 1,024.
    pub unidentified_peers_max: usize,
    /// Time for such a peer to show its token. 10 s.
    pub hello_timeout: Duration,
    /// Maximum concurrent connections over shared memory. 256.
    ///
    /// Each takes a dedicated worker: about 1 MB and seven file descriptors. Together they use at most half of the
    /// descriptors of this process. The fabric raises the limit on descriptors as far as permitted.
    pub shared_memory_peers_max: usize,
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
            // Limits on calls and bytes bound callers long before this. It only keeps a defect from exhausting the
            // memory.
            commands_max: 65_536,
            // Responses to urgent messages have no other bound: a peer can send requests and never read.
            unsent_max: 32_768,
            // As many short messages as can overtake one announcement that is one round of the thread late.
            reorder_max: 4096,
            // Eight times what a peer of this crate has in flight without an announcement.
            reorder_bytes_max: 64 << 20,
            // One for each worker of a large job that connects at the same time.
            unidentified_peers_max: 1024,
            hello_timeout: Duration::from_secs(10),
            // A group of a hundred ranks on one host, each with a connection for calls and one for heartbeats.
            shared_memory_peers_max: 256,
        }
    }
}

impl FabricOptions {
    /// Returns the settings under UCX's names; later ones override earlier ones.
    pub(crate) fn ucx_settings(&self, version: &str) -> Vec<(String, String)> {
        let named = [("TLS", self.transports.clone()), ("NET_DEVICES", self.devices.clone())];
        let named = named.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?)));
        // Large payloads are fetched where UCX can fetch (RDMA, memory of one host) and copied elsewhere. In 1.13, a
        // zero-copy send over TCP, put or message, aborts the process when the peer dies at the wrong moment
        // (tcp_ep.c:939, uct_iface.h:884). That happened in 3 of 40 runs of the test that kills peers, and in none of
        // 40 with these settings. Later versions select protocols in another way and pass the test.
        let kept = [("RNDV_SCHEME", "get_zcopy"), ("ZCOPY_THRESH", "inf")];
        // By default, copies are sent in parts of 8 KiB, each with a system call; these settings triple the bandwidth.
        // They apply only to TCP; in 1.13 their names have no prefix TCP_. UCX warns about settings of transports that
        // are not available.
        let transports = self.effective_transports();
        let tcp = ["tcp", "all"].iter().any(|name| transports.contains(name));
        let parts = [("TX_SEG_SIZE", "256k"), ("RX_SEG_SIZE", "256k")].into_iter().filter(|_| tcp);
        let old = kept.into_iter().chain(parts);
        let old = old.filter(|_| version.starts_with("1.13."));
        // One buffer per slot of a peer worker's queue, and some spare ones. UCX's 512 buffers of 8 KiB are meant for
        // the peers of a whole host and take 4 MB per worker at once.
        let buffers = shared_memory_of(&transports).map(|_| ("MM_RX_BUFS_GROW", "96"));
        let fixed = old.chain(buffers).map(|(name, value)| (name.to_owned(), value.to_owned()));
        fixed.chain(named).chain(self.settings.iter().cloned()).collect()
    }

    /// Returns the effective value of `UCX_TLS`.
    fn effective_transports(&self) -> String {
        let set = self.settings.iter().rev().find(|(name, _)| name == "TLS").map(|(_, list)| list.clone());
        let chosen = set.or_else(|| self.transports.clone()).or_else(|| std::env::var("UCX_TLS").ok());
        chosen.unwrap_or_else(|| "all".to_owned())
    }

    /// Returns the settings of peer workers, which use only the shared-memory transports. `None` if there are none.
    pub(crate) fn shared_memory_settings(&self, version: &str) -> Option<Vec<(String, String)>> {
        let mut settings = self.ucx_settings(version);
        let transports = shared_memory_of(&self.effective_transports())?;
        settings.retain(|(name, _)| !NETWORK_PREFIXES.iter().any(|network| name.starts_with(network)));
        // Shared memory needs no registration, and UCX never removes the cache entries of a destroyed worker.
        settings.insert(0, ("RCACHE_ENABLE".to_owned(), "n".to_owned()));
        // Slots of a queue: 64 in 1.13, 256 from 1.16 on. A sender uses its own number, so both ends need the same one.
        // One peer needs no more than 64.
        settings.insert(0, ("MM_FIFO_SIZE".to_owned(), "64".to_owned()));
        settings.push(("TLS".to_owned(), transports));
        // With indirect ids, UCX keeps a list of requests. 1.13 aborts the process when a worker with pending requests
        // is destroyed, such as requests to a dead peer. Direct ids are safe, because a peer worker is kept as long as
        // its peer may refer to it.
        settings.push(("PROTO_INDIRECT_ID".to_owned(), "n".to_owned()));
        Some(settings)
    }
}

/// Prefixes of settings of transports that a peer worker does not have. UCX would warn about them.
const NETWORK_PREFIXES: [&str; 10] =
    ["TCP_", "TX_SEG_SIZE", "RX_SEG_SIZE", "RC_", "UD_", "DC_", "IB_", "GGA_", "SRD_", "RDMA_CM_"];

/// Returns the shared-memory transports of a list, which has the form of `UCX_TLS`.
fn shared_memory_of(transports: &str) -> Option<String> {
    const QUEUES: [&str; 3] = ["posix", "sysv", "xpmem"];
    const AUXILIARY: [&str; 3] = ["cma", "knem", "self"];
    let (list, all_but) = transports.strip_prefix('^').map_or((transports, false), |list| (list, true));
    let mut named: Vec<_> = list.split(',').flat_map(|name| expand_alias(name.trim())).collect();
    if all_but {
        named = ONE_HOST.into_iter().filter(|name| !named.contains(name)).collect();
    }
    let mut found: Vec<&str> = Vec::new();
    for name in named {
        if (QUEUES.contains(&name) || AUXILIARY.contains(&name)) && !found.contains(&name) {
            found.push(name);
        }
    }
    found.iter().any(|name| QUEUES.contains(name)).then(|| found.join(","))
}

/// Transports that an alias such as `shm` stands for. `xpmem` and `knem` must be named explicitly. From UCX 1.16 on, a
/// rendezvous of xpmem reads mapped memory and aborts the process when its worker is destroyed meanwhile.
const ONE_HOST: [&str; 4] = ["posix", "sysv", "cma", "self"];

fn expand_alias(name: &str) -> Vec<&str> {
    match name {
        "all" | "sm" | "shm" => ONE_HOST.to_vec(),
        "mm" => vec!["posix", "sysv"],
        one => vec![one],
    }
}

/// Reason why a fabric cannot be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FabricError {
    /// The UCX library cannot be loaded or is not suitable.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// UCX cannot read a setting, and was therefore not loaded.
    #[error(
        "load UCX: {}=`{}` ({}) cannot be read, with which UCX does not start and 1.13 may end the process; fix: {}",
        .0.variable, .0.value, .0.origin, .0.fix
    )]
    Setting(Unreadable),
    /// UCX rejected a request.
    #[error("{what}: {status}")]
    Ucx {
        /// The operation and its target.
        what: String,
        /// UCX's status.
        status: String,
    },
    /// The thread cannot be started, or cannot be pinned to its CPU.
    #[error("start the fabric's thread: {0}")]
    Thread(#[from] std::io::Error),
}

impl From<FabricError> for Error {
    fn from(error: FabricError) -> Self {
        Self::not_started(Code::Unavailable, error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peer_workers_use_only_the_shared_memory_of_the_transports() {
        for (transports, found) in [
            ("all", Some("posix,sysv,cma,self")),
            ("posix,cma,self", Some("posix,cma,self")),
            ("rc,tcp, shm", Some("posix,sysv,cma,self")),
            ("sm,xpmem,posix", Some("posix,sysv,cma,self,xpmem")),
            ("mm,tcp", Some("posix,sysv")),
            ("tcp", None),
            ("tcp,cma", None),
            ("^tcp", Some("posix,sysv,cma,self")),
            ("^posix,tcp", Some("sysv,cma,self")),
            ("^sm", None),
            ("^mm", None),
        ] {
            assert_eq!(shared_memory_of(transports).as_deref(), found, "{transports}");
        }
    }

    #[test]
    fn the_last_word_on_transports_is_heard_and_buffers_are_a_callers_to_set() {
        let mut options = FabricOptions { transports: Some("tcp".to_owned()), ..FabricOptions::default() };
        assert_eq!(options.shared_memory_settings("1.22.0"), None);
        options.settings.push(("TLS".to_owned(), "posix,rc".to_owned()));
        options.settings.push(("TCP_TX_SEG_SIZE".to_owned(), "1m".to_owned()));
        options.settings.push(("MM_RX_BUFS_GROW".to_owned(), "7".to_owned()));
        let settings = options.shared_memory_settings("1.22.0").expect("posix is shared memory");
        let last = |name: &str| settings.iter().rev().find(|(known, _)| known == name).map(|(_, value)| value.as_str());
        assert_eq!((last("TLS"), last("MM_RX_BUFS_GROW")), (Some("posix"), Some("7")));
        assert_eq!(last("TCP_TX_SEG_SIZE"), None, "of a transport that is not there");
        assert_eq!(last("MM_FIFO_SIZE"), Some("64"));
        options.settings.push(("MM_FIFO_SIZE".to_owned(), "128".to_owned()));
        let settings = options.shared_memory_settings("1.22.0").expect("posix is shared memory");
        assert_eq!(
            settings.iter().rfind(|(name, _)| name == "MM_FIFO_SIZE").map(|(_, size)| size.as_str()),
            Some("128")
        );
    }
}

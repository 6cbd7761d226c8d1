//! Options of a fabric, and the UCX settings that follow from them.

pub(crate) mod driver;

use std::net::SocketAddr;
use std::time::Duration;

use gym_core::{Code, Error};

use crate::fabric::options::driver::Driver;
use crate::memory::PoolOptions;
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
    /// Where to listen; port 0 takes a free one. `None`: only peers of this host. Choose an address that only peers reach:
    /// UCX neither authenticates nor encrypts, and its tcp listener (seen with 1.13) gives the whole process up when it is
    /// sent something that is not UCX's.
    pub listen: Option<SocketAddr>,
    /// How the thread waits.
    pub driver: Driver,
    /// The CPU that the thread stays on.
    pub cpu: Option<usize>,
    /// Memory that is kept registered.
    pub pool: PoolOptions,
    /// Messages that may wait for the thread; urgent ones have a queue of the same size. 65,536.
    pub commands_max: usize,
    /// Messages of one connection that may wait for its peer to receive them; one more ends the connection. 32,768.
    pub unsent_max: usize,
    /// Messages of one connection that may arrive out of order. 4,096.
    pub reorder_max: usize,
    /// Bytes of the payloads that came with these messages. 64 MiB. What a peer sends unannounced is bounded by its
    /// `rendezvous_bytes`, so both ends need similar values.
    pub reorder_bytes_max: usize,
    /// Peers from the listener that have not shown a token yet. 1,024.
    pub unidentified_peers_max: usize,
    /// How long each of them may take. 10 s.
    pub hello_timeout: Duration,
    /// Connections over shared memory at a time. Each has a worker of its own, which takes about a megabyte and seven
    /// descriptors; together they get no more than half of those that this process may have, whose limit is raised as far as it
    /// may be with the fabric.
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
            // Callers are bounded by calls and bytes long before this; it only keeps a defect from eating the memory.
            commands_max: 65_536,
            // Answers to urgent messages have no other bound: a peer may ask and never read.
            unsent_max: 32_768,
            // As many short messages as can overtake one announcement that is a round of the thread late.
            reorder_max: 4096,
            // Eight times what a peer of ours has on its way at a time without having announced it.
            reorder_bytes_max: 64 << 20,
            // One for each worker of a large job that connects in the same moment.
            unidentified_peers_max: 1024,
            hello_timeout: Duration::from_secs(10),
            // A group of a hundred ranks on one host, each with a connection for calls and one for heartbeats.
            shared_memory_peers_max: 256,
        }
    }
}

impl FabricOptions {
    /// The settings as UCX names them; later ones win.
    pub(crate) fn ucx_settings(&self, version: &str) -> Vec<(String, String)> {
        let named = [("TLS", self.transports.clone()), ("NET_DEVICES", self.devices.clone())];
        let named = named.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?)));
        // Large parts are fetched where there are fetches (RDMA, memory of one host) and are copied messages elsewhere. What UCX sends
        // over TCP without a copy, puts and messages alike, ends the process with an assertion when its peer dies at the wrong
        // moment (1.13: tcp_ep.c:939, uct_iface.h:884; 3 of 40 runs of the test that kills peers, none of 40 with this).
        // Later versions choose their protocols in another way, and the test does not end them.
        let kept = [("RNDV_SCHEME", "get_zcopy"), ("ZCOPY_THRESH", "inf")];
        // What is copied goes out in parts of 8 KiB by default, each a system call: these make it thrice as fast.
        // These two are only TCP's, and 1.13 knows them without its name. It warns of settings of a transport that is not there.
        let said = self.transports_said();
        let tcp = ["tcp", "all"].iter().any(|name| said.contains(name));
        let parts = [("TX_SEG_SIZE", "256k"), ("RX_SEG_SIZE", "256k")].into_iter().filter(|_| tcp);
        let old = kept.into_iter().chain(parts);
        let old = old.filter(|_| version.starts_with("1.13."));
        // As many buffers as the queue of a peer worker has slots, and some to keep. The usual 512 of 8 KiB are for the peers of
        // a whole host, and take 4 MB of each worker at once.
        let buffers = shared_memory_of(&said).map(|_| ("MM_RX_BUFS_GROW", "96"));
        let fixed = old.chain(buffers).map(|(name, value)| (name.to_owned(), value.to_owned()));
        fixed.chain(named).chain(self.settings.iter().cloned()).collect()
    }

    /// `UCX_TLS` as it is in the end.
    fn transports_said(&self) -> String {
        let set = self.settings.iter().rev().find(|(name, _)| name == "TLS").map(|(_, list)| list.clone());
        let said = set.or_else(|| self.transports.clone()).or_else(|| std::env::var("UCX_TLS").ok());
        said.unwrap_or_else(|| "all".to_owned())
    }

    /// The settings for the workers of peers on this host: of the transports only those over shared memory. `None` when there
    /// are none.
    pub(crate) fn shared_memory_settings(&self, version: &str) -> Option<Vec<(String, String)>> {
        let mut settings = self.ucx_settings(version);
        let transports = shared_memory_of(&self.transports_said())?;
        settings.retain(|(name, _)| !OF_NETWORKS.iter().any(|network| name.starts_with(network)));
        // Nothing is registered for shared memory, and what a worker leaves in the cache when it goes is never taken out.
        settings.insert(0, ("RCACHE_ENABLE".to_owned(), "n".to_owned()));
        // Places of a queue: 64 in 1.13, 256 from 1.16 on. A sender counts with its own number, so both ends need the same; and more
        // than 64 are not needed by one peer.
        settings.insert(0, ("MM_FIFO_SIZE".to_owned(), "64".to_owned()));
        settings.push(("TLS".to_owned(), transports));
        // With ids that are looked up UCX keeps a list of its requests, and 1.13 gives the process up when a worker is destroyed
        // that has some: those to a dead peer. They are not needed, because a peer worker stays as long as its peer may
        // name anything of it.
        settings.push(("PROTO_INDIRECT_ID".to_owned(), "n".to_owned()));
        Some(settings)
    }
}

/// Prefixes of settings of transports that a peer worker does not have: UCX warns about them.
const OF_NETWORKS: [&str; 10] =
    ["TCP_", "TX_SEG_SIZE", "RX_SEG_SIZE", "RC_", "UD_", "DC_", "IB_", "GGA_", "SRD_", "RDMA_CM_"];

/// What of a list of transports, as in `UCX_TLS`, is shared memory on one host.
fn shared_memory_of(transports: &str) -> Option<String> {
    const QUEUES: [&str; 3] = ["posix", "sysv", "xpmem"];
    const BESIDE: [&str; 3] = ["cma", "knem", "self"];
    let (list, all_but) = transports.strip_prefix('^').map_or((transports, false), |list| (list, true));
    let mut named: Vec<_> = list.split(',').flat_map(|name| meant_by(name.trim())).collect();
    if all_but {
        named = OF_ONE_HOST.into_iter().filter(|name| !named.contains(name)).collect();
    }
    let mut found: Vec<&str> = Vec::new();
    for name in named {
        if (QUEUES.contains(&name) || BESIDE.contains(&name)) && !found.contains(&name) {
            found.push(name);
        }
    }
    found.iter().any(|name| QUEUES.contains(name)).then(|| found.join(","))
}

/// What names of several transports stand for. Who wants `xpmem` or `knem` names it: a rendezvous that reads through mapped
/// memory, as xpmem's do from UCX 1.16 on, ends the process when its worker is destroyed meanwhile.
const OF_ONE_HOST: [&str; 4] = ["posix", "sysv", "cma", "self"];

fn meant_by(name: &str) -> Vec<&str> {
    match name {
        "all" | "sm" | "shm" => OF_ONE_HOST.to_vec(),
        "mm" => vec!["posix", "sysv"],
        one => vec![one],
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

//! Specification of a cluster, with the key names of NeMo RL's documentation.

use std::fmt;
use std::num::NonZeroU32;
use std::ops::Range;

use gym_core::transport::TransportPolicy;
use gym_core::{Error, Result};
use serde::de::{self, Deserializer};
use serde::{Deserialize, Serialize, Serializer};

use super::ports::MASTER_PORTS;

/// The requested cluster. The fields are the keys of its configuration; an unknown key is an error that lists the known ones. Only
/// `bundle_ct_per_node_list` is required. Nothing is started, and no machine is inspected, before the spec is placed.
///
/// ```
/// use gym_group::placement::ClusterSpec;
///
/// let spec: ClusterSpec = serde_json::from_str(r#"{"bundle_ct_per_node_list": [4, 0, 2], "gpu_ids": "auto"}"#)?;
/// spec.validate()?;
/// assert_eq!((spec.world_size(), spec.node_count()), (6, 2));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct ClusterSpec {
    /// Number of bundles of each logical node. A node without bundles keeps its index but is not used.
    pub bundle_ct_per_node_list: Vec<u32>,
    /// Prefix of the placement groups' names. The default is no prefix.
    #[serde(default)]
    pub name: String,
    /// Gives each bundle a GPU. The default is `true`.
    #[serde(default = "yes")]
    pub use_gpus: bool,
    /// Number of GPUs of a physical node, for layouts that depend on it. The default is 8.
    #[serde(default = "eight")]
    pub num_gpus_per_node: NonZeroU32,
    /// Maximum number of worker groups that may share the bundles; also the number of CPUs of a bundle. The default is one group if
    /// colocation is disabled, otherwise any number of groups; a bundle then has one CPU.
    #[serde(default)]
    pub max_colocated_worker_groups: Option<NonZeroU32>,
    /// The assignment of logical nodes to machines. The default is `SPREAD`.
    #[serde(default)]
    pub placement_group_strategy: PlacementStrategy,
    /// The GPUs to use. The default is `auto`.
    #[serde(default)]
    #[cfg_attr(feature = "schemars", schemars(extend("default" = "auto")))]
    pub gpu_ids: GpuIds,
    /// Lets several groups use the bundles. `true`: one group at a time. `false`: a second group is an error. By default, several
    /// groups may use them, without waiting for each other.
    #[serde(default)]
    pub enable_colocation: Option<bool>,
    /// The transport of bulk data. The default is `auto`.
    #[serde(default)]
    #[cfg_attr(feature = "schemars", schemars(extend("default" = "auto")))]
    pub communication_backend: CommunicationBackend,
    /// Samples the memory of nodes and GPUs; the memory of workers is always sampled. The default is `false`.
    #[serde(default)]
    pub monitor_memory: bool,
    /// The first port for rendezvous. The default is 1400.
    #[serde(default = "port_low")]
    pub port_range_low: u16,
    /// The port after the last one for rendezvous. The default is 1999.
    #[serde(default = "port_high")]
    pub port_range_high: u16,
    /// Number of nodes that must be in one NVLink domain. By default, nodes need not be in one domain.
    #[serde(default)]
    pub segment_size: Option<NonZeroU32>,
    /// Uses its GPUs together with other clusters that set this, too; not on Ray. The default is `false`: no other cluster gets
    /// them.
    #[serde(default)]
    pub share_gpus: bool,
}

/// The assignment of logical nodes to machines. A logical node is never split. In a unified cluster, each bundle is placed
/// individually.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum PlacementStrategy {
    /// On as few machines as possible.
    Pack,
    /// On as many machines as possible.
    #[default]
    Spread,
    /// On one machine, or the placement fails.
    StrictPack,
    /// Each on its own machine, or the placement fails.
    StrictSpread,
}

/// The GPUs that a cluster uses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema), schemars(from = "WrittenGpuIds"))]
pub enum GpuIds {
    /// The first free GPUs of a machine.
    #[default]
    Auto,
    /// A list of ids, for all logical nodes in order.
    Flat(Vec<u32>),
    /// A list of ids for each logical node.
    PerNode(Vec<Vec<u32>>),
}

/// The transport of bulk data: of calls to ranks, and of the collective operations between them. Ranks in this process always meet in its memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema), schemars(rename_all = "snake_case"))]
pub enum CommunicationBackend {
    /// The most preferred transport that is available.
    #[default]
    Auto,
    /// As `auto`, by name: ranks meet over the transports of the group, on CPUs.
    Host,
    /// NCCL, for collective operations on memory of GPUs; those on host memory are as with `host`, and calls as with `auto`. Ranks that meet without a GPU, or in a build without the feature `nccl`, get an error.
    Nccl,
    /// UCX.
    Ucx,
    /// TCP, also between ranks of one machine.
    Tcp,
    /// Shared memory within one machine.
    Shm,
}

fn yes() -> bool {
    true
}

fn eight() -> NonZeroU32 {
    NonZeroU32::MIN.saturating_add(7)
}

fn port_low() -> u16 {
    MASTER_PORTS.start
}

fn port_high() -> u16 {
    MASTER_PORTS.end
}

impl ClusterSpec {
    /// Creates a spec with these bundles for each node, and defaults for all else.
    #[must_use]
    pub fn new(bundle_ct_per_node_list: impl Into<Vec<u32>>) -> Self {
        Self {
            bundle_ct_per_node_list: bundle_ct_per_node_list.into(),
            name: String::new(),
            use_gpus: true,
            num_gpus_per_node: eight(),
            max_colocated_worker_groups: None,
            placement_group_strategy: PlacementStrategy::default(),
            gpu_ids: GpuIds::Auto,
            enable_colocation: None,
            communication_backend: CommunicationBackend::Auto,
            monitor_memory: false,
            port_range_low: port_low(),
            port_range_high: port_high(),
            segment_size: None,
            share_gpus: false,
        }
    }

    /// Returns the number of bundles.
    #[must_use]
    pub fn world_size(&self) -> usize {
        self.bundle_ct_per_node_list.iter().map(|count| *count as usize).sum()
    }

    /// Returns the number of logical nodes with at least one bundle.
    #[must_use]
    pub fn node_count(&self) -> usize {
        self.bundle_ct_per_node_list.iter().filter(|count| **count > 0).count()
    }

    /// Returns the ports for rendezvous.
    #[must_use]
    pub fn ports(&self) -> Range<u16> {
        self.port_range_low..self.port_range_high
    }

    /// Returns the number of CPUs of a bundle: one for each group that may share it.
    #[must_use]
    pub fn cpus_per_bundle(&self) -> u32 {
        self.max_colocated_worker_groups.map_or(1, NonZeroU32::get)
    }

    /// Returns the maximum number of worker groups that may use the bundles; `None` for any number.
    #[must_use]
    pub fn groups_max(&self) -> Option<u32> {
        match (self.enable_colocation, self.max_colocated_worker_groups) {
            (Some(false), _) => Some(1),
            (_, max) => max.map(NonZeroU32::get),
        }
    }

    /// Returns the GPU ids of each logical node; `None` for any GPUs of a machine.
    pub(super) fn gpus_of_nodes(&self) -> Result<Option<Vec<Vec<u32>>>> {
        let counts = &self.bundle_ct_per_node_list;
        let nested = match &self.gpu_ids {
            GpuIds::Auto => return Ok(None),
            GpuIds::PerNode(nested) => nested.clone(),
            GpuIds::Flat(flat) => {
                let total = self.world_size();
                if flat.len() != total {
                    return Err(invalid("gpu_ids", &format!("has {} ids for {total} bundles", flat.len())));
                }
                let mut rest = &flat[..];
                let split = |count: &u32| {
                    let (these, after) = rest.split_at(*count as usize);
                    rest = after;
                    these.to_vec()
                };
                counts.iter().map(split).collect()
            }
        };
        if nested.len() != counts.len() {
            return Err(invalid("gpu_ids", &format!("has {} lists for {} nodes", nested.len(), counts.len())));
        }
        for (node, (ids, count)) in nested.iter().zip(counts).enumerate() {
            if ids.len() != *count as usize {
                return Err(invalid(
                    "gpu_ids",
                    &format!("has {} ids for the {count} bundles of node {node}", ids.len()),
                ));
            }
            if let Some(twice) = ids.iter().enumerate().find_map(|(at, id)| ids[..at].contains(id).then_some(id)) {
                return Err(invalid("gpu_ids", &format!("names GPU {twice} twice on node {node}")));
            }
        }
        Ok(Some(nested))
    }

    /// Checks the constraints that do not depend on a machine.
    ///
    /// # Errors
    /// - `InvalidArgument`: there are no bundles, the GPU ids do not match the bundles, or the port range is empty.
    /// - `Unimplemented`: this build does not support the communication backend.
    pub fn validate(&self) -> Result<()> {
        if self.world_size() == 0 {
            return Err(invalid("bundle_ct_per_node_list", "has no bundle; name at least one node with one"));
        }
        if !self.use_gpus && self.gpu_ids != GpuIds::Auto {
            return Err(invalid("gpu_ids", "is given although use_gpus is false; leave one of them out"));
        }
        if !self.use_gpus && self.share_gpus {
            return Err(invalid("share_gpus", "is set although use_gpus is false; leave one of them out"));
        }
        self.gpus_of_nodes()?;
        if self.ports().is_empty() || self.port_range_low == 0 {
            let ports = format!("{}..{}", self.port_range_low, self.port_range_high);
            return Err(invalid("port_range_low", &format!("and port_range_high give no ports: {ports}")));
        }
        Ok(())
    }

    /// Returns the transport policy of the cluster's groups, unless their own configuration sets one. `None` if the cluster sets
    /// none either: UCX is then not used. Ranks in this process are always reached in process.
    #[must_use]
    pub fn transport_policy(&self) -> Option<TransportPolicy> {
        let transports: &[&str] = match self.communication_backend {
            CommunicationBackend::Auto
            | CommunicationBackend::Host
            | CommunicationBackend::Nccl
            | CommunicationBackend::Tcp => return None,
            CommunicationBackend::Ucx => &["mem", "shm", "rdma", "ucx_tcp"],
            CommunicationBackend::Shm => &["mem", "shm"],
        };
        TransportPolicy::named(transports.iter().map(|name| (*name).to_owned())).ok()
    }
}

fn invalid(key: &str, what: &str) -> Error {
    Error::invalid(format!("{key} {what}")).about("cluster")
}

impl CommunicationBackend {
    const ALL: [Self; 6] = [Self::Auto, Self::Host, Self::Nccl, Self::Ucx, Self::Tcp, Self::Shm];

    /// Returns the name in a configuration.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Host => "host",
            Self::Nccl => "nccl",
            Self::Ucx => "ucx",
            Self::Tcp => "tcp",
            Self::Shm => "shm",
        }
    }
}

impl fmt::Display for CommunicationBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl Serialize for CommunicationBackend {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

impl<'de> Deserialize<'de> for CommunicationBackend {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        let known = Self::ALL.into_iter().find(|backend| backend.as_str().eq_ignore_ascii_case(&name));
        known.ok_or_else(|| {
            de::Error::custom(format!("unknown backend '{name}'; there are auto, host, nccl, ucx, tcp and shm"))
        })
    }
}

/// The forms of `gpu_ids` in a configuration.
#[derive(Deserialize)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
#[serde(untagged)]
enum WrittenGpuIds {
    /// `auto`.
    Word(#[cfg_attr(feature = "schemars", schemars(extend("const" = "auto")))] String),
    /// A list of ids, for all logical nodes in order.
    Flat(Vec<u32>),
    /// A list of ids for each logical node.
    PerNode(Vec<Vec<u32>>),
}

impl<'de> Deserialize<'de> for GpuIds {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match WrittenGpuIds::deserialize(deserializer) {
            Ok(WrittenGpuIds::Word(word)) if word.eq_ignore_ascii_case("auto") => Ok(Self::Auto),
            Ok(WrittenGpuIds::Flat(ids)) => Ok(Self::Flat(ids)),
            Ok(WrittenGpuIds::PerNode(ids)) => Ok(Self::PerNode(ids)),
            _ => Err(de::Error::custom("gpu_ids is \"auto\", a list of GPU numbers, or one such list for each node")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gym_core::Code;
    use gym_core::transport::Transport;

    fn parse(text: &str) -> Result<ClusterSpec, serde_json::Error> {
        serde_json::from_str(text)
    }

    fn refused(spec: &ClusterSpec) -> (Code, String) {
        let error = spec.validate().unwrap_err();
        (error.code(), error.to_string())
    }

    #[test]
    fn the_documented_configuration_is_accepted() {
        let spec = parse(
            r#"{"bundle_ct_per_node_list": [8], "gpu_ids": [0, 1, 2, 3, 4, 5, 6, 7], "enable_colocation": true,
                "communication_backend": "NCCL", "monitor_memory": true}"#,
        )
        .unwrap();
        assert_eq!(spec.enable_colocation, Some(true));
        spec.validate().unwrap();
    }

    #[test]
    fn a_communication_backend_of_ucx_selects_its_transports() {
        let policy =
            |backend| ClusterSpec { communication_backend: backend, ..ClusterSpec::new([1]) }.transport_policy();
        assert_eq!(policy(CommunicationBackend::Auto), None);
        assert_eq!(policy(CommunicationBackend::Shm).unwrap().to_string(), "mem, shm");
        let ucx = policy(CommunicationBackend::Ucx).unwrap();
        let (rdma, http) = (Transport::new("rdma", 200).on_request(), Transport::new("http", 400));
        assert!(ucx.allows(rdma) && !ucx.allows(http), "who asks for UCX is not given less");
    }

    #[test]
    fn an_unknown_key_is_answered_with_those_there_are() {
        let error = parse(r#"{"bundle_ct_per_node_list": [1], "gpus": [0]}"#).unwrap_err().to_string();
        assert!(error.contains("gpus") && error.contains("gpu_ids") && error.contains("monitor_memory"), "{error}");
        assert!(parse(r#"{"bundle_ct_per_node_list": [-1]}"#).is_err());
        assert!(parse(r#"{"bundle_ct_per_node_list": [1], "gpu_ids": "all"}"#).is_err());
        assert!(parse(r#"{"bundle_ct_per_node_list": [1], "communication_backend": "mpi"}"#).is_err());
    }

    #[test]
    fn a_cluster_has_at_least_one_bundle() {
        for none in [vec![], vec![0, 0]] {
            assert_eq!(refused(&ClusterSpec::new(none)).0, Code::InvalidArgument);
        }
    }

    #[test]
    fn c175_ports_are_the_documented_ones_unless_given() {
        assert_eq!(ClusterSpec::new([1]).ports(), 1400..1999);
        let spec =
            parse(r#"{"bundle_ct_per_node_list": [1], "port_range_low": 11001, "port_range_high": 11100}"#).unwrap();
        assert_eq!(spec.ports(), 11001..11100);
        assert!(refused(&ClusterSpec { port_range_high: 1, ..spec }).1.contains("give no ports: 11001..1"));
    }

    #[test]
    fn gpu_ids_fit_the_bundles() {
        let with = |counts: &[u32], gpu_ids| ClusterSpec { gpu_ids, ..ClusterSpec::new(counts) };
        let split = with(&[1, 0, 2], GpuIds::Flat(vec![3, 4, 5])).gpus_of_nodes().unwrap();
        assert_eq!(split, Some(vec![vec![3], vec![], vec![4, 5]]));
        for (spec, text) in [
            (with(&[4], GpuIds::Flat(vec![0, 1, 2])), "has 3 ids for 4 bundles"),
            (with(&[1, 1], GpuIds::PerNode(vec![vec![0]])), "has 1 lists for 2 nodes"),
            (with(&[1, 1], GpuIds::PerNode(vec![vec![0], vec![1, 2]])), "has 2 ids for the 1 bundles of node 1"),
            (with(&[2], GpuIds::Flat(vec![5, 5])), "names GPU 5 twice on node 0"),
        ] {
            let (code, found) = refused(&spec);
            assert!(code == Code::InvalidArgument && found.contains(text), "{found}");
        }
    }

    #[test]
    fn colocation_is_off_on_or_left_open() {
        let with = |enable_colocation, max| ClusterSpec {
            enable_colocation,
            max_colocated_worker_groups: NonZeroU32::new(max),
            ..ClusterSpec::new([1])
        };
        assert_eq!(with(None, 0).groups_max(), None);
        assert_eq!(with(Some(true), 2).groups_max(), Some(2));
        assert_eq!(with(Some(false), 2).groups_max(), Some(1));
        assert_eq!((with(None, 0).cpus_per_bundle(), with(None, 2).cpus_per_bundle()), (1, 2));
    }
}

//! The environment of a rank, as torch and code for NeMo RL expect it.
//!
//! Later layers take precedence over earlier ones ([`VariableSource`]):
//!
//! | layer | from |
//! |---|---|
//! | defaults | `OMP_NUM_THREADS`: the CPUs of the bundle; what the allowed transports read when they are loaded; `WorkerKind::with_defaults` |
//! | process | the process that starts the rank, the controller or on another machine the agent of the node, without the kinds of `NOT_INHERITED` |
//! | controller | on another machine: the controller, without the kinds of `NOT_INHERITED` and `NOT_SENT`; of `NODE_FIRST`, a variable of the agent has precedence. On Ray also `RayOptions::variables` |
//! | group | the variables given to the group |
//! | rank | `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `NODE_RANK`, `MASTER_ADDR`, `MASTER_PORT`, `AVAILABLE_ADDR_LIST`, `AVAILABLE_PORT_LIST`, `CUDA_VISIBLE_DEVICES`; for a tied group's leader also `VLLM_PORT` |
//! | configured | the worker type's function of the rank's place, `WorkerKind::with_configure` |
//!
//! The controller's variables take precedence over those of an agent, as in NeMo RL, which passes `os.environ` on to its workers by Ray's runtime
//! environment: what somebody exports for a run must reach all its ranks, although the image of a node may set the same variable. A node keeps what describes it:
//! paths, proxies ([`NOT_SENT`]), and the names of its network devices ([`NODE_FIRST`]).
//!
//! Only GPUs that `CUDA_VISIBLE_DEVICES` or the driver of NVIDIA names are placed
//! ([`visible_gpus`](crate::visible_gpus)). A rank has its own in `CUDA_VISIBLE_DEVICES`, which HIP reads too. The variables of other vendors are left out for every rank; a worker type for such devices
//! sets them in [`WorkerKind::with_configure`](crate::WorkerKind::with_configure).

mod environment;
mod kinds;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::sync::Once;

use gym_core::{Error, Result};

use crate::provision::place::{RankPlace, Rendezvous};

pub use environment::{RankEnvironment, RankVariable, VariableSource};
pub use kinds::{NODE_FIRST, NOT_INHERITED, NOT_SENT, VariableKind};
use kinds::{inherited, sendable};

/// Environment variable with the join secret of nodes and their controllers: `rgym run --worker` reads it, and ranks do not inherit it.
pub const JOIN_SECRET_VARIABLE: &str = "GYM_JOIN_SECRET";

/// Bytes of the variables that a controller sends to its nodes. Linux gives a process 2 MiB for its variables and arguments with the usual stack of 8 MiB
/// (execve(2)), and the node adds its own.
const SENT_BYTES_MAX: usize = 1 << 20;

/// Environment variables by name.
///
/// ```
/// use gym_client::Transports;
/// use gym_group::{GroupOptions, GroupRequest, Variables};
///
/// let options = GroupOptions::new(Transports::standard());
/// let mut request = GroupRequest::new("policy", "policy_worker", &"/models/tiny", options)?;
/// request.variables = Variables::from([("HF_HOME".to_owned(), "/models".to_owned())]);
/// assert_eq!(request.variables["HF_HOME"], "/models");
/// # Ok::<(), gym_core::Error>(())
/// ```
pub type Variables = BTreeMap<String, String>;

/// The layers of a rank's environment, lowest first; the rank's own layer comes from its place.
#[derive(Clone, Debug, Default)]
pub(crate) struct VariableLayers<'a> {
    /// The variables of the worker type.
    pub defaults: Variables,
    /// The environment of this process.
    pub process: Variables,
    /// The variables that the controller has sent, if it is another process.
    pub controller: Option<&'a Variables>,
    /// The variables of the group.
    pub group: Option<&'a Variables>,
    /// The variables that the worker type derives from the rank's place.
    pub configured: Variables,
}

impl VariableLayers<'_> {
    /// Merges the layers into the environment of one rank.
    #[must_use]
    pub(crate) fn for_rank(self, place: &RankPlace, rendezvous: &Rendezvous) -> RankEnvironment {
        let copied = |variables: Option<&Variables>| variables.cloned().unwrap_or_default();
        let mut all = RankEnvironment::default();
        // As Ray does it. Otherwise each rank takes a thread for every core of the machine.
        all.layer(VariableSource::Defaults, [("OMP_NUM_THREADS", place.cpus.max(1).to_string())]);
        all.layer(VariableSource::Defaults, self.defaults);
        let process = inherited(self.process);
        let sent = copied(self.controller);
        let sent = sent.into_iter().filter(|(name, _)| !(NODE_FIRST.has(name) && process.contains_key(name)));
        let sent: Variables = sent.collect();
        all.layer(VariableSource::Process, process);
        all.layer(VariableSource::Controller, sent);
        all.layer(VariableSource::Group, copied(self.group));
        let mut own = vec![
            ("RANK", place.rank.to_string()),
            ("WORLD_SIZE", place.world_size.to_string()),
            ("LOCAL_RANK", place.local_rank.to_string()),
            ("LOCAL_WORLD_SIZE", place.local_world_size.to_string()),
            ("NODE_RANK", place.node_rank.to_string()),
            // Empty without a GPU, as in Ray: a worker without a GPU must not use one of another worker.
            ("CUDA_VISIBLE_DEVICES", place.gpus.join(",")),
        ];
        own.extend(rendezvous.variables());
        // vLLM reads the port at which its ranks connect from this variable.
        own.extend(place.engine_port.map(|port| ("VLLM_PORT", port.to_string())));
        all.layer(VariableSource::Rank, own);
        all.layer(VariableSource::Configured, self.configured);
        all
    }
}

/// Returns the variables of this process that are valid UTF-8; no worker protocol uses others, and JSON could not contain them. The first call that
/// leaves variables out names them in a warning.
#[must_use]
pub(crate) fn process_variables() -> Variables {
    static SAID: Once = Once::new();
    let (variables, others) = in_unicode(std::env::vars_os());
    if !others.is_empty() {
        SAID.call_once(|| {
            tracing::warn!(variables = others.join(" "), "ranks do not get variables that are not valid UTF-8");
        });
    }
    variables
}

/// Returns the variables that are valid UTF-8, and the names of the others.
fn in_unicode(variables: impl IntoIterator<Item = (OsString, OsString)>) -> (Variables, Vec<String>) {
    let (mut valid, mut others) = (Variables::new(), Vec::new());
    for (name, value) in variables {
        match (name.to_str(), value.into_string()) {
            (Some(name), Ok(value)) => drop(valid.insert(name.to_owned(), value)),
            _ => others.push(name.to_string_lossy().into_owned()),
        }
    }
    (valid, others)
}

/// Returns what this controller sends to ranks of other machines: its own variables, without those that belong to its place or its machine, and over
/// them those that were `given` for these machines.
///
/// # Errors
/// `InvalidArgument` if they are larger than [`SENT_BYTES_MAX`], with the largest ones.
pub(super) fn sent_variables(process: Variables, given: &Variables) -> Result<Variables> {
    let mut sent = sendable(process);
    sent.extend(given.clone());
    let size = |(name, value): (&String, &String)| name.len() + value.len();
    let total: usize = sent.iter().map(size).sum();
    if total <= SENT_BYTES_MAX {
        return Ok(sent);
    }
    let mut largest: Vec<(usize, &String)> = sent.iter().map(|variable| (size(variable), variable.0)).collect();
    largest.sort_unstable_by(|a, b| b.cmp(a));
    let largest: Vec<String> = largest.iter().take(3).map(|(size, name)| format!("{name} ({size} bytes)")).collect();
    Err(Error::invalid(format!(
        "the variables of this program have {total} bytes; a controller sends at most {SENT_BYTES_MAX} to its nodes; the largest are {}\n  fix: unset what ranks \
         do not need, or write it into a file",
        largest.join(", ")
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{IpAddr, Ipv4Addr};

    fn variables(pairs: &[(&str, &str)]) -> Variables {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    fn rendezvous() -> Rendezvous {
        let local = IpAddr::V4(Ipv4Addr::LOCALHOST);
        Rendezvous { master_address: local, master_port: 1400, available: vec![(local, 1401), (local, 1402)] }
    }

    #[test]
    fn c138_a_rank_knows_its_place_and_the_meeting_point() {
        let all = VariableLayers::default().for_rank(&RankPlace::on_one_node(1, 2), &rendezvous()).into_variables();
        let expected = variables(&[
            ("RANK", "1"),
            ("WORLD_SIZE", "2"),
            ("LOCAL_RANK", "1"),
            ("LOCAL_WORLD_SIZE", "2"),
            ("NODE_RANK", "0"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", "1400"),
            ("AVAILABLE_ADDR_LIST", "['127.0.0.1', '127.0.0.1']"),
            ("AVAILABLE_PORT_LIST", "[1401, 1402]"),
            ("CUDA_VISIBLE_DEVICES", ""),
            ("OMP_NUM_THREADS", "1"),
        ]);
        assert_eq!(all, expected);
    }

    #[test]
    fn c141_what_the_group_was_given_wins_over_this_process() {
        let group = variables(&[("PATH", "/group"), ("CUSTOM", "1")]);
        let layers = VariableLayers {
            process: variables(&[("PATH", "/bin"), ("HOME", "/root")]),
            group: Some(&group),
            ..VariableLayers::default()
        };
        let all = layers.for_rank(&RankPlace::on_one_node(0, 1), &rendezvous()).into_variables();
        assert_eq!((all["PATH"].as_str(), all["CUSTOM"].as_str(), all["HOME"].as_str()), ("/group", "1", "/root"));
        assert_eq!(group.len(), 2, "the group's variables do not leak into the next group");
    }

    #[test]
    fn c142_of_all_sources_the_later_wins_and_unique_names_survive() {
        let layer = |name: &str| variables(&[("SHARED", name), (&format!("ONLY_{name}"), name)]);
        let (controller, group) = (layer("controller"), layer("group"));
        let mut layers = VariableLayers {
            defaults: layer("defaults"),
            process: layer("process"),
            controller: Some(&controller),
            group: Some(&group),
            configured: layer("configured"),
        };
        let place = RankPlace::on_one_node(0, 1);
        for expected in ["configured", "group", "controller", "process", "defaults"] {
            let all = layers.clone().for_rank(&place, &rendezvous());
            let shared = all.get("SHARED").expect("each layer has it");
            assert_eq!((shared.value.as_str(), shared.source.as_str()), (expected, expected));
            assert!(all.get("ONLY_defaults").is_some(), "unique names survive: {all:?}");
            assert_eq!(all.get("RANK").map(|rank| rank.source), Some(VariableSource::Rank));
            match expected {
                "configured" => layers.configured.clear(),
                "group" => layers.group = None,
                "controller" => layers.controller = None,
                _ => layers.process.clear(),
            }
        }
    }

    #[test]
    fn another_launchers_place_is_not_passed_on_and_gpus_are_the_ranks_own() {
        let process = variables(&[
            ("SLURM_PROCID", "3"),
            ("LOCAL_WORLD_SIZE", "8"),
            ("CUDA_VISIBLE_DEVICES", "0,1,2"),
            ("HIP_VISIBLE_DEVICES", "0,1,2"),
        ]);
        let gpu = RankPlace { gpus: vec!["2".to_owned()], ..RankPlace::on_one_node(0, 1) };
        for (place, visible) in [(gpu, "2"), (RankPlace::on_one_node(0, 1), "")] {
            let layers = VariableLayers { process: process.clone(), ..VariableLayers::default() };
            let all = layers.for_rank(&place, &rendezvous()).into_variables();
            assert_eq!((all["CUDA_VISIBLE_DEVICES"].as_str(), all["LOCAL_WORLD_SIZE"].as_str()), (visible, "1"));
            assert!(!all.contains_key("SLURM_PROCID") && !all.contains_key("HIP_VISIBLE_DEVICES"), "{all:?}");
        }
    }

    #[test]
    fn threads_are_the_cpus_of_the_bundle_unless_a_layer_sets_them() {
        let set = variables(&[("OMP_NUM_THREADS", "5")]);
        let none = VariableLayers::default;
        let cases = [
            (none(), 4, "4"),
            (none(), 0, "1"),
            (VariableLayers { defaults: set.clone(), ..none() }, 4, "5"),
            (VariableLayers { process: set.clone(), ..none() }, 4, "5"),
            (VariableLayers { controller: Some(&set), ..none() }, 4, "5"),
            (VariableLayers { group: Some(&set), ..none() }, 4, "5"),
            (VariableLayers { configured: set.clone(), ..none() }, 4, "5"),
        ];
        for (layers, cpus, threads) in cases {
            let text = format!("{layers:?}");
            let place = RankPlace { cpus, ..RankPlace::on_one_node(0, 1) };
            assert_eq!(layers.for_rank(&place, &rendezvous()).into_variables()["OMP_NUM_THREADS"], threads, "{text}");
        }
    }

    #[test]
    fn a_node_keeps_the_names_of_its_devices_and_gets_those_it_lacks() {
        let controller =
            variables(&[("NCCL_SOCKET_IFNAME", "eth0"), ("GLOO_SOCKET_IFNAME", "eth0"), ("HF_HOME", "/run")]);
        let process = variables(&[("NCCL_SOCKET_IFNAME", "ens3"), ("HF_HOME", "/image")]);
        let layers = VariableLayers { process, controller: Some(&controller), ..VariableLayers::default() };
        let all = layers.for_rank(&RankPlace::on_one_node(0, 1), &rendezvous()).into_variables();
        let of = ["NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "HF_HOME"].map(|name| all[name].as_str());
        assert_eq!(of, ["ens3", "eth0", "/run"]);
    }

    #[test]
    fn too_many_variables_for_another_machine_are_an_error_with_the_largest() {
        let given = variables(&[("NCCL_DEBUG", "INFO")]);
        let process =
            |bytes: usize| variables(&[("HOME", "/root"), ("BLOB", &"x".repeat(bytes)), ("NCCL_DEBUG", "WARN")]);
        assert_eq!(
            sent_variables(process(1), &given).expect("small"),
            variables(&[("BLOB", "x"), ("NCCL_DEBUG", "INFO")])
        );
        let error = sent_variables(process(SENT_BYTES_MAX), &given).expect_err("large").to_string();
        assert!(error.contains("BLOB (1048580 bytes)") && error.contains("fix: unset"), "{error}");
    }

    #[test]
    fn variables_that_are_not_unicode_are_named() {
        use std::os::unix::ffi::OsStringExt as _;
        let bad = || OsString::from_vec(vec![b'a', 0xff]);
        let (valid, others) = in_unicode([("A".into(), "1".into()), ("B".into(), bad()), (bad(), "1".into())]);
        assert_eq!((valid, others), (variables(&[("A", "1")]), vec!["B".to_owned(), "a\u{fffd}".to_owned()]));
    }
}

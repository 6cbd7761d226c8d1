//! The environment of a rank, as torch and code for NeMo RL expect it.
//!
//! Later layers take precedence over earlier ones:
//!
//! | layer | from |
//! |---|---|
//! | defaults | the allowed transports ([`Transports::variables`](crate::transport::Transports::variables)); the worker type, [`WorkerKind::with_defaults`](crate::group::provision::workers::WorkerKind::with_defaults) |
//! | process | this process, without its own launcher variables ([`EXCLUDED_PREFIXES`]) |
//! | group | the variables given to the group |
//! | rank | `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `NODE_RANK`, `MASTER_ADDR`, `MASTER_PORT`, `AVAILABLE_ADDR_LIST`, `AVAILABLE_PORT_LIST`, `CUDA_VISIBLE_DEVICES`; for a tied group's leader also `VLLM_PORT` |
//! | configured | the worker type's function of the rank's place, [`WorkerKind::with_configure`](crate::group::provision::workers::WorkerKind::with_configure) |

use std::collections::BTreeMap;

use crate::group::provision::place::{RankPlace, Rendezvous};

/// Environment variable with the join secret of nodes and their controllers: `rgym run --worker` reads it, and ranks do not inherit it.
pub const JOIN_SECRET_VARIABLE: &str = "GYM_JOIN_SECRET";

/// Environment variables by name.
pub type Variables = BTreeMap<String, String>;

/// Prefixes of variables that describe the place of *this* process in a launcher, and would mislead an MPI-aware engine in a
/// worker. Those of a node agent have its join secret, which the code of a worker need not know.
pub(crate) const EXCLUDED_PREFIXES: [&str; 9] =
    ["PMIX_", "PMI_", "MPI_", "OMPI_", "SLURM_", "RAY_", "GYM_NODE_", "GYM_RAY_", JOIN_SECRET_VARIABLE];

/// The layers of a rank's environment, lowest first; the rank's own layer comes from its place.
#[derive(Clone, Debug, Default)]
pub(crate) struct VariableLayers<'a> {
    /// The variables of the worker type.
    pub defaults: Variables,
    /// The environment of this process.
    pub process: Variables,
    /// The variables of the group.
    pub group: Option<&'a Variables>,
    /// The variables that the worker type derives from the rank's place.
    pub configured: Variables,
}

impl VariableLayers<'_> {
    /// Merges the layers into the environment of one rank.
    #[must_use]
    pub(crate) fn for_rank(self, place: &RankPlace, rendezvous: &Rendezvous) -> Variables {
        let mut all = self.defaults;
        all.extend(self.process.into_iter().filter(|(name, _)| !is_excluded(name)));
        all.extend(self.group.into_iter().flatten().map(|(name, value)| (name.clone(), value.clone())));
        let own = [
            ("RANK", place.rank.to_string()),
            ("WORLD_SIZE", place.world_size.to_string()),
            ("LOCAL_RANK", place.local_rank.to_string()),
            ("NODE_RANK", place.node_rank.to_string()),
            // Empty without a GPU, as in Ray: a worker without a GPU must not use one of another worker.
            ("CUDA_VISIBLE_DEVICES", place.gpus.join(",")),
        ];
        all.extend(own.into_iter().chain(rendezvous.variables()).map(|(name, value)| (name.to_owned(), value)));
        // vLLM reads the port at which its ranks connect from this variable.
        all.extend(place.engine_port.map(|port| ("VLLM_PORT".to_owned(), port.to_string())));
        all.extend(self.configured);
        all
    }
}

/// Returns the variables of this process that are valid UTF-8; no worker protocol uses others, and JSON could not contain them.
#[must_use]
pub(crate) fn process_variables() -> Variables {
    std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .collect()
}

fn is_excluded(name: &str) -> bool {
    EXCLUDED_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
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
        let all = VariableLayers::default().for_rank(&RankPlace::on_one_node(1, 2), &rendezvous());
        let expected = variables(&[
            ("RANK", "1"),
            ("WORLD_SIZE", "2"),
            ("LOCAL_RANK", "1"),
            ("NODE_RANK", "0"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", "1400"),
            ("AVAILABLE_ADDR_LIST", "['127.0.0.1', '127.0.0.1']"),
            ("AVAILABLE_PORT_LIST", "[1401, 1402]"),
            ("CUDA_VISIBLE_DEVICES", ""),
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
        let all = layers.for_rank(&RankPlace::on_one_node(0, 1), &rendezvous());
        assert_eq!((all["PATH"].as_str(), all["CUSTOM"].as_str(), all["HOME"].as_str()), ("/group", "1", "/root"));
        assert_eq!(group.len(), 2, "the group's variables do not leak into the next group");
    }

    #[test]
    fn c142_of_all_four_sources_the_later_wins_and_unique_names_survive() {
        let layer = |name: &str| variables(&[("SHARED", name), (&format!("ONLY_{name}"), name)]);
        let group = layer("group");
        let mut layers = VariableLayers {
            defaults: layer("defaults"),
            process: layer("process"),
            group: Some(&group),
            configured: layer("configured"),
        };
        let place = RankPlace::on_one_node(0, 1);
        for expected in ["configured", "group", "process", "defaults"] {
            let all = layers.clone().for_rank(&place, &rendezvous());
            assert_eq!(all["SHARED"], expected);
            assert!(all.contains_key("ONLY_defaults"), "unique names survive: {all:?}");
            match expected {
                "configured" => layers.configured.clear(),
                "group" => layers.group = None,
                _ => layers.process.clear(),
            }
        }
    }

    #[test]
    fn another_launchers_place_is_not_passed_on_and_gpus_are_the_ranks_own() {
        let launcher = [("SLURM_PROCID", "3"), ("OMPI_COMM_WORLD_RANK", "3"), ("GYM_JOIN_SECRET", "s")];
        let process = variables(&[&launcher[..], &[("CUDA_VISIBLE_DEVICES", "0,1,2")]].concat());
        let place = RankPlace { gpus: vec!["2".to_owned()], ..RankPlace::on_one_node(0, 1) };
        let all = VariableLayers { process, ..VariableLayers::default() }.for_rank(&place, &rendezvous());
        assert_eq!(all["CUDA_VISIBLE_DEVICES"], "2");
        assert!(!all.keys().any(|name| is_excluded(name)), "{all:?}");
    }
}

//! The requests of a worker's configuration or environment. An error about it ends the start; an error about the rest is a warning.

use std::collections::{BTreeMap, BTreeSet};

use gym_client::config::GymConfig;
use serde_json::Value;

/// Beginnings of the variables that set a library of communication.
const PREFIXES: [&str; 5] = ["NCCL_", "RCCL_", "UCX_", "GLOO_", "VLLM_RAY_"];
/// Variables that ask for nothing: images and debugging set them, and this program sets the last two for UCX.
const ASK_FOR_NOTHING: [&str; 7] = [
    "NCCL_VERSION",
    "NCCL_DEBUG",
    "NCCL_DEBUG_FILE",
    "NCCL_DEBUG_SUBSYS",
    "NCCL_HOME",
    "UCX_HANDLE_ERRORS",
    "UCX_MEM_MMAP_HOOK_MODE",
];
/// Transports that UCX carries.
#[cfg(any(feature = "rdma", test))]
const OF_UCX: [&str; 3] = ["rdma", "shm", "ucx_tcp"];
/// Names the GPUs of a process.
const VISIBLE_GPUS: &str = "CUDA_VISIBLE_DEVICES";
/// Switches RDMA off in NCCL.
const RDMA_OFF: &str = "NCCL_IB_DISABLE";
/// Most names of variables in a text.
const NAMES_MAX: usize = 4;

/// The requests to a worker, each with its source.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Asked {
    /// The source of the request for GPUs.
    pub(super) gpus: Option<String>,
    /// The key of the configuration that names NCCL.
    pub(super) nccl: Option<String>,
    /// The transport that is required.
    pub(super) transport: Option<String>,
    /// The variables that are set for the libraries, also those that are empty.
    pub(super) variables: BTreeSet<String>,
    /// Those of them that have a value and ask for something.
    pub(super) settings: BTreeSet<String>,
    /// NCCL must not use RDMA.
    pub(super) is_rdma_off: bool,
}

impl Asked {
    /// Reads the variables of the process.
    pub(super) fn of_environment(variables: &BTreeMap<String, String>) -> Self {
        let of_library = |name: &&String| {
            PREFIXES.iter().any(|prefix| name.starts_with(prefix)) && !ASK_FOR_NOTHING.contains(&name.as_str())
        };
        let set: BTreeSet<String> = variables.keys().filter(of_library).cloned().collect();
        let settings = set.iter().filter(|name| !variables[*name].is_empty()).cloned().collect();
        let visible =
            variables.get(VISIBLE_GPUS).is_some_and(|value| !matches!(value.trim(), "" | "-1" | "NoDevFiles"));
        let gpus = visible.then(|| VISIBLE_GPUS.to_owned());
        let value = |name: &str| variables.get(name).map_or("", |value| value.trim());
        let is_rdma_off = value(RDMA_OFF).parse::<i64>().is_ok_and(|off| off != 0)
            || value("NCCL_NET").eq_ignore_ascii_case("socket");
        Self { gpus, nccl: None, transport: None, variables: set, settings, is_rdma_off }
    }

    /// Adds what a configuration asks for.
    pub(super) fn and_of_configuration(mut self, config: &GymConfig) -> Self {
        let required = config.transport_policy.as_ref().and_then(|policy| policy.required());
        self.transport = self.transport.or_else(|| required.map(str::to_owned));
        self.search("", &config.merged);
        self
    }

    /// Looks for the keys of clusters, at any depth.
    fn search(&mut self, place: &str, value: &Value) {
        match value {
            Value::Object(map) => {
                for (key, value) in map {
                    let place = if place.is_empty() { key.clone() } else { format!("{place}.{key}") };
                    let asks = match key.as_str() {
                        "communication_backend" => {
                            if value.as_str().is_some_and(|name| name.eq_ignore_ascii_case("nccl")) {
                                self.nccl.get_or_insert_with(|| format!("{place}: nccl"));
                            }
                            false
                        }
                        "use_gpus" => *value == Value::Bool(true),
                        "num_gpus" | "num_gpus_per_node" | "gpus" => value.as_u64().is_some_and(|number| number > 0),
                        "gpu_ids" => value.as_array().is_some_and(|ids| !ids.is_empty()),
                        _ => false,
                    };
                    if asks {
                        self.gpus.get_or_insert_with(|| format!("{place}: {value}"));
                    }
                    self.search(&place, value);
                }
            }
            Value::Array(values) => values.iter().for_each(|value| self.search(place, value)),
            _ => {}
        }
    }

    /// Returns `true` if nothing of this field is asked for.
    pub(super) fn is_nothing(&self) -> bool {
        *self == Self::default()
    }

    /// Returns what asks for NCCL.
    #[cfg(any(feature = "rdma", test))]
    pub(super) fn for_nccl(&self) -> Option<String> {
        self.nccl.clone().or_else(|| self.set(&["NCCL_", "RCCL_"]))
    }

    /// Returns what asks for UCX.
    #[cfg(any(feature = "rdma", test))]
    pub(super) fn for_ucx(&self) -> Option<String> {
        let required = self.transport.as_ref().filter(|name| OF_UCX.contains(&name.as_str()));
        required.map(|name| format!("require_transport: {name}")).or_else(|| self.set(&["UCX_"]))
    }

    /// Returns the variables that ask NCCL for RDMA.
    #[cfg(any(feature = "rdma", test))]
    pub(super) fn for_rdma_of_nccl(&self) -> Option<String> {
        let asks = |name: &&String| name.starts_with("NCCL_IB_") && *name != RDMA_OFF;
        if self.is_rdma_off || !self.settings.iter().any(|name| asks(&name)) {
            return None;
        }
        self.set(&["NCCL_IB_"])
    }

    /// Returns the names of the settings with these beginnings, for a text.
    pub(super) fn set(&self, prefixes: &[&str]) -> Option<String> {
        let names: Vec<&str> = self
            .settings
            .iter()
            .map(String::as_str)
            .filter(|name| prefixes.iter().any(|prefix| name.starts_with(prefix)))
            .collect();
        let more = names.len().checked_sub(NAMES_MAX).filter(|more| *more > 0);
        let shown = names[..names.len().min(NAMES_MAX)].join(", ");
        (!names.is_empty()).then(|| more.map_or(shown.clone(), |more| format!("{shown} and {more} more")))
    }

    /// Returns all that asks, for a text.
    #[cfg(not(feature = "rdma"))]
    pub(super) fn text(&self) -> String {
        let required = self.transport.as_ref().map(|name| format!("require_transport: {name}"));
        let all = [self.gpus.clone(), self.nccl.clone(), required, self.set(&[""])];
        all.into_iter().flatten().collect::<Vec<_>>().join(", ")
    }
}

#[cfg(test)]
mod tests {
    use gym_client::config::{ConfigLoader, Overrides};

    use super::*;

    fn variables(all: &[(&str, &str)]) -> BTreeMap<String, String> {
        all.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn what_images_and_debugging_set_asks_for_nothing() {
        let of_image =
            [("NCCL_VERSION", "2.27.3-1"), ("NCCL_DEBUG", "WARN"), ("UCX_HANDLE_ERRORS", "none"), ("HOME", "/root")];
        assert!(Asked::of_environment(&variables(&of_image)).is_nothing());
        assert!(Asked::of_environment(&variables(&[("CUDA_VISIBLE_DEVICES", "")])).is_nothing());
    }

    #[test]
    fn variables_ask_for_their_library() {
        let seed = [
            ("NCCL_IB_TC", "106"),
            ("NCCL_SOCKET_IFNAME", ""),
            ("UCX_TLS", "rc,self,sm"),
            ("CUDA_VISIBLE_DEVICES", "0,1"),
        ];
        let asked = Asked::of_environment(&variables(&seed));
        assert_eq!((asked.for_nccl().as_deref(), asked.for_ucx().as_deref()), (Some("NCCL_IB_TC"), Some("UCX_TLS")));
        assert_eq!(asked.gpus.as_deref(), Some("CUDA_VISIBLE_DEVICES"));
        assert!(asked.variables.contains("NCCL_SOCKET_IFNAME") && !asked.settings.contains("NCCL_SOCKET_IFNAME"));
    }

    #[test]
    fn keys_of_a_configuration_ask_at_any_depth() {
        let folder = tempfile::tempdir().unwrap();
        let text = "require_transport: rdma\ncluster:\n  communication_backend: NCCL\n  gpu_ids: auto\npolicy: {generation: {num_gpus: 2}}\n";
        std::fs::write(folder.path().join("a.yaml"), text).unwrap();
        let config = ConfigLoader::new(folder.path())
            .load(&["a.yaml"], &Overrides::parse(Vec::<String>::new()).unwrap())
            .unwrap();
        let asked = Asked::default().and_of_configuration(&config);
        assert_eq!(asked.nccl.as_deref(), Some("cluster.communication_backend: nccl"));
        assert_eq!(asked.gpus.as_deref(), Some("policy.generation.num_gpus: 2"));
        assert_eq!(asked.transport.as_deref(), Some("rdma"));
        assert_eq!(asked.for_ucx().as_deref(), Some("require_transport: rdma"));
    }
}

//! A cluster and its worker groups as data, with the key names of NeMo RL's documentation.

use std::collections::BTreeMap;
use std::path::Path;

use gym_client::config::{BlockFile, ConfigError, nearest_name};
use gym_core::transport::Transport;
use gym_core::{Code, Error};

use crate::placement::{ClusterSpec, WorkerGroupConfig};

/// The block of the cluster; every other block is a worker group.
const CLUSTER: &str = "cluster";

/// A file with a block `cluster` and a block for each worker group, as JSON or YAML:
///
/// ```yaml
/// cluster: {bundle_ct_per_node_list: [4, 8, 2], enable_colocation: true}
/// policy: {memory_limit: 8GB, restart_on_failure: true, max_restarts: 3}
/// generation: {load_balancing_strategy: least_pending}
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ClusterFile {
    /// The cluster.
    pub cluster: ClusterSpec,
    /// Its worker groups by name.
    pub groups: BTreeMap<String, WorkerGroupConfig>,
    blocks: BlockFile,
    source: String,
}

impl ClusterFile {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// If the file contains an unknown key, a value of the wrong type, a contradiction, or an unsupported setting
    /// ([`ConfigError::Unsupported`]). The error names file, line and key.
    pub fn read(path: impl AsRef<Path>) -> Result<Self, ConfigError> {
        let path = path.as_ref();
        Self::of(BlockFile::read(path)?, path.display().to_string())
    }

    /// Reads and checks a text, such as that of a file which the program includes; `source` is its name in errors.
    ///
    /// # Errors
    /// As [`ClusterFile::read`].
    pub fn parse(text: &str, source: &str) -> Result<Self, ConfigError> {
        Self::of(BlockFile::parse(text, source)?, source.to_owned())
    }

    fn of(blocks: BlockFile, source: String) -> Result<Self, ConfigError> {
        let cluster: ClusterSpec = blocks.block(CLUSTER)?;
        cluster.validate().map_err(|error| blocks.placed(CLUSTER, &error))?;
        let mut groups = BTreeMap::new();
        for name in blocks.names().into_iter().filter(|name| name != CLUSTER) {
            let group: WorkerGroupConfig = blocks.block(&name)?;
            group.validate().map_err(|error| blocks.placed(&name, &error))?;
            groups.insert(name, group);
        }
        Ok(Self { cluster, groups, blocks, source })
    }

    /// Checks the names of transports against those of a program, as each group does when it starts.
    ///
    /// # Errors
    /// The file, the line, the key and the known names.
    pub fn check_transports(&self, known: &[Transport]) -> Result<(), ConfigError> {
        self.groups.iter().try_for_each(|(name, group)| {
            group.check_transports(known).map_err(|error| self.blocks.placed(name, &error))
        })
    }

    /// Returns the configuration of the worker group of that name.
    ///
    /// # Errors
    /// `NotFound`, with the file and the nearest name, or with all names of the file.
    pub fn group(&self, name: &str) -> Result<WorkerGroupConfig, Error> {
        self.groups.get(name).cloned().ok_or_else(|| {
            let known: Vec<&str> = self.groups.keys().map(String::as_str).collect();
            let fix = match nearest_name(name, known.iter().copied()) {
                Some(near) => format!("did you mean `{near}`?"),
                None => format!("it has {}", if known.is_empty() { "none".to_owned() } else { known.join(", ") }),
            };
            Error::not_started(Code::NotFound, format!("no worker group `{name}`; {fix}")).about(self.source.clone())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<ClusterFile, ConfigError> {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("cluster.yaml");
        std::fs::write(&path, text).expect("writes");
        ClusterFile::read(&path)
    }

    #[test]
    fn json_and_yaml_are_read_alike() {
        let json =
            read("{\n  \"cluster\": {\"bundle_ct_per_node_list\": [2]},\n  \"policy\": {\"memory_limit\": \"1GB\"}\n}");
        let yaml = read("cluster: {bundle_ct_per_node_list: [2]}\npolicy: {memory_limit: 1GB}\n").expect("reads");
        let json = json.expect("reads");
        let error =
            ClusterFile::parse("cluster: {bundle_ct_per_node_lst: [2]}", "included.yaml").expect_err("misspelled");
        assert!(error.to_string().contains("included.yaml:1: cluster."), "{error}");
        let known = [Transport::MEM, Transport::new("http", 400)];
        for (group, says) in [
            (
                "transport: tpc",
                "cluster.yaml:2: policy.transport: transport `tpc` is no transport\n  fix: use auto, or one or more of",
            ),
            ("transport: [http, tpc]", "`tpc` is no transport"),
            ("require_transport: tpc", "policy.require_transport: require_transport `tpc` is no transport\n  fix: use"),
            ("load_balancing_strategy: affinity", "policy.load_balancing_strategy: "),
            ("load_balancing_strategy: afinity", "affinity"),
            ("transport: [http, mem]", ""),
        ] {
            let file = read(&format!("cluster: {{bundle_ct_per_node_list: [2]}}\npolicy: {{{group}}}\n"));
            let checked = file.and_then(|file| file.check_transports(&known));
            let said = checked.err().map(|error| error.to_string()).unwrap_or_default();
            assert!(said.contains(says) && said.is_empty() == says.is_empty(), "{group}: {said}");
        }
        assert_eq!((&json.cluster, &json.groups), (&yaml.cluster, &yaml.groups));
        assert_eq!(yaml.group("policy").expect("is there").memory_limit, Some(1_000_000_000));
        let error = yaml.group("polcy").expect_err("misspelled").to_string();
        assert!(error.contains("cluster.yaml") && error.contains("did you mean `policy`?"), "{error}");
    }
}

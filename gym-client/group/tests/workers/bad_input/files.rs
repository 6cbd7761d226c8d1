//! Files of clusters and groups with a mistake in them: the error names file, line and key.

use gym_client::config::ConfigError;
use gym_group::ClusterFile;

use super::{Case, Got};

const FILE: &str = "mistake in a cluster file";

fn file(name: &'static str, text: &'static str, says: &'static [&'static str]) -> Case {
    Case::new(FILE, name, "refused", says, move |fixture| {
        Box::pin(async move {
            match ClusterFile::read(fixture.file("cluster.yaml", text)) {
                Ok(_) => Got::new("accepted", ""),
                Err(error) => Got::new("refused", error.to_string()),
            }
        })
    })
}

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = vec![
        file(
            "a misspelled key of the cluster",
            "cluster:\n  bundle_ct_per_node_list: [2]\n  enable_collocation: true\n",
            &["cluster.yaml:3: cluster.enable_collocation", "did you mean 'enable_colocation'?"],
        ),
        file(
            "a misspelled key of a group",
            "cluster: {bundle_ct_per_node_list: [2]}\npolicy:\n  memory_limit: 8GB\n  max_restart: 3\n",
            &["cluster.yaml:4: policy.max_restart", "did you mean 'max_restarts'?"],
        ),
        file(
            "a duplicate key",
            "cluster: {bundle_ct_per_node_list: [2]}\npolicy: {}\npolicy: {}\n",
            &["cluster.yaml:3: policy", "first on line 2"],
        ),
        file("no cluster", "policy: {}\n", &["cluster.yaml:1", "there is no block 'cluster'"]),
        file("no bundles", "cluster:\n  use_gpus: false\n", &["cluster.yaml:2: cluster", "bundle_ct_per_node_list"]),
        file(
            "a negative number of bundles",
            "cluster:\n  bundle_ct_per_node_list:\n    - 2\n    - -1\n",
            &["cluster.yaml:4: cluster.bundle_ct_per_node_list.1", "expected a whole number of at least 0, found -1"],
        ),
        file(
            "a string instead of a boolean",
            "cluster:\n  bundle_ct_per_node_list: [2]\n  use_gpus: perhaps\n",
            &["cluster.yaml:3: cluster.use_gpus", "expected true or false"],
        ),
        file(
            "invalid GPU ids",
            "cluster:\n  bundle_ct_per_node_list: [2]\n  gpu_ids: all\n",
            &["cluster.yaml:3: cluster.gpu_ids", "\"auto\", a list of GPU numbers"],
        ),
        file(
            "GPU ids that do not match",
            "cluster:\n  bundle_ct_per_node_list: [2]\n  gpu_ids: [0, 0]\n",
            &["cluster.yaml:3: cluster.gpu_ids", "names GPU 0 twice"],
        ),
        file(
            "an unknown backend",
            "cluster:\n  bundle_ct_per_node_list: [2]\n  communication_backend: mpi\n",
            &["cluster.yaml:3: cluster.communication_backend", "auto, host, nccl, ucx, tcp and shm"],
        ),
        file(
            "an invalid amount of memory",
            "cluster: {bundle_ct_per_node_list: [2]}\npolicy:\n  memory_limit: 8 bananas\n",
            &["cluster.yaml:3: policy.memory_limit", "8 bananas", "GiB"],
        ),
        file(
            "an unknown strategy",
            "cluster: {bundle_ct_per_node_list: [2]}\npolicy:\n  load_balancing_strategy: fastest\n",
            &["cluster.yaml:3: policy.load_balancing_strategy", "round_robin"],
        ),
        file("half a file", "cluster: {bundle_ct_per_node_list: [2]\npolicy:\n", &["cluster.yaml:", "malformed YAML"]),
        file("a list", "- 2\n", &["cluster.yaml:1", "not a mapping"]),
    ];
    cases.push(Case::new(FILE, "no file", "refused", &["clutser.yaml: cannot be read"], |fixture| {
        Box::pin(async move {
            let error: Result<_, ConfigError> = ClusterFile::read(fixture.folder().join("clutser.yaml"));
            Got::new("refused", error.expect_err("there is none").to_string())
        })
    }));
    cases.push(Case::new(
        FILE,
        "an undefined group",
        "refused: not_found",
        &["cluster.yaml", "`policy`?"],
        |fixture| {
            Box::pin(async move {
                let text = "cluster: {bundle_ct_per_node_list: [2]}\npolicy: {}\n";
                let file = ClusterFile::read(fixture.file("cluster.yaml", text)).expect("a file");
                Got::refused(file.group("polcy"))
            })
        },
    ));
    cases
}

//! Clusters that cannot be.

use gym_core::Result;
use gym_group::VirtualCluster;
use gym_group::placement::{ClusterSpec, NodeResources, place};

use super::super::local;
use super::{Case, Got};

const SPEC: &str = "invalid cluster";
const ROOM: &str = "insufficient resources";

/// A cluster of this text, placed on two nodes: one with GPUs 0 to 3, one with 0 and 1.
fn cluster(
    kind: &'static str,
    name: &'static str,
    json: &'static str,
    outcome: &'static str,
    says: &'static [&'static str],
) -> Case {
    Case::new(kind, name, outcome, says, move |_| {
        Box::pin(async move {
            let spec: ClusterSpec = serde_json::from_str(json).expect("a spec");
            let placed = || -> Result<()> {
                VirtualCluster::new(spec.clone(), local())?;
                let gpus = |count: u32| (0..count).map(|gpu| gpu.to_string()).collect();
                place(
                    &spec,
                    &[NodeResources::new("left", 64, gpus(4)), NodeResources::new("right", 8, gpus(2))],
                    false,
                )?;
                Ok(())
            };
            Got::refused(placed())
        })
    })
}

pub(crate) fn cases() -> Vec<Case> {
    const WRONG: &str = "refused: invalid_argument";
    const LACKS: &str = "refused: resource_exhausted";
    vec![
        cluster(SPEC, "no bundle", r#"{"bundle_ct_per_node_list": [0, 0]}"#, WRONG, &["bundle_ct_per_node_list"]),
        cluster(
            SPEC,
            "fewer GPU ids than bundles",
            r#"{"bundle_ct_per_node_list": [4], "gpu_ids": [0, 1, 2]}"#,
            WRONG,
            &["gpu_ids has 3 ids for 4 bundles"],
        ),
        cluster(
            SPEC,
            "GPU ids for fewer nodes",
            r#"{"bundle_ct_per_node_list": [1, 1], "gpu_ids": [[0]]}"#,
            WRONG,
            &["gpu_ids has 1 lists for 2 nodes"],
        ),
        cluster(
            SPEC,
            "a duplicate GPU",
            r#"{"bundle_ct_per_node_list": [2, 2], "gpu_ids": [[0, 1], [1, 1]]}"#,
            WRONG,
            &["gpu_ids names GPU 1 twice on node 1"],
        ),
        cluster(
            SPEC,
            "GPU ids without GPUs",
            r#"{"bundle_ct_per_node_list": [1], "use_gpus": false, "gpu_ids": [0]}"#,
            WRONG,
            &["gpu_ids is given although use_gpus is false"],
        ),
        cluster(
            SPEC,
            "shared GPUs without GPUs",
            r#"{"bundle_ct_per_node_list": [1], "use_gpus": false, "share_gpus": true}"#,
            WRONG,
            &["share_gpus is set although use_gpus is false"],
        ),
        cluster(
            SPEC,
            "no ports",
            r#"{"bundle_ct_per_node_list": [1], "port_range_low": 2000, "port_range_high": 2000}"#,
            WRONG,
            &["port_range_low", "2000..2000"],
        ),
        cluster(
            ROOM,
            "a GPU that does not exist",
            r#"{"bundle_ct_per_node_list": [1], "gpu_ids": [9]}"#,
            WRONG,
            &["gpu_ids names GPU 9", "left has 64 CPUs, GPUs [0, 1, 2, 3]"],
        ),
        cluster(
            ROOM,
            "more bundles than GPUs",
            r#"{"bundle_ct_per_node_list": [4, 4]}"#,
            LACKS,
            &["8 GPUs are asked for, 6 are there", "right has 8 CPUs"],
        ),
        cluster(
            ROOM,
            "a node larger than any other",
            r#"{"bundle_ct_per_node_list": [5]}"#,
            LACKS,
            &["bundles [5]", "they do not fit the nodes one by one"],
        ),
        cluster(
            ROOM,
            "more CPUs than available",
            r#"{"bundle_ct_per_node_list": [30], "use_gpus": false, "max_colocated_worker_groups": 3}"#,
            LACKS,
            &["90 CPUs are asked for, 72 are there"],
        ),
        cluster(
            ROOM,
            "two nodes on one machine, strictly",
            r#"{"bundle_ct_per_node_list": [2, 2, 2], "placement_group_strategy": "STRICT_SPREAD"}"#,
            LACKS,
            &["they do not fit the nodes one by one"],
        ),
    ]
}

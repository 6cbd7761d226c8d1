//! Placement of clusters before they start anything: bundles, nodes, GPUs.

use gym_core::CallContext;
use gym_group::placement::{ClusterSpec, GpuIds, NodeResources, place};
use gym_group::{Local, VirtualCluster};

use crate::workers;

/// Places clusters of one GPU, one node, several nodes, and nodes of different sizes.
pub(crate) async fn nodes(cx: &CallContext) -> anyhow::Result<()> {
    println!("# Placement");
    for bundles in [vec![1], vec![8], vec![8, 8], vec![4, 8, 2]] {
        let cluster = VirtualCluster::new(ClusterSpec::new(bundles.clone()), Local::new(workers()))?;
        let cluster = cluster.simulate_nodes(&bundles);
        let groups: Vec<_> = cluster
            .placement(cx)
            .await?
            .groups
            .iter()
            .map(|group| format!("{} x{}", group.name, group.bundles.len()))
            .collect();
        println!(
            "{bundles:?}: {} bundles on {} nodes: {}",
            cluster.world_size(),
            cluster.node_count(),
            groups.join(", ")
        );
    }
    Ok(())
}

/// Places bundles on given GPUs, on GPUs of several nodes, and on any GPUs, and shows two invalid requests.
pub(crate) fn gpus() -> anyhow::Result<()> {
    println!("\n# GPUs, on a machine as it might be: eight of them");
    let machine = [NodeResources::new("machine", 64, (0..8).map(|gpu: u32| gpu.to_string()).collect())];
    for (name, bundles, ids) in [
        ("given", vec![4], GpuIds::Flat(vec![0, 1, 2, 3])),
        ("given for each node", vec![4, 4], GpuIds::PerNode(vec![vec![0, 1, 2, 3], vec![4, 5, 6, 7]])),
        ("auto", vec![8], GpuIds::Auto),
    ] {
        let mut spec = ClusterSpec::new(bundles);
        spec.gpu_ids = ids;
        for group in place(&spec, &machine, false)?.groups {
            let gpus: Vec<_> = group.bundles.iter().filter_map(|bundle| bundle.gpu.as_deref()).collect();
            println!("{name}: {} has GPUs {}", group.name, gpus.join(" "));
        }
    }
    let mut twice = ClusterSpec::new([2, 2]);
    twice.gpu_ids = GpuIds::PerNode(vec![vec![0, 1], vec![1, 1]]);
    println!("a GPU twice: {}", place(&twice, &machine, false).expect_err("a GPU is for one bundle"));
    println!("too large: {}", place(&ClusterSpec::new([64]), &machine, false).expect_err("there are 8"));
    Ok(())
}

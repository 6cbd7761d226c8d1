//! Ranks that crash, ranks that exceed their memory limit, and the status of all ranks.

use std::num::NonZeroU32;
use std::time::Duration;

use gym_core::{CallContext, Incarnation};
use gym_group::Group;
use gym_group::VirtualCluster;
use gym_group::{Batch, Dispatch, RankState, WorkerGroup, WorkerGroupExt};

use crate::request;
use crate::scorer::{Greet, Hoard, Mean};

/// Kills a rank and restarts it manually. The caller then repeats the call, because repeating it is safe.
pub(crate) async fn failure(cx: &CallContext, policy: &Group, scores: &Batch) -> anyhow::Result<()> {
    println!("\n# Failure");
    policy.kill(1).await?;
    match policy.call(Mean, ()).batch(scores.clone()).context(cx).await {
        Ok(_) => anyhow::bail!("a group with a killed rank answered"),
        Err(failure) => println!("{failure}"),
    }
    println!("restarted: {:?}", policy.restart_failed_workers(cx).await?);
    println!("again: {:?}", policy.call(Mean, ()).batch(scores.clone()).context(cx).await?.into_values());
    Ok(())
}

/// Limits memory: a rank that uses more is killed, its exit reason is reported, and it restarts automatically.
pub(crate) async fn memory(cx: &CallContext, cluster: &VirtualCluster) -> anyhow::Result<()> {
    println!("\n# Memory");
    let config = r#"{"memory_limit": "200MB", "restart_on_failure": true, "max_restarts": 3}"#;
    let mut asked = request("hoarders", Some(config))?;
    asked.options.backoff_min = Duration::from_millis(10);
    let group = cluster.start(cx, asked).await?;
    // The call may succeed before the memory is sampled.
    let _ = group.call(Hoard, 400_000_000).dispatch(Dispatch::rank(2)).context(cx).await;
    let mut view = group.view();
    let back = view.wait_for(|view| {
        view.member(2).is_some_and(|rank| rank.incarnation > Incarnation(1) && rank.state == RankState::Healthy)
    });
    let exit = tokio::time::timeout(cx.remaining(), back).await??.member(2).and_then(|rank| rank.exit.clone());
    println!("rank 2 {}", exit.map(|exit| exit.to_string()).unwrap_or_default());
    let back = group.call(Greet, "its neighbours".into()).dispatch(Dispatch::rank(2)).context(cx).await?;
    println!("{}", back.into_one()?.value);
    for usage in group.resource_usage() {
        let limit = usage.memory_limit_bytes.unwrap_or_default() / 1_000_000;
        let resident = usage.host.map(|host| format!("{} MB", host.resident_bytes / 1_000_000));
        println!(
            "rank {}: {} of {limit} MB, {} GPUs",
            usage.rank,
            resident.unwrap_or_else(|| "no sample yet".to_owned()),
            usage.gpus.len()
        );
    }
    if let Some(node) = cluster.node_usage() {
        println!("the node has {} of {} MB left", node.available_bytes / 1_000_000, node.memory_bytes / 1_000_000);
        for gpu in node.gpus {
            println!("GPU {} uses {} of {} MB", gpu.index, gpu.used_bytes / 1_000_000, gpu.memory_bytes / 1_000_000);
        }
    }
    group.shutdown(Duration::from_secs(10)).await?;
    Ok(())
}

/// Shows engines of two ranks each: the ranks of an engine end, restart and serve together.
pub(crate) async fn tied(cx: &CallContext, cluster: &VirtualCluster) -> anyhow::Result<()> {
    println!("\n# Tied ranks");
    let mut asked = request("engines", None)?;
    asked.on = cluster.placement(cx).await?.tied_groups(NonZeroU32::MIN.saturating_add(1))?;
    let engines = cluster.start(cx, asked).await?;
    for greeting in engines.call(Greet, "you".into()).context(cx).await?.into_values() {
        println!("{greeting}");
    }
    engines.kill(1).await?;
    println!("rank 1 was killed; restarted: {:?}", engines.restart_failed_workers(cx).await?);
    engines.shutdown(Duration::from_secs(10)).await?;
    Ok(())
}

/// Prints the status of the ranks without waiting for a rank.
pub(crate) fn health(policy: &Group) {
    println!("\n# Health");
    for status in policy.worker_status() {
        println!(
            "rank {} on node {}: {}, life {}, {} restarts left",
            status.rank, status.node, status.state, status.incarnation, status.restarts_left
        );
    }
    println!("stuck: {:?}", policy.detect_stuck_workers());
}

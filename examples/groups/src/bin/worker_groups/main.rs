//! Virtual clusters and worker groups, chapter by chapter: `cargo run --release --bin worker_groups`.
//!
//! Follows the order of NeMo RL's documentation of its distributed layer. Two examples from there are separate programs: the
//! single-controller loop is `grpo`, and the custom worker is `custom_worker`. The nodes are simulated; the ranks are real
//! processes.

mod calls;
mod care;
mod placement;
mod scorer;
mod tuning;

use std::time::Duration;

use gym_client::Transports;
use gym_core::CallContext;
use gym_core::transport::InProcess;
use gym_group::GroupOptions;
use gym_group::{ClusterFile, GroupRequest, Local, VirtualCluster, WorkerKind, Workers};

use scorer::Scorer;

fn workers() -> Workers {
    Workers::new().with("scorer", WorkerKind::of::<Scorer>())
}

fn main() -> anyhow::Result<()> {
    // First, because worker processes run this program too.
    workers().enter();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async { tokio::spawn(chapters()).await? })
}

async fn chapters() -> anyhow::Result<()> {
    let cx = CallContext::within(Duration::from_secs(120));
    placement::nodes(&cx).await?;
    placement::gpus()?;
    let scores = calls::batches()?;

    // Part of the program, which therefore runs from any directory.
    let file = ClusterFile::parse(include_str!("../../../../configs/worker_groups.yaml"), "worker_groups.yaml")?;
    let cluster = VirtualCluster::new(file.cluster.clone(), Local::new(workers()))?.simulate_nodes(&[2, 1]);
    let mut asked = request("policy", None)?;
    asked.config = Some(file.group("policy")?);
    let policy = cluster.start(&cx, asked).await?;
    calls::to_all(&cx, &policy, &scores).await?;
    calls::in_turns(&cx, &cluster, &policy, &scores).await?;
    care::memory(&cx, &cluster).await?;
    care::failure(&cx, &policy, &scores).await?;
    care::tied(&cx, &cluster).await?;
    care::health(&policy);
    tuning::communication()?;
    calls::started(&cx, &policy, &scores).await?;
    calls::balanced(&cx, &cluster).await?;
    tuning::profiler()?;
    cluster.shutdown(Duration::from_secs(10)).await?;
    Ok(())
}

/// Requests a group of scorers, one on each bundle, with this configuration.
fn request(name: &str, config: Option<&str>) -> anyhow::Result<GroupRequest> {
    let options = GroupOptions::new(Transports::from_features(InProcess::new()));
    let mut request = GroupRequest::new(name, "scorer", &(), options)?;
    request.config = config.map(serde_json::from_str).transpose()?;
    Ok(request)
}

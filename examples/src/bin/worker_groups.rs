//! Virtual clusters and worker groups, chapter by chapter: `cargo run --release --bin worker_groups`.
//!
//! Clusters of one GPU to many nodes, their placement, calls with the same and with different data, colocation in turns, a rank
//! that is killed and brought back, memory limits, status, load balancing, and what is not here yet. The nodes only stand for
//! real ones; the ranks are real processes.

use std::sync::Arc;
use std::time::Duration;

use gym_client::Transports;
use gym_client::group::GroupOptions;
use gym_client::provision::{GroupRequest, Local, VirtualCluster, WorkerKind, Workers};
use gym_core::cluster::{ClusterSpec, GpuIds, WorkerGroupConfig};
use gym_core::{
    Balance, Balancer, Batch, CallContext, Dispatch, Handles, InProcess, Method, Methods, Payload, Result, Tensor,
    Worker, WorkerEnv, WorkerGroupExt,
};

/// The mean of the column `score` of the rank's shard, and who computed it.
#[derive(Clone, Copy, Debug)]
struct Mean;
impl Method for Mean {
    const NAME: &'static str = "scorer.mean";
    const IDEMPOTENT: bool = true;
    type Args = ();
    type Reply = (u32, f32);
}

/// Greets whoever it is given.
#[derive(Clone, Copy, Debug)]
struct Greet;
impl Method for Greet {
    const NAME: &'static str = "scorer.greet";
    const IDEMPOTENT: bool = true;
    type Args = String;
    type Reply = String;
}

struct Scorer(u32);
impl Worker for Scorer {
    type Init = ();
    fn start(env: WorkerEnv, (): ()) -> Result<Self> {
        Ok(Self(env.rank))
    }
    fn methods(methods: &mut Methods<Self>) {
        methods.exclusive(Mean).exclusive(Greet);
    }
}
impl Handles<Mean> for Scorer {
    async fn handle(&mut self, _: &CallContext, call: Payload<()>) -> Result<Payload<(u32, f32)>> {
        let scores = call.batch.column("score")?.dense()?.view::<f32>()?;
        Ok((self.0, scores.iter().sum::<f32>() / scores.len() as f32).into())
    }
}
impl Handles<Greet> for Scorer {
    async fn handle(&mut self, _: &CallContext, call: Payload<String>) -> Result<Payload<String>> {
        Ok(format!("rank {} greets {}", self.0, call.value).into())
    }
}

fn workers() -> Workers {
    Workers::new().with("scorer", WorkerKind::of::<Scorer>())
}

fn main() -> anyhow::Result<()> {
    workers().enter();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async { tokio::spawn(chapters()).await? })
}

async fn chapters() -> anyhow::Result<()> {
    placement()?;
    let cx = CallContext::within(Duration::from_secs(60));
    let mut spec = ClusterSpec::new([2, 1]);
    spec.enable_colocation = Some(true);
    let cluster = VirtualCluster::new(spec, Local::new(workers()))?.simulate_nodes(&[2, 1]);

    println!("\n# Calls");
    let policy = Arc::new(cluster.start(&cx, request("policy", Some(r#"{"restart_on_failure": false}"#))?).await?);
    let scores = Batch::empty().with("score", Tensor::from_vec([6], vec![1.0_f32, 0.0, 0.5, 0.5, 1.0, 1.0])?)?;
    let all = policy.call(Mean, ()).batch(scores.clone()).context(&cx).await?;
    println!("single data: {:?}", all.into_values());
    let shards = policy.call(Mean, ()).batch(scores.clone()).dispatch(Dispatch::shard("rank")).context(&cx).await?;
    println!("sharded: {:?}", shards.into_values());
    let names = ["Ada", "Grace", "Edsger"].map(str::to_owned).to_vec();
    println!("multiple data: {:?}", policy.call_each(Greet, names).context(&cx).await?.into_values());
    println!(
        "one rank: {:?}",
        policy.call(Greet, "you".into()).dispatch(Dispatch::rank(2)).context(&cx).await?.into_one()?.value
    );

    println!("\n# Colocation, in turns");
    let generation = cluster.start(&cx, request("generation", None)?).await?;
    let (trained, generated) = tokio::join!(
        policy.call(Mean, ()).batch(scores.clone()).context(&cx),
        generation.call(Greet, "a prompt".into()).context(&cx)
    );
    println!(
        "{} ranks trained and {} generated on the same bundles",
        trained?.replies().len(),
        generated?.replies().len()
    );

    println!("\n# Failure");
    policy.kill(1).await?;
    match policy.call(Mean, ()).batch(scores.clone()).context(&cx).await {
        Ok(_) => anyhow::bail!("a group with a killed rank answered"),
        Err(failure) => println!("{failure}"),
    }
    println!("restarted: {:?}", policy.restart_failed_workers(&cx).await?);
    println!("again: {:?}", policy.call(Mean, ()).batch(scores).context(&cx).await?.into_values());

    println!("\n# Health");
    for (status, usage) in policy.worker_status().iter().zip(policy.resource_usage()) {
        let resident =
            usage.host.map_or_else(|| "no sample yet".to_owned(), |host| format!("{} MiB", host.resident_bytes >> 20));
        println!(
            "rank {} on node {}: {}, life {}, {resident}",
            status.rank, status.node, status.state, status.incarnation
        );
    }
    println!("stuck: {:?}", policy.detect_stuck_workers());

    println!("\n# Load balancing");
    let balancer = Balancer::new(policy.clone(), Balance::RoundRobin)?;
    let guests = (1..=6).map(|guest| format!("guest {guest}")).collect();
    for reply in balancer.map(&cx, Greet, guests, 1).await? {
        println!("{reply}");
    }

    println!("\n# Not here yet");
    let spec: ClusterSpec =
        serde_json::from_str(r#"{"bundle_ct_per_node_list": [8], "communication_backend": "nccl"}"#)?;
    println!("{}", spec.validate().expect_err("comes with NCCL"));
    let config: WorkerGroupConfig = serde_json::from_str(r#"{"enable_gradient_compression": true}"#)?;
    println!("{}", config.validate().expect_err("comes with NCCL"));
    cluster.shutdown(Duration::from_secs(10)).await?;
    Ok(())
}

fn request(name: &str, config: Option<&str>) -> anyhow::Result<GroupRequest> {
    let options = GroupOptions::new(Transports::from_features(InProcess::new()));
    let mut request = GroupRequest::new(name, "scorer", &(), options)?;
    request.config = config.map(serde_json::from_str).transpose()?;
    Ok(request)
}

/// One GPU, one node, several nodes, nodes of different sizes, given GPUs.
fn placement() -> anyhow::Result<()> {
    println!("# Placement");
    for bundles in [vec![1], vec![8], vec![8, 8], vec![4, 8, 2]] {
        let cluster = VirtualCluster::new(ClusterSpec::new(bundles.clone()), Local::new(workers()))?;
        let cluster = cluster.simulate_nodes(&bundles);
        let groups: Vec<_> = cluster
            .placement()?
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
    let mut given = ClusterSpec::new([2, 2]);
    given.gpu_ids = GpuIds::PerNode(vec![vec![0, 1], vec![1, 1]]);
    println!(
        "a GPU twice: {}",
        VirtualCluster::new(given, Local::new(workers())).map(|_| ()).expect_err("a GPU is for one bundle")
    );
    let large = VirtualCluster::new(ClusterSpec::new([64]), Local::new(workers()))?.simulate_nodes(&[8]);
    println!("too large: {}", large.placement().expect_err("there are 8"));
    Ok(())
}

//! Calls: with the same arguments for all ranks, with separate arguments, in shards, asynchronous, leased, and load-balanced.

use std::sync::Arc;

use gym_core::CallContext;
use gym_group::Group;
use gym_group::VirtualCluster;
use gym_group::placement::WorkerGroupConfig;
use gym_group::{Batch, Dispatch, Tensor, WorkerGroupExt};

use crate::request;
use crate::scorer::{Greet, Mean};

/// Shows batches: named columns with equal numbers of rows.
pub(crate) fn batches() -> anyhow::Result<Batch> {
    println!("\n# Batches");
    let scores = Batch::empty().with("score", Tensor::from_vec([3], vec![1.0_f32, 0.0, 0.5])?)?;
    let repeated = scores.repeat_interleave(2)?;
    println!("{} rows, each twice: {}", scores.rows(), repeated.rows());
    println!("on the CPU they stay where they are: {}", repeated.to_device("cpu")?.cpu()? == repeated);
    // A program with GPUs registers a device provider first: `gym_group::collective::nccl::register()`.
    match repeated.to_device("cuda") {
        Ok(placed) => println!("on {}: {} rows", placed.device(), placed.rows()),
        Err(error) => println!("elsewhere: {error}"),
    }
    Ok(repeated)
}

pub(crate) async fn to_all(cx: &CallContext, policy: &Group, scores: &Batch) -> anyhow::Result<()> {
    println!("\n# Calls");
    let all = policy.call(Mean, ()).batch(scores.clone()).context(cx).await?;
    println!("single data: {:?}", all.into_values());
    let shards = policy.call(Mean, ()).batch(scores.clone()).dispatch(Dispatch::shard("rank")).context(cx).await?;
    println!("sharded: {:?}", shards.into_values());
    let names = ["Ada", "Grace", "Edsger"].map(str::to_owned).to_vec();
    println!("multiple data: {:?}", policy.call_each(Greet, names).context(cx).await?.into_values());
    let one = policy.call(Greet, "you".into()).dispatch(Dispatch::rank(2)).context(cx).await?;
    println!("one rank: {}", one.into_one()?.value);
    Ok(())
}

/// Shows asynchronous calls: sent now, and awaited later.
pub(crate) async fn started(cx: &CallContext, policy: &Group, scores: &Batch) -> anyhow::Result<()> {
    println!("\n# Asynchronous calls");
    let means = policy.call(Mean, ()).batch(scores.clone()).context(cx).start().await?;
    let greetings = policy.call(Greet, "whoever waits".into()).context(cx).start().await?;
    println!("two calls are under way, and this program goes on");
    println!("gathered: {} means, {} greetings", means.await?.replies().len(), greetings.await?.replies().len());
    // With `async_communication`, a submitted call starts without being awaited, and `flush` waits for all of them.
    let submitted = policy.call(Greet, "everybody".into()).context(cx).submit();
    policy.flush(cx).await?;
    println!("submitted: {} greetings", submitted.await?.replies().len());
    Ok(())
}

/// Shows two groups that lease the same bundles alternately.
pub(crate) async fn in_turns(
    cx: &CallContext,
    cluster: &VirtualCluster,
    policy: &Group,
    scores: &Batch,
) -> anyhow::Result<()> {
    println!("\n# Colocation, in turns");
    let generation = cluster.start(cx, request("generation", None)?).await?;
    let (trained, generated) = tokio::join!(
        policy.call(Mean, ()).batch(scores.clone()).context(cx),
        generation.call(Greet, "a prompt".into()).context(cx)
    );
    let (trained, generated) = (trained?.replies().len(), generated?.replies().len());
    println!("{trained} ranks trained and {generated} generated on the same bundles");
    Ok(())
}

/// Shows dynamic load balancing, and strategies by name.
pub(crate) async fn balanced(cx: &CallContext, cluster: &VirtualCluster) -> anyhow::Result<()> {
    println!("\n# Load balancing");
    for config in [
        r#"{"enable_load_balancing": true}"#,
        r#"{"load_balancing_strategy": "round_robin"}"#,
        r#"{"load_balancing_strategy": {"weighted": [4, 1, 1]}}"#,
    ] {
        let config: WorkerGroupConfig = serde_json::from_str(config)?;
        let mut request = request("generation", None)?;
        request.config = Some(config.clone());
        let group = Arc::new(cluster.start(cx, request).await?);
        let guests = (1..=6).map(|guest| format!("guest {guest}")).collect();
        let greetings = group.balancer()?.map(cx, Greet, guests, 2).await?;
        let greeters = greetings.iter().filter_map(|text| text.split(' ').nth(1)).collect::<Vec<_>>().join(" ");
        println!("{:?}: six guests were greeted by ranks {greeters}", config.balancing().unwrap_or_default());
        group.shutdown(std::time::Duration::from_secs(10)).await?;
    }
    Ok(())
}

//! A worker group on other machines: `cargo run --release --bin on_nodes`.
//!
//! Without arguments, starts two node agents on this machine and a group over them, kills one agent, and shows how its ranks restart on
//! the other node. For several machines, run the same executable on each:
//!
//! ```text
//! export GYM_JOIN_SECRET=… HEAD_SERVER_URL=http://10.0.0.1:11000      # of `rgym run --head-only`
//! on_nodes node gpu-1 --host 10.0.0.2                                # on each node
//! on_nodes member gpu-2 --host 10.0.0.3                              # or on some: a node that serves an agent and takes rollouts too
//! on_nodes group                                                     # anywhere
//! on_nodes environment 0                                             # the variables of a rank, and where each is from
//! ```

use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use futures_util::StreamExt as _;
use gym_client::Transports;
use gym_client::registry::RemoteRegistry;
use gym_client::work::WorkPullerOptions;
use gym_core::{AgentServer, CallContext, Endpoint, RawObject, Response, SessionId, World};
use gym_group::Rank;
use gym_group::placement::ClusterSpec;
use gym_group::prelude::*;
use gym_group::{
    Group, GroupOptions, GroupRequest, JOIN_SECRET_VARIABLE, NodeAgent, NodeOptions, Nodes, NodesOptions, RankStatus,
    VirtualCluster, WorkerKind, Workers,
};
use gym_server::stack::JoinOptions;
use gym_server::{Stack, StackOptions};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::time::Instant;

/// Where a rank runs, and how often it has started.
struct Where(WorkerEnv);
worker! {
    impl Worker for Where as place {
        fn start(env: WorkerEnv, (): ()) -> Result<Self> { Ok(Self(env)) }
        /// Returns the rank's address in the rendezvous, its incarnation and its process.
        shared async fn tell(&self, _: &CallContext, _: Payload<()>) -> Result<Payload<String>> {
            let Self(env) = self;
            let peers = env.variables.get("AVAILABLE_ADDR_LIST").map_or("", |peers| peers.as_str());
            let own = peers.trim_matches(['[', ']']).split(", ").nth(env.rank as usize).unwrap_or("unknown");
            let told = format!("rank {} at {own}, incarnation {}, process {}", env.rank, env.incarnation, std::process::id());
            Ok(told.into())
        }
    }
}

/// Scores each task with 1, in the place of an agent.
struct Content;

impl AgentServer for Content {
    async fn run(&self, _: &CallContext, _: &SessionId, row: &RawObject) -> Result<Response> {
        Ok(Response::json(row.edit().set("reward", "1.0").to_rope()))
    }
}

fn workers() -> Workers {
    Workers::new().with("where", WorkerKind::of::<Where>())
}

fn main() -> anyhow::Result<()> {
    // First, because ranks run this program too.
    workers().enter();
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        match arguments[..] {
            [] => here().await,
            ["node", name] => node(name, "127.0.0.1").await,
            ["node", name, "--host", host] => node(name, host).await,
            ["member", name] => member(name, "127.0.0.1").await,
            ["member", name, "--host", host] => member(name, host).await,
            ["group"] => over_cluster(None).await,
            ["environment", rank] => over_cluster(Some(rank.parse()?)).await,
            _ => bail!(
                "usage: on_nodes [node NAME [--host ADDRESS] | member NAME [--host ADDRESS] | group | environment RANK]"
            ),
        }
    })
}

fn secret() -> anyhow::Result<String> {
    std::env::var(JOIN_SECRET_VARIABLE).context("set GYM_JOIN_SECRET: nodes start processes for whoever knows it")
}

fn head() -> anyhow::Result<Option<Endpoint>> {
    Ok(std::env::var("HEAD_SERVER_URL").ok().map(|url| Endpoint::parse(&url)).transpose()?)
}

fn node_options(name: &str, host: &str) -> anyhow::Result<NodeOptions> {
    let mut options = NodeOptions::new(secret()?);
    (options.name, options.host, options.head) = (name.to_owned(), host.to_owned(), head()?);
    // As if each machine had four CPUs, whatever this one has.
    options.resources.cpus = Some(4);
    Ok(options)
}

/// Runs the agent of a node until it is interrupted or drained.
async fn node(name: &str, host: &str) -> anyhow::Result<()> {
    let agent = NodeAgent::start(workers(), node_options(name, host)?).await?;
    println!("agent {}", agent.endpoints().last().context("it listens")?);
    tokio::select! {
        interrupted = tokio::signal::ctrl_c() => interrupted?,
        () = agent.drained() => println!("drained"),
    }
    agent.stop(Duration::from_secs(10)).await;
    Ok(())
}

/// Runs a worker that is a node too, with one membership, until it is interrupted or drained.
async fn member(name: &str, host: &str) -> anyhow::Result<()> {
    let head = head()?.context("set HEAD_SERVER_URL: a member joins a head server")?;
    let node = NodeAgent::listen(workers(), node_options(name, host)?).await?;
    let (host, member_node) = (Some(host.to_owned()), Some(node.member_node()));
    let mut worker = JoinOptions::new(name);
    worker.host = host;
    worker.pulls = true;
    worker.node = member_node;
    let mut options = StackOptions::default();
    options.head = Some(head.clone());
    options.join = Some(worker);
    let stack = Stack::builder().agent("content", |_| Content).options(options).start().await?;
    let (world, grace) = (World::real(), Duration::from_secs(10));
    let registry = RemoteRegistry::new(head, Transports::standard(), world.clone());
    let pulled = stack.take_work(Arc::new(registry), WorkPullerOptions::new(name, &world));
    println!("member {name}");
    let draining = stack.draining().context("it is a member")?;
    tokio::select! {
        interrupted = tokio::signal::ctrl_c() => interrupted?,
        () = async { draining.cancelled().await; node.released().await } => println!("drained"),
    }
    pulled.drain(grace).await;
    stack.stop().await;
    node.stop(grace).await;
    Ok(())
}

/// Starts four ranks on two nodes.
async fn start(nodes: Nodes, cx: &CallContext) -> anyhow::Result<(VirtualCluster, Group)> {
    let mut bundles = ClusterSpec::new([2, 2]);
    bundles.use_gpus = false;
    let cluster = VirtualCluster::new(bundles, nodes)?;
    let mut options = GroupOptions::new(Transports::standard()).restarting(100);
    (options.backoff_min, options.backoff_max) = (Duration::from_millis(50), Duration::from_secs(2));
    let group = cluster.start(cx, GroupRequest::new("where", "where", &(), options)?).await?;
    Ok((cluster, group))
}

async fn tell(group: &Group, cx: &CallContext) -> anyhow::Result<()> {
    let told = group.call(place::tell, ()).context(cx).await?.into_values();
    for (told, status) in told.iter().zip(group.worker_status()) {
        println!("  {} on {}", told, status.node_name.as_deref().unwrap_or("this machine"));
    }
    Ok(())
}

/// Runs a group on the nodes of a cluster, and prints what happens to nodes and ranks, with milliseconds since 1970, until it is
/// interrupted. With `environment`, prints the variables of that rank instead.
async fn over_cluster(environment: Option<Rank>) -> anyhow::Result<()> {
    let head = head()?.context("set HEAD_SERVER_URL: the nodes join a head server")?;
    let registry = RemoteRegistry::new(head, Transports::standard(), World::real());
    let mut options = NodesOptions::default();
    options.lease = Duration::from_secs(3);
    let nodes = Nodes::of_cluster(Arc::new(registry), Transports::standard(), secret()?).with(options);
    let cx = CallContext::within(Duration::from_secs(120));
    let (cluster, group) = start(nodes, &cx).await?;
    if let Some(rank) = environment {
        print!("{}", group.environment(&cx, rank).await?);
        return Ok(cluster.shutdown(Duration::from_secs(10)).await?);
    }
    let mut events = cluster.node_events(&cx).await?;
    let mut look = tokio::time::interval(Duration::from_millis(20));
    let (mut before, world) = (Vec::new(), World::real());
    loop {
        tokio::select! {
            Some(event) = events.next() => println!("{} {event:?}", world.now().as_millis()),
            _ = look.tick() => {
                let rank = |rank: &RankStatus| {
                    let node = rank.node_name.as_deref().unwrap_or("-");
                    format!("{node}/{}/{}", rank.incarnation, rank.state)
                };
                let now: Vec<String> = group.worker_status().iter().map(rank).collect();
                if now != before {
                    println!("{} ranks {}", world.now().as_millis(), now.join(" "));
                    before = now;
                }
            }
            _ = tokio::signal::ctrl_c() => break,
        }
    }
    drop(group);
    cluster.shutdown(Duration::from_secs(10)).await?;
    Ok(())
}

/// Two agents on this machine; one is killed.
async fn here() -> anyhow::Result<()> {
    let secret = format!("{:032x}", fastrand::u128(..));
    let (mut agents, mut endpoints) = (Vec::new(), Vec::new());
    for name in ["node-a", "node-b"] {
        let mut agent = tokio::process::Command::new(std::env::current_exe()?)
            .args(["node", name])
            .env(JOIN_SECRET_VARIABLE, &secret)
            .env_remove("HEAD_SERVER_URL")
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let mut lines = BufReader::new(agent.stdout.take().context("piped")?).lines();
        let line = tokio::time::timeout(Duration::from_secs(30), lines.next_line()).await??.unwrap_or_default();
        endpoints.push(Endpoint::parse(line.strip_prefix("agent ").context("the agent names its endpoint")?)?);
        agents.push(agent);
    }
    let mut options = NodesOptions::default();
    options.lease = Duration::from_secs(2);
    let nodes = Nodes::at(endpoints, Transports::standard(), secret).with(options);
    let cx = CallContext::within(Duration::from_secs(120));
    let (cluster, group) = start(nodes, &cx).await?;
    println!("four ranks on two nodes:");
    tell(&group, &cx).await?;
    let killed = Instant::now();
    agents[0].kill().await?;
    println!("the agent of node-a was killed; its ranks died with it, and its lease of 2 s runs");
    let mut events = cluster.node_events(&cx).await?;
    while let Some(event) = events.next().await {
        println!("  {:>5} ms  {event:?}", killed.elapsed().as_millis());
        if matches!(event, gym_group::NodeEvent::Moved { .. }) {
            break;
        }
    }
    group.ready(&cx).await?;
    println!("all four serve again after {} ms:", killed.elapsed().as_millis());
    tell(&group, &cx).await?;
    cluster.shutdown(Duration::from_secs(10)).await?;
    Ok(())
}

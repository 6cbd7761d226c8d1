//! Measures a cluster: how evenly workers of different speeds finish, what a second and a fourth worker add, and what the head server
//! needs for many members.
//!
//! Every process is this program as `rgym`: a head server with the configuration, workers without files, and collectors.

use std::ffi::OsString;
use std::process::{ExitCode, Stdio};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use gym_benches::measure;
use gym_benches::options::Options;
use gym_benches::peer::get;
use gym_benches::report::{Aim, figure};
use gym_benches::role;
use gym_benches::stack::Scratch;
use gym_client::Transports;
use gym_client::registry::{MemberKeeper, MemberOptions, RemoteRegistry};
use gym_core::registry::{
    MemberLimits, MemberRegistry, MemberSpec, MemberState, MemberTiming, MemoryRegistry, RosterVersion,
};
use gym_core::transport::{InProcess, serve};
use gym_core::{CallContext, CancelToken, Endpoint, Handler, Incarnation, World};
use gym_server::head::HeadServer;
use gym_server::metrics::Metrics;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

const WAIT_TIMEOUT: Duration = Duration::from_secs(300);

/// Three environments with an agent each, and a scripted model.
const CONFIG: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/configs/quickstart.yaml");
const TASKS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/data/math.jsonl");

/// The first argument that makes this program the command line.
const CLI: &str = "cli";

fn main() -> ExitCode {
    let mut arguments: Vec<OsString> = std::env::args_os().collect();
    if arguments.get(1).is_some_and(|first| first == CLI) {
        arguments.remove(1);
        return gym_server::cli::main_with(gym_examples::servers::servers(), arguments);
    }
    match role::main(bench) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn bench(options: Options) -> Result<()> {
    let scratch = Scratch::new("cluster")?;
    println!("{} cores, load average {:.1}", std::thread::available_parallelism()?, measure::load_average());
    if options.wants("cluster_ready") {
        ready(&options, &scratch).await?;
    }
    if options.wants("cluster_speeds") {
        speeds(&options, &scratch).await?;
    }
    for workers in [1_u32, 2, 4] {
        let name = format!("cluster_rate_{workers}_workers");
        if options.wants(&name) {
            rate(&options, &scratch, workers, &name).await?;
        }
    }
    if options.wants("cluster_members") {
        members(if options.quick { 100 } else { 1_000 }).await?;
    }
    if options.wants("cluster_processes") {
        processes(if options.quick { 10 } else { 200 }, &scratch).await?;
    }
    Ok(())
}

/// A process of the cluster, killed on drop.
struct Running {
    child: Child,
}

impl Running {
    fn pid(&self) -> u32 {
        self.child.id().unwrap_or(0)
    }
}

fn rgym(scratch: &Scratch) -> Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg(CLI).current_dir(scratch.path(".")).env_remove("HEAD_SERVER_URL").env("RUST_LOG", "error");
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true);
    Ok(command)
}

struct Cluster<'a> {
    scratch: &'a Scratch,
    head: Running,
    url: String,
    workers: Vec<Running>,
}

impl<'a> Cluster<'a> {
    async fn start(scratch: &'a Scratch, arguments: &[&str]) -> Result<Self> {
        let mut command = rgym(scratch)?;
        command.args(["run", "--head-only", "+head_server.port=0"]).args(arguments).stdout(Stdio::piped());
        let mut child = command.spawn()?;
        let mut lines = BufReader::new(child.stdout.take().context("the head has no output")?).lines();
        let url = async {
            while let Some(line) = lines.next_line().await? {
                if let Some(ready) = line.strip_prefix("ready: ") {
                    return Ok(ready.rsplit(' ').next().unwrap_or_default().to_owned());
                }
            }
            anyhow::bail!("the head has ended")
        };
        let url = timeout(WAIT_TIMEOUT, url).await.context("the head is not ready")??;
        tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
        Ok(Self { scratch, head: Running { child }, url, workers: Vec::new() })
    }

    fn spawn(&mut self, name: &str, arguments: &[&str]) -> Result<()> {
        let mut command = rgym(self.scratch)?;
        command.args(["--threads", "1", "run", "--worker", "--head-url", &self.url, "--name", name]).args(arguments);
        command.args(["--heartbeat-interval", "1", "--worker-timeout", "10"]);
        self.workers.push(Running { child: command.spawn()? });
        Ok(())
    }

    fn registry(&self) -> Result<RemoteRegistry> {
        let transports = Transports::from_features(InProcess::new());
        Ok(RemoteRegistry::new(Endpoint::parse(&self.url)?, transports, World::real()))
    }

    /// Waits until this many members serve; returns the time at which they were all seen to have joined.
    async fn serving(&self, members: usize) -> Result<Instant> {
        let (registry, mut joined) = (self.registry()?, None);
        let serving = async {
            loop {
                let known = registry.members(&CallContext::within(WAIT_TIMEOUT)).await?;
                if known.len() >= members {
                    joined.get_or_insert_with(Instant::now);
                }
                if known.iter().filter(|member| member.state == MemberState::Serving).count() >= members {
                    return anyhow::Ok(());
                }
                sleep(Duration::from_millis(2)).await;
            }
        };
        timeout(WAIT_TIMEOUT, serving).await.context("the workers do not serve")??;
        joined.context("nobody joined")
    }

    /// Collects this many rollouts; returns the time from the first to the last row's end, as the collector reports it.
    async fn collect(&self, rollouts: u64, concurrency: u32) -> Result<Duration> {
        let tasks = 100_u64.min(rollouts);
        let mut command = rgym(self.scratch)?;
        command.args(["collect", "--head-url", &self.url, "--agent", "math_simple_agent", "--overwrite", "--json"]);
        command.args(["--input", TASKS, "--output", "rows.jsonl", "--progress", "none", "--disable-aggregation"]);
        command.args(["--limit", &tasks.to_string(), "--num-repeats", &rollouts.div_ceil(tasks).to_string()]);
        command.args(["--concurrency", &concurrency.to_string()]).stdout(Stdio::piped());
        let output = timeout(WAIT_TIMEOUT, command.output()).await.context("a collection does not end")??;
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).context("no report")?;
        ensure!(output.status.success(), "a collection ended with {}", output.status);
        let seconds = report["seconds"].as_f64().with_context(|| format!("no time in {report}"))?;
        Ok(Duration::from_secs_f64(seconds))
    }
}

fn latency(milliseconds: u64) -> String {
    format!("++policy_model.responses_api_models.scripted_model.latency_ms=[{milliseconds},{milliseconds}]")
}

/// From the moment at which the last expected worker has joined until the head server reports that it is ready.
async fn ready(options: &Options, scratch: &Scratch) -> Result<()> {
    let mut taken = Vec::new();
    for _ in 0..options.rounds() {
        let mut cluster = Cluster::start(scratch, &["--config", CONFIG, "--expected-workers", "3"]).await?;
        for name in ["w1", "w2", "w3"] {
            cluster.spawn(name, &[])?;
        }
        let joined = cluster.serving(3).await?;
        let address = cluster.url.trim_start_matches("http://").parse()?;
        while get(address, "/readyz").await?.0 != 200 {
            sleep(Duration::from_millis(1)).await;
        }
        taken.push(joined.elapsed().as_secs_f64() * 1e3);
    }
    figure("cluster_ready_after_last_join", "ms", &taken, &[], Some(Aim::AtMost(1_000.0)));
    Ok(())
}

/// Workers whose models take 1, 2 and 4 times as long. The ideal is the sum of the rates that each reaches alone.
async fn speeds(options: &Options, scratch: &Scratch) -> Result<()> {
    const CAPACITY: &str = "8";
    let latencies = if options.quick { [20, 40, 80] } else { [50, 100, 200] };
    let share = if options.quick { 40 } else { 200 };
    let mut rate = 0.0;
    for milliseconds in latencies {
        let mut cluster = Cluster::start(scratch, &["--config", CONFIG]).await?;
        cluster.spawn("alone", &[&latency(milliseconds), "--pull-capacity", CAPACITY])?;
        cluster.serving(1).await?;
        // In proportion to the speed, so that each measurement takes as long.
        let rollouts = share * latencies[2] / milliseconds;
        rate += rollouts as f64 / cluster.collect(rollouts, 16).await?.as_secs_f64();
    }
    let mut cluster = Cluster::start(scratch, &["--config", CONFIG]).await?;
    for (at, milliseconds) in latencies.into_iter().enumerate() {
        cluster.spawn(&format!("w{at}"), &[&latency(milliseconds), "--pull-capacity", CAPACITY])?;
    }
    cluster.serving(3).await?;
    let rollouts = 2 * share * 7;
    let mut shares = Vec::new();
    for _ in 0..options.rounds().min(3) {
        let taken = cluster.collect(rollouts, 64).await?;
        shares.push(taken.as_secs_f64() / (rollouts as f64 / rate));
    }
    figure("cluster_speeds_1_2_4_of_ideal", "", &shares, &[], Some(Aim::AtMost(1.05)));
    Ok(())
}

/// One set of tasks, without latency: the cores of this machine are the limit.
async fn rate(options: &Options, scratch: &Scratch, workers: u32, name: &str) -> Result<()> {
    let mut cluster = Cluster::start(scratch, &["--config", CONFIG]).await?;
    for at in 0..workers {
        cluster.spawn(&format!("w{at}"), &[&latency(0), "--pull-capacity", "64"])?;
    }
    cluster.serving(workers as usize).await?;
    let rollouts = if options.quick { 1_000 } else { 20_000 };
    let mut rates = Vec::new();
    for _ in 0..options.rounds().min(3) {
        rates.push(rollouts as f64 / cluster.collect(rollouts, 512).await?.as_secs_f64());
    }
    figure(name, "/s", &rates, &[], None);
    Ok(())
}

/// Waits for changes of the roster, and reports each version that it learns.
fn watch(registry: Arc<dyn MemberRegistry>, tasks: &mut JoinSet<()>) -> tokio::sync::mpsc::Receiver<RosterVersion> {
    let (send, learned) = tokio::sync::mpsc::channel(64);
    tasks.spawn(async move {
        let mut seen = None;
        loop {
            let wait = Duration::from_secs(20);
            if let Ok(update) = registry.roster(&CallContext::within(WAIT_TIMEOUT), seen, wait).await {
                let changed = seen != Some(update.now);
                seen = Some(update.now);
                if changed && send.send(update.now).await.is_err() {
                    return;
                }
            }
        }
    });
    learned
}

fn timing() -> MemberTiming {
    MemberTiming { heartbeat: Duration::from_secs(1), timeout: Duration::from_secs(10), ..MemberTiming::default() }
}

/// Joins one more member, and returns the time until each watcher has learned of a change.
async fn change(
    registry: Arc<dyn MemberRegistry>,
    watchers: &mut [tokio::sync::mpsc::Receiver<RosterVersion>],
    name: &str,
) -> Result<f64> {
    watchers.iter_mut().for_each(|watcher| while watcher.try_recv().is_ok() {});
    let mut spec = MemberSpec::new(name, Incarnation(1));
    spec.timing = timing();
    let (kind, endpoint) = (gym_core::server::ServerKind::Resources, Endpoint::parse("http://127.0.0.1:9")?);
    spec.servers = vec![gym_core::registry::MemberServer {
        implementation: "math".to_owned(),
        ..gym_core::registry::MemberServer::new("math", kind, [endpoint])
    }];
    let began = Instant::now();
    let options = MemberOptions::default();
    let member =
        MemberKeeper::join(registry, &CallContext::within(WAIT_TIMEOUT), spec, options, &World::real()).await?;
    for watcher in watchers {
        timeout(WAIT_TIMEOUT, watcher.recv()).await.context("a watcher learns nothing")?;
    }
    let taken = began.elapsed().as_secs_f64() * 1e3;
    member.leave(Duration::from_secs(2)).await;
    Ok(taken)
}

/// Members of this process with a heartbeat each second, at a head server of this process. The CPU time is that of both sides.
async fn members(count: usize) -> Result<()> {
    let before = measure::resident(std::process::id());
    let network = InProcess::new();
    let world = World::real();
    let memory = MemoryRegistry::with_limits(1, MemberLimits::default());
    let head = HeadServer::new(memory, Arc::new(|_| String::new()), &world, Metrics::new());
    let handler: Arc<dyn Handler> = Arc::new(head);
    let listener = Box::new(network.listen("head")?);
    let mut tasks = JoinSet::new();
    let stop = CancelToken::new();
    let serving = serve(listener, handler, stop.clone(), Duration::from_secs(1));
    tasks.spawn(async move {
        let _ = serving.await;
    });
    let transports = Transports::new().with_connector(Arc::new(network));
    let registry: Arc<dyn MemberRegistry> =
        Arc::new(RemoteRegistry::new(Endpoint::parse("mem://head")?, transports, world.clone()));
    let (mut keepers, mut watchers) = (Vec::new(), Vec::new());
    for at in 0..count {
        let mut spec = MemberSpec::new(format!("member-{at}"), Incarnation(1));
        spec.timing = timing();
        let cx = CallContext::within(WAIT_TIMEOUT);
        keepers.push(MemberKeeper::join(Arc::clone(&registry), &cx, spec, MemberOptions::default(), &world).await?);
        watchers.push(watch(Arc::clone(&registry), &mut tasks));
    }
    sleep(Duration::from_secs(2)).await;
    let (cpu, began) = (measure::cpu(std::process::id()), Instant::now());
    sleep(Duration::from_secs(10)).await;
    let used = measure::cpu(std::process::id()).saturating_sub(cpu).as_secs_f64() / began.elapsed().as_secs_f64();
    figure(&format!("cluster_members_{count}_cpu_of_a_core"), "%", &[used * 100.0], &[], None);
    let grown = measure::resident(std::process::id()).saturating_sub(before) as f64 / f64::from(1 << 20);
    figure(&format!("cluster_members_{count}_resident"), "MiB", &[grown], &[], None);
    let mut taken = Vec::new();
    for at in 0..5 {
        taken.push(change(Arc::clone(&registry), &mut watchers, &format!("new-{at}")).await?);
    }
    figure(&format!("cluster_members_{count}_all_know"), "ms", &taken, &[], None);
    tasks.abort_all();
    Ok(())
}

/// Idle processes with a heartbeat each second. The CPU time and the memory are those of the head server; as many watchers as there are
/// processes wait for a change over one connection.
async fn processes(count: usize, scratch: &Scratch) -> Result<()> {
    let mut cluster = Cluster::start(scratch, &[]).await?;
    for at in 0..count {
        cluster.spawn(&format!("idle-{at}"), &[])?;
        // All at once, they would compete for the cores for as long as their heartbeats may be late.
        if at % 10 == 9 {
            cluster.serving(at + 1).await?;
        }
    }
    cluster.serving(count).await?;
    let head = cluster.head.pid();
    sleep(Duration::from_secs(2)).await;
    let (cpu, began) = (measure::cpu(head), Instant::now());
    sleep(Duration::from_secs(10)).await;
    let used = measure::cpu(head).saturating_sub(cpu).as_secs_f64() / began.elapsed().as_secs_f64();
    figure(&format!("cluster_processes_{count}_head_cpu_of_a_core"), "%", &[used * 100.0], &[], None);
    let mib = |pid: u32| measure::resident(pid) as f64 / f64::from(1 << 20);
    figure(&format!("cluster_processes_{count}_head_resident"), "MiB", &[mib(head)], &[], None);
    let each: Vec<f64> = cluster.workers.iter().map(|worker| mib(worker.pid())).collect();
    figure(&format!("cluster_processes_{count}_worker_resident"), "MiB", &each, &[], None);
    let registry: Arc<dyn MemberRegistry> = Arc::new(cluster.registry()?);
    let mut tasks = JoinSet::new();
    let mut watchers: Vec<_> = (0..count).map(|_| watch(Arc::clone(&registry), &mut tasks)).collect();
    sleep(Duration::from_secs(1)).await;
    let mut taken = Vec::new();
    for at in 0..5 {
        taken.push(change(Arc::clone(&registry), &mut watchers, &format!("new-{at}")).await?);
    }
    figure(&format!("cluster_processes_{count}_all_know"), "ms", &taken, &[], None);
    Ok(())
}

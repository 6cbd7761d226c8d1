//! Measures worker groups on a Ray cluster beside Ray's own actors and tasks on the same cluster.
//!
//! `.ci/ray.py` starts the cluster, and runs this program on one of its nodes: there, the driver of the peer can run too. Both sides have eight
//! ranks, four on each of two nodes, which share the cores of this machine with everything else.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use gym_benches::measure;
use gym_benches::options::Options;
use gym_benches::raw;
use gym_benches::report::{Aim, figure};
use gym_benches::worker::{Bencher, Ends, Ping};
use gym_client::Transports;
use gym_group::placement::{ClusterSpec, PlacementStrategy};
use gym_group::prelude::*;
use gym_group::ray::{Ray, RayAddress, RayDriver, RayOptions};
use gym_group::{BatchOptions, RankState};
use gym_group::{Group, GroupOptions, GroupRequest, VirtualCluster, WorkerKind, Workers};
use rustix::time::{ClockId, clock_gettime};
use serde::Deserialize;
use tokio::process::Command;
use tokio::time::{Instant, sleep};

const RANKS: u32 = 8;
/// Calls in flight in a pipeline, as many as in the peer's script.
const WINDOW: u64 = 1_000;
/// The CPU time of an item, as in the peer's script, where a batch has 25.
const ITEM: Duration = Duration::from_micros(200);
const CALL_TIMEOUT: Duration = Duration::from_secs(120);

struct Verifier;
worker! {
    impl Worker for Verifier as verifier {
        fn start(_: WorkerEnv, (): ()) -> gym_core::Result<Self> { Ok(Self) }
        /// Takes the CPU time of the items.
        blocking(idempotent) fn verify(&mut self, _: &CallContext, call: Payload<Vec<u64>>) -> gym_core::Result<Payload<Vec<u64>>> {
            for _ in &call.value {
                let end = thread_time() + ITEM;
                while thread_time() < end {}
            }
            Ok(call)
        }
    }
}

fn thread_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default()
}

/// The output of the peer's script.
#[derive(Deserialize)]
struct Peer {
    start_s: Vec<f64>,
    /// A job with one actor on each node, all of which do nothing.
    job_s: Vec<f64>,
    call_us: f64,
    pipelined_8_per_s: Vec<f64>,
    payload_64mib_ms: f64,
    restart_s: Vec<f64>,
    verify_per_s: Vec<f64>,
    verify_batch_per_s: Vec<f64>,
}

impl Peer {
    async fn measure(python: &str, address: &str, dashboard: &str, quick: bool) -> Result<Self> {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/peers/ray_cluster.py");
        let mut command = Command::new(python);
        command.arg(script).args([address, dashboard]).args(quick.then_some("--quick")).kill_on_drop(true);
        let output = command.output().await.with_context(|| format!("run {script} with {python}"))?;
        ensure!(output.status.success(), "{script}: {}", String::from_utf8_lossy(&output.stderr));
        let text = String::from_utf8(output.stdout)?;
        // Ray writes to the same output.
        let line = text.lines().rev().find(|line| line.starts_with('{'));
        let line = line.with_context(|| format!("{script} printed no figures: {text}"))?;
        serde_json::from_str(line).with_context(|| format!("{script} printed {line}"))
    }
}

fn workers() -> Workers {
    Workers::new().with("bencher", WorkerKind::of::<Bencher>()).with("verifier", WorkerKind::of::<Verifier>())
}

fn main() -> ExitCode {
    // First, because ranks run this program too.
    workers().enter();
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_max_level(tracing_subscriber::filter::LevelFilter::ERROR)
        .init();
    let run = || -> Result<()> {
        let options = Options::of_arguments()?;
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        runtime.block_on(bench(options))
    };
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn bench(options: Options) -> Result<()> {
    let variable = |name: &str| std::env::var(name).with_context(|| format!("{name} is not set; .ci/ray.py sets it"));
    let (url, python) = (variable("GYM_RAY_TEST_ADDRESS")?, variable("GYM_RAY_TEST_PYTHON")?);
    println!("# load average {:.1}; medians of {} runs", measure::load_average(), rounds(&options));
    let address = RayAddress::parse(&url, "GYM_RAY_TEST_ADDRESS")?;
    let child = RayDriver::Child { python: PathBuf::from(&python) };
    let ours = Ours { address: address.clone(), options: options.clone(), child };
    let host = url.trim_start_matches("http://").split(':').next().unwrap_or_default();
    let peer = Peer::measure(&python, &format!("{host}:6379"), &url, options.quick).await?;

    // As a job of the dashboard, then with a driver that is a child of this program.
    let (mut as_job, mut as_child, mut group) = (Vec::new(), Vec::new(), None);
    for _ in 0..rounds(&options) {
        for (driver, starts) in [(RayDriver::Head, &mut as_job), (ours.child.clone(), &mut as_child)] {
            if let Some((cluster, group)) = group.take() {
                stop(cluster, group).await?;
            }
            let begin = Instant::now();
            let restarting = GroupOptions::new(Transports::standard()).restarting(1_000);
            group = Some(ours.start("bencher", driver, restarting).await?);
            starts.push(begin.elapsed().as_secs_f64());
        }
    }
    figure("ray_start_8", "s", &as_child, &peer.start_s, Some(Aim::AtMost(2.5)));
    figure("ray_start_8_as_a_job", "s", &as_job, &peer.start_s, None);
    // Such a start is a job of Ray too, which starts our agents.
    figure("ray_start_8_as_a_job_beside_an_empty_job", "s", &as_job, &peer.job_s, None);
    let (cluster, group) = group.context("no round")?;
    ours.calls(&group, &peer).await?;
    let mut restarts = Vec::new();
    for _ in 0..rounds(&options) {
        restarts.push(restart(&group).await?);
    }
    // The first one: after it, the group pauses before each further one of the same rank, as it does for a program that fails again and again.
    figure("ray_restart_of_a_rank", "s", &restarts, &peer.restart_s, Some(Aim::AtMost(0.5)));
    stop(cluster, group).await?;

    let (cluster, group) =
        ours.start("verifier", ours.child.clone(), GroupOptions::new(Transports::standard())).await?;
    let items = if options.quick { 400 } else { 4_000 };
    let balancer = group.balancer()?;
    balancer.map(&cx(), verifier::verify, vec![vec![1]; 200], 2).await?;
    let (mut ones, mut batches) = (Vec::new(), Vec::new());
    for _ in 0..rounds(&options) {
        let begin = Instant::now();
        let done = balancer.map(&cx(), verifier::verify, (0..items).map(|item| vec![item]).collect(), 8).await?;
        ensure!(done.iter().flatten().copied().eq(0..items), "each item has its own reply");
        ones.push(items as f64 / begin.elapsed().as_secs_f64());
        let begin = Instant::now();
        let batched = BatchOptions::default();
        let done = balancer.map_batched(&cx(), verifier::verify, (0..items).collect(), &batched).await;
        let done = done.into_iter().collect::<std::result::Result<Vec<u64>, _>>()?;
        ensure!(done.into_iter().eq(0..items), "each item has its own reply");
        batches.push(items as f64 / begin.elapsed().as_secs_f64());
    }
    figure("ray_verify_one_item_per_call_rate", "/s", &ones, &peer.verify_per_s, None);
    figure("ray_verify_batches_by_time_rate", "/s", &batches, &peer.verify_batch_per_s, None);
    stop(cluster, group).await
}

fn rounds(options: &Options) -> usize {
    if options.quick { 1 } else { 3 }
}

fn cx() -> CallContext {
    CallContext::within(CALL_TIMEOUT)
}

async fn stop(cluster: VirtualCluster, group: Arc<Group>) -> Result<()> {
    group.shutdown(Duration::from_secs(5)).await?;
    cluster.shutdown(Duration::from_secs(5)).await?;
    Ok(())
}

/// Kills a rank that was not killed before, and waits until it serves again.
async fn restart(group: &Group) -> Result<f64> {
    let fresh =
        group.worker_status().into_iter().find(|rank| rank.incarnation.0 == 1).context("every rank was killed")?;
    let begin = Instant::now();
    group.kill(fresh.rank).await?;
    loop {
        let now = group.worker_status().into_iter().find(|rank| rank.rank == fresh.rank).context("the rank is gone")?;
        if now.incarnation > fresh.incarnation && now.state == RankState::Healthy {
            group.call(Ping, 7).dispatch(Dispatch::rank(fresh.rank)).context(&cx()).await?;
            return Ok(begin.elapsed().as_secs_f64());
        }
        ensure!(begin.elapsed() < CALL_TIMEOUT, "rank {} is {:?} after {CALL_TIMEOUT:?}", fresh.rank, now.state);
        sleep(Duration::from_millis(2)).await;
    }
}

struct Ours {
    address: RayAddress,
    options: Options,
    child: RayDriver,
}

impl Ours {
    async fn start(&self, kind: &str, driver: RayDriver, group: GroupOptions) -> Result<(VirtualCluster, Arc<Group>)> {
        let mut spec = ClusterSpec::new([4, 4]);
        spec.placement_group_strategy = PlacementStrategy::StrictSpread;
        let mut ray = RayOptions::default();
        // The nodes share the files of this machine.
        ray.program = Some(std::env::current_exe()?);
        ray.driver = driver;
        let cluster = VirtualCluster::new(spec, Ray::at(self.address.clone(), workers()).with(ray))?;
        let group = cluster.start(&cx(), GroupRequest::new("bench", kind, &(), group)?).await?;
        ensure!(group.worker_status().len() == RANKS as usize, "eight ranks");
        Ok((cluster, Arc::new(group)))
    }

    /// Measures calls to ranks.
    async fn calls(&self, group: &Arc<Group>, peer: &Peer) -> Result<()> {
        let scale = if self.options.quick { 10 } else { 1 };
        let one = || group.call(Ping, 7).dispatch(Dispatch::rank(0)).context(&cx());
        let call = median_of(2_000 / scale, || async { Ok(one().await.map(drop)?) }).await?;
        let aim = Aim::AtMost(peer.call_us / 20.0);
        figure("ray_call_p50", "us", &[call * 1e6], &[peer.call_us], Some(aim));
        // One that waits in `main` takes a thread switch more.
        let (group_of_task, count) = (Arc::clone(group), 2_000 / scale);
        let in_task = tokio::spawn(async move {
            let one = || group_of_task.call(Ping, 7).dispatch(Dispatch::rank(0)).context(&cx());
            median_of(count, || async { Ok(one().await.map(drop)?) }).await
        });
        figure("ray_call_p50_in_a_task", "us", &[in_task.await?? * 1e6], &[peer.call_us], Some(aim));
        let floor = tokio::task::spawn_blocking(raw::round_trip).await??;
        figure("ray_call_beside_a_raw_socket", "us", &[call * 1e6], &[floor.as_secs_f64() * 1e6], None);
        let mut rates = Vec::new();
        for _ in 0..rounds(&self.options) {
            let (windows, context, begin) = (10 / scale as u64, cx(), Instant::now());
            let mut pending = Vec::with_capacity(WINDOW as usize);
            for _ in 0..windows {
                for number in 0..WINDOW {
                    let rank = Dispatch::rank((number % u64::from(RANKS)) as u32);
                    pending.push(group.call(Ping, number).dispatch(rank).context(&context).start().await?);
                }
                for (number, call) in pending.drain(..).enumerate() {
                    ensure!(call.await?.into_one()?.value == number as u64, "each call has its own answer");
                }
            }
            rates.push((windows * WINDOW) as f64 / begin.elapsed().as_secs_f64());
        }
        let aim = Aim::AtLeast(20.0 * measure::median(&peer.pipelined_8_per_s));
        figure("ray_pipelined_8_rate", "/s", &rates, &peer.pipelined_8_per_s, Some(aim));
        let batch = Batch::empty().with("data", Tensor::from_vec([64 << 20], vec![1_u8; 64 << 20])?)?;
        let send = || group.call(Ends, ()).batch(batch.clone()).dispatch(Dispatch::rank(0)).context(&cx());
        let payload = median_of((20 / scale).max(2), || async { Ok(send().await.map(drop)?) }).await?;
        figure("ray_payload_64MiB_one_way", "ms", &[payload * 1e3], &[peer.payload_64mib_ms], None);
        Ok(())
    }
}

/// Returns the median time in seconds, after a twentieth of the actions as a warm-up.
async fn median_of<F: Future<Output = Result<()>>>(count: usize, action: impl Fn() -> F) -> Result<f64> {
    let mut times = Vec::with_capacity(count);
    for at in 0..count + (count / 20).max(2) {
        let begin = Instant::now();
        action().await?;
        if at >= (count / 20).max(2) {
            times.push(begin.elapsed().as_secs_f64());
        }
    }
    Ok(measure::median(&times))
}

//! Measures calls to eight ranks in processes of this machine, over Unix sockets and over TCP.
//!
//! What it measures is the whole path of a call: the controller, the connection, and the rank. `_cpu` is the CPU time of all processes, and
//! `_switches` the number of times that one of their threads went to sleep.

use std::fs;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use gym_benches::measure;
use gym_benches::options::Options;
use gym_benches::report::figure;
use gym_benches::worker::{Bencher, Ping};
use gym_client::Transports;
use gym_group::placement::ClusterSpec;
use gym_group::prelude::*;
use gym_group::{Group, GroupOptions, GroupRequest, Local, LocalOptions, VirtualCluster, WorkerKind, Workers};
use tokio::time::Instant;

const RANKS: u32 = 8;
/// Calls in flight in a pipeline, as many as beside Ray.
const WINDOW: u64 = 1_000;

fn workers() -> Workers {
    Workers::new().with("bencher", WorkerKind::of::<Bencher>())
}

fn main() -> ExitCode {
    // First, because ranks run this program too.
    workers().enter();
    let run = || -> Result<()> {
        let options = Options::of_arguments()?;
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        // In a task: outside the threads of the runtime, each call wakes another thread twice.
        runtime.block_on(async { tokio::spawn(bench(options)).await? })
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
    println!("# load average {:.1}; medians of {} runs", measure::load_average(), options.rounds());
    for (name, host) in [("unix", None), ("tcp", Some("127.0.0.1".to_owned()))] {
        if !options.wants(name) {
            continue;
        }
        let mut local = LocalOptions::default();
        local.host = host;
        let cluster =
            VirtualCluster::new(ClusterSpec::new([RANKS]), Local::new(workers()).with(local))?.simulate_nodes(&[RANKS]);
        let context = CallContext::within(Duration::from_secs(600));
        let request = GroupRequest::new("bench", "bencher", &(), GroupOptions::new(Transports::standard()))?;
        let group = cluster.start(&context, request).await?;
        calls(&options, name, &group).await?;
        group.shutdown(Duration::from_secs(5)).await?;
        cluster.shutdown(Duration::from_secs(5)).await?;
    }
    Ok(())
}

async fn calls(options: &Options, name: &str, group: &Group) -> Result<()> {
    let context = CallContext::within(Duration::from_secs(600));
    let scale = if options.quick { 10 } else { 1 };
    let calls = 20_000 / scale;
    let mut lone = Costs::default();
    for _ in 0..options.rounds() {
        let before = Counts::read()?;
        let mut times = Vec::with_capacity(calls);
        for _ in 0..calls {
            let begin = Instant::now();
            group.call(Ping, 7).dispatch(Dispatch::rank(0)).context(&context).await?;
            times.push(begin.elapsed().as_secs_f64() * 1e6);
        }
        lone.add(&before, calls, measure::median(&times))?;
    }
    lone.print(&format!("{name}_call"), "p50", "us");
    let windows = 200 / scale as u64;
    let mut pipelined = Costs::default();
    for _ in 0..options.rounds() {
        let (before, begin) = (Counts::read()?, Instant::now());
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
        let calls = windows * WINDOW;
        pipelined.add(&before, calls as usize, calls as f64 / begin.elapsed().as_secs_f64())?;
    }
    pipelined.print(&format!("{name}_pipelined_8"), "rate", "/s");
    Ok(())
}

#[derive(Default)]
struct Costs {
    figure: Vec<f64>,
    cpu_us: Vec<f64>,
    switches: Vec<f64>,
}

impl Costs {
    fn add(&mut self, before: &Counts, calls: usize, value: f64) -> Result<()> {
        let now = Counts::read()?;
        self.figure.push(value);
        self.cpu_us.push((now.cpu - before.cpu).as_secs_f64() * 1e6 / calls as f64);
        self.switches.push((now.switches - before.switches) as f64 / calls as f64);
        Ok(())
    }

    fn print(&self, name: &str, what: &str, unit: &str) {
        figure(&format!("{name}_{what}"), unit, &self.figure, &[], None);
        figure(&format!("{name}_cpu"), "us", &self.cpu_us, &[], None);
        figure(&format!("{name}_switches"), "", &self.switches, &[], None);
    }
}

struct Counts {
    cpu: Duration,
    switches: u64,
}

impl Counts {
    /// Reads the counts of this process and the ranks.
    fn read() -> Result<Self> {
        let processes = measure::tree(std::process::id());
        let mut switches = 0;
        for process in &processes {
            for thread in fs::read_dir(format!("/proc/{process}/task"))? {
                let status = fs::read_to_string(thread?.path().join("status"))?;
                let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
                switches += line.context("no count of switches")?.trim().parse::<u64>()?;
            }
        }
        Ok(Self { cpu: measure::cpu_of(&processes), switches })
    }
}

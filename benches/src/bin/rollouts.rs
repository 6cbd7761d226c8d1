//! Measures whole collections of the SDK and of NeMo Gym, over the same rows and the same mock endpoint.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use gym_benches::load::{Done, Load, post};
use gym_benches::options::Options;
use gym_benches::peer::{self, Peer};
use gym_benches::report::{Aim, figure};
use gym_benches::role::Part;
use gym_benches::stack::{
    Collection, INSTANCES, ModelAt, Plan, Scratch, Served, free_port, start_mock, write_config, write_rows,
};
use gym_benches::{bodies, measure, role};

/// Rollouts of one burst: as many as NeMo Gym's users send at once.
const BURST: usize = 16_384 - 384;

/// The limit of a collection for both sides, far beyond the expected time.
const WAIT_TIMEOUT: Duration = Duration::from_secs(500);

fn main() -> Result<()> {
    role::main(bench)
}

struct Bench {
    options: Options,
    scratch: Scratch,
    input: PathBuf,
    peer: Option<Peer>,
}

async fn bench(options: Options) -> Result<()> {
    let scratch = Scratch::new("rollouts")?;
    let input = write_rows(&scratch)?;
    let (mock, upstream) = start_mock(0).await?;
    let peer = match &options.peer {
        Some(python) => Some(Peer::start(python, &scratch, upstream).await?),
        None => None,
    };
    let bench = Bench { options, scratch, input, peer };
    println!("# load average {:.1}", measure::load_average());
    for (name, separated) in [("separated", true), ("all_in_one_served", false)] {
        if bench.options.wants(name) {
            let head_port = free_port()?;
            let config = write_config(&bench.scratch, name, ModelAt::Mock(upstream), head_port)?;
            let served = Served::start(&config, head_port, separated).await?;
            bench.served(name, &served).await?;
            served.stop().await?;
        }
    }
    let embedded = ModelAt::Embedded(Duration::ZERO);
    for (name, model) in [("all_in_one_mock", ModelAt::Mock(upstream)), ("all_in_one", embedded)] {
        if bench.options.wants(name) {
            bench.all_in_one(name, model).await?;
        }
    }
    if let Some(peer) = bench.peer {
        peer.stop().await?;
    }
    mock.end(Duration::from_secs(5)).await
}

impl Bench {
    /// Returns the repeats of the SDK's collection and of the peer's, such that a run takes seconds.
    fn repeats(&self, concurrency: usize) -> (u32, u32) {
        match (self.options.quick, concurrency) {
            (true, _) => (200, 10),
            (false, 1) => (2_000, 40),
            (false, _) => (20_000, 200),
        }
    }

    fn plan(&self, name: &str, repeats: u32, concurrency: usize) -> Plan {
        let output = self.scratch.path(&format!("{name}.jsonl"));
        Plan { input: self.input.clone(), output, repeats, concurrency }
    }

    /// Measures collections and single `/run`s against servers in separate processes.
    async fn served(&self, name: &str, served: &Served) -> Result<()> {
        let pids = served.pids();
        let resident: u64 = pids.iter().map(|pid| measure::resident(*pid)).sum();
        println!("{name}_idle processes={} resident_mib={:.1}", pids.len(), resident as f64 / f64::from(1 << 20));
        let mut steady = 0.0_f64;
        for concurrency in [1, 32, 1_000] {
            steady = steady.max(self.collections(name, served, concurrency).await?);
            self.runs(name, served, concurrency).await?;
        }
        self.burst(name, served, steady).await?;
        let resident: u64 = pids.iter().map(|pid| measure::resident(*pid)).sum();
        print!("{name}_after processes={} resident_mib={:.1}", pids.len(), resident as f64 / f64::from(1 << 20));
        if let Some(peer) = &self.peer {
            let (processes, resident) = peer.footprint();
            print!(" peer_processes={processes} peer_resident_mib={:.0}", resident as f64 / f64::from(1 << 20));
        }
        println!();
        Ok(())
    }

    /// Measures collections, and returns the steady rate.
    async fn collections(&self, name: &str, served: &Served, concurrency: usize) -> Result<f64> {
        let (pids, name) = (served.pids(), format!("{name}_c{concurrency}"));
        let (ours, theirs) = self.repeats(concurrency);
        let (mut cpu, mut rate, mut collector) = (Vec::new(), Vec::new(), Vec::new());
        let (mut peer_cpu, mut peer_rate) = (Vec::new(), Vec::new());
        let mut requests = 0.0;
        for _ in 0..self.options.rounds().min(3) {
            let plan = self.plan(&name, ours, concurrency);
            let (before, counted) = (measure::cpu_of(&pids), http_requests(served).await?);
            let mut part = Part::start(&["collect", &served.head, &plan.argument()])?;
            let done: Collection = part.told(WAIT_TIMEOUT).await?;
            part.end(Duration::from_secs(10)).await?;
            let rows = done.rows.max(1) as f64;
            // Includes the collector's own few requests to the head server.
            requests = (http_requests(served).await? - counted) / rows;
            cpu.push((measure::cpu_of(&pids).saturating_sub(before)).as_secs_f64() * 1e3 / rows);
            rate.push(done.rate());
            collector.push(done.cpu_s * 1e3 / rows);
            if done.failures > 0 {
                println!("{name}_failures ours={}", done.failures);
            }
            if let Some(peer) = &self.peer {
                let plan = self.plan(&format!("{name}_peer"), theirs, concurrency);
                let before = measure::cpu_of(&peer.pids());
                let (rows, per_second) = peer.collect(&plan, WAIT_TIMEOUT).await?;
                let after = measure::cpu_of(&peer.pids());
                peer_cpu.push(after.saturating_sub(before).as_secs_f64() * 1e3 / rows.max(1) as f64);
                peer_rate.push(per_second);
            }
        }
        let aimed = name.starts_with("separated") && concurrency == 32;
        let (cpu_aim, rate_aim) = (Aim::AtMost(0.105), Aim::AtLeast(10_000.0));
        figure(&format!("{name}_server_cpu"), "ms", &cpu, &peer_cpu, aimed.then_some(cpu_aim));
        figure(&format!("{name}_rate"), "/s", &rate, &peer_rate, aimed.then_some(rate_aim));
        figure(&format!("{name}_collector_cpu"), "ms", &collector, &[], None);
        println!("{name}_http_requests ours={requests:.2}");
        Ok(measure::median(&rate))
    }

    fn load(&self, served: &Served, concurrency: usize) -> Result<Load> {
        let [_, _, _, environment] = INSTANCES;
        Ok(Load {
            address: served.address(environment)?,
            request: post("/run", &bodies::row()),
            connections: concurrency,
            count_max: u64::MAX,
            time_max: self.options.seconds(),
        })
    }

    /// Measures the time of one rollout at the environment server.
    async fn runs(&self, name: &str, served: &Served, concurrency: usize) -> Result<()> {
        let load = self.load(served, concurrency)?;
        let peer = self.peer.as_ref().map(|peer| peer.server("environment_servers")).transpose()?;
        let mut all = [Vec::new(), Vec::new(), Vec::new(), Vec::new()];
        for _ in 0..self.options.rounds() {
            let done = load.run().await?;
            all[0].push(done.quantile_us(0.5) / 1e3);
            all[1].push(done.quantile_us(0.99) / 1e3);
            if let Some((address, _)) = peer {
                let done = Load { address, ..load.clone() }.run().await?;
                all[2].push(done.quantile_us(0.5) / 1e3);
                all[3].push(done.quantile_us(0.99) / 1e3);
            }
        }
        figure(&format!("{name}_c{concurrency}_run_p50"), "ms", &all[0], &all[2], None);
        figure(&format!("{name}_c{concurrency}_run_p99"), "ms", &all[1], &all[3], None);
        Ok(())
    }

    /// Sends all requests at once, over as many connections as a client of the SDK opens.
    async fn burst(&self, name: &str, served: &Served, steady: f64) -> Result<()> {
        let count = if self.options.quick { 2_000 } else { BURST };
        let mut load = self.load(served, 1_024)?;
        (load.count_max, load.time_max) = (count as u64, WAIT_TIMEOUT);
        let done = load.run().await?;
        let say = |who: &str, done: &Done| {
            let (first, last) = (done.first.as_secs_f64() * 1e3, done.wall.as_secs_f64());
            println!(
                "{name}_burst {who} answered={} errors={} first={first:.1}ms last={last:.2}s",
                done.answered, done.errors
            );
        };
        say("ours", &done);
        figure(&format!("{name}_burst_first"), "ms", &[done.first.as_secs_f64() * 1e3], &[], Some(Aim::AtMost(100.0)));
        let within = 1.3 * count as f64 / steady;
        figure(&format!("{name}_burst_last"), "s", &[done.wall.as_secs_f64()], &[], Some(Aim::AtMost(within)));
        figure(&format!("{name}_burst_errors"), "", &[done.errors as f64], &[], Some(Aim::AtMost(0.0)));
        // The same burst through the collector, with every row written.
        let plan = self.plan(&format!("{name}_burst"), (count / 5) as u32, count);
        let mut part = Part::start(&["collect", &served.head, &plan.argument()])?;
        let collected: Collection = part.told(WAIT_TIMEOUT).await?;
        part.end(Duration::from_secs(10)).await?;
        println!(
            "{name}_burst_collected rows={} failures={} in {:.2}s",
            collected.rows, collected.failures, collected.wall_s
        );
        if let Some(peer) = self.peer.as_ref().filter(|_| name == "separated") {
            let (address, _) = peer.server("environment_servers")?;
            say("peer", &Load { address, ..load }.run().await?);
        }
        Ok(())
    }

    /// Measures collections with all servers in the collecting process.
    async fn all_in_one(&self, name: &str, model: ModelAt) -> Result<()> {
        let config = write_config(&self.scratch, name, model, free_port()?)?;
        let config = config.to_string_lossy();
        for concurrency in [1, 32, 1_000, BURST] {
            let repeats = if self.options.quick || concurrency == 1 { 2_000 } else { 40_000 };
            let (mut cpu, mut rate) = (Vec::new(), Vec::new());
            let mut resident = 0;
            for _ in 0..self.options.rounds().min(3) {
                let plan = self.plan(&format!("{name}_c{concurrency}"), repeats, concurrency);
                let mut part = Part::start(&["all-in-one", &config, &plan.argument()])?;
                let done: Collection = part.told(WAIT_TIMEOUT).await?;
                part.end(Duration::from_secs(10)).await?;
                cpu.push(done.cpu_s * 1e3 / done.rows.max(1) as f64);
                rate.push(done.rate());
                resident = resident.max(done.resident_max);
            }
            let aimed = name == "all_in_one" && concurrency == 1_000;
            figure(&format!("{name}_c{concurrency}_cpu"), "ms", &cpu, &[], None);
            figure(&format!("{name}_c{concurrency}_rate"), "/s", &rate, &[], aimed.then_some(Aim::AtLeast(50_000.0)));
            println!("{name}_c{concurrency}_resident_mib ours={:.1}", resident as f64 / f64::from(1 << 20));
        }
        Ok(())
    }
}

/// Returns the number of requests that the stack's servers have answered, according to their metrics.
async fn http_requests(served: &Served) -> Result<f64> {
    let mut sum = 0.0;
    let mut seen = Vec::new();
    for name in INSTANCES {
        let pid = served.pid(name);
        // Servers of one process share their metrics.
        if seen.contains(&pid) {
            continue;
        }
        seen.push(pid);
        let (_, text) = peer::get(served.address(name)?, "/metrics").await?;
        let text = String::from_utf8_lossy(&text).into_owned();
        let counts = text.lines().filter(|line| line.starts_with("gym_requests_total{"));
        sum += counts.filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok()).sum::<f64>();
    }
    Ok(sum)
}

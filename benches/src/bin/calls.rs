//! Measures calls to worker groups in this process: the cost of a call, calls per second, and the cost of passing large batches.
//!
//! Every call is typed, and has a deadline and a trace. The peer is Ray; `--peer PYTHON` selects an environment that has it.

use std::time::Duration;

use anyhow::{Result, ensure};
use gym_benches::measure;
use gym_benches::options::Options;
use gym_benches::ray::Ray;
use gym_benches::report::{Aim, figure};
use gym_benches::worker::{Bencher, Echo, Ends, Ping};
use gym_core::CallContext;
use gym_core::message::TraceContext;
use gym_group::{
    Batch, Dispatch, HandlesBlocking, InProcessGroup, Methods, Payload, RankLayout, Tensor, Worker, WorkerEnv,
    WorkerGroupExt,
};
use hdrhistogram::Histogram;
use tokio::runtime::{Builder, Runtime};
use tokio::time::Instant;

/// Calls in flight in a pipeline, as many as in the peer's script.
const WINDOW: u64 = 1_000;
const MIB: usize = 1 << 20;

fn main() -> Result<()> {
    let options = Options::of_arguments()?;
    let bench =
        Bench { peer: options.peer.as_deref().map(|python| Ray::measure(python, options.quick)).transpose()?, options };
    println!("# load average {:.1}; medians of {} runs", measure::load_average(), bench.options.rounds());
    for (threads, runtime) in [(1, one_thread()?), (2, two_threads()?)] {
        bench.small(threads, &runtime)?;
    }
    let runtime = two_threads()?;
    bench.large(&runtime)
}

fn one_thread() -> Result<Runtime> {
    Ok(Builder::new_current_thread().enable_all().build()?)
}

fn two_threads() -> Result<Runtime> {
    Ok(Builder::new_multi_thread().worker_threads(2).enable_all().build()?)
}

struct BlockingBencher;

impl Worker for BlockingBencher {
    type Init = ();

    fn start(_: WorkerEnv, (): ()) -> gym_core::Result<Self> {
        Ok(Self)
    }

    fn methods(methods: &mut Methods<Self>) {
        methods.blocking(Ping);
    }
}

impl HandlesBlocking<Ping> for BlockingBencher {
    fn handle(&mut self, _: &CallContext, call: Payload<u64>) -> gym_core::Result<Payload<u64>> {
        Ok(call)
    }
}

async fn group<W: Worker<Init = ()>>(ranks: usize) -> Result<InProcessGroup> {
    Ok(InProcessGroup::start::<W>("bench", RankLayout::line(ranks)?, ()).await?)
}

fn traced() -> CallContext {
    let mut context = CallContext::within(Duration::from_secs(600));
    context.trace = TraceContext { trace_id: 7, span_id: 7, sampled: false };
    context
}

struct Bench {
    options: Options,
    peer: Option<Ray>,
}

#[derive(Default)]
struct Latency {
    p50_us: Vec<f64>,
    p99_us: Vec<f64>,
    cpu_us: Vec<f64>,
}

impl Bench {
    /// Measures calls without a batch.
    fn small(&self, threads: usize, runtime: &Runtime) -> Result<()> {
        let peer = |of: fn(&Ray) -> f64| self.peer.as_ref().map(of).into_iter().collect::<Vec<_>>();
        let suffix = format!("t{threads}");
        let calls = self.count(200_000);
        let one = runtime.block_on(group::<Bencher>(1))?;
        let [p50, p99] = [peer(|ray| ray.call.p50_us), peer(|ray| ray.call.p99_us)];
        self.latency(&format!("call_{suffix}"), runtime, &one, calls, [&p50, &p99], (threads == 1).then_some(2.0))?;
        let blocking = runtime.block_on(group::<BlockingBencher>(1))?;
        self.latency(&format!("call_blocking_{suffix}"), runtime, &blocking, calls / 10, [&[], &[]], None)?;
        let rate = peer(|ray| ray.pipelined_1_per_s);
        self.pipelined(&format!("pipelined_1_{suffix}"), runtime, &one, 1, &rate, (threads == 2).then_some(1e6))?;
        let eight = runtime.block_on(group::<Bencher>(8))?;
        self.pipelined(&format!("pipelined_8_{suffix}"), runtime, &eight, 8, &peer(|ray| ray.pipelined_8_per_s), None)?;
        let [p50, p99] = [peer(|ray| ray.fan_out_8.p50_us), peer(|ray| ray.fan_out_8.p99_us)];
        self.latency(&format!("fan_out_8_{suffix}"), runtime, &eight, calls / 8, [&p50, &p99], None)?;
        let many = runtime.block_on(group::<Bencher>(256))?;
        self.latency(&format!("fan_out_256_{suffix}"), runtime, &many, calls / 256, [&[], &[]], None)
    }

    /// Measures calls with a batch.
    fn large(&self, runtime: &Runtime) -> Result<()> {
        let one = runtime.block_on(group::<Bencher>(1))?;
        let echoes = [("echo_1MiB", MIB, 20_000, true), ("echo_64MiB", 64 * MIB, 2_000, false)];
        for (name, bytes, calls, small) in echoes.into_iter().filter(|(name, ..)| self.options.wants(name)) {
            let batch = batch(bytes)?;
            let peer: Vec<f64> = (self.peer.iter())
                .map(|ray| if small { ray.echo_1mib.p50_us } else { ray.echo_64mib.p50_us })
                .collect();
            let mut latency = Latency::default();
            for _ in 0..self.options.rounds() {
                runtime.block_on(timed(self.count(calls), &mut latency, async || {
                    let answer = one.call(Echo, ()).batch(batch.clone()).context(&traced()).await?;
                    ensure!(answer.replies()[0].batch.rows() == bytes, "the batch comes back");
                    Ok(())
                }))?;
            }
            figure(&format!("{name}_p50"), "us", &latency.p50_us, &peer, None);
            figure(&format!("{name}_cpu"), "us", &latency.cpu_us, &[], None);
        }
        if self.options.wants("shard_1GiB_to_8") {
            let eight = runtime.block_on(group::<Bencher>(8))?;
            let batch = batch(1024 * MIB)?;
            let mut latency = Latency::default();
            for _ in 0..self.options.rounds() {
                runtime.block_on(timed(self.count(1_000), &mut latency, async || {
                    let call = eight.call(Ends, ()).batch(batch.clone()).dispatch(Dispatch::shard("rank"));
                    ensure!(call.context(&traced()).await?.replies().len() == 8, "eight ranks answer");
                    Ok(())
                }))?;
            }
            let ms = |us: &[f64]| us.iter().map(|us| us / 1_000.0).collect::<Vec<_>>();
            let peer: Vec<f64> = self.peer.iter().map(|ray| ray.shard_to_8.ms_per_gib()).collect();
            figure("shard_1GiB_to_8_p50", "ms", &ms(&latency.p50_us), &peer, Some(Aim::AtMost(5.0)));
        }
        Ok(())
    }

    fn latency(
        &self,
        name: &str,
        runtime: &Runtime,
        group: &InProcessGroup,
        calls: u64,
        peer: [&[f64]; 2],
        p50_us_max: Option<f64>,
    ) -> Result<()> {
        if !self.options.wants(name) {
            return Ok(());
        }
        let mut latency = Latency::default();
        let context = traced();
        for _ in 0..self.options.rounds() {
            runtime.block_on(timed(calls.max(20), &mut latency, async || {
                let answers = group.call(Ping, 7).context(&context).await?;
                ensure!(answers.replies().iter().all(|reply| reply.value == 7), "what is sent comes back");
                Ok(())
            }))?;
        }
        figure(&format!("{name}_p50"), "us", &latency.p50_us, peer[0], p50_us_max.map(Aim::AtMost));
        figure(&format!("{name}_p99"), "us", &latency.p99_us, peer[1], None);
        figure(&format!("{name}_cpu"), "us", &latency.cpu_us, &[], None);
        Ok(())
    }

    fn pipelined(
        &self,
        name: &str,
        runtime: &Runtime,
        group: &InProcessGroup,
        ranks: u32,
        peer: &[f64],
        rate_min: Option<f64>,
    ) -> Result<()> {
        if !self.options.wants(name) {
            return Ok(());
        }
        let (mut rates, mut cpu_us) = (Vec::new(), Vec::new());
        let (context, windows) = (traced(), self.count(1_000).max(10));
        for _ in 0..self.options.rounds() {
            let (cpu, begin) = (measure::cpu(std::process::id()), Instant::now());
            runtime.block_on(async {
                let mut pending = Vec::with_capacity(WINDOW as usize);
                for _ in 0..windows {
                    for number in 0..WINDOW {
                        let rank = Dispatch::rank((number % u64::from(ranks)) as u32);
                        pending.push(group.call(Ping, number).dispatch(rank).context(&context).start().await?);
                    }
                    for (number, call) in pending.drain(..).enumerate() {
                        ensure!(call.await?.into_one()?.value == number as u64, "each call has its own answer");
                    }
                }
                Ok(())
            })?;
            let calls = (windows * WINDOW) as f64;
            rates.push(calls / begin.elapsed().as_secs_f64());
            cpu_us.push((measure::cpu(std::process::id()) - cpu).as_secs_f64() * 1e6 / calls);
        }
        figure(&format!("{name}_rate"), "/s", &rates, peer, rate_min.map(Aim::AtLeast));
        figure(&format!("{name}_cpu"), "us", &cpu_us, &[], None);
        Ok(())
    }

    fn count(&self, calls: u64) -> u64 {
        if self.options.quick { (calls / 20).max(1) } else { calls }
    }
}

fn batch(bytes: usize) -> Result<Batch> {
    Ok(Batch::empty().with("data", Tensor::from_vec([bytes], vec![1_u8; bytes])?)?)
}

/// Measures calls in sequence, after a twentieth of them as a warm-up.
async fn timed(calls: u64, latency: &mut Latency, call: impl AsyncFn() -> Result<()>) -> Result<()> {
    for _ in 0..(calls / 20).max(2) {
        call().await?;
    }
    let mut nanos = Histogram::<u64>::new(3)?;
    let cpu = measure::cpu(std::process::id());
    for _ in 0..calls {
        let begin = Instant::now();
        call().await?;
        nanos.record(u64::try_from(begin.elapsed().as_nanos())?)?;
    }
    latency.cpu_us.push((measure::cpu(std::process::id()) - cpu).as_secs_f64() * 1e6 / calls as f64);
    latency.p50_us.push(nanos.value_at_quantile(0.5) as f64 / 1_000.0);
    latency.p99_us.push(nanos.value_at_quantile(0.99) as f64 / 1_000.0);
    Ok(())
}

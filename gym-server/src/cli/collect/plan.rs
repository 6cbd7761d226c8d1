//! `rgym plan`: measures a configuration on this machine, and computes the workers that a rate of rollouts needs.
//!
//! Three collections with different numbers of rollouts in flight are measured. The first two predict the third: so the report says how far the
//! computation is off on this machine. All further figures come from the third.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use gym_client::collect::input::Repeats;
use gym_client::collect::{CollectOptions, CollectProgress, RolloutCollector, RunEnd, fix_of_unopened};
use gym_core::base::process::{FamilyUsage, family_usage, system_cpu};
use gym_core::{CancelToken, World};
use serde::Serialize;
use tokio::time::Instant;

use crate::cli::args::options::{PlanArgs, ProgressMode};
use crate::cli::collect::{causes, figures, own_stack, progress};
use crate::cli::console::{self, Console, table};
use crate::cli::exit::{Failure, Outcome};
use crate::cli::setup::configuration::{Need, load, nothing_named};
use crate::cli::setup::models::ModelWatch;
use crate::cli::setup::signals::StopSignals;
use crate::cli::setup::stack_options::prepare_transports;
use crate::stack::{Servers, Stack};

/// Samples of a measurement.
const SAMPLES: u32 = 40;
/// The rows of the input that are used at most: their rollouts are repeated.
const ROWS_MAX: u64 = 10_000;
/// The rollouts of one measurement at most.
const ROLLOUTS_MAX: f64 = 1_000_000.0;
/// The part of the cores that a worker which is limited by its CPU keeps busy at least.
const BUSY_MIN: f64 = 0.85;
/// The numbers of workers that are always shown, as in NeMo Gym's table.
const WORKERS: [u64; 3] = [1, 4, 8];

/// A measurement with a number of rollouts in flight.
#[derive(Clone, Copy, Debug, Serialize)]
struct Load {
    in_flight: u32,
    rollouts_per_minute: f64,
    /// The mean time of a rollout, from the number in flight and the rate (Little's law).
    rollout_seconds: f64,
    /// CPU time of a rollout in the collector and all servers, those in Python included.
    cpu_seconds: f64,
    cores_busy: f64,
    /// Cores that other programs of this machine kept busy.
    cores_of_others: f64,
    /// The highest resident memory of all processes.
    resident_bytes: u64,
}

/// The expected performance of a number of workers.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct Expected {
    workers: u64,
    cores: u64,
    bytes: u64,
    rollouts_per_minute: f64,
}

/// The limit of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Limit {
    Cpu,
    /// Rollouts wait: for the model, tools, or other requests.
    Waiting,
}

#[derive(Debug, Serialize)]
struct Plan {
    cores_here: f64,
    measured: [Load; 3],
    /// The rate of the last measurement as the first two predict it.
    predicted_rollouts_per_minute: f64,
    /// The difference of the predicted from the measured rate, in percent of the measured one.
    off_percent: f64,
    worker_cores: u32,
    limit: Limit,
    expected: Vec<Expected>,
    /// Rollouts a minute that were asked for, and what serves them.
    target: Option<u64>,
    needed: Option<Expected>,
}

impl Load {
    /// Returns the rate with `in_flight` rollouts on `cores`, if each rollout takes as long and as much CPU time as here.
    fn rate_at(&self, in_flight: u32, cores: f64) -> f64 {
        let waiting = f64::from(in_flight) / self.rollout_seconds;
        60.0 * waiting.min(cores / self.cpu_seconds)
    }

    fn limit(&self, cores: f64) -> Limit {
        if self.cores_busy + self.cores_of_others >= cores * BUSY_MIN { Limit::Cpu } else { Limit::Waiting }
    }
}

impl Plan {
    fn new(measured: [Load; 3], cores_here: f64, worker_cores: u32, target: Option<u64>) -> Self {
        let [alone, some, full] = measured;
        // The time of a rollout from the first, which nothing delays; its CPU time from the second, whose threads sleep less.
        let predicted = Load { cpu_seconds: some.cpu_seconds, ..alone }.rate_at(full.in_flight, cores_here);
        let off_percent = 100.0 * (predicted / full.rollouts_per_minute - 1.0);
        let worker_cores_f = f64::from(worker_cores);
        // A rollout of a worker that is limited by its CPU takes longer than it would on more cores.
        let rate = match full.limit(cores_here) {
            Limit::Cpu => {
                Load { rollout_seconds: alone.rollout_seconds, ..full }.rate_at(full.in_flight, worker_cores_f)
            }
            Limit::Waiting => full.rate_at(full.in_flight, worker_cores_f),
        };
        let limit = if worker_cores_f / full.cpu_seconds * 60.0 <= rate * 1.01 { Limit::Cpu } else { Limit::Waiting };
        let expect = |workers: u64| Expected {
            workers,
            cores: workers * u64::from(worker_cores),
            bytes: workers * full.resident_bytes,
            rollouts_per_minute: workers as f64 * rate,
        };
        let needed = target.map(|target| expect((target as f64 / rate).ceil().max(1.0) as u64));
        Self {
            cores_here,
            measured,
            predicted_rollouts_per_minute: predicted,
            off_percent,
            worker_cores,
            limit,
            expected: WORKERS.map(expect).to_vec(),
            target,
            needed,
        }
    }

    fn text(&self) -> String {
        let seconds = |seconds: f64| match seconds {
            ..0.001 => format!("{:.0} µs", seconds * 1e6),
            _ => figures::duration(Duration::try_from_secs_f64(seconds).unwrap_or_default()),
        };
        let measured = self.measured.iter().map(|load| {
            [
                load.in_flight.to_string(),
                grouped(load.rollouts_per_minute),
                seconds(load.rollout_seconds),
                seconds(load.cpu_seconds),
                format!("{:.1}", load.cores_busy),
                mebibytes(load.resident_bytes),
            ]
        });
        let header = ["in flight", "rollouts/min", "time of one", "CPU of one", "cores busy", "memory"];
        let mut measured = table(header, measured);
        let others = self.measured.iter().map(|load| load.cores_of_others).fold(0.0, f64::max);
        if others > self.cores_here * (1.0 - BUSY_MIN) {
            measured.push_str(&format!(
                "\nOther programs kept up to {others:.1} cores of this machine busy meanwhile: measure on an idle machine for figures to rely on."
            ));
        }
        let full = &self.measured[2];
        let target = self.target.map(|target| format!("for {}", grouped(target as f64)));
        let mut all: Vec<Expected> = self.expected.iter().chain(&self.needed).copied().collect();
        all.sort_by_key(|row| row.workers);
        all.dedup_by_key(|row| row.workers);
        let expected = all.iter().map(|row| {
            let target = target.clone().filter(|_| Some(row) == self.needed.as_ref()).unwrap_or_default();
            [
                row.workers.to_string(),
                row.cores.to_string(),
                mebibytes(row.bytes),
                grouped(row.rollouts_per_minute),
                target,
            ]
        });
        let expected = table(["workers", "cores", "memory", "rollouts/min", ""], expected);
        let limit = match self.limit {
            Limit::Cpu => "its CPU: give it more cores, or use more workers",
            Limit::Waiting => {
                "waiting, for the model or tools: raise --in-flight as long as the rate grows, or use a faster model"
            }
        };
        let (cores, in_flight) = (self.worker_cores, full.in_flight);
        format!(
            "measured on this machine ({:.0} cores)\n{measured}\n\n\
             The first two rows predict {} rollouts/min with {in_flight} in flight; {} were measured: the prediction is off by {:+.0} %.\n\n\
             workers with {cores} cores each and {in_flight} rollouts in flight\n{expected}\n\n\
             A worker is limited by {limit}.\n\
             The CPU time and the memory include the collector, the servers of the configuration and their Python processes, and no model \
             endpoint outside of it. The figures of several workers assume that the model responds as fast as here: with one model server \
             for each worker, or with an endpoint that takes the load of all.",
            self.cores_here,
            grouped(self.predicted_rollouts_per_minute),
            grouped(full.rollouts_per_minute),
            self.off_percent,
        )
    }
}

/// Formats a rate with groups of three digits.
fn grouped(rate: f64) -> String {
    if rate < 9.95 {
        return format!("{rate:.1}");
    }
    let digits = format!("{rate:.0}");
    let first = digits.len() % 3;
    let mut text = digits[..first].to_owned();
    for (at, digit) in digits.char_indices().skip(first) {
        if at > 0 && (at - first).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

fn mebibytes(bytes: u64) -> String {
    format!("{} MiB", grouped(bytes as f64 / (1 << 20) as f64))
}

pub(in crate::cli) async fn plan(
    args: PlanArgs,
    overrides: &[String],
    servers: &Servers,
    console: &Console,
) -> Outcome {
    args.sources.check_endings(Some(&args.input))?;
    let loaded = load(&args.sources, overrides, servers, Need::OwnServers).await?;
    if loaded.config.instances.is_empty() {
        return Err(nothing_named("measure", &loaded.config.files));
    }
    prepare_transports(&loaded, servers, console);
    loaded.config.warnings.iter().for_each(|warning| console.warn(warning));
    let rows = rows(&args.input)?;
    let folder = tempfile::Builder::new().prefix("rgym-plan-").tempdir();
    let folder = folder.map_err(|error| {
        Failure::Failed(format!(
            "cannot create a temporary directory: {error}\n  fix: name a folder that this user can write in TMPDIR"
        ))
    })?;
    let world = World::real();
    #[cfg(feature = "ray")]
    let (loaded, ray) =
        crate::cli::setup::ray::connect_servers(loaded, args.sources.python.as_deref(), console).await?;
    let stop = StopSignals::listen()?;
    let stack_options = own_stack(&loaded, &args.starting, args.in_flight, console);
    let stack = tokio::select! {
        biased;
        () = stop.graceful.cancelled() => return Err(stopped()),
        started = Box::pin(Stack::start(loaded.config.clone(), servers, &world, stack_options)) => started?,
    };
    let cores = std::thread::available_parallelism().map_or(1, |cores| u32::try_from(cores.get()).unwrap_or(u32::MAX));
    let measuring = async {
        let models = ModelWatch::new(stack.client().clone(), stack.names().models());
        models.at_start(args.starting.wait_for_model, console).await?;
        Measuring {
            args: &args,
            cores,
            rows,
            stack: &stack,
            world: &world,
            folder: folder.path(),
            stop: &stop,
            console,
        }
        .all()
        .await
    };
    let measured = tokio::select! {
        biased;
        () = stop.immediate.cancelled() => Err(stopped()),
        measured = Box::pin(measuring) => measured,
    };
    Box::pin(Stack::stop(stack)).await;
    #[cfg(feature = "ray")]
    crate::cli::setup::ray::stop(ray, console).await;
    let plan = Plan::new(measured?, f64::from(cores), args.worker_cores.unwrap_or(cores), args.target);
    let text = if args.json {
        serde_json::to_string_pretty(&plan).map_err(|error| Failure::Failed(error.to_string()))?
    } else {
        plan.text()
    };
    console::print(&text);
    Ok(ExitCode::SUCCESS)
}

fn stopped() -> Failure {
    Failure::Failed("stopped before the end of the measurement".to_owned())
}

/// Returns the number of rows that are used.
fn rows(input: &Path) -> Result<u64, Failure> {
    let text = std::fs::read(input).map_err(|error| {
        let fix = fix_of_unopened(input, &error, "name a file of JSON lines with --input");
        Failure::Usage(format!("{}: {error}\n  fix: {fix}", input.display()))
    })?;
    let rows = text.split(|byte| *byte == b'\n').filter(|line| !line.trim_ascii().is_empty()).count() as u64;
    if rows == 0 {
        return Err(Failure::Usage(format!(
            "{}: the file has no rows\n  fix: write a JSON object for each task, or name another file with --input",
            input.display()
        )));
    }
    Ok(rows.min(ROWS_MAX))
}

/// A state of a measurement.
#[derive(Clone, Copy, Debug)]
struct Sample {
    at: Instant,
    completed: u64,
    in_flight: u64,
    used: FamilyUsage,
    /// CPU time of all programs of this machine.
    machine: Duration,
}

struct Measuring<'a> {
    args: &'a PlanArgs,
    cores: u32,
    /// The rows of the input that are used.
    rows: u64,
    stack: &'a Stack,
    world: &'a World,
    folder: &'a Path,
    stop: &'a StopSignals,
    console: &'a Console,
}

impl Measuring<'_> {
    async fn all(&self) -> Result<[Load; 3], Failure> {
        let cores = self.cores;
        let full = self.args.in_flight;
        // Busy threads sleep less, so a rollout takes less CPU time than when few are in flight.
        let some = (4 * cores).max(full / 4).min(full);
        let rows = self.rows;
        // Also warms up: the first rollouts open connections and files.
        let first = self.run("first", some, rows, 1).await?;
        let seconds = self.args.seconds.as_secs_f64();
        let count = |load: &Load, in_flight: u32, share: f64| {
            let rate = load.rate_at(in_flight, f64::from(cores)) / 60.0;
            let least = f64::from(in_flight) * 4.0;
            let repeats = (rate * seconds * share).max(least).min(ROLLOUTS_MAX) / rows as f64;
            repeats.ceil().max(1.0) as u32
        };
        let alone = self.run("alone", 1, rows.min(64), 1).await?;
        let alone_repeats = ((alone.rollouts_per_minute / 60.0 * seconds / 4.0) / rows as f64).ceil() as u32;
        let alone = if alone_repeats > 1 { self.run("alone", 1, rows, alone_repeats).await? } else { alone };
        let some = self.run("some", some, rows, count(&first, some, 0.25)).await?;
        let full = self
            .run("full", full, rows, count(&Load { rollout_seconds: alone.rollout_seconds, ..some }, full, 0.5))
            .await?;
        Ok([alone, some, full])
    }

    async fn run(&self, name: &str, in_flight: u32, rows: u64, repeats: u32) -> Result<Load, Failure> {
        let total = rows * u64::from(repeats);
        self.console.line(&format!("measuring {total} rollouts, {in_flight} in flight"));
        let mut options = CollectOptions::new(&self.args.input, self.output(name, total));
        options.materialize.limit = Some(rows);
        options.materialize.repeats = Repeats::Each(repeats);
        if let Some(agent) = &self.args.agent {
            options.materialize =
                options.materialize.with_agent(agent).map_err(|error| Failure::Usage(error.to_string()))?;
        }
        options.driver.concurrency = in_flight as usize;
        options.driver.attempt_timeout = self.args.attempt_timeout;
        options.aggregate = false;
        let (client, names) = (self.stack.client().clone(), self.stack.names().clone());
        let collector = RolloutCollector::new(client, names, self.world.clone());
        let every = (self.args.seconds / SAMPLES).max(Duration::from_millis(100));
        let sampler = Sampler { progress: collector.progress(), every };
        let mut samples = Vec::new();
        let models = ModelWatch::new(self.stack.client().clone(), self.stack.names().models());
        let (waits_for, watching) = models.watch();
        let watching = tokio::spawn(watching.boxed());
        let ended = CancelToken::new();
        let showing = progress::show(
            collector.progress(),
            waits_for,
            ProgressMode::Auto,
            self.console.clone(),
            options.driver.stop_grace,
            self.stop.graceful.clone(),
            ended.clone(),
        );
        let shown = tokio::spawn(showing.boxed());
        let begin = sampler.sample().await?;
        let collecting = Box::pin(collector.collect(options, self.stop.graceful.clone()));
        let collected = tokio::select! {
            collected = collecting => Ok(collected),
            failed = sampler.watch(&mut samples) => Err(failed),
        };
        let end = sampler.sample().await?;
        ended.cancel();
        watching.abort();
        // The tasks only draw, so their errors are ignored.
        let _ = shown.await;
        let collected = collected.and_then(|collected| Ok(collected?))?;
        let snapshot = &collected.snapshot;
        match collected.ended {
            RunEnd::Stopped => return Err(stopped()),
            _ if snapshot.completed == 0 || !collected.is_complete() => {
                let why = causes::report(snapshot).unwrap_or_default();
                return Err(Failure::Failed(format!(
                    "{} of {total} rollouts failed, so nothing was measured\n{why}\n  fix: remove the cause; `collect` shows it as well",
                    snapshot.given_up
                )));
            }
            _ => {}
        }
        let failed: u64 = snapshot.failures.values().sum();
        if failed > 0 {
            self.console
                .warn(format!("{failed} attempts failed and were repeated; they count in the time of the rollouts"));
        }
        Ok(measured(in_flight, begin, &samples, end))
    }

    fn output(&self, name: &str, total: u64) -> PathBuf {
        self.folder.join(format!("{name}-{total}.jsonl"))
    }
}

struct Sampler {
    progress: Arc<CollectProgress>,
    every: Duration,
}

impl Sampler {
    async fn sample(&self) -> Result<Sample, Failure> {
        let usage = tokio::task::spawn_blocking(|| Ok((family_usage()?, system_cpu()?))).await;
        let usage = usage.map_err(std::io::Error::other).flatten();
        let (used, machine) = usage.map_err(|error| Failure::Failed(format!("cannot read /proc: {error}")))?;
        let snapshot = self.progress.snapshot();
        Ok(Sample { at: Instant::now(), completed: snapshot.completed, in_flight: snapshot.in_flight, used, machine })
    }

    /// Takes samples until the caller drops the future. Returns why it cannot.
    async fn watch(&self, samples: &mut Vec<Sample>) -> Failure {
        loop {
            tokio::time::sleep(self.every).await;
            match self.sample().boxed().await {
                Ok(sample) => samples.push(sample),
                Err(error) => return error,
            }
        }
    }
}

/// Returns the figures of a measurement: those of its middle, in which all rollouts are in flight, if there are enough samples of it.
fn measured(in_flight: u32, begin: Sample, samples: &[Sample], end: Sample) -> Load {
    let total = end.completed;
    let middle: Vec<&Sample> = samples
        .iter()
        .filter(|sample| sample.completed * 10 >= total && sample.completed * 10 <= total * 9)
        .filter(|sample| sample.in_flight > 0)
        .collect();
    let (first, last) = match middle[..] {
        [first, .., last] if last.completed > first.completed && middle.len() > 4 => (*first, *last),
        _ => (begin, end),
    };
    let seconds = last.at.duration_since(first.at).as_secs_f64().max(1e-6);
    let rate = (last.completed - first.completed).max(1) as f64 / seconds;
    let cpu = last.used.cpu.saturating_sub(first.used.cpu).as_secs_f64();
    let machine = last.machine.saturating_sub(first.machine).as_secs_f64();
    let resident_bytes = samples.iter().chain([&begin, &end]).map(|sample| sample.used.resident_bytes).max();
    Load {
        in_flight,
        rollouts_per_minute: rate * 60.0,
        rollout_seconds: f64::from(in_flight) / rate,
        cpu_seconds: (cpu / (rate * seconds)).max(1e-9),
        cores_busy: cpu / seconds,
        cores_of_others: (machine - cpu).max(0.0) / seconds,
        resident_bytes: resident_bytes.unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn a_load(in_flight: u32, per_second: f64, cpu_seconds: f64) -> Load {
        Load {
            in_flight,
            rollouts_per_minute: per_second * 60.0,
            rollout_seconds: f64::from(in_flight) / per_second,
            cpu_seconds,
            cores_busy: per_second * cpu_seconds,
            cores_of_others: 0.0,
            resident_bytes: 100 << 20,
        }
    }

    #[test]
    fn a_worker_that_waits_is_planned_by_its_time_and_a_busy_one_by_its_cpu() {
        // A model that takes 1 s: 100 in flight give 100 rollouts a second, on any number of cores.
        let waits = [a_load(1, 1.0, 1e-3), a_load(8, 8.0, 1e-3), a_load(100, 100.0, 1e-3)];
        let plan = Plan::new(waits, 2.0, 4, Some(30_000));
        assert_eq!((plan.limit, plan.off_percent.round()), (Limit::Waiting, 0.0));
        assert_eq!(plan.expected[1].rollouts_per_minute.round(), 24_000.0);
        let needed = plan.needed.expect("a target was given");
        assert_eq!((needed.workers, needed.cores, needed.bytes), (5, 20, 500 << 20));
        // No model: 1 ms of CPU time for each, on 2 cores.
        let busy = [a_load(1, 800.0, 1.2e-3), a_load(8, 1_950.0, 1e-3), a_load(100, 2_000.0, 1e-3)];
        let plan = Plan::new(busy, 2.0, 8, None);
        assert_eq!((plan.limit, plan.off_percent.round()), (Limit::Cpu, 0.0));
        assert_eq!(plan.expected[0].rollouts_per_minute.round(), 480_000.0, "four times the cores");
        assert_eq!(plan.needed, None);
    }

    #[test]
    fn an_endpoint_that_is_slower_under_load_is_planned_as_it_was_measured_there() {
        let slower = [a_load(1, 1.0, 1e-3), a_load(8, 8.0, 1e-3), a_load(100, 50.0, 1e-3)];
        let plan = Plan::new(slower, 2.0, 4, None);
        assert_eq!((plan.off_percent.round(), plan.limit), (100.0, Limit::Waiting));
        assert_eq!(plan.expected[0].rollouts_per_minute.round(), 3_000.0);
        assert!(plan.text().contains("off by +100 %"), "{}", plan.text());
    }

    #[test]
    fn the_start_and_the_end_of_a_measurement_do_not_count() {
        let start = Instant::now();
        let sample = |ms: u64, completed| Sample {
            at: start + Duration::from_millis(ms),
            completed,
            in_flight: 10,
            used: FamilyUsage { cpu: Duration::from_millis(ms), resident_bytes: ms },
            machine: Duration::from_millis(ms * 3 / 2),
        };
        // One second of start, 100 rollouts a second for ten seconds, two seconds of end.
        let samples: Vec<Sample> = (1..=10).map(|n| sample(1_000 + n * 1_000, n * 100)).collect();
        let load = super::measured(10, sample(0, 0), &samples, sample(13_000, 1_000));
        assert_eq!((load.rollouts_per_minute.round(), load.cores_busy, load.cores_of_others), (6_000.0, 1.0, 0.5));
        assert_eq!((load.rollout_seconds * 1e3).round(), 100.0);
        assert_eq!((load.cpu_seconds * 1e3).round(), 10.0);
    }

    #[test]
    fn large_figures_have_groups_of_digits() {
        for (rate, expected) in [
            (0.25, "0.2"),
            (9.9, "9.9"),
            (12.0, "12"),
            (999.0, "999"),
            (1_234.4, "1,234"),
            (12_345_678.0, "12,345,678"),
        ] {
            assert_eq!(grouped(rate), expected);
        }
    }
}

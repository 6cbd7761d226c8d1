//! The program: plays seeds on all cores, explores further from those that reach something new, shrinks what fails, and prints the broken
//! invariant with the trace.

mod coverage;
mod shrink;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::process::ExitCode;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use gym_server::metrics::process_cpu;
use parking_lot::{Mutex, MutexGuard};
use tokio::time::Instant;

use crate::case::Case;
use crate::plan::{LateCheck, SETTINGS, Setting};
use crate::scenario::{Report, be_quiet, run};
use coverage::Coverage;

/// The branches of a case that reached something new.
const BRANCHES_EACH: u64 = 6;

/// A case branches again at most this often: its text must remain readable.
const DEPTH_MAX: usize = 4;

/// The cases that wait to be branched, so that memory is bounded. The oldest are dropped.
const WAITING_MAX: usize = 10_000;

/// A case that runs for longer does not end: usual ones take some milliseconds. Simulated time may stand still in it.
const CASE_TIME_MAX: Duration = Duration::from_secs(120);

/// The lines of a trace that are printed; `replay` prints all.
const TRACE_LINES: usize = 150;

/// Simulates clusters under faults; each case replays exactly.
#[derive(Debug, Parser)]
#[command(name = "simulation")]
struct Program {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Plays seeds, explores further from those that reach something new, and shrinks what fails.
    Search(Search),
    /// Plays one case and prints its plan, its trace and its violations.
    Replay {
        /// Such as `cluster/17`, as a failure prints it.
        case: Case,
        /// Prints only the hash of the trace.
        #[arg(long)]
        hash: bool,
    },
}

#[derive(Debug, Args)]
struct Search {
    /// Plays this setting only; can be repeated.
    #[arg(long)]
    setting: Vec<Setting>,
    /// The first seed.
    #[arg(long, default_value_t = 0)]
    from: u64,
    /// The seeds of each setting.
    #[arg(long, default_value_t = 10_000)]
    seeds: u64,
    /// Branches of each setting, of seeds that reached something new.
    #[arg(long, default_value_t = 2_000)]
    branches: u64,
    /// Ends a setting after this many minutes.
    #[arg(long)]
    minutes: Option<f64>,
    /// The threads; as many as this machine has cores if not given.
    #[arg(long)]
    threads: Option<usize>,
    /// Ends a setting after this many failed cases.
    #[arg(long, default_value_t = 20)]
    failures: usize,
    /// Does not shrink what fails.
    #[arg(long)]
    no_shrink: bool,
    /// Does not require that each fault and each obligation occurs.
    #[arg(long)]
    any: bool,
}

/// Runs the program.
pub(crate) fn main(arguments: &[String]) -> ExitCode {
    let program = ["simulation".to_owned()].into_iter().chain(arguments.iter().cloned());
    match Program::parse_from(program).command {
        Command::Replay { case, hash } => replay(&case, hash),
        Command::Search(search) => {
            let settings = if search.setting.is_empty() { SETTINGS.to_vec() } else { search.setting.clone() };
            let failed = settings.into_iter().filter(|setting| !search.play(*setting)).count();
            if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
    }
}

fn replay(case: &Case, hash: bool) -> ExitCode {
    let report = run(case, LateCheck::On);
    if !hash {
        println!("{report}\n{}", report.trace);
    }
    println!("{case} has trace hash {:016x}", report.trace.hash());
    if report.violations.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// What a search of one setting has done so far.
struct State {
    next_seed: u64,
    branches: u64,
    waiting: VecDeque<Case>,
    coverage: Coverage,
    totals: BTreeMap<&'static str, u64>,
    rollouts: u64,
    given_up: u64,
    events: u64,
    longest: Duration,
    cases: u64,
    begun: u64,
    /// The cases that run, by number, and since when.
    running: BTreeMap<u64, (Case, Instant)>,
    /// The failed cases, each with what failed.
    failed: Vec<(Case, String)>,
    ends: bool,
}

impl Search {
    /// Plays one setting. Returns `true` if nothing failed.
    fn play(&self, setting: Setting) -> bool {
        let past = setting.past_failures().iter().map(|seed| Case::first(setting, *seed));
        let state = Mutex::new(State {
            next_seed: self.from,
            branches: 0,
            waiting: past.collect(),
            coverage: Coverage::default(),
            totals: BTreeMap::new(),
            rollouts: 0,
            given_up: 0,
            events: 0,
            longest: Duration::ZERO,
            cases: 0,
            begun: 0,
            running: BTreeMap::new(),
            failed: Vec::new(),
            ends: false,
        });
        let past = setting.past_failures().len() as u64;
        let (began, cpu) = (Instant::now(), process_cpu());
        let threads = self.threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
        let (works, all_ended) = channel::<()>();
        let state_of_all = &state;
        std::thread::scope(|scope| {
            for _ in 0..threads {
                let works = works.clone();
                scope.spawn(move || {
                    self.work(setting, past, state_of_all, began);
                    drop(works);
                });
            }
            drop(works);
            scope.spawn(move || watch(state_of_all, &all_ended));
        });
        let state = state.into_inner();
        let cpu = process_cpu().saturating_sub(cpu);
        state.print(setting, cpu, past);
        let mut passed = state.failed.is_empty();
        let mut shrunk = BTreeSet::new();
        for (case, kind) in &state.failed {
            if !self.no_shrink && shrunk.insert(kind) {
                shrink::print(case, kind);
            }
        }
        let missing = setting.obligations().into_iter().filter(|kind| !state.totals.contains_key(kind));
        let missing: Vec<_> = missing.collect();
        if !missing.is_empty() && !self.any {
            println!("{setting}: no case had {missing:?}; play more seeds, or see why it cannot happen any more");
            passed = false;
        }
        passed
    }

    fn work(&self, setting: Setting, past: u64, state: &Mutex<State>, began: Instant) {
        be_quiet(true);
        loop {
            let (number, case) = {
                let mut state = lock(state);
                let late = self.minutes.is_some_and(|minutes| began.elapsed().as_secs_f64() > minutes * 60.0);
                if late || state.ends {
                    return;
                }
                let Some(case) = self.next(setting, past, &mut state) else { return };
                state.begun += 1;
                let number = state.begun;
                state.running.insert(number, (case.clone(), Instant::now()));
                (number, case)
            };
            let report = run(&case, LateCheck::On);
            let (reached, times) = coverage::reached(&report);
            let mut state = lock(state);
            state.running.remove(&number);
            state.add(&case, &report);
            if state.failed.len() >= self.failures {
                state.ends = true;
            }
            let new = state.coverage.add(&reached);
            if new > 0 && case.branches.len() < DEPTH_MAX && state.branches < self.branches {
                // Near what is new, as often as before it.
                let mut rng = fastrand::Rng::with_seed(report.trace.hash());
                for _ in 0..BRANCHES_EACH {
                    let at = times[rng.usize(..times.len())];
                    let at_ms = if rng.bool() { at } else { rng.u64(..=at) };
                    let branch = case.branch(at_ms, rng.u64(..1_000_000));
                    state.waiting.push_back(branch);
                }
                while state.waiting.len() > WAITING_MAX {
                    state.waiting.pop_front();
                }
            }
        }
    }

    /// Returns a seed and a branch in turn.
    fn next(&self, setting: Setting, past: u64, state: &mut State) -> Option<Case> {
        let seeds_left = state.next_seed < self.from + self.seeds;
        let branches_left = !state.waiting.is_empty() && state.branches < self.branches + past;
        if branches_left && (!seeds_left || state.branches <= state.next_seed - self.from) {
            state.branches += 1;
            return state.waiting.pop_front();
        }
        seeds_left.then(|| {
            state.next_seed += 1;
            Case::new(setting, state.next_seed - 1)
        })
    }
}

/// Ends the program if a case does not end. Returns when all threads have ended.
fn watch(state: &Mutex<State>, all_ended: &Receiver<()>) {
    while all_ended.recv_timeout(Duration::from_secs(1)) == Err(RecvTimeoutError::Timeout) {
        let state = lock(state);
        if let Some((case, since)) = state.running.values().find(|(_, since)| since.elapsed() > CASE_TIME_MAX) {
            println!("{case} does not end: it has run for {:.0?}; play it with: replay {case}", since.elapsed());
            std::process::exit(1);
        }
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock()
}

impl State {
    fn add(&mut self, case: &Case, report: &Report) {
        self.cases += 1;
        for (kind, count) in report.trace.faults().iter().chain(&report.counts) {
            *self.totals.entry(kind).or_default() += count;
        }
        self.rollouts += report.completed;
        self.given_up += report.given_up;
        self.events += report.trace.events();
        self.longest = self.longest.max(report.took);
        if let Some(violation) = report.violations.first() {
            let kind = kind_of(violation);
            if self.failed.iter().all(|(_, known)| *known != kind) {
                println!("{case}, the {}. case, fails: {violation}", self.cases);
            }
            self.failed.push((case.clone(), kind));
        }
    }

    fn print(&self, setting: Setting, cpu: Duration, past: u64) {
        let what = match setting {
            Setting::Groups => "calls",
            Setting::Values => "fetches",
            Setting::Servers | Setting::Cluster | Setting::Whole => "rollouts",
        };
        let branches = self.branches.saturating_sub(past);
        #[expect(clippy::cast_precision_loss, reason = "a rate")]
        let rate = self.cases as f64 / cpu.as_secs_f64().max(0.001) * 60.0;
        println!(
            "{setting}: {} cases, of them {branches} branches; {} failed; {rate:.0} a minute of CPU time; {} states; {} {what} completed, {} given \
             up; {} events; at most {} simulated seconds; {:?}",
            self.cases,
            self.failed.len(),
            self.coverage.len(),
            self.rollouts,
            self.given_up,
            self.events,
            self.longest.as_secs(),
            self.totals,
        );
    }
}

/// Returns what a violation is, without its names and numbers: a shrunk case must fail in the same way.
fn kind_of(violation: &str) -> String {
    let line = violation.lines().next().unwrap_or_default();
    let words = line.split_whitespace().filter(|word| !word.contains(|char: char| char.is_ascii_digit()));
    words.take(14).collect::<Vec<_>>().join(" ")
}

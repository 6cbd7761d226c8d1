//! Simulates a whole deployment in one thread under a paused clock. The simulated network and disk inject every known kind of failure.
//! A seed plays one of five settings:
//!
//! - `servers`: a head server, a relay, two agents and a resources server, which register one by one, and a collector that calls them;
//! - `cluster`: a head server, up to three workers that join it, and a collector whose rollouts they take. Workers are killed, frozen,
//!   cut off and restarted; the head server is killed and restarted;
//! - `groups`: a controller with a worker group on two to four node agents. Agents and the controller are killed, frozen, cut off and restarted.
//!   The ranks are tasks, in place of processes;
//! - `whole`: the cluster and the group on one network. The controller serves a model, each of whose turns is a call of a rank;
//! - `values`: processes on up to three nodes that put values by reference and fetch those of one another.
//!
//! All parts except the user's code are the real ones: `HeadServer`, the relay, the role servers, `ServerClient`, `RemoteRegistry`,
//! kept leases, members, pools and their workers, the driver and the JSONL ledger; agents, reservations, supervisors and calls of
//! groups. The network and the disk come from `gym_core::testing`.
//!
//! This executable is also a program. `search` plays seeds on all cores, branches those that reach something new, shrinks what fails, and prints
//! the broken invariant with its trace; `replay` plays one case:
//!
//! ```sh
//! cargo test --profile simulation -p gym-server --no-default-features --test simulation -- search --setting cluster --seeds 100000
//! cargo test -p gym-server --test simulation -- replay cluster/17
//! ```
//!
//! `.ci/test simulation` plays 17,500 cases, of which 4,000 are of everything at once. A seed that failed once remains a case in `PAST_FAILURES`.
//!
//! A case determines everything: the faults and their strength, the crashes of hosts, and the fate of each message. This requires
//! that the clock is tokio's paused clock, and that all randomness comes from the seed. One task delivers all messages in the order of
//! (time, send). Selects are `biased`, and no code iterates over a `HashMap`. These paths do not use tokio's `watch`, which wakes
//! in random order. Two runs have equal trace hashes, in one process and in two.
//!
//! The simulation does not use turmoil, which would run hyper over its sockets at 40 times the CPU time. hyper is tested where it
//! is used. This test finds failures *between* the parts.

mod audit;
mod case;
mod cluster;
mod collector;
mod groups;
#[path = "../../../gym-client/tests/harness/mod.rs"]
mod harness;
mod obligations;
mod plan;
mod scenario;
mod script;
mod search;
mod servers;
mod values;
mod whole;

use std::collections::BTreeMap;
use std::process::{Command, ExitCode};

use case::Case;
use parking_lot::Mutex;
use plan::{LateCheck, SETTINGS, Setting};
use scenario::{Report, run};

/// The seeds of every test run.
const SEEDS: u64 = 240;

/// Fewer, because their seeds have more processes and run longer.
const SEEDS_OF_OTHERS: u64 = 60;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if matches!(arguments.first().map(String::as_str), Some("search" | "replay" | "help" | "--help")) {
        return search::main(&arguments);
    }
    let cases: Vec<harness::Case> = vec![
        ("no_seed_loses_doubles_or_invents_an_outcome", || Box::pin(async { long_test(Setting::Servers, SEEDS) })),
        ("no_seed_of_a_cluster_loses_doubles_or_invents_an_outcome", || {
            Box::pin(async { long_test(Setting::Cluster, SEEDS_OF_OTHERS) })
        }),
        ("no_seed_of_a_group_has_two_lives_of_a_rank_an_orphan_or_a_wrong_outcome", || {
            Box::pin(async { long_test(Setting::Groups, SEEDS_OF_OTHERS) })
        }),
        ("no_seed_of_everything_at_once_breaks_what_holds_in_each", || {
            Box::pin(async { long_test(Setting::Whole, SEEDS_OF_OTHERS) })
        }),
        ("no_seed_loses_a_value_that_is_held_or_keeps_one_that_is_gone", || {
            Box::pin(async { long_test(Setting::Values, SEEDS_OF_OTHERS) })
        }),
        ("a_case_replays_exactly", || Box::pin(async { a_case_replays_exactly() })),
        ("a_case_replays_exactly_in_another_process", || {
            Box::pin(async { a_case_replays_exactly_in_another_process() })
        }),
        ("the_text_of_a_case_is_the_case", || Box::pin(async { the_text_of_a_case_is_the_case() })),
        ("without_the_late_check_some_seed_breaks", || Box::pin(async { without_the_late_check_some_seed_breaks() })),
    ];
    // Each case has runtimes of its own.
    harness::run_cases(cases, |case| futures_util::FutureExt::now_or_never(case).expect("no case waits"))
}

/// Plays cases on two threads; each has its own runtime.
fn play(
    cases: impl Iterator<Item = Case> + Send,
    late_check: LateCheck,
    mut each: impl FnMut(&Case, Report) -> bool + Send,
) {
    let (cases, each) = (Mutex::new(cases), Mutex::new((&mut each, true)));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let next = cases.lock().next();
                    let Some(case) = next else { return };
                    let report = run(&case, late_check);
                    let mut each = each.lock();
                    if !each.1 {
                        return;
                    }
                    each.1 = (each.0)(&case, report);
                }
            });
        }
    });
}

fn long_test(setting: Setting, seeds: u64) {
    let mut totals: BTreeMap<&'static str, u64> = BTreeMap::new();
    let (mut completed, mut given_up, mut events) = (0, 0, 0);
    let mut failed = Vec::new();
    let past = setting.past_failures().iter().map(|seed| Case::first(setting, *seed));
    play((0..seeds).map(|seed| Case::new(setting, seed)).chain(past), LateCheck::On, |case, report| {
        for (kind, count) in report.trace.faults().iter().chain(&report.counts) {
            *totals.entry(kind).or_default() += count;
        }
        completed += report.completed;
        given_up += report.given_up;
        events += report.trace.events();
        if !report.violations.is_empty() {
            println!("{case}: {report}");
            failed.push(case.to_string());
        }
        true
    });
    println!("{setting}: {completed} completed, {given_up} given up, {events} events; {totals:?}");
    assert!(failed.is_empty(), "play one with `-- replay CASE`; these failed: {failed:?}");
    for kind in setting.obligations() {
        assert!(totals.contains_key(kind), "no seed had `{kind}`: {totals:?}");
    }
    assert!(completed > given_up, "most survive the faults");
}

fn a_case_replays_exactly() {
    for setting in SETTINGS {
        // A process of values alone on its node does little.
        let events_min = if setting == Setting::Values { 20 } else { 100 };
        for seed in 0..12 {
            let case = Case::new(setting, seed).branch(3_000, seed + 100);
            let (one, other) = (run(&case, LateCheck::On), run(&case, LateCheck::On));
            assert!(one.trace.events() > events_min, "{case} did something");
            if one.trace.hash() != other.trace.hash() {
                let differs = one.trace.lines().zip(other.trace.lines()).find(|(one, other)| one != other);
                panic!("{case} differs from its replay, first here: {differs:#?}");
            }
        }
        let hash = |seed| run(&Case::new(setting, seed), LateCheck::On).trace.hash();
        assert_ne!(hash(0), hash(1));
    }
}

fn a_case_replays_exactly_in_another_process() {
    for setting in SETTINGS {
        for seed in 20..26 {
            let case = Case::new(setting, seed);
            let here = format!("{case} has trace hash {:016x}", run(&case, LateCheck::On).trace.hash());
            let test = std::env::current_exe().expect("this program has a path");
            let there = Command::new(test).args(["replay", "--hash", &case.to_string()]).output();
            let there = String::from_utf8_lossy(&there.expect("this program runs").stdout).into_owned();
            assert_eq!(there.trim(), here);
        }
    }
}

fn the_text_of_a_case_is_the_case() {
    let text = "cluster/17@3200:8812@4000:3/first/keep=0,3/calm=reset,delay/tasks=1/repeats=1";
    let case: Case = text.parse().expect("a case");
    assert_eq!(case.to_string(), text);
    let mut changed = Case::new(Setting::Cluster, 17).branch(3_200, 8_812).branch(4_000, 3);
    (changed.first, changed.keep) = (true, Some(vec![0, 3]));
    (changed.calm, changed.sizes) = (vec!["reset", "delay"], vec![("tasks", 1), ("repeats", 1)]);
    assert_eq!(case, changed);
    for wrong in ["", "cluster", "moon/1", "cluster/x", "cluster/1@5", "cluster/1/calm=rain", "cluster/1/rows=3"] {
        assert!(wrong.parse::<Case>().is_err(), "{wrong}");
    }
}

/// The invariants do not hold by accident: without the rejection of late attempts, they break.
fn without_the_late_check_some_seed_breaks() {
    let (mut played, mut broken) = (0, None);
    play((0..SEEDS).map(|seed| Case::first(Setting::Servers, seed)), LateCheck::Off, |case, report| {
        played += 1;
        if report.violations.iter().any(|violation| violation.contains("twice")) {
            broken = Some((case.clone(), report));
        }
        broken.is_none()
    });
    let (case, report) =
        broken.unwrap_or_else(|| panic!("{played} seeds hold without the late check: it is not tested"));
    println!("the {played}. case played, {case}, breaks without the late check: {:?}", report.violations);
}

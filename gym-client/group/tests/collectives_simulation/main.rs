//! Plays collective operations of the backend `host` over a simulated network: schedules of operations and faults that a seed determines.
//!
//! ```text
//! cargo test --profile simulation -p gym-group --features testing --test collectives_simulation -- --ignored      3,000 seeds
//!     GYM_COLLECTIVE_SEEDS=500..10000    these seeds
//!     GYM_COLLECTIVE_SEED=17             one seed, with its plan and its trace (add --nocapture)
//! ```

#![allow(clippy::unwrap_used)] // In a test a panic is the message.

mod audit;
mod group;
mod plan;
mod script;

use std::ops::Range;

use group::Report;
use plan::{Plan, Regime};

/// Seeds that every run of the tests plays, and those of the tier.
const SEEDS: Range<u64> = 0..60;
const MANY_SEEDS: Range<u64> = 0..3_000;
/// Of the seeds, one in this many is played twice.
const REPEATED: u64 = 8;
/// Seeds that are printed of those that fail.
const FAILURES_MAX: usize = 5;

fn play(seed: u64) -> Report {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    runtime.unwrap().block_on(group::play(Plan::drawn(seed)))
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

fn seeds(usual: Range<u64>) -> Range<u64> {
    let number = |text: &str| text.parse::<u64>().expect("a number of seeds, or a range of them");
    match variable("GYM_COLLECTIVE_SEEDS") {
        None => usual,
        Some(text) => match text.split_once("..") {
            Some((first, end)) => number(first)..number(end),
            None => 0..number(&text),
        },
    }
}

#[test]
fn schedules_of_operations_and_faults_end_as_documented() {
    play_all(SEEDS);
}

#[test]
#[ignore = "many seeds, for the tier `simulation`"]
fn many_schedules_end_as_documented() {
    play_all(MANY_SEEDS);
}

fn play_all(usual: Range<u64>) {
    if let Some(seed) = variable("GYM_COLLECTIVE_SEED") {
        let report = play(seed.parse().expect("a seed"));
        println!("{}{}", report.plan, report.trace);
        assert!(report.violations.is_empty(), "{:#?}", report.violations);
        return;
    }
    let (mut failures, mut succeeded, mut failed, mut missed) = (Vec::new(), 0, 0, [0; 5]);
    for seed in seeds(usual) {
        let mut report = play(seed);
        if seed % REPEATED == 0 && play(seed).trace.hash() != report.trace.hash() {
            report.violations.push("a second run of the seed differs".to_owned());
        }
        (succeeded, failed) = (succeeded + report.succeeded, failed + report.failed);
        missed[report.missed] += usize::from(report.plan.regime != Regime::Calm);
        if let Some(first) = report.violations.first() {
            failures.push(format!("GYM_COLLECTIVE_SEED={seed}: {} violations: {first}", report.violations.len()));
            if failures.len() == FAILURES_MAX {
                break;
            }
        }
    }
    println!("{succeeded} operations succeeded, {failed} failed; steps that failed after the faults: {missed:?}");
    assert!(failures.is_empty(), "play one with its trace:\n{}", failures.join("\n"));
}

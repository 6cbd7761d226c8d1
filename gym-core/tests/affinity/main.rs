//! Session affinity with a load guard, over simulated engines with prefix caches.
//!
//! `GYM_AFFINITY_SEEDS=200 cargo test --release -p gym-core --test affinity -- --nocapture` plays more traces, and prints their
//! figures.

mod engine;
mod fleet;
mod trace;

use std::fmt::Write as _;

use engine::EngineSpec;
use fleet::{Outcome, Policy, hits_of_one_unbounded_cache, play};
use gym_core::registry::Balance;
use trace::Session;

const ENGINES: usize = 12;

/// The size of the committed trace, which has 3,008 sessions.
const PROMPTS: u32 = 376;

/// The size of the traces of further seeds.
const PROMPTS_SHORT: u32 = 120;

/// The trace in `trace.jsonl`: the first prompts of seed 0.
const PROMPTS_SHOWN: u32 = 24;

fn even() -> [EngineSpec; ENGINES] {
    [EngineSpec::STANDARD; ENGINES]
}

/// The outcomes of all policies on one trace, by name. Affinity is the first.
fn compare(sessions: &[Session], specs: &[EngineSpec], all: bool) -> Vec<(&'static str, Outcome)> {
    let mut policies = vec![
        ("affinity", Policy::affinity()),
        ("consistent hashing, session", Policy::HashOfSession),
        ("consistent hashing, prompt", Policy::HashOfPrompt),
        ("least pending", Policy::of(Balance::LeastPending)),
    ];
    if all {
        policies.push(("round robin", Policy::of(Balance::RoundRobin)));
    }
    policies.into_iter().map(|(name, policy)| (name, play(sessions, specs, &policy, None))).collect()
}

fn table(title: &str, ideal: u64, outcomes: &[(&'static str, Outcome)]) -> String {
    let mut text = format!(
        "\n{title}\n| policy | hits | makespan, s | p99, s | busy, max/mean | pending, max/mean | sheds |\n|---|---|---|---|---|---|---|\n"
    );
    for (name, outcome) in outcomes {
        let hits = outcome.hit_tokens as f64 / ideal as f64 * 100.0;
        let Outcome { makespan_s, p99_s, busy_skew, pending_skew, counts, .. } = outcome;
        let sheds = counts.sheds;
        writeln!(
            text,
            "| {name} | {hits:.1} % | {makespan_s:.0} | {p99_s:.1} | {busy_skew:.2} | {pending_skew:.2} | {sheds} |"
        )
        .expect("writing to a string cannot fail");
    }
    text
}

fn makespan_of(outcomes: &[(&'static str, Outcome)], name: &str) -> f64 {
    outcomes.iter().filter(|(known, _)| known.starts_with(name)).map(|(_, one)| one.makespan_s).fold(f64::MAX, f64::min)
}

/// Checks what must hold for each trace, and returns the share of hits and the makespan relative to the best other policy.
fn check(title: &str, sessions: &[Session], outcomes: &[(&'static str, Outcome)]) -> (f64, f64) {
    let ideal = hits_of_one_unbounded_cache(sessions);
    let text = table(title, ideal, outcomes);
    println!("{text}");
    let calls: usize = sessions.iter().map(|session| session.turns.len()).sum();
    assert!(outcomes.iter().all(|(_, outcome)| outcome.calls == calls), "each call ends: {text}");
    let affinity = &outcomes[0].1;
    let hits = affinity.hit_tokens as f64 / ideal as f64;
    let others = makespan_of(&outcomes[1..], "");
    assert!(hits >= 0.97, "{text}");
    assert!(affinity.makespan_s < others, "{text}");
    let counts = affinity.counts;
    assert_eq!(counts.hits + counts.sheds + counts.lost + counts.placed, calls as u64, "{text}");
    (hits, affinity.makespan_s / others)
}

#[test]
fn the_generator_still_makes_the_committed_trace() {
    let text = trace::jsonl(&trace::generate(0, PROMPTS, None));
    let shown = trace::jsonl(&trace::generate(0, PROMPTS_SHOWN, None));
    assert!(text.starts_with(&shown));
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/affinity/trace.jsonl");
    if std::env::var_os("GYM_AFFINITY_TRACE").is_some() {
        std::fs::write(path, &shown).unwrap();
    }
    assert_eq!(std::fs::read_to_string(path).unwrap(), shown, "write it again with GYM_AFFINITY_TRACE=1");
    assert_eq!((text.len(), crc32c::crc32c(text.as_bytes())), (TRACE_BYTES, TRACE_CHECKSUM));
}

/// The length and the CRC-32C of the whole trace as JSON lines.
const TRACE_BYTES: usize = 494_973;
const TRACE_CHECKSUM: u32 = 2_290_645_165;

#[test]
fn affinity_has_the_hits_of_one_cache_and_the_shortest_makespan() {
    let sessions = trace::generate(0, PROMPTS, None);
    check("the committed trace", &sessions, &compare(&sessions, &even(), true));
}

#[test]
fn affinity_does_not_collapse_when_one_prompt_gets_ten_times_its_share() {
    let sessions = trace::generate(0, PROMPTS, Some(100));
    let outcomes = compare(&sessions, &even(), false);
    check("one prompt has ten times its share", &sessions, &outcomes);
    let affinity = &outcomes[0].1;
    assert!(affinity.makespan_s <= 1.1 * makespan_of(&outcomes, "least pending"));
    assert!(affinity.busy_skew < 1.2 && affinity.pending_skew < 1.6, "{affinity:?}");
}

#[test]
fn a_slow_engine_sheds_its_load() {
    let sessions = trace::generate(0, PROMPTS_SHORT, None);
    let mut specs = even();
    specs[3].slowness = 4.0;
    let outcomes = compare(&sessions, &specs, false);
    check("one of 12 engines takes four times as long", &sessions, &outcomes);
    assert!(outcomes[0].1.counts.sheds > 0, "{outcomes:?}");
}

#[test]
fn only_the_sessions_of_an_engine_that_leaves_move_and_its_return_starts_no_stampede() {
    let sessions = trace::generate(0, PROMPTS_SHORT, None);
    let undisturbed = play(&sessions, &even(), &Policy::affinity(), None);
    let disturbed = play(&sessions, &even(), &Policy::affinity(), Some((5, 20.0, 40.0)));
    println!("undisturbed {undisturbed:?}\none engine away for 20 s {disturbed:?}");
    assert_eq!(disturbed.calls, undisturbed.calls);
    assert!(disturbed.counts.lost > 0 && disturbed.counts.lost < 150, "{disturbed:?}");
    assert!(disturbed.counts.sheds <= undisturbed.counts.sheds + 60, "{disturbed:?}");
    assert!(disturbed.makespan_s <= 1.15 * undisturbed.makespan_s, "{disturbed:?}");
}

#[test]
fn every_seed_shows_the_same() {
    let seeds = std::env::var("GYM_AFFINITY_SEEDS").map_or(2, |seeds| seeds.parse().expect("a number of seeds"));
    let prompts = if seeds > 2 { PROMPTS } else { PROMPTS_SHORT };
    let mut shown: Vec<(f64, f64)> = Vec::new();
    for seed in 1..=seeds {
        for hot in [None, Some(60)] {
            let sessions = trace::generate(seed, prompts, hot);
            let outcomes = compare(&sessions, &even(), false);
            shown.push(check(&format!("seed {seed}, hot prompt {hot:?}"), &sessions, &outcomes));
            assert!(outcomes[0].1.makespan_s <= 1.1 * makespan_of(&outcomes, "least pending"));
        }
    }
    let mut hits: Vec<f64> = shown.iter().map(|(hits, _)| *hits).collect();
    let mut spans: Vec<f64> = shown.iter().map(|(_, span)| *span).collect();
    hits.sort_by(f64::total_cmp);
    spans.sort_by(f64::total_cmp);
    let (least, middle) = (hits[0], hits[hits.len() / 2]);
    println!("hits: at least {least:.4}, median {middle:.4}");
    let (most, middle) = (spans[spans.len() - 1], spans[spans.len() / 2]);
    println!("makespan relative to the best other policy: at most {most:.3}, median {middle:.3}");
}

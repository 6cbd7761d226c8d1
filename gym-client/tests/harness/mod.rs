//! A very small test harness, for executables that are their own shim, watchdog and workers and so need the first line of
//! `main`: it takes `--list` and a part of a name, as cargo's does.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;

/// A case by name.
pub(crate) type Case = (&'static str, fn() -> Running);

/// A case under way.
pub(crate) type Running = Pin<Box<dyn Future<Output = ()>>>;

/// Runs the cases whose names contain what the arguments ask for, each with `run`, all of them even after one failed.
pub(crate) fn run_cases(cases: Vec<Case>, arguments: &[String], run: fn(Running)) {
    if arguments.iter().any(|argument| argument == "--list") {
        cases.iter().for_each(|(name, _)| println!("{name}: test"));
        return;
    }
    let wanted = arguments.iter().find(|argument| !argument.starts_with('-')).cloned().unwrap_or_default();
    let mut failed = Vec::new();
    for (name, case) in cases.into_iter().filter(|(name, _)| name.contains(&wanted)) {
        let outcome = std::panic::catch_unwind(AssertUnwindSafe(|| run(case())));
        println!("test {name} ... {}", if outcome.is_ok() { "ok" } else { "FAILED" });
        if outcome.is_err() {
            failed.push(name);
        }
    }
    assert!(failed.is_empty(), "failed: {failed:?}");
}

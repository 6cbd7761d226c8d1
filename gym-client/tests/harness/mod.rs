//! A very small test harness, for executables that are their own shim, watchdog and workers and so need the first line of
//! `main`: it takes `--list`, a part of a name, and `--skip` with a part of a name, as cargo's does.

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
    let (mut wanted, mut skipped) = (String::new(), Vec::new());
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        match argument.as_str() {
            "--skip" => skipped.extend(rest.next()),
            _ if argument.starts_with('-') => {}
            _ => wanted.clone_from(argument),
        }
    }
    let runs = |name: &str| name.contains(&wanted) && !skipped.iter().any(|skipped| name.contains(*skipped));
    let mut failed = Vec::new();
    for (name, case) in cases.into_iter().filter(|(name, _)| runs(name)) {
        let outcome = std::panic::catch_unwind(AssertUnwindSafe(|| run(case())));
        println!("test {name} ... {}", if outcome.is_ok() { "ok" } else { "FAILED" });
        if outcome.is_err() {
            failed.push(name);
        }
    }
    assert!(failed.is_empty(), "failed: {failed:?}");
}

//! A very small test harness, for executables that are their own shim, watchdog and workers and so need the first line of
//! `main`: it takes `--list`, a part of a name, and `--skip` with a part of a name, as cargo's does; and `--part 1/2` for each second
//! of the cases that these leave, so that several processes can share them.

use std::any::Any;
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
    let (mut wanted, mut skipped, mut part) = (String::new(), Vec::new(), (1, 1));
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        match argument.as_str() {
            "--skip" => skipped.extend(rest.next()),
            "--part" => {
                part = rest.next().and_then(|text| parse_part(text)).expect("--part takes two numbers, such as 1/2")
            }
            _ if argument.starts_with('-') => {}
            _ => wanted.clone_from(argument),
        }
    }
    let runs = |name: &str| name.contains(&wanted) && !skipped.iter().any(|skipped| name.contains(*skipped));
    let mut failed = Vec::new();
    let (first, every) = part;
    for (name, case) in cases.into_iter().filter(|(name, _)| runs(name)).skip(first - 1).step_by(every) {
        let outcome = std::panic::catch_unwind(AssertUnwindSafe(|| run(case())));
        println!("test {name} ... {}", if outcome.is_ok() { "ok" } else { "FAILED" });
        if let Err(panic) = outcome {
            failed.push((name, message_of(&*panic).to_owned()));
        }
    }
    if failed.is_empty() {
        return;
    }
    // Whoever reads only the end of a long log sees why.
    println!("\nfailures:");
    for (name, message) in &failed {
        println!("    {name}: {message}");
    }
    std::process::exit(101);
}

/// Returns the message of a panic.
fn message_of(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic without a message")
}

/// Returns the part, counted from 1, and the number of parts.
fn parse_part(text: &str) -> Option<(usize, usize)> {
    let (part, of) = text.split_once('/')?;
    let (part, of) = (part.parse().ok()?, of.parse().ok()?);
    (1..=of).contains(&part).then_some((part, of))
}

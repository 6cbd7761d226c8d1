//! What the run prints: a line for each program, then what was not run, and last what failed.

use std::collections::BTreeMap;
use std::fs;
use std::time::Duration;

use crate::run::{CaseResult, Outcome, Verdict};

/// Lines of the output of a failed case that are printed.
const LINES_MAX: usize = 60;

/// Cases whose time is printed, so that a slow one is noticed.
const SLOWEST: usize = 8;

pub(crate) fn print(outcome: &Outcome) {
    let mut groups: BTreeMap<&str, (usize, Duration)> = BTreeMap::new();
    for case in &outcome.results {
        let group = groups.entry(case.name.split(' ').next().unwrap_or_default()).or_default();
        *group = (group.0 + 1, group.1 + case.took);
    }
    for (name, (cases, took)) in groups {
        println!("{name:<40} {cases:>5} cases {:>7.1} s", took.as_secs_f64());
    }
    let mut slow: Vec<&CaseResult> = outcome.results.iter().collect();
    slow.sort_by_key(|case| std::cmp::Reverse(case.took));
    println!("the slowest of {} cases in {:.0} s:", outcome.results.len(), outcome.took.as_secs_f64());
    slow.iter().take(SLOWEST).for_each(|case| println!("  {:>5.1} s  {}", case.took.as_secs_f64(), case.name));
    let mut not_run: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for case in &outcome.results {
        if let Verdict::NotRun(why) = &case.verdict {
            not_run.entry(why).or_default().push(&case.name);
        }
    }
    for (why, names) in not_run {
        println!("not run here: {why}");
        names.iter().for_each(|name| println!("  {name}"));
    }
    for case in &outcome.results {
        if let Verdict::Failed(why) = &case.verdict {
            println!("\n── FAILED {}: {why}", case.name);
            let text = String::from_utf8_lossy(&fs::read(&case.output).unwrap_or_default()).into_owned();
            let lines: Vec<&str> = text.lines().filter(|line| !line.is_empty()).collect();
            lines.iter().skip(lines.len().saturating_sub(LINES_MAX)).for_each(|line| println!("    {line}"));
            println!("all its output: {}\nagain: .ci/test --case '{}'", case.output.display(), case.name);
        }
    }
    if !outcome.remains.is_empty() {
        println!("\n── FAILED: this remains on the machine\n    {}", outcome.remains.join("\n    "));
    }
}

pub(crate) fn totals(outcome: &Outcome) -> String {
    let [passed, failed, not_run] = numbers(outcome);
    format!("{passed} passed, {failed} failed, {not_run} not run")
}

/// Returns the numbers for a script: passed, failed, not run.
pub(crate) fn counts(outcome: &Outcome) -> String {
    numbers(outcome).map(|number| number.to_string()).join(" ") + "\n"
}

/// What remains is one failure.
fn numbers(outcome: &Outcome) -> [usize; 3] {
    let mut numbers = [0, usize::from(!outcome.remains.is_empty()), 0];
    for case in &outcome.results {
        match case.verdict {
            Verdict::Passed => numbers[0] += 1,
            Verdict::Failed(_) => numbers[1] += 1,
            Verdict::NotRun(_) => numbers[2] += 1,
        }
    }
    numbers
}

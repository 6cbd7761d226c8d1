//! Shrinks a failing case: fewer steps, fewer faults of the network, less work, as long as it fails in the same way.

use crate::case::{AnyPlan, Case, NETWORK_FAULTS, SIZES};
use crate::plan::LateCheck;
use crate::scenario::{Report, run};
use crate::script::Step;

use super::{TRACE_LINES, kind_of};

/// Limits the runs that look for a smaller case.
const RUNS_MAX: u32 = 1_500;

/// Shrinks a case, and prints what is left of it with its trace.
pub(super) fn print(case: &Case, kind: &str) {
    let mut shrinking = Shrinking { case: case.clone(), kind, runs: 0 };
    while shrinking.round() && shrinking.runs < RUNS_MAX {}
    let Shrinking { case: shrunk, runs, .. } = shrinking;
    let report = run(&shrunk, LateCheck::On);
    println!("\n── {case}, shrunk in {runs} runs to {} faults; play it with: replay {shrunk}", faults(&shrunk));
    print!("{report}");
    let lines = report.trace.lines();
    let left_out = lines.len().saturating_sub(TRACE_LINES);
    // What happened up to the first violation matters.
    let broken = report.trace.lines().position(|line| line.contains("VIOLATION")).unwrap_or(lines.len());
    let first = broken.saturating_sub(TRACE_LINES * 2 / 3).min(left_out);
    if left_out > 0 {
        println!("({} of {} events; replay prints all)", TRACE_LINES, lines.len());
    }
    lines.skip(first).take(TRACE_LINES).for_each(|line| println!("{line}"));
}

/// Returns the number of faults of a case: those of its script, and those that its network may have.
fn faults(case: &Case) -> usize {
    let mut plan = case.plan();
    let steps = plan.script().iter().filter(|(_, step)| !step.heals() && !matches!(step, Step::Reseed(_))).count();
    steps + NETWORK_FAULTS.into_iter().filter(|(_, remove)| has(&mut plan, *remove)).count()
}

fn has(plan: &mut AnyPlan, remove: fn(&mut gym_core::testing::Faults)) -> bool {
    let before = plan.faults().clone();
    remove(plan.faults());
    *plan.faults() != before
}

struct Shrinking<'a> {
    case: Case,
    kind: &'a str,
    runs: u32,
}

impl Shrinking<'_> {
    /// Tries all that could be removed. Returns `true` if something was.
    fn round(&mut self) -> bool {
        let mut smaller = self.steps();
        for (name, remove) in NETWORK_FAULTS {
            if has(&mut self.case.plan(), remove) {
                smaller |= self.try_case(|case| case.calm.push(name));
            }
        }
        for name in SIZES {
            let known = self.case.plan().size(name).map(|size| *size);
            for size in [0, 1, 2, 4].into_iter().filter(|size| known.is_some_and(|known| *size < known)) {
                if (size > 0 || name == "steps") && self.try_case(|case| set_size(case, name, size)) {
                    smaller = true;
                    break;
                }
            }
        }
        smaller
    }

    /// Removes steps: halves of the script first, then smaller parts.
    fn steps(&mut self) -> bool {
        let all: Vec<usize> = (0..self.script_before_keep()).collect();
        let mut keep = self.case.keep.clone().unwrap_or(all);
        let (before, mut part) = (keep.len(), keep.len().div_ceil(2));
        while part > 0 && self.runs < RUNS_MAX {
            let mut from = 0;
            while from < keep.len() {
                let mut fewer = keep.clone();
                fewer.drain(from..(from + part).min(keep.len()));
                if self.try_case(|case| case.keep = Some(fewer.clone())) {
                    keep = fewer;
                } else {
                    from += part;
                }
            }
            part /= 2;
        }
        keep.len() < before
    }

    fn script_before_keep(&self) -> usize {
        Case { keep: None, ..self.case.clone() }.plan().script().len()
    }

    fn try_case(&mut self, change: impl FnOnce(&mut Case)) -> bool {
        if self.runs >= RUNS_MAX {
            return false;
        }
        self.runs += 1;
        let mut case = self.case.clone();
        change(&mut case);
        let fails = fails_alike(&run(&case, LateCheck::On), self.kind);
        if fails {
            self.case = case;
        }
        fails
    }
}

fn fails_alike(report: &Report, kind: &str) -> bool {
    report.violations.iter().any(|violation| kind_of(violation) == kind)
}

fn set_size(case: &mut Case, name: &'static str, size: u32) {
    case.sizes.retain(|(known, _)| *known != name);
    case.sizes.push((name, size));
}

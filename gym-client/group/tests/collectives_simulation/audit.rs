//! What the ranks have seen, and what of it must not be.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use gym_core::testing::SimNet;
use gym_core::{Code, Error};
use parking_lot::Mutex;

use crate::plan::{Fault, FaultKind};

/// The time after its deadline in which a transfer ends: the other ranks are asked where they are, and agree on a cause.
pub(crate) const AGREED_TIMEOUT: Duration = Duration::from_millis(500);

pub(crate) struct Audit {
    net: SimNet,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    violations: Vec<String>,
    /// Of the current step.
    failures: Vec<Failure>,
    /// The cause with which each meeting has failed on each incarnation of a rank.
    causes: BTreeMap<(String, u32, u64), String>,
    succeeded: u64,
    failed: u64,
}

/// The time by which the ranks of a step are apart, and that of an operation.
const MARGIN_TIMEOUT: Duration = Duration::from_millis(700);

/// One operation or join that has failed.
pub(crate) struct Failure {
    pub(crate) rank: u32,
    /// The ranks of the meeting.
    pub(crate) ranks: Vec<u32>,
    pub(crate) is_join: bool,
    pub(crate) error: Error,
}

impl Audit {
    pub(crate) fn new(net: SimNet) -> Self {
        Self { net, state: Mutex::default() }
    }

    pub(crate) fn violation(&self, what: fmt::Arguments<'_>) {
        self.net.note("audit", format_args!("VIOLATION {what}"));
        self.state.lock().violations.push(what.to_string());
    }

    pub(crate) fn succeeded(&self, rank: u32, what: fmt::Arguments<'_>) {
        self.net.note(&format!("rank-{rank}"), format_args!("has done {what}"));
        self.state.lock().succeeded += 1;
    }

    pub(crate) fn failed(&self, what: fmt::Arguments<'_>, failure: Failure) {
        self.net.note(&format!("rank-{}", failure.rank), format_args!("{what} has failed: {}", failure.error));
        let mut state = self.state.lock();
        state.failed += 1;
        state.failures.push(failure);
    }

    /// Records the cause of a meeting. A rank sees one cause.
    pub(crate) fn cause(&self, meeting: &str, rank: u32, incarnation: u64, error: &Error) {
        let text = format!("{:?}: {error}", error.code());
        let key = (meeting.to_owned(), rank, incarnation);
        let first = self.state.lock().causes.entry(key).or_insert_with(|| text.clone()).clone();
        if first != text {
            self.violation(format_args!("rank {rank} has two causes of the end of {meeting}: `{first}` and `{text}`"));
        }
    }

    /// Checks that all ranks but these have the same cause of each meeting.
    pub(crate) fn check_causes(&self, but: &[u32]) {
        let mut of_meetings: BTreeMap<String, (u32, String)> = BTreeMap::new();
        let causes = self.state.lock().causes.clone();
        for ((meeting, rank, _), cause) in causes.into_iter().filter(|((_, rank, _), _)| !but.contains(rank)) {
            let (other, first) = of_meetings.entry(meeting.clone()).or_insert_with(|| (rank, cause.clone()));
            if *first != cause {
                self.violation(format_args!(
                    "{meeting} ended on rank {other} with `{first}`, and on rank {rank} with `{cause}`"
                ));
            }
        }
    }

    /// Returns the failures of the step.
    pub(crate) fn end_step(&self) -> Vec<Failure> {
        std::mem::take(&mut self.state.lock().failures)
    }

    pub(crate) fn counts(&self) -> (u64, u64) {
        let state = self.state.lock();
        (state.succeeded, state.failed)
    }

    pub(crate) fn into_violations(self) -> Vec<String> {
        self.state.into_inner().violations
    }

    /// Checks a failure of the only fault of a schedule: it names the rank of the fault.
    pub(crate) fn check_blame(&self, fault: &Fault, failure: &Failure, deadline_min: Duration) {
        let short = |lasts: Duration| lasts + MARGIN_TIMEOUT < deadline_min;
        if fault.kind == FaultKind::Freeze && fault.lasts.is_some_and(short) {
            let Failure { rank, error, .. } = failure;
            self.violation(format_args!("rank {rank} fails, although {fault:?} has ended: {error}"));
        }
        let faulty = faulty(fault);
        if faulty.contains(&failure.rank) {
            return;
        }
        let error = &failure.error;
        let named = names(error.message());
        let concerned = faulty.iter().any(|rank| failure.ranks.contains(rank));
        let right = match fault.kind {
            // A rank that asks after the failure waits for the next meeting, which the others join in the next step.
            _ if fault.kind.is_of_program() && failure.is_join => true,
            // One that was not told of the new epoch yet hears of it from one that was.
            _ if fault.kind.ends() && failure.is_join && error.code() == Code::FailedPrecondition => true,
            FaultKind::Abort => error.message().contains("on purpose"),
            FaultKind::Cancel => error.code() == Code::Cancelled,
            FaultKind::Differ => error.code() == Code::FailedPrecondition && named.contains(&fault.rank),
            FaultKind::AbortUnheard if failure.is_join || error.message().contains("on purpose") => true,
            // Ranks that a loss does not concern are told of the new epoch. One that asks in it waits for the others, which join in the next step.
            _ if !concerned && !fault.kind.is_of_program() => {
                fault.kind.ends() && (failure.is_join || error.code() == Code::FailedPrecondition)
            }
            FaultKind::Crash | FaultKind::End if !failure.is_join => {
                error.code() == Code::Unavailable && named == BTreeSet::from([fault.rank])
            }
            // A third rank cannot know in which of the ways between the others a message was lost. It says who has not called.
            FaultKind::Cut if error.message().contains("called it") => true,
            FaultKind::Slow => true,
            // A rank that was told of the loss has given up its join.
            FaultKind::SilentCrash if error.message().ends_with("has left the meeting") => true,
            _ if fault.lasts.is_some() && !fault.kind.ends() => true,
            _ => faulty.iter().any(|rank| named.contains(rank)),
        };
        if !right {
            let text = format!("{:?}: {error}", error.code());
            self.violation(format_args!("rank {} blames another than {faulty:?} for {fault:?}: {text}", failure.rank));
        }
    }
}

/// Returns the ranks that a fault befalls.
pub(crate) fn faulty(fault: &Fault) -> Vec<u32> {
    match fault.kind {
        kind if kind.is_of_program() => Vec::new(),
        FaultKind::Cut => vec![fault.rank, fault.other],
        _ => vec![fault.rank],
    }
}

/// Returns the ranks that a text names: `rank 3`, or `ranks 1, 2`.
fn names(text: &str) -> BTreeSet<u32> {
    let mut named = BTreeSet::new();
    for after in text.split("rank").skip(1) {
        let after = after.strip_prefix('s').unwrap_or(after);
        let Some(list) = after.strip_prefix(' ') else { continue };
        for number in list.split(", ") {
            let digits: String = number.chars().take_while(char::is_ascii_digit).collect();
            let Ok(rank) = digits.parse() else { break };
            named.insert(rank);
            if digits.len() < number.len() {
                break;
            }
        }
    }
    named
}

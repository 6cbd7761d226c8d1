//! Records the ground truth of values: who holds each of them, until when, and what it contains. Any disagreement is a violation.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use gym_client::values::{HeldValue, ValueRef};
use gym_core::testing::SimNet;
use gym_core::{Code, Error, Execution};
use parking_lot::Mutex;
use tokio::time::Instant;

use super::plan::ValuesPlan;

/// What some seed must have besides the faults.
pub(crate) const COUNTED_IN_VALUES: [&str; 8] =
    [FETCHED, IN_SEVERAL_PARTS, GONE, NO_ROOM, UNREACHABLE, KILLED_WHILE_IT_FETCHED, CUT_SHORT, USED_AFTER_IT_WAS_GONE];
const FETCHED: &str = "value fetched";
const IN_SEVERAL_PARTS: &str = "value in several parts";
const GONE: &str = "value that is gone";
const NO_ROOM: &str = "no room for a copy";
const UNREACHABLE: &str = "holder that does not respond";
const KILLED_WHILE_IT_FETCHED: &str = "killed while it fetched";
pub(super) const CUT_SHORT: &str = "fetch cut short";
const USED_AFTER_IT_WAS_GONE: &str = "copy used after the value was gone";

/// The longest request that extends a lease in the background.
const ASK_TIMEOUT: Duration = Duration::from_secs(10);
/// The time that a simulated step takes at most.
pub(super) const MARGIN_TIMEOUT: Duration = Duration::from_millis(50);
/// More than the largest part of a transfer.
const LARGE: usize = (8 << 20) + 1;

/// The audit of a run. Cheap to clone; clones share the records.
#[derive(Clone, Debug)]
pub(super) struct ValuesAudit {
    net: SimNet,
    plan: Arc<ValuesPlan>,
    truth: Arc<Mutex<Truth>>,
}

#[derive(Debug, Default)]
struct Truth {
    /// The values that were put, by id.
    values: BTreeMap<String, TrueValue>,
    /// In the order in which they were put.
    order: Vec<ValueRef>,
    next: u64,
    began: u64,
    fetched: u64,
    failed: u64,
    violations: BTreeSet<String>,
    counts: BTreeMap<&'static str, u64>,
    /// The nodes whose clocks were set.
    clocks: BTreeSet<String>,
}

/// What is true of a value.
#[derive(Clone, Copy, Debug)]
struct TrueValue {
    number: u64,
    holder: &'static str,
    /// When its handle was dropped: it stays for the lease.
    dropped: Option<Instant>,
    /// When it was released, or its holder died.
    gone: Option<Instant>,
}

/// The contents of a value, which no other value has.
pub(super) fn contents(number: u64) -> Bytes {
    // One large value in some runs: the directory of a container has little room.
    let bytes = match number % 8 {
        _ if number == 5 => LARGE,
        0 => 0,
        1 | 2 => 100,
        3 | 4 => 2_000,
        _ => 20_000,
    };
    let mut rng = fastrand::Rng::with_seed(number);
    let mut contents = vec![0; bytes];
    for part in contents.chunks_mut(4_096) {
        let number = rng.u64(..).to_le_bytes();
        let end = part.len().min(number.len());
        part[..end].copy_from_slice(&number[..end]);
    }
    contents.into()
}

impl ValuesAudit {
    pub(super) fn new(net: &SimNet, plan: Arc<ValuesPlan>) -> Self {
        // So only the numbers of each eighth seed contain that of the large value.
        let truth = Truth { next: plan.seed % 8 * 1_000, ..Truth::default() };
        Self { net: net.clone(), plan, truth: Arc::new(Mutex::new(truth)) }
    }

    pub(super) fn violation(&self, what: impl fmt::Display) {
        self.net.note("audit", format_args!("VIOLATION {what}"));
        self.truth.lock().violations.insert(what.to_string());
    }

    pub(super) fn violations(&self) -> Vec<String> {
        self.truth.lock().violations.iter().cloned().collect()
    }

    pub(super) fn count(&self, what: &'static str) {
        *self.truth.lock().counts.entry(what).or_default() += 1;
    }

    pub(super) fn counts(&self) -> BTreeMap<&'static str, u64> {
        self.truth.lock().counts.clone()
    }

    /// Returns the fetches that began, that succeeded and that failed.
    pub(super) fn fetches(&self) -> [u64; 3] {
        let truth = self.truth.lock();
        [truth.began, truth.fetched, truth.failed]
    }

    /// Returns the number of the next value.
    pub(super) fn next(&self) -> u64 {
        let mut truth = self.truth.lock();
        truth.next += 1;
        truth.next
    }

    pub(super) fn put(&self, reference: &ValueRef, number: u64, holder: &'static str) {
        self.net.note(holder, format_args!("puts value {number}"));
        let mut truth = self.truth.lock();
        truth.values.insert(reference.id.clone(), TrueValue { number, holder, dropped: None, gone: None });
        truth.order.push(reference.clone());
    }

    /// The holder ends a value: at once, or when its lease has ended.
    pub(super) fn ends(&self, held: &HeldValue, at_once: bool) {
        let mut truth = self.truth.lock();
        let Some(value) = truth.values.get_mut(&held.reference().id) else { return };
        let (number, holder, now) = (value.number, value.holder, Instant::now());
        if at_once {
            value.gone.get_or_insert(now);
        } else {
            value.dropped.get_or_insert(now);
        }
        drop(truth);
        self.net.note(holder, format_args!("{} value {number}", if at_once { "releases" } else { "drops" }));
        let fetches = held.fetches();
        if self.plan.is_calm() && self.plan.copies_max.is_none() && fetches > self.plan.nodes as u64 {
            self.violation(format_args!("{} nodes fetched one value {fetches} times", self.plan.nodes));
        }
    }

    /// A process was killed, and its values with it.
    pub(super) fn died(&self, process: &str, directory: &Path) {
        let now = Instant::now();
        for value in self.truth.lock().values.values_mut().filter(|value| value.holder == process) {
            value.gone.get_or_insert(now);
        }
        if copies(directory).iter().any(|(path, _)| path.extension().is_some()) {
            self.count(KILLED_WHILE_IT_FETCHED);
        }
    }

    pub(super) fn clock_set(&self, node: &str) {
        self.truth.lock().clocks.insert(node.to_owned());
    }

    /// Returns one of the last values, for a fetch.
    pub(super) fn recent(&self, rng: &mut fastrand::Rng) -> Option<ValueRef> {
        let truth = self.truth.lock();
        let last = truth.order.len().saturating_sub(8)..truth.order.len();
        (!last.is_empty()).then(|| truth.order[rng.usize(last)].clone())
    }

    /// Returns the values that are held.
    pub(super) fn held(&self) -> Vec<ValueRef> {
        let truth = self.truth.lock();
        let held = |value: &TrueValue| value.gone.is_none() && value.dropped.is_none();
        truth.order.iter().filter(|reference| truth.values.get(&reference.id).is_some_and(held)).cloned().collect()
    }

    pub(super) fn begins(&self, process: &str, reference: &ValueRef) {
        let mut truth = self.truth.lock();
        truth.began += 1;
        let number = truth.values.get(&reference.id).map_or(0, |value| value.number);
        drop(truth);
        self.net.note(process, format_args!("fetches value {number}"));
    }

    /// Checks what a fetch returned. `settled`: no fault has occurred for a while, so what is held must be there.
    pub(super) fn check(
        &self,
        [process, node]: [&str; 2],
        reference: &ValueRef,
        began: Instant,
        fetched: Result<&Bytes, &Error>,
        settled: bool,
    ) {
        let Some(value) = self.truth.lock().values.get(&reference.id).copied() else { return };
        let (now, number) = (Instant::now(), value.number);
        let error = match fetched {
            Ok(bytes) => {
                self.net.note(process, format_args!("has value {number}"));
                self.truth.lock().fetched += 1;
                self.count(FETCHED);
                if bytes.len() >= LARGE {
                    self.count(IN_SEVERAL_PARTS);
                }
                if *bytes != contents(number) {
                    self.violation(format_args!("{process} fetched another value than {number}"));
                }
                return self.check_age(node, &value, began);
            }
            Err(error) => error,
        };
        self.net.note(process, format_args!("does not get value {number}: {:?}", error.code()));
        self.truth.lock().failed += 1;
        if error.execution() != Execution::Finished || !error.to_string().contains(&reference.name) {
            self.violation(format_args!("an error is not finished, or has no name of the value: {error}"));
        }
        let ended =
            value.gone.is_some() || value.dropped.is_some_and(|at| now + MARGIN_TIMEOUT >= at + self.plan.lease);
        let must = self.plan.is_calm() || settled;
        match error.code() {
            Code::NotFound if ended => self.count(GONE),
            Code::NotFound => self.violation(format_args!("a value that is held is gone: {error}")),
            Code::ResourceExhausted if self.plan.copies_max.is_some() => self.count(NO_ROOM),
            Code::Unavailable | Code::DeadlineExceeded if !must || value.gone.is_some() => self.count(UNREACHABLE),
            code => self.violation(format_args!("a fetch that nothing prevents fails: {code:?}: {error}")),
        }
    }

    /// A copy is used for its lease after the value is gone, and no longer.
    fn check_age(&self, node: &str, value: &TrueValue, began: Instant) {
        let Some(gone) = value.gone.filter(|gone| *gone < began) else { return };
        self.count(USED_AFTER_IT_WAS_GONE);
        // The last response can have been on its way for as long as a request may take. The clock of a node can be set back by a lease.
        let until = gone + self.plan.lease + ASK_TIMEOUT.max(self.plan.deadline_max) + MARGIN_TIMEOUT;
        if began > until && !self.truth.lock().clocks.contains(node) {
            let late = began - gone;
            self.violation(format_args!("a value was fetched {late:?} after it was gone"));
        }
    }

    /// Checks the limit of a node's directory.
    pub(super) fn check_room(&self, directory: &Path) {
        let Some(bytes_max) = self.plan.copies_max else { return };
        let used: u64 = copies(directory).iter().map(|(_, bytes)| bytes).sum();
        if used > bytes_max {
            self.violation(format_args!("copies have {used} bytes, of {bytes_max}"));
        }
    }

    /// Checks that nothing is left of values that are gone.
    pub(super) fn check_empty(&self, node: &str, directory: &Path) {
        let left = copies(directory).len();
        if left > 0 {
            self.violation(format_args!("node {node} still has {left} copies of values that are gone"));
        }
    }
}

/// Returns the copies of a node and their sizes.
fn copies(directory: &Path) -> Vec<(PathBuf, u64)> {
    let Ok(entries) = std::fs::read_dir(directory) else { return Vec::new() };
    let known = entries.flatten().filter_map(|entry| Some((entry.path(), entry.metadata().ok()?.len())));
    known.collect()
}

//! The waits of this process that last, so that a person can see what blocks a rollout, a rank or a queue.
//!
//! A wait is recorded when its future is first pending. A call that is answered at once therefore costs nothing, and one that waits costs a lock
//! of this thread's part of the table. What a wait is about is described only when somebody asks.
//!
//! ```text
//!   pending future ──► PendingWait ──► table of the process ◄── GET /waits?trace=…&older_ms=…
//!                                      handlers that block their thread (observe::stall) ◄┘
//! ```

use std::cell::Cell;
use std::collections::BTreeSet;
use std::fmt;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::task::Poll;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use serde::{Deserialize, Serialize};
use slab::Slab;
use tokio::time::Instant;

use crate::base::hex;
use crate::base::machine::host_name;
use crate::observe::stall::{self, HandlerLabel, Stall};

/// The route of the waits of a process.
pub const WAITS_ROUTE: &str = "/waits";

/// Parts of the table, so that threads rarely share a lock.
const PARTS: usize = 16;
/// Maximum recorded waits of a part. The whole table holds a million, which is the number of rollouts of a large collector.
const PART_MAX: usize = 65_536;
/// Maximum waits of one report: more than a person reads, and about 200 kB.
const REPORTED_MAX: usize = 1_000;
/// Maximum traces of one query.
const TRACES_MAX: usize = 64;
/// Maximum number of bytes of a description. Texts of other programs can be longer.
const TEXT_BYTES_MAX: usize = 400;

/// The kind of a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum WaitKind {
    /// A collector makes an attempt at a rollout.
    Attempt,
    /// A collector waits before another attempt.
    AttemptBackoff,
    /// A collector waits for the disk.
    Record,
    /// A collector begins no rollout.
    Pause,
    /// A call of a server waits for the response.
    Call,
    /// A call waits before it is sent again.
    CallBackoff,
    /// A server runs a request.
    Handler,
    /// A handler blocks its thread.
    Blocked,
    /// An agent's episode goes on after several turns.
    Episode,
    /// A model server waits for the response of its endpoint.
    Endpoint,
    /// A model server waits before it calls its endpoint again.
    EndpointBackoff,
    /// An item waits in a work queue, or for the worker that took it.
    Queue,
    /// A group call waits for bundles that another group holds.
    Turn,
    /// A group call waits for ranks.
    Ranks,
    /// A call waits at its rank behind other calls.
    RankQueue,
    /// A rank runs a call.
    RankCall,
}

impl WaitKind {
    /// Returns `true` if a rollout begins here.
    #[must_use]
    pub fn is_root(self) -> bool {
        matches!(self, Self::Attempt | Self::AttemptBackoff | Self::Pause)
    }

    /// Returns `true` for a wait of a call of a worker group.
    #[must_use]
    pub fn is_of_group(self) -> bool {
        matches!(self, Self::Turn | Self::Ranks | Self::RankQueue | Self::RankCall)
    }

    /// Returns `true` if nothing runs meanwhile: what waits is sent again, and has not started.
    #[must_use]
    pub fn is_rest(self) -> bool {
        matches!(self, Self::AttemptBackoff | Self::CallBackoff | Self::EndpointBackoff)
    }
}

/// Describes what a wait is about, at the time of the question. An implementation must not wait, and must not wait for another lock for long.
pub trait WaitTarget: Send + Sync + 'static {
    /// Returns the description: `rank 3 of policy (pid 312)`.
    fn describe(&self) -> String;

    /// Returns what the wait is for by now, if that can change.
    fn kind(&self) -> Option<WaitKind> {
        None
    }

    /// Returns the group whose calls the wait is for.
    fn holder(&self) -> Option<Arc<str>> {
        None
    }

    /// Returns the turns that the model has had in an episode.
    fn turns(&self) -> Option<u32> {
        None
    }

    /// Returns the processes on this machine that the wait is for, as far as they are known.
    fn pids(&self) -> Vec<u32> {
        Vec::new()
    }
}

impl<F: Fn() -> String + Send + Sync + 'static> WaitTarget for F {
    fn describe(&self) -> String {
        self()
    }
}

/// A wait that begins.
pub struct Wait {
    kind: WaitKind,
    trace_id: u128,
    since: Instant,
    deadline: Option<Instant>,
    label: HandlerLabel,
    target: Option<Arc<dyn WaitTarget>>,
}

impl Wait {
    /// Creates a wait that begins now. A trace of 0 is none.
    #[must_use]
    pub fn new(kind: WaitKind, trace_id: u128) -> Self {
        Self { kind, trace_id, since: Instant::now(), deadline: None, label: HandlerLabel::NONE, target: None }
    }

    /// Sets when the wait began.
    #[must_use]
    pub fn since(mut self, began: Instant) -> Self {
        self.since = began;
        self
    }

    /// Adds the instant at which the wait ends.
    #[must_use]
    pub fn until(mut self, deadline: Instant) -> Self {
        self.deadline = Some(deadline);
        self
    }

    /// Adds the server and the route that the wait is for.
    #[must_use]
    pub fn of(mut self, label: HandlerLabel) -> Self {
        self.label = label;
        self
    }

    /// Adds the description of what the wait is for.
    #[must_use]
    pub fn on(mut self, target: Arc<dyn WaitTarget>) -> Self {
        self.target = Some(target);
        self
    }
}

impl fmt::Debug for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Wait({:?}, {:x})", self.kind, self.trace_id)
    }
}

type Part = Mutex<Slab<Wait>>;

static TABLE: [Part; PARTS] = [const { Mutex::new(Slab::new()) }; PARTS];
static SKIPPED: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static PART: Cell<usize> = {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        Cell::new(NEXT.fetch_add(1, Ordering::Relaxed) % PARTS)
    };
}

fn lock(part: &'static Part) -> MutexGuard<'static, Slab<Wait>> {
    part.lock()
}

/// A recorded wait; dropping it ends the wait.
#[derive(Debug)]
#[must_use = "the wait ends when this is dropped"]
pub struct WaitGuard {
    part: u32,
    /// [`u32::MAX`] if the table was full.
    slot: u32,
}

impl WaitGuard {
    /// Records a wait.
    pub fn begin(wait: Wait) -> Self {
        let part = PART.try_with(Cell::get).unwrap_or_default();
        let mut waits = lock(&TABLE[part]);
        let slot = if waits.len() < PART_MAX {
            u32::try_from(waits.insert(wait)).unwrap_or(u32::MAX)
        } else {
            SKIPPED.fetch_add(1, Ordering::Relaxed);
            u32::MAX
        };
        Self { part: part as u32, slot }
    }
}

impl Drop for WaitGuard {
    fn drop(&mut self) {
        // Dropped after the lock is released.
        let _ended = lock(&TABLE[self.part as usize]).try_remove(self.slot as usize);
    }
}

/// Records a wait when a future is first pending, until this is dropped.
#[derive(Debug, Default)]
pub struct PendingWait(Option<WaitGuard>);

impl PendingWait {
    /// Passes on the result of a poll.
    pub fn note<T>(&mut self, polled: Poll<T>, wait: impl FnOnce() -> Wait) -> Poll<T> {
        if polled.is_pending() && self.0.is_none() {
            self.0 = Some(WaitGuard::begin(wait()));
        }
        polled
    }
}

/// Waits for a future, and records the wait while it is pending.
pub fn recorded<F: Future>(mut future: Pin<&mut F>, wait: impl Fn() -> Wait) -> impl Future<Output = F::Output> {
    let mut pending = PendingWait::default();
    poll_fn(move |cx| pending.note(future.as_mut().poll(cx), &wait))
}

/// Which waits a report contains.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct WaitQuery {
    /// Only waits of these traces; all if empty.
    pub traces: Vec<u128>,
    /// Only waits that have lasted this long.
    pub older: Duration,
}

impl WaitQuery {
    /// Parses `trace=HEX,HEX&older_ms=N`. Other keys, and values that are not valid, are ignored.
    #[must_use]
    pub fn parse(query: &str) -> Self {
        let mut parsed = Self::default();
        for (key, value) in query.split('&').filter_map(|pair| pair.split_once('=')) {
            match key {
                "trace" => {
                    let traces = value.split(',').filter_map(|hex| u128::from_str_radix(hex, 16).ok());
                    parsed.traces = traces.take(TRACES_MAX).collect();
                }
                "older_ms" => parsed.older = Duration::from_millis(value.parse().unwrap_or_default()),
                _ => {}
            }
        }
        parsed
    }

    /// Returns `true` if a wait of this trace and age is in the report.
    #[must_use]
    pub fn wants(&self, trace_id: u128, age: Duration) -> bool {
        age >= self.older && (self.traces.is_empty() || self.traces.contains(&trace_id))
    }
}

/// One wait, as a process reports it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct WaitReport {
    /// The kind of the wait.
    pub kind: WaitKind,
    /// The trace of the attempt in hexadecimal digits; empty if it has none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub trace: String,
    /// The rollout: `17-3`, and `17-3-a1` for its second attempt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rollout: Option<String>,
    /// The server that is called, or that runs the handler.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub server: String,
    /// The route or the method.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub route: String,
    /// The subject of the wait, for a person.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub on: String,
    /// The group whose calls the wait is for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holder: Option<String>,
    /// Processes of the same machine that the wait is for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pids: Vec<u32>,
    /// The turns that the model has had in an episode so far.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub turns: Option<u32>,
    /// Time since the wait began. In microseconds, because the waits of a chain begin one directly after another.
    pub age_us: u64,
    /// Time until the wait ends by itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub left_ms: Option<u64>,
}

impl WaitReport {
    /// Creates the report of a wait without a description.
    #[must_use]
    pub fn new(kind: WaitKind, trace_id: u128, age: Duration) -> Self {
        Self {
            kind,
            trace: trace_text(trace_id),
            rollout: None,
            server: String::new(),
            route: String::new(),
            on: String::new(),
            holder: None,
            pids: Vec::new(),
            turns: None,
            age_us: u64::try_from(age.as_micros()).unwrap_or(u64::MAX),
            left_ms: None,
        }
    }

    fn of(wait: &Wait, now: Instant) -> Self {
        let mut report = Self::new(wait.kind, wait.trace_id, now.saturating_duration_since(wait.since));
        let handler = wait.label.handler();
        (report.server, report.route) = (handler.server, handler.route);
        report.left_ms = wait.deadline.map(|deadline| millis(deadline.saturating_duration_since(now)));
        report
    }

    fn of_stall(stall: &Stall) -> Self {
        let mut report = Self::new(WaitKind::Blocked, stall.trace_id, stall.lasted);
        (report.server, report.route) = (stall.handler.server.clone(), stall.handler.route.clone());
        report.on.clone_from(&stall.thread);
        report
    }

    /// Adds what a target says.
    fn describe(&mut self, target: &dyn WaitTarget) {
        let mut text = target.describe();
        if text.len() > TEXT_BYTES_MAX {
            text.truncate(text.floor_char_boundary(TEXT_BYTES_MAX));
            text.push('…');
        }
        if matches!(self.kind, WaitKind::Attempt | WaitKind::AttemptBackoff) {
            self.rollout = Some(text);
        } else {
            self.on = text;
        }
        self.kind = target.kind().unwrap_or(self.kind);
        self.holder = target.holder().map(|holder| holder.to_string());
        self.pids = target.pids();
        self.turns = target.turns();
    }
}

/// The waits of a process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ProcessWaits {
    /// The machine.
    pub host: String,
    /// The process.
    pub pid: u32,
    /// The first argument of its command line without the folder.
    #[serde(default)]
    pub program: String,
    /// The waits, oldest first.
    pub waits: Vec<WaitReport>,
    /// Younger waits that are left out.
    #[serde(default)]
    pub omitted: usize,
    /// Number of traces of which a wait is a [rest](WaitKind::is_rest), whatever the query asks for.
    #[serde(default)]
    pub resting: usize,
    /// Waits that were not recorded since the start, because too many lasted at once.
    #[serde(default)]
    pub skipped: u64,
}

impl ProcessWaits {
    /// Adds waits from elsewhere, and keeps the order and the bound.
    pub fn add(&mut self, waits: impl IntoIterator<Item = WaitReport>) {
        self.waits.extend(waits);
        self.waits.sort_by_key(|wait| std::cmp::Reverse(wait.age_us));
        self.omitted += self.waits.len().saturating_sub(REPORTED_MAX);
        self.waits.truncate(REPORTED_MAX);
    }
}

/// Returns the waits of this process.
#[must_use]
pub fn report(query: &WaitQuery) -> ProcessWaits {
    let now = Instant::now();
    let mut found: Vec<(WaitReport, Option<Arc<dyn WaitTarget>>)> = Vec::new();
    let mut resting: BTreeSet<u128> = BTreeSet::new();
    for part in &TABLE {
        let waits = lock(part);
        resting.extend(waits.iter().filter(|(_, wait)| wait.kind.is_rest()).map(|(_, wait)| wait.trace_id));
        let wanted = waits.iter().map(|(_, wait)| wait);
        let wanted = wanted.filter(|wait| query.wants(wait.trace_id, now.saturating_duration_since(wait.since)));
        found.extend(wanted.map(|wait| (WaitReport::of(wait, now), wait.target.clone())));
    }
    let stalls = stall::current();
    let stalls = stalls.iter().filter(|stall| query.wants(stall.trace_id, stall.lasted));
    found.extend(stalls.map(|stall| (WaitReport::of_stall(stall), None)));
    found.sort_by_key(|(wait, _)| std::cmp::Reverse(wait.age_us));
    let omitted = found.len().saturating_sub(REPORTED_MAX);
    found.truncate(REPORTED_MAX);
    // Described without a lock of the table, because a description can take other locks.
    let waits = found.into_iter().map(|(mut wait, target)| {
        if let Some(target) = target {
            wait.describe(&*target);
        }
        wait
    });
    let program = std::env::args().next().unwrap_or_default();
    ProcessWaits {
        host: host_name(),
        pid: std::process::id(),
        program: program.rsplit('/').next().unwrap_or_default().to_owned(),
        waits: waits.collect(),
        omitted,
        resting: resting.len(),
        skipped: SKIPPED.load(Ordering::Relaxed),
    }
}

/// Returns the turns that the model has had in the episode of an attempt that is in flight, if this process runs both the collector and the
/// agent. `attempt` is written as `17-3-a1`, and the attempt must have lasted for `older`.
#[must_use]
pub fn turns_of(attempt: &str, older: Duration) -> Option<u32> {
    let attempts = report(&WaitQuery { traces: Vec::new(), older }).waits;
    let of_attempt = attempts.iter().find(|wait| wait.rollout.as_deref() == Some(attempt))?;
    let trace_id = u128::from_str_radix(&of_attempt.trace, 16).ok()?;
    let of_trace = report(&WaitQuery { traces: vec![trace_id], older: Duration::ZERO });
    of_trace.waits.iter().filter_map(|wait| wait.turns).max()
}

/// Returns the hexadecimal digits of a trace; empty for none.
#[must_use]
pub fn trace_text(trace_id: u128) -> String {
    let mut text = String::new();
    if trace_id != 0 {
        hex::push::<32>(&mut text, trace_id);
    }
    text
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};
    use std::pin::pin;

    use futures_util::FutureExt as _;

    use super::*;

    fn of(trace_id: u128) -> Vec<WaitReport> {
        report(&WaitQuery { traces: vec![trace_id], older: Duration::ZERO }).waits
    }

    #[tokio::test(start_paused = true)]
    async fn a_wait_is_recorded_from_its_first_pending_poll_to_its_end() {
        let (trace_id, label) = (0xfeed_0001, HandlerLabel::new("bank", "/verify"));
        let described = Arc::new(|| "the vault".to_owned());
        let wait = || Wait::new(WaitKind::Call, trace_id).of(label).on(described.clone());
        recorded(pin!(ready(())), || unreachable!("nothing waits")).await;
        let mut forever = Box::pin(async { recorded(pin!(pending::<()>()), wait).await });
        assert_eq!(of(trace_id), [], "it was not polled");
        assert_eq!(forever.as_mut().now_or_never(), None);
        tokio::time::advance(Duration::from_secs(3)).await;
        assert_eq!(forever.as_mut().now_or_never(), None);
        let [seen] = &of(trace_id)[..] else { panic!("one wait") };
        assert_eq!((seen.kind, &*seen.server, &*seen.route), (WaitKind::Call, "bank", "/verify"));
        assert_eq!((&*seen.on, seen.age_us), ("the vault", 3_000_000));
        assert_eq!(report(&WaitQuery { traces: vec![trace_id], older: Duration::from_secs(4) }).waits, []);
        drop(forever);
        assert_eq!(of(trace_id), []);
    }

    #[test]
    fn the_turns_of_an_episode_are_found_by_the_name_of_its_attempt() {
        struct Turns(u32);
        impl WaitTarget for Turns {
            fn describe(&self) -> String {
                String::new()
            }

            fn turns(&self) -> Option<u32> {
                Some(self.0)
            }
        }
        let begin =
            |kind, trace_id, target: Arc<dyn WaitTarget>| WaitGuard::begin(Wait::new(kind, trace_id).on(target));
        let _attempt = begin(WaitKind::Attempt, 0xfeed_0002, Arc::new(|| "9017-3-a1".to_owned()));
        assert_eq!(turns_of("9017-3-a1", Duration::ZERO), None);
        let _others = begin(WaitKind::Episode, 0xfeed_0003, Arc::new(Turns(99)));
        let _episode = begin(WaitKind::Episode, 0xfeed_0002, Arc::new(Turns(17)));
        assert_eq!(turns_of("9017-3-a1", Duration::ZERO), Some(17));
        assert_eq!(turns_of("9017-3", Duration::ZERO), None);
    }

    #[test]
    fn a_query_is_parsed_leniently() {
        let parsed = WaitQuery::parse("trace=ff,zz,1&older_ms=1500&x=y&z");
        assert_eq!(parsed, WaitQuery { traces: vec![255, 1], older: Duration::from_millis(1_500) });
        assert_eq!(WaitQuery::parse("older_ms=-1"), WaitQuery::default());
    }

    #[test]
    fn a_report_is_bounded_and_keeps_the_oldest() {
        let mut process = ProcessWaits::default();
        let waits = (0..1_500).map(|age| WaitReport::new(WaitKind::Call, 1, Duration::from_millis(age)));
        process.add(waits);
        assert_eq!((process.waits.len(), process.omitted), (REPORTED_MAX, 500));
        assert_eq!((process.waits[0].age_us, process.waits[999].age_us), (1_499_000, 500_000));
    }
}

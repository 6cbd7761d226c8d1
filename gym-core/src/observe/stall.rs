//! Finds handlers that block a thread of the runtime.
//!
//! A handler that blocks its thread also stops the calls of other servers, whose deadlines then pass. A thread therefore records which handlers it is
//! polling. A watchdog reads the records. It is a thread of its own, because a task of a blocked runtime does not run.
//!
//! ```text
//!   poll of a handler ──► PollRecord of the thread: the handlers being polled, outermost first; a count of changes
//!   watchdog, every 100 ms ──► the count stays the same for 1 s: a warning, and a Stall for errors, metrics and /health
//! ```
//!
//! One thread of a runtime waits for sockets and timers, for all of them. If a handler blocks that thread, tokio lets no other thread wait in its place
//! until one has something to do. So the watchdog also gives the runtime an empty task: the thread that takes it then waits for sockets and timers.

use std::array::from_fn;
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Once, OnceLock, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::time::Instant;

/// Pause between two looks of the watchdog.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// A poll of this length is remembered, so that the error of a passed deadline can name it.
const NOTED_AFTER: Duration = Duration::from_millis(200);
/// A poll of this length is a stall, which is counted and logged. Polls take microseconds. A thread that a busy machine does not run for a
/// second is rare.
const STALLED_AFTER: Duration = Duration::from_secs(1);
/// Maximum nested handlers of one poll that are recorded: collector, environment, agent and resources server are four.
const DEPTH_MAX: usize = 8;
const SERVER_BYTES: usize = 40;
const ROUTE_BYTES: usize = 56;
const LABEL_WORDS: usize = (SERVER_BYTES + ROUTE_BYTES) / 8;
/// Maximum ended stalls that are remembered. Errors name the latest ones only.
const ENDED_MAX: usize = 64;
/// Maximum handlers that are counted separately; a model can name any number of routes.
const COUNTED_MAX: usize = 256;

/// The server and the route of a handler, of fixed size so that recording it neither allocates nor locks. Longer names are cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HandlerLabel([u64; LABEL_WORDS]);

impl HandlerLabel {
    /// The label of no handler.
    pub(crate) const NONE: Self = Self([0; LABEL_WORDS]);

    /// Creates the label of a route of a server.
    #[must_use]
    pub fn new(server: &str, route: &str) -> Self {
        let mut bytes = [0_u8; SERVER_BYTES + ROUTE_BYTES];
        let (server_part, route_part) = bytes.split_at_mut(SERVER_BYTES);
        for (part, text) in [(server_part, server), (route_part, route)] {
            let length = text.len().min(part.len());
            part[..length].copy_from_slice(&text.as_bytes()[..length]);
        }
        let mut words = [0; LABEL_WORDS];
        for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(8)) {
            *word = u64::from_le_bytes(bytes.try_into().expect("a chunk has eight bytes"));
        }
        Self(words)
    }

    fn text(words: &[u64]) -> String {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).take_while(|byte| *byte != 0).collect();
        // A cut can split a character.
        String::from_utf8_lossy(&bytes).trim_end_matches(char::REPLACEMENT_CHARACTER).to_owned()
    }

    pub(crate) fn handler(self) -> StalledHandler {
        let (server, route) = self.0.split_at(SERVER_BYTES / 8);
        StalledHandler { server: Self::text(server), route: Self::text(route) }
    }
}

/// A handler that blocked its thread.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct StalledHandler {
    /// Name of the server.
    pub server: String,
    /// The route, such as the name of a tool after a slash.
    pub route: String,
}

impl fmt::Display for StalledHandler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` of server `{}`", self.route, self.server)
    }
}

/// A poll that blocked a thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stall {
    /// The innermost handler of the poll.
    pub handler: StalledHandler,
    /// The trace of the call; 0 if it has none.
    pub trace_id: u128,
    /// Name of the thread.
    pub thread: String,
    /// The start of the stall, at most 100 ms late.
    pub since: Instant,
    /// The time for which the thread was blocked, or has been blocked until now.
    pub lasted: Duration,
}

impl fmt::Display for Stall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} blocked its thread for {:.1} s", self.handler, self.lasted.as_secs_f64())
    }
}

/// The handlers that one thread is polling. Written by its thread only.
#[derive(Debug)]
struct PollRecord {
    thread: String,
    /// Counts the starts and ends of polls: a thread whose count changes is not blocked.
    changes: AtomicU64,
    depth: AtomicUsize,
    labels: [[AtomicU64; LABEL_WORDS]; DEPTH_MAX],
    /// The halves of the trace of each call.
    traces: [[AtomicU64; 2]; DEPTH_MAX],
}

impl PollRecord {
    fn new(thread: String) -> Self {
        Self {
            thread,
            changes: AtomicU64::new(0),
            depth: AtomicUsize::new(0),
            labels: from_fn(|_| from_fn(|_| AtomicU64::new(0))),
            traces: from_fn(|_| from_fn(|_| AtomicU64::new(0))),
        }
    }

    fn begin(&self, label: &HandlerLabel, trace_id: u128) {
        let depth = self.depth.load(Ordering::Relaxed);
        if let (Some(words), Some([high, low])) = (self.labels.get(depth), self.traces.get(depth)) {
            for (to, word) in words.iter().zip(label.0) {
                to.store(word, Ordering::Relaxed);
            }
            high.store((trace_id >> 64) as u64, Ordering::Relaxed);
            low.store(trace_id as u64, Ordering::Relaxed);
        }
        // Released after the label, so that the watchdog never reads half of one.
        self.depth.store(depth + 1, Ordering::Release);
        self.changed();
    }

    fn end(&self) {
        self.depth.store(self.depth.load(Ordering::Relaxed).saturating_sub(1), Ordering::Release);
        self.changed();
    }

    fn changed(&self) {
        // Not an atomic addition: no other thread writes.
        self.changes.store(self.changes.load(Ordering::Relaxed).wrapping_add(1), Ordering::Release);
    }

    /// Returns the innermost handler that is being polled, and the trace of its call.
    fn innermost(&self) -> Option<(HandlerLabel, u128)> {
        let at = self.depth.load(Ordering::Acquire).min(DEPTH_MAX).checked_sub(1)?;
        let (words, [high, low]) = (self.labels.get(at)?, self.traces.get(at)?);
        let label = HandlerLabel(from_fn(|at| words[at].load(Ordering::Relaxed)));
        let half = |half: &AtomicU64| u128::from(half.load(Ordering::Relaxed));
        Some((label, half(high) << 64 | half(low)))
    }
}

/// Records one poll of a handler until it is dropped.
#[derive(Debug)]
#[must_use = "the poll ends when this is dropped"]
pub struct PollGuard {
    /// A guard belongs to the thread that polls.
    thread: PhantomData<*const ()>,
}

/// Records that this thread polls a handler for a call of this trace.
pub fn poll_begins(label: &HandlerLabel, trace_id: u128) -> PollGuard {
    // Fails only while the thread ends, when nothing needs to be recorded.
    let _ = RECORD.try_with(|record| record.begin(label, trace_id));
    PollGuard { thread: PhantomData }
}

impl Drop for PollGuard {
    fn drop(&mut self) {
        let _ = RECORD.try_with(|record| record.end());
    }
}

thread_local! {
    static RECORD: Arc<PollRecord> = {
        let name = std::thread::current().name().unwrap_or("unnamed").to_owned();
        monitor().register(name)
    };
}

fn monitor() -> &'static StallMonitor {
    static MONITOR: OnceLock<StallMonitor> = OnceLock::new();
    MONITOR.get_or_init(StallMonitor::default)
}

/// Starts the watchdog of this process. Later calls have no effect.
pub fn watch() {
    static STARTED: Once = Once::new();
    STARTED.call_once(|| {
        let watchdog = std::thread::Builder::new().name("gym-watchdog".to_owned()).spawn(|| {
            loop {
                std::thread::park_timeout(POLL_INTERVAL);
                monitor().look(Instant::now()).into_iter().for_each(StallEvent::log);
                monitor().wake_blocked_runtimes();
            }
        });
        if let Err(error) = watchdog {
            tracing::warn!(%error, "the watchdog cannot start; handlers that block a thread are not reported");
        }
    });
}

/// Returns the handlers that block a thread now.
#[must_use]
pub fn current() -> Vec<Stall> {
    monitor().0.lock().current(Instant::now())
}

/// Returns each handler that has blocked a thread, with the number of times.
#[must_use]
pub fn totals() -> Vec<(StalledHandler, u64)> {
    monitor().0.lock().totals.iter().map(|(handler, count)| (handler.clone(), *count)).collect()
}

/// Returns the longest stall during which this instant passed, if there is one.
pub(crate) fn during(instant: Instant) -> Option<Stall> {
    monitor().0.lock().during(instant, Instant::now())
}

/// Watches the threads that poll handlers.
#[derive(Debug, Default)]
struct StallMonitor(Mutex<MonitorState>);

#[derive(Debug, Default)]
struct MonitorState {
    threads: Vec<WatchedThread>,
    ended: VecDeque<Stall>,
    totals: BTreeMap<StalledHandler, u64>,
}

#[derive(Debug)]
struct WatchedThread {
    record: Weak<PollRecord>,
    changes: u64,
    /// The time at which the count of changes was first seen.
    seen: Instant,
    noted: Option<NotedPoll>,
    /// The runtime of the thread.
    runtime: Option<Handle>,
}

/// A poll that has taken longer than [`NOTED_AFTER`].
#[derive(Debug)]
struct NotedPoll {
    handler: StalledHandler,
    trace_id: u128,
    thread: String,
    since: Instant,
    /// Length of the poll at which the next warning is due.
    warn_at: Duration,
}

impl NotedPoll {
    fn stall(&self, now: Instant) -> Stall {
        Stall {
            handler: self.handler.clone(),
            trace_id: self.trace_id,
            thread: self.thread.clone(),
            since: self.since,
            lasted: now.saturating_duration_since(self.since),
        }
    }
}

/// A change that the watchdog logs.
#[derive(Debug, PartialEq, Eq)]
enum StallEvent {
    Blocks(Stall),
    Ended(Stall),
}

impl StallEvent {
    fn log(self) {
        match self {
            Self::Blocks(Stall { handler: StalledHandler { server, route }, thread, lasted, .. }) => tracing::warn!(
                server,
                route,
                thread,
                seconds = lasted.as_secs(),
                "a handler blocks a thread of the runtime, and with it other servers; run it with `Blocking`"
            ),
            Self::Ended(Stall { handler: StalledHandler { server, route }, thread, lasted, .. }) => tracing::warn!(
                server,
                route,
                thread,
                seconds = lasted.as_secs(),
                "a handler no longer blocks its thread"
            ),
        }
    }
}

impl StallMonitor {
    fn register(&self, thread: String) -> Arc<PollRecord> {
        let record = Arc::new(PollRecord::new(thread));
        let (record_of, runtime) = (Arc::downgrade(&record), Handle::try_current().ok());
        let watched = WatchedThread { record: record_of, changes: 0, seen: Instant::now(), noted: None, runtime };
        self.0.lock().threads.push(watched);
        record
    }

    /// Gives each runtime with a blocked thread an empty task, so that another thread waits for sockets and timers.
    fn wake_blocked_runtimes(&self) {
        let blocked: Vec<Handle> = {
            let state = self.0.lock();
            state
                .threads
                .iter()
                .filter(|thread| thread.noted.is_some())
                .filter_map(|thread| thread.runtime.clone())
                .collect()
        };
        for runtime in blocked {
            drop(runtime.spawn(std::future::ready(())));
        }
    }

    /// Looks at every thread once.
    fn look(&self, now: Instant) -> Vec<StallEvent> {
        let mut state = self.0.lock();
        let MonitorState { threads, ended, totals } = &mut *state;
        let mut events = Vec::new();
        threads.retain_mut(|thread| {
            let Some(record) = thread.record.upgrade() else { return false };
            let changes = record.changes.load(Ordering::Acquire);
            if changes != thread.changes {
                (thread.changes, thread.seen) = (changes, now);
                let Some(noted) = thread.noted.take() else { return true };
                let stall = noted.stall(now);
                if stall.lasted >= STALLED_AFTER {
                    events.push(StallEvent::Ended(stall.clone()));
                }
                if ended.len() == ENDED_MAX {
                    ended.pop_front();
                }
                ended.push_back(stall);
                return true;
            }
            let lasted = now.saturating_duration_since(thread.seen);
            if lasted < NOTED_AFTER {
                return true;
            }
            if thread.noted.is_none() {
                let Some((label, trace_id)) = record.innermost() else { return true };
                let (handler, name) = (label.handler(), record.thread.clone());
                let noted = NotedPoll { handler, trace_id, thread: name, since: thread.seen, warn_at: STALLED_AFTER };
                thread.noted = Some(noted);
            }
            if let Some(noted) = &mut thread.noted
                && lasted >= noted.warn_at
            {
                if noted.warn_at == STALLED_AFTER && (totals.len() < COUNTED_MAX || totals.contains_key(&noted.handler))
                {
                    *totals.entry(noted.handler.clone()).or_default() += 1;
                }
                // Each warning after twice the time, so that a long stall stays visible and does not fill the log.
                noted.warn_at *= 2;
                events.push(StallEvent::Blocks(noted.stall(now)));
            }
            true
        });
        events
    }
}

impl MonitorState {
    fn noted(&self, now: Instant) -> impl Iterator<Item = Stall> {
        self.threads.iter().filter_map(move |thread| Some(thread.noted.as_ref()?.stall(now)))
    }

    fn current(&self, now: Instant) -> Vec<Stall> {
        self.noted(now).filter(|stall| stall.lasted >= STALLED_AFTER).collect()
    }

    fn during(&self, instant: Instant, now: Instant) -> Option<Stall> {
        // The watchdog notices both ends of a stall at most one tick late.
        let covers = |stall: &Stall| stall.since <= instant + POLL_INTERVAL && instant <= stall.since + stall.lasted;
        self.noted(now).chain(self.ended.iter().cloned()).filter(covers).max_by_key(|stall| stall.lasted)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A trace with digits in both halves.
    const TRACE: u128 = 0xfeed << 64 | 0xbeef;

    fn handler(server: &str, route: &str) -> StalledHandler {
        StalledHandler { server: server.to_owned(), route: route.to_owned() }
    }

    #[test]
    fn while_a_handler_blocks_the_thread_that_waits_for_timers_another_one_waits_for_them() {
        use std::sync::mpsc::channel;

        watch();
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("starts");
        let ((release, released), (fire, fired)) = (channel::<()>(), channel());
        runtime.spawn(async move {
            tokio::time::sleep(Duration::from_millis(50)).await;
            let _poll = poll_begins(&HandlerLabel::new("room", "/block"), 1);
            let _ = released.recv_timeout(Duration::from_secs(60));
        });
        runtime.spawn(async move {
            tokio::time::sleep(Duration::from_millis(200)).await;
            fire.send(())
        });
        let in_time = fired.recv_timeout(Duration::from_secs(20));
        drop(release);
        assert_eq!(in_time, Ok(()), "the timer fired while the handler blocked");
    }

    #[test]
    fn a_thread_that_stays_in_one_poll_is_reported_while_it_is_blocked_and_when_it_is_not() {
        let (monitor, start) = (StallMonitor::default(), Instant::now());
        let record = monitor.register("worker-1".to_owned());
        let at = |ms: u64| start + Duration::from_millis(ms);
        record.begin(&HandlerLabel::new("bank_agent", "/run"), 7);
        record.begin(&HandlerLabel::new("bank", "/slow"), TRACE);
        assert_eq!(monitor.look(at(0)), []);
        assert_eq!(monitor.look(at(900)), [], "a second is the limit");
        assert_eq!(monitor.0.lock().current(at(900)), []);
        let stall = |ms| Stall {
            handler: handler("bank", "/slow"),
            trace_id: TRACE,
            thread: "worker-1".to_owned(),
            since: at(0),
            lasted: Duration::from_millis(ms),
        };
        assert_eq!(monitor.look(at(1_000)), [StallEvent::Blocks(stall(1_000))]);
        assert_eq!(monitor.look(at(1_100)), [], "one warning at a time");
        assert_eq!(monitor.look(at(2_000)), [StallEvent::Blocks(stall(2_000))]);
        assert_eq!(monitor.0.lock().current(at(2_100)), [stall(2_100)]);
        record.end();
        assert_eq!(monitor.look(at(30_000)), [StallEvent::Ended(stall(30_000))]);
        assert_eq!(monitor.0.lock().current(at(30_100)), []);
        assert_eq!(monitor.0.lock().totals, BTreeMap::from([(handler("bank", "/slow"), 1)]));
        // The outer handler continues, and is not to blame for the time of the inner one.
        assert_eq!(monitor.look(at(30_900)), []);
    }

    #[test]
    fn a_thread_that_polls_or_rests_is_never_reported() {
        let (monitor, start) = (StallMonitor::default(), Instant::now());
        let (busy, idle) = (monitor.register("busy".to_owned()), monitor.register("idle".to_owned()));
        idle.begin(&HandlerLabel::new("bank", "/run"), TRACE);
        idle.end();
        for second in 0..60 {
            busy.begin(&HandlerLabel::new("bank", "/verify"), TRACE);
            assert_eq!(monitor.look(start + Duration::from_secs(second)), []);
            busy.end();
        }
        drop(busy);
        let _ = monitor.look(start);
        assert_eq!(monitor.0.lock().threads.len(), 1, "a thread that has ended is no longer watched");
    }

    #[test]
    fn a_passed_deadline_finds_the_stall_during_which_it_passed() {
        let (monitor, start) = (StallMonitor::default(), Instant::now());
        let record = monitor.register("worker-1".to_owned());
        let at = |ms: u64| start + Duration::from_millis(ms);
        record.begin(&HandlerLabel::new("bank", "/slow"), TRACE);
        let _ = (monitor.look(at(1_000)), monitor.look(at(1_300)));
        let name = |deadline, now| monitor.0.lock().during(at(deadline), at(now)).map(|stall| stall.to_string());
        let text = "`/slow` of server `bank` blocked its thread for 0.5 s";
        assert_eq!(name(1_200, 1_500).as_deref(), Some(text), "still blocked");
        assert_eq!(name(500, 1_500), None, "it passed before");
        record.end();
        let _ = monitor.look(at(1_500));
        assert_eq!(name(1_200, 9_000).as_deref(), Some(text), "remembered");
        assert_eq!(name(2_000, 9_000), None, "it passed later");
    }

    #[test]
    fn polls_nest_deeper_than_what_is_recorded() {
        let record = PollRecord::new("worker".to_owned());
        for depth in 0..DEPTH_MAX + 3 {
            record.begin(&HandlerLabel::new("server", &format!("/{depth}")), TRACE);
        }
        assert_eq!(
            record.innermost().map(|(label, trace)| (label.handler().route, trace)),
            Some((format!("/{}", DEPTH_MAX - 1), TRACE))
        );
        (0..DEPTH_MAX + 3).for_each(|_| record.end());
        assert_eq!(record.innermost(), None);
    }

    proptest! {
        /// A label keeps its names up to the limit, and never a broken character.
        #[test]
        fn a_label_has_the_names_up_to_a_limit(server in "[a-zé/_]{0,60}", route in "/[a-zé/_]{0,80}") {
            let handler = HandlerLabel::new(&server, &route).handler();
            for (kept, whole, limit) in [(handler.server, server, SERVER_BYTES), (handler.route, route, ROUTE_BYTES)] {
                prop_assert!(whole.starts_with(&kept), "{kept} of {whole}");
                prop_assert!(kept.len() + 1 >= whole.len().min(limit));
            }
        }
    }
}

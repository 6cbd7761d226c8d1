//! Runs a `/run` that is sent again once.
//!
//! Python clients resend a POST when a connection breaks, even if the request ran. Each resent request would start a second episode
//! with its own side effects. An episode whose caller disconnects therefore runs on for a grace period, and an equal request within
//! that period joins it. A delivered response is dropped at once, so a second collection of the same rows never receives the
//! rollouts of the first.
//!
//! An equal request of a caller who is still connected is not a resent one: two clients may collect the same rows at the same time, and
//! each wants rollouts of its own. It joins only if both requests have the same call id ([`CALL_METADATA`](gym_core::message::CALL_METADATA)).
//! A client of this SDK keeps the id when it resends, so it joins even if the server has not noticed yet that the first connection broke.
//!
//! A caller can state the time in which it comes back ([`CALL_WAIT_METADATA`](gym_core::message::CALL_WAIT_METADATA)): a client of this SDK resends at
//! once, so its episodes end 1.5 s after it is gone. The grace period is for callers that state nothing.
//!
//! The callers that wait for an episode poll it. Without callers, a task polls the episode until the grace period ends. The task
//! then drops the episode, which cancels its calls.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, Shared, WeakShared};
use gym_core::{CancelToken, Error, RawObject, Response};
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::task::JoinSet;
use tokio::time::Instant;

/// The grace period of an episode without callers. NeMo Gym's clients resend after half a second; recovery takes longer if a load
/// balancer restarts or a link flaps.
pub(crate) const DEFAULT_STOP_TIMEOUT: Duration = Duration::from_secs(30);

/// Maximum episodes without callers; beyond it, an episode is dropped with its last caller. Equals the queue length of a server.
const ABANDONED_MAX: usize = 16_384;

type RunFuture = BoxFuture<'static, Response>;

/// Identifies the rollout and attempt of a body: the texts of their keys, each after a byte that JSON cannot contain.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct RunKey(Arc<[u8]>);

impl RunKey {
    /// Returns the key of a body, or `None` if the body names no rollout.
    pub(crate) fn of(body: &RawObject) -> Option<Self> {
        let keys = ["_ng_rollout_id", "_ng_task_index", "_ng_rollout_index"];
        let mut texts = Vec::with_capacity(64);
        for key in keys {
            texts.push(0);
            texts.extend_from_slice(&body.get(key).unwrap_or_default());
        }
        let known = texts.len() > keys.len();
        texts.push(0);
        texts.extend_from_slice(&body.get("_ng_attempt_index").unwrap_or_default());
        known.then(|| Self(texts.into()))
    }
}

/// Maximum bytes of a call id; a longer one is ignored. Those of this SDK have 32, and a UUID has 36.
const CALL_BYTES_MAX: usize = 64;

/// Who sends a request, and until when it waits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RunCaller<'a> {
    /// The id of the call.
    pub(crate) call: Option<&'a str>,
    /// The time in which it comes back after its connection broke; `None` if it does not say.
    pub(crate) wait: Option<Duration>,
    pub(crate) deadline: Instant,
}

/// Runs requests that are sent again as one episode. Cheap to clone; clones share the episodes in progress.
#[derive(Clone, Debug)]
pub(crate) struct RunDeduplicator {
    shared: Arc<SharedRuns>,
}

#[derive(Debug)]
struct SharedRuns {
    grace: Duration,
    /// Cancelled when no caller can come back.
    draining: CancelToken,
    table: Mutex<RunTable>,
}

#[derive(Debug, Default)]
struct RunTable {
    /// A key can have several episodes: of different bodies, and of callers who are connected at the same time. The listener bounds the number
    /// of callers.
    episodes: HashMap<RunKey, Vec<Arc<InFlightRun>>>,
    /// The tasks that poll episodes without callers; dropping the table ends them.
    abandoned: JoinSet<()>,
}

#[derive(Debug)]
struct InFlightRun {
    body: RawObject,
    /// The id of the call that began the episode.
    call: Option<Box<str>>,
    deadline: Instant,
    /// Callers and tasks that poll the episode hold it; the episode ends when nothing holds it.
    run: WeakShared<RunFuture>,
    /// The number of connected callers; changed only under the lock of the table.
    callers: AtomicUsize,
    /// Fires when a response has been delivered. Created when somebody waits for that, or at the end.
    delivered: OnceLock<CancelToken>,
}

impl InFlightRun {
    fn delivered(&self) -> &CancelToken {
        self.delivered.get_or_init(CancelToken::new)
    }

    fn is_abandoned(&self) -> bool {
        self.callers.load(Relaxed) == 0
    }
}

impl RunDeduplicator {
    /// Creates a deduplicator that keeps an episode without callers for `grace`.
    pub(crate) fn new(grace: Duration) -> Self {
        Self { shared: Arc::new(SharedRuns { grace, draining: CancelToken::new(), table: Mutex::default() }) }
    }

    /// Returns a deduplicator without episodes that keeps none without callers once `draining` is cancelled.
    pub(crate) fn until(&self, draining: CancelToken) -> Self {
        let grace = self.shared.grace;
        Self { shared: Arc::new(SharedRuns { grace, draining, table: Mutex::default() }) }
    }

    /// Returns the response to `body`, from an episode in progress that the call joins, or from the episode that `start` begins: at this
    /// call, not at the first poll. The future of `start` continues after this call if the caller disconnects.
    pub(crate) fn run<Fut>(
        &self,
        key: RunKey,
        body: &RawObject,
        caller: RunCaller<'_>,
        start: impl FnOnce() -> Fut,
    ) -> impl Future<Output = Response> + Send
    where
        Fut: Future<Output = Response> + Send + 'static,
    {
        let RunCaller { call, wait, deadline } = caller;
        let grace = wait.map_or(self.shared.grace, |wait| wait.min(self.shared.grace));
        let (episode, run) = {
            let mut table = self.shared.table.lock();
            let known = table.episodes.entry(key.clone()).or_default();
            let call = call.filter(|call| call.len() <= CALL_BYTES_MAX);
            let first = |joins: &dyn Fn(&InFlightRun) -> bool| {
                let mut equal = known.iter().filter(|episode| joins(episode) && episode.body == *body);
                equal.find_map(|episode| Some((Arc::clone(episode), episode.run.upgrade()?)))
            };
            // First by the id: another abandoned episode is that of a caller who may still come back.
            let joined = call.and_then(|call| first(&|episode| episode.call.as_deref() == Some(call)));
            let joined = joined.or_else(|| first(&InFlightRun::is_abandoned)).unwrap_or_else(|| {
                // A panic must not make the shared response unusable for callers that join.
                let run = AssertUnwindSafe(start()).catch_unwind().map(|answer| {
                    answer.unwrap_or_else(|_| Response::from_error(&Error::internal("the episode panicked")))
                });
                let run = run.boxed().shared();
                let episode = Arc::new(InFlightRun {
                    body: body.clone(),
                    call: call.map(Box::from),
                    deadline,
                    run: run.downgrade().expect("a shared future that was never polled has a value to come"),
                    callers: AtomicUsize::new(0),
                    delivered: OnceLock::new(),
                });
                if known.is_empty() {
                    // Nearly all have one; a vector of its own accord has room for four.
                    known.reserve_exact(1);
                }
                known.push(Arc::clone(&episode));
                (episode, run)
            });
            joined.0.callers.fetch_add(1, Relaxed);
            joined
        };
        let mut caller = Waiter { runs: self, key, episode, run: Some(run), grace };
        // The future holds nothing else, because every rollout in flight waits in it.
        async move {
            // Not a clone of the future: the last one that is held gives its response away, and others copy it.
            let answer = caller.run.as_mut().expect("only `answered` and `drop` take it").await;
            caller.answered();
            answer
        }
    }

    /// Returns the time that an episode without callers runs on.
    pub(crate) fn grace(&self) -> Duration {
        self.shared.grace
    }

    /// Returns the number of episodes in progress.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.shared.table.lock().episodes.values().map(Vec::len).sum()
    }
}

impl RunTable {
    fn forget(&mut self, key: &RunKey, episode: &Arc<InFlightRun>) {
        if let Entry::Occupied(mut known) = self.episodes.entry(key.clone()) {
            known.get_mut().retain(|known| !Arc::ptr_eq(known, episode));
            if known.get().is_empty() {
                known.remove();
            }
        }
    }
}

/// A caller that waits for an episode. A drop before the response means that the caller has disconnected.
struct Waiter<'a> {
    runs: &'a RunDeduplicator,
    key: RunKey,
    episode: Arc<InFlightRun>,
    run: Option<Shared<RunFuture>>,
    /// The time in which the caller may come back.
    grace: Duration,
}

impl Waiter<'_> {
    fn answered(&mut self) {
        self.run = None;
        self.episode.delivered().cancel();
        self.runs.shared.table.lock().forget(&self.key, &self.episode);
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        let run = self.run.take();
        // Counted and moved to a task under one lock, so that no resent request intervenes.
        let mut table = self.runs.shared.table.lock();
        let last = self.episode.callers.fetch_sub(1, Relaxed) == 1;
        while table.abandoned.try_join_next().is_some() {}
        let Some(run) = run.filter(|_| last && !self.episode.delivered().is_cancelled()) else { return };
        let until = (Instant::now() + self.grace).min(self.episode.deadline);
        let draining = &self.runs.shared.draining;
        if until > Instant::now()
            && !draining.is_cancelled()
            && table.abandoned.len() < ABANDONED_MAX
            && let Ok(runtime) = Handle::try_current()
        {
            let runs = Arc::downgrade(&self.runs.shared);
            let ended = draining.clone();
            let driver = drive_abandoned(runs, self.key.clone(), Arc::clone(&self.episode), run, until, ended);
            table.abandoned.spawn_on(driver.boxed(), &runtime);
            return;
        }
        table.forget(&self.key, &self.episode);
        drop(table);
        drop(run);
    }
}

/// Polls an episode without callers until `until` or `draining`, and keeps its response for a resent request.
async fn drive_abandoned(
    runs: std::sync::Weak<SharedRuns>,
    key: RunKey,
    episode: Arc<InFlightRun>,
    run: Shared<RunFuture>,
    until: Instant,
    draining: CancelToken,
) {
    let driven = async {
        let answer = run.clone().await;
        // The shared future keeps its response as long as `run` is held.
        drop(answer);
        std::future::pending::<()>().await;
    };
    tokio::select! {
        biased;
        () = episode.delivered().cancelled() => return,
        () = draining.cancelled() => {}
        () = tokio::time::sleep_until(until) => {}
        () = driven => {}
    }
    let Some(runs) = runs.upgrade() else { return };
    // A caller that has joined meanwhile now polls the episode and removes it.
    let mut table = runs.table.lock();
    if episode.is_abandoned() {
        tracing::debug!(?key, "episode dropped: no caller came back within the grace period");
        table.forget(&key, &episode);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// An episode that takes `seconds`, and counts how often it began, ended, and was dropped before its end.
    #[derive(Clone, Default)]
    struct Counts {
        begun: Arc<AtomicUsize>,
        ended: Arc<AtomicUsize>,
        dropped: Arc<AtomicUsize>,
    }

    struct Unfinished(Counts, bool);

    impl Drop for Unfinished {
        fn drop(&mut self) {
            if !self.1 {
                self.0.dropped.fetch_add(1, Ordering::SeqCst);
            }
        }
    }

    impl Counts {
        fn episode(&self, seconds: u64) -> impl Future<Output = Response> + Send + use<> {
            let number = self.begun.fetch_add(1, Ordering::SeqCst);
            let counts = self.clone();
            async move {
                let mut guard = Unfinished(counts.clone(), false);
                tokio::time::sleep(Duration::from_secs(seconds)).await;
                guard.1 = true;
                counts.ended.fetch_add(1, Ordering::SeqCst);
                Response::json(format!("{number}"))
            }
        }

        fn get(&self) -> (usize, usize, usize) {
            let load = |count: &AtomicUsize| count.load(Ordering::SeqCst);
            (load(&self.begun), load(&self.ended), load(&self.dropped))
        }
    }

    const ROW: &str = r#"{"_ng_task_index":3,"_ng_rollout_index":0,"x":1}"#;

    async fn call(runs: &RunDeduplicator, counts: &Counts, row: &str, seconds: u64) -> String {
        call_of(None, runs, counts, row, seconds).await
    }

    /// Calls with a call id.
    async fn call_of(id: Option<&str>, runs: &RunDeduplicator, counts: &Counts, row: &str, seconds: u64) -> String {
        call_by((id, None), runs, counts, row, seconds).await
    }

    /// Calls with a call id, as a caller that comes back within a time.
    async fn call_by(
        (id, wait): (Option<&str>, Option<Duration>),
        runs: &RunDeduplicator,
        counts: &Counts,
        row: &str,
        seconds: u64,
    ) -> String {
        let body = RawObject::parse(row.to_owned()).unwrap();
        let key = RunKey::of(&body).unwrap();
        let deadline = Instant::now() + Duration::from_secs(600);
        let caller = RunCaller { call: id, wait, deadline };
        let answer = runs.run(key, &body, caller, || counts.episode(seconds)).await;
        String::from_utf8(answer.message.head.to_bytes().to_vec()).unwrap()
    }

    /// Simulates a caller that disconnects after `seconds`.
    async fn leave_after(seconds: u64, runs: &RunDeduplicator, counts: &Counts, takes: u64) {
        leave_of(None, seconds, runs, counts, takes).await;
    }

    async fn leave_of(id: Option<&str>, seconds: u64, runs: &RunDeduplicator, counts: &Counts, takes: u64) {
        let limit = Duration::from_secs(seconds);
        tokio::time::timeout(limit, call_of(id, runs, counts, ROW, takes)).await.unwrap_err();
    }

    #[tokio::test(start_paused = true)]
    async fn equal_calls_of_connected_callers_are_an_episode_each_unless_they_have_one_call_id() {
        let long = "x".repeat(CALL_BYTES_MAX + 1);
        let table = [
            (None, None, 2),
            (None, Some("a"), 2),
            (Some("a"), None, 2),
            (Some("a"), Some("b"), 2),
            (Some(&*long), Some(&*long), 2),
            (Some("a"), Some("a"), 1),
        ];
        for (first, second, episodes) in table {
            let (runs, counts) = (RunDeduplicator::new(DEFAULT_STOP_TIMEOUT), Counts::default());
            let both = tokio::join!(call_of(first, &runs, &counts, ROW, 5), call_of(second, &runs, &counts, ROW, 5));
            let second_episode = (episodes - 1).to_string();
            assert_eq!(
                (both, counts.get()),
                (("0".into(), second_episode), (episodes, episodes, 0)),
                "{first:?} {second:?}"
            );
            assert_eq!((runs.len(), runs.shared.table.lock().episodes.len()), (0, 0));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_episode_without_callers_is_joined_whatever_the_call_id() {
        for (first, second) in [(None, Some("a")), (Some("a"), None), (Some("a"), Some("b")), (Some("a"), Some("a"))] {
            let (runs, counts) = (RunDeduplicator::new(DEFAULT_STOP_TIMEOUT), Counts::default());
            leave_of(first, 2, &runs, &counts, 20).await;
            assert_eq!(call_of(second, &runs, &counts, ROW, 20).await, "0", "{first:?} {second:?}");
            assert_eq!((counts.get(), runs.len()), ((1, 1, 0), 0));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn two_callers_who_lost_their_connections_get_their_two_episodes_back() {
        let (runs, counts) = (RunDeduplicator::new(DEFAULT_STOP_TIMEOUT), Counts::default());
        tokio::join!(leave_after(2, &runs, &counts, 20), leave_of(Some("b"), 3, &runs, &counts, 20));
        assert_eq!(runs.len(), 2);
        // The one with an id gets its own, although the other one is free too.
        let both = tokio::join!(call_of(Some("b"), &runs, &counts, ROW, 20), call(&runs, &counts, ROW, 20));
        assert_eq!((both, counts.get()), (("1".into(), "0".into()), (2, 2, 0)));
        assert_eq!(runs.len(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_caller_who_joins_a_free_episode_leaves_none_to_the_next() {
        let (runs, counts) = (RunDeduplicator::new(DEFAULT_STOP_TIMEOUT), Counts::default());
        leave_after(2, &runs, &counts, 20).await;
        let both = tokio::join!(call(&runs, &counts, ROW, 20), call(&runs, &counts, ROW, 20));
        assert_eq!((both, counts.get()), (("0".into(), "1".into()), (2, 2, 0)));
        assert_eq!(runs.len(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_replay_within_the_grace_joins_the_running_episode() {
        let (runs, counts) = (RunDeduplicator::new(DEFAULT_STOP_TIMEOUT), Counts::default());
        leave_after(2, &runs, &counts, 20).await;
        tokio::time::sleep(Duration::from_secs(3)).await;
        let began = Instant::now();
        assert_eq!(call(&runs, &counts, ROW, 20).await, "0");
        assert_eq!((began.elapsed().as_secs(), counts.get()), (15, (1, 1, 0)));
        assert_eq!(runs.len(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_replay_within_the_grace_gets_an_answer_that_nobody_took() {
        let (runs, counts) = (RunDeduplicator::new(DEFAULT_STOP_TIMEOUT), Counts::default());
        leave_after(2, &runs, &counts, 5).await;
        tokio::time::sleep(Duration::from_secs(20)).await;
        assert_eq!(counts.get(), (1, 1, 0));
        assert_eq!(call(&runs, &counts, ROW, 5).await, "0");
        assert_eq!(runs.len(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn an_episode_without_caller_is_dropped_when_the_grace_is_over() {
        let (runs, counts) = (RunDeduplicator::new(DEFAULT_STOP_TIMEOUT), Counts::default());
        leave_after(2, &runs, &counts, 100).await;
        tokio::time::sleep(Duration::from_secs(29)).await;
        assert_eq!((counts.get(), runs.len()), ((1, 0, 0), 1));
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert_eq!((counts.get(), runs.len()), ((1, 0, 1), 0));
        assert_eq!(call(&runs, &counts, ROW, 1).await, "1");
    }

    #[tokio::test(start_paused = true)]
    async fn a_caller_states_the_time_in_which_it_comes_back() {
        let wait = |ms| (Some("a"), Some(Duration::from_millis(ms)));
        let leave = async |by, runs: &RunDeduplicator, counts: &Counts| {
            tokio::time::timeout(Duration::from_secs(2), call_by(by, runs, counts, ROW, 20)).await.unwrap_err();
        };
        let (runs, counts) = (RunDeduplicator::new(DEFAULT_STOP_TIMEOUT), Counts::default());
        leave(wait(1_500), &runs, &counts).await;
        tokio::time::sleep(Duration::from_millis(1_400)).await;
        leave(wait(1_500), &runs, &counts).await;
        assert_eq!((counts.get(), runs.len()), ((1, 0, 0), 1), "it came back in time");
        tokio::time::sleep(Duration::from_millis(1_600)).await;
        assert_eq!((counts.get(), runs.len()), ((1, 0, 1), 0));
        leave(wait(0), &runs, &counts).await;
        assert_eq!((counts.get(), runs.len()), ((2, 0, 2), 0), "it does not come back");
        // The grace of the configuration is the most.
        let (runs, counts) = (RunDeduplicator::new(Duration::from_secs(1)), Counts::default());
        leave(wait(60_000), &runs, &counts).await;
        tokio::time::sleep(Duration::from_millis(1_100)).await;
        assert_eq!(counts.get(), (1, 0, 1));
    }

    #[tokio::test(start_paused = true)]
    async fn an_episode_without_caller_is_dropped_when_no_caller_can_come_back() {
        let draining = CancelToken::new();
        let (runs, counts) = (RunDeduplicator::new(DEFAULT_STOP_TIMEOUT).until(draining.clone()), Counts::default());
        leave_after(2, &runs, &counts, 100).await;
        assert_eq!((counts.get(), runs.len()), ((1, 0, 0), 1));
        draining.cancel();
        tokio::time::sleep(Duration::from_millis(1)).await;
        assert_eq!((counts.get(), runs.len()), ((1, 0, 1), 0));
        leave_after(2, &runs, &counts, 100).await;
        assert_eq!((counts.get(), runs.len()), ((2, 0, 2), 0));
    }

    #[tokio::test(start_paused = true)]
    async fn a_caller_who_came_back_outlives_the_grace_and_may_leave_again() {
        let (runs, counts) = (RunDeduplicator::new(DEFAULT_STOP_TIMEOUT), Counts::default());
        leave_after(2, &runs, &counts, 100).await;
        tokio::time::sleep(Duration::from_secs(20)).await;
        leave_after(40, &runs, &counts, 100).await;
        assert_eq!((counts.get(), runs.len()), ((1, 0, 0), 1));
        tokio::time::sleep(Duration::from_secs(20)).await;
        assert_eq!(call(&runs, &counts, ROW, 100).await, "0");
        assert_eq!(counts.get(), (1, 1, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn a_delivered_answer_is_forgotten_at_once() {
        let (runs, counts) = (RunDeduplicator::new(DEFAULT_STOP_TIMEOUT), Counts::default());
        assert_eq!(call(&runs, &counts, ROW, 5).await, "0");
        assert_eq!(call(&runs, &counts, ROW, 5).await, "1");
        leave_after(1, &runs, &counts, 5).await;
        assert_eq!(call(&runs, &counts, ROW, 5).await, "2");
        assert_eq!(call(&runs, &counts, ROW, 5).await, "3");
        assert_eq!(runs.shared.table.lock().episodes.len(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn other_bodies_and_other_attempts_are_other_episodes() {
        let (runs, counts) = (RunDeduplicator::new(DEFAULT_STOP_TIMEOUT), Counts::default());
        let other = r#"{"_ng_task_index":3,"_ng_rollout_index":0,"x":2}"#;
        let later = r#"{"_ng_task_index":3,"_ng_rollout_index":0,"x":1,"_ng_attempt_index":1}"#;
        let three =
            tokio::join!(call(&runs, &counts, ROW, 5), call(&runs, &counts, other, 5), call(&runs, &counts, later, 5));
        assert_eq!(three, ("0".into(), "1".into(), "2".into()));
    }

    #[tokio::test(start_paused = true)]
    async fn without_grace_the_episode_leaves_with_its_caller() {
        let (runs, counts) = (RunDeduplicator::new(Duration::ZERO), Counts::default());
        leave_after(2, &runs, &counts, 100).await;
        assert_eq!((counts.get(), runs.len()), ((1, 0, 1), 0));
    }

    #[tokio::test(start_paused = true)]
    async fn dropping_the_table_ends_what_it_kept() {
        let (runs, counts) = (RunDeduplicator::new(DEFAULT_STOP_TIMEOUT), Counts::default());
        leave_after(2, &runs, &counts, 100).await;
        drop(runs);
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(counts.get(), (1, 0, 1));
    }

    #[test]
    fn a_body_without_ids_is_nobody_s_replay() {
        assert_eq!(RunKey::of(&RawObject::parse(r#"{"x":1}"#).unwrap()), None);
        assert!(RunKey::of(&RawObject::parse(r#"{"_ng_rollout_id":"a"}"#).unwrap()).is_some());
    }
}

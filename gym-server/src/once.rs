//! `/run` once per rollout, attempt and body.
//!
//! Python clients send a POST again, blindly, when a connection breaks. Without this, a broken connection would cost a second
//! episode, with a second set of side effects. So an episode whose caller vanished before the answer lives on for a grace, and
//! the same request within it joins it. An answer that was delivered is forgotten at once: a second collection of the same
//! rows is never served the first one's rollouts.
//!
//! The episode is driven by whoever waits for it. Only when nobody does, a task drives it until the grace is over; then it is
//! dropped, which cancels what it called.

use std::collections::HashMap;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::future::{BoxFuture, Shared, WeakShared};
use gym_core::{Error, RawObject, Response};
use tokio::runtime::Handle;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// How long an unanswered episode waits for its caller to come back. NeMo Gym's clients come back after half a second; a
/// restarted load balancer or a flapping link takes longer.
pub(crate) const DEFAULT_GRACE: Duration = Duration::from_secs(30);

/// Episodes that live on without a caller; beyond it one is dropped with its caller. As many as a server has in its queue.
const ABANDONED_MAX: usize = 16_384;

type Run = BoxFuture<'static, Response>;

/// Which rollout and attempt a body is for: the texts of the keys that name them, each behind a byte that no JSON has.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Identity(Arc<[u8]>);

impl Identity {
    /// The body's; `None` when it does not say for which rollout it is.
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

/// The episodes under way. Cheap to clone; clones share them.
#[derive(Clone, Debug)]
pub(crate) struct Once {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    grace: Duration,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    /// Several entries of one identity: equal ids over different bodies are different episodes.
    episodes: HashMap<Identity, Vec<Arc<Episode>>>,
    /// The tasks that drive abandoned episodes; dropping the table ends them.
    keepers: JoinSet<()>,
}

#[derive(Debug)]
struct Episode {
    body: Bytes,
    deadline: Instant,
    /// Who drives it holds it; once nobody does, it is gone.
    run: WeakShared<Run>,
    callers: Mutex<usize>,
    /// Fires when an answer was delivered.
    delivered: CancellationToken,
}

impl Once {
    /// No episodes yet; an abandoned one waits `grace` for its caller.
    pub(crate) fn new(grace: Duration) -> Self {
        Self { inner: Arc::new(Inner { grace, table: Mutex::default() }) }
    }

    /// The answer to `body`: of the episode that is under way for it, or of the one that `start` begins. `start`'s future
    /// must not depend on this caller's staying.
    pub(crate) async fn run<Fut>(
        &self,
        identity: Identity,
        body: &Bytes,
        deadline: Instant,
        start: impl FnOnce() -> Fut,
    ) -> Response
    where
        Fut: Future<Output = Response> + Send + 'static,
    {
        let (episode, run) = {
            let mut table = lock(&self.inner.table);
            let known = table.episodes.entry(identity.clone()).or_default();
            let joined = known
                .iter()
                .filter(|episode| episode.body == *body)
                .find_map(|episode| Some((Arc::clone(episode), episode.run.upgrade()?)));
            let joined = joined.unwrap_or_else(|| {
                // A panic must not poison the answer for whoever joins.
                let run = AssertUnwindSafe(start()).catch_unwind().map(|answer| {
                    answer.unwrap_or_else(|_| Response::from_error(&Error::internal("the episode panicked")))
                });
                let run = run.boxed().shared();
                let episode = Arc::new(Episode {
                    body: body.clone(),
                    deadline,
                    run: run.downgrade().expect("a shared future that was never polled has a value to come"),
                    callers: Mutex::new(0),
                    delivered: CancellationToken::new(),
                });
                known.push(Arc::clone(&episode));
                (episode, run)
            });
            *lock(&joined.0.callers) += 1;
            joined
        };
        let mut caller = Caller { once: self, identity, episode, run: Some(run.clone()) };
        let answer = run.await;
        caller.answered();
        answer
    }

    /// Episodes under way, for tests and health.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        lock(&self.inner.table).episodes.values().map(Vec::len).sum()
    }
}

impl Table {
    fn forget(&mut self, identity: &Identity, episode: &Arc<Episode>) {
        if let Some(known) = self.episodes.get_mut(identity) {
            known.retain(|known| !Arc::ptr_eq(known, episode));
            if known.is_empty() {
                self.episodes.remove(identity);
            }
        }
    }
}

/// One who waits for an episode. Dropped before the answer, it has vanished.
struct Caller<'a> {
    once: &'a Once,
    identity: Identity,
    episode: Arc<Episode>,
    run: Option<Shared<Run>>,
}

impl Caller<'_> {
    fn answered(&mut self) {
        self.run = None;
        self.episode.delivered.cancel();
        lock(&self.once.inner.table).forget(&self.identity, &self.episode);
    }
}

impl Drop for Caller<'_> {
    fn drop(&mut self) {
        let run = self.run.take();
        // Counted and kept under one lock, so that a replay cannot come between.
        let mut table = lock(&self.once.inner.table);
        let last = {
            let mut callers = lock(&self.episode.callers);
            *callers -= 1;
            *callers == 0
        };
        while table.keepers.try_join_next().is_some() {}
        let Some(run) = run.filter(|_| last && !self.episode.delivered.is_cancelled()) else { return };
        let until = (Instant::now() + self.once.inner.grace).min(self.episode.deadline);
        if until > Instant::now()
            && table.keepers.len() < ABANDONED_MAX
            && let Ok(runtime) = Handle::try_current()
        {
            let once = Arc::downgrade(&self.once.inner);
            let keeper = keep(once, self.identity.clone(), Arc::clone(&self.episode), run, until);
            table.keepers.spawn_on(keeper, &runtime);
            return;
        }
        table.forget(&self.identity, &self.episode);
        drop(table);
        drop(run);
    }
}

/// Drives an episode without a caller until `until`, and holds its answer for whoever comes back.
async fn keep(
    once: std::sync::Weak<Inner>,
    identity: Identity,
    episode: Arc<Episode>,
    run: Shared<Run>,
    until: Instant,
) {
    let driven = async {
        let answer = run.clone().await;
        // The shared future keeps its answer as long as `run` is held.
        drop(answer);
        std::future::pending::<()>().await;
    };
    tokio::select! {
        biased;
        () = episode.delivered.cancelled() => return,
        () = tokio::time::sleep_until(until) => {}
        () = driven => {}
    }
    let Some(once) = once.upgrade() else { return };
    // A caller who came back meanwhile drives it from here on, and forgets it.
    let mut table = lock(&once.table);
    if *lock(&episode.callers) == 0 {
        tracing::debug!(?identity, "an abandoned episode was dropped at the end of its grace");
        table.forget(&identity, &episode);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// An episode that takes `seconds`, and counts how often it began, ended and was dropped unfinished.
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

    async fn call(once: &Once, counts: &Counts, row: &str, seconds: u64) -> String {
        let body = RawObject::parse(row.to_owned()).unwrap();
        let identity = Identity::of(&body).unwrap();
        let deadline = Instant::now() + Duration::from_secs(600);
        let answer = once.run(identity, body.text(), deadline, || counts.episode(seconds)).await;
        String::from_utf8(answer.message.head.to_bytes().to_vec()).unwrap()
    }

    /// A caller who leaves after `seconds`.
    async fn vanish_after(seconds: u64, once: &Once, counts: &Counts, takes: u64) {
        let patience = Duration::from_secs(seconds);
        tokio::time::timeout(patience, call(once, counts, ROW, takes)).await.unwrap_err();
    }

    #[tokio::test(start_paused = true)]
    async fn equal_calls_at_once_are_one_episode() {
        let (once, counts) = (Once::new(DEFAULT_GRACE), Counts::default());
        let both = tokio::join!(call(&once, &counts, ROW, 5), call(&once, &counts, ROW, 5));
        assert_eq!((both, counts.get()), (("0".into(), "0".into()), (1, 1, 0)));
        assert_eq!(once.len(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_replay_within_the_grace_joins_the_running_episode() {
        let (once, counts) = (Once::new(DEFAULT_GRACE), Counts::default());
        vanish_after(2, &once, &counts, 20).await;
        tokio::time::sleep(Duration::from_secs(3)).await;
        let began = Instant::now();
        assert_eq!(call(&once, &counts, ROW, 20).await, "0");
        assert_eq!((began.elapsed().as_secs(), counts.get()), (15, (1, 1, 0)));
        assert_eq!(once.len(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_replay_within_the_grace_gets_an_answer_that_nobody_took() {
        let (once, counts) = (Once::new(DEFAULT_GRACE), Counts::default());
        vanish_after(2, &once, &counts, 5).await;
        tokio::time::sleep(Duration::from_secs(20)).await;
        assert_eq!(counts.get(), (1, 1, 0));
        assert_eq!(call(&once, &counts, ROW, 5).await, "0");
        assert_eq!(once.len(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn an_episode_without_caller_is_dropped_when_the_grace_is_over() {
        let (once, counts) = (Once::new(DEFAULT_GRACE), Counts::default());
        vanish_after(2, &once, &counts, 100).await;
        tokio::time::sleep(Duration::from_secs(29)).await;
        assert_eq!((counts.get(), once.len()), ((1, 0, 0), 1));
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert_eq!((counts.get(), once.len()), ((1, 0, 1), 0));
        assert_eq!(call(&once, &counts, ROW, 1).await, "1");
    }

    #[tokio::test(start_paused = true)]
    async fn a_caller_who_came_back_outlives_the_grace_and_may_leave_again() {
        let (once, counts) = (Once::new(DEFAULT_GRACE), Counts::default());
        vanish_after(2, &once, &counts, 100).await;
        tokio::time::sleep(Duration::from_secs(20)).await;
        vanish_after(40, &once, &counts, 100).await;
        assert_eq!((counts.get(), once.len()), ((1, 0, 0), 1));
        tokio::time::sleep(Duration::from_secs(20)).await;
        assert_eq!(call(&once, &counts, ROW, 100).await, "0");
        assert_eq!(counts.get(), (1, 1, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn a_delivered_answer_is_forgotten_at_once() {
        let (once, counts) = (Once::new(DEFAULT_GRACE), Counts::default());
        assert_eq!(call(&once, &counts, ROW, 5).await, "0");
        assert_eq!(call(&once, &counts, ROW, 5).await, "1");
        vanish_after(1, &once, &counts, 5).await;
        assert_eq!(call(&once, &counts, ROW, 5).await, "2");
        assert_eq!(call(&once, &counts, ROW, 5).await, "3");
        assert_eq!(lock(&once.inner.table).episodes.len(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn other_bodies_and_other_attempts_are_other_episodes() {
        let (once, counts) = (Once::new(DEFAULT_GRACE), Counts::default());
        let other = r#"{"_ng_task_index":3,"_ng_rollout_index":0,"x":2}"#;
        let later = r#"{"_ng_task_index":3,"_ng_rollout_index":0,"x":1,"_ng_attempt_index":1}"#;
        let three =
            tokio::join!(call(&once, &counts, ROW, 5), call(&once, &counts, other, 5), call(&once, &counts, later, 5));
        assert_eq!(three, ("0".into(), "1".into(), "2".into()));
    }

    #[tokio::test(start_paused = true)]
    async fn without_grace_the_episode_leaves_with_its_caller() {
        let (once, counts) = (Once::new(Duration::ZERO), Counts::default());
        vanish_after(2, &once, &counts, 100).await;
        assert_eq!((counts.get(), once.len()), ((1, 0, 1), 0));
    }

    #[tokio::test(start_paused = true)]
    async fn dropping_the_table_ends_what_it_kept() {
        let (once, counts) = (Once::new(DEFAULT_GRACE), Counts::default());
        vanish_after(2, &once, &counts, 100).await;
        drop(once);
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(counts.get(), (1, 0, 1));
    }

    #[test]
    fn a_body_without_ids_is_nobody_s_replay() {
        assert_eq!(Identity::of(&RawObject::parse(r#"{"x":1}"#).unwrap()), None);
        assert!(Identity::of(&RawObject::parse(r#"{"_ng_rollout_id":"a"}"#).unwrap()).is_some());
    }
}

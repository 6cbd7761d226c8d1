//! The engines of a `vllm_model`: a call goes to the engine whose prefix cache has its prompt, unless that engine is overloaded or
//! fails.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use gym_core::registry::{AffinityCounts, AffinityKey, Balance, Load, Picker};
use gym_core::{CallContext, Code, Error, RawObject, Result, SessionId};
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::model::upstream::{EndpointResponse, Upstream};

/// The time for which an engine that rejected a call gets no other, while other engines serve. Then one call at a time tries it.
const REJECTED_FOR: Duration = Duration::from_secs(1);

/// The maximum number of engines that a call leaves because they reject it. If three engines are full, so are most others, and
/// further attempts without a wait would add to their load.
const MOVES_MAX: usize = 2;

/// Engines that serve the same model.
#[derive(Debug)]
pub(super) struct Engines {
    all: Vec<Engine>,
    picker: Picker,
}

#[derive(Debug)]
struct Engine {
    upstream: Upstream,
    in_flight: AtomicUsize,
    /// The time of the last rejection, until a call succeeds.
    rejected: Mutex<Option<Instant>>,
}

impl Engines {
    /// # Errors
    /// `InvalidArgument` if no engine can be chosen.
    pub(super) fn new(upstreams: Vec<Upstream>, balance: Balance) -> Result<Self> {
        if (0..upstreams.len()).all(|index| !balance.chooses(index)) {
            return Err(Error::invalid(
                "`load_balancing_strategy`: each engine of `base_url` has weight 0; give one a weight above 0",
            ));
        }
        let engine = |upstream| Engine { upstream, in_flight: AtomicUsize::new(0), rejected: Mutex::default() };
        Ok(Self { all: upstreams.into_iter().map(engine).collect(), picker: Picker::new(balance) })
    }

    pub(super) fn upstreams(&self) -> impl Iterator<Item = &Upstream> {
        self.all.iter().map(|engine| &engine.upstream)
    }

    /// Returns the decisions so far; `None` with one engine, which leaves nothing to decide.
    pub(super) fn affinity(&self) -> Option<AffinityCounts> {
        self.picker.affinity().filter(|_| self.all.len() > 1)
    }

    /// Sends a request of a session, and returns the response and the engine that sent it. `prompt` is the request with the messages.
    ///
    /// An engine that rejects the call or cannot be reached is left for another one. After [`MOVES_MAX`] of them, the call waits as it
    /// would with one engine.
    pub(super) async fn post(
        &self,
        cx: &CallContext,
        session: &SessionId,
        prompt: &RawObject,
        path: &str,
        body: Bytes,
    ) -> Result<(&Upstream, EndpointResponse)> {
        let mut left = Vec::new();
        loop {
            let index = self.choose(session, prompt, &left);
            let engine = &self.all[index];
            let _in_flight = engine.begin();
            let may_leave = left.len() < MOVES_MAX.min(self.all.len() - 1);
            let result = engine.upstream.post_or_leave(cx, path, body.clone(), may_leave).await;
            match &result {
                Ok(Some(answer)) if answer.status < 400 => *engine.rejected.lock() = None,
                Ok(Some(answer)) if !answer.is_rejection() => {}
                Err(error) if error.code() != Code::Unavailable => {}
                _ => *engine.rejected.lock() = Some(Instant::now()),
            }
            match result? {
                Some(answer) => return Ok((&engine.upstream, answer)),
                None => left.push(index),
            }
        }
    }

    fn choose(&self, session: &SessionId, prompt: &RawObject, left: &[usize]) -> usize {
        if self.all.len() == 1 {
            return 0;
        }
        let pick = |open: &dyn Fn(usize, &Engine) -> bool| {
            let open = self.all.iter().enumerate().filter(|(index, engine)| open(*index, engine));
            let open: Vec<_> =
                open.map(|(index, engine)| Load { index, pending: engine.in_flight.load(Ordering::Relaxed) }).collect();
            let session = AffinityKey::of_session(session.as_str());
            self.picker.pick_for(Some(session), || AffinityKey::of_request(prompt), &open)
        };
        let served = pick(&|index, engine| !left.contains(&index) && engine.is_open());
        // If all engines reject calls, each of them is as good as the others.
        let chosen = served.or_else(|| pick(&|index, _| !left.contains(&index))).or_else(|| pick(&|_, _| true));
        chosen.expect("one of the engines has a weight")
    }
}

impl Engine {
    fn begin(&self) -> InFlight<'_> {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        InFlight(&self.in_flight)
    }

    /// Returns `true` unless the engine has rejected a call just now. A second later, one call at a time tries it again.
    fn is_open(&self) -> bool {
        let rejected = *self.rejected.lock();
        rejected.is_none_or(|at| at.elapsed() >= REJECTED_FOR && self.in_flight.load(Ordering::Relaxed) == 0)
    }
}

/// A call in flight, until it is dropped.
struct InFlight<'a>(&'a AtomicUsize);

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

//! The engines of a `vllm_model`: a call goes to the engine whose prefix cache has its prompt, unless that engine is overloaded or
//! fails.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use gym_core::registry::{AffinityCounts, AffinityKey, Balance, Load, Picker};
use gym_core::{CallContext, RawObject, Result, SessionId};
use tokio::time::Instant;

use crate::model::upstream::{EndpointResponse, Upstream};

/// The time for which an engine that has failed gets no call, while other engines serve. Then one call at a time tries it.
const FAILED_FOR: Duration = Duration::from_secs(1);

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
    /// The time of the last failure, until a call succeeds.
    failed: Mutex<Option<Instant>>,
}

impl Engines {
    pub(super) fn new(upstreams: impl IntoIterator<Item = Upstream>, balance: Balance) -> Self {
        let engine = |upstream| Engine { upstream, in_flight: AtomicUsize::new(0), failed: Mutex::default() };
        Self { all: upstreams.into_iter().map(engine).collect(), picker: Picker::new(balance) }
    }

    pub(super) fn upstreams(&self) -> impl Iterator<Item = &Upstream> {
        self.all.iter().map(|engine| &engine.upstream)
    }

    /// Returns the decisions so far; `None` with one engine, which leaves nothing to decide.
    pub(super) fn affinity(&self) -> Option<AffinityCounts> {
        self.picker.affinity().filter(|_| self.all.len() > 1)
    }

    /// Sends a request of a session. `request` has the prompt. Returns the response and the engine that sent it.
    pub(super) async fn post(
        &self,
        cx: &CallContext,
        session: &SessionId,
        request: &RawObject,
        path: &str,
        body: Bytes,
    ) -> Result<(&Upstream, EndpointResponse)> {
        let mut left = Vec::new();
        while left.len() < MOVES_MAX.min(self.all.len() - 1) {
            let engine = self.choose(session, request, &left);
            let _in_flight = engine.begin();
            match engine.upstream.post_without_wait(cx, path, body.clone()).await {
                Ok(Some(answer)) => {
                    *engine.failed() = None;
                    return Ok((&engine.upstream, answer));
                }
                Ok(None) => {
                    *engine.failed() = Some(Instant::now());
                    left.push(&raw const *engine);
                }
                Err(error) => return Err(error),
            }
        }
        let engine = self.choose(session, request, &left);
        let _in_flight = engine.begin();
        let answer = engine.upstream.post(cx, path, body).await?;
        *engine.failed() = None;
        Ok((&engine.upstream, answer))
    }
}

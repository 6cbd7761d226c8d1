//! Requests to an engine about itself: its models, and whether it serves at the moment.

use std::convert::Infallible;

use std::time::Duration;

use gym_core::server::EndpointState;
use gym_core::{CallContext, Code, RawObject, Result};
use tokio::time::Instant;

use crate::model::upstream::health::EndpointFailure;
use crate::model::upstream::probe::{self, Engine};
use crate::model::upstream::response::EndpointResponse;
use crate::model::upstream::{PROBE_TIMEOUT, UpstreamState};

/// Interval of the requests to an engine whose calls take long.
const ASK_INTERVAL: Duration = Duration::from_secs(10);

/// The routes of a vLLM in development mode with the key of their answer, its meaning, and what ends it.
const STANDSTILLS: [(&str, &str, &str, &str); 2] = [
    ("/is_sleeping", "is_sleeping", "it sleeps", "wake it up with POST /wake_up"),
    ("/is_paused", "is_paused", "it is paused", "continue it with POST /resume"),
];

impl UpstreamState {
    /// Returns what the last list of models told; `None` before the first.
    pub(super) fn engine(&self) -> Option<Engine> {
        self.engine.lock().clone()
    }

    /// Requests the list of models, once.
    pub(super) async fn list(&self, cx: &CallContext) -> Result<EndpointResponse> {
        let answer = self.get(cx, &format!("{}/models", self.place.path)).await?;
        if let Some(engine) = probe::engine(&answer, &self.model) {
            *self.engine.lock() = Some(engine);
        }
        Ok(answer)
    }

    /// Returns `true` if the engine is a vLLM; `None` before a list of models told.
    pub(super) fn is_vllm(&self) -> Option<bool> {
        self.engine().map(|engine| engine.is_vllm())
    }

    /// Returns `true` if an engine that has just answered a call is a vLLM. One without a list of models is none, from now on.
    pub(super) async fn is_vllm_that_answered(&self, cx: &CallContext) -> bool {
        if self.is_vllm().is_none() {
            drop(self.list(cx).await);
        }
        self.engine.lock().get_or_insert_default().is_vllm()
    }

    /// Sends a `GET`, once, to a path outside `/v1`, where vLLM has its own routes.
    pub(super) async fn get_outside_v1(&self, cx: &CallContext, path: &str) -> Result<EndpointResponse> {
        self.get(cx, &super::outside_v1(&self.place.path, path)).await
    }

    async fn get(&self, cx: &CallContext, target: &str) -> Result<EndpointResponse> {
        let mut cx = cx.child();
        cx.deadline = cx.deadline.min(Instant::now() + PROBE_TIMEOUT);
        self.send_once(&cx, target, None).await
    }

    /// Returns why the engine serves no call at the moment, although it accepts them: it does not respond to other requests either, or it is
    /// a vLLM that is paused or sleeps.
    pub(super) async fn standstill(&self, cx: &CallContext) -> Result<(), EndpointFailure> {
        let listed = self.list(cx).await;
        match self.judge_list(&listed) {
            // An endpoint that responds, whatever there is to know about it.
            Ok(()) | Err(EndpointFailure { state: EndpointState::Ready, .. }) => self.paused(cx).await,
            failure => failure,
        }
    }

    /// Returns what a list of models shows.
    pub(super) fn judge_list(&self, listed: &Result<EndpointResponse>) -> Result<(), EndpointFailure> {
        match listed {
            Ok(answer) => probe::judge(answer, self.keys, &self.model),
            Err(error) if error.code() == Code::DeadlineExceeded => {
                let mut failure = self.keys.no_response(error);
                failure.reason = format!("no response to GET /models within {} s", PROBE_TIMEOUT.as_secs());
                Err(failure)
            }
            Err(error) => Err(self.keys.no_response(error)),
        }
    }

    /// Asks a vLLM whether it is paused or sleeps. One that is not in development mode does not have the routes.
    pub(super) async fn paused(&self, cx: &CallContext) -> Result<(), EndpointFailure> {
        if self.is_vllm() != Some(true) {
            return Ok(());
        }
        for (path, key, reason, fix) in STANDSTILLS {
            let answer = self.get_outside_v1(cx, path).await.ok().filter(|answer| answer.status == 200);
            let answer = answer.and_then(|answer| RawObject::parse(answer.body).ok());
            if answer.and_then(|answer| answer.get(key)).is_some_and(|value| value == "true") {
                let (reason, fix) = (reason.to_owned(), fix.to_owned());
                return Err(EndpointFailure { state: EndpointState::Unavailable, reason, fix });
            }
        }
        Ok(())
    }

    /// Asks the engine every ten seconds what it does, once a call has waited for [`UpstreamState::probe_after`]. Runs beside the call, one
    /// at a time for each endpoint.
    pub(super) async fn ask_while_slow(&self, cx: &CallContext, began: Instant) -> Infallible {
        tokio::time::sleep_until(began + self.probe_after).await;
        loop {
            if let Ok(mut asked) = self.asked.try_lock()
                && asked.is_none_or(|asked: Instant| asked.elapsed() >= ASK_INTERVAL)
            {
                let finding = self.standstill(cx).await;
                self.health.found(finding);
                *asked = Some(Instant::now());
            }
            tokio::time::sleep(ASK_INTERVAL).await;
        }
    }
}

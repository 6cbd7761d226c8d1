//! Responses that a vLLM has aborted without saying so (seen with 0.32.0): `/pause` with its default mode and `/sleep` end what runs. Over the
//! Responses API such a response is `completed`; over chat its finish reason is `tool_calls` if it has a whole call by then.
//!
//! Only the engine's counter of aborted requests tells: it is raised before such a response is sent, and not by a client that closes its
//! connection. A call whose engine has aborted requests meanwhile is repeated, whichever they were. `/abort_requests` of vLLM's development
//! mode raises no counter.
//!
//! The engine formats its metrics in 14 ms, so a chat completion is checked only if it may hide an abort. One with token ids does not if it ends
//! with the token with which whole responses of this engine end.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use gym_core::{CallContext, Error, Execution, RawObject, Result};
use tokio::time::Instant;

use crate::model::upstream::UpstreamState;
use crate::model::upstream::response::{Completeness, EndpointResponse};

/// The counter in the metrics of vLLM, and the label of aborted requests.
const COUNTER: &str = "vllm:request_success_total{";
const ABORTED: &str = r#"finished_reason="abort""#;

/// Age up to which a count is the one before a call. Requests that were aborted since then, and before the call, make it repeat.
const FRESH: Duration = Duration::from_secs(2);

/// Minimum time between two requests for the metrics: vLLM formats them within some ten milliseconds, in the process that serves.
const APART: Duration = Duration::from_millis(100);

/// The finish reason over chat that may hide an abort, as JSON.
const HIDES: &str = r#""tool_calls""#;

/// The finish reason of a response that the model ended itself, as JSON.
const ENDED: &str = r#""stop""#;

/// Number of such responses from which the tokens at the end are learned; models have one to three.
const LEARNED_FROM: usize = 64;

/// What is known of the requests that an engine has aborted.
#[derive(Debug, Default)]
pub(super) struct Aborts {
    /// Held while the metrics are requested, once for all calls that wait.
    asking: tokio::sync::Mutex<()>,
    last: Mutex<LastCount>,
    ends: Mutex<Ends>,
}

/// The last request for the metrics.
#[derive(Clone, Copy, Debug, Default)]
struct LastCount {
    began: Option<Instant>,
    ended: Option<Instant>,
    aborted: AbortCount,
}

/// The requests that an engine has aborted; `None` if it does not tell.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct AbortCount(Option<f64>);

/// The ids of the tokens with which the model ended responses, and the number of responses that showed them.
#[derive(Debug, Default)]
struct Ends {
    ids: BTreeSet<u64>,
    learned_from: usize,
}

impl UpstreamState {
    /// Returns the count before a call; `None` if the engine is no vLLM. Over the Responses API it is a new one. Over chat, where few responses
    /// are checked, it may be old: then a call is repeated although its response was whole.
    pub(super) async fn aborts_before(&self, cx: &CallContext, is_chat: bool) -> Result<Option<AbortCount>> {
        if self.engine().is_some_and(|engine| !engine.is_vllm()) {
            return Ok(None);
        }
        let arrived = Instant::now();
        let known = |last: LastCount| {
            let is_new = |ended: Instant| is_chat || ended > arrived || ended.elapsed() <= FRESH;
            last.ended.filter(|ended| is_new(*ended)).map(|_| last.aborted)
        };
        let mut count = known(self.aborts.last());
        if count.is_none() {
            let _asking = self.asking(cx).await?;
            // Another call may have asked while this one waited.
            count = known(self.aborts.last());
            if count.is_none() {
                if self.engine().is_none() {
                    // An engine that cannot be reached fails the call itself.
                    drop(self.list(cx).await);
                }
                count = Some(self.count(cx).await);
            }
        }
        Ok(count.filter(|_| self.engine().is_some_and(|engine| engine.is_vllm())))
    }

    /// Returns whether a response is what it says. One that may hide an abort is compared with the count before its call.
    pub(super) async fn completeness(
        &self,
        cx: &CallContext,
        before: AbortCount,
        answer: &EndpointResponse,
        is_chat: bool,
    ) -> Result<Completeness> {
        if is_chat && !self.aborts.ends().may_hide_abort(answer) {
            return Ok(Completeness::Known);
        }
        let arrived = Instant::now();
        let counted = |last: LastCount| last.began.is_some_and(|began| began > arrived).then_some(last.aborted);
        let after = {
            let _asking = self.asking(cx).await?;
            let last = self.aborts.last();
            match (counted(last), last.began) {
                (Some(after), _) => after,
                (None, began) => {
                    if let Some(began) = began {
                        tokio::time::sleep_until(began + APART).await;
                    }
                    self.count(cx).await
                }
            }
        };
        Ok(match (before.0, after.0) {
            (Some(before), Some(after)) if before.to_bits() == after.to_bits() => Completeness::Known,
            (Some(_), Some(_)) => Completeness::Aborted,
            // Over chat, most aborted responses say so.
            _ if is_chat => Completeness::Known,
            _ => Completeness::Unverified,
        })
    }

    async fn asking(&self, cx: &CallContext) -> Result<tokio::sync::MutexGuard<'_, ()>> {
        cx.bound(Execution::Unknown, async { Ok::<_, Error>(self.aborts.asking.lock().await) }).await
    }

    /// Requests the count of a vLLM, once.
    async fn count(&self, cx: &CallContext) -> AbortCount {
        let began = Some(Instant::now());
        let answer = match self.engine() {
            Some(engine) if engine.is_vllm() => self.get_outside_v1(cx, "/metrics").await.ok(),
            _ => None,
        };
        let answer = answer.filter(|answer| answer.status == 200);
        let aborted = AbortCount(answer.as_ref().and_then(aborted));
        let ended = Some(Instant::now());
        *self.aborts.last.lock().unwrap_or_else(PoisonError::into_inner) = LastCount { began, ended, aborted };
        aborted
    }
}

impl Aborts {
    fn last(&self) -> LastCount {
        *self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ends(&self) -> MutexGuard<'_, Ends> {
        self.ends.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Ends {
    /// Returns `true` for a chat completion with tool calls, unless all of its choices end with a token that ends whole responses. Learns from the
    /// others.
    fn may_hide_abort(&mut self, answer: &EndpointResponse) -> bool {
        let hides = answer.choices_that_end_with(HIDES);
        let hides = hides.map(|choice| last_token(&choice).is_none_or(|end| !self.ids.contains(&end)));
        if hides.fold(false, |any, hides| any | hides) {
            return true;
        }
        if self.learned_from < LEARNED_FROM {
            let ends: Vec<u64> = answer.choices_that_end_with(ENDED).filter_map(|choice| last_token(&choice)).collect();
            self.learned_from += ends.len();
            self.ids.extend(ends);
        }
        false
    }
}

/// Returns the id of the last token of a choice, if it has ids and no stop string ended it.
fn last_token(choice: &RawObject) -> Option<u64> {
    let stopped = choice.get("stop_reason").is_some_and(|reason| reason != "null");
    let ids = choice.get("token_ids").filter(|_| !stopped)?;
    let list = std::str::from_utf8(&ids).ok()?.trim_end().strip_suffix(']')?;
    list.rsplit([',', '[']).next()?.trim().parse().ok()
}

/// Returns the sum of the engine's counters of aborted requests: it has one for each of its ranks.
fn aborted(metrics: &EndpointResponse) -> Option<f64> {
    let text = std::str::from_utf8(&metrics.body).ok()?;
    let lines = text.lines().filter(|line| line.starts_with(COUNTER) && line.contains(ABORTED));
    let counts = lines.filter_map(|line| line.split_once("} ")?.1.split(' ').next()?.parse::<f64>().ok());
    counts.fold(None, |sum, count| Some(sum.unwrap_or(0.0) + count))
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    #[test]
    fn the_aborted_requests_are_the_sum_over_the_ranks() {
        let of = |text: &str| aborted(&EndpointResponse::new(200, None, None, Bytes::copy_from_slice(text.as_bytes())));
        let line = |engine: u8, reason: &str, count: &str| {
            format!(
                "vllm:request_success_total{{engine=\"{engine}\",finished_reason=\"{reason}\",model_name=\"m\"}} {count}\n"
            )
        };
        let text = line(0, "stop", "7.0") + &line(0, "abort", "3.0") + &line(1, "abort", "2.0 1795858516");
        assert_eq!(of(&("# HELP vllm:request_success_total x\n".to_owned() + &text)), Some(5.0));
        assert_eq!(of(&line(0, "stop", "7.0")), None);
        assert_eq!(of(&line(0, "abort", "many")), None);
        assert_eq!(of("<html>"), None);
    }
}

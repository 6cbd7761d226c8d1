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
use std::time::Duration;

use gym_core::{CallContext, Error, Execution, RawObject, Result};
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::model::upstream::UpstreamState;
use crate::model::upstream::response::{Completeness, EndpointResponse};

/// The counter in the metrics of vLLM, and the label of aborted requests.
const COUNTER: &str = "vllm:request_success_total{";
const CREATED: &str = "vllm:request_success_created{";
const ABORTED: &str = r#"finished_reason="abort""#;

/// Limit of the list of models before a call.
const LIST_TIMEOUT: Duration = Duration::from_secs(1);

/// Age up to which a count is the one before a call. Requests that were aborted since then, and before the call, make it repeat.
const FRESH: Duration = Duration::from_secs(2);

/// Minimum time between two requests for the metrics: vLLM formats them within some ten milliseconds, in the process that serves.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// The finish reason over chat that may hide an abort, as JSON.
const HIDES: &str = r#""tool_calls""#;

/// The finish reason of a response that the model ended itself, as JSON.
const ENDED: &str = r#""stop""#;

/// Number of such responses from which the tokens at the end are learned; models have one to three.
const LEARNED_FROM: usize = 64;

/// The state of the count of one engine.
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
    /// The count that it returned.
    result: Option<AbortCount>,
    /// The last count that a request returned.
    known: Option<AbortCount>,
    /// The end of the last request for the list of models that told nothing.
    unlisted: Option<Instant>,
}

/// The requests that an engine has aborted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct AbortCount {
    aborted: f64,
    /// The time at which the counter began, which tells an engine from another one behind the same URL.
    created: f64,
}

/// The knowledge of the engine before a call.
#[derive(Clone, Copy, Debug)]
pub(super) enum Before {
    /// The engine is no vLLM.
    Other,
    /// Nothing, because no list of models has told the engine.
    Unknown,
    /// The count of a vLLM; `None` if it does not tell.
    Count(Option<AbortCount>),
}

/// The ids of the tokens with which the model ended responses, and the number of responses that showed them.
#[derive(Debug, Default)]
struct Ends {
    ids: BTreeSet<u64>,
    learned_from: usize,
}

impl UpstreamState {
    /// Returns what is known before a call. Over the Responses API, a count is a new one. Over chat, where few responses are checked, it may be old:
    /// then a call is repeated although its response was whole. An engine that does not list its models delays a call by at most a second.
    pub(super) async fn before(&self, cx: &CallContext, is_chat: bool) -> Result<Before> {
        let arrived = Instant::now();
        // What another call asked for while this one waited is new enough.
        let is_new = |ended: Instant| ended > arrived || ended.elapsed() <= FRESH;
        let known = |last: LastCount| match self.is_vllm() {
            Some(false) => Some(Before::Other),
            Some(true) if is_chat && last.known.is_some() => Some(Before::Count(last.known)),
            Some(true) => last.ended.filter(|ended| is_new(*ended)).map(|_| Before::Count(last.known)),
            None => last.unlisted.filter(|ended| is_new(*ended)).map(|_| Before::Unknown),
        };
        if let Some(before) = known(self.aborts.last()) {
            return Ok(before);
        }
        let _asking = self.asking(cx, Execution::NotStarted).await?;
        if let Some(before) = known(self.aborts.last()) {
            return Ok(before);
        }
        if self.is_vllm().is_none() {
            let listed = self.list(&cx.child().at_most(LIST_TIMEOUT)).await;
            tracing::debug!(endpoint = self.shown, ok = listed.is_ok(), "the engine was asked for its models");
        }
        Ok(match self.is_vllm() {
            Some(true) => {
                self.count(cx).await;
                Before::Count(self.aborts.last().known)
            }
            Some(false) => Before::Other,
            None => {
                self.aborts.change(|last| last.unlisted = Some(Instant::now()));
                Before::Unknown
            }
        })
    }

    /// Returns whether a response is what it says. One that may hide an abort is compared with what was known before its call.
    pub(super) async fn completeness(
        &self,
        cx: &CallContext,
        before: Before,
        answer: &EndpointResponse,
        is_chat: bool,
    ) -> Result<Completeness> {
        if matches!(before, Before::Other) || (is_chat && !self.aborts.ends.lock().may_hide_abort(answer)) {
            return Ok(Completeness::Known);
        }
        let arrived = Instant::now();
        let _asking = self.asking(cx, Execution::Unknown).await?;
        let before = match before {
            Before::Count(before) => before,
            _ if self.is_vllm_that_answered(cx).await => None,
            _ => return Ok(Completeness::Known),
        };
        let last = self.aborts.last();
        let after = if last.began.is_some_and(|began| began > arrived) {
            last.result
        } else {
            if let Some(began) = last.began {
                tokio::time::sleep_until(began + POLL_INTERVAL).await;
            }
            self.count(cx).await
        };
        Ok(match (before, after) {
            (Some(before), Some(after)) if before == after => Completeness::Known,
            (Some(before), Some(after)) if before.created.to_bits() == after.created.to_bits() => Completeness::Aborted,
            // Of another process, or of none: a restart would have ended the call.
            _ => Completeness::Unverified,
        })
    }

    /// Waits until no other call asks the engine. The lock is held while the engine responds, so that all calls that wait share its answer.
    async fn asking(&self, cx: &CallContext, execution: Execution) -> Result<tokio::sync::MutexGuard<'_, ()>> {
        cx.bound(execution, async { Ok::<_, Error>(self.aborts.asking.lock().await) }).await
    }

    /// Requests the count of a vLLM, once.
    async fn count(&self, cx: &CallContext) -> Option<AbortCount> {
        let began = Instant::now();
        let answer = self.get_outside_v1(cx, "/metrics").await.ok().filter(|answer| answer.status == 200);
        let result = answer.as_ref().and_then(counted);
        self.aborts.change(|last| {
            (last.began, last.ended, last.result) = (Some(began), Some(Instant::now()), result);
            last.known = result.or(last.known);
        });
        result
    }
}

impl Aborts {
    fn last(&self) -> LastCount {
        *self.last.lock()
    }

    fn change(&self, change: impl FnOnce(&mut LastCount)) {
        change(&mut self.last.lock());
    }
}

impl Ends {
    /// Returns `true` for a chat completion with tool calls, unless all of its choices end with a token that ends whole responses. Learns from the
    /// others.
    fn may_hide_abort(&mut self, answer: &EndpointResponse) -> bool {
        let ends = |choice: RawObject| last_token(&choice).is_some_and(|end| self.ids.contains(&end));
        if !answer.choices_that_end_with(HIDES).all(ends) {
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
fn counted(metrics: &EndpointResponse) -> Option<AbortCount> {
    let text = std::str::from_utf8(&metrics.body).ok()?;
    let sum = |name: &str| {
        let lines = text.lines().filter(|line| line.starts_with(name) && line.contains(ABORTED));
        let values = lines.filter_map(|line| line.split_once("} ")?.1.split(' ').next()?.parse::<f64>().ok());
        values.fold(None, |sum, value| Some(sum.unwrap_or(0.0) + value))
    };
    Some(AbortCount { aborted: sum(COUNTER)?, created: sum(CREATED).unwrap_or(0.0) })
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    #[test]
    fn the_aborted_requests_are_the_sum_over_the_ranks() {
        let of = |text: &str| {
            let counted = counted(&EndpointResponse::new(200, None, None, Bytes::copy_from_slice(text.as_bytes())));
            counted.map(|count| (count.aborted, count.created))
        };
        let line = |engine: u8, reason: &str, count: &str| {
            format!(
                "vllm:request_success_total{{engine=\"{engine}\",finished_reason=\"{reason}\",model_name=\"m\"}} {count}\n"
            )
        };
        let text = line(0, "stop", "7.0") + &line(0, "abort", "3.0") + &line(1, "abort", "2.0 1795858516");
        assert_eq!(of(&("# HELP vllm:request_success_total x\n".to_owned() + &text)), Some((5.0, 0.0)));
        let created = line(0, "abort", "17e8").replace("_total", "_created");
        assert_eq!(of(&(line(0, "abort", "3.0") + &created)), Some((3.0, 17e8)));
        assert_eq!(of(&line(0, "stop", "7.0")), None);
        assert_eq!(of(&line(0, "abort", "many")), None);
        assert_eq!(of("<html>"), None);
    }
}

//! Responses that a vLLM has aborted and calls `completed`, as it does over the Responses API (seen with 0.32.0): `/pause` with its default
//! mode and `/sleep` end what runs. Only its counter of aborted requests tells: it is raised before such a response is sent, and not by a
//! client that closes its connection. A call whose engine has aborted requests meanwhile is repeated, whichever they were. `/abort_requests`
//! of vLLM's development mode raises no counter.

use std::time::Duration;

use gym_core::{CallContext, Error, Execution, Result};
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

/// The last request for the metrics.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LastCount {
    began: Option<Instant>,
    ended: Option<Instant>,
    aborted: AbortCount,
}

/// The requests that an engine has aborted; `None` if it does not tell.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct AbortCount(Option<f64>);

impl UpstreamState {
    /// Returns the count before a call over the Responses API; `None` if the engine is no vLLM.
    pub(super) async fn aborts_before(&self, cx: &CallContext) -> Result<Option<AbortCount>> {
        if self.engine().is_some_and(|engine| !engine.is_vllm) {
            return Ok(None);
        }
        let arrived = Instant::now();
        let mut last = self.last_count(cx).await?;
        // What another call asked for while this one waited is new enough.
        let is_new = |ended: Option<Instant>| ended.is_some_and(|ended| ended > arrived || ended.elapsed() <= FRESH);
        if !is_new(last.ended) {
            if self.engine().is_none() {
                // An engine that cannot be reached fails the call itself.
                drop(self.list(cx).await);
            }
            if self.engine().is_some_and(|engine| engine.is_vllm) {
                self.count(cx, &mut last).await;
            } else {
                last.ended = Some(Instant::now());
            }
        }
        Ok(self.engine().filter(|engine| engine.is_vllm).map(|_| last.aborted))
    }

    /// Compares the count after a call with that before it.
    pub(super) async fn completeness(&self, cx: &CallContext, before: AbortCount) -> Result<Completeness> {
        let arrived = Instant::now();
        let mut last = self.last_count(cx).await?;
        if last.began.is_none_or(|began| began <= arrived) {
            if let Some(began) = last.began {
                tokio::time::sleep_until(began + APART).await;
            }
            self.count(cx, &mut last).await;
        }
        Ok(match (before.0, last.aborted.0) {
            (Some(before), Some(after)) if before.to_bits() == after.to_bits() => Completeness::Known,
            (Some(_), Some(_)) => Completeness::Aborted,
            _ => Completeness::Unverified,
        })
    }

    async fn last_count(&self, cx: &CallContext) -> Result<tokio::sync::MutexGuard<'_, LastCount>> {
        cx.bound(Execution::Unknown, async { Ok::<_, Error>(self.aborts.lock().await) }).await
    }

    async fn count(&self, cx: &CallContext, last: &mut LastCount) {
        last.began = Some(Instant::now());
        let answer = self.get_outside_v1(cx, "/metrics").await.ok().filter(|answer| answer.status == 200);
        last.aborted = AbortCount(answer.as_ref().and_then(aborted));
        last.ended = Some(Instant::now());
    }
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

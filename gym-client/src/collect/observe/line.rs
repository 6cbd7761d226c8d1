//! The lines of an events file. Their form is documented at [`CollectOptions::events`](crate::collect::CollectOptions::events).

use std::time::Duration;

use gym_core::rollout::Attempt;
use serde::Serialize;

use crate::collect::run::{RolloutEvent, RolloutEventKind, TokenUsage};

/// Version of the form; a change that breaks readers raises it.
const FORMAT: u32 = 1;

/// The first line of a run.
#[derive(Clone, Debug, Default, Serialize)]
pub(in crate::collect) struct RunStarted {
    pub(in crate::collect) run_id: String,
    pub(in crate::collect) input: String,
    pub(in crate::collect) output: String,
    pub(in crate::collect) resumed: bool,
    pub(in crate::collect) rollouts: u64,
    /// Rollouts that earlier runs completed.
    pub(in crate::collect) already_completed: u64,
    pub(in crate::collect) concurrency: usize,
    pub(in crate::collect) attempts_max: u32,
}

/// The last line of a run.
#[derive(Clone, Debug, Default, Serialize)]
pub(in crate::collect) struct RunEnded {
    /// `exhausted`, `stopped`, `failed_fast` or `error`.
    pub(in crate::collect) end: &'static str,
    pub(in crate::collect) error: Option<String>,
    pub(in crate::collect) rollouts: u64,
    pub(in crate::collect) completed: u64,
    pub(in crate::collect) already_completed: u64,
    pub(in crate::collect) failed: u64,
    /// Rollouts with neither a scored row nor their last failure.
    pub(in crate::collect) incomplete: u64,
    pub(in crate::collect) mean_reward: Option<f64>,
}

#[derive(Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
enum Line<'a> {
    RunStarted {
        time: f64,
        format: u32,
        #[serde(flatten)]
        run: &'a RunStarted,
    },
    Started {
        time: f64,
        #[serde(flatten)]
        of: Of<'a>,
    },
    Finished {
        time: f64,
        #[serde(flatten)]
        of: Of<'a>,
        reward: Option<f64>,
        seconds: f64,
        attempts: u32,
        tokens: Option<TokenUsage>,
        truncated: Option<&'a str>,
        tool_failures: u32,
        phases: Option<&'a str>,
    },
    Failed {
        time: f64,
        #[serde(flatten)]
        of: Of<'a>,
        class: &'a str,
        server: &'a str,
        route: &'a str,
        cause: &'a str,
        seconds: f64,
        retried: bool,
    },
    Unrecorded {
        time: f64,
        #[serde(flatten)]
        of: Of<'a>,
    },
    Dropped {
        time: f64,
        events: u64,
    },
    RunEnded {
        time: f64,
        #[serde(flatten)]
        run: &'a RunEnded,
        events_dropped: u64,
    },
}

/// The attempt, by the numbers of the rows.
#[derive(Serialize)]
struct Of<'a> {
    task_index: u32,
    rollout_index: u32,
    attempt_index: u32,
    agent: &'a str,
}

pub(super) fn run_started(time: Duration, run: &RunStarted, into: &mut Vec<u8>) {
    write(&Line::RunStarted { time: seconds(time), format: FORMAT, run }, into);
}

pub(super) fn run_ended(time: Duration, run: &RunEnded, events_dropped: u64, into: &mut Vec<u8>) {
    write(&Line::RunEnded { time: seconds(time), run, events_dropped }, into);
}

pub(super) fn dropped(time: Duration, events: u64, into: &mut Vec<u8>) {
    write(&Line::Dropped { time: seconds(time), events }, into);
}

pub(super) fn event(event: &RolloutEvent, into: &mut Vec<u8>) {
    let Attempt { key, number } = event.attempt;
    let time = seconds(event.time);
    let (task_index, rollout_index) = (key.task_index, key.rollout_index);
    let of = Of { task_index, rollout_index, attempt_index: number, agent: &event.agent };
    let line = match &event.kind {
        RolloutEventKind::Started => Line::Started { time, of },
        RolloutEventKind::Finished(finished) => Line::Finished {
            time,
            of,
            reward: finished.reward,
            seconds: seconds(finished.duration),
            attempts: number.saturating_add(1),
            tokens: finished.tokens,
            truncated: finished.truncated.as_deref(),
            tool_failures: finished.tool_failures,
            phases: finished.phases.as_deref(),
        },
        RolloutEventKind::Failed(failed) => Line::Failed {
            time,
            of,
            class: failed.class.as_str(),
            server: &failed.server,
            route: &failed.route,
            cause: &failed.cause,
            seconds: seconds(failed.duration),
            retried: failed.retried,
        },
        RolloutEventKind::Unrecorded => Line::Unrecorded { time, of },
    };
    write(&line, into);
}

fn write(line: &Line<'_>, into: &mut Vec<u8>) {
    serde_json::to_writer(&mut *into, line).expect("a line has only texts and numbers");
    into.push(b'\n');
}

/// Returns seconds with at most six decimals.
fn seconds(time: Duration) -> f64 {
    time.as_micros() as f64 / 1e6
}

#[cfg(test)]
mod tests {
    use gym_core::rollout::{FailureClass, TaskKey};
    use serde_json::{Value, json};

    use super::*;
    use crate::collect::run::{FailedAttempt, FinishedAttempt};

    #[test]
    fn each_event_is_one_line_with_its_rollout_and_its_time() {
        let attempt = Attempt { key: TaskKey::new(7, 2), number: 1 };
        let time = Duration::new(1_790_000_000, 123_456_789);
        let finished = FinishedAttempt {
            reward: Some(0.5),
            duration: Duration::from_millis(1_500),
            tokens: Some(TokenUsage { input: 12, output: 3 }),
            truncated: None,
            tool_failures: 0,
            phases: Some("seed 0+310, model 402+1200".to_owned()),
        };
        let failed = FailedAttempt {
            class: FailureClass::ToolError,
            server: "math".to_owned(),
            route: "/add".to_owned(),
            cause: "POST math/add: no\nadder".to_owned(),
            duration: Duration::from_micros(42),
            retried: true,
        };
        let mut text = Vec::new();
        for kind in [
            RolloutEventKind::Started,
            RolloutEventKind::Finished(finished),
            RolloutEventKind::Failed(failed),
            RolloutEventKind::Unrecorded,
        ] {
            event(&RolloutEvent { time, attempt, agent: "adder".into(), kind }, &mut text);
        }
        let text = String::from_utf8(text).unwrap();
        let with = |event: &str, more: Value| {
            let mut line = json!({"event": event, "time": 1_790_000_000.123_456, "task_index": 7, "rollout_index": 2,
                "attempt_index": 1, "agent": "adder"});
            line.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            line
        };
        let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let finished = json!({"reward": 0.5, "seconds": 1.5, "attempts": 2, "tokens": {"input_tokens": 12, "output_tokens": 3},
            "truncated": null, "tool_failures": 0, "phases": "seed 0+310, model 402+1200"});
        let failed = json!({"class": "tool_error", "server": "math", "route": "/add", "cause": "POST math/add: no\nadder",
            "seconds": 0.000_042, "retried": true});
        let expected = [
            with("started", json!({})),
            with("finished", finished),
            with("failed", failed),
            with("unrecorded", json!({})),
        ];
        assert_eq!(lines, expected);
    }
}

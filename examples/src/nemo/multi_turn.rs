//! `example_multi_turn_gymnasium`: a scripted user that asks one question after the other.

use gym_core::server::{GymnasiumServer, SessionTable, Sessions, Step};
use gym_core::{CallContext, ModelResponse, Result, SessionId};
use serde::Deserialize;

/// Replies with the row's questions. The reward is 1 when the last response contains the expected answer.
#[derive(Debug, Default)]
pub struct MultiTurn {
    turns: Sessions<usize>,
}

/// The user's questions after the first one, and a part of the expected last response.
#[derive(Debug, Deserialize)]
pub struct Task {
    #[serde(default)]
    follow_ups: Vec<String>,
    #[serde(default)]
    expected_answer: String,
}

impl GymnasiumServer for MultiTurn {
    type Task = Task;

    async fn reset(&self, _: &CallContext, session: &SessionId, _: Task) -> Result<Option<String>> {
        self.turns.with_or(session, || 0, |turn| *turn = 0)?;
        Ok(None)
    }

    async fn step(&self, _: &CallContext, session: &SessionId, task: Task, response: &ModelResponse) -> Result<Step> {
        let turn = self.turns.with_or(session, || 0, |turn| std::mem::replace(turn, *turn + 1))?;
        if let Some(question) = task.follow_ups.get(turn) {
            return Ok(Step::reply(question));
        }
        let (expected, text) = (task.expected_answer.to_lowercase(), response.output_text()?.to_lowercase());
        Ok(Step::done(if !expected.is_empty() && text.contains(&expected) { 1.0 } else { 0.0 }))
    }

    fn sessions(&self) -> Option<&dyn SessionTable> {
        Some(&self.turns)
    }
}

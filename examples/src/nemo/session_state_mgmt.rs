//! `example_session_state_mgmt`: a counter for each session.

use gym_core::{CallContext, Error, ModelResponse, RawObject, ResourcesServer, Response, Result, SessionId, Verdict};
use serde::Deserialize;
use serde_json::json;
use serde_json::value::RawValue;

use gym_core::server::{Argument, ArgumentErrors, Arguments};
use gym_core::server::{SessionTable, Sessions};

/// Counts. The reward is 1 if the session's counter ends at the expected count.
#[derive(Debug, Default)]
pub struct SessionState {
    counters: Sessions<i128>,
}

/// The expected count.
#[derive(Debug, Deserialize)]
pub struct Task {
    expected_count: Box<RawValue>,
}

impl ResourcesServer for SessionState {
    type Task = Task;

    async fn seed_session(&self, _: &CallContext, session: &SessionId, row: &RawObject) -> Result<RawObject> {
        let mut row = Arguments::of(row);
        let Some(initial) = row.take::<i128>("initial_count") else {
            let refusal = row.refusal().message.head.to_bytes();
            return Err(Error::invalid(String::from_utf8_lossy(&refusal).into_owned()).about("seed the counter"));
        };
        self.counters.begin(session, || initial)?;
        Ok(RawObject::empty())
    }

    async fn call_tool(
        &self,
        _: &CallContext,
        session: &SessionId,
        tool: &str,
        arguments: &RawObject,
    ) -> Result<Response> {
        match tool {
            "increment_counter" => {
                let mut arguments = Arguments::of(arguments);
                let Some(count) = arguments.take::<i128>("count") else { return Ok(arguments.refusal()) };
                self.counters.with_or(session, || 0, |counter| *counter = counter.saturating_add(count))?;
                Ok(Response::json(json!({"success": true}).to_string()))
            }
            "get_counter_value" => {
                let count = self.counters.with_or(session, || 0, |counter| *counter)?;
                Ok(Response::json(format!("{{\"count\":{count}}}")))
            }
            _ => Err(gym_core::server::unknown_tool(tool)),
        }
    }

    fn returns(&self, key: &str) -> bool {
        super::declared(key)
    }

    async fn verify(&self, _: &CallContext, session: &SessionId, task: Task, _: &ModelResponse) -> Result<Verdict> {
        let expected = i128::read(task.expected_count.get(), &mut ArgumentErrors::default())
            .ok_or_else(|| Error::invalid(format!("`expected_count` is not an integer: {}", task.expected_count)))?;
        // A session that never counted has no counter, which differs from a counter at 0.
        Ok(Verdict::correct(self.counters.score(session, |counter| *counter == expected).unwrap_or(false)))
    }

    fn sessions(&self) -> Option<&dyn SessionTable> {
        Some(&self.counters)
    }
}

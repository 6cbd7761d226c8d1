//! Small user-written servers: an agent that thinks and calls a tool, and a resources server that counts the calls.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use gym_client::ServerClient;
use gym_core::rollout::{Attempt, TaskKey};
use gym_core::{
    AgentServer, CallContext, Code, Error, Execution, ModelResponse, RawObject, ResourcesServer, Response, Result,
    SessionId, Verdict, World,
};
use parking_lot::Mutex;
use serde::Deserialize;

use crate::audit::Audit;
use crate::whole::POLICY;

/// Returns status, body and error code, without the metadata that the inner hop wrote for its own caller.
fn passed_on(answer: &Response) -> Response {
    let mut response = Response::new(answer.status, answer.message.clone());
    for name in [gym_core::message::CODE_METADATA, gym_core::message::EXECUTION_METADATA] {
        if let Some(value) = answer.metadata.get(name) {
            response.metadata.push(name, value);
        }
    }
    response
}

pub(crate) fn not_here() -> Error {
    Error::not_started(Code::Unimplemented, "this simulation does not ask for it")
}

/// Seeds an episode, thinks and calls the tool a few times, and verifies the episode.
pub(crate) struct SmallAgent {
    pub(crate) client: ServerClient,
    pub(crate) world: World,
    pub(crate) steps: u32,
    pub(crate) think_max: Duration,
    /// Checks that each attempt runs once.
    pub(crate) runs_once: Option<Audit>,
    /// Each step asks the policy first, and so does an episode without steps.
    pub(crate) turns: bool,
}

impl AgentServer for SmallAgent {
    async fn run(&self, cx: &CallContext, _: &SessionId, row: &RawObject) -> Result<Response> {
        if let Some(audit) = &self.runs_once {
            let task: Task = serde_json::from_slice(row.text()).map_err(|error| Error::invalid(error.to_string()))?;
            audit.runs(task.attempt());
        }
        let mut session = self.client.session();
        let mut rng = self.world.rng();
        session.post(&cx.child(), "resources", "/seed_session", row.text().clone()).await?.into_result()?;
        for step in 0..self.steps.max(u32::from(self.turns)) {
            if self.turns {
                session.post(&cx.child(), POLICY, "/v1/responses", r#"{"input":[]}"#).await?.into_result()?;
            }
            if step == self.steps {
                break;
            }
            let think_ms = rng.u64(1..=u64::try_from(self.think_max.as_millis()).unwrap_or(1));
            tokio::time::sleep(Duration::from_millis(think_ms)).await;
            session.post(&cx.child(), "resources", "/count", "{}").await?.into_result()?;
        }
        let answered = row.edit().set("response", r#"{"output":[]}"#).to_rope();
        let verified = session.post(&cx.child(), "resources", "/verify", answered).await?;
        Ok(passed_on(&verified))
    }

    async fn responses(&self, _: &CallContext, _: &SessionId, _: &RawObject) -> Result<Response> {
        Err(not_here())
    }

    async fn aggregate_metrics(&self, _: &CallContext, _: &SessionId, _: &RawObject) -> Result<Response> {
        Err(not_here())
    }
}

/// Counts calls by session in memory; a restart loses the counts.
pub(crate) struct SmallResources {
    pub(crate) audit: Audit,
    pub(crate) sessions: Arc<Mutex<BTreeMap<String, u32>>>,
    pub(crate) steps: u32,
}

/// The fields of a row that the verifier reads.
#[derive(Deserialize)]
pub(crate) struct Task {
    #[serde(rename = "_ng_task_index")]
    task_index: u32,
    #[serde(rename = "_ng_rollout_index")]
    rollout_index: u32,
    #[serde(default, rename = "_ng_attempt_index")]
    attempt: u32,
}

impl Task {
    fn attempt(&self) -> Attempt {
        Attempt { key: TaskKey::new(self.task_index, self.rollout_index), number: self.attempt }
    }
}

impl SmallResources {}

fn forgotten(session: &SessionId) -> Error {
    Error::new(Code::FailedPrecondition, Execution::Finished, format!("no session {session} here"))
}

impl ResourcesServer for SmallResources {
    type Task = Task;

    async fn seed_session(&self, _: &CallContext, session: &SessionId, _: &RawObject) -> Result<RawObject> {
        self.sessions.lock().insert(session.to_string(), 0);
        Ok(RawObject::empty())
    }

    async fn call_tool(&self, _: &CallContext, session: &SessionId, _: &str, _: &RawObject) -> Result<Response> {
        let mut sessions = self.sessions.lock();
        let count = sessions.get_mut(session.as_str()).ok_or_else(|| forgotten(session))?;
        *count += 1;
        Ok(Response::json(count.to_string()))
    }

    async fn verify(&self, _: &CallContext, session: &SessionId, task: Task, _: &ModelResponse) -> Result<Verdict> {
        let count = self.sessions.lock().remove(session.as_str()).ok_or_else(|| forgotten(session))?;
        let attempt = task.attempt();
        if count != self.steps {
            let key = attempt.key;
            self.audit
                .violation(format_args!("{key} has {count} calls of its tool in its session, not {}", self.steps));
        }
        Ok(Verdict::reward(self.audit.give("resources", attempt)))
    }
}

//! Plays episodes in which the environment replies as a user: NeMo Gym's `gymnasium_agent`.
//!
//! It sends the same requests in the same order as the Python agent, and its result is equal. Items and rows are spliced as text.

use gym_client::{CookieJar, ServerClient};
use gym_core::rollout::{FailureClass, Phase};
use gym_core::server::{ToolErrors, unprocessable};
use gym_core::{AgentServer, CallContext, Code, Error, RawObject, Response, Result, SessionId, World};
use serde::Deserialize;
use serde_json::json;
use tokio::time::Instant;

use crate::agent::config::GymnasiumAgentConfig;
use crate::agent::episode::{Course, ResourcesSession, aggregate, ask, post, recorded, return_cookies};
use crate::agent::observation::ToolRules;
use crate::agent::simple::params_of;
use crate::agent::turn::{Conversation, items_of, user_message, yield_after};
use crate::role::dialect::schema::Dialect;

/// The agent that calls the model and `/step` alternately, until the environment ends the episode or `max_steps` is reached.
///
/// Its result is not the row, but a new object: request, response with the items of all turns, sum of the rewards, and
/// `terminated`, `truncated` and `info` of the last step. An environment whose `/reset` reports support for it receives `/close` at
/// the end of every episode.
#[derive(Clone, Debug)]
pub struct GymnasiumAgent {
    config: GymnasiumAgentConfig,
    client: ServerClient,
    world: World,
}

/// The reply to `/reset`.
#[derive(Deserialize)]
struct ResetReply {
    #[serde(default)]
    observation: Option<String>,
    #[serde(default)]
    info: ResetInfo,
}

#[derive(Default, Deserialize)]
struct ResetInfo {
    #[serde(default)]
    supports_step_idempotency: serde_json::Value,
}

/// The reply to `/step`.
#[derive(Deserialize)]
struct StepReply {
    #[serde(default)]
    observation: Option<String>,
    #[serde(default)]
    reward: f64,
    #[serde(default)]
    terminated: bool,
    #[serde(default)]
    truncated: bool,
    #[serde(default)]
    info: StepInfo,
}

#[derive(Default, Deserialize)]
struct StepInfo {
    #[serde(default)]
    tool_outputs: Vec<ToolOutput>,
}

#[derive(Deserialize)]
struct ToolOutput {
    call_id: String,
    output: String,
}

impl GymnasiumAgent {
    /// Creates an agent that calls its model and its environment through `client`. `world` is the source of request ids.
    #[must_use]
    pub fn new(config: GymnasiumAgentConfig, client: ServerClient, world: &World) -> Self {
        Self { config, client, world: world.clone() }
    }

    /// Plays an episode that has begun, and returns its result with the `info` of the last step.
    async fn play(
        &self,
        cx: &CallContext,
        session: &mut ResourcesSession,
        row: &RawObject,
        params: &RawObject,
        idempotent: bool,
        course: &mut Course,
    ) -> Result<RawObject> {
        let rules = ToolRules { errors: ToolErrors::Auto, limits: self.config.tool_output_bytes_max.as_ref() };
        let model = self.config.model_server.name.as_str();
        let environment = self.config.resources_server.name.as_str();
        let mut conversation = Conversation::new(params)?;
        let mut total = 0.0;
        loop {
            yield_after(course.record.turns).await;
            let asked = Instant::now();
            let turn = ask(session.calls(), cx, model, conversation.request(params)).await?;
            course.add(Phase::Model, asked);
            conversation.answered(&turn)?;
            course.answered(model, turn.response(), turn.tokens());
            course.record.tool_calls += u32::try_from(turn.calls().len()).unwrap_or(u32::MAX);
            let mut body = row.edit().set_object("response", turn.response().clone());
            if idempotent {
                // 32 hexadecimal digits, as Python's `uuid4().hex`.
                body = body.set_value("_ng_step_request_id", &self.world.unique_id())?;
            }
            let asked = Instant::now();
            let reply = post(session.calls(), cx, environment, "/step", body.to_rope()).await?;
            course.add(Phase::Tool, asked);
            let record = &mut course.record;
            let lost = |error: Error| invalid_reply(error, environment, "/step");
            let reply = reply.head.to_object().map_err(|error| lost(error.into()))?;
            let step: StepReply = reply.outline().map_err(lost)?;
            total += step.reward;
            let ended = step.terminated || step.truncated;
            if !ended {
                for ToolOutput { call_id, output } in step.info.tool_outputs {
                    let tool = turn.calls().iter().find(|call| call.call_id == call_id);
                    let tool = tool.map_or("", |call| call.name.as_str());
                    conversation.tool_answered(&call_id, &rules.observe_text(record, tool, output));
                }
                if let Some(observation) = step.observation.as_deref().filter(|text| !text.is_empty()) {
                    conversation.user_said(observation);
                }
            }
            if ended || record.turns >= self.config.max_steps.get() {
                let reason = match (ended, step.truncated) {
                    (false, _) => Some("max_steps".to_owned()),
                    (true, true) => Some("environment".to_owned()),
                    (true, false) => turn.truncation().map(str::to_owned),
                };
                if let Some(reason) = reason {
                    record.truncate(&reason);
                }
                let response = conversation.finish(&turn, None)?;
                return Ok(RawObject::empty()
                    .edit()
                    .set_object("responses_create_params", params.clone())
                    .set_object("response", response.0)
                    .set_value("reward", &total)?
                    .set_value("terminated", &step.terminated)?
                    .set_value("truncated", &(step.truncated || !ended))?
                    .set("info", reply.get("info").unwrap_or_else(|| "{}".into()))
                    .to_object()?);
            }
        }
    }
}

impl AgentServer for GymnasiumAgent {
    async fn run(&self, cx: &CallContext, _: &SessionId, row: &RawObject) -> Result<Response> {
        let params = match params_of(row) {
            Ok(params) => params,
            Err(refusal) => return Ok(refusal),
        };
        let environment = self.config.resources_server.name.as_str();
        let (caller, cx) = (&cx.metadata, &cx.child());
        let mut course = Course::begin(cx);
        let (mut session, reply) =
            ResourcesSession::begin(cx, caller, &self.client, environment, "/reset", row, close_route).await?;
        course.add(Phase::Seed, course.began);
        let lost = |error: Error| invalid_reply(error, environment, "/reset");
        let reply = reply.message.head.to_object().map_err(|error| lost(error.into()))?;
        let reset: ResetReply = reply.outline().map_err(lost)?;
        let first = reset.observation.filter(|text| !text.is_empty()).map(|text| user_message(&text));
        let params = match items_of(&params, first.as_deref())? {
            Some(input) => params.edit().set("input", input).to_object()?,
            None => params,
        };
        let idempotent = reset.info.supports_step_idempotency == true;
        let result = self.play(cx, &mut session, row, &params, idempotent, &mut course).await;
        let max = self.config.max_steps;
        let mut result = result.map_err(|error| {
            course.late(
                error,
                &format!("the agent's `max_steps` is {max}: a lower one ends the episode in time, and scores it"),
            )
        })?;
        if let Err(error) = session.close().await {
            tracing::warn!(environment, %error, "the episode is complete, but its environment was not closed");
            let warning =
                json!({"operation": "close", "error_type": error.code().as_str(), "message": error.to_string()});
            let info = result.get_object("info")?.unwrap_or_default();
            let info = info.edit().set_value("cleanup_warning", &warning)?.to_object()?;
            result = result.edit().set_object("info", info).to_object()?;
        }
        Ok(recorded(Response::json(result), &course.record))
    }

    async fn responses(&self, cx: &CallContext, _: &SessionId, body: &RawObject) -> Result<Response> {
        let wrong = Dialect::Responses.check(body, &[]);
        if !wrong.is_empty() {
            return Ok(unprocessable(&wrong));
        }
        let model = self.config.model_server.name.as_str();
        let mut calls = self.client.session();
        *calls.jar(model) = CookieJar::of_request(&cx.metadata);
        let answer = post(&mut calls, &cx.child(), model, "/v1/responses", body.clone()).await?;
        let mut response = Response::json(answer.head);
        return_cookies(&mut response, calls.jar(model));
        Ok(response)
    }

    async fn aggregate_metrics(&self, cx: &CallContext, _: &SessionId, body: &RawObject) -> Result<Response> {
        aggregate(cx, &self.client, &self.config.resources_server.name, body).await
    }
}

/// Returns the route that closes the session of a reply to `/reset`, even if the rest of the reply is invalid.
fn close_route(reply: &Response) -> Option<&'static str> {
    let info = reply.message.head.to_object().ok()?.get_object("info").ok()??;
    (info.get("supports_explicit_close").as_deref() == Some(b"true")).then_some("/close")
}

fn invalid_reply(error: Error, environment: &str, route: &str) -> Error {
    let error = Error::finished(Code::DataLoss, "the reply is invalid").caused_by(error);
    error.or_class(FailureClass::EnvironmentError).about(format!("POST {environment}{route}"))
}

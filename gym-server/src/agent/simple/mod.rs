//! The tool-calling loop: seeds the episode, calls the model, runs its tools, and verifies the episode.
//!
//! This is NeMo Gym's `simple_agent`: it sends the same requests in the same order, except for the Python agent's call to itself,
//! and its response is equal. Items and rows are spliced as text, so token ids, log-probabilities and long numbers are unchanged.

use std::future::ready;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::TryFutureExt as _;
use futures_util::future::Either;
use gym_client::{CookieJar, ServerClient, Session};
use gym_core::rollout::{EpisodeRecord, FailureClass, Phase};
use gym_core::server::{ValidationProblem, unprocessable};
use gym_core::{AgentServer, CallContext, Code, Error, ModelResponse, RawObject, Response, Result, SessionId};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::agent::config::SimpleAgentConfig;
use crate::agent::episode::{Course, PARAMS_KEY, ResourcesSession, aggregate, ask, of_inner, recorded, return_cookies};
use crate::agent::observation::ToolRules;
use crate::agent::tool_arguments;
use crate::agent::turn::{Conversation, FunctionCall, NextStep, yield_after};
use crate::role::dialect::schema::Dialect;
use crate::role::route::{is_protocol, tool_route};
use crate::role::settings::Seconds;

/// The agent that calls the model and runs its tools, until a response calls no tool.
///
/// Errors that the model caused are data for the model; the key `tool_errors` decides on other errors of tools, see
/// [`ToolErrors`](gym_core::server::ToolErrors). An error of the model server or of the verifier fails the attempt: it never becomes a
/// reward.
#[derive(Clone, Debug)]
pub struct SimpleAgent {
    config: SimpleAgentConfig,
    client: ServerClient,
    wordless: Arc<LimitedLog>,
}

/// The turns after which an episode without `max_steps` fails: a loop without an end would otherwise run until its deadline, two hours by default.
const TURNS_MAX: u32 = 1_000;

/// Limits a line of the log that each episode may cause.
#[derive(Debug, Default)]
struct LimitedLog(Mutex<(Option<Instant>, u64)>);

impl LimitedLog {
    /// Minimum time between two lines.
    const LOG_INTERVAL: Duration = Duration::from_secs(30);

    /// Returns the number of lines that were left out before this one; `None` if it is left out as well.
    fn next(&self) -> Option<u64> {
        let mut log = self.0.lock();
        let (last, left_out) = &mut *log;
        if last.is_some_and(|last| last.elapsed() < Self::LOG_INTERVAL) {
            *left_out += 1;
            return None;
        }
        *last = Some(Instant::now());
        Some(std::mem::take(left_out))
    }
}

impl SimpleAgent {
    /// Creates an agent that calls its model and its resources server through `client`.
    #[must_use]
    pub fn new(config: SimpleAgentConfig, client: ServerClient) -> Self {
        Self { config, client, wordless: Arc::default() }
    }

    /// Creates an agent with the default configuration between a model and a resources server, which it calls through `client`.
    #[must_use]
    pub fn between(model_server: &str, resources_server: &str, client: ServerClient) -> Self {
        Self::new(SimpleAgentConfig::new(model_server, resources_server), client)
    }

    fn resources(&self) -> Result<&str> {
        self.config.resources_server.as_ref().map(|server| server.name.as_str()).ok_or_else(|| {
            let text = "this agent has no `resources_server` in its configuration: add `resources_server: {type: resources_servers, name: …}`";
            Error::internal(text)
        })
    }

    fn context(&self, cx: &CallContext) -> CallContext {
        match self.config.max_seconds {
            Some(limit) => cx.child().at_most(limit.0),
            None => cx.child(),
        }
    }

    /// Returns the limit of turns that ends an episode with a score.
    fn steps_max(&self) -> Option<u32> {
        self.config.max_steps.filter(|max| *max > 0)
    }

    /// Adds the turns of a long loop to the error of its deadline.
    fn late(&self, error: Error, course: &Course) -> Error {
        match self.steps_max() {
            Some(max) => course.late(
                error,
                &format!("the agent's `max_steps` is {max}: a lower one ends the episode in time, and scores it"),
            ),
            None => course.late(
                error,
                "the agent has no `max_steps`: add it to its block to end such an episode in time, and to score it",
            ),
        }
    }

    /// Converts the error of an episode that reached this agent's own limit. The result is not `DeadlineExceeded`, because
    /// collectors retry that code and the next attempt would reach the same limit.
    fn of_limit(&self, error: Error, began: Instant) -> Error {
        match self.config.max_seconds {
            Some(Seconds(limit)) if error.code() == Code::DeadlineExceeded && began.elapsed() >= limit => {
                let text = format!(
                    "the episode did not end within the agent's `max_seconds` = {}; raise it, or set a lower `max_steps`",
                    limit.as_secs_f64()
                );
                Error::internal(text).caused_by(error).with_class(FailureClass::EpisodeTimeout)
            }
            _ => error,
        }
    }

    /// Calls the model and its tools alternately. Returns the last response, with the items and the usage of all turns.
    #[expect(clippy::manual_async_fn, reason = "the future of an async fn holds its arguments twice")]
    fn converse(
        &self,
        cx: &CallContext,
        session: &mut Session,
        params: &RawObject,
        course: &mut Course,
    ) -> impl Future<Output = Result<ModelResponse>> + Send {
        async move {
            let mut conversation = Conversation::new(params)?;
            loop {
                yield_after(course.record.turns).await;
                let model = self.config.model_server.name.as_str();
                let asked = Instant::now();
                let turn = ask(session, cx, model, conversation.request(params)).await?;
                course.add(Phase::Model, asked);
                conversation.answered(&turn)?;
                course.answered(model, turn.response(), turn.tokens());
                let record = &mut course.record;
                let calls = match turn.next() {
                    NextStep::Tools(calls) => calls,
                    NextStep::Stop => {
                        if let Some(reason) = turn.truncation() {
                            record.truncate(reason);
                        }
                        return conversation.finish(&turn, None);
                    }
                    NextStep::Nothing(reason) => {
                        if let Some(others) = self.wordless.next() {
                            tracing::warn!(
                                model,
                                reason,
                                turns = record.turns,
                                others,
                                "the model returned neither a message nor a tool call"
                            );
                        }
                        return conversation.finish(&turn, Some(reason));
                    }
                };
                for call in calls {
                    let called = Instant::now();
                    // Boxed, because an episode that waits for its model would be as large otherwise.
                    let output = Box::pin(self.call_tool(cx, session, call, &mut course.record)).await?;
                    course.add(Phase::Tool, called);
                    conversation.tool_answered(&call.call_id, &output);
                }
                match self.steps_max() {
                    Some(max) if course.record.turns >= max => {
                        course.record.truncate("max_steps");
                        return conversation.finish(&turn, None);
                    }
                    None if course.record.turns >= TURNS_MAX => return Err(endless(&course.record)),
                    _ => {}
                }
            }
        }
    }

    /// Returns the output of a tool call for the model.
    async fn call_tool(
        &self,
        cx: &CallContext,
        session: &mut Session,
        call: &FunctionCall,
        record: &mut EpisodeRecord,
    ) -> Result<String> {
        record.tool_calls += 1;
        let body = match tool_arguments::parse(&call.arguments) {
            // Python's client sends no body for null.
            Ok(text) if text == "null" => Bytes::new(),
            Ok(text) => Bytes::copy_from_slice(text.as_bytes()),
            Err(complaint) => {
                record.tool_errors += 1;
                return Ok(complaint);
            }
        };
        let server = self.resources()?;
        if is_protocol(&call.name) {
            tracing::warn!(tool = call.name, "the model called a protocol route as a tool");
            record.tool_errors += 1;
            return Ok(json!({"detail": format!("there is no tool `{}`", call.name)}).to_string());
        }
        let route = tool_route(&call.name);
        let answer = session.post(cx, server, route.clone(), body).await;
        let rules = ToolRules { errors: self.config.tool_errors, limits: self.config.tool_output_bytes_max.as_ref() };
        let message = answer.and_then(|answer| rules.observe(record, &call.name, answer));
        let message = message.map_err(|error| of_inner(error, server, route.as_str()))?;
        String::from_utf8(message.head.to_bytes().into()).map_err(|_| {
            Error::finished(Code::DataLoss, format!("tool `{}`: the response is not UTF-8", call.name))
                .or_class(FailureClass::ToolError)
                .about(server.to_owned())
        })
    }

    #[expect(clippy::manual_async_fn, reason = "the future of an async fn holds its arguments twice")]
    fn episode(
        &self,
        caller: &CallContext,
        row: &RawObject,
        params: RawObject,
    ) -> impl Future<Output = Result<Response>> + Send {
        async move {
            let resources = self.resources()?;
            let cx = &self.context(caller);
            // Closes the session when the episode is over, regardless of how it ends.
            let mut course = Course::begin(cx);
            let mut session = ResourcesSession::seed(cx, &caller.metadata, &self.client, resources, row).await?;
            course.add(Phase::Seed, course.began);
            let (params, offered) = match session.with_tools(&params)? {
                Some(offered) => (offered, true),
                None => (params, false),
            };
            let response = self.converse(cx, session.calls(), &params, &mut course).await;
            let response = response.map_err(|error| self.late(error, &course))?;
            let row = row.edit();
            // The request as the model received it, so that its prompt can be rendered again.
            let row = if offered { row.set_object(PARAMS_KEY, params) } else { row };
            let row = row.set_object("response", response.0);
            if self.config.skip_verification {
                let row = row.set_value("reward", &self.config.skip_verification_reward)?;
                return Ok(recorded(Response::json(row.set("verification_skipped", "true").to_rope()), &course.record));
            }
            let asked = Instant::now();
            let response = session.verify(cx, row.to_rope()).await?;
            course.add(Phase::Verify, asked);
            Ok(recorded(response, &course.record))
        }
    }
}

impl AgentServer for SimpleAgent {
    fn run(&self, cx: &CallContext, _: &SessionId, row: &RawObject) -> impl Future<Output = Result<Response>> + Send {
        let began = Instant::now();
        match params_of(row) {
            Ok(params) => Either::Left(self.episode(cx, row, params).map_err(move |error| self.of_limit(error, began))),
            Err(refusal) => Either::Right(ready(Ok(refusal))),
        }
    }

    async fn responses(&self, cx: &CallContext, _: &SessionId, body: &RawObject) -> Result<Response> {
        let wrong = Dialect::Responses.check(body, &[]);
        if !wrong.is_empty() {
            return Ok(unprocessable(&wrong));
        }
        let mut session = self.client.session();
        let resources = self.config.resources_server.as_ref().map(|server| server.name.as_str());
        if let Some(resources) = resources {
            *session.jar(resources) = CookieJar::of_request(&cx.metadata);
        }
        let mut course = Course::begin(cx);
        let answer = self.converse(&self.context(cx), &mut session, body, &mut course).await;
        let answer = answer.map_err(|error| self.of_limit(self.late(error, &course), course.began))?;
        let mut response = recorded(Response::json(answer.0), &course.record);
        for server in resources.into_iter().chain([self.config.model_server.name.as_str()]) {
            return_cookies(&mut response, session.jar(server));
        }
        Ok(response)
    }

    async fn aggregate_metrics(&self, cx: &CallContext, _: &SessionId, body: &RawObject) -> Result<Response> {
        if self.config.skip_verification {
            const EMPTY: &str = r#"{"group_level_metrics":[],"agent_metrics":{},"key_metrics":{},"perf_summary":null,"repeat_level_metrics":[]}"#;
            return Ok(Response::json(EMPTY));
        }
        aggregate(cx, &self.client, self.resources()?, body).await
    }
}

/// Returns the error of an episode that nothing ended.
fn endless(record: &EpisodeRecord) -> Error {
    let text = format!(
        "the episode had not ended after {} turns and {} tool calls, the most without `max_steps`; add it to the agent's block: `max_steps: 50` \
         ends an episode after 50 turns, and scores it; a larger number than {TURNS_MAX} allows longer ones",
        record.turns, record.tool_calls
    );
    Error::internal(text).with_class(FailureClass::AgentRunError)
}

/// Returns the request for the model of a row, or the 422 of a row without a valid one.
pub(super) fn params_of(row: &RawObject) -> Result<RawObject, Response> {
    let path = [PARAMS_KEY];
    let params = match row.get_object(path[0]) {
        Ok(Some(params)) => params,
        Ok(None) => {
            let problem = ValidationProblem::missing(&path, row.outline().unwrap_or(Value::Null));
            return Err(unprocessable(&[problem]));
        }
        Err(_) => {
            let input = row.get_as::<Value>(path[0]).ok().flatten().unwrap_or_default();
            let message = "Input should be a valid dictionary";
            return Err(unprocessable(&[ValidationProblem::new("model_type", &path, message, input)]));
        }
    };
    let wrong = Dialect::Responses.check(&params, &path);
    if wrong.is_empty() { Ok(params) } else { Err(unprocessable(&wrong)) }
}

#[cfg(test)]
mod tests;

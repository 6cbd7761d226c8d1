//! The tool-calling loop: seeds the episode, calls the model, runs its tools, and verifies the episode.
//!
//! An embodiment of NeMo Gym's `simple_agent`, with the same requests in the same order and the same answer, but for the
//! call to itself that the Python agent makes over HTTP. Nothing that the model or the environment wrote is printed anew:
//! items and rows are spliced as text, so token ids, log-probabilities and long numbers come out as they went in.

use bytes::Bytes;
use gym_client::{CallOptions, CookieJar, ServerClient, Session};
use gym_core::server::{ValidationProblem, unprocessable};
use gym_core::{AgentServer, CallContext, Code, Error, ModelResponse, RawObject, Response, Result, Route, SessionId};
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::agent::config::SimpleAgentConfig;
use crate::agent::episode::{of_inner, post, scored};
use crate::agent::tool_arguments;
use crate::agent::turn::{Conversation, FunctionCall, NextStep, Turn};
use crate::role::dialect::schema::Dialect;
use crate::role::route::{is_protocol, tool_route};
use crate::role::settings::Seconds;

/// The agent that runs tools until the model calls no more of them.
///
/// The response of a tool, with any status, is data for the model. An error of the model server or of the verifier fails the
/// attempt: it never becomes a reward.
#[derive(Clone, Debug)]
pub struct SimpleAgent {
    config: SimpleAgentConfig,
    client: ServerClient,
}

impl SimpleAgent {
    /// Creates an agent that calls its model and its resources server through `client`.
    #[must_use]
    pub fn new(config: SimpleAgentConfig, client: ServerClient) -> Self {
        Self { config, client }
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

    /// The error of an episode that ran into this agent's own limit. Not a deadline's: that says "later, perhaps", and
    /// collectors try it again at once, to run into the same limit.
    fn of_limit(&self, error: Error, began: Instant) -> Error {
        match self.config.max_seconds {
            Some(Seconds(limit)) if error.code() == Code::DeadlineExceeded && began.elapsed() >= limit => {
                let text = format!(
                    "the episode was not over within the agent's `max_seconds` = {}; raise it, or limit the steps",
                    limit.as_secs_f64()
                );
                Error::internal(text).caused_by(error)
            }
            _ => error,
        }
    }

    /// The loop: model, tools, model, … The answer is the last one's, with the items of all turns and the usage of all.
    async fn converse(&self, cx: &CallContext, session: &mut Session, params: &RawObject) -> Result<ModelResponse> {
        let mut conversation = Conversation::new(params)?;
        let mut steps = 0;
        loop {
            steps += 1;
            let body = conversation.request(params);
            let model = self.config.model_server.name.as_str();
            let response = session.post(cx, model, Route::from_static("/v1/responses"), body).await;
            let text =
                response.and_then(Response::into_result).map_err(|error| of_inner(error, model, "/v1/responses"))?;
            let turn =
                Turn::parse(&text.message.head).map_err(|error| error.about(format!("POST {model}/v1/responses")))?;
            conversation.answered(&turn)?;
            let calls = match turn.next() {
                NextStep::Tools(calls) => calls,
                NextStep::Stop => return conversation.finish(&turn, None),
                NextStep::Nothing(reason) => {
                    tracing::warn!(model, reason, steps, "the model gave neither a message nor a tool call");
                    return conversation.finish(&turn, Some(reason));
                }
            };
            for call in calls {
                let output = self.call_tool(cx, session, call).await?;
                conversation.tool_answered(&call.call_id, &output);
            }
            if self.config.max_steps.is_some_and(|max| max > 0 && steps >= max) {
                return conversation.finish(&turn, None);
            }
        }
    }

    /// Returns the output of a tool call for the model.
    async fn call_tool(&self, cx: &CallContext, session: &mut Session, call: &FunctionCall) -> Result<String> {
        let body = match tool_arguments::parse(&call.arguments) {
            // Python's client sends no body for null.
            Ok(text) if text == "null" => Bytes::new(),
            Ok(text) => Bytes::copy_from_slice(text.as_bytes()),
            Err(complaint) => return Ok(complaint),
        };
        let server = self.resources()?;
        if is_protocol(&call.name) {
            tracing::warn!(tool = call.name, "the model called a route of the protocol as if it were a tool");
            return Ok(json!({"detail": format!("there is no tool `{}`", call.name)}).to_string());
        }
        let route = tool_route(&call.name);
        let answer = session.post(cx, server, route.clone(), body).await;
        let answer = answer.map_err(|error| of_inner(error, server, route.as_str()))?;
        String::from_utf8(answer.message.head.to_bytes().into()).map_err(|_| {
            Error::finished(Code::DataLoss, format!("tool `{}` answered with bytes that are not UTF-8", call.name))
                .about(server.to_owned())
        })
    }

    async fn episode(&self, cx: &CallContext, row: &RawObject, params: &RawObject) -> Result<Response> {
        let resources = self.resources()?;
        let mut session = self.client.session();
        // The caller's cookies are this episode's first ones.
        let cookies = CookieJar::of_request(&cx.metadata);
        let cx = &self.context(cx);
        if cookies.header().is_some() {
            *session.jar(resources) = cookies;
        }
        post(&mut session, cx, resources, "/seed_session", row.clone()).await?;
        let response = self.converse(cx, &mut session, params).await?;
        let row = row.edit().set_object("response", response.0);
        if self.config.skip_verification {
            let row = row.set_value("reward", &self.config.skip_verification_reward)?;
            return Ok(Response::json(row.set("verification_skipped", "true").to_rope()));
        }
        let verdict = post(&mut session, cx, resources, "/verify", row.to_rope()).await?;
        scored(verdict.head).map(Response::json).map_err(|error| error.about(format!("POST {resources}/verify")))
    }
}

impl AgentServer for SimpleAgent {
    async fn run(&self, cx: &CallContext, _: &SessionId, row: &RawObject) -> Result<Response> {
        let params = match row.get_object("responses_create_params") {
            Ok(Some(params)) => params,
            wrong => {
                let input = |key: &str| row.get_as::<Value>(key).ok().flatten().unwrap_or_default();
                let path = ["responses_create_params"];
                return Ok(unprocessable(&[match wrong {
                    Err(_) => ValidationProblem::new(
                        "model_type",
                        &path,
                        "Input should be a valid dictionary",
                        input(path[0]),
                    ),
                    _ => ValidationProblem::missing(&path, row.outline().unwrap_or(Value::Null)),
                }]));
            }
        };
        let wrong = Dialect::Responses.check(&params, &["responses_create_params"]);
        if !wrong.is_empty() {
            return Ok(unprocessable(&wrong));
        }
        let began = Instant::now();
        self.episode(cx, row, &params).await.map_err(|error| self.of_limit(error, began))
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
        let began = Instant::now();
        let answer = self.converse(&self.context(cx), &mut session, body).await;
        let answer = answer.map_err(|error| self.of_limit(error, began))?;
        let mut response = Response::json(answer.0);
        // A Python caller verifies with the cookies of this answer.
        for server in resources.into_iter().chain([self.config.model_server.name.as_str()]) {
            for (name, value) in session.jar(server).iter() {
                response.metadata.push("set-cookie", format!("{name}={value}; Path=/; SameSite=lax"));
            }
        }
        Ok(response)
    }

    async fn aggregate_metrics(&self, cx: &CallContext, _: &SessionId, body: &RawObject) -> Result<Response> {
        if self.config.skip_verification {
            const EMPTY: &str = r#"{"group_level_metrics":[],"agent_metrics":{},"key_metrics":{},"perf_summary":null,"repeat_level_metrics":[]}"#;
            return Ok(Response::json(EMPTY));
        }
        let server = self.resources()?;
        let route = Route::from_static("/aggregate_metrics");
        let answer = self.client.post(&cx.child(), server, route, body.text().clone(), CallOptions::idempotent()).await;
        let answer =
            answer.and_then(Response::into_result).map_err(|error| of_inner(error, server, "/aggregate_metrics"))?;
        Ok(Response::json(answer.message.head))
    }
}

#[cfg(test)]
mod tests;

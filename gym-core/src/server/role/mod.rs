//! Server roles: the traits that users implement for environments, models and agents.
//!
//! The methods are plain `async fn`. gym-server wraps an implementation in a handler, which adds sessions, health and metrics.

mod endpoints;

use std::fmt;
use std::future::Future;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::base::FailureClass;
use crate::base::error::{Code, Error, Result};
use crate::message::CallContext;
use crate::message::RawObject;
use crate::message::Response;
use crate::server::responses::ModelResponse;
use crate::server::sessions::{SessionId, SessionTable};
use crate::server::tool_errors::UNKNOWN_TOOL;
use crate::server::tools::Tool;
pub use endpoints::{EndpointReport, EndpointState, ModelEndpoints};

/// The kinds of servers, named by their keys in NeMo Gym's configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum ServerKind {
    /// Forwards to an inference engine.
    #[serde(rename = "responses_api_models")]
    Model,
    /// Holds the state and tools of episodes, and scores them.
    #[serde(rename = "resources_servers")]
    Resources,
    /// Runs one rollout: calls the model and the tools.
    #[serde(rename = "responses_api_agents")]
    Agent,
    /// Receives the requests of collectors.
    #[serde(rename = "environment_servers")]
    Environment,
}

impl ServerKind {
    /// All kinds.
    pub const ALL: [Self; 4] = [Self::Model, Self::Resources, Self::Agent, Self::Environment];

    /// Returns the key in NeMo Gym's configuration.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Model => "responses_api_models",
            Self::Resources => "resources_servers",
            Self::Agent => "responses_api_agents",
            Self::Environment => "environment_servers",
        }
    }

    /// Returns the kind with this key, or `None` if there is none.
    #[must_use]
    pub fn from_key(key: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.as_str() == key)
    }
}

impl fmt::Display for ServerKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A reward, and the keys that the verifier adds to the row.
///
/// ```
/// use gym_core::Verdict;
///
/// let verdict = Verdict::correct(true).with("tests_passed", 3);
/// assert_eq!(verdict.reward, 1.0);
/// assert!(Verdict::reward(f64::NAN).check().is_err());
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    /// The score.
    pub reward: f64,
    /// Further keys, in order; they replace equal keys of the row.
    pub fields: Vec<(&'static str, serde_json::Value)>,
}

impl Verdict {
    /// Creates a verdict without further keys.
    #[must_use]
    pub fn reward(reward: f64) -> Self {
        Self { reward, fields: Vec::new() }
    }

    /// Creates a verdict with a reward of 1 or 0.
    #[must_use]
    pub fn correct(correct: bool) -> Self {
        Self::reward(if correct { 1.0 } else { 0.0 })
    }

    /// Adds a key. The key `reward` is not for this method: [`Verdict::check`] rejects it, and the attempt fails.
    #[must_use]
    pub fn with(mut self, key: &'static str, value: impl Into<serde_json::Value>) -> Self {
        self.fields.push((key, value.into()));
        self
    }

    /// Checks that the verdict has one reward, and that JSON has it.
    ///
    /// # Errors
    /// `Internal` if the reward is not finite, or if a further key is called `reward`.
    pub fn check(&self) -> Result<()> {
        let error = if !self.reward.is_finite() {
            // JSON has no NaN: a trainer must not read a NaN as a number or as 0.
            format!("the verifier's reward is {}", self.reward)
        } else if let Some((_, other)) = self.fields.iter().find(|(key, _)| *key == "reward") {
            let what = format!("the verifier's reward is {}, and its key `reward` is {other}", self.reward);
            format!("{what}; give the reward to Verdict::reward alone")
        } else {
            return Ok(());
        };
        Err(Error::internal(error).or_class(FailureClass::InvalidReward))
    }
}

/// An environment: holds the state and the tools of each episode, and scores it. Only `verify` is required.
///
/// An agent calls `seed_session`, then any number of tools, then `verify`, and finally `close_session`. Calls of different episodes
/// run concurrently. If a caller disconnects, the future of its call is dropped.
///
/// ```
/// use gym_core::prelude::*;
///
/// struct Exact;
///
/// #[derive(serde::Deserialize)]
/// struct Task {
///     expected: String,
/// }
///
/// impl ResourcesServer for Exact {
///     type Task = Task;
///
///     async fn verify(&self, _: &CallContext, _: &SessionId, task: Task, response: &ModelResponse) -> Result<Verdict> {
///         Ok(Verdict::correct(response.last_text()?.trim() == task.expected))
///     }
/// }
/// ```
pub trait ResourcesServer: Send + Sync + 'static {
    /// The fields that the verifier reads; all others are returned unchanged. A row that does not fit is rejected before the episode
    /// costs anything: by a collector in this process with the line of the row, and by `/seed_session`.
    type Task: DeserializeOwned + Send;

    /// Prepares an episode. The response is usually empty.
    ///
    /// # Errors
    /// An error fails the attempt.
    fn seed_session(
        &self,
        cx: &CallContext,
        session: &SessionId,
        row: &RawObject,
    ) -> impl Future<Output = Result<RawObject>> + Send {
        let _ = (cx, session, row);
        async { Ok(RawObject::empty()) }
    }

    /// Returns the tools. Agents of this SDK offer them to the model unless the row has `tools`. [`tools!`](crate::tools) generates
    /// this method. The default is empty: the row then names the tools, and calls are not checked against a list.
    fn tools(&self) -> Vec<Tool> {
        Vec::new()
    }

    /// Runs a tool, for `POST /<tool>`. The agent passes the body of a response to the model.
    ///
    /// # Errors
    /// `NotFound` for an unknown tool, see [`unknown_tool`]. The model also sees its other mistakes: `NotFound`, `InvalidArgument` and
    /// `FailedPrecondition`. All other errors, and panics, fail the attempt as `tool_error`; see
    /// [`ToolErrors`](crate::server::ToolErrors).
    fn call_tool(
        &self,
        cx: &CallContext,
        session: &SessionId,
        tool: &str,
        arguments: &RawObject,
    ) -> impl Future<Output = Result<Response>> + Send {
        let _ = (cx, session, arguments);
        let error = unknown_tool(tool);
        async { Err(error) }
    }

    /// Scores an episode.
    ///
    /// # Errors
    /// An error fails the attempt; it never becomes a reward.
    fn verify(
        &self,
        cx: &CallContext,
        session: &SessionId,
        task: Self::Task,
        response: &ModelResponse,
    ) -> impl Future<Output = Result<Verdict>> + Send;

    /// Returns `true` if the scored row keeps this key of the row. The default keeps all keys; each number of a row becomes a
    /// metric.
    fn returns(&self, key: &str) -> bool {
        let _ = key;
        true
    }

    /// Returns the table of this server's sessions, so that the SDK closes them and counts them in the metrics. `None` by default.
    fn sessions(&self) -> Option<&dyn SessionTable> {
        None
    }

    /// Releases the state of an episode, regardless of how it ended. Agents of this SDK call this method; Python agents may not.
    /// The default closes the session in the table of [`ResourcesServer::sessions`].
    ///
    /// # Errors
    /// `Unimplemented` if this server has nothing to release; agents then stop calling this method. The default returns this error
    /// if there is no table.
    fn close_session(&self, cx: &CallContext, session: &SessionId) -> impl Future<Output = Result<()>> + Send {
        let _ = cx;
        let closed = match self.sessions() {
            Some(sessions) => {
                sessions.end(session);
                Ok(())
            }
            None => Err(Error::not_started(Code::Unimplemented, "this server keeps no sessions")),
        };
        async { closed }
    }
}

/// Returns the error of a tool that this server does not have.
#[must_use]
pub fn unknown_tool(tool: &str) -> Error {
    Error::not_started(Code::NotFound, format!("{UNKNOWN_TOOL}{tool}` here"))
}

/// An environment that plays the other side of a conversation: after each response of the model, it can reply as a user.
///
/// It serves `/reset` and `/step`, as NeMo Gym's `GymnasiumServer` does, for an agent such as `gymnasium_agent`. The agent calls
/// `reset`, then alternates between the model and `step` until a step ends the episode, and finally calls `close_session`.
///
/// ```
/// use gym_core::prelude::*;
/// use gym_core::server::{GymnasiumServer, Step};
///
/// struct Guess;
///
/// #[derive(serde::Deserialize)]
/// struct Task {
///     number: i64,
/// }
///
/// impl GymnasiumServer for Guess {
///     type Task = Task;
///     async fn step(&self, _: &CallContext, _: &SessionId, task: Task, response: &ModelResponse) -> Result<Step> {
///         let guess: i64 = response.last_text()?.trim().parse().unwrap_or(0);
///         Ok(if guess == task.number { Step::done(1.0) } else { Step::reply("Wrong. Guess again.") })
///     }
/// }
/// ```
pub trait GymnasiumServer: Send + Sync + 'static {
    /// The fields that the environment reads; it receives the row with each call.
    type Task: DeserializeOwned + Send;

    /// Begins an episode, for `POST /reset`. Can return a first message of the user; the default returns none.
    ///
    /// # Errors
    /// An error fails the attempt.
    fn reset(
        &self,
        cx: &CallContext,
        session: &SessionId,
        task: Self::Task,
    ) -> impl Future<Output = Result<Option<String>>> + Send {
        let _ = (cx, session, task);
        async { Ok(None) }
    }

    /// Processes a response of the model, for `POST /step`.
    ///
    /// # Errors
    /// An error fails the attempt; it never becomes a reward.
    fn step(
        &self,
        cx: &CallContext,
        session: &SessionId,
        task: Self::Task,
        response: &ModelResponse,
    ) -> impl Future<Output = Result<Step>> + Send;

    /// Returns the table of this server's sessions, so that the SDK closes them and counts them in the metrics. `None` by default.
    fn sessions(&self) -> Option<&dyn SessionTable> {
        None
    }

    /// Releases the state of an episode, after its last step and for `POST /close`. The default closes the session in the table of
    /// [`GymnasiumServer::sessions`], if there is one.
    ///
    /// # Errors
    /// The error of the implementation; the default never fails.
    fn close_session(&self, cx: &CallContext, session: &SessionId) -> impl Future<Output = Result<()>> + Send {
        let _ = cx;
        if let Some(sessions) = self.sessions() {
            sessions.end(session);
        }
        async { Ok(()) }
    }
}

/// The reply of a [`GymnasiumServer`] to a response of the model. Serializes as the body of `/step`.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Step {
    /// The next message of the user.
    pub observation: Option<String>,
    /// The reward of this step; the episode's reward is the sum.
    pub reward: f64,
    /// `true` if the environment ended the episode.
    pub terminated: bool,
    /// `true` if a limit ended the episode.
    pub truncated: bool,
    /// Further information. `tool_outputs` contains the outputs of the response's tool calls.
    pub info: serde_json::Map<String, serde_json::Value>,
}

impl Step {
    /// Replies as a user.
    #[must_use]
    pub fn reply(observation: impl Into<String>) -> Self {
        Self { observation: Some(observation.into()), ..Self::default() }
    }

    /// Ends the episode.
    #[must_use]
    pub fn done(reward: f64) -> Self {
        Self { reward, terminated: true, ..Self::default() }
    }

    /// Adds a reward to this step.
    #[must_use]
    pub fn with_reward(mut self, reward: f64) -> Self {
        self.reward += reward;
        self
    }

    /// Adds a key to `info`.
    #[must_use]
    pub fn with_info(mut self, key: impl Into<String>, value: impl Into<serde_json::Value>) -> Self {
        self.info.insert(key.into(), value.into());
        self
    }

    /// Adds the output of a tool call, which the agent passes to the model.
    #[must_use]
    pub fn with_tool_output(mut self, call_id: &str, output: &str) -> Self {
        let outputs = self.info.entry("tool_outputs").or_insert_with(|| serde_json::Value::Array(Vec::new()));
        if let Some(outputs) = outputs.as_array_mut() {
            outputs.push(serde_json::json!({"call_id": call_id, "output": output}));
        }
        self
    }
}

/// A model, or a proxy of one, which agents call.
///
/// It keeps nothing of a session that a response depends on: with several replicas, a later call of the session may go to another one.
///
/// ```
/// use gym_core::prelude::*;
///
/// /// Says 4.
/// struct Four;
///
/// impl ModelServer for Four {
///     async fn responses(&self, _: &CallContext, _: &SessionId, _: &RawObject) -> Result<ModelResponse> {
///         let said = r#"{"output": [{"type": "message", "content": [{"type": "output_text", "text": "4"}]}]}"#;
///         Ok(ModelResponse(RawObject::parse(said)?))
///     }
///
///     async fn chat_completions(&self, _: &CallContext, _: &SessionId, _: &RawObject) -> Result<RawObject> {
///         Err(Error::not_started(Code::Unimplemented, "no chat completions"))
///     }
/// }
/// ```
pub trait ModelServer: Send + Sync + 'static {
    /// Generates a response, for `POST /v1/responses`.
    ///
    /// # Errors
    /// An error fails the attempt; it never becomes a reward.
    fn responses(
        &self,
        cx: &CallContext,
        session: &SessionId,
        body: &RawObject,
    ) -> impl Future<Output = Result<ModelResponse>> + Send;

    /// Generates a chat completion, for `POST /v1/chat/completions`.
    ///
    /// # Errors
    /// The error of the model or of its endpoint.
    fn chat_completions(
        &self,
        cx: &CallContext,
        session: &SessionId,
        body: &RawObject,
    ) -> impl Future<Output = Result<RawObject>> + Send;

    /// Returns the endpoints that the server calls, for `/health`; `None` by default.
    fn endpoints(&self) -> Option<&dyn ModelEndpoints> {
        None
    }
}

/// An agent: calls the model, runs the tools, and requests the verification of the episode. Only `run` is required.
///
/// ```
/// use gym_core::prelude::*;
///
/// /// Returns the row unchanged.
/// struct Echo;
///
/// impl AgentServer for Echo {
///     async fn run(&self, _: &CallContext, _: &SessionId, row: &RawObject) -> Result<Response> {
///         Ok(Response::json(row.text().clone()))
///     }
/// }
/// ```
pub trait AgentServer: Send + Sync + 'static {
    /// Runs an episode, for `POST /run`. The response is the row with the model's response and the reward.
    ///
    /// # Errors
    /// An error fails the attempt.
    fn run(
        &self,
        cx: &CallContext,
        session: &SessionId,
        row: &RawObject,
    ) -> impl Future<Output = Result<Response>> + Send;

    /// Runs the loop of model and tools without verification, for `POST /v1/responses`.
    ///
    /// # Errors
    /// `NotFound` by default, which means that this agent does not serve the route.
    fn responses(
        &self,
        cx: &CallContext,
        session: &SessionId,
        body: &RawObject,
    ) -> impl Future<Output = Result<Response>> + Send {
        let _ = (cx, session, body);
        async { Err(Error::not_started(Code::NotFound, "this agent does not serve /v1/responses")) }
    }

    /// Computes the metrics of many rollouts, for `POST /aggregate_metrics`. The default computes NeMo Gym's metrics.
    ///
    /// # Errors
    /// The default returns `InvalidArgument` if it cannot compute the metrics of these rollouts.
    fn aggregate_metrics(
        &self,
        cx: &CallContext,
        session: &SessionId,
        body: &RawObject,
    ) -> impl Future<Output = Result<Response>> + Send {
        let _ = session;
        let reply = crate::rollout::metrics::aggregate_metrics(body.text(), cx.reply_bytes_max);
        async {
            reply
                .map(crate::rollout::metrics::standard_response)
                .map_err(|error| Error::invalid("aggregate the metrics of these rollouts").caused_by(error))
        }
    }
}

/// The server that collectors call. The stock implementation forwards requests to an agent.
///
/// ```
/// use gym_core::prelude::*;
///
/// /// Gives every row the same reward.
/// struct Fixed;
///
/// impl RolloutServer for Fixed {
///     async fn run(&self, _: &CallContext, _: &RawObject) -> Result<Response> {
///         Ok(Response::json(r#"{"reward": 1.0}"#))
///     }
///
///     async fn aggregate_metrics(&self, _: &CallContext, _: &RawObject) -> Result<Response> {
///         Err(Error::not_started(Code::Unimplemented, "no metrics"))
///     }
/// }
/// ```
pub trait RolloutServer: Send + Sync + 'static {
    /// Runs an episode, for `POST /run`.
    ///
    /// # Errors
    /// An error fails the attempt.
    fn run(&self, cx: &CallContext, row: &RawObject) -> impl Future<Output = Result<Response>> + Send;

    /// Returns `true` if a `/run` that arrives again with the same call id ([`CALL_METADATA`](crate::message::CALL_METADATA)) joins the episode
    /// of the first one. Clients then send a `/run` again whose connection broke. The default is `false`.
    fn joins_runs(&self) -> bool {
        false
    }

    /// Computes the metrics of many rollouts, for `POST /aggregate_metrics`.
    ///
    /// # Errors
    /// The error of the implementation, such as that of the agent.
    fn aggregate_metrics(&self, cx: &CallContext, body: &RawObject) -> impl Future<Output = Result<Response>> + Send;
}

//! Server roles: the traits that users implement for environments, models and agents.
//!
//! The traits are written as plain `async fn`; gym-server wraps an implementation into a handler that adds sessions, health,
//! metrics and the splicing of rows.

use std::fmt;
use std::future::Future;
use std::sync::Arc;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::base::error::{Code, Error, Result};
use crate::message::CallContext;
use crate::message::RawObject;
use crate::message::Response;
use crate::server::ModelResponse;

/// The four kinds of servers, by the keys that NeMo Gym's configuration gives them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum ServerKind {
    /// Fronts an inference engine.
    #[serde(rename = "responses_api_models")]
    Model,
    /// Holds state and tools, and scores.
    #[serde(rename = "resources_servers")]
    Resources,
    /// Drives the loop of one rollout.
    #[serde(rename = "responses_api_agents")]
    Agent,
    /// What a collector talks to.
    #[serde(rename = "environment_servers")]
    Environment,
}

impl ServerKind {
    /// Every kind.
    pub const ALL: [Self; 4] = [Self::Model, Self::Resources, Self::Agent, Self::Environment];

    /// The key in NeMo Gym's configuration.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Model => "responses_api_models",
            Self::Resources => "resources_servers",
            Self::Agent => "responses_api_agents",
            Self::Environment => "environment_servers",
        }
    }

    /// The kind of that key, if there is one.
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

/// Which episode a call belongs to: the same for all calls that carry one session cookie.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SessionId(Arc<str>);

impl SessionId {
    /// The session of that id.
    #[must_use]
    pub fn new(id: impl Into<Arc<str>>) -> Self {
        Self(id.into())
    }

    /// The id's text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A reward and what the verifier adds to the row.
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    /// The score.
    pub reward: f64,
    /// Further keys, in order; they replace equal ones of the row.
    pub fields: Vec<(&'static str, serde_json::Value)>,
}

impl Verdict {
    /// A reward and nothing else.
    #[must_use]
    pub fn reward(reward: f64) -> Self {
        Self { reward, fields: Vec::new() }
    }

    /// 1 or 0.
    #[must_use]
    pub fn correct(correct: bool) -> Self {
        Self::reward(if correct { 1.0 } else { 0.0 })
    }

    /// The same with one more key.
    #[must_use]
    pub fn with(mut self, key: &'static str, value: impl Into<serde_json::Value>) -> Self {
        self.fields.push((key, value.into()));
        self
    }
}

/// Holds the state and the tools of an episode, and scores it. Only `verify` must be written.
pub trait ResourcesServer: Send + Sync + 'static {
    /// What the verifier reads of a row; the rest comes back as it was.
    type Task: DeserializeOwned + Send;

    /// Prepares an episode. The reply is usually empty.
    fn seed_session(
        &self,
        cx: &CallContext,
        session: &SessionId,
        row: &RawObject,
    ) -> impl Future<Output = Result<RawObject>> + Send {
        let _ = (cx, session, row);
        async { Ok(RawObject::empty()) }
    }

    /// Runs a tool, called by `POST /<tool>`. Whatever the answer says, the agent hands its body to the model. An unknown
    /// tool is `NotFound`, see [`unknown_tool`].
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

    /// Scores an episode. An error is a failed attempt, never a reward.
    fn verify(
        &self,
        cx: &CallContext,
        session: &SessionId,
        task: Self::Task,
        response: &ModelResponse,
    ) -> impl Future<Output = Result<Verdict>> + Send;

    /// Whether a key of the row comes back in the scored row. All do, unless an environment says otherwise: every number of a
    /// row becomes a metric.
    fn returns(&self, key: &str) -> bool {
        let _ = key;
        true
    }

    /// Lets go of an episode's state. Called once; a session that nobody closed is forgotten by age.
    fn close_session(&self, cx: &CallContext, session: &SessionId) -> impl Future<Output = Result<()>> + Send {
        let _ = (cx, session);
        async { Ok(()) }
    }
}

/// The error of a tool that this server does not have.
#[must_use]
pub fn unknown_tool(tool: &str) -> Error {
    Error::not_started(Code::NotFound, format!("there is no tool `{tool}` here"))
}

/// Answers as a model.
pub trait ModelServer: Send + Sync + 'static {
    /// `POST /v1/responses`.
    fn responses(
        &self,
        cx: &CallContext,
        session: &SessionId,
        body: &RawObject,
    ) -> impl Future<Output = Result<ModelResponse>> + Send;

    /// `POST /v1/chat/completions`.
    fn chat_completions(
        &self,
        cx: &CallContext,
        session: &SessionId,
        body: &RawObject,
    ) -> impl Future<Output = Result<RawObject>> + Send;
}

/// Drives an episode: asks the model, runs the tools, has it verified.
pub trait AgentServer: Send + Sync + 'static {
    /// `POST /run`: a whole episode for a row; the answer is the row with response and reward.
    fn run(
        &self,
        cx: &CallContext,
        session: &SessionId,
        row: &RawObject,
    ) -> impl Future<Output = Result<Response>> + Send;

    /// `POST /v1/responses`: the loop alone. An agent that has none answers that there is no such route.
    fn responses(
        &self,
        cx: &CallContext,
        session: &SessionId,
        body: &RawObject,
    ) -> impl Future<Output = Result<Response>> + Send {
        let _ = (cx, session, body);
        async { Err(Error::not_started(Code::NotFound, "this agent answers no /v1/responses of its own")) }
    }

    /// `POST /aggregate_metrics`: the metrics of many rollouts of this agent's environment; computed here unless said otherwise.
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
                .map(Response::json)
                .map_err(|error| Error::invalid("these rollouts cannot be aggregated").caused_by(error))
        }
    }
}

/// What a collector talks to. The stock one relays to an agent.
pub trait EnvironmentServer: Send + Sync + 'static {
    /// `POST /run`.
    fn run(&self, cx: &CallContext, row: &RawObject) -> impl Future<Output = Result<Response>> + Send;

    /// `POST /aggregate_metrics`.
    fn aggregate_metrics(&self, cx: &CallContext, body: &RawObject) -> impl Future<Output = Result<Response>> + Send;
}

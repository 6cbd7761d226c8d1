//! The agent role: `/run`, `/v1/responses` and `/aggregate_metrics`.

use async_trait::async_trait;
use gym_core::rollout::{EPISODE_METADATA, EpisodeRecord};
use gym_core::server::ServerKind;
use gym_core::{AgentServer, CallContext, Error, RawObject, Response, Result, SessionId, Verb};

use crate::metrics::{Metrics, ToolErrorMetrics};
use crate::role::reply;
use crate::role::route::{RoleRequest, RoleSpec};

pub(super) const SPEC: RoleSpec =
    RoleSpec { kind: ServerKind::Agent, routes: &["/run", "/v1/responses", "/aggregate_metrics"], sessions: true };

/// An object-safe [`AgentServer`], so that the role is compiled once and not for each implementation.
#[async_trait]
trait DynAgentServer: Send + Sync + 'static {
    async fn run(&self, cx: &CallContext, session: &SessionId, row: &RawObject) -> Result<Response>;
    async fn responses(&self, cx: &CallContext, session: &SessionId, body: &RawObject) -> Result<Response>;
    async fn aggregate_metrics(&self, cx: &CallContext, session: &SessionId, body: &RawObject) -> Result<Response>;
}

#[async_trait]
impl<S: AgentServer> DynAgentServer for S {
    async fn run(&self, cx: &CallContext, session: &SessionId, row: &RawObject) -> Result<Response> {
        AgentServer::run(self, cx, session, row).await.map_err(Error::of_served_request)
    }

    async fn responses(&self, cx: &CallContext, session: &SessionId, body: &RawObject) -> Result<Response> {
        AgentServer::responses(self, cx, session, body).await.map_err(Error::of_served_request)
    }

    async fn aggregate_metrics(&self, cx: &CallContext, session: &SessionId, body: &RawObject) -> Result<Response> {
        AgentServer::aggregate_metrics(self, cx, session, body).await.map_err(Error::of_served_request)
    }
}

pub(super) struct AgentRole {
    agent: Box<dyn DynAgentServer>,
    tool_errors: ToolErrorMetrics,
}

impl AgentRole {
    pub(super) fn new(agent: impl AgentServer, name: &str, metrics: &Metrics) -> Self {
        Self { agent: Box::new(agent), tool_errors: metrics.tool_errors(name) }
    }

    pub(super) async fn respond(&self, request: &RoleRequest) -> Result<Response> {
        match request.target() {
            (Verb::Post, "/run" | "/v1/responses" | "/aggregate_metrics") => {}
            (_, "/run" | "/v1/responses" | "/aggregate_metrics") => return Ok(reply::method_not_allowed("POST")),
            _ => return Ok(reply::not_found()),
        }
        let body = match reply::object(&request.message) {
            Ok(body) => body,
            Err(response) => return Ok(response),
        };
        let (cx, session) = (&request.context, &request.session);
        let response = match request.path() {
            "/run" => self.agent.run(cx, session, &body).await?,
            "/v1/responses" => self.agent.responses(cx, session, &body).await?,
            _ => return self.agent.aggregate_metrics(cx, session, &body).await,
        };
        self.count(&response);
        Ok(response)
    }

    /// Counts the tool errors of an episode, which agents of users report in the same metadata as the stock agents.
    fn count(&self, response: &Response) {
        // Few episodes have errors, and the others do not pay for a parse.
        let text = response.metadata.get(EPISODE_METADATA).filter(|text| text.contains("tool_errors"));
        if let Some(record) = text.and_then(EpisodeRecord::from_text) {
            self.tool_errors.count(record.tool_errors, record.tool_failures);
        }
    }
}

//! The agent role: `/run`, `/v1/responses` and `/aggregate_metrics`.

use futures_util::future::BoxFuture;
use gym_core::rollout::EPISODE_METADATA;
use gym_core::server::ServerKind;
use gym_core::{AgentServer, CallContext, Error, RawObject, Response, Result, SessionId, Verb};

use crate::metrics::{EpisodeMetrics, Metrics};
use crate::role::reply;
use crate::role::route::{RoleRequest, RoleSpec};

pub(super) const SPEC: RoleSpec =
    RoleSpec { kind: ServerKind::Agent, routes: &["/run", "/v1/responses", "/aggregate_metrics"], sessions: true };

/// An object-safe [`AgentServer`], so that the role is compiled once and not for each implementation. Without a macro, whose futures would hold
/// the arguments twice.
trait DynAgentServer: Send + Sync + 'static {
    fn run<'a>(&'a self, cx: &'a CallContext, session: &'a SessionId, row: &'a RawObject) -> AgentFuture<'a>;
    fn responses<'a>(&'a self, cx: &'a CallContext, session: &'a SessionId, body: &'a RawObject) -> AgentFuture<'a>;
    fn aggregate_metrics<'a>(
        &'a self,
        cx: &'a CallContext,
        session: &'a SessionId,
        body: &'a RawObject,
    ) -> AgentFuture<'a>;
}

type AgentFuture<'a> = BoxFuture<'a, Result<Response>>;

impl<S: AgentServer> DynAgentServer for S {
    fn run<'a>(&'a self, cx: &'a CallContext, session: &'a SessionId, row: &'a RawObject) -> AgentFuture<'a> {
        Box::pin(AgentServer::run(self, cx, session, row))
    }

    fn responses<'a>(&'a self, cx: &'a CallContext, session: &'a SessionId, body: &'a RawObject) -> AgentFuture<'a> {
        Box::pin(AgentServer::responses(self, cx, session, body))
    }

    fn aggregate_metrics<'a>(
        &'a self,
        cx: &'a CallContext,
        session: &'a SessionId,
        body: &'a RawObject,
    ) -> AgentFuture<'a> {
        Box::pin(AgentServer::aggregate_metrics(self, cx, session, body))
    }
}

pub(super) struct AgentRole {
    agent: Box<dyn DynAgentServer>,
    episodes: EpisodeMetrics,
}

impl AgentRole {
    pub(super) fn new(agent: impl AgentServer, name: &str, metrics: &Metrics) -> Self {
        Self { agent: Box::new(agent), episodes: metrics.episodes(name) }
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
        let (responding, is_episode) = match request.path() {
            "/run" => (self.agent.run(cx, session, &body), true),
            "/v1/responses" => (self.agent.responses(cx, session, &body), true),
            _ => (self.agent.aggregate_metrics(cx, session, &body), false),
        };
        let response = responding.await.map_err(Error::of_served_request)?;
        // Agents of users report in the same metadata as the stock agents.
        if is_episode && let Some(metadata) = response.metadata.get(EPISODE_METADATA) {
            self.episodes.count(metadata);
        }
        Ok(response)
    }
}

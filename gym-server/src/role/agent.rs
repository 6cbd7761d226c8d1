//! The agent role: `/run`, `/v1/responses` and `/aggregate_metrics`.

use async_trait::async_trait;
use gym_core::server::ServerKind;
use gym_core::{AgentServer, CallContext, RawObject, Response, Result, SessionId, Verb};

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
        AgentServer::run(self, cx, session, row).await
    }

    async fn responses(&self, cx: &CallContext, session: &SessionId, body: &RawObject) -> Result<Response> {
        AgentServer::responses(self, cx, session, body).await
    }

    async fn aggregate_metrics(&self, cx: &CallContext, session: &SessionId, body: &RawObject) -> Result<Response> {
        AgentServer::aggregate_metrics(self, cx, session, body).await
    }
}

pub(super) struct AgentRole(Box<dyn DynAgentServer>);

impl AgentRole {
    pub(super) fn new(agent: impl AgentServer) -> Self {
        Self(Box::new(agent))
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
        match request.path() {
            "/run" => self.0.run(cx, session, &body).await,
            "/v1/responses" => self.0.responses(cx, session, &body).await,
            _ => self.0.aggregate_metrics(cx, session, &body).await,
        }
    }
}

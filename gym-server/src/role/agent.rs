//! An agent server behind the seam: `/run`, `/v1/responses` and `/aggregate_metrics`.

use std::sync::Arc;

use futures_util::future::BoxFuture;
use gym_core::{AgentServer, Handler, Request, Response, Result, ServerKind, Verb};

use super::{Call, Role, RoleServer, Site};
use crate::reply;

/// Serves an [`AgentServer`].
#[derive(Clone, Debug)]
pub struct Agent(Arc<dyn Handler>);

impl Agent {
    /// Serves `server` at `site`.
    #[must_use]
    pub fn new<S: AgentServer>(server: S, site: &Site) -> Self {
        Self(Arc::new(RoleServer::new(AgentRole(server), site)))
    }
}

impl Handler for Agent {
    fn handle(&self, request: Request) -> BoxFuture<'static, Result<Response>> {
        self.0.handle(request)
    }
}

struct AgentRole<S>(S);

impl<S: AgentServer> Role for AgentRole<S> {
    const ROUTES: &'static [&'static str] = &["/run", "/v1/responses", "/aggregate_metrics"];
    const KIND: ServerKind = ServerKind::Agent;

    async fn answer(&self, call: &Call) -> Result<Response> {
        match call.what() {
            (Verb::Post, "/run" | "/v1/responses" | "/aggregate_metrics") => {}
            (_, "/run" | "/v1/responses" | "/aggregate_metrics") => return Ok(reply::method_not_allowed("POST")),
            _ => return Ok(reply::not_found()),
        }
        let body = match reply::object(&call.message) {
            Ok(body) => body,
            Err(response) => return Ok(response),
        };
        let (cx, session) = (&call.context, &call.session);
        match call.path() {
            "/run" => self.0.run(cx, session, &body).await,
            "/v1/responses" => self.0.responses(cx, session, &body).await,
            _ => self.0.aggregate_metrics(cx, session, &body).await,
        }
    }
}

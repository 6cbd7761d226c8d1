//! An agent server behind the seam: `/run`, `/v1/responses` and `/aggregate_metrics`.

use std::sync::Arc;

use futures_util::future::BoxFuture;
use gym_core::{AgentServer, Handler, Request, Response, Result, ServerKind, Verb};

use super::{Call, Role, RoleServer, Site, Trade};
use crate::reply;

/// Serves an [`AgentServer`].
#[derive(Clone, Debug)]
pub struct Agent(Arc<dyn Handler>);

impl Agent {
    /// Serves `server` at `site`.
    #[must_use]
    pub fn new<S: AgentServer>(server: S, site: &Site) -> Self {
        Self(Arc::new(RoleServer::new(&TRADE, Box::new(AgentRole(server)), site)))
    }
}

impl Handler for Agent {
    fn handle(&self, request: Request) -> BoxFuture<'static, Result<Response>> {
        self.0.handle(request)
    }
}

const TRADE: Trade =
    Trade { kind: ServerKind::Agent, routes: &["/run", "/v1/responses", "/aggregate_metrics"], sessions: true };

struct AgentRole<S>(S);

impl<S: AgentServer> Role for AgentRole<S> {
    fn answer<'a>(&'a self, call: &'a Call) -> BoxFuture<'a, Result<Response>> {
        Box::pin(async move {
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
        })
    }
}

//! An environment server behind the seam: what a collector talks to.

use std::sync::Arc;

use futures_util::future::BoxFuture;
use gym_core::{EnvironmentServer, Handler, Request, Response, Result, ServerKind, Verb};

use super::{Call, Role, RoleServer, Site, Trade};
use crate::reply;

/// Serves an [`EnvironmentServer`]. It has no session of its own: cookies pass through it.
#[derive(Clone, Debug)]
pub struct Environment(Arc<dyn Handler>);

impl Environment {
    /// Serves `server` at `site`.
    #[must_use]
    pub fn new<S: EnvironmentServer>(server: S, site: &Site) -> Self {
        Self(Arc::new(RoleServer::new(&TRADE, Box::new(EnvironmentRole(server)), site)))
    }
}

impl Handler for Environment {
    fn handle(&self, request: Request) -> BoxFuture<'static, Result<Response>> {
        self.0.handle(request)
    }
}

const TRADE: Trade = Trade { kind: ServerKind::Environment, routes: &["/run", "/aggregate_metrics"], sessions: false };

struct EnvironmentRole<S>(S);

impl<S: EnvironmentServer> Role for EnvironmentRole<S> {
    fn answer<'a>(&'a self, call: &'a Call) -> BoxFuture<'a, Result<Response>> {
        Box::pin(async move {
            match call.what() {
                (Verb::Post, "/run" | "/aggregate_metrics") => {}
                (_, "/run" | "/aggregate_metrics") => return Ok(reply::method_not_allowed("POST")),
                _ => return Ok(reply::not_found()),
            }
            let body = match reply::object(&call.message) {
                Ok(body) => body,
                Err(response) => return Ok(response),
            };
            match call.path() {
                "/run" => self.0.run(&call.context, &body).await,
                _ => self.0.aggregate_metrics(&call.context, &body).await,
            }
        })
    }
}

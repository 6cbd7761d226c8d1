//! The environment role, which a collector calls: `/run` and `/aggregate_metrics`.

use async_trait::async_trait;
use gym_core::server::ServerKind;
use gym_core::{CallContext, EnvironmentServer, RawObject, Response, Result, Verb};

use crate::role::reply;
use crate::role::route::{RoleRequest, RoleSpec};

pub(super) const SPEC: RoleSpec =
    RoleSpec { kind: ServerKind::Environment, routes: &["/run", "/aggregate_metrics"], sessions: false };

/// An object-safe [`EnvironmentServer`].
#[async_trait]
trait DynEnvironmentServer: Send + Sync + 'static {
    async fn run(&self, cx: &CallContext, row: &RawObject) -> Result<Response>;
    async fn aggregate_metrics(&self, cx: &CallContext, body: &RawObject) -> Result<Response>;
}

#[async_trait]
impl<S: EnvironmentServer> DynEnvironmentServer for S {
    async fn run(&self, cx: &CallContext, row: &RawObject) -> Result<Response> {
        EnvironmentServer::run(self, cx, row).await
    }

    async fn aggregate_metrics(&self, cx: &CallContext, body: &RawObject) -> Result<Response> {
        EnvironmentServer::aggregate_metrics(self, cx, body).await
    }
}

pub(super) struct EnvironmentRole(Box<dyn DynEnvironmentServer>);

impl EnvironmentRole {
    pub(super) fn new(environment: impl EnvironmentServer) -> Self {
        Self(Box::new(environment))
    }

    pub(super) async fn respond(&self, request: &RoleRequest) -> Result<Response> {
        match request.target() {
            (Verb::Post, "/run" | "/aggregate_metrics") => {}
            (_, "/run" | "/aggregate_metrics") => return Ok(reply::method_not_allowed("POST")),
            _ => return Ok(reply::not_found()),
        }
        let body = match reply::object(&request.message) {
            Ok(body) => body,
            Err(response) => return Ok(response),
        };
        match request.path() {
            "/run" => self.0.run(&request.context, &body).await,
            _ => self.0.aggregate_metrics(&request.context, &body).await,
        }
    }
}

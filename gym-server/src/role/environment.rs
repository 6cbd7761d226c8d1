//! The environment role, which a collector calls: `/run` and `/aggregate_metrics`.

use futures_util::future::BoxFuture;
use gym_core::server::ServerKind;
use gym_core::{CallContext, RawObject, Response, Result, RolloutServer, Verb};

use crate::role::reply;
use crate::role::route::{RoleRequest, RoleSpec};

pub(super) const SPEC: RoleSpec =
    RoleSpec { kind: ServerKind::Environment, routes: &["/run", "/aggregate_metrics"], sessions: false };

/// An object-safe [`RolloutServer`]. Without a macro, whose futures would hold the arguments twice.
trait DynRolloutServer: Send + Sync + 'static {
    fn run<'a>(&'a self, cx: &'a CallContext, row: &'a RawObject) -> BoxFuture<'a, Result<Response>>;
    fn aggregate_metrics<'a>(&'a self, cx: &'a CallContext, body: &'a RawObject) -> BoxFuture<'a, Result<Response>>;
    fn joins_runs(&self) -> bool;
}

impl<S: RolloutServer> DynRolloutServer for S {
    fn run<'a>(&'a self, cx: &'a CallContext, row: &'a RawObject) -> BoxFuture<'a, Result<Response>> {
        Box::pin(RolloutServer::run(self, cx, row))
    }

    fn aggregate_metrics<'a>(&'a self, cx: &'a CallContext, body: &'a RawObject) -> BoxFuture<'a, Result<Response>> {
        Box::pin(RolloutServer::aggregate_metrics(self, cx, body))
    }

    fn joins_runs(&self) -> bool {
        RolloutServer::joins_runs(self)
    }
}

pub(super) struct EnvironmentRole(Box<dyn DynRolloutServer>);

impl EnvironmentRole {
    pub(super) fn new(environment: impl RolloutServer) -> Self {
        Self(Box::new(environment))
    }

    pub(super) fn joins_runs(&self) -> bool {
        self.0.joins_runs()
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

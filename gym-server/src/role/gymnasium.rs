//! The resources role of an environment that replies as a user: `/reset`, `/step` and `/close`, as NeMo Gym's `GymnasiumServer`.

use std::sync::Arc;

use async_trait::async_trait;
use gym_core::server::{GymnasiumServer, ServerKind, SessionCounts, SessionTable, TaskCheck};
use gym_core::{CallContext, Error, ModelResponse, RawObject, Response, Result, SessionId, Verb};
use serde_json::json;

use crate::metrics::Metrics;
use crate::role::reply;
use crate::role::route::{RoleRequest, RoleSpec};

pub(super) const SPEC: RoleSpec = RoleSpec {
    kind: ServerKind::Resources,
    routes: &["/reset", "/step", "/close", "/aggregate_metrics"],
    sessions: true,
};

/// An object-safe [`GymnasiumServer`]. The replies are bodies of `/reset` and `/step`.
#[async_trait]
trait DynGymnasiumServer: Send + Sync + 'static {
    async fn reset(&self, cx: &CallContext, session: &SessionId, row: &RawObject) -> Result<Response>;
    async fn step(
        &self,
        cx: &CallContext,
        session: &SessionId,
        row: &RawObject,
        response: &ModelResponse,
    ) -> Result<Response>;
    fn session_counts(&self) -> Option<SessionCounts>;
    async fn close_session(&self, cx: &CallContext, session: &SessionId) -> Result<()>;
}

#[async_trait]
impl<S: GymnasiumServer> DynGymnasiumServer for S {
    async fn reset(&self, cx: &CallContext, session: &SessionId, row: &RawObject) -> Result<Response> {
        let task: S::Task = row.view().map_err(|error| Error::invalid(error.to_string()))?;
        let observation = GymnasiumServer::reset(self, cx, session, task).await.map_err(Error::of_served_request)?;
        // NeMo Gym's own agent closes an environment that reports this support.
        let body = json!({"observation": observation, "info": {"supports_explicit_close": true}});
        Ok(Response::json(body.to_string()))
    }

    async fn step(
        &self,
        cx: &CallContext,
        session: &SessionId,
        row: &RawObject,
        response: &ModelResponse,
    ) -> Result<Response> {
        let task: S::Task = row.view().map_err(|error| Error::invalid(error.to_string()))?;
        let step = GymnasiumServer::step(self, cx, session, task, response).await.map_err(Error::of_served_request)?;
        if !step.reward.is_finite() {
            // JSON has no NaN: a trainer must not read a NaN as a number or as 0.
            let text = format!("the reward of a step is {}; return a finite number", step.reward);
            return Err(Error::internal(text).about("step"));
        }
        if step.terminated || step.truncated {
            GymnasiumServer::close_session(self, cx, session).await.map_err(Error::of_served_request)?;
        }
        let body = serde_json::to_vec(&step).map_err(|error| Error::internal("write a step").caused_by(error))?;
        Ok(Response::json(body))
    }

    fn session_counts(&self) -> Option<SessionCounts> {
        GymnasiumServer::sessions(self).map(SessionTable::counts)
    }

    async fn close_session(&self, cx: &CallContext, session: &SessionId) -> Result<()> {
        GymnasiumServer::close_session(self, cx, session).await.map_err(Error::of_served_request)
    }
}

pub(super) struct GymnasiumRole {
    server: Arc<dyn DynGymnasiumServer>,
    task: TaskCheck,
}

impl GymnasiumRole {
    pub(super) fn new<S: GymnasiumServer>(environment: S, name: &str, metrics: &Metrics) -> Self {
        let server: Arc<dyn DynGymnasiumServer> = Arc::new(environment);
        let watched = Arc::downgrade(&server);
        metrics.watch_sessions(name, move || watched.upgrade()?.session_counts());
        Self { server, task: TaskCheck::of::<S::Task>() }
    }

    pub(super) fn task_check(&self) -> TaskCheck {
        self.task
    }

    pub(super) async fn respond(&self, request: &RoleRequest) -> Result<Response> {
        match request.target() {
            (Verb::Post, "/reset" | "/step" | "/close" | "/aggregate_metrics") => {}
            (_, "/reset" | "/step" | "/close" | "/aggregate_metrics") => return Ok(reply::method_not_allowed("POST")),
            _ => return Ok(reply::not_found()),
        }
        let body = match reply::object(&request.message) {
            Ok(body) => body,
            Err(response) => return Ok(response),
        };
        let (cx, session) = (&request.context, &request.session);
        match request.path() {
            "/reset" => match reply::require(&body, &["responses_create_params"]) {
                Ok(()) => self.server.reset(cx, session, &body).await,
                Err(refusal) => Ok(refusal),
            },
            "/step" => match reply::model_response(&body) {
                Ok(response) => self.server.step(cx, session, &body, &response).await,
                Err(refusal) => Ok(refusal),
            },
            "/close" => {
                self.server.close_session(cx, session).await?;
                Ok(Response::json("{}"))
            }
            _ => reply::aggregate::reply(cx, &body),
        }
    }
}

//! The resources role: the state and the tools of a session, and the verdict that is added to the row.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use bytes::Bytes;
use gym_core::server::{ServerKind, SessionCounts, TaskCheck, tool_error_response};
use gym_core::{
    CallContext, Code, Error, ModelResponse, RawObject, ResourcesServer, Response, Result, Rope, SessionId, Verb,
    Verdict,
};

use crate::metrics::Metrics;
use crate::role::reply;
use crate::role::route::{self, RoleRequest, RoleSpec};

pub(super) const SPEC: RoleSpec = RoleSpec {
    kind: ServerKind::Resources,
    routes: &["/seed_session", "/verify", "/close_session", "/aggregate_metrics", "/reverify_mode"],
    sessions: true,
};

/// Metadata of a reply to `/seed_session`, for agents of this SDK. `close` means that the session should be closed, `tools` that
/// the reply has [`TOOLS_KEY`]. Python agents ignore both.
pub(crate) const SESSION_METADATA: &str = "x-gym-session";

/// The key of the tools in a reply to `/seed_session`.
pub(crate) const TOOLS_KEY: &str = "_gym_tools";

/// An object-safe [`ResourcesServer`]. Only the deserialization of the task depends on the implementation.
#[async_trait]
trait DynResourcesServer: Send + Sync + 'static {
    async fn seed_session(&self, cx: &CallContext, session: &SessionId, row: &RawObject) -> Result<RawObject>;
    async fn call_tool(&self, cx: &CallContext, session: &SessionId, tool: &str, body: &RawObject) -> Result<Response>;
    async fn verify(
        &self,
        cx: &CallContext,
        session: &SessionId,
        row: &RawObject,
        response: &ModelResponse,
    ) -> Result<Verdict>;
    fn returns(&self, key: &str) -> bool;
    fn session_counts(&self) -> Option<SessionCounts>;
    async fn close_session(&self, cx: &CallContext, session: &SessionId) -> Result<()>;
}

#[async_trait]
impl<S: ResourcesServer> DynResourcesServer for S {
    async fn seed_session(&self, cx: &CallContext, session: &SessionId, row: &RawObject) -> Result<RawObject> {
        ResourcesServer::seed_session(self, cx, session, row).await.map_err(Error::of_served_request)
    }

    async fn call_tool(&self, cx: &CallContext, session: &SessionId, tool: &str, body: &RawObject) -> Result<Response> {
        ResourcesServer::call_tool(self, cx, session, tool, body).await.map_err(Error::of_served_request)
    }

    async fn verify(
        &self,
        cx: &CallContext,
        session: &SessionId,
        row: &RawObject,
        response: &ModelResponse,
    ) -> Result<Verdict> {
        let task: S::Task = row.view().map_err(|error| Error::invalid(error.to_string()))?;
        ResourcesServer::verify(self, cx, session, task, response).await.map_err(Error::of_served_request)
    }

    fn returns(&self, key: &str) -> bool {
        ResourcesServer::returns(self, key)
    }

    fn session_counts(&self) -> Option<SessionCounts> {
        ResourcesServer::sessions(self).map(gym_core::server::SessionTable::counts)
    }

    async fn close_session(&self, cx: &CallContext, session: &SessionId) -> Result<()> {
        ResourcesServer::close_session(self, cx, session).await.map_err(Error::of_served_request)
    }
}

pub(super) struct ResourcesRole {
    server: Arc<dyn DynResourcesServer>,
    task: TaskCheck,
    /// The server's own tools as a JSON list, if it declares any.
    tools: Option<Bytes>,
    /// `true` if sessions should be closed; `false` after the server has reported that it has nothing to release.
    closes: AtomicBool,
}

impl ResourcesRole {
    pub(super) fn new<S: ResourcesServer>(resources: S, name: &str, metrics: &Metrics) -> Self {
        let tools = resources.tools();
        let tools = (!tools.is_empty()).then(|| serde_json::json!(tools).to_string().into());
        let server: Arc<dyn DynResourcesServer> = Arc::new(resources);
        let watched = Arc::downgrade(&server);
        metrics.watch_sessions(name, move || watched.upgrade()?.session_counts());
        Self { server, task: TaskCheck::of::<S::Task>(), tools, closes: AtomicBool::new(true) }
    }

    pub(super) fn task_check(&self) -> TaskCheck {
        self.task
    }

    pub(super) async fn respond(&self, request: &RoleRequest) -> Result<Response> {
        match request.target() {
            (Verb::Get, "/reverify_mode") => return Ok(Response::json("\"unknown\"")),
            (verb, "/seed_session" | "/verify" | "/close_session" | "/aggregate_metrics") if verb != Verb::Post => {
                return Ok(reply::method_not_allowed("POST"));
            }
            (Verb::Post, _) => {}
            _ => return Ok(reply::not_found()),
        }
        let body = match reply::object(&request.message) {
            Ok(body) => body,
            Err(response) => return Ok(response),
        };
        let (cx, session) = (&request.context, &request.session);
        match request.path() {
            "/seed_session" => self.seed_session(cx, session, &body).await,
            "/verify" => self.verify(cx, session, &body).await,
            "/close_session" => {
                match self.server.close_session(cx, session).await {
                    Err(error) if error.code() == Code::Unimplemented => self.closes.store(false, Ordering::Relaxed),
                    closed => closed?,
                }
                let id = body.get("resources_session_id").unwrap_or_else(|| "null".into());
                let reply = RawObject::empty().edit().set("resources_session_id", id).to_rope();
                Ok(Response::json(reply))
            }
            "/aggregate_metrics" => reply::aggregate::reply(cx, &body),
            tool => {
                let name = route::percent_decoded(tool.strip_prefix('/').unwrap_or(tool));
                let called = self.server.call_tool(cx, session, &name, &body).await;
                Ok(called.unwrap_or_else(|error| {
                    let error = route::classified(tool, error);
                    tracing::debug!(tool = &*name, %error, "a tool answered with an error");
                    tool_error_response(&error)
                }))
            }
        }
    }

    async fn seed_session(&self, cx: &CallContext, session: &SessionId, body: &RawObject) -> Result<Response> {
        // The typed form of NeMo Gym 0.7 has the row under `task_data`, and its reply repeats the id and has no further keys.
        let Some(id) = body.get("resources_session_id") else {
            // Before the first call of the model. Some agents in other languages seed without the row.
            if body.contains("responses_create_params") {
                self.task.check(body)?;
            }
            let seeded = self.server.seed_session(cx, session, body).await?;
            let closes = self.closes.load(Ordering::Relaxed);
            let (flags, mut response) = match &self.tools {
                None => (if closes { "close" } else { "" }, Response::json(seeded)),
                Some(tools) => {
                    let flags = if closes { "close, tools" } else { "tools" };
                    (flags, Response::json(seeded.edit().set(TOOLS_KEY, tools.clone()).to_rope()))
                }
            };
            if !flags.is_empty() {
                response.metadata.push(SESSION_METADATA, flags);
            }
            return Ok(response);
        };
        let row = body.get_object("task_data").ok().flatten().unwrap_or_default();
        let seeded = self.server.seed_session(cx, session, &row).await?;
        let mut reply = seeded.edit().set("resources_session_id", id);
        for key in ["resources_tools", "sandbox_access"] {
            if !seeded.contains(key) {
                reply = reply.set(key, "null");
            }
        }
        Ok(Response::json(reply.to_rope()))
    }

    async fn verify(&self, cx: &CallContext, session: &SessionId, body: &RawObject) -> Result<Response> {
        let response = match reply::model_response(body) {
            Ok(response) => response,
            Err(refusal) => return Ok(refusal),
        };
        let verdict = self.server.verify(cx, session, body, &response).await?;
        Ok(Response::json(spliced(body, &verdict, |key| self.server.returns(key))?))
    }
}

/// Returns the row with the reward and the verifier's other keys.
fn spliced(row: &RawObject, verdict: &Verdict, returns: impl Fn(&str) -> bool) -> Result<Rope> {
    verdict.check()?;
    let dropped = row.keys().filter(|key| !returns(key)).map(str::to_owned);
    let mut row = dropped.fold(row.edit(), gym_core::message::Edit::remove).set_value("reward", &verdict.reward)?;
    for (key, value) in &verdict.fields {
        row = row.set_value(*key, value)?;
    }
    Ok(row.to_rope())
}

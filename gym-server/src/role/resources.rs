//! The resources role: the state and tools of a session, and the verdict spliced into the row.

use async_trait::async_trait;
use gym_core::server::ServerKind;
use gym_core::{
    CallContext, Error, ModelResponse, RawObject, ResourcesServer, Response, Result, Rope, SessionId, Verb, Verdict,
};
use serde_json::Value;

use crate::role::reply;
use crate::role::reply::validation::{ValidationProblem, unprocessable};
use crate::role::route::{self, RoleRequest, RoleSpec};

pub(super) const SPEC: RoleSpec = RoleSpec {
    kind: ServerKind::Resources,
    routes: &["/seed_session", "/verify", "/close_session", "/aggregate_metrics", "/reverify_mode"],
    sessions: true,
};

/// A [`ResourcesServer`] as an object: what is generic about one is only how its task is read.
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
    async fn close_session(&self, cx: &CallContext, session: &SessionId) -> Result<()>;
}

#[async_trait]
impl<S: ResourcesServer> DynResourcesServer for S {
    async fn seed_session(&self, cx: &CallContext, session: &SessionId, row: &RawObject) -> Result<RawObject> {
        ResourcesServer::seed_session(self, cx, session, row).await
    }

    async fn call_tool(&self, cx: &CallContext, session: &SessionId, tool: &str, body: &RawObject) -> Result<Response> {
        ResourcesServer::call_tool(self, cx, session, tool, body).await
    }

    async fn verify(
        &self,
        cx: &CallContext,
        session: &SessionId,
        row: &RawObject,
        response: &ModelResponse,
    ) -> Result<Verdict> {
        let task: S::Task = row.view().map_err(|error| Error::invalid(error.to_string()))?;
        ResourcesServer::verify(self, cx, session, task, response).await
    }

    fn returns(&self, key: &str) -> bool {
        ResourcesServer::returns(self, key)
    }

    async fn close_session(&self, cx: &CallContext, session: &SessionId) -> Result<()> {
        ResourcesServer::close_session(self, cx, session).await
    }
}

pub(super) struct ResourcesRole(Box<dyn DynResourcesServer>);

impl ResourcesRole {
    pub(super) fn new(resources: impl ResourcesServer) -> Self {
        Self(Box::new(resources))
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
                self.0.close_session(cx, session).await?;
                let id = body.get("resources_session_id").unwrap_or_else(|| "null".into());
                let reply = RawObject::empty().edit().set("resources_session_id", id).to_rope();
                Ok(Response::json(reply))
            }
            "/aggregate_metrics" => reply::aggregate::reply(cx, &body),
            tool => {
                let name = route::percent_decoded(tool.strip_prefix('/').unwrap_or(tool));
                self.0.call_tool(cx, session, &name, &body).await
            }
        }
    }

    async fn seed_session(&self, cx: &CallContext, session: &SessionId, body: &RawObject) -> Result<Response> {
        // The typed form of NeMo Gym 0.7 puts the row under `task_data` and wants its id back.
        let Some(id) = body.get("resources_session_id") else {
            return Ok(Response::json(self.0.seed_session(cx, session, body).await?));
        };
        let row = body.get_object("task_data").ok().flatten().unwrap_or_default();
        let seeded = self.0.seed_session(cx, session, &row).await?;
        let mut reply = seeded.edit().set("resources_session_id", id);
        for key in ["resources_tools", "sandbox_access"] {
            if !seeded.contains(key) {
                reply = reply.set(key, "null");
            }
        }
        Ok(Response::json(reply.to_rope()))
    }

    async fn verify(&self, cx: &CallContext, session: &SessionId, body: &RawObject) -> Result<Response> {
        let missing: Vec<ValidationProblem> = ["responses_create_params", "response"]
            .into_iter()
            .filter(|key| !body.contains(key))
            .map(|key| ValidationProblem::missing(&[key], body.outline().unwrap_or(Value::Null)))
            .collect();
        if !missing.is_empty() {
            return Ok(unprocessable(missing));
        }
        let Ok(Some(response)) = body.get_object("response") else {
            let kind = "Input should be a valid dictionary or object to extract fields from";
            let input = body.get_as::<Value>("response")?.unwrap_or_default();
            return Ok(unprocessable(vec![ValidationProblem::new(
                "model_attributes_type",
                &["response"],
                kind,
                input,
            )]));
        };
        let verdict = self.0.verify(cx, session, body, &ModelResponse(response)).await?;
        Ok(Response::json(spliced(body, &verdict, |key| self.0.returns(key))?))
    }
}

/// The row as it came, with the reward and what else the verifier says.
fn spliced(row: &RawObject, verdict: &Verdict, returns: impl Fn(&str) -> bool) -> Result<Rope> {
    if !verdict.reward.is_finite() {
        // JSON has no NaN: a trainer must never read one as a number or as a 0.
        return Err(Error::internal(format!("the verifier's reward is {}", verdict.reward)).about("verify"));
    }
    let dropped = row.keys().filter(|key| !returns(key)).map(str::to_owned);
    let mut row = dropped.fold(row.edit(), gym_core::message::Edit::remove).set_value("reward", &verdict.reward)?;
    for (key, value) in &verdict.fields {
        row = row.set_value(*key, value)?;
    }
    Ok(row.to_rope())
}

//! One episode of an agent: seeds, plays and verifies it, and keeps the cookies of each server.

use std::sync::Arc;

use gym_client::{CookieJar, ServerClient, Session};
use gym_core::{CallContext, Code, Error, Execution, Message, ModelResponse, RawObject, Response, Result, Rope, Route};

use crate::role::route::tool_route;

/// Bytes of a route that an error shows; routes are ASCII.
const ROUTE_SHOWN_BYTES: usize = 120;

/// An episode in progress.
///
/// ```
/// use gym_server::prelude::*;
///
/// /// An agent of one turn.
/// struct OneTurn(ServerClient);
///
/// impl AgentServer for OneTurn {
///     async fn run(&self, cx: &CallContext, _: &SessionId, row: &RawObject) -> Result<Response> {
///         let mut episode = Episode::seed(cx, &self.0, "math", row).await?;
///         let params = row.get_object("responses_create_params")?.unwrap_or_default();
///         let answer = episode.ask("policy_model", params).await?;
///         episode.verify(answer).await
///     }
/// }
/// ```
#[derive(Debug)]
pub struct Episode {
    session: Session,
    cx: CallContext,
    resources: Arc<str>,
    row: RawObject,
}

impl Episode {
    /// Begins the episode of a row at a resources server.
    ///
    /// # Errors
    /// The error of `/seed_session`.
    pub async fn seed(cx: &CallContext, client: &ServerClient, resources: &str, row: &RawObject) -> Result<Self> {
        let mut session = client.session();
        let cookies = CookieJar::of_request(&cx.metadata);
        let cx = cx.child();
        if cookies.header().is_some() {
            *session.jar(resources) = cookies;
        }
        post(&mut session, &cx, resources, "/seed_session", row.clone()).await?;
        Ok(Self { session, cx, resources: resources.into(), row: row.clone() })
    }

    /// Sends a request to a model server.
    ///
    /// # Errors
    /// The error of `/v1/responses`; `InvalidArgument` if the response is not a JSON object.
    pub async fn ask(&mut self, model: &str, params: impl Into<Rope>) -> Result<ModelResponse> {
        let answer: Message = post(&mut self.session, &self.cx, model, "/v1/responses", params).await?;
        Ok(ModelResponse(answer.head.to_object()?))
    }

    /// Calls a tool of the resources server.
    ///
    /// # Errors
    /// The error of the call. A response with an error status is no error: it is data for the model.
    pub async fn call_tool(&mut self, tool: &str, arguments: impl Into<Rope>) -> Result<Message> {
        let route = tool_route(tool);
        let answer = self.session.post(&self.cx, &self.resources, route.clone(), arguments).await;
        answer.map(|answer| answer.message).map_err(|error| of_inner(error, &self.resources, route.as_str()))
    }

    /// Verifies the episode: returns the row with the response and its reward.
    ///
    /// # Errors
    /// The error of `/verify`; `DataLoss` if its response has no reward.
    pub async fn verify(mut self, response: ModelResponse) -> Result<Response> {
        let row = self.row.edit().set_object("response", response.0).to_rope();
        let verdict = post(&mut self.session, &self.cx, &self.resources, "/verify", row).await?;
        scored(verdict.head).map(Response::json).map_err(|error| error.about(format!("POST {}/verify", self.resources)))
    }
}

pub(super) async fn post(
    session: &mut Session,
    cx: &CallContext,
    server: &str,
    route: &'static str,
    body: impl Into<Rope>,
) -> Result<Message> {
    match session.post(cx, server, Route::from_static(route), body).await.and_then(Response::into_result) {
        Ok(response) => Ok(response.message),
        Err(error) => Err(of_inner(error, server, route)),
    }
}

/// Turns the failure of an inner call into the failure of the call that needed it. The outer call has run, whatever became of
/// the inner one, so its caller must not resend it. And a request that the inner server rejects is a defect of this agent, not
/// of the caller's request.
pub(super) fn of_inner(error: Error, server: &str, route: &str) -> Error {
    let code = match error.code() {
        Code::InvalidArgument | Code::NotFound | Code::Unimplemented | Code::AlreadyExists => Code::Internal,
        code => code,
    };
    // A tool's name comes from a model and may be long.
    let route = &route[..route.len().min(ROUTE_SHOWN_BYTES)];
    let text = "hit an exception calling an inner server";
    Error::new(code, Execution::Finished, text).about(format!("POST {server}{route}")).caused_by(error)
}

/// Returns the verifier's response if it is a row with a reward.
pub(super) fn scored(text: Rope) -> Result<Rope> {
    let lost = |what: String| Error::finished(Code::DataLoss, what);
    let row = text.to_object().map_err(|error| lost(format!("the answer is no row: {error}")))?;
    let reward = row.get("reward").ok_or_else(|| lost("the answer has no `reward`".into()))?;
    // What pydantic makes of a reward that is not written as a number.
    match reward.first() {
        Some(b'-' | b'0'..=b'9') => Ok(text),
        Some(b't') => Ok(row.edit().set("reward", "1.0").to_rope()),
        Some(b'f') => Ok(row.edit().set("reward", "0.0").to_rope()),
        _ => Err(lost(format!("the answer's `reward` is {}", String::from_utf8_lossy(&reward)))),
    }
}

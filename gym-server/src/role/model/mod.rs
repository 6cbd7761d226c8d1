//! The model role: `/v1/responses` and `/v1/chat/completions`, as events if the client asks for a stream.

use bytes::Bytes;
use futures_util::TryFutureExt as _;
use futures_util::future::{BoxFuture, Either};
use gym_core::server::{ModelEndpoints, ServerKind, unprocessable};
use gym_core::{
    CallContext, Error, Message, ModelResponse, ModelServer, RawObject, Response, Result, SessionId, Status, Verb,
    World,
};

use crate::role::dialect::schema::Dialect;
use crate::role::dialect::{events, harness};
use crate::role::reply;
use crate::role::route::{RoleRequest, RoleSpec, classified};

pub(super) const SPEC: RoleSpec =
    RoleSpec { kind: ServerKind::Model, routes: &["/v1/responses", "/v1/chat/completions"], sessions: true };

/// An object-safe [`ModelServer`]. Without a macro, whose futures would hold the arguments twice.
trait DynModelServer: Send + Sync + 'static {
    fn responses<'a>(
        &'a self,
        cx: &'a CallContext,
        session: &'a SessionId,
        body: &'a RawObject,
    ) -> BoxFuture<'a, Result<ModelResponse>>;
    fn chat_completions<'a>(
        &'a self,
        cx: &'a CallContext,
        session: &'a SessionId,
        body: &'a RawObject,
    ) -> BoxFuture<'a, Result<RawObject>>;
    fn endpoints(&self) -> Option<&dyn ModelEndpoints>;
}

impl<S: ModelServer> DynModelServer for S {
    fn responses<'a>(
        &'a self,
        cx: &'a CallContext,
        session: &'a SessionId,
        body: &'a RawObject,
    ) -> BoxFuture<'a, Result<ModelResponse>> {
        Box::pin(ModelServer::responses(self, cx, session, body))
    }

    fn chat_completions<'a>(
        &'a self,
        cx: &'a CallContext,
        session: &'a SessionId,
        body: &'a RawObject,
    ) -> BoxFuture<'a, Result<RawObject>> {
        Box::pin(ModelServer::chat_completions(self, cx, session, body))
    }

    fn endpoints(&self) -> Option<&dyn ModelEndpoints> {
        ModelServer::endpoints(self)
    }
}

pub(super) struct ModelRole {
    server: Box<dyn DynModelServer>,
    world: World,
}

impl ModelRole {
    pub(super) fn new(model: impl ModelServer, world: &World) -> Self {
        Self { server: Box::new(model), world: world.clone() }
    }

    /// Returns the endpoints that the model calls, if it has any.
    pub(super) fn endpoints(&self) -> Option<&dyn ModelEndpoints> {
        self.server.endpoints()
    }

    pub(super) async fn respond(&self, request: &RoleRequest) -> Result<Response> {
        let dialect = match request.target() {
            (Verb::Post, "/v1/responses") => Dialect::Responses,
            (Verb::Post, "/v1/chat/completions") => Dialect::Chat,
            (_, "/v1/responses" | "/v1/chat/completions") => return Ok(reply::method_not_allowed("POST")),
            _ => return Ok(reply::not_found()),
        };
        let body = match reply::object(&request.message) {
            Ok(body) => body,
            Err(response) => return Ok(response),
        };
        let stream = match body.get("stream") {
            None => false,
            Some(flag) if dialect == Dialect::Chat => flag == "true",
            Some(flag) => serde_json::from_slice(&flag).is_ok_and(|flag| events::truthy(&flag)),
        };
        if stream {
            return Box::pin(self.streamed(request, dialect, &body)).await;
        }
        let wrong = dialect.check(&body, &[]);
        if !wrong.is_empty() {
            return Ok(unprocessable(&wrong));
        }
        match self.complete(request, dialect, &body).await {
            Ok(answer) => Ok(Response::json(answer)),
            Err(error) => {
                let error = classified(request.path(), error);
                passed_on(&error).ok_or(error)
            }
        }
    }
}

/// The error response of an endpoint. It is stored as the cause of an error, so that clients of this SDK see the endpoint's own
/// status and body.
#[derive(Debug, thiserror::Error)]
#[error("answered {status}")]
pub(crate) struct EndpointRejection {
    pub(crate) status: u16,
    pub(crate) body: Bytes,
}

/// Returns the endpoint's own error body if it is a JSON object, because OpenAI's clients expect its status and `error`.
fn passed_on(error: &Error) -> Option<Response> {
    let refused = std::error::Error::source(error)?.downcast_ref::<EndpointRejection>()?;
    RawObject::parse(refused.body.clone()).ok()?;
    Some(Response::new(Status(refused.status), Message::json(refused.body.clone())).with_failure(error))
}

impl ModelRole {
    fn complete<'a>(
        &'a self,
        request: &'a RoleRequest,
        dialect: Dialect,
        body: &'a RawObject,
    ) -> impl Future<Output = Result<RawObject>> + Send + use<'a> {
        let (cx, session) = (&request.context, &request.session);
        match dialect {
            Dialect::Responses => Either::Left(self.server.responses(cx, session, body).map_ok(|response| response.0)),
            Dialect::Chat => Either::Right(self.server.chat_completions(cx, session, body)),
        }
    }

    /// Replays the complete response as events. A failure of the Responses dialect is also an event. A failure of the chat dialect
    /// is a status, because no event has been sent yet.
    async fn streamed(&self, request: &RoleRequest, dialect: Dialect, body: &RawObject) -> Result<Response> {
        let (plain, names) = match dialect {
            Dialect::Chat => (dialect.without_stream(body)?, harness::JoinedNames::default()),
            Dialect::Responses => {
                let harness::PlainRequest { body, names } = harness::plain(body)?;
                (body, names)
            }
        };
        let wrong = dialect.check(&plain, &[]);
        if !wrong.is_empty() {
            return Ok(unprocessable(&wrong));
        }
        let answer = self.complete(request, dialect, &plain).await;
        match dialect {
            Dialect::Chat => match answer {
                Ok(answer) => events::chat(&answer, events::wants_usage(body)),
                Err(error) => {
                    let error = classified(request.path(), error);
                    passed_on(&error).ok_or(error)
                }
            },
            Dialect::Responses => {
                Ok(answer.and_then(|answer| events::responses(&answer, &names)).unwrap_or_else(|error| {
                    tracing::debug!(%error, "a streamed response failed");
                    events::responses_failure(&error, &self.world.unique_id())
                }))
            }
        }
    }
}

#[cfg(test)]
mod tests;

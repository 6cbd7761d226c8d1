//! A model server behind the seam: `/v1/responses` and `/v1/chat/completions`, streamed on request.

use std::sync::Arc;

use async_trait::async_trait;
use futures_util::future::BoxFuture;
use gym_core::{
    CallContext, Error, Handler, Message, ModelResponse, ModelServer, RawObject, Request, Response, Result, ServerKind,
    SessionId, Status, Verb, World,
};

use super::{Call, Role, RoleServer, Site, Trade, harness, stream};
use crate::model::Refused;
use crate::params::Dialect;
use crate::reply;

/// Serves a [`ModelServer`].
#[derive(Clone, Debug)]
pub struct Model(Arc<dyn Handler>);

impl Model {
    /// Serves `server` at `site`.
    #[must_use]
    pub fn new<S: ModelServer>(server: S, site: &Site) -> Self {
        Self(Arc::new(RoleServer::new(
            &TRADE,
            Box::new(ModelRole { server: Box::new(server), world: site.world.clone() }),
            site,
        )))
    }
}

impl Handler for Model {
    fn handle(&self, request: Request) -> BoxFuture<'static, Result<Response>> {
        self.0.handle(request)
    }
}

const TRADE: Trade =
    Trade { kind: ServerKind::Model, routes: &["/v1/responses", "/v1/chat/completions"], sessions: true };

/// A [`ModelServer`] as an object.
#[async_trait]
trait AnyModel: Send + Sync + 'static {
    async fn responses(&self, cx: &CallContext, session: &SessionId, body: &RawObject) -> Result<ModelResponse>;
    async fn chat_completions(&self, cx: &CallContext, session: &SessionId, body: &RawObject) -> Result<RawObject>;
}

#[async_trait]
impl<S: ModelServer> AnyModel for S {
    async fn responses(&self, cx: &CallContext, session: &SessionId, body: &RawObject) -> Result<ModelResponse> {
        ModelServer::responses(self, cx, session, body).await
    }

    async fn chat_completions(&self, cx: &CallContext, session: &SessionId, body: &RawObject) -> Result<RawObject> {
        ModelServer::chat_completions(self, cx, session, body).await
    }
}

struct ModelRole {
    server: Box<dyn AnyModel>,
    world: World,
}

impl Role for ModelRole {
    fn answer<'a>(&'a self, call: &'a Call) -> BoxFuture<'a, Result<Response>> {
        Box::pin(self.answered(call))
    }
}

impl ModelRole {
    async fn answered(&self, call: &Call) -> Result<Response> {
        let dialect = match call.what() {
            (Verb::Post, "/v1/responses") => Dialect::Responses,
            (Verb::Post, "/v1/chat/completions") => Dialect::Chat,
            (_, "/v1/responses" | "/v1/chat/completions") => return Ok(reply::method_not_allowed("POST")),
            _ => return Ok(reply::not_found()),
        };
        let body = match reply::object(&call.message) {
            Ok(body) => body,
            Err(response) => return Ok(response),
        };
        let stream = match body.get("stream") {
            None => false,
            Some(flag) if dialect == Dialect::Chat => flag == "true",
            Some(flag) => serde_json::from_slice(&flag).is_ok_and(|flag| stream::truthy(&flag)),
        };
        if stream {
            return Box::pin(self.streamed(call, dialect, &body)).await;
        }
        let wrong = dialect.check(&body, &[]);
        if !wrong.is_empty() {
            return Ok(reply::unprocessable(wrong));
        }
        match self.complete(call, dialect, &body).await {
            Ok(answer) => Ok(Response::json(answer)),
            Err(error) => passed_on(&error).ok_or(error),
        }
    }
}

/// The endpoint's own refusal, where it is a JSON object: OpenAI's clients find status and `error` as they know them.
fn passed_on(error: &Error) -> Option<Response> {
    let refused = std::error::Error::source(error)?.downcast_ref::<Refused>()?;
    RawObject::parse(refused.body.clone()).ok()?;
    let mut response = Response::new(Status(refused.status), Message::json(refused.body.clone()));
    response.metadata.push(gym_core::CODE_METADATA, error.code().as_str());
    response.metadata.push(gym_core::EXECUTION_METADATA, error.execution().as_str());
    Some(response)
}

impl ModelRole {
    async fn complete(&self, call: &Call, dialect: Dialect, body: &RawObject) -> Result<RawObject> {
        let (cx, session) = (&call.context, &call.session);
        match dialect {
            Dialect::Responses => Ok(self.server.responses(cx, session, body).await?.0),
            Dialect::Chat => self.server.chat_completions(cx, session, body).await,
        }
    }

    /// The whole answer, replayed as events. A failure of the Responses dialect is an event too; of the chat dialect it is a
    /// status, as long as nothing was promised.
    async fn streamed(&self, call: &Call, dialect: Dialect, body: &RawObject) -> Result<Response> {
        let (plain, names) = match dialect {
            Dialect::Chat => (dialect.without_stream(body)?, harness::Names::default()),
            Dialect::Responses => {
                let harness::Plain { body, names } = harness::plain(body)?;
                (body, names)
            }
        };
        let wrong = dialect.check(&plain, &[]);
        if !wrong.is_empty() {
            return Ok(reply::unprocessable(wrong));
        }
        let answer = self.complete(call, dialect, &plain).await;
        match dialect {
            Dialect::Chat => match answer {
                Ok(answer) => stream::chat(&answer, stream::wants_usage(body)),
                Err(error) => passed_on(&error).ok_or(error),
            },
            Dialect::Responses => {
                Ok(answer.and_then(|answer| stream::responses(&answer, &names)).unwrap_or_else(|error| {
                    tracing::debug!(%error, "a streamed response failed");
                    stream::responses_failure(&error, &self.world.unique_id())
                }))
            }
        }
    }
}

#[cfg(test)]
#[path = "model_tests.rs"]
mod tests;

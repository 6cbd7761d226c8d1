//! A model server behind the seam: `/v1/responses` and `/v1/chat/completions`, streamed on request.

use std::sync::Arc;

use futures_util::future::BoxFuture;
use gym_core::{Handler, ModelServer, RawObject, Request, Response, Result, ServerKind, Verb, World};

use super::{Call, Role, RoleServer, Site, harness, stream};
use crate::params::Dialect;
use crate::reply;

/// Serves a [`ModelServer`].
#[derive(Clone, Debug)]
pub struct Model(Arc<dyn Handler>);

impl Model {
    /// Serves `server` at `site`.
    #[must_use]
    pub fn new<S: ModelServer>(server: S, site: &Site) -> Self {
        Self(Arc::new(RoleServer::new(ModelRole { server, world: site.world.clone() }, site)))
    }
}

impl Handler for Model {
    fn handle(&self, request: Request) -> BoxFuture<'static, Result<Response>> {
        self.0.handle(request)
    }
}

struct ModelRole<S> {
    server: S,
    world: World,
}

impl<S: ModelServer> Role for ModelRole<S> {
    const ROUTES: &'static [&'static str] = &["/v1/responses", "/v1/chat/completions"];
    const KIND: ServerKind = ServerKind::Model;

    async fn answer(&self, call: Call) -> Result<Response> {
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
            return self.streamed(&call, dialect, &body).await;
        }
        let wrong = dialect.check(&body, &[]);
        if !wrong.is_empty() {
            return Ok(reply::unprocessable(wrong));
        }
        Ok(Response::json(self.complete(&call, dialect, &body).await?.into_text()))
    }
}

impl<S: ModelServer> ModelRole<S> {
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
            Dialect::Chat => stream::chat(&answer?, stream::wants_usage(body)),
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

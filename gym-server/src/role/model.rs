//! A model server behind the seam: `/v1/responses` and `/v1/chat/completions`, streamed on request.

use std::sync::Arc;

use futures_util::future::BoxFuture;
use gym_core::{Handler, ModelServer, Request, Response, Result, ServerKind, Verb};

use super::{Call, Role, RoleServer, Site};
use crate::reply;

/// Serves a [`ModelServer`].
#[derive(Clone, Debug)]
pub struct Model(Arc<dyn Handler>);

impl Model {
    /// Serves `server` at `site`.
    #[must_use]
    pub fn new<S: ModelServer>(server: S, site: &Site) -> Self {
        Self(Arc::new(RoleServer::new(ModelRole(server), site)))
    }
}

impl Handler for Model {
    fn handle(&self, request: Request) -> BoxFuture<'static, Result<Response>> {
        self.0.handle(request)
    }
}

struct ModelRole<S>(S);

impl<S: ModelServer> Role for ModelRole<S> {
    const ROUTES: &'static [&'static str] = &["/v1/responses", "/v1/chat/completions", "/v1/models"];
    const KIND: ServerKind = ServerKind::Model;

    async fn answer(&self, call: Call) -> Result<Response> {
        match call.what() {
            (Verb::Post, "/v1/responses" | "/v1/chat/completions") => {}
            (_, "/v1/responses" | "/v1/chat/completions") => return Ok(reply::method_not_allowed("POST")),
            _ => return Ok(reply::not_found()),
        }
        let body = match reply::object(&call.message) {
            Ok(body) => body,
            Err(response) => return Ok(response),
        };
        let (cx, session) = (&call.context, &call.session);
        let answer = match call.path.as_str() {
            "/v1/responses" => self.0.responses(cx, session, &body).await?.0,
            _ => self.0.chat_completions(cx, session, &body).await?,
        };
        Ok(Response::json(answer.into_text()))
    }
}

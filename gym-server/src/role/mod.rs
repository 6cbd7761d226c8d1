//! Turns an implementation of a role into a handler: sessions, health, metrics, rollout prefixes and error bodies are the same
//! for all of them and live here.

mod agent;
mod environment;
mod harness;
mod model;
mod resources;
mod stream;

use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use gym_client::{CookieJar, PeerPath, Transports};
use gym_core::{
    CallContext, Error, Handler, Level, Message, Request, Response, Result, Route, ServerKind, SessionId, Verb, World,
};

pub use agent::Agent;
pub use environment::Environment;
pub use model::Model;
pub use resources::Resources;

use crate::metrics::{Metrics, RouteMetrics};
use crate::reply;

/// Peers that `/health` lists: more than a configuration has servers, and few enough for an answer that is asked for often.
const HEALTH_PEERS_MAX: usize = 64;

/// Under which name a role is served, and what it shares with the other servers of the process.
#[derive(Clone, Debug)]
pub struct Site {
    /// The instance's name in the configuration.
    pub name: String,
    /// The implementation's name.
    pub implementation: String,
    /// Where session ids come from.
    pub world: World,
    /// Where requests are counted.
    pub metrics: Metrics,
    /// What its implementation calls others with, if it does: `/health` says how they are reached.
    pub transports: Option<Transports>,
}

impl Site {
    /// A site with metrics of its own.
    #[must_use]
    pub fn new(name: impl Into<String>, implementation: impl Into<String>, world: &World) -> Self {
        let (name, implementation) = (name.into(), implementation.into());
        Self { name, implementation, world: world.clone(), metrics: Metrics::new(), transports: None }
    }
}

/// What a role makes of a request whose session and route are known. An object, so that what surrounds it is compiled once
/// and not once per implementation.
pub(crate) trait Role: Send + Sync + 'static {
    fn answer<'a>(&'a self, call: &'a Call) -> BoxFuture<'a, Result<Response>>;
}

/// What the implementations of a role have in common.
pub(crate) struct Trade {
    /// Which of the four it is.
    pub(crate) kind: ServerKind,
    /// The routes it counts separately; anything else is counted as a tool.
    pub(crate) routes: &'static [&'static str],
    /// Whether it keeps sessions: a relay passes on those of others.
    pub(crate) sessions: bool,
}

/// One request to a role.
#[derive(Debug)]
pub(crate) struct Call {
    pub(crate) verb: Verb,
    route: Route,
    pub(crate) context: CallContext,
    pub(crate) session: SessionId,
    pub(crate) message: Message,
}

impl Call {
    /// What is asked for, for a `match`.
    pub(crate) fn what(&self) -> (Verb, &str) {
        (self.verb, self.path())
    }

    /// The path without a rollout prefix and without a query.
    pub(crate) fn path(&self) -> &str {
        without_rollout_prefix(self.route.path())
    }
}

/// A role behind the seam. Cheap to clone.
#[derive(Clone)]
pub(crate) struct RoleServer(Arc<Inner>);

struct Inner {
    role: Box<dyn Role>,
    trade: &'static Trade,
    site: Site,
    cookie: String,
    routes: Vec<RouteMetrics>,
    others: RouteMetrics,
}

impl RoleServer {
    pub(crate) fn new(trade: &'static Trade, role: Box<dyn Role>, site: &Site) -> Self {
        let routes = trade.routes.iter().map(|route| site.metrics.route(&site.name, route)).collect();
        let others = site.metrics.route(&site.name, "other");
        let cookie = token(&format!("{}___{}", site.implementation, site.name));
        Self(Arc::new(Inner { role, trade, site: site.clone(), cookie, routes, others }))
    }
}

impl fmt::Debug for RoleServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}({})", self.0.trade.kind, self.0.site.name)
    }
}

impl Handler for RoleServer {
    fn handle(&self, request: Request) -> BoxFuture<'static, Result<Response>> {
        let inner = Arc::clone(&self.0);
        // Outside of the future, which would hold the request beside the call that is made of it.
        let session = if inner.trade.sessions { inner.session(&request.context) } else { SessionId::new("") };
        let Request { verb, route, context, message, .. } = request;
        let call = Call { verb, route, context, session, message };
        Box::pin(async move { Ok(inner.answer(&call).await) })
    }
}

impl Inner {
    async fn answer(&self, call: &Call) -> Response {
        let path = call.path();
        match (call.verb, path) {
            (Verb::Get | Verb::Head, "/" | "/livez" | "/readyz" | "/healthz" | "/health") => return self.health(path),
            (Verb::Get | Verb::Head, "/metrics") => return reply::metrics(&self.site.metrics),
            _ => {}
        }
        let metrics =
            self.trade.routes.iter().position(|route| *route == path).map_or(&self.others, |at| &self.routes[at]);
        let counted = metrics.begin();
        let answered = AssertUnwindSafe(self.role.answer(call)).catch_unwind().await;
        let mut response = match answered {
            Ok(Ok(response)) => response,
            Ok(Err(error)) => {
                tracing::debug!(server = self.site.name, path, %error, "answered with an error");
                reply::of_error(&error)
            }
            Err(panic) => {
                let what = panic_text(&*panic);
                tracing::error!(server = self.site.name, path, what, "a handler panicked");
                reply::of_error(&Error::internal(format!("the handler panicked: {what}")))
            }
        };
        if self.trade.sessions {
            // On every answer, because clients carry only the cookies of the last one forward.
            let attributes = "; path=/; Max-Age=1209600; httponly; samesite=lax";
            let value = [&self.cookie, "=", call.session.as_str(), attributes].concat();
            response.metadata.push("set-cookie", value);
        }
        counted.finish(&response);
        response
    }

    fn health(&self, path: &str) -> Response {
        if path != "/health" {
            return reply::ok();
        }
        let in_flight: i64 = self.routes.iter().chain([&self.others]).map(RouteMetrics::in_flight).sum();
        let peers = self.site.transports.as_ref().map(Transports::paths).unwrap_or_default();
        // Those in this process are no news.
        let peers = peers.into_iter().filter(|peer| peer.level != Some(Level::InProcess));
        let peers: Vec<PeerPath> = peers.take(HEALTH_PEERS_MAX).collect();
        let body = serde_json::json!({
            "status": "ok", "name": self.site.name, "server_type": self.trade.kind.as_str(),
            "implementation": self.site.implementation, "in_flight": in_flight, "peers": peers,
        });
        Response::json(body.to_string())
    }

    /// The session of the caller's cookie; a new one when it has none.
    fn session(&self, context: &CallContext) -> SessionId {
        match CookieJar::find_in_request(&context.metadata, &self.cookie) {
            // Longer ones are not ours, and would be kept in maps.
            Some(id) if !id.is_empty() && id.len() <= 128 => SessionId::new(id),
            _ => SessionId::new(self.site.world.unique_id()),
        }
    }
}

/// Only characters that Python's cookie writer leaves unquoted.
fn token(text: &str) -> String {
    text.chars().map(|c| if c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-') { c } else { '-' }).collect()
}

/// `/ng-rollout/<id>[/training-token-capture]` may stand before any path.
fn without_rollout_prefix(path: &str) -> &str {
    let Some(rest) = path.strip_prefix("/ng-rollout/") else { return path };
    let Some((id, _)) = rest.split_once('/') else { return path };
    let valid = id.starts_with(|c: char| c.is_ascii_alphanumeric())
        && id.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-'));
    if !valid {
        return path;
    }
    let rest = &rest[id.len()..];
    match rest.strip_prefix("/training-token-capture") {
        Some(route) if route.starts_with('/') => route,
        _ => rest,
    }
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> &str {
    panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rollout_prefix_is_taken_off() {
        for (path, bare) in [
            ("/run", "/run"),
            ("/ng-rollout/3-0-a1/v1/responses", "/v1/responses"),
            ("/ng-rollout/a.b/training-token-capture/v1/responses", "/v1/responses"),
            ("/ng-rollout/-x/run", "/ng-rollout/-x/run"),
            ("/ng-rollout/x", "/ng-rollout/x"),
        ] {
            assert_eq!(without_rollout_prefix(path), bare);
        }
    }
}

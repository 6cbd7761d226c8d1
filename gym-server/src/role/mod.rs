//! Serves an implementation of a role: sessions, health, metrics, rollout prefixes and error bodies are the same for all roles.
//!
//! ```text
//!   request ──► RoleServer: incarnation ▸ session ▸ health, metrics ──► agent · environment · model · resources
//!                   reply ◄── error bodies, session cookie ◄───────────────┘ (one call of the implementation)
//! ```

mod agent;
pub(crate) mod dialect;
mod environment;
mod gymnasium;
pub(crate) mod model;
pub(crate) mod reply;
pub(crate) mod resources;
pub(crate) mod route;
pub(crate) mod settings;

use std::fmt;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use gym_client::{AwaitedServers, CookieJar, Transports};
use gym_core::message::TraceContext;
use gym_core::observe::stall::{self, HandlerLabel};
use gym_core::observe::waits::{self, PendingWait, WAITS_ROUTE, Wait, WaitKind, WaitQuery};
use gym_core::rollout::FailureClass;
use gym_core::server::{GymnasiumServer, ServerKind, TaskCheck};
use gym_core::transport::Fence;
use gym_core::{
    AgentServer, CallContext, CancelToken, Error, Handler, Incarnation, ModelServer, Request, ResourcesServer,
    Response, Result, RolloutServer, SessionId, Verb, World,
};
use pin_project_lite::pin_project;
use tokio::time::Instant;
use tracing::field::Empty;
use tracing::{Instrument as _, Span};

pub use gym_core::server::{ValidationProblem, unprocessable};
pub use settings::{Seconds, ServerRef};

use crate::metrics::{Metrics, RouteMetrics};
use crate::role::agent::AgentRole;
use crate::role::environment::EnvironmentRole;
use crate::role::gymnasium::GymnasiumRole;
use crate::role::model::ModelRole;
use crate::role::reply::health;
use crate::role::reply::runs::{RUN, RunsInFlight};
use crate::role::resources::ResourcesRole;
use crate::role::route::{RoleRequest, RoleSpec};

/// The name of a server, and what it shares with the other servers of its process.
#[derive(Clone, Debug)]
pub struct ServerContext {
    /// The instance's name in the configuration.
    pub name: String,
    /// The implementation's name.
    pub implementation: String,
    /// The source of session ids.
    pub world: World,
    /// Counts the requests.
    pub metrics: Metrics,
    /// The transports that the implementation calls other servers with; `/health` reports their peers. `None` if it calls none.
    pub transports: Option<Transports>,
    /// The waits of the implementation's calls, which `/health` reports. `None` if it calls no server by name.
    pub awaited: Option<AwaitedServers>,
    /// The incarnation of the instance: requests for another one are rejected, and responses carry it.
    pub incarnation: Option<Incarnation>,
    /// Cancelled when the server accepts no further connection and call: nobody comes back for what runs without a caller.
    pub draining: CancelToken,
}

impl ServerContext {
    /// Creates a context with metrics of its own, without transports and incarnation.
    #[must_use]
    pub fn new(name: impl Into<String>, implementation: impl Into<String>, world: &World) -> Self {
        let (name, implementation) = (name.into(), implementation.into());
        Self {
            name,
            implementation,
            world: world.clone(),
            metrics: Metrics::new(),
            transports: None,
            awaited: None,
            incarnation: None,
            draining: CancelToken::new(),
        }
    }
}

/// The handler of a role. Cheap to clone; clones share the implementation.
///
/// ```
/// use gym_core::{CallContext, Handler, ModelResponse, Request, ResourcesServer, Result, SessionId, Verdict, World};
/// use gym_server::role::{RoleServer, ServerContext};
///
/// struct AlwaysRight;
///
/// impl ResourcesServer for AlwaysRight {
///     type Task = serde_json::Value;
///     async fn verify(&self, _: &CallContext, _: &SessionId, _: Self::Task, _: &ModelResponse) -> Result<Verdict> {
///         Ok(Verdict::correct(true))
///     }
/// }
///
/// # async fn example() -> Result<()> {
/// let context = ServerContext::new("always_right", "always_right", &World::real());
/// let server = RoleServer::resources(AlwaysRight, &context);
/// let response = server.handle(Request::get(CallContext::default(), "/health")).await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct RoleServer(Arc<RoleState>);

struct RoleState {
    role: Role,
    spec: &'static RoleSpec,
    server: ServerContext,
    fence: Option<Fence>,
    /// The name of the session cookie.
    cookie: String,
    /// The metrics of the routes in `spec`, in their order, and what the watchdog calls each.
    routes: Vec<(RouteMetrics, HandlerLabel)>,
    other_routes: RouteMetrics,
    /// The rollouts in flight of an agent or an environment server.
    runs: RunsInFlight,
}

/// An enum instead of a trait object: the role's part of a request runs in the future that [`RoleServer`] allocates.
enum Role {
    Agent(AgentRole),
    Environment(EnvironmentRole),
    Gymnasium(GymnasiumRole),
    Model(ModelRole),
    Resources(ResourcesRole),
}

impl Role {
    fn spec(&self) -> &'static RoleSpec {
        match self {
            Self::Agent(_) => &agent::SPEC,
            Self::Environment(_) => &environment::SPEC,
            Self::Gymnasium(_) => &gymnasium::SPEC,
            Self::Model(_) => &model::SPEC,
            Self::Resources(_) => &resources::SPEC,
        }
    }

    #[expect(clippy::manual_async_fn, reason = "the future of an async fn holds its arguments twice")]
    fn respond(&self, request: &RoleRequest) -> impl Future<Output = Result<Response>> + Send {
        async move {
            match self {
                Self::Agent(role) => role.respond(request).await,
                Self::Environment(role) => role.respond(request).await,
                Self::Model(role) => role.respond(request).await,
                // Boxed, because the requests of the other roles, which wait longer, would be as large otherwise.
                Self::Gymnasium(role) => Box::pin(role.respond(request)).await,
                Self::Resources(role) => Box::pin(role.respond(request)).await,
            }
        }
    }
}

impl RoleServer {
    /// Serves an agent: `/run`, `/v1/responses` and `/aggregate_metrics`.
    #[must_use]
    pub fn agent(agent: impl AgentServer, context: &ServerContext) -> Self {
        Self::new(Role::Agent(AgentRole::new(agent, &context.name, &context.metrics)), context)
    }

    /// Serves an environment server: `/run` and `/aggregate_metrics`. It keeps no sessions and forwards cookies.
    #[must_use]
    pub fn environment(environment: impl RolloutServer, context: &ServerContext) -> Self {
        Self::new(Role::Environment(EnvironmentRole::new(environment)), context)
    }

    /// Serves a model: `/v1/responses` and `/v1/chat/completions`, as events if the client asks for a stream.
    #[must_use]
    pub fn model(model: impl ModelServer, context: &ServerContext) -> Self {
        Self::new(Role::Model(ModelRole::new(model, &context.world)), context)
    }

    /// Serves a resources server: `/seed_session`, `/verify`, `/close_session`, `/aggregate_metrics`, `/reverify_mode` and a
    /// route for each tool.
    #[must_use]
    pub fn resources(resources: impl ResourcesServer, context: &ServerContext) -> Self {
        Self::new(Role::Resources(ResourcesRole::new(resources, &context.name, &context.metrics)), context)
    }

    /// Serves an environment that replies as a user: `/reset`, `/step`, `/close` and `/aggregate_metrics`.
    #[must_use]
    pub fn gymnasium(environment: impl GymnasiumServer, context: &ServerContext) -> Self {
        Self::new(Role::Gymnasium(GymnasiumRole::new(environment, &context.name, &context.metrics)), context)
    }

    /// Returns the check of rows for this server, if it is an environment.
    #[must_use]
    pub fn task_check(&self) -> Option<TaskCheck> {
        match &self.0.role {
            Role::Resources(role) => Some(role.task_check()),
            Role::Gymnasium(role) => Some(role.task_check()),
            Role::Agent(_) | Role::Environment(_) | Role::Model(_) => None,
        }
    }

    /// Returns `true` if this server joins a `/run` that arrives again to the first one; see
    /// [`RolloutServer::joins_runs`].
    #[must_use]
    pub fn joins_runs(&self) -> bool {
        matches!(&self.0.role, Role::Environment(role) if role.joins_runs())
    }

    fn new(role: Role, server: &ServerContext) -> Self {
        let spec = role.spec();
        let fence = server.incarnation.map(Fence::new);
        let of_route =
            |route: &&str| (server.metrics.route(&server.name, route), HandlerLabel::new(&server.name, route));
        let routes = spec.routes.iter().map(of_route).collect();
        let other_routes = server.metrics.route(&server.name, "other");
        let cookie = cookie_name(&format!("{}___{}", server.implementation, server.name));
        let runs = RunsInFlight::default();
        Self(Arc::new(RoleState { role, spec, server: server.clone(), fence, cookie, routes, other_routes, runs }))
    }
}

impl fmt::Debug for RoleServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}({})", self.0.spec.kind, self.0.server.name)
    }
}

impl Handler for RoleServer {
    fn handle(&self, request: Request) -> BoxFuture<'static, Result<Response>> {
        let state = Arc::clone(&self.0);
        if let Some(Err(error)) = state.fence.as_ref().map(|fence| fence.check(&request.context)) {
            return Box::pin(async move { Err(error) });
        }
        // Outside the future, which would otherwise hold the request in addition to the call built from it.
        let session = if state.spec.sessions { state.session(&request.context) } else { SessionId::new("") };
        let Request { verb, route, mut context, message, .. } = request;
        let caller = context.trace.span_id;
        if context.trace.sampled {
            // The calls of this one are its children.
            context.trace.span_id = state.server.world.rng().u64(1..);
        }
        let request = RoleRequest { verb, route, context, session, message };
        let span = call_span(&state.server.name, &request, caller);
        let responded = async move {
            let mut response = state.respond(&request).await;
            if let Some(fence) = &state.fence {
                fence.mark(&mut response);
            }
            Ok(response)
        };
        Box::pin(responded.instrument(span))
    }
}

/// Returns the span of a call, whose log lines all carry the id of its trace: that of the attempt at a rollout.
fn call_span(server: &str, request: &RoleRequest, caller: u64) -> Span {
    let trace = request.context.trace;
    if trace.trace_id == 0 {
        return Span::none();
    }
    let route = request.path();
    let span = tracing::info_span!(
        "call", server, route, trace_id = %trace.trace(), span_id = Empty, parent_id = Empty, status = Empty
    );
    if trace.sampled {
        span.record("span_id", tracing::field::display(trace.span()));
        span.record("parent_id", tracing::field::display(TraceContext { span_id: caller, ..trace }.span()));
    }
    span
}

pin_project! {
    /// A handler that runs: the watchdog is told of each poll, and its wait is recorded.
    struct WatchedHandler<'a, F> {
        #[pin]
        responding: F,
        label: &'a HandlerLabel,
        context: &'a CallContext,
        began: Instant,
        wait: Option<PendingWait>,
    }
}

impl<F: Future> Future for WatchedHandler<'_, F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let this = self.project();
        let trace_id = this.context.trace.trace_id;
        let polling = stall::poll_begins(this.label, trace_id);
        let polled = this.responding.poll(cx);
        drop(polling);
        match this.wait {
            // The time of the arrival, because inner calls are recorded before their handler.
            Some(wait) => {
                wait.note(polled, || Wait::new(WaitKind::Handler, trace_id).of(**this.label).since(*this.began))
            }
            None => polled,
        }
    }
}

impl RoleState {
    async fn respond(&self, request: &RoleRequest) -> Response {
        let path = request.path();
        match (request.verb, path) {
            (Verb::Get | Verb::Head, "/" | "/livez" | "/readyz" | "/healthz") => return reply::ok(),
            (Verb::Get | Verb::Head, "/health") => return Box::pin(self.health(request)).await,
            (Verb::Get | Verb::Head, "/metrics") => return reply::metrics(&request.context, &self.server.metrics),
            (Verb::Get | Verb::Head, WAITS_ROUTE) => return self.waits(request.route.query()),
            _ => {}
        }
        let route = self.spec.routes.iter().position(|route| *route == path);
        let other;
        let (metrics, label) = match route {
            Some(index) => (&self.routes[index].0, &self.routes[index].1),
            None => {
                other = Box::new(HandlerLabel::new(&self.server.name, path));
                (&self.other_routes, &*other)
            }
        };
        let counted = metrics.begin();
        // Few requests are rollouts, and each of them runs for a long time: a lock for each costs nothing that matters.
        let running = (route.is_some() && path == RUN)
            .then(|| self.runs.begin(counted.began(), request.context.trace.trace_id, &request.message.head));
        let responding = WatchedHandler {
            responding: AssertUnwindSafe(self.role.respond(request)).catch_unwind(),
            label,
            context: &request.context,
            began: counted.began(),
            // A rollout is listed among the runs.
            wait: running.is_none().then(PendingWait::default),
        };
        let responded = responding.await;
        let path = request.path();
        let mut response = match responded {
            Ok(Ok(response)) => response,
            Ok(Err(error)) => {
                let error = self.classified(path, error);
                tracing::debug!(server = self.server.name, path, %error, "answered with an error");
                reply::of_error(&error)
            }
            Err(panic) => {
                let message = panic_message(&*panic);
                tracing::error!(server = self.server.name, path, message, "a handler panicked");
                let error = Error::internal(format!("the handler panicked: {message}"));
                let error = if path == "/verify" { error.or_class(FailureClass::VerifierPanic) } else { error };
                reply::of_error(&self.classified(path, error))
            }
        };
        if self.spec.sessions {
            // Set on each response, because clients send only the cookies of the last response.
            let attributes = "; path=/; Max-Age=1209600; httponly; samesite=lax";
            let value = [&self.cookie, "=", request.session.as_str(), attributes].concat();
            response.metadata.push("set-cookie", value);
        }
        Span::current().record("status", response.status.0);
        let seconds = counted.began().elapsed().as_secs_f64();
        tracing::debug!(server = self.server.name, path, status = response.status.0, seconds, "a call ended");
        counted.finish(&response);
        response
    }

    /// Adds the class of a failure to the errors of this server's own work. Agents and environment servers pass on the errors of the
    /// servers that they call.
    fn classified(&self, path: &str, error: Error) -> Error {
        match self.spec.kind {
            ServerKind::Model | ServerKind::Resources => route::classified(path, error),
            _ => error,
        }
    }

    /// Reports what the calls of the process wait for, and the rollouts of this server.
    fn waits(&self, query: Option<&str>) -> Response {
        let query = WaitQuery::parse(query.unwrap_or_default());
        let mut process = waits::report(&query);
        process.add(self.runs.waits(&self.server.name, &query));
        Response::json(serde_json::json!(process).to_string())
    }

    /// Reports the health of the server. `/health?probe` also calls the endpoints of a model server, and `/health?trial` makes
    /// trial calls.
    async fn health(&self, request: &RoleRequest) -> Response {
        let routes = self.routes.iter().map(|(metrics, _)| metrics).chain([&self.other_routes]);
        let in_flight: i64 = routes.map(RouteMetrics::in_flight).sum();
        let peers = self.server.transports.as_ref().map(Transports::paths).unwrap_or_default();
        let mut body = serde_json::json!({
            "status": "ok", "name": self.server.name, "server_type": self.spec.kind.as_str(),
            "implementation": self.server.implementation, "in_flight": in_flight, "peers": health::reports(&peers),
        });
        let awaits = self.server.awaited.as_ref().map(AwaitedServers::list).unwrap_or_default();
        if !awaits.is_empty() {
            body["awaits"] = serde_json::json!(awaits);
        }
        // Of all servers of the process, because a blocked thread delays each of them.
        let stalls = health::stalls(&stall::current());
        if !stalls.is_empty() {
            body["stalls"] = serde_json::json!(stalls);
        }
        if let Some(oldest) = self.runs.oldest() {
            body["oldest"] = serde_json::json!(oldest);
        }
        if let Role::Model(role) = &self.role
            && let Some(endpoints) = role.endpoints()
        {
            let reports = match request.route.query() {
                Some(health::PROBE_QUERY) => endpoints.probe(&request.context).await,
                Some(health::TRIAL_QUERY) => endpoints.trial(&request.context).await,
                _ => endpoints.reports(),
            };
            body["endpoints"] = serde_json::json!(reports);
        }
        Response::json(body.to_string())
    }

    /// Returns the session of the caller's cookie, or a new session if the caller has none.
    fn session(&self, context: &CallContext) -> SessionId {
        match CookieJar::find_in_request(&context.metadata, &self.cookie) {
            // Longer ids were not created by this server and would be stored in maps.
            Some(id) if !id.is_empty() && id.len() <= 128 => SessionId::new(id),
            _ => SessionId::new(self.server.world.unique_id()),
        }
    }
}

/// Replaces characters that Python's cookie writer would quote.
fn cookie_name(text: &str) -> String {
    text.chars().map(|c| if c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-') { c } else { '-' }).collect()
}

fn panic_message(panic: &(dyn std::any::Any + Send)) -> &str {
    panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
}

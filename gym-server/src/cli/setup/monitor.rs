//! `/health` and `/metrics` of a process, at a port of their own or beside the routes of another handler. A collector has no server, and the
//! servers of a worker take any free port.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use gym_client::Transports;
use gym_client::registry::WaitsListener;
use gym_client::transport::HTTP;
use gym_client::transport::http::HttpBackend;
use gym_core::transport::{ListenOptions, serve};
use gym_core::{CancelToken, Endpoint, Handler, Request, Response, Result, Verb};
use tokio::task::JoinSet;

use crate::cli::args::options::MonitorArgs;
use crate::cli::console::Console;
use crate::cli::exit::Failure;
use crate::metrics::Metrics;
use crate::role::reply;
use crate::stack::{HEAD_NAME, Stack};

/// Time for a scrape that runs when the process ends.
const END_TIMEOUT: Duration = Duration::from_secs(1);

/// Answers `/health` and `/metrics`, and passes all other requests on.
pub(in crate::cli) struct Monitored {
    metrics: Metrics,
    others: Option<Arc<dyn Handler>>,
}

impl Monitored {
    /// Adds the two routes to those of `others`.
    pub(in crate::cli) fn beside(others: Arc<dyn Handler>, metrics: &Metrics) -> Self {
        Self { metrics: metrics.clone(), others: Some(others) }
    }
}

impl fmt::Debug for Monitored {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Monitored")
    }
}

impl Handler for Monitored {
    fn handle(&self, request: Request) -> BoxFuture<'static, Result<Response>> {
        let response = match (request.verb, request.route.path()) {
            (Verb::Get | Verb::Head, "/" | "/health" | "/healthz" | "/livez" | "/readyz") => reply::ok(),
            (Verb::Get | Verb::Head, "/metrics") => reply::metrics(&request.context, &self.metrics),
            _ => match &self.others {
                Some(others) => return others.handle(request),
                None => reply::not_found(),
            },
        };
        Box::pin(std::future::ready(Ok(response)))
    }
}

/// The listener of `--metrics-port`. Dropping it closes the port.
#[derive(Debug)]
pub(in crate::cli) struct MonitorListener {
    _serving: JoinSet<Result<()>>,
}

impl MonitorListener {
    /// Listens where the options say, and says where.
    pub(in crate::cli) async fn start(
        args: &MonitorArgs,
        metrics: &Metrics,
        console: &Console,
    ) -> Result<Option<Self>, Failure> {
        let Some(port) = args.metrics_port else { return Ok(None) };
        let place = ListenOptions::default().at(args.metrics_host.clone(), port);
        let handler: Arc<dyn Handler> = Arc::new(Monitored { metrics: metrics.clone(), others: None });
        let listened = Transports::new().with(HttpBackend::default()).listen(place, handler, &[HTTP]).await;
        let (listener, handler) = listened.map_err(|error| {
            Failure::Failed(format!("--metrics-port {port}: {error}\n  fix: name another port, or 0 for a free one"))
        })?;
        console.line(&format!("metrics at {}/metrics", listener.endpoints()[0]));
        let mut serving = JoinSet::new();
        serving.spawn(serve(listener, handler, CancelToken::new(), END_TIMEOUT));
        Ok(Some(Self { _serving: serving }))
    }
}

/// Reports the waits of this process to `rgym stuck` on this machine, until the result is dropped; and to `rgym top` the head server that shows
/// what the process does: that of `stack`, else `head`. `None`, with a log, if it cannot: nothing else depends on it.
pub(in crate::cli) async fn report_waits(
    transports: &Transports,
    head: Option<Endpoint>,
    stack: Option<&Stack>,
) -> Option<WaitsListener> {
    // A Python server is a process of its own.
    let own = stack.into_iter().flat_map(Stack::servers).filter(|server| server.runs_as == "native");
    let own: Vec<_> = own.filter_map(|server| Some((server, Endpoint::parse(&server.url).ok()?))).collect();
    let head = own.iter().find(|(server, _)| server.kind == HEAD_NAME).map(|(_, url)| url.clone()).or(head);
    let started = WaitsListener::start(transports, head, own.into_iter().map(|(_, url)| url).collect()).await;
    started.inspect_err(|error| tracing::warn!(%error, "`stuck` cannot ask this process for its waits")).ok()
}

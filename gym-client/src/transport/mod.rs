//! The transports of this program: maps schemes to connectors. Applications use transports only through this module.
//!
//! ```text
//!   endpoints of a peer ──► transports in order of preference, one at a time ──► Channel
//!   mem ▸ ucx ▸ http          rejected: not allowed, or the reason                  └─► Paths: log once, status, metrics
//! ```

pub mod body;
mod connectors;
pub(crate) mod inquiry;
mod metrics;
mod paths;
mod peer;
mod selection;
#[cfg(feature = "rdma")]
mod ucx;

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use gym_core::transport::{
    Backend, ConnectOptions, Connector, InProcess, ListenOptions, Listener, MergedListener, Transport, TransportPolicy,
    TransportReport, backend,
};
use gym_core::{CallContext, Channel, Code, Endpoint, Error, Handler, Request, Response, Result, Route};

#[cfg(feature = "http")]
pub use gym_transport_http as http;
#[cfg(feature = "rdma")]
pub use gym_transport_rdma as rdma;
#[doc(hidden)]
pub use metrics::PathMetrics;
pub use metrics::{UCX_METRICS, UcxMetric};
pub use paths::{PeerPath, Refusal};
pub use peer::ReconnectingPeer;
#[cfg(feature = "rdma")]
#[doc(hidden)]
pub use ucx::metrics::UcxMetrics;

use connectors::{ConnectOnly, Connectors, SchemeConnector};
use paths::Paths;
use selection::ConnectAttempt;

/// `shm`: UCX over memory shared by two processes of one host.
pub const SHM: Transport = Transport::new("shm", 100).on_request();
/// `rdma`: UCX over an RDMA device.
pub const RDMA: Transport = Transport::new("rdma", 200).on_request();
/// `ucx_tcp`: UCX over TCP.
pub const UCX_TCP: Transport = Transport::new("ucx_tcp", 300).on_request();
/// `http`: HTTP, or framed connections over TCP or a Unix socket.
pub const HTTP: Transport = Transport::new("http", 400);
/// The transports that the SDK ships, most preferred first. A configuration can name them even if the program was built without
/// some.
pub const BUILT_IN: [Transport; 5] = [Transport::MEM, SHM, RDMA, UCX_TCP, HTTP];

/// Time to look at the devices of this machine. A child process loads UCX meanwhile, which takes less than a second.
const DIAGNOSE_TIMEOUT: Duration = Duration::from_secs(10);

/// The backends of one program, and the policy that selects among them. Cheap to clone; clones share the records of the peers
/// ([`Transports::paths`]).
///
/// ```
/// use gym_client::Transports;
/// use gym_core::transport::{InProcess, Transport};
///
/// let transports = Transports::from(InProcess::new());
/// assert!(transports.known().contains(&Transport::MEM));
/// ```
#[derive(Clone, Debug, Default)]
pub struct Transports {
    backends: Arc<Vec<Arc<dyn Backend>>>,
    connectors: Arc<Connectors>,
    policy: Arc<TransportPolicy>,
    paths: Paths,
}

impl From<InProcess> for Transports {
    fn from(in_process: InProcess) -> Self {
        Self::new().with(in_process)
    }
}

impl Transports {
    /// Creates an empty set; see [`Transports::with`].
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the transports that this program was built with: in-process, and by feature also HTTP with frames, and UCX.
    #[must_use]
    pub fn from_features(in_process: InProcess) -> Self {
        let transports = Self::new().with(in_process);
        #[cfg(feature = "http")]
        let transports = transports.with(http::HttpBackend::default());
        #[cfg(feature = "rdma")]
        let transports = transports.with(ucx::backend());
        transports
    }

    /// Returns the transports that this program was built with, with a separate in-process registry.
    #[must_use]
    pub fn standard() -> Self {
        Self::from_features(InProcess::new())
    }

    /// Adds a backend. It replaces the connectors of earlier backends for the schemes that it serves.
    #[must_use]
    pub fn with(self, backend: impl Backend) -> Self {
        let schemes =
            |backend: &dyn Backend| backend.connectors().iter().map(|connector| connector.scheme()).collect::<Vec<_>>();
        let mut backends = (*self.backends).clone();
        let own = schemes(&backend);
        backends.retain(|known| schemes(&**known).iter().any(|scheme| !own.contains(scheme)));
        backends.push(Arc::new(backend));
        Self { paths: self.paths, ..Self::of(backends, self.policy) }
    }

    /// Adds a connector without a listener.
    #[must_use]
    pub fn with_connector(self, connector: Arc<dyn Connector>) -> Self {
        self.with(ConnectOnly(connector))
    }

    fn of(backends: Vec<Arc<dyn Backend>>, policy: Arc<TransportPolicy>) -> Self {
        let mut connectors = Connectors::new();
        for connector in backends.iter().flat_map(|backend| backend.connectors()) {
            let transports = connector.transports();
            connectors.insert(connector.scheme(), SchemeConnector { connector, transports });
        }
        Self { backends: Arc::new(backends), connectors: Arc::new(connectors), policy, paths: Paths::default() }
    }

    /// Returns the transports that a configuration of this program can name, most preferred first.
    #[must_use]
    pub fn known(&self) -> Vec<Transport> {
        let mut all = self.available();
        all.extend(BUILT_IN);
        all.sort_unstable();
        all.dedup();
        all
    }

    /// Returns the transports of the backends, most preferred first.
    fn available(&self) -> Vec<Transport> {
        backend::transports(self.backends.iter().flat_map(|backend| backend.connectors()))
    }

    /// Returns the backends with a transport that the policy allows.
    fn allowed_backends(&self) -> impl Iterator<Item = &Arc<dyn Backend>> {
        let allowed = |backend: &&Arc<dyn Backend>| {
            backend::transports(backend.connectors()).iter().any(|transport| self.policy.allows(*transport))
        };
        self.backends.iter().filter(allowed)
    }

    /// Returns the transports over which peers exchange addresses before an allowed backend connects them. They need a listen
    /// address.
    #[must_use]
    pub fn meets_over(&self) -> Vec<Transport> {
        self.allowed_backends().flat_map(|backend| backend.meets_over()).collect()
    }

    /// Returns the environment variables, with their values, that must be set when a process with the allowed transports starts.
    #[must_use]
    pub fn variables(&self) -> Vec<(&'static str, &'static str)> {
        self.allowed_backends().flat_map(|backend| backend.variables()).collect()
    }

    /// Reports, in order of preference, whether this machine supports each transport, including those that the program was built
    /// without. Takes at most `within`.
    pub async fn diagnose(&self, within: Duration) -> Vec<TransportReport> {
        let reports = join_all(self.backends.iter().map(|backend| backend.diagnose(within))).await;
        let mut reports: Vec<TransportReport> = reports.into_iter().flatten().collect();
        for transport in BUILT_IN {
            if !reports.iter().any(|report| report.transport == transport) {
                let feature = if transport == HTTP { "http" } else { "rdma" };
                let because = format!("built without the feature `{feature}`");
                let fix = format!("build with the feature `{feature}` of gym-server (it is a default feature)");
                reports.push(TransportReport::unusable(transport, because, fix));
            }
        }
        reports.sort_by_key(|report| report.transport);
        reports.dedup_by_key(|report| report.transport);
        reports
    }

    /// Checks whether this machine supports the required transport of the policy, or a more preferred one that the policy allows. Without a required
    /// transport, checks nothing. Called at start, so that the missing device is the error, and not the failures of all later calls.
    ///
    /// # Errors
    /// `FailedPrecondition` with the reason and the fix for each allowed transport.
    pub async fn check_required(&self) -> Result<()> {
        let Some(required) = self.policy.required() else { return Ok(()) };
        // The in-process transport reaches no peer of another process, for which the policy is meant.
        let allowed =
            |report: &TransportReport| report.transport != Transport::MEM && self.policy.allows(report.transport);
        let reports = self.diagnose(DIAGNOSE_TIMEOUT).await;
        let reports: Vec<&TransportReport> = reports.iter().filter(|report| allowed(report)).collect();
        if reports.iter().any(|report| report.usable) {
            return Ok(());
        }
        let reasons: Vec<String> = reports
            .iter()
            .map(|report| {
                let fix = report.fix.as_deref().unwrap_or("see `rgym doctor`");
                format!("{}: {}; fix: {fix}", report.transport, report.because)
            })
            .collect();
        let text = format!(
            "require_transport is {required}, which this machine cannot use ({}); or leave require_transport out. `rgym doctor` says more",
            reasons.join("; ")
        );
        Err(Error::not_started(Code::FailedPrecondition, text))
    }

    /// Returns the same backends, restricted to the transports that `policy` allows.
    #[must_use]
    pub fn with_policy(mut self, policy: TransportPolicy) -> Self {
        self.policy = Arc::new(policy.resolved(&self.known()));
        self
    }

    /// Opens a connection for one `GET`, and returns the response.
    ///
    /// # Errors
    /// Those of [`Transports::connect`], and of the call.
    pub async fn ask(&self, cx: &CallContext, endpoint: &Endpoint, route: impl Into<Route>) -> Result<Response> {
        let channel = self.connect(cx, std::slice::from_ref(endpoint), &ConnectOptions::default()).await?;
        channel.call(Request::get(cx.child(), route)).await
    }

    /// Returns the same transports with a record of paths of their own: for questions about servers, which are no part of the work that
    /// [`Transports::paths`] reports.
    #[must_use]
    pub fn aside(&self) -> Self {
        Self { paths: Paths::default(), ..self.clone() }
    }

    /// Returns the transports of a program that listens at `host`, with backends restricted to `policy`. Calls and listeners then
    /// share one UCX.
    #[must_use]
    pub fn scoped(&self, policy: &TransportPolicy, host: Option<IpAddr>) -> Self {
        let policy = policy.clone().resolved(&self.known());
        let scoped = |backend: &Arc<dyn Backend>| backend.scoped(&policy, host).unwrap_or_else(|| Arc::clone(backend));
        let backends = self.backends.iter().map(scoped).collect();
        Self::of(backends, Arc::new(policy))
    }

    /// Returns the backend of a type, for access to functions that only this type has.
    #[must_use]
    pub fn get<B: Backend>(&self) -> Option<&B> {
        self.backends.iter().find_map(|backend| (&**backend as &dyn std::any::Any).downcast_ref())
    }

    /// Returns the policy.
    #[must_use]
    pub fn policy(&self) -> &TransportPolicy {
        &self.policy
    }

    /// Listens over every transport that the policy allows. Returns the listener and the handler to serve: `handler`, or `handler`
    /// behind the routes that peers need to connect. `needed` transports listen even if the policy does not allow them.
    ///
    /// # Errors
    /// If no transport listens, if a needed transport cannot listen, or if an allowed one cannot and no other allowed one listens.
    pub async fn listen(
        &self,
        mut place: ListenOptions,
        mut handler: Arc<dyn Handler>,
        needed: &[Transport],
    ) -> Result<(Box<dyn Listener>, Arc<dyn Handler>)> {
        let mut least_preferred_first: Vec<(Transport, bool, &Arc<dyn Backend>)> = Vec::new();
        let met_over = self.meets_over();
        for backend in self.backends.iter() {
            let transports = backend::transports(backend.connectors());
            let allowed = transports.iter().copied().find(|transport| self.policy.allows(*transport));
            let must =
                transports.iter().copied().find(|transport| needed.contains(transport) || met_over.contains(transport));
            if let Some(best) = allowed.or(must) {
                least_preferred_first.push((best, must.is_some(), backend));
            }
        }
        least_preferred_first.sort_by_key(|(best, ..)| std::cmp::Reverse(*best));
        let (mut listeners, mut failed): (Vec<Box<dyn Listener>>, _) = (Vec::new(), None);
        for (best, must, backend) in least_preferred_first {
            match backend.listen(&place, Arc::clone(&handler)).await {
                Ok(Some(listening)) => {
                    place.bound.splice(..0, listening.listener.endpoints().iter().cloned());
                    handler = listening.handler;
                    listeners.insert(0, listening.listener);
                }
                Ok(None) => {}
                Err(error) if must => return Err(error),
                Err(error) => {
                    let falls_back = listeners.iter().flat_map(|listener| listener.endpoints()).any(|endpoint| {
                        let scheme = self.connectors.get(endpoint.scheme());
                        scheme.is_some_and(|scheme| {
                            scheme.transports.iter().any(|transport| self.policy.allows(*transport))
                        })
                    });
                    if falls_back {
                        tracing::warn!(transport = %best, endpoints = ?place.bound, %error, "transport unavailable; listening on the others only");
                    } else {
                        failed = Some(error);
                    }
                }
            }
        }
        if let Some(error) = failed {
            return Err(error.about(format!("listen on transport {}", self.policy)));
        }
        Ok((Box::new(MergedListener::new(listeners)?), handler))
    }

    /// Returns the connection to each peer and the reasons why preferred transports were rejected. Each peer is named by its most
    /// general endpoint.
    #[must_use]
    pub fn paths(&self) -> Vec<PeerPath> {
        self.paths.all()
    }

    /// Returns the same data as [`Transports::paths`], for a registry's `register_collector`.
    #[doc(hidden)]
    #[must_use]
    pub fn metrics(&self) -> PathMetrics {
        PathMetrics::of(&self.paths)
    }

    /// Returns the metrics of UCX in this process, for a registry's `register_collector`. Empty before UCX is used, or without it.
    #[cfg(feature = "rdma")]
    #[doc(hidden)]
    #[must_use]
    pub fn ucx_metrics(&self) -> UcxMetrics {
        UcxMetrics::of(self.get::<rdma::UcxBackend>().map(|backend| backend.ucx().clone()))
    }

    /// Opens a channel to the first endpoint that can be reached, over the most preferred transport that the policy allows.
    /// `endpoints` are in order of preference, as in a registration. A `ucx` endpoint has three transports: `shm`, `rdma` and
    /// `ucx_tcp`.
    ///
    /// # Errors
    /// The error of the last endpoint; `Unimplemented`, with the schemes, if this program serves none of them. If transports were
    /// rejected, the error lists each with its reason, and the fix.
    pub async fn connect(&self, cx: &CallContext, endpoints: &[Endpoint], options: &ConnectOptions) -> Result<Channel> {
        self.connect_where(cx, endpoints, options, false).await
    }

    /// Opens an ordered channel to the first endpoint that can be reached, as worker groups require. Requests arrive in the order
    /// in which they were sent.
    ///
    /// # Errors
    /// As [`Transports::connect`]; `Unimplemented` if every reachable endpoint is unordered.
    pub async fn connect_ordered(
        &self,
        cx: &CallContext,
        endpoints: &[Endpoint],
        options: &ConnectOptions,
    ) -> Result<Channel> {
        self.connect_where(cx, endpoints, options, true).await
    }

    async fn connect_where(
        &self,
        cx: &CallContext,
        endpoints: &[Endpoint],
        options: &ConnectOptions,
        ordered: bool,
    ) -> Result<Channel> {
        let mut attempt = ConnectAttempt::new(&self.connectors, &self.policy, endpoints);
        let reached = attempt.run(cx, options, ordered).await;
        let peer = endpoints.last().map_or("", Endpoint::as_str);
        let path = reached.as_ref().ok().map(Channel::path);
        let only = path.and_then(|path| match &*self.connectors.get(path.scheme)?.transports {
            [only] => Some(*only),
            _ => None,
        });
        self.paths.record(peer, path, only, attempt.refused());
        match reached {
            Ok(channel) => Ok(channel),
            Err(error) => Err(attempt.explain(error).await),
        }
    }
}

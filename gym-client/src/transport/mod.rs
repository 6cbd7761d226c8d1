//! Which transports this program has: scheme to connector. Applications reach transports only through here.
//!
//! ```text
//!   endpoints of a peer ──► transports in order of preference, one at a time ──► Channel
//!   mem ▸ ucx ▸ http          rejected: not allowed, or the reason                  └─► Paths: log once, status, metrics
//! ```

mod connectors;
mod metrics;
mod paths;
pub(crate) mod peer;
mod selection;
#[cfg(feature = "rdma")]
mod ucx;

use std::net::IpAddr;
use std::sync::Arc;

use gym_core::transport::{
    Backend, ConnectOptions, Connector, InProcess, ListenOptions, Listener, MergedListener, Transport, TransportPolicy,
    backend,
};
use gym_core::{CallContext, Channel, Endpoint, Handler, Result};

#[cfg(feature = "http")]
pub use gym_transport_http as http;
#[cfg(feature = "rdma")]
pub use gym_transport_rdma as rdma;
pub use metrics::PathMetrics;
pub use paths::{PeerPath, Refusal};
#[cfg(feature = "rdma")]
pub use ucx::metrics::UcxMetrics;

use connectors::{ConnectOnly, Connectors, SchemeConnector};
use paths::Paths;
use selection::ConnectAttempt;

/// The backends of one program, and the policy by which they are used. Cheap to clone; clones share what is known of the peers
/// ([`Transports::paths`]).
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
    /// None yet; see [`Transports::with`].
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Those that this program was built with: within the process, by feature also HTTP with frames, and UCX.
    #[must_use]
    pub fn from_features(in_process: InProcess) -> Self {
        let transports = Self::new().with(in_process);
        #[cfg(feature = "http")]
        let transports = transports.with(http::HttpBackend::default());
        #[cfg(feature = "rdma")]
        let transports = transports.with(ucx::backend());
        transports
    }

    /// Those that this program was built with, with names of their own within the process.
    #[must_use]
    pub fn standard() -> Self {
        Self::from_features(InProcess::new())
    }

    /// The same with one more backend; where it serves a scheme that an earlier one has, it takes its place.
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

    /// The same with a connector alone, for what is only called.
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

    /// What may be named in a configuration of this program, best first.
    #[must_use]
    pub fn known(&self) -> Vec<Transport> {
        let own = self.connectors.values().flat_map(|scheme| scheme.transports.iter().copied());
        let mut all: Vec<Transport> = own.chain(Transport::KNOWN).collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    /// The same backends, of which only what `policy` allows is used.
    #[must_use]
    pub fn with_policy(mut self, policy: TransportPolicy) -> Self {
        self.policy = Arc::new(policy);
        self
    }

    /// The same for a program that listens at `host`, with backends kept to `policy`: one UCX for calls and listeners.
    #[must_use]
    pub fn scoped(&self, policy: &TransportPolicy, host: Option<IpAddr>) -> Self {
        let scoped = |backend: &Arc<dyn Backend>| backend.scoped(policy, host).unwrap_or_else(|| Arc::clone(backend));
        Self::of(self.backends.iter().map(scoped).collect(), Arc::new(policy.clone()))
    }

    /// The backend of a type, for what only that type has.
    #[must_use]
    pub fn get<B: Backend>(&self) -> Option<&B> {
        self.backends.iter().find_map(|backend| (&**backend as &dyn std::any::Any).downcast_ref())
    }

    /// The policy.
    #[must_use]
    pub fn policy(&self) -> &TransportPolicy {
        &self.policy
    }

    /// Listens over every transport that is allowed there. Returns the listener and the handler to serve: `handler`, or `handler` behind
    /// the routes that peers need to connect. `needed` transports listen whatever the policy says.
    ///
    /// # Errors
    /// When nothing listens; when what is allowed cannot, and nothing else is allowed that can.
    pub async fn listen(
        &self,
        mut place: ListenOptions,
        mut handler: Arc<dyn Handler>,
        needed: &[Transport],
    ) -> Result<(Box<dyn Listener>, Arc<dyn Handler>)> {
        let mut least_preferred_first: Vec<(Transport, bool, &Arc<dyn Backend>)> = Vec::new();
        for backend in self.backends.iter() {
            let allowed = backend::preferred_transport(&**backend, &self.policy);
            let connectors = backend.connectors();
            let must = connectors
                .iter()
                .flat_map(|connector| connector.transports())
                .filter(|transport| needed.contains(transport))
                .min();
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
                        tracing::warn!(transport = %best, endpoints = ?place.bound, %error, "not offered; callers come by what is");
                    } else {
                        failed = Some(error);
                    }
                }
            }
        }
        if let Some(error) = failed {
            return Err(error.about(format!("offer transport {}", self.policy)));
        }
        Ok((Box::new(MergedListener::new(listeners)?), handler))
    }

    /// How the peers are reached that were connected to, and why not better; by their most general endpoint.
    #[must_use]
    pub fn paths(&self) -> Vec<PeerPath> {
        self.paths.all()
    }

    /// The same as [`Transports::paths`], for a registry's `register_collector`.
    #[must_use]
    pub fn metrics(&self) -> PathMetrics {
        PathMetrics::of(&self.paths)
    }

    /// What UCX does in this process, for a registry's `register_collector`: nothing before it is used, or without it.
    #[cfg(feature = "rdma")]
    #[must_use]
    pub fn ucx_metrics(&self) -> UcxMetrics {
        UcxMetrics::of(self.get::<rdma::UcxBackend>().map(|backend| backend.ucx().clone()))
    }

    /// Opens a channel to the first endpoint that can be reached, over the most preferred transport that the policy allows.
    /// `endpoints` are in order of preference, as a registration lists them; an `ucx` endpoint has three transports: `shm`, `rdma`,
    /// `ucx_tcp`.
    ///
    /// # Errors
    /// The last endpoint's error; `Unimplemented` naming the schemes when none is served here. When transports were rejected, each of
    /// them with its reason, and the fix.
    pub async fn connect(&self, cx: &CallContext, endpoints: &[Endpoint], options: &ConnectOptions) -> Result<Channel> {
        self.connect_where(cx, endpoints, options, false).await
    }

    /// Opens a channel to the first endpoint that can be reached and whose requests arrive in the order in which they were
    /// sent, as worker groups need it.
    ///
    /// # Errors
    /// As of [`Transports::connect`]; `Unimplemented` when what can be reached keeps no order.
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

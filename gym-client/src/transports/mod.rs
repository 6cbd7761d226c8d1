//! Which transports this program has: scheme to connector. Applications reach transports only through here.
//!
//! ```text
//!   endpoints of a peer ──► rungs of the ladder, one after the other ──► Channel
//!   mem ▸ ucx ▸ http          refused: not allowed, or why not             └─► Paths: log once, status, metrics
//! ```

pub(crate) mod both;
mod climb;
mod offer;
mod paths;
#[cfg(all(feature = "http", feature = "rdma"))]
mod ucx;
#[cfg(all(feature = "http", feature = "rdma"))]
mod ucx_metrics;

use std::collections::BTreeMap;
use std::sync::Arc;

use gym_core::{CallContext, Channel, ConnectOptions, Connector, Endpoint, InProcess, Ladder, Result};

pub use offer::Offer;
pub use paths::{PathMetrics, PeerPath, Refusal};

use climb::Climb;
use paths::Paths;
#[cfg(all(feature = "http", feature = "rdma"))]
pub use ucx_metrics::UcxMetrics;

/// The connectors of one program, by scheme, and the ladder on which they are used. Cheap to clone; clones share what is known
/// of the peers ([`Transports::paths`]).
#[derive(Clone, Debug, Default)]
pub struct Transports {
    connectors: Arc<BTreeMap<&'static str, Arc<dyn Connector>>>,
    ladder: Arc<Ladder>,
    paths: Paths,
    #[cfg(all(feature = "http", feature = "rdma"))]
    ucx: Option<gym_transport_rdma::Ucx>,
}

impl Transports {
    /// None yet; see [`Transports::with`].
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The in-process switchboard; with the feature `http` also HTTP and framed connections, over TCP and Unix sockets; with the
    /// feature `rdma` also UCX, which is loaded when a peer is first to be reached by it. Where it cannot be loaded its rungs
    /// are refused with the reason.
    ///
    /// Call it once and clone: every call makes connectors, and a UCX with a thread and registered memory, of its own. Where
    /// that cannot be, `with_ucx` hands one's `ucx()` to another.
    #[must_use]
    pub fn from_features(in_process: InProcess) -> Self {
        let transports = Self::new().with(Arc::new(in_process));
        #[cfg(feature = "http")]
        let transports = {
            use gym_transport_http::{FramesConfig, FramesConnector, HttpConnector};
            transports
                .with(Arc::new(HttpConnector::default()))
                .with(Arc::new(FramesConnector::tcp(FramesConfig::default())))
                .with(Arc::new(FramesConnector::unix(FramesConfig::default())))
        };
        #[cfg(all(feature = "http", feature = "rdma"))]
        let transports = transports.with_ucx(ucx::configured(&Ladder::auto(), None));
        transports
    }

    /// The same with one more connector; a later one of the same scheme replaces the earlier.
    #[must_use]
    pub fn with(self, connector: Arc<dyn Connector>) -> Self {
        let mut connectors = (*self.connectors).clone();
        connectors.insert(connector.scheme(), connector);
        Self { connectors: Arc::new(connectors), ..self }
    }

    /// The same connectors, of which only the rungs are used that `ladder` allows. Connectors of a scheme that is no rung (a
    /// transport of one's own) are used as before.
    #[must_use]
    pub fn with_ladder(mut self, ladder: Ladder) -> Self {
        self.ladder = Arc::new(ladder);
        self
    }

    /// The rungs that are used; all of them unless told otherwise.
    #[must_use]
    pub fn ladder(&self) -> &Ladder {
        &self.ladder
    }

    /// The schemes, in alphabetical order.
    pub fn schemes(&self) -> impl Iterator<Item = &'static str> {
        self.connectors.keys().copied()
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
    #[cfg(all(feature = "http", feature = "rdma"))]
    #[must_use]
    pub fn ucx_metrics(&self) -> UcxMetrics {
        UcxMetrics::of(self.ucx.clone())
    }

    /// Opens a channel to the first endpoint that can be reached, by the best rung that the ladder allows. `endpoints` are best
    /// first, as a registration lists them; an `ucx` endpoint is three rungs: `shm`, `rdma`, `ucx_tcp`.
    ///
    /// # Errors
    /// The last endpoint's error; `Unimplemented` naming the schemes when none is served here. When rungs were refused, each of
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
        let mut climb = Climb::new(&self.connectors, &self.ladder, endpoints);
        let reached = climb.run(cx, options, ordered).await;
        let peer = endpoints.last().map_or("", Endpoint::as_str);
        self.paths.record(peer, reached.as_ref().ok().map(Channel::path), climb.refused());
        match reached {
            Ok(channel) => Ok(channel),
            Err(error) => Err(climb.explain(error).await),
        }
    }
}

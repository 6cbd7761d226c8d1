//! Transports that a program adds: the backend trait, listen options, and reports.

use std::fmt;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::select_all;
use serde::Serialize;

use crate::base::error::{Code, Error, Result};
use crate::transport::{Connector, Endpoint, Handler, Incoming, Listener, Transport, TransportPolicy, bare_host};

/// The addresses and the name under which to serve a handler. Each backend uses the fields that concern it. Only these options
/// distinguish the bound address from the advertised address.
///
/// ```
/// use gym_core::transport::ListenOptions;
///
/// let options = ListenOptions::named("math").at("127.0.0.1", 8000).advertised_as("node-3");
/// assert_eq!(options.address()?, Some(([127, 0, 0, 1], 8000).into()));
/// assert_eq!(options.advertised_host(), Some("node-3"));
/// # Ok::<(), gym_core::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct ListenOptions {
    /// Name for callers of this process; `None` if no caller of this process uses the handler.
    pub name: Option<String>,
    /// Host and port to bind, for callers on other hosts; port 0 is any free port. `None`: reachable from this host only.
    pub bind: Option<(String, u16)>,
    /// Advertised host, combined in endpoints with the bound port. `None`: the host of `bind`.
    pub advertise: Option<String>,
    /// Path of a Unix socket, in a directory that only this user can access.
    pub socket: Option<PathBuf>,
    /// Endpoints at which the handler is already served, over less preferred transports. Peers can find each other over them.
    pub bound: Vec<Endpoint>,
    /// `true` if the handler bounds its calls itself: it rejects calls beyond its capacity at once, and an unread response occupies
    /// no capacity. The in-process transport then sets no bound of its own, and no caller waits for it. Default: `false`.
    pub bounded_by_handler: bool,
}

impl ListenOptions {
    /// Serves callers of this process under a name.
    #[must_use]
    pub fn named(name: impl Into<String>) -> Self {
        Self { name: Some(name.into()), ..Self::default() }
    }

    /// Sets no bound of calls in the process, because the handler [bounds](Self::bounded_by_handler) them.
    #[must_use]
    pub fn bounded_by_handler(mut self) -> Self {
        self.bounded_by_handler = true;
        self
    }

    /// Also serves callers on other hosts at this host and port.
    #[must_use]
    pub fn at(mut self, host: impl Into<String>, port: u16) -> Self {
        self.bind = Some((host.into(), port));
        self
    }

    /// Sets the advertised host of the bound address, if it differs: a listener on `0.0.0.0` does not have a host name.
    #[must_use]
    pub fn advertised_as(mut self, host: impl Into<String>) -> Self {
        self.advertise = Some(host.into());
        self
    }

    /// Resolves the address to bind; `None` if [`ListenOptions::bind`] is `None`. May query a name server.
    ///
    /// # Errors
    /// `InvalidArgument` if the host cannot be resolved.
    pub fn address(&self) -> Result<Option<SocketAddr>> {
        let Some((host, port)) = &self.bind else { return Ok(None) };
        let unknown =
            || Error::invalid(format!("the host `{host}` cannot be resolved; use an address of this machine"));
        let address = (bare_host(host), *port).to_socket_addrs().ok().and_then(|mut found| found.next());
        address.map(Some).ok_or_else(unknown)
    }

    /// Returns the host of the endpoints: the advertised host, otherwise the host of [`ListenOptions::bind`].
    #[must_use]
    pub fn advertised_host(&self) -> Option<&str> {
        self.advertise.as_deref().or_else(|| self.bind.as_ref().map(|(host, _)| host.as_str()))
    }

    /// Also serves other processes of this host over this Unix socket.
    #[must_use]
    pub fn socket(mut self, path: impl Into<PathBuf>) -> Self {
        self.socket = Some(path.into());
        self
    }
}

/// A listener, and the handler to serve at it and at the endpoints bound before.
pub struct BoundListener {
    /// Accepts peers.
    pub listener: Box<dyn Listener>,
    /// The handler that was passed in, possibly wrapped in one that also sends peers the address of the new listener.
    pub handler: Arc<dyn Handler>,
}

impl fmt::Debug for BoundListener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BoundListener").field("endpoints", &self.listener.endpoints()).finish_non_exhaustive()
    }
}

/// Report on the support for a transport, as far as it can be determined on one machine alone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct TransportReport {
    /// The transport.
    pub transport: Transport,
    /// `true` if the transport can be used.
    pub usable: bool,
    /// The devices, or the reason why the transport cannot be used.
    pub because: String,
    /// The fix; `None` if the transport can be used.
    pub fix: Option<String>,
}

impl TransportReport {
    /// Reports that a transport can be used, over these devices or under this condition, such as `always`.
    #[must_use]
    pub fn usable(transport: Transport, because: impl Into<String>) -> Self {
        Self { transport, usable: true, because: because.into(), fix: None }
    }

    /// Reports that a transport cannot be used, with the reason and the fix.
    #[must_use]
    pub fn unusable(transport: Transport, because: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { transport, usable: false, because: because.into(), fix: Some(fix.into()) }
    }
}

/// An implementation of one or more transports, with both ends.
///
/// A program adds a backend of its own to its `Transports`. From then on, configurations can name its transports.
#[async_trait]
pub trait Backend: std::any::Any + fmt::Debug + Send + Sync {
    /// Returns the connectors, one for each scheme. [`Connector::transports`] returns the names that configurations use for them.
    fn connectors(&self) -> Vec<Arc<dyn Connector>>;

    /// Starts to listen. Backends are called from the least preferred to the most preferred, so that each one finds the endpoints
    /// of less preferred transports in [`ListenOptions::bound`]. Returns `None` if the backend cannot listen at any of the given
    /// addresses.
    ///
    /// # Errors
    /// The reason why the backend cannot listen, with the fix.
    async fn listen(&self, options: &ListenOptions, handler: Arc<dyn Handler>) -> Result<Option<BoundListener>>;

    /// Returns the transports over which peers find each other before this backend connects them. If the backend is used, the
    /// program listens on them, regardless of the policy. Empty by default.
    fn meets_over(&self) -> Vec<Transport> {
        Vec::new()
    }

    /// Returns environment variables, with values, that must be set when a process starts that uses the backend. Empty by default.
    fn variables(&self) -> Vec<(&'static str, &'static str)> {
        Vec::new()
    }

    /// Reports whether this machine supports each transport of the backend; `rgym doctor` shows the reports. May read files and
    /// start processes, but takes no longer than `within`. By default, every transport is usable.
    async fn diagnose(&self, within: Duration) -> Vec<TransportReport> {
        let _ = within;
        transports(self.connectors())
            .into_iter()
            .map(|transport| TransportReport::usable(transport, "always"))
            .collect()
    }

    /// Returns a copy of the backend for one part of a program. It is limited to the transports of `policy`, and accepts peers of
    /// other hosts at `host`. `None`: the backend itself is used. Called before the backend is used.
    fn scoped(&self, policy: &TransportPolicy, host: Option<IpAddr>) -> Option<Arc<dyn Backend>> {
        let _ = (policy, host);
        None
    }
}

impl BoundListener {
    /// Creates a listener that advertises these endpoints instead of its own, with the handler to serve.
    #[must_use]
    pub fn advertised(listener: impl Listener, endpoints: Vec<Endpoint>, handler: Arc<dyn Handler>) -> Self {
        Self { listener: Box::new(MergedListener { endpoints, listeners: vec![Box::new(listener)] }), handler }
    }
}

/// Several listeners combined into one. Accepts peers from all of them, and fails as soon as one fails.
#[derive(Debug)]
pub struct MergedListener {
    endpoints: Vec<Endpoint>,
    listeners: Vec<Box<dyn Listener>>,
}

impl MergedListener {
    /// Merges listeners; the endpoints are those of the listeners, in this order.
    ///
    /// # Errors
    /// `Unimplemented` without a listener.
    pub fn new(listeners: Vec<Box<dyn Listener>>) -> Result<Self> {
        if listeners.is_empty() {
            return Err(Error::not_started(
                Code::Unimplemented,
                "no transport of this program listens at such a place",
            ));
        }
        let endpoints = listeners.iter().flat_map(|listener| listener.endpoints().to_vec()).collect();
        Ok(Self { endpoints, listeners })
    }
}

#[async_trait]
impl Listener for MergedListener {
    fn endpoints(&self) -> &[Endpoint] {
        &self.endpoints
    }

    async fn accept(&mut self) -> Result<Box<dyn Incoming>> {
        select_all(self.listeners.iter_mut().map(|listener| listener.accept())).await.0
    }
}

/// Returns the transports of some connectors, most preferred first, without duplicates.
#[must_use]
pub fn transports(connectors: impl IntoIterator<Item = Arc<dyn Connector>>) -> Vec<Transport> {
    let mut all: Vec<Transport> = connectors.into_iter().flat_map(|connector| connector.transports()).collect();
    all.sort_unstable();
    all.dedup();
    all
}

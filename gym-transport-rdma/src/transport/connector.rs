//! Connector: opens UCX connections.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use gym_core::transport::mux::{CallingEnd, ConnectionLimits, MuxLink, heartbeat};
use gym_core::transport::{ConnectOptions, Connector, PathInfo, Transport};
use gym_core::{CallContext, Channel, Code, Endpoint, Error, Execution, Request, Result};
use tokio::time::Instant;

use crate::fabric::{Connect, Connection, ConnectionId, Fabric, Lanes, Target, WorkerPair};
use crate::messaging::calling::{CallingEvents, EstablishedConnection};
use crate::messaging::send_queue::UcxSendQueue;
use crate::transport::bootstrap::{BootstrapRequest, BootstrapResponse, PeerAddress, ROUTE};
use crate::transport::config::Ucx;
use crate::transport::{SCHEME, host};

/// Opens channels to `ucx://` endpoints, whose address is that of the peer's bootstrap. Each channel has its own
/// connection.
///
/// | event | error or result |
/// |---|---|
/// | UCX cannot be loaded, or the peer cannot be reached or does not respond in time | `Unavailable`, not started |
/// | the peer's server does not support UCX | its rejection, not started |
/// | UCX negotiated a lower transport than requested | `Unavailable` with the lanes, not started |
/// | too many peers on this host share memory with one process | `ResourceExhausted`, not started |
/// | no capacity before the deadline | `DeadlineExceeded`, not started |
/// | the message exceeds a limit of the peer | `InvalidArgument`, not started |
/// | the connection breaks, or the peer sends no heartbeat | `Unavailable`; unknown for calls in flight |
/// | the peer violates the protocol | `DataLoss`, unknown |
/// | the reply is larger than `reply_bytes_max` | `ResourceExhausted`, finished |
/// | any complete reply, including 4xx and 5xx | that reply |
pub struct UcxConnector {
    bootstrap: Arc<dyn Connector>,
    ucx: Ucx,
}

impl UcxConnector {
    /// Creates a connector that sends bootstrap requests over `bootstrap`. UCX is loaded with the first connection.
    #[must_use]
    pub fn new(bootstrap: Arc<dyn Connector>, ucx: impl Into<Ucx>) -> Self {
        Self { bootstrap, ucx: ucx.into() }
    }

    /// Connects over the transport of the options. Without one, tries shared memory, then the network.
    async fn open(
        &self,
        cx: &CallContext,
        until: Instant,
        to: &Endpoint,
        options: &ConnectOptions,
    ) -> Result<MuxLink<UcxSendQueue>> {
        let fabric = self.ucx.fabric().await?;
        let limits = &self.ucx.config().limits.of_channel(options);
        let error = match options.transport {
            Some(transport @ (crate::SHM | crate::RDMA | crate::UCX_TCP)) => {
                return self.attempt(cx, until, fabric, to, (transport, limits)).await;
            }
            Some(other) => {
                return Err(Error::not_started(
                    Code::Unavailable,
                    format!("UCX has no transport {other}; use shm, rdma or ucx_tcp"),
                ));
            }
            None => {
                // Half of the time is left for the network if the peer does not respond.
                let half = cx.remaining().min(time_left(until)) / 2;
                let halftime = Instant::now() + half;
                match with_timeout(half, self.attempt(cx, halftime, fabric, to, (crate::SHM, limits))).await {
                    Ok(link) => return Ok(link),
                    Err(error) => error,
                }
            }
        };
        tracing::debug!(%error, endpoint = %to, "shared memory unavailable; connecting over the network");
        self.attempt(cx, until, fabric, to, (crate::UCX_TCP, limits)).await.map_err(|last| {
            let reason = format!("{}; and no shared memory: {}", last.message(), error.message());
            Error::new(last.code(), last.execution(), reason)
        })
    }

    async fn attempt(
        &self,
        cx: &CallContext,
        until: Instant,
        fabric: &Fabric,
        to: &Endpoint,
        (transport, limits): (Transport, &ConnectionLimits),
    ) -> Result<MuxLink<UcxSendQueue>> {
        let devices = Lanes::of(fabric.devices());
        if transport == crate::RDMA && !devices.rdma() {
            let reason = format!("UCX finds no RDMA device here, only {devices}");
            return Err(Error::not_started(Code::Unavailable, reason));
        }
        let config = self.ucx.config();
        // Dropping it, if this attempt is cancelled, releases the worker.
        let peer_worker = match transport {
            crate::SHM => Some(fabric.peer_worker(time_left(until)).await?),
            _ => None,
        };
        let worker = peer_worker.as_ref().map(|peer_worker| peer_worker.address().clone());
        let request = BootstrapRequest::new(ConnectionId::random(), limits, host::identity(), time_left(until), worker);
        let response = self.bootstrap(cx, to, &request).await;
        if let (Some(peer_worker), Err(error)) = (&peer_worker, &response)
            && error.execution() == Execution::NotStarted
        {
            peer_worker.withdraw();
        }
        let response = response?;
        let target = match (response.address, peer_worker) {
            (PeerAddress::Worker(peer), Some(peer_worker)) => {
                Target::SharedMemory(WorkerPair { local: peer_worker, remote: peer })
            }
            (PeerAddress::Listener(address), None) => Target::Network(resolve_listener(address, to).await?),
            _ => return Err(Error::unknown(Code::DataLoss, "the peer's address is of another kind than requested")),
        };
        let connect =
            Connect { id: request.id, token: response.token, peer: response.id, target, within: time_left(until) };
        let (caller, established) = CallingEvents::new(limits.clone(), config.cut_bytes);
        let guard = ConnectGuard(Some(fabric.connect(connect, Arc::clone(&caller) as _)?));
        let EstablishedConnection { end, lanes } =
            established.await.unwrap_or_else(|_| Err(Error::unknown(Code::Unavailable, "the fabric has ended")))?;
        let opened = negotiated(&lanes);
        if transport < opened {
            return Err(Error::not_started(
                Code::Unavailable,
                format!("requested {transport}, but UCX negotiated {lanes}"),
            ));
        }
        guard.done();
        let path = PathInfo::new(SCHEME, to.address(), true).at(opened, lanes.to_string());
        self.ucx.watch(Arc::clone(&path.peer), end.sender());
        // Ends with the last channel and call, or with the connection.
        tokio::spawn(exchange_heartbeats(Arc::clone(&end), caller, limits.clone(), fabric.clone()));
        Ok(MuxLink::new(end, path))
    }

    /// Sends the bootstrap request to the peer.
    async fn bootstrap(
        &self,
        cx: &CallContext,
        to: &Endpoint,
        request: &BootstrapRequest,
    ) -> Result<BootstrapResponse> {
        let bootstrap = Endpoint::parse(&format!("{}://{}", self.bootstrap.scheme(), to.address()))?;
        let channel = self.bootstrap.connect(cx, &bootstrap, &ConnectOptions::default()).await?;
        let response = channel.call(Request::post(cx.clone(), ROUTE, request.write())).await?.into_result()?;
        BootstrapResponse::read(&response.message.head.to_bytes())
    }
}

fn time_left(until: Instant) -> Duration {
    until.saturating_duration_since(Instant::now())
}

async fn with_timeout<T>(timeout: Duration, opening: impl Future<Output = Result<T>>) -> Result<T> {
    let opened = tokio::time::timeout(timeout, opening).await;
    opened.map_err(|_| Error::not_started(Code::Unavailable, format!("no answer within {timeout:?}"))).flatten()
}

/// Returns the address of a listener. For an unspecified address (`0.0.0.0`), resolves the host of the bootstrap
/// endpoint.
async fn resolve_listener(listener: SocketAddr, bootstrap: &Endpoint) -> Result<SocketAddr> {
    if !listener.ip().is_unspecified() {
        return Ok(listener);
    }
    let cannot = |reason: String| Error::not_started(Code::Unavailable, reason);
    let mut found = tokio::net::lookup_host(bootstrap.address()).await.map_err(|error| {
        cannot(format!("resolve the peer's bootstrap address `{}`", bootstrap.address())).caused_by(error)
    })?;
    let found = found.next().ok_or_else(|| cannot(format!("`{}` resolves to no address", bootstrap.address())))?;
    Ok(SocketAddr::new(found.ip(), listener.port()))
}

/// Returns the transport of these lanes.
fn negotiated(lanes: &Lanes) -> Transport {
    if lanes.shared_memory() {
        crate::SHM
    } else if lanes.rdma() {
        crate::RDMA
    } else {
        crate::UCX_TCP
    }
}

/// Closes a connection on drop, unless it was opened in time.
struct ConnectGuard(Option<Connection>);

impl ConnectGuard {
    fn done(mut self) {
        self.0 = None;
    }
}

impl Drop for ConnectGuard {
    fn drop(&mut self) {
        if let Some(connection) = self.0.take() {
            connection.close(Duration::ZERO);
        }
    }
}

/// Exchanges heartbeats until the connection ends, and keeps its fabric open until then.
async fn exchange_heartbeats(
    end: Arc<CallingEnd<UcxSendQueue>>,
    caller: Arc<CallingEvents>,
    limits: ConnectionLimits,
    fabric: Fabric,
) {
    // The first heartbeat is sent at once, so that its echo is the first measured round trip.
    gym_core::transport::mux::MessageSender::post_heartbeat(end.sender());
    let error = tokio::select! {
        biased;
        () = end.over() => return drop(fabric),
        error = heartbeat(end.sender(), &caller.activity, &limits, end.theirs(), || {}) => error,
    };
    end.end(&error);
}

impl fmt::Debug for UcxConnector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "UcxConnector(bootstrap over {})", self.bootstrap.scheme())
    }
}

#[async_trait]
impl Connector for UcxConnector {
    fn scheme(&self) -> &'static str {
        SCHEME
    }

    fn transports(&self) -> Vec<gym_core::transport::Transport> {
        vec![crate::SHM, crate::RDMA, crate::UCX_TCP]
    }

    async fn connect(&self, cx: &CallContext, to: &Endpoint, options: &ConnectOptions) -> Result<Channel> {
        cx.check()?;
        if to.scheme() != SCHEME {
            return Err(Error::invalid(format!("`{to}` is not an endpoint of {SCHEME}")));
        }
        let timeout = self.ucx.config().connect_timeout;
        let opened = cx.bound(Execution::NotStarted, async {
            with_timeout(timeout, self.open(cx, Instant::now() + timeout, to, options)).await
        });
        // No call has been sent, whatever the error.
        let link = opened
            .await
            .map_err(|error| error.with_execution(Execution::NotStarted).about(format!("connect to {to}")))?;
        Ok(Channel::new(link).fenced(options.incarnation))
    }
}

//! Connector: opens UCX connections.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use gym_core::transport::mux::{CallingEnd, MuxLink, heartbeat};
use gym_core::transport::{ConnectOptions, Connector, PathInfo, Transport};
use gym_core::{CallContext, Channel, Code, Endpoint, Error, Execution, Request, Result};
use tokio::time::Instant;

use crate::fabric::{Connect, Connection, ConnectionId, Fabric, Lanes, Target, WorkerPair};
use crate::messaging::calling::{CallingEvents, EstablishedConnection};
use crate::messaging::send_queue::UcxSendQueue;
use crate::transport::bootstrap::{BootstrapRequest, BootstrapResponse, PeerAddress, ROUTE};
use crate::transport::config::Ucx;
use crate::transport::{SCHEME, host};

/// Opens channels to `ucx://` endpoints, whose address is that of the peer's bootstrap. Each has one connection of its own.
///
/// | what happens | the caller gets |
/// |---|---|
/// | UCX cannot be loaded, the peer cannot be reached or does not respond in time | `Unavailable`, not started |
/// | the peer's server has no UCX | its refusal, not started |
/// | UCX negotiated another transport than was requested | `Unavailable`, not started: what it was |
/// | too many peers of this host share memory with it | `ResourceExhausted`, not started |
/// | no room by the deadline | `DeadlineExceeded`, not started |
/// | the message exceeds a limit of the peer | `ResourceExhausted`, not started |
/// | the connection breaks, or the peer is silent too long | `Unavailable`; unknown for calls under way |
/// | what comes back is not what a peer of ours sends | `DataLoss`, unknown |
/// | the reply is larger than `reply_bytes_max` | `ResourceExhausted`, finished |
/// | any complete reply, 4xx and 5xx too | that reply |
pub struct UcxConnector {
    bootstrap: Arc<dyn Connector>,
    ucx: Ucx,
}

impl UcxConnector {
    /// A connector that asks peers over `bootstrap` where they are. UCX is loaded at the first connection.
    #[must_use]
    pub fn new(bootstrap: Arc<dyn Connector>, ucx: impl Into<Ucx>) -> Self {
        Self { bootstrap, ucx: ucx.into() }
    }

    /// Connects over the requested transport, or over each in turn until one succeeds.
    async fn open(
        &self,
        cx: &CallContext,
        until: Instant,
        to: &Endpoint,
        level: Option<Transport>,
    ) -> Result<MuxLink<UcxSendQueue>> {
        let fabric = self.ucx.fabric().await?;
        let error = match level {
            Some(level @ (Transport::SHM | Transport::RDMA | Transport::UCX_TCP)) => {
                return self.attempt(cx, until, fabric, to, level).await;
            }
            Some(other) => {
                return Err(Error::not_started(Code::Unavailable, format!("UCX has no level {other}")));
            }
            None => {
                // Where nothing answers, time is left for the network.
                let half = cx.remaining().min(left(until)) / 2;
                let halftime = Instant::now() + half;
                match within(half, self.attempt(cx, halftime, fabric, to, Transport::SHM)).await {
                    Ok(link) => return Ok(link),
                    Err(error) => error,
                }
            }
        };
        tracing::debug!(%error, endpoint = %to, "no shared memory");
        self.attempt(cx, until, fabric, to, Transport::UCX_TCP).await.map_err(|last| {
            let said = format!("{}; and no shared memory: {}", last.message(), error.message());
            Error::new(last.code(), last.execution(), said)
        })
    }

    async fn attempt(
        &self,
        cx: &CallContext,
        until: Instant,
        fabric: &Fabric,
        to: &Endpoint,
        level: Transport,
    ) -> Result<MuxLink<UcxSendQueue>> {
        let devices = Lanes::of(fabric.devices());
        if level == Transport::RDMA && !devices.rdma() {
            let said = format!("UCX finds no RDMA device here, only {devices}");
            return Err(Error::not_started(Code::Unavailable, said));
        }
        let config = self.ucx.config();
        // Given up when this is.
        let peer_worker = match level {
            Transport::SHM => Some(fabric.peer_worker(left(until)).await?),
            _ => None,
        };
        let worker = peer_worker.as_ref().map(|peer_worker| peer_worker.address().clone());
        let request =
            BootstrapRequest::new(ConnectionId::random(), &config.limits, host::identity(), left(until), worker);
        let response = self.ask(cx, to, &request).await;
        if let (Some(peer_worker), Err(error)) = (&peer_worker, &response)
            && error.execution() == Execution::NotStarted
        {
            peer_worker.withdraw();
        }
        let response = response?;
        let target = match (response.way, peer_worker) {
            (PeerAddress::Worker(peer), Some(peer_worker)) => {
                Target::SharedMemory(WorkerPair { local: peer_worker, remote: peer })
            }
            (PeerAddress::Listener(address), None) => Target::Network(reach(address, to).await?),
            _ => return Err(Error::unknown(Code::DataLoss, "the peer answered with another way than was asked for")),
        };
        let connect = Connect { id: request.id, token: response.token, peer: response.id, target, within: left(until) };
        let (caller, greeted) = CallingEvents::new(config.limits.clone(), config.cut_bytes);
        let guard = ConnectGuard(Some(fabric.connect(connect, Arc::clone(&caller) as _)?));
        let EstablishedConnection { end, lanes } =
            greeted.await.unwrap_or_else(|_| Err(Error::unknown(Code::Unavailable, "the fabric has ended")))?;
        let opened = negotiated(&lanes);
        if level < opened {
            return Err(Error::not_started(
                Code::Unavailable,
                format!("{level} was asked for; UCX negotiated {lanes}"),
            ));
        }
        guard.done();
        let path = PathInfo::new(SCHEME, to.address(), true).at(opened, lanes.to_string());
        self.ucx.watch(Arc::clone(&path.peer), end.sender());
        // It ends when the end is over: with the last channel and call, or with the connection.
        tokio::spawn(drive(Arc::clone(&end), caller, config.limits.clone(), fabric.clone()));
        Ok(MuxLink::new(end, path))
    }

    /// Asks the peer for its address over the bootstrap transport.
    async fn ask(&self, cx: &CallContext, to: &Endpoint, request: &BootstrapRequest) -> Result<BootstrapResponse> {
        let bootstrap = Endpoint::parse(&format!("{}://{}", self.bootstrap.scheme(), to.address()))?;
        let channel = self.bootstrap.connect(cx, &bootstrap, &ConnectOptions::default()).await?;
        let response = channel.call(Request::post(cx.clone(), ROUTE, request.write())).await?.into_result()?;
        BootstrapResponse::read(&response.message.head.to_bytes())
    }
}

fn left(until: Instant) -> Duration {
    until.saturating_duration_since(Instant::now())
}

async fn within<T>(patience: Duration, opening: impl Future<Output = Result<T>>) -> Result<T> {
    let opened = tokio::time::timeout(patience, opening).await;
    opened.map_err(|_| Error::not_started(Code::Unavailable, format!("no answer within {patience:?}"))).flatten()
}

/// The address of a listener; one that listens everywhere is reached where its bootstrap was.
async fn reach(listener: SocketAddr, bootstrap: &Endpoint) -> Result<SocketAddr> {
    if !listener.ip().is_unspecified() {
        return Ok(listener);
    }
    let cannot = |said: String| Error::not_started(Code::Unavailable, said);
    let mut found = tokio::net::lookup_host(bootstrap.address()).await.map_err(|error| {
        cannot(format!("the peer listens everywhere, and `{}` names no host", bootstrap.address())).caused_by(error)
    })?;
    let found = found.next().ok_or_else(|| cannot(format!("`{}` has no address", bootstrap.address())))?;
    Ok(SocketAddr::new(found.ip(), listener.port()))
}

/// The transport that these lanes belong to.
fn negotiated(lanes: &Lanes) -> Transport {
    if lanes.shared_memory() {
        Transport::SHM
    } else if lanes.rdma() {
        Transport::RDMA
    } else {
        Transport::UCX_TCP
    }
}

/// Closes a connection unless it was opened in time.
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

/// Exchanges heartbeats until the connection is over; keeps its fabric until then.
async fn drive(
    end: Arc<CallingEnd<UcxSendQueue>>,
    caller: Arc<CallingEvents>,
    limits: gym_core::transport::mux::ConnectionLimits,
    fabric: Fabric,
) {
    // The first at once: its echo is the first round trip that is counted.
    gym_core::transport::mux::MessageSender::post_heartbeat(end.sender());
    let error = tokio::select! {
        biased;
        () = end.over() => return drop(fabric),
        error = heartbeat(end.sender(), &caller.heard, &limits, end.theirs(), || {}) => error,
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
        vec![Transport::SHM, Transport::RDMA, Transport::UCX_TCP]
    }

    async fn connect(&self, cx: &CallContext, to: &Endpoint, options: &ConnectOptions) -> Result<Channel> {
        cx.check()?;
        if to.scheme() != SCHEME {
            return Err(Error::invalid(format!("`{to}` is not an endpoint of {SCHEME}")));
        }
        let patience = self.ucx.config().connect_timeout;
        let opened = cx.bound(Execution::NotStarted, async {
            within(patience, self.open(cx, Instant::now() + patience, to, options.transport)).await
        });
        // Nothing of a call has left, whatever went wrong.
        let link = opened
            .await
            .map_err(|error| error.with_execution(Execution::NotStarted).about(format!("connect to {to}")))?;
        Ok(Channel::new(link).fenced(options.incarnation))
    }
}

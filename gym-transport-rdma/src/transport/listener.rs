//! Listener: accepts UCX connections and responds to their bootstrap requests.

use std::fmt;
use std::sync::{Arc, Weak};

use async_trait::async_trait;
use futures_util::future::BoxFuture;
use gym_core::message::PeerInfo;
use gym_core::transport::mux::{AnsweringEnd, heartbeat};
use gym_core::transport::{Incoming, Listener};
use gym_core::{CancelToken, Code, Endpoint, Error, Handler, Request, Response, Result};
use tokio::sync::{Semaphore, mpsc};

use crate::fabric::{ConnectionId, Expect, Fabric, Token, WorkerPair};
use crate::messaging::answering::{AnsweringEvents, ArrivedPeer};
use crate::messaging::send_queue::{EndRole, UcxSendQueue};
use crate::transport::bootstrap::{BootstrapRequest, BootstrapResponse, PeerAddress, ROUTE};
use crate::transport::config::Ucx;
use crate::transport::{SCHEME, host};

/// Peers that are expected, or connected but not accepted yet: one for each worker of a large job that connects at the
/// same time.
const PENDING_PEERS_MAX: usize = 1_024;

/// Accepts the peers to which its [bootstrap](UcxListener::bootstrap) has given an address.
#[derive(Debug)]
pub struct UcxListener {
    endpoints: Vec<Endpoint>,
    arrived: mpsc::Receiver<ArrivedPeer>,
    state: Arc<ListenerState>,
    calls: Arc<Semaphore>,
}

/// Responds to the bootstrap requests of peers for as long as the listener exists.
struct ListenerState {
    ucx: Ucx,
    fabric: Fabric,
    arrivals: mpsc::Sender<ArrivedPeer>,
    pending: Arc<Semaphore>,
    host: String,
}

impl UcxListener {
    /// Opens the fabric and a listener on it.
    ///
    /// `bootstraps` are the endpoints that will serve [`UcxListener::bootstrap`]. The listener's own endpoints have the
    /// same addresses and the scheme `ucx`.
    ///
    /// # Errors
    /// `Unavailable` if UCX cannot be loaded, or cannot listen on the configured address.
    pub async fn open(ucx: impl Into<Ucx>, bootstraps: &[Endpoint]) -> Result<Self> {
        let ucx = ucx.into();
        let fabric = ucx.fabric().await?.clone();
        let endpoint = |bootstrap: &Endpoint| Endpoint::parse(&format!("{SCHEME}://{}", bootstrap.address()));
        let endpoints = bootstraps.iter().map(endpoint).collect::<Result<_>>()?;
        let (arrivals, arrived) = mpsc::channel(PENDING_PEERS_MAX);
        let pending = Arc::new(Semaphore::new(PENDING_PEERS_MAX));
        let state = Arc::new(ListenerState { ucx, fabric, arrivals, pending, host: host::identity() });
        let calls = Arc::new(Semaphore::new(Semaphore::MAX_PERMITS));
        Ok(Self { endpoints, arrived, state, calls })
    }

    /// Returns a handler that responds to [`ROUTE`] and passes all other requests to `next`.
    ///
    /// Serve it in place of `next` on the bootstrap transport. After the listener is dropped, it rejects bootstrap
    /// requests.
    pub fn bootstrap(&self, next: Arc<dyn Handler>) -> impl Handler + use<> {
        BootstrapHandler { state: Arc::downgrade(&self.state), next }
    }
}

impl fmt::Debug for ListenerState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ListenerState").field("fabric", &self.fabric).finish_non_exhaustive()
    }
}

#[derive(Debug)]
struct BootstrapHandler {
    state: Weak<ListenerState>,
    next: Arc<dyn Handler>,
}

impl Handler for BootstrapHandler {
    fn handle(&self, request: Request) -> BoxFuture<'static, Result<Response>> {
        if request.route.path() != ROUTE {
            return self.next.handle(request);
        }
        let state = self.state.upgrade();
        Box::pin(async move {
            let response = match state {
                Some(state) => state.respond(&request).await.map(|response| Response::json(response.write())),
                None => Err(Error::not_started(Code::Unavailable, "this server's UCX listener is closed")),
            };
            response.map_err(|error| error.with_execution(gym_core::Execution::NotStarted))
        })
    }
}

impl ListenerState {
    async fn respond(&self, request: &Request) -> Result<BootstrapResponse> {
        let bootstrap = BootstrapRequest::read(&request.message.head.to_bytes())?;
        let refuse = |reason: String| Error::not_started(Code::Unavailable, reason);
        let pending = Arc::clone(&self.pending).try_acquire_owned();
        let pending =
            pending.map_err(|_| refuse(format!("{PENDING_PEERS_MAX} peers are connecting already; retry later")))?;
        let config = self.ucx.config();
        let within = bootstrap.within.min(config.connect_timeout);
        let (address, shared_memory) = if let Some(peer) = bootstrap.worker {
            if let Some(why) = host::why_not_shared(&self.host, &bootstrap.host) {
                return Err(refuse(why));
            }
            let peer_worker = self.fabric.peer_worker(within).await?;
            (PeerAddress::Worker(peer_worker.address().clone()), Some(WorkerPair { local: peer_worker, remote: peer }))
        } else {
            let no_address =
                || refuse("the server's UCX accepts only peers on its own host: it has no listen address".into());
            (PeerAddress::Listener(self.fabric.listen_address().ok_or_else(no_address)?), None)
        };
        let (id, token) = (ConnectionId::random(), Token::random());
        let peer = request.peer.clone().unwrap_or_default();
        let events = AnsweringEvents::new(&config.limits, bootstrap.handshake, peer, self.arrivals.clone(), pending);
        let expect = Expect { id, token: token.clone(), peer: bootstrap.id, shared_memory, within };
        self.fabric.expect(expect, events)?;
        Ok(BootstrapResponse { id, token, address })
    }
}

#[async_trait]
impl Listener for UcxListener {
    fn endpoints(&self) -> &[Endpoint] {
        &self.endpoints
    }

    async fn accept(&mut self) -> Result<Box<dyn Incoming>> {
        let arrived_peer = self.arrived.recv().await;
        let arrived_peer = arrived_peer.ok_or_else(|| Error::unknown(Code::Unavailable, "the listener is closed"))?;
        let (ucx, fabric) = (self.state.ucx.clone(), self.state.fabric.clone());
        Ok(Box::new(UcxIncoming { arrived_peer, ucx, fabric, calls: Arc::clone(&self.calls) }))
    }
}

/// A peer that was accepted.
pub struct UcxIncoming {
    arrived_peer: ArrivedPeer,
    ucx: Ucx,
    fabric: Fabric,
    calls: Arc<Semaphore>,
}

impl fmt::Debug for UcxIncoming {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "UcxIncoming({} over {})", self.arrived_peer.events.peer.address, self.arrived_peer.lanes)
    }
}

#[async_trait]
impl Incoming for UcxIncoming {
    fn peer(&self) -> &PeerInfo {
        &self.arrived_peer.events.peer
    }

    async fn serve(self: Box<Self>, handler: Arc<dyn Handler>, drain: CancelToken) -> Result<()> {
        let Self { arrived_peer, ucx, fabric, calls } = *self;
        let limits = &ucx.config().limits;
        let (connection, events) = arrived_peer.served();
        let peer = events.peer.clone();
        let about = format!("serve {}", peer.address);
        let send_queue = UcxSendQueue::new(connection, ucx.config().cut_bytes, EndRole::Answering);
        ucx.watch(Arc::clone(&peer.address), &send_queue);
        let end = AnsweringEnd::new(send_queue, limits.clone(), events.theirs.clone(), calls, handler, peer);
        let ending = end.end_on_drop();
        events.serve(Arc::clone(&end));
        // The peer sends no request before the handshake.
        end.sender().post_handshake(limits);
        let ended = tokio::select! {
            biased;
            ended = events.over() => ended,
            error = heartbeat(end.sender(), &events.activity, limits, end.theirs(), || {}) => Err(error),
            never = end.drain_with(&drain) => match never {},
        };
        drop((ending, fabric));
        ended.map_err(|error| error.about(about))
    }
}

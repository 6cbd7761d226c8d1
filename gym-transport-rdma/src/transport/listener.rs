//! Listener: accepts UCX connections, and answers their bootstrap.

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

/// Peers that are expected, or have arrived and are not accepted yet: one for each worker of a large job at a time.
const AWAITED_MAX: usize = 1_024;

/// Accepts peers that its [bootstrap](UcxListener::bootstrap) has given an address.
#[derive(Debug)]
pub struct UcxListener {
    endpoints: Vec<Endpoint>,
    arrived: mpsc::Receiver<ArrivedPeer>,
    state: Arc<ListenerState>,
    calls: Arc<Semaphore>,
}

/// Answers the bootstrap requests of peers for as long as the listener exists.
struct ListenerState {
    ucx: Ucx,
    fabric: Fabric,
    arrivals: mpsc::Sender<ArrivedPeer>,
    awaited: Arc<Semaphore>,
    host: String,
}

impl UcxListener {
    /// Opens the fabric. `bootstraps` are the endpoints at which [`UcxListener::bootstrap`] will answer: their addresses,
    /// with the scheme `ucx`, are where peers reach this listener.
    ///
    /// # Errors
    /// `Unavailable` when UCX cannot be loaded, or cannot listen where it is to.
    pub async fn open(ucx: impl Into<Ucx>, bootstraps: &[Endpoint]) -> Result<Self> {
        let ucx = ucx.into();
        let fabric = ucx.fabric().await?.clone();
        let endpoint = |bootstrap: &Endpoint| Endpoint::parse(&format!("{SCHEME}://{}", bootstrap.address()));
        let endpoints = bootstraps.iter().map(endpoint).collect::<Result<_>>()?;
        let (arrivals, arrived) = mpsc::channel(AWAITED_MAX);
        let awaited = Arc::new(Semaphore::new(AWAITED_MAX));
        let state = Arc::new(ListenerState { ucx, fabric, arrivals, awaited, host: host::identity() });
        let calls = Arc::new(Semaphore::new(Semaphore::MAX_PERMITS));
        Ok(Self { endpoints, arrived, state, calls })
    }

    /// The handler that tells peers the way. It answers [`ROUTE`] and hands everything else on to `next`, so it stands before
    /// what a server already serves over another transport. It refuses once the listener is gone.
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
            let answer = match state {
                Some(state) => state.tell(&request).await.map(|answer| Response::json(answer.write())),
                None => Err(Error::not_started(Code::Unavailable, "this server's UCX listener is gone")),
            };
            answer.map_err(|error| error.with_execution(gym_core::Execution::NotStarted))
        })
    }
}

impl ListenerState {
    async fn tell(&self, request: &Request) -> Result<BootstrapResponse> {
        let ask = BootstrapRequest::read(&request.message.head.to_bytes())?;
        let refuse = |said: String| Error::not_started(Code::Unavailable, said);
        let awaited = Arc::clone(&self.awaited).try_acquire_owned();
        let awaited = awaited.map_err(|_| refuse(format!("{AWAITED_MAX} peers are awaited already")))?;
        let config = self.ucx.config();
        let within = ask.within.min(config.connect_timeout);
        let (way, shared_memory) = if let Some(peer) = ask.worker {
            if let Some(why) = host::why_apart(&self.host, &ask.host) {
                return Err(refuse(why));
            }
            let peer_worker = self.fabric.peer_worker(within).await?;
            (PeerAddress::Worker(peer_worker.address().clone()), Some(WorkerPair { local: peer_worker, remote: peer }))
        } else {
            let nowhere =
                || refuse("the server's UCX takes peers of its own host only: it has no address to listen on".into());
            (PeerAddress::Listener(self.fabric.listen_address().ok_or_else(nowhere)?), None)
        };
        let (id, token) = (ConnectionId::random(), Token::random());
        let peer = request.peer.clone().unwrap_or_default();
        let events = AnsweringEvents::new(&config.limits, ask.greeting, peer, self.arrivals.clone(), awaited);
        let expect = Expect { id, token: token.clone(), peer: ask.id, shared_memory, within };
        self.fabric.expect(expect, events)?;
        Ok(BootstrapResponse { id, token, way })
    }
}

#[async_trait]
impl Listener for UcxListener {
    fn endpoints(&self) -> &[Endpoint] {
        &self.endpoints
    }

    async fn accept(&mut self) -> Result<Box<dyn Incoming>> {
        let arrived_peer = self.arrived.recv().await;
        let arrived_peer = arrived_peer.ok_or_else(|| Error::unknown(Code::Unavailable, "the listener is gone"))?;
        let (ucx, fabric) = (self.state.ucx.clone(), self.state.fabric.clone());
        Ok(Box::new(UcxIncoming { arrived_peer, ucx, fabric, calls: Arc::clone(&self.calls) }))
    }
}

/// One accepted peer.
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
        // Only now does the peer begin.
        end.sender().post_greeting(limits);
        let ended = tokio::select! {
            biased;
            ended = events.over() => ended,
            error = heartbeat(end.sender(), &events.heard, limits, end.theirs(), || {}) => Err(error),
            never = end.drain_with(&drain) => match never {},
        };
        drop((ending, fabric));
        ended.map_err(|error| error.about(about))
    }
}

//! Accepts UCX connections.

use std::fmt;
use std::sync::{Arc, Weak};

use async_trait::async_trait;
use futures_util::future::BoxFuture;
use gym_core::mux::{AnsweringEnd, heartbeat};
use gym_core::{Code, Endpoint, Error, Handler, Incoming, Listener, PeerInfo, Request, Response, Result};
use tokio::sync::{Semaphore, mpsc};
use tokio_util::sync::CancellationToken;

use crate::SCHEME;
use crate::bootstrap::{Answer, Ask, ROUTE, Way};
use crate::config::Ucx;
use crate::fabric::{Alongside, ConnectionId, Expect, Fabric, Token};
use crate::host;
use crate::pipe::{Answerer, Answers, Opened, Outbox};

/// Peers that were told to come, or have come and are not accepted yet: one for each worker of a large job at a time.
const AWAITED_MAX: usize = 1_024;

/// Accepts peers that were told the way by its [bootstrap](UcxListener::bootstrap).
#[derive(Debug)]
pub struct UcxListener {
    endpoints: Vec<Endpoint>,
    arrived: mpsc::Receiver<Opened>,
    reception: Arc<Reception>,
    calls: Arc<Semaphore>,
}

/// Tells peers the way, as long as the listener is there.
struct Reception {
    ucx: Ucx,
    fabric: Fabric,
    door: mpsc::Sender<Opened>,
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
        let (door, arrived) = mpsc::channel(AWAITED_MAX);
        let awaited = Arc::new(Semaphore::new(AWAITED_MAX));
        let reception = Arc::new(Reception { ucx, fabric, door, awaited, host: host::identity() });
        let calls = Arc::new(Semaphore::new(Semaphore::MAX_PERMITS));
        Ok(Self { endpoints, arrived, reception, calls })
    }

    /// The handler that tells peers the way. It answers [`ROUTE`] and hands everything else on to `next`, so it stands before
    /// what a server already serves over another transport. It refuses once the listener is gone.
    pub fn bootstrap(&self, next: Arc<dyn Handler>) -> impl Handler + use<> {
        Bootstrap { reception: Arc::downgrade(&self.reception), next }
    }
}

impl fmt::Debug for Reception {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reception").field("fabric", &self.fabric).finish_non_exhaustive()
    }
}

#[derive(Debug)]
struct Bootstrap {
    reception: Weak<Reception>,
    next: Arc<dyn Handler>,
}

impl Handler for Bootstrap {
    fn handle(&self, request: Request) -> BoxFuture<'static, Result<Response>> {
        if request.route.path() != ROUTE {
            return self.next.handle(request);
        }
        let reception = self.reception.upgrade();
        Box::pin(async move {
            let answer = match reception {
                Some(reception) => reception.tell(&request).await.map(|answer| Response::json(answer.write())),
                None => Err(Error::not_started(Code::Unavailable, "this server's UCX listener is gone")),
            };
            answer.map_err(|error| error.with_execution(gym_core::Execution::NotStarted))
        })
    }
}

impl Reception {
    async fn tell(&self, request: &Request) -> Result<Answer> {
        let ask = Ask::read(&request.message.head.to_bytes())?;
        let refuse = |said: String| Error::not_started(Code::Unavailable, said);
        let awaited = Arc::clone(&self.awaited).try_acquire_owned();
        let awaited = awaited.map_err(|_| refuse(format!("{AWAITED_MAX} peers are awaited already")))?;
        let config = self.ucx.config();
        let within = ask.within.min(config.connect_timeout);
        let (way, alongside) = if let Some(peer) = ask.worker {
            if let Some(why) = host::apart(&self.host, &ask.host) {
                return Err(refuse(why));
            }
            let berth = self.fabric.berth(within).await?;
            (Way::Worker(berth.address().clone()), Some(Alongside { berth, peer }))
        } else {
            let nowhere =
                || refuse("the server's UCX takes peers of its own host only: it has no address to listen on".into());
            (Way::Address(self.fabric.listen_address().ok_or_else(nowhere)?), None)
        };
        let (id, token) = (ConnectionId::random(), Token::random());
        let peer = request.peer.clone().unwrap_or_default();
        let pool = self.fabric.pool().clone();
        let events = Answerer::new(&config.limits, ask.greeting, peer, pool, self.door.clone(), awaited);
        let expect = Expect { id, token: token.clone(), peer: ask.id, alongside, within };
        self.fabric.expect(expect, events)?;
        Ok(Answer { id, token, way })
    }
}

#[async_trait]
impl Listener for UcxListener {
    fn endpoints(&self) -> &[Endpoint] {
        &self.endpoints
    }

    async fn accept(&mut self) -> Result<Box<dyn Incoming>> {
        let opened = self.arrived.recv().await;
        let opened = opened.ok_or_else(|| Error::unknown(Code::Unavailable, "the listener is gone"))?;
        let (ucx, fabric) = (self.reception.ucx.clone(), self.reception.fabric.clone());
        Ok(Box::new(UcxIncoming { opened, ucx, fabric, calls: Arc::clone(&self.calls) }))
    }
}

/// One accepted peer.
pub struct UcxIncoming {
    opened: Opened,
    ucx: Ucx,
    fabric: Fabric,
    calls: Arc<Semaphore>,
}

impl fmt::Debug for UcxIncoming {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "UcxIncoming({} over {})", self.opened.events.peer.address, self.opened.lanes)
    }
}

#[async_trait]
impl Incoming for UcxIncoming {
    fn peer(&self) -> &PeerInfo {
        &self.opened.events.peer
    }

    async fn serve(self: Box<Self>, handler: Arc<dyn Handler>, drain: CancellationToken) -> Result<()> {
        let Self { opened, ucx, fabric, calls } = *self;
        let limits = &ucx.config().limits;
        let (connection, events) = opened.served();
        let peer = events.peer.clone();
        let about = format!("serve {}", peer.address);
        let outbox = Outbox::new(connection, ucx.config().cut_bytes, Answers::Given);
        ucx.watch(Arc::clone(&peer.address), &outbox);
        let end = AnsweringEnd::new(outbox, limits.clone(), events.theirs.clone(), calls, handler, peer);
        let ending = end.end_on_drop();
        events.serve(Arc::clone(&end));
        // Only now does the peer begin.
        end.outbox().post_greeting(limits);
        let ended = tokio::select! {
            biased;
            ended = events.over() => ended,
            error = heartbeat(end.outbox(), &events.heard, limits, end.theirs(), || {}) => Err(error),
            never = end.drain_with(&drain) => match never {},
        };
        drop((ending, fabric));
        ended.map_err(|error| error.about(about))
    }
}

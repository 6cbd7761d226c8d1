//! A simulated host: it connects, listens and runs tasks until it crashes.

use std::fmt;
use std::future::Future;
use std::sync::Arc;

use crate::base::cancel::CancelToken;
use async_trait::async_trait;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::SCHEME;
use super::conn::{Conn, SimIncoming, SimLink};
use super::wire::{ConnectOutcome, SimState};
use crate::base::error::{Code, Error, Execution, Result};
use crate::message::CallContext;
use crate::transport::Channel;
use crate::transport::{
    Backend, BoundListener, ConnectOptions, Connector, Endpoint, Handler, Incoming, ListenOptions, Listener,
};

/// The accept queue. A server accepts peers immediately, so a longer queue means that it is stuck.
const ACCEPT_QUEUE_MAX: usize = 1_024;

/// The default limit on calls in flight of one connection.
const CALLS_MAX: usize = 16_384;

/// One incarnation (life) of a host. Clones are the same incarnation. After a crash all its operations fail.
#[derive(Clone)]
pub struct SimHost {
    shared: Arc<SimState>,
    name: Arc<str>,
    life: u64,
    crashed: CancelToken,
    calls_max: usize,
}

impl SimHost {
    pub(super) fn start(shared: Arc<SimState>, name: &str) -> Self {
        let name: Arc<str> = name.into();
        let (life, crashed) = shared.start(&name);
        Self { shared, name, life, crashed, calls_max: CALLS_MAX }
    }

    pub(super) fn start_beside(shared: Arc<SimState>, name: &str) -> Self {
        let name: Arc<str> = name.into();
        let (life, crashed) = shared.start_beside(&name);
        Self { shared, name, life, crashed, calls_max: CALLS_MAX }
    }

    /// Returns the same incarnation with another limit on the calls in flight of each connection that it opens.
    #[must_use]
    pub fn with_calls_max(mut self, calls_max: usize) -> Self {
        self.calls_max = calls_max;
        self
    }

    /// Returns the name of the host.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the number of the incarnation; the first is 0.
    #[must_use]
    pub fn life(&self) -> u64 {
        self.life
    }

    /// Returns a token that fires when this incarnation ends.
    #[must_use]
    pub fn crashed(&self) -> &CancelToken {
        &self.crashed
    }

    /// Runs a task on this host. A crash drops it.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) -> JoinHandle<()> {
        let crashed = self.crashed.clone();
        tokio::spawn(async move {
            tokio::select! {
                biased;
                () = crashed.cancelled() => {}
                () = task => {}
            }
        })
    }

    /// Listens at `sim://<this host>/<service>`.
    ///
    /// # Errors
    /// `AlreadyExists` if the host listens there already; `Unavailable` after a crash.
    pub fn listen(&self, service: &str) -> Result<SimListener> {
        let address = format!("{}/{service}", self.name);
        let endpoint = Endpoint::parse(&format!("{SCHEME}://{address}"))?;
        let (sender, accepted) = mpsc::channel(ACCEPT_QUEUE_MAX);
        let mut net = self.shared.net();
        if !net.is_alive(&self.name, self.life) {
            return Err(self.over());
        }
        if net.listeners.get(&address).is_some_and(|(_, known)| !known.is_closed()) {
            return Err(Error::not_started(Code::AlreadyExists, "there is already a listener at this address")
                .about(format!("listen on {endpoint}")));
        }
        net.listeners.insert(address, (self.life, sender));
        Ok(SimListener { endpoints: [endpoint], accepted })
    }

    fn over(&self) -> Error {
        Error::not_started(Code::Unavailable, "this incarnation of the host has crashed").about(self.name.to_string())
    }
}

impl fmt::Debug for SimHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SimHost({}, life {})", self.name, self.life)
    }
}

#[async_trait]
impl Connector for SimHost {
    fn scheme(&self) -> &'static str {
        SCHEME
    }

    async fn connect(&self, cx: &CallContext, to: &Endpoint, options: &ConnectOptions) -> Result<Channel> {
        cx.check()?;
        let refused = |why| Error::not_started(Code::Unavailable, why).about(format!("connect to {to}"));
        let server: Arc<str> = to.address().split('/').next().unwrap_or_default().into();
        let (connect_outcome, delay) = {
            let mut net = self.shared.net();
            if !net.is_alive(&self.name, self.life) {
                return Err(self.over());
            }
            (net.connect_outcome(&self.name, &server), net.delay() + net.delay())
        };
        let link = cx.bound(Execution::NotStarted, async {
            match connect_outcome {
                ConnectOutcome::Through | ConnectOutcome::Refused => {
                    if !delay.is_zero() {
                        tokio::time::sleep(delay).await;
                    }
                }
                ConnectOutcome::Silence(timeout) => {
                    tokio::time::sleep(timeout).await;
                    return Err(refused("no answer within the connect timeout"));
                }
            }
            if matches!(connect_outcome, ConnectOutcome::Refused) {
                return Err(refused("refused"));
            }
            let mut net = self.shared.net();
            if !net.is_alive(&self.name, self.life) {
                return Err(self.over());
            }
            let listener = net.listeners.get(to.address()).cloned();
            let (server_life, listener) = listener.ok_or_else(|| refused("there is no listener at this address"))?;
            // Not `calls_max`: cancelled calls may still be in flight.
            let (arrivals, arrived) = mpsc::channel(CALLS_MAX);
            let ordered = net.faults.reorder == 0.0;
            let conn = net.open(|id| Arc::new(Conn::new(id, Arc::clone(&self.name), (server, server_life), arrivals)));
            net.note(&self.name, format_args!("connects to {to} as {}", conn.id));
            drop(net);
            let incoming = SimIncoming::new(Arc::clone(&self.shared), Arc::clone(&conn), arrived);
            listener
                .try_send(incoming)
                .map_err(|_| refused("the accept queue is full, or the listener was dropped"))?;
            Ok(SimLink::new(Arc::clone(&self.shared), conn, self.calls_max, ordered))
        });
        Ok(Channel::new(link.await?).fenced(options.incarnation))
    }
}

#[async_trait]
impl Backend for SimHost {
    fn connectors(&self) -> Vec<Arc<dyn Connector>> {
        vec![Arc::new(self.clone())]
    }

    /// Listens at the service of the name.
    async fn listen(&self, options: &ListenOptions, handler: Arc<dyn Handler>) -> Result<Option<BoundListener>> {
        let Some(name) = &options.name else { return Ok(None) };
        let listener: Box<dyn Listener> = Box::new(Self::listen(self, name)?);
        Ok(Some(BoundListener { listener, handler }))
    }
}

/// Accepts the peers of one service of a host.
#[derive(Debug)]
pub struct SimListener {
    endpoints: [Endpoint; 1],
    accepted: mpsc::Receiver<SimIncoming>,
}

#[async_trait]
impl Listener for SimListener {
    fn endpoints(&self) -> &[Endpoint] {
        &self.endpoints
    }

    async fn accept(&mut self) -> Result<Box<dyn Incoming>> {
        match self.accepted.recv().await {
            Some(incoming) => Ok(Box::new(incoming)),
            None => Err(Error::not_started(Code::Unavailable, "the host has crashed")),
        }
    }
}

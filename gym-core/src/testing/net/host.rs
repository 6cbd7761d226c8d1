//! One life of a simulated host: it connects, listens and runs tasks until it crashes.

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
use crate::transport::{ConnectOptions, Connector, Endpoint, Incoming, Listener};

/// Peers that have connected and are not accepted yet; a server accepts at once, so more means that it is stuck.
const ACCEPT_QUEUE_MAX: usize = 1_024;

/// Calls under way on one connection, unless asked otherwise.
const CALLS_MAX: usize = 16_384;

/// One life of a host. Clones are the same life; after a crash everything it tries fails.
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

    /// The same life, with another bound on the calls under way on one connection that it opens.
    #[must_use]
    pub fn with_calls_max(mut self, calls_max: usize) -> Self {
        self.calls_max = calls_max;
        self
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Which life it is; the first is 0.
    #[must_use]
    pub fn life(&self) -> u64 {
        self.life
    }

    /// Fires when this life ends.
    #[must_use]
    pub fn crashed(&self) -> &CancelToken {
        &self.crashed
    }

    /// Runs a task on this host: dropped where it is when the host crashes.
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

    /// Accepts peers at `sim://<this host>/<service>`.
    ///
    /// # Errors
    /// `AlreadyExists` when the host listens there already; `Unavailable` when this life is over.
    pub fn listen(&self, service: &str) -> Result<SimListener> {
        let address = format!("{}/{service}", self.name);
        let endpoint = Endpoint::parse(&format!("{SCHEME}://{address}"))?;
        let (sender, accepted) = mpsc::channel(ACCEPT_QUEUE_MAX);
        let mut net = self.shared.net();
        if !net.is_alive(&self.name, self.life) {
            return Err(self.over());
        }
        if net.listeners.get(&address).is_some_and(|(_, known)| !known.is_closed()) {
            return Err(Error::not_started(Code::AlreadyExists, "somebody listens there already")
                .about(format!("listen on {endpoint}")));
        }
        net.listeners.insert(address, (self.life, sender));
        Ok(SimListener { endpoints: [endpoint], accepted })
    }

    fn over(&self) -> Error {
        Error::not_started(Code::Unavailable, "this life of the host is over").about(self.name.to_string())
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
            let listener = net.listeners.get(to.address()).map(|(_, listener)| listener.clone());
            let listener = listener.ok_or_else(|| refused("nobody listens there"))?;
            // Not `calls_max`: calls whose callers have left may still be on their way.
            let (arrivals, arrived) = mpsc::channel(CALLS_MAX);
            let ordered = net.faults.reorder == 0.0;
            let conn = net.open(|id| Arc::new(Conn::new(id, Arc::clone(&self.name), server, arrivals)));
            net.note(&self.name, format_args!("connects to {to} as {}", conn.id));
            drop(net);
            let incoming = SimIncoming::new(Arc::clone(&self.shared), Arc::clone(&conn), arrived);
            listener.try_send(incoming).map_err(|_| refused("the accept queue is full, or its owner has left"))?;
            Ok(SimLink::new(Arc::clone(&self.shared), conn, self.calls_max, ordered))
        });
        Ok(Channel::new(link.await?).fenced(options.incarnation))
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

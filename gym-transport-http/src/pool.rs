//! The outgoing connections of one channel.
//!
//! One call at a time has a connection, and drives it itself: nothing is spawned for it, no other task is woken, dropping the
//! call closes it. hyper-util's pool was considered; it hides when a request is handed over, which the seam must know, has no
//! bound on connections, and costs half as much again per call.

use std::collections::VecDeque;
use std::fmt;
use std::future::{Future, poll_fn};
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll};

use gym_core::{Code, Error, Result};
use hyper::client::conn::http1::{Builder, Connection, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

use crate::body::RopeBody;
use crate::config::HttpConfig;
use crate::wire::{Outgoing, Wire};

/// Where the peer is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    pub(crate) host: String,
    pub(crate) port: u16,
}

/// One connection and the handle that hands it requests.
pub(crate) struct Lane {
    pub(crate) sender: SendRequest<RopeBody>,
    pub(crate) watch: Arc<Outgoing>,
    connection: Connection<TokioIo<Wire<Outgoing>>, RopeBody>,
    ended: bool,
}

impl Lane {
    /// Moves bytes both ways; ready once the connection has ended.
    pub(crate) fn drive(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if !self.ended && Pin::new(&mut self.connection).poll(cx).is_ready() {
            self.ended = true;
        }
        if self.ended { Poll::Ready(()) } else { Poll::Pending }
    }

    /// Whether the next request can go over it: the last answer is complete and the peer has not closed it.
    async fn is_usable(&mut self) -> bool {
        self.watch.ask_kernel();
        let open = poll_fn(|cx| Poll::Ready(self.drive(cx).is_pending())).await;
        self.watch.was_asked() && open && self.sender.is_ready()
    }
}

pub(crate) struct Pool {
    pub(crate) address: Address,
    pub(crate) config: HttpConfig,
    /// Fires when running calls are to end.
    pub(crate) closed: CancellationToken,
    room: Arc<Semaphore>,
    idle: Mutex<Idle>,
}

#[derive(Default)]
struct Idle {
    /// The longest unused first.
    lanes: VecDeque<(Box<Lane>, Instant)>,
    reaper: Option<AbortHandle>,
    closing: bool,
}

impl Pool {
    pub(crate) fn new(address: Address, config: HttpConfig) -> Self {
        let room = config.connections_max.clamp(1, Semaphore::MAX_PERMITS);
        Self {
            address,
            config,
            closed: CancellationToken::new(),
            room: Arc::new(Semaphore::new(room)),
            idle: Mutex::default(),
        }
    }

    /// Waits until one more call may have a connection.
    pub(crate) async fn room(&self) -> Result<OwnedSemaphorePermit> {
        // Before the wait, or it would be for the last running call; and after it, for those who waited already.
        self.check_open()?;
        let room = Arc::clone(&self.room).acquire_owned().await.map_err(|_| closed())?;
        self.check_open()?;
        Ok(room)
    }

    fn check_open(&self) -> Result<()> {
        if self.lock().closing { Err(closed()) } else { Ok(()) }
    }

    /// An unused connection that is still open.
    pub(crate) async fn reuse(&self) -> Option<Box<Lane>> {
        loop {
            // The one used last: it is the least likely to be closed, and lets the others age.
            let (mut lane, _) = self.lock().lanes.pop_back()?;
            if lane.is_usable().await {
                return Some(lane);
            }
        }
    }

    /// Keeps a connection for the next call, if it can have one.
    pub(crate) fn keep(self: &Arc<Self>, lane: Box<Lane>) {
        if lane.ended || !lane.sender.is_ready() {
            return;
        }
        let now = Instant::now();
        let mut idle = self.lock();
        if idle.closing {
            return;
        }
        idle.lanes.push_back((lane, now));
        if idle.reaper.is_none() {
            // The handle is kept, and ended with the pool.
            idle.reaper = Some(tokio::spawn(reap(Arc::downgrade(self))).abort_handle());
        }
    }

    /// A new connection.
    pub(crate) async fn connect(&self) -> Result<Box<Lane>> {
        let stream = timeout(self.config.connect_timeout, connect_stream(&self.address))
            .await
            .map_err(|_| {
                let waited = self.config.connect_timeout;
                Error::not_started(Code::Unavailable, format!("no answer within connect_timeout = {waited:?}"))
            })
            .flatten()?;
        let watch = Arc::new(Outgoing::default());
        let wire = TokioIo::new(Wire::new(stream, Arc::clone(&watch)));
        let (sender, connection) = Builder::new()
            .handshake(wire)
            .await
            .map_err(|error| Error::not_started(Code::Unavailable, "cannot start HTTP").caused_by(error))?;
        Ok(Box::new(Lane { sender, watch, connection, ended: false }))
    }

    /// Takes no new calls; `true` once no call is running.
    pub(crate) async fn drain(&self) {
        let unused = {
            let mut idle = self.lock();
            idle.closing = true;
            std::mem::take(&mut idle.lanes)
        };
        drop(unused);
        let all = self.config.connections_max.clamp(1, Semaphore::MAX_PERMITS);
        let mut running = all;
        // In handfuls: a semaphore hands out at most `u32::MAX` at once.
        while running > 0 {
            let some = u32::try_from(running).unwrap_or(u32::MAX);
            match self.room.acquire_many(some).await {
                Ok(room) => room.forget(),
                Err(_) => return,
            }
            running -= some as usize;
        }
    }

    /// Ends what still runs and refuses what comes.
    pub(crate) fn close(&self) {
        self.room.close();
        self.closed.cancel();
    }

    fn lock(&self) -> MutexGuard<'_, Idle> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if let Some(reaper) = self.lock().reaper.take() {
            reaper.abort();
        }
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pool({}:{}, {} idle)", self.address.host, self.address.port, self.lock().lanes.len())
    }
}

/// A connected socket.
pub(crate) async fn connect_stream(Address { host, port }: &Address) -> Result<TcpStream> {
    let connected = match host.parse::<IpAddr>() {
        Ok(ip) => TcpStream::connect(SocketAddr::new(ip, *port)).await,
        Err(_) => TcpStream::connect((host.as_str(), *port)).await,
    };
    let stream = connected.map_err(|error| {
        let code = match rustix::io::Errno::from_io_error(&error) {
            Some(rustix::io::Errno::MFILE | rustix::io::Errno::NFILE) => Code::ResourceExhausted,
            _ => Code::Unavailable,
        };
        Error::not_started(code, "cannot connect").caused_by(error)
    })?;
    // Without these, small requests wait for acknowledgements, and a peer that lost its power is never missed.
    if let Err(error) = stream.set_nodelay(true).and_then(|()| keep_alive(&stream)) {
        tracing::debug!(%error, "socket options not set");
    }
    Ok(stream)
}

fn closed() -> Error {
    Error::not_started(Code::Unavailable, "the channel was closed")
}

/// Closes connections that were not used for too long; ends when there are none.
async fn reap(pool: Weak<Pool>) {
    loop {
        let (old, next) = {
            let Some(pool) = pool.upgrade() else { return };
            let idle_timeout = pool.config.idle_timeout;
            let mut idle = pool.lock();
            let now = Instant::now();
            let old: Vec<_> = {
                let count = idle.lanes.iter().take_while(|(_, since)| *since + idle_timeout <= now).count();
                idle.lanes.drain(..count).collect()
            };
            let next = idle.lanes.front().map(|(_, since)| *since + idle_timeout);
            if next.is_none() {
                idle.reaper = None;
            }
            (old, next)
        };
        drop(old);
        match next {
            Some(next) => sleep_until(next).await,
            None => return,
        }
    }
}

/// Has the kernel ask an unresponsive peer whether it is there: after 60 s, every 10 s, 3 times, as NeMo Gym's client does.
pub(crate) fn keep_alive(socket: impl std::os::fd::AsFd) -> std::io::Result<()> {
    use std::time::Duration;

    use rustix::net::sockopt;
    sockopt::set_socket_keepalive(&socket, true)?;
    sockopt::set_tcp_keepidle(&socket, Duration::from_secs(60))?;
    sockopt::set_tcp_keepintvl(&socket, Duration::from_secs(10))?;
    sockopt::set_tcp_keepcnt(&socket, 3)?;
    Ok(())
}

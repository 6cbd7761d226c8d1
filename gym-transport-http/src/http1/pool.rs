//! Outgoing connections of one channel.
//!
//! A connection belongs to one call at a time, and the call drives it. No task is spawned or woken for it, and dropping the call
//! closes it.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Weak};

use futures_util::FutureExt as _;
use gym_core::{CancelToken, Code, Error, Result};
use parking_lot::Mutex;
use rustix::io::Errno;
use rustix::net::RecvFlags;
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep_until, timeout};

use crate::http1::config::HttpConfig;
use crate::http1::exchange::Connection;
use crate::wire::address::HostPort;
use crate::wire::socket::connect;

/// One connection; boxed, because it moves between the pool and calls.
pub(crate) type PooledConnection = Box<Connection<TcpStream>>;

/// Returns `true` if the connection can carry the next request. Asks the kernel, because the runtime notices a close only when it
/// next polls for events. A request may already have been written into the closed connection by then.
fn is_open(connection: &PooledConnection) -> bool {
    // An unused connection has no data to read; any result except "not yet" makes it unusable.
    let asked = rustix::net::recv(&connection.stream, &mut [0; 1], RecvFlags::PEEK | RecvFlags::DONTWAIT);
    matches!(asked, Err(Errno::AGAIN | Errno::INTR))
}

pub(crate) struct ConnectionPool {
    pub(crate) address: HostPort,
    /// The `Host` of requests, and the prefix of their routes.
    pub(crate) host: Arc<str>,
    pub(crate) prefix: Arc<str>,
    pub(crate) config: HttpConfig,
    /// Fires when running calls must end.
    pub(crate) closed: CancelToken,
    permits: Arc<Semaphore>,
    idle: Mutex<IdleConnections>,
}

#[derive(Default)]
struct IdleConnections {
    /// The connections, the one unused for longest first.
    connections: VecDeque<(PooledConnection, Instant)>,
    reaper: Option<AbortHandle>,
    closing: bool,
}

impl ConnectionPool {
    pub(crate) fn new(address: HostPort, host: Arc<str>, prefix: Arc<str>, config: HttpConfig) -> Self {
        let permits = config.connections_max.clamp(1, Semaphore::MAX_PERMITS);
        Self {
            address,
            host,
            prefix,
            config,
            closed: CancelToken::new(),
            permits: Arc::new(Semaphore::new(permits)),
            idle: Mutex::default(),
        }
    }

    /// Waits until another call may use a connection.
    pub(crate) async fn permit(&self) -> Result<OwnedSemaphorePermit> {
        // Checked before the wait, which otherwise lasts until a running call ends, and after it, for calls that were already
        // waiting.
        self.check_open()?;
        let permit = Arc::clone(&self.permits).acquire_owned().await.map_err(|_| closed())?;
        self.check_open()?;
        Ok(permit)
    }

    fn check_open(&self) -> Result<()> {
        if self.idle.lock().closing { Err(closed()) } else { Ok(()) }
    }

    /// Returns an unused connection that is still open.
    pub(crate) fn reuse(&self) -> Option<PooledConnection> {
        loop {
            // Takes the connection that was used last: it is the least likely to be closed, and the others can age.
            let (mut connection, _) = self.idle.lock().connections.pop_back()?;
            if is_open(&connection) {
                connection.reused = true;
                return Some(connection);
            }
        }
    }

    /// Keeps a connection for the next call, if it can carry one.
    pub(crate) fn keep(self: &Arc<Self>, connection: PooledConnection) {
        if !connection.reusable {
            return;
        }
        let now = Instant::now();
        let mut idle = self.idle.lock();
        if idle.closing {
            return;
        }
        idle.connections.push_back((connection, now));
        if idle.reaper.is_none() {
            // The handle is kept, and the task is aborted with the pool.
            idle.reaper = Some(tokio::spawn(reap(Arc::downgrade(self)).boxed()).abort_handle());
        }
    }

    /// Opens a new connection.
    pub(crate) async fn connect(&self) -> Result<PooledConnection> {
        let stream = timeout(self.config.connect_timeout, connect(&self.address))
            .await
            .map_err(|_| {
                let waited = self.config.connect_timeout;
                Error::not_started(Code::Unavailable, format!("no answer within connect_timeout = {waited:?}"))
            })
            .flatten()?;
        Ok(Box::new(Connection::new(stream)))
    }

    /// Rejects new calls; returns once no call is running.
    pub(crate) async fn drain(&self) {
        let unused = {
            let mut idle = self.idle.lock();
            idle.closing = true;
            std::mem::take(&mut idle.connections)
        };
        drop(unused);
        let all = self.config.connections_max.clamp(1, Semaphore::MAX_PERMITS);
        let mut running = all;
        // In several steps, because a semaphore grants at most `u32::MAX` permits at once.
        while running > 0 {
            let some = u32::try_from(running).unwrap_or(u32::MAX);
            match self.permits.acquire_many(some).await {
                Ok(permits) => permits.forget(),
                Err(_) => return,
            }
            running -= some as usize;
        }
    }

    /// Aborts running calls and rejects new ones.
    pub(crate) fn close(&self) {
        self.permits.close();
        self.closed.cancel();
    }
}

impl Drop for ConnectionPool {
    fn drop(&mut self) {
        if let Some(reaper) = self.idle.lock().reaper.take() {
            reaper.abort();
        }
    }
}

impl fmt::Debug for ConnectionPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "ConnectionPool({}:{}, {} idle)",
            self.address.host,
            self.address.port,
            self.idle.lock().connections.len()
        )
    }
}

fn closed() -> Error {
    Error::not_started(Code::Unavailable, "the channel was closed")
}

/// Closes connections that were unused for too long; returns when none is left.
async fn reap(pool: Weak<ConnectionPool>) {
    loop {
        let (old, next) = {
            let Some(pool) = pool.upgrade() else { return };
            let idle_timeout = pool.config.idle_timeout;
            let mut idle = pool.idle.lock();
            let now = Instant::now();
            let old: Vec<_> = {
                let count = idle.connections.iter().take_while(|(_, since)| *since + idle_timeout <= now).count();
                idle.connections.drain(..count).collect()
            };
            let next = idle.connections.front().map(|(_, since)| *since + idle_timeout);
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

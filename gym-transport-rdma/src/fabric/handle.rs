//! What other threads hold of a fabric.

use std::fmt;
use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use gym_core::{Code, Error, Result};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::berth::{Berth, BerthId};
use super::peer::{ended_before, finish};
use super::queue::{Queue, Refused};
use super::stats::{ConnectionCounters, FabricCounters};
use super::{
    Connect, ConnectionId, ConnectionStats, Expect, FabricError, FabricOptions, FabricStats, HEADER_BYTES_MAX, Lane,
    Lanes, Parcel, PeerEvents, URGENT_BYTES_MAX, thread,
};
use crate::pool::Pool;
use crate::sys::LibraryInfo;

/// How long the last handle's drop lets connections say goodbye.
const GRACE_OF_DROP: Duration = Duration::from_secs(1);
/// How much longer than it may take a shutdown is waited for: the thread keeps the deadline itself, unless a handler
/// blocks it.
const SHUTDOWN_SLACK: Duration = Duration::from_secs(5);

/// A handle to the thread. The thread ends, in order, when the last one is dropped or [`Fabric::shutdown`] is called;
/// [`Connection`]s do not keep it alive.
#[derive(Clone)]
pub struct Fabric(Arc<Owner>);

struct Owner(Arc<Shared>);

/// What the thread and the handles share.
pub(super) struct Shared {
    pub(super) queue: Queue<Command>,
    pub(super) pool: Pool,
    pub(super) counters: FabricCounters,
    pub(super) ready: OnceLock<Ready>,
    /// The process ends: the thread must leave UCX as it is.
    pub(super) stopped: AtomicBool,
    ended: (Mutex<Option<bool>>, Condvar),
}

/// What is known when the thread runs.
pub(super) struct Ready {
    pub(super) listen_address: Option<SocketAddr>,
    pub(super) library: LibraryInfo,
    pub(super) devices: Vec<String>,
}

pub(super) enum Command {
    Open(Box<(Opening, Arc<Link>, Arc<dyn PeerEvents>)>),
    Berth(Duration, oneshot::Sender<Result<Berth>>),
    /// Nobody will take it.
    GiveUp(BerthId),
    Post(ConnectionId, Parcel),
    Close(ConnectionId, Duration),
    Shutdown(Duration),
}

/// What is to be opened, and until when: its time begins with the call.
pub(super) enum Opening {
    Expect(Expect, Instant),
    Connect(Connect, Instant),
}

impl Fabric {
    /// Loads the library, starts the thread, and waits until its worker (and listener) is ready. Takes some ten
    /// milliseconds and reads files: not for an async worker thread.
    ///
    /// # Errors
    /// When UCX cannot be loaded, a setting is refused, no transport fits, or the address cannot be listened on.
    pub fn open(options: FabricOptions) -> Result<Self, FabricError> {
        let shared = Arc::new(Shared::new(&options)?);
        thread::start(options, &shared)?;
        Ok(Self(Arc::new(Owner(shared))))
    }

    fn ready(&self) -> &Ready {
        self.0.0.ready.get().expect("set before `open` returns")
    }

    /// A worker of its own for one peer on this host, kept for so long unless a connection takes it.
    ///
    /// # Errors
    /// Not started: `ResourceExhausted` beyond [`FabricOptions::shared_memory_peers_max`] or when the queue is full,
    /// `Unavailable` when there is no shared memory among the transports, UCX cannot open a worker, or the fabric has ended.
    pub async fn berth(&self, within: Duration) -> Result<Berth> {
        let (told, opened) = oneshot::channel();
        self.0.0.queue.push(Command::Berth(within, told), true).map_err(|(_, refused)| refused.into_error())?;
        opened.await.unwrap_or_else(|_| Err(Refused::Closed.into_error()))
    }

    /// What a peer anywhere connects to, if [`FabricOptions::listen`] asked for it; the port is the real one.
    #[must_use]
    pub fn listen_address(&self) -> Option<SocketAddr> {
        self.ready().listen_address
    }

    /// Which UCX it is.
    #[must_use]
    pub fn library(&self) -> &LibraryInfo {
        &self.ready().library
    }

    /// What UCX can use with these options, as `transport/device`: `posix/memory`, `tcp/eth0`, `rc_verbs/mlx5_0:1`.
    #[must_use]
    pub fn devices(&self) -> &[String] {
        &self.ready().devices
    }

    /// Awaits a peer that shows the token. Its `opened` comes when it did; [`End::Lost`](super::End::Lost) when it did
    /// not in time.
    ///
    /// # Errors
    /// When the fabric has ended, or its queue is full.
    pub fn expect(&self, expected: Expect, events: Arc<dyn PeerEvents>) -> Result<Connection> {
        let until = Instant::now() + expected.within;
        self.begin(expected.id, Opening::Expect(expected, until), events)
    }

    /// Connects to a peer that expects us. `opened` comes when it answered; [`End::Lost`](super::End::Lost) when it did
    /// not in time, or cannot be reached. What is posted before `opened` is sent after it.
    ///
    /// # Errors
    /// When the fabric has ended, or its queue is full.
    pub fn connect(&self, to: Connect, events: Arc<dyn PeerEvents>) -> Result<Connection> {
        let until = Instant::now() + to.within;
        self.begin(to.id, Opening::Connect(to, until), events)
    }

    fn begin(&self, id: ConnectionId, opening: Opening, events: Arc<dyn PeerEvents>) -> Result<Connection> {
        let link = Arc::new(Link {
            id,
            shared: Arc::clone(&self.0.0),
            ended: AtomicBool::new(false),
            leaving: AtomicBool::new(false),
            breaking: AtomicBool::new(false),
            lanes: OnceLock::new(),
            counters: ConnectionCounters::default(),
        });
        let command = Command::Open(Box::new((opening, Arc::clone(&link), events)));
        // In the urgent line, because urgent parcels may be posted to it at once.
        self.0.0.queue.push(command, true).map_err(|(_, refused)| refused.into_error())?;
        Ok(Connection(link))
    }

    /// The memory that is kept registered.
    #[must_use]
    pub fn pool(&self) -> &Pool {
        &self.0.0.pool
    }

    /// What happened so far.
    #[must_use]
    pub fn stats(&self) -> FabricStats {
        self.0.0.counters.read()
    }

    /// Closes all connections (each is told `ended`), then worker, memory and context on the thread, and waits for it.
    /// What does not end `within` is leaked. Blocks: not for an async worker thread, and never from [`PeerEvents`].
    ///
    /// Returns whether everything was given back.
    #[allow(clippy::must_use_candidate, reason = "what was leaked is seldom of interest")]
    pub fn shutdown(&self, within: Duration) -> bool {
        let shared = &self.0.0;
        // Refused: it has ended already.
        let _ = shared.queue.push_always(Command::Shutdown(within), true);
        shared.wait_for_end(within + SHUTDOWN_SLACK).unwrap_or(false)
    }
}

impl fmt::Debug for Fabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fabric")
            .field("library", self.library())
            .field("listen_address", &self.listen_address())
            .finish_non_exhaustive()
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        // Refused: it has ended already.
        let _ = self.0.queue.push_always(Command::Shutdown(GRACE_OF_DROP), true);
    }
}

impl Shared {
    pub(super) fn new(options: &FabricOptions) -> std::io::Result<Self> {
        Ok(Self {
            queue: Queue::new(options.commands_max)?,
            pool: Pool::new(options.pool.clone()),
            counters: FabricCounters::default(),
            ready: OnceLock::new(),
            stopped: AtomicBool::new(false),
            ended: Default::default(),
        })
    }

    /// Makes the thread leave everything as it is and end.
    pub(super) fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
        self.queue.wake();
    }

    /// Whether everything was given back; `None` when the thread has not ended in time.
    pub(super) fn wait_for_end(&self, within: Duration) -> Option<bool> {
        let (ended, changed) = &self.ended;
        let ended = ended.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = changed.wait_timeout_while(ended, within, |ended| ended.is_none());
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// The thread has ended; `clean` when everything was given back.
    pub(super) fn end(&self, clean: bool) {
        *self.ended.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(clean);
        self.ended.1.notify_all();
    }
}

impl Refused {
    fn into_error(self) -> Error {
        match self {
            Self::Full => Error::not_started(Code::ResourceExhausted, "the fabric's queue is full"),
            Self::Closed => Error::not_started(Code::Unavailable, "the fabric has ended"),
        }
    }
}

/// One connection. Cheap to clone; dropping it does nothing: it ends by [`Connection::close`], by the peer, or with the
/// fabric.
#[derive(Clone)]
pub struct Connection(pub(super) Arc<Link>);

/// What the thread and the handles share of one connection.
pub(super) struct Link {
    id: ConnectionId,
    shared: Arc<Shared>,
    pub(super) ended: AtomicBool,
    /// A goodbye was asked for.
    leaving: AtomicBool,
    /// It was asked to be broken off.
    breaking: AtomicBool,
    pub(super) lanes: OnceLock<Lanes>,
    pub(super) counters: ConnectionCounters,
}

impl Link {
    pub(super) fn id(&self) -> ConnectionId {
        self.id
    }
}

impl Connection {
    /// Hands a parcel to the fabric; never blocks. On an error `done` is not called.
    ///
    /// # Errors
    /// `ResourceExhausted` when the queue is full (its bound is far above what bounded callers can fill; a full queue still takes
    /// [`Connection::close`]),
    /// `InvalidArgument` for a header or an urgent payload that is too long, `Unavailable` when the connection or the
    /// fabric has ended. All `NotStarted`.
    pub fn post(&self, parcel: Parcel) -> Result<()> {
        let urgent = parcel.lane == Lane::Urgent;
        if parcel.header.len() > HEADER_BYTES_MAX {
            let found = parcel.header.len();
            return Err(Error::invalid(format!("a header of {found} bytes; at most {HEADER_BYTES_MAX} fit")));
        }
        if urgent && parcel.payload.len() > URGENT_BYTES_MAX {
            let found = parcel.payload.len();
            return Err(Error::invalid(format!("an urgent payload of {found} bytes; at most {URGENT_BYTES_MAX} fit")));
        }
        if self.0.ended.load(Ordering::Acquire) {
            return Err(ended_before());
        }
        self.0.shared.queue.push(Command::Post(self.0.id, parcel), urgent).map_err(|(_, refused)| refused.into_error())
    }

    /// Ends it: everything posted before is sent, within `grace`, then the peer is told; after `grace` it is broken off.
    /// `ended` comes in either case. With `Duration::ZERO` it is broken off at once, before what still waits. The first grace
    /// counts.
    pub fn close(&self, grace: Duration) {
        let at_once = grace.is_zero();
        let asked = if at_once { &self.0.breaking } else { &self.0.leaving };
        // Once each, which bounds them. Another would change nothing.
        if !asked.swap(true, Ordering::Relaxed) {
            // Refused: the fabric has ended, and this with it.
            let _ = self.0.shared.queue.push_always(Command::Close(self.0.id, grace), at_once);
        }
    }

    /// Our id.
    #[must_use]
    pub fn id(&self) -> ConnectionId {
        self.0.id
    }

    /// The transports that were really negotiated, once it is open.
    #[must_use]
    pub fn lanes(&self) -> Option<&Lanes> {
        self.0.lanes.get()
    }

    /// What went over it so far.
    #[must_use]
    pub fn stats(&self) -> ConnectionStats {
        self.0.counters.read()
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").field("id", &self.0.id).field("lanes", &self.lanes()).finish_non_exhaustive()
    }
}

impl Command {
    /// The fabric has ended before it came to this.
    pub(super) fn refuse(self) {
        match self {
            Self::Post(_, parcel) => finish(parcel.done, Err(ended_before())),
            Self::Open(opening) => {
                let (_, link, events) = *opening;
                link.ended.store(true, Ordering::Release);
                // Nothing of a handler may keep the others from being told.
                let told = catch_unwind(AssertUnwindSafe(|| events.ended(super::End::Closed)));
                if told.is_err() {
                    tracing::error!("what was to be told of a connection's end panicked");
                }
            }
            // Whoever asked for a berth hears of its being dropped.
            Self::Berth(..) | Self::GiveUp(_) | Self::Close(..) | Self::Shutdown(_) => {}
        }
    }
}

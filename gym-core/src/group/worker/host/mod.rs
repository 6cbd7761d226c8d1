//! Runs the worker of one rank: admits calls, queues them in order, and cancels those whose caller disconnects.
//!
//! ```text
//!   Handler::handle ── check incarnation ▸ find method ▸ admit, or reject if full ──► FIFO queue
//!     async worker: one task; exclusive calls run in it, shared calls run concurrently     ◄──┤
//!     blocking worker: the thread that created the worker                                  ◄──┘
//! ```
//!
//! A call joins the queue before [`Handler::handle`] returns, so its position does not depend on polling by the caller.

mod async_executor;
mod blocking_executor;
mod call;
mod call_queue;
mod executor;
mod queue;
mod stats;

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use parking_lot::Mutex;

pub(crate) use async_executor::launch as launch_async;
pub(crate) use blocking_executor::launch as launch_blocking;
pub use call::{REPLY_METADATA, REPLY_NONE};
pub(crate) use executor::{ExecutorKind, Launcher};
pub use stats::{RunningCall, WorkerStatus};

use call::{QueueItem, new_call};
use executor::{CurrentCaller, Executor, KillHandle, WorkerSetup};
use queue::{QueueSender, queue};
use stats::{CallStats, QueueFull};

use crate::base::cancel::CancelToken;
use crate::base::error::{Code, Error, Result};
use crate::group::collective::Seats;
use crate::group::worker::{Methods, PREFIX, Worker, WorkerEnv};
use crate::message::{Loan, Request, Response, Route, Verb};
use crate::transport::{Endpoint, Handler};

/// The route of the [`WorkerStatus`] as JSON, which the host returns at once, whatever the worker is doing.
pub const STATUS_ROUTE: &str = "/worker/status";
/// The route to which the supervisor posts the [`Seats`] of the group, as JSON; 404 at a host that does not connect ranks. Served at once, whatever the
/// worker is doing.
pub const SEATS_ROUTE: &str = "/worker/seats";
/// The route to which other ranks send the messages of collective operations, for the backend of [`Peers`](crate::group::collective::Peers). Served at
/// once, so that an operation within an exclusive call never waits for that call.
pub const COLLECTIVE_ROUTE: &str = "/worker/collective";
/// The route of the endpoints that serve [`STATUS_ROUTE`] on a thread of their own, as a JSON list; 404 at a host without them.
pub const CONTROL_ROUTE: &str = "/worker/control";

/// Limits of a [`WorkerHost`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct HostOptions {
    /// Maximum number of calls that run or wait. A further call is rejected at once (`ResourceExhausted, NotStarted`). The
    /// default is 1,024.
    pub calls_max: usize,
    /// Creates an async worker on the task that starts its host, and not where blocking is allowed. For workers that start within microseconds, and
    /// for simulations, which need a single thread. The default is `false`.
    pub starts_in_task: bool,
}

impl Default for HostOptions {
    /// Returns the limits: 1,024 calls, far more than a controller keeps in flight at one rank, and a few hundred kilobytes.
    fn default() -> Self {
        Self { calls_max: 1_024, starts_in_task: false }
    }
}

/// Runs the calls of one rank's worker. Cheap to clone; dropping the last clone ends the worker as [`WorkerHost::kill`] does.
#[derive(Clone)]
pub struct WorkerHost(Arc<Core>);

struct Core {
    env: WorkerEnv,
    methods: Vec<&'static str>,
    kind: ExecutorKind,
    queue: QueueSender<QueueItem>,
    stats: Arc<CallStats>,
    stopping: AtomicBool,
    /// Taken by the first call of [`WorkerHost::stop`].
    executor: Mutex<Option<Executor>>,
    kill_handle: KillHandle,
    killed: CancelToken,
    /// Where the status is served on a thread of its own.
    control: OnceLock<Vec<Endpoint>>,
}

impl WorkerHost {
    /// Starts a worker and accepts calls for it.
    ///
    /// # Errors
    /// The error of [`Worker::start`]; `InvalidArgument` if the methods contradict each other; `Internal` if the worker panics.
    ///
    /// # Cancel safety
    /// Dropping the future does not interrupt [`Worker::start`]; the worker is dropped once it has started.
    pub async fn start<W: Worker>(env: WorkerEnv, init: W::Init, options: &HostOptions) -> Result<Self> {
        let subject = format!("start rank {} of {}", env.rank, env.group);
        let about = |error: Error| if error.subject().is_empty() { error.about(subject.clone()) } else { error };
        let (launcher, named) = Methods::<W>::of().checked().map_err(about)?;
        let (methods, entries): (Vec<_>, Vec<_>) = named.into_iter().unzip();
        // One more than the admitted calls, for the item that stops the worker. The size is doubled for cancelled calls, so that
        // they are seldom removed.
        let (sender, queue) =
            queue(options.calls_max.max(1).saturating_add(1).saturating_mul(2), QueueItem::is_cancelled);
        let stats = Arc::new(CallStats::new(&env, options.calls_max.max(1)));
        let setup = WorkerSetup { env: env.clone(), init, entries, queue, in_task: options.starts_in_task };
        let executor = (launcher.start)(setup).await.map_err(about)?;
        Ok(Self(Arc::new(Core {
            env,
            methods,
            kind: launcher.kind,
            queue: sender,
            stats,
            stopping: AtomicBool::new(false),
            kill_handle: executor.kill_handle(),
            executor: Mutex::new(Some(executor)),
            killed: CancelToken::new(),
            control: OnceLock::new(),
        })))
    }

    /// Returns the rank, the group and the environment of the worker.
    #[must_use]
    pub fn env(&self) -> &WorkerEnv {
        &self.0.env
    }

    /// Returns the methods that the worker handles, in order of registration.
    #[must_use]
    pub fn methods(&self) -> &[&'static str] {
        &self.0.methods
    }

    /// Sets the endpoints that [`CONTROL_ROUTE`] tells: those of a listener on a thread with I/O of its own, which serves [`STATUS_ROUTE`] of this host
    /// whatever the worker's methods do to the threads of the runtime. Only the first call has an effect.
    pub fn set_control(&self, endpoints: Vec<Endpoint>) {
        let _ = self.0.control.set(endpoints);
    }

    /// Reports what the worker is doing. Never waits for the worker.
    #[must_use]
    pub fn status(&self) -> WorkerStatus {
        self.0.status()
    }

    /// Stops the worker: rejects new calls, waits up to `grace` for admitted calls, then ends the worker.
    ///
    /// # Errors
    /// - `DeadlineExceeded` if calls were still running after `grace`. An async worker is then aborted, and a blocking thread
    ///   exits after its current call.
    /// - `Unavailable`, without waiting, if [`WorkerHost::kill`] is called in the meantime.
    ///
    /// # Cancel safety
    /// Not cancel safe: dropping the future kills the worker.
    pub async fn stop(&self, grace: Duration) -> Result<()> {
        self.0.stopping.store(true, Ordering::Release);
        // The queue has capacity for the admitted calls and this item.
        let _ = self.0.queue.push(QueueItem::Stop);
        if self.0.killed.is_cancelled() {
            return Ok(());
        }
        let Some(executor) = self.0.take_executor() else { return Ok(()) };
        let mut stopping = Stopping { core: &self.0, executor };
        let error = tokio::select! {
            biased;
            true = stopping.executor.ended() => return Ok(()),
            () = self.0.killed.cancelled() => Error::unknown(Code::Unavailable, "it was killed before its calls had ended"),
            () = tokio::time::sleep(grace) => {
                Error::unknown(Code::DeadlineExceeded, format!("calls were still running after {grace:?}"))
            }
        };
        stopping.end().await;
        let WorkerEnv { rank, group, .. } = &self.0.env;
        Err(error.about(format!("stop rank {rank} of {group}")))
    }

    /// Kills the worker, as the end of its process would: callers get `Unavailable, Unknown`. A blocking thread receives a
    /// cancellation signal and exits after its current call, whose reply is dropped.
    pub fn kill(&self) {
        self.0.kill();
    }
}

/// An executor that is being stopped; dropping this ends the executor.
struct Stopping<'c> {
    core: &'c Core,
    executor: Executor,
}

impl Stopping<'_> {
    /// Ends the worker. Waits until a task has ended; a thread is only abandoned.
    async fn end(mut self) {
        self.core.end();
        if let Executor::Task(task) = &mut self.executor
            && !task.is_finished()
        {
            let _ = task.await;
        }
    }
}

impl Drop for Stopping<'_> {
    fn drop(&mut self) {
        self.core.end();
    }
}

impl Core {
    fn take_executor(&self) -> Option<Executor> {
        self.executor.lock().take()
    }

    fn kill(&self) {
        self.stopping.store(true, Ordering::Release);
        self.env.peers.close();
        self.end();
        // A concurrent stop need not wait any longer.
        self.killed.cancel();
    }

    fn end(&self) {
        match &self.kill_handle {
            KillHandle::Task(task) => task.abort(),
            KillHandle::Thread(current) => self.abandon(current),
        }
    }

    /// Abandons a thread that may be blocked: answers the caller of its current call and the callers in the queue.
    fn abandon(&self, current: &CurrentCaller) {
        current.abandon(&self.stats);
        self.queue.close();
    }

    fn accept(&self, request: Request) -> Result<BoxFuture<'static, Result<Response>>> {
        if let Some(meant) = request.context.incarnation
            && meant != self.env.incarnation
        {
            let here = self.env.incarnation;
            return Err(Error::not_started(
                Code::Unavailable,
                format!("the call is meant for incarnation {meant}; this is {here}"),
            ));
        }
        // No method name contains `?`, so the query is removed only if the whole route names no method.
        let named = |route: &str| {
            let name = route.strip_prefix(PREFIX)?;
            self.methods.iter().position(|known| *known == name)
        };
        let Some(method) = named(request.route.as_str()).or_else(|| named(request.route.path())) else {
            return self.other(request);
        };
        if self.stopping.load(Ordering::Acquire) {
            return Err(Error::not_started(Code::Unavailable, "the worker takes no new calls"));
        }
        let permit = self.stats.admit().map_err(|QueueFull { calls_max }| {
            Error::not_started(
                Code::ResourceExhausted,
                format!("{calls_max} calls run or wait at this rank, which is calls_max of its HostOptions"),
            )
        })?;
        let keep_deadline = self.kind == ExecutorKind::Blocking;
        let (response, call) = new_call(request, method, self.methods[method], permit, keep_deadline);
        self.queue
            .push(QueueItem::Call(call))
            .map_err(|_| Error::not_started(Code::Unavailable, "the worker has ended"))?;
        Ok(response)
    }

    fn status(&self) -> WorkerStatus {
        WorkerStatus { collectives: self.env.peers.report(), ..self.stats.status() }
    }

    /// Serves the routes of the host itself; any other route is an error.
    fn other(&self, request: Request) -> Result<BoxFuture<'static, Result<Response>>> {
        if request.route.path() == COLLECTIVE_ROUTE
            && let Some(handler) = self.env.peers.handler()
        {
            return Ok(handler.handle(request));
        }
        let written = match (request.verb, request.route.path(), self.control.get()) {
            (Verb::Get, STATUS_ROUTE, _) => Some(serde_json::to_vec(&self.status())),
            (Verb::Get, CONTROL_ROUTE, Some(endpoints)) => Some(serde_json::to_vec(endpoints)),
            (Verb::Post, SEATS_ROUTE, _) if self.env.peers.connects() => {
                Some(serde_json::to_vec(&self.seat(&request)?))
            }
            _ => None,
        };
        if let Some(written) = written {
            let text = written.map_err(|error| Error::internal("the status cannot be written").caused_by(error))?;
            return Ok(Box::pin(async move { Ok(Response::json(text)) }));
        }
        Err(Error::not_started(
            Code::NotFound,
            format!("no method at {}; this worker handles {}", request.route, self.methods.join(", ")),
        ))
    }

    /// Takes the seats of the group from its supervisor. Returns `false` if these or newer ones are known.
    fn seat(&self, request: &Request) -> Result<bool> {
        let seats: Seats = serde_json::from_slice(&request.message.head.to_bytes())
            .map_err(|error| Error::invalid(format!("{SEATS_ROUTE} takes the seats of a group: {error}")))?;
        Ok(self.env.peers.seat(seats))
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        self.kill();
    }
}

impl Handler for WorkerHost {
    fn handle(&self, request: Request) -> BoxFuture<'static, Result<Response>> {
        match self.0.accept(request) {
            Ok(response) => response,
            Err(error) => {
                let WorkerEnv { rank, group, .. } = &self.0.env;
                let error = error.about(format!("rank {rank} of {group}"));
                Box::pin(async move { Err(error) })
            }
        }
    }

    fn only_waits(&self) -> bool {
        // The other executor's futures have timers, which must be polled within a runtime.
        self.0.kind == ExecutorKind::Async
    }

    fn place(&self, route: &Route, head: &Bytes, segment: usize, length: usize) -> Option<Loan> {
        let handler = (route.path() == COLLECTIVE_ROUTE).then(|| self.0.env.peers.handler())??;
        handler.place(route, head, segment, length)
    }
}

impl fmt::Debug for WorkerHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let WorkerEnv { rank, group, incarnation, .. } = &self.0.env;
        write!(f, "WorkerHost(rank {rank} of {group}, incarnation {incarnation})")
    }
}

//! One rank's worker behind the seam: who may run when, how many may wait, and what a caller that leaves means.
//!
//! ```text
//!   Handler::handle ── incarnation ▸ method ▸ place (refused at once when full) ──► queue, in order of arrival
//!                                                                                     │
//!        async worker: one task    exclusive calls run in it, shared ones beside it ◄─┤
//!        blocking worker: one thread, where the worker was born                    ◄──┘
//! ```
//!
//! A place is taken before `handle` returns, and what waits in line is in the queue, not in a future that its owner may not poll.

mod async_lane;
mod blocking_lane;
mod board;
mod job;
mod line;
mod queue;

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::task::{AbortHandle, JoinHandle};

pub(crate) use async_lane::launch as launch_async;
use blocking_lane::Desk;
pub(crate) use blocking_lane::launch as launch_blocking;
use board::{Board, Refusal};
pub use board::{RunningCall, WorkerStatus};
use job::{Item, answer_and_job};
use queue::{Arrivals, Entrance, queue};

use crate::cancel::CancelToken;
use crate::error::{Code, Error, Result};
use crate::handler::Handler;
use crate::message::{Request, Response, Verb};
use crate::worker::{Entry, Lane, Methods, PREFIX, Worker, WorkerEnv};

/// Metadata of a call whose caller has no use for the reply's body, with the value [`REPLY_NONE`]: a replica that did the same
/// work as another rank answers that it is done, and sends nothing.
pub const REPLY_METADATA: &str = "x-gym-reply";
/// See [`REPLY_METADATA`].
pub const REPLY_NONE: &str = "none";

/// Answers with the [`WorkerStatus`] as JSON, at once, whatever the worker is doing.
pub const STATUS_ROUTE: &str = "/worker/status";

/// Bounds of a [`WorkerHost`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct HostOptions {
    /// Calls that run or wait; one more is refused at once (`ResourceExhausted, NotStarted`).
    pub calls_max: usize,
}

impl Default for HostOptions {
    /// 1,024 calls: far more than a controller keeps under way at one rank, and a few hundred kilobytes.
    fn default() -> Self {
        Self { calls_max: 1_024 }
    }
}

/// Runs the calls of one rank's worker. Cheap to clone; the last clone's drop ends the worker as [`WorkerHost::kill`] does.
#[derive(Clone)]
pub struct WorkerHost(Arc<Core>);

struct Core {
    env: WorkerEnv,
    methods: Vec<&'static str>,
    lane: Lane,
    queue: Entrance<Item>,
    board: Arc<Board>,
    stopping: AtomicBool,
    /// Taken by whoever waits for its end.
    running: Mutex<Option<Running>>,
    ender: Ender,
    killed: CancelToken,
}

/// What runs a worker.
pub(crate) enum Running {
    Task(JoinHandle<()>),
    /// Ends when the thread does; a thread cannot be ended from outside, only given up.
    Thread(tokio::sync::oneshot::Receiver<()>, Desk),
}

impl Running {
    fn ender(&self) -> Ender {
        match self {
            Self::Task(task) => Ender::Task(task.abort_handle()),
            Self::Thread(_, desk) => Ender::Thread(desk.clone()),
        }
    }

    /// Waits until it has ended; whether it was let go to its end.
    async fn ended(&mut self) -> bool {
        match self {
            Self::Task(task) => !matches!(task.await, Err(torn) if torn.is_cancelled()),
            Self::Thread(ended, _) => {
                let _ = ended.await;
                true
            }
        }
    }
}

/// What ends a worker, whoever waits for it. What has ended already does not mind.
enum Ender {
    Task(AbortHandle),
    Thread(Desk),
}

/// What a lane needs to start.
pub(crate) struct Start<W: Worker> {
    pub(crate) env: WorkerEnv,
    init: W::Init,
    entries: Vec<Entry<W>>,
    queue: Arrivals<Item>,
}

/// How a worker is started, chosen where its bounds are known.
pub(crate) struct Launch<W: Worker> {
    pub(crate) lane: Lane,
    pub(crate) start: fn(Start<W>) -> BoxFuture<'static, Result<Running>>,
}

impl WorkerHost {
    /// Starts a worker and takes calls for it. Drop the future and the worker's start is no longer waited for.
    ///
    /// # Errors
    /// What [`Worker::start`] says; `InvalidArgument` when the methods contradict each other; `Internal` when it panics.
    pub async fn start<W: Worker>(env: WorkerEnv, init: W::Init, options: &HostOptions) -> Result<Self> {
        let subject = format!("start rank {} of {}", env.rank, env.group);
        let about = |error: Error| if error.subject().is_empty() { error.about(subject.clone()) } else { error };
        let (launch, named) = Methods::<W>::of().checked().map_err(about)?;
        let (methods, entries): (Vec<_>, Vec<_>) = named.into_iter().unzip();
        // One more than the calls that are let in, for the item that stops the lane; and as much again for what those who have left leave
        // behind, so that it is seldom cleared away.
        let (entrance, queue) = queue(options.calls_max.max(1).saturating_add(1).saturating_mul(2), Item::has_left);
        let board = Arc::new(Board::new(&env, options.calls_max.max(1)));
        let start = Start { env: env.clone(), init, entries, queue };
        let running = (launch.start)(start).await.map_err(about)?;
        Ok(Self(Arc::new(Core {
            env,
            methods,
            lane: launch.lane,
            queue: entrance,
            board,
            stopping: AtomicBool::new(false),
            ender: running.ender(),
            running: Mutex::new(Some(running)),
            killed: CancelToken::new(),
        })))
    }

    /// Who and where the worker is.
    #[must_use]
    pub fn env(&self) -> &WorkerEnv {
        &self.0.env
    }

    /// The methods it handles, in order of registration.
    #[must_use]
    pub fn methods(&self) -> &[&'static str] {
        &self.0.methods
    }

    /// What it is doing now. Never waits for the worker.
    #[must_use]
    pub fn status(&self) -> WorkerStatus {
        self.0.board.status()
    }

    /// Takes no new calls, lets those that were let in finish, and ends the worker. Dropped before it is through, it ends the worker
    /// as [`WorkerHost::kill`] does.
    ///
    /// # Errors
    /// `DeadlineExceeded` when calls were still running after `grace`. An async worker is ended all the same; a thread that
    /// blocks is given up, as [`WorkerHost::kill`] does. `Unavailable` when it was killed meanwhile, which does not wait for the grace.
    pub async fn stop(&self, grace: Duration) -> Result<()> {
        self.0.stopping.store(true, Ordering::Release);
        // The queue holds at most the calls that were let in, and this.
        let _ = self.0.queue.put(Item::Stop);
        if self.0.killed.is_cancelled() {
            return Ok(());
        }
        let Some(running) = self.0.take_running() else { return Ok(()) };
        let mut stopping = Stopping { core: &self.0, running };
        let error = tokio::select! {
            biased;
            true = stopping.running.ended() => return Ok(()),
            () = self.0.killed.cancelled() => Error::unknown(Code::Unavailable, "it was killed before its calls had ended"),
            () = tokio::time::sleep(grace) => {
                Error::unknown(Code::DeadlineExceeded, format!("calls were still running after {grace:?}"))
            }
        };
        stopping.end().await;
        let WorkerEnv { rank, group, .. } = &self.0.env;
        Err(error.about(format!("stop rank {rank} of {group}")))
    }

    /// Ends the worker where it is, as the end of its process would: callers see `Unavailable, Unknown`. A thread that blocks is told,
    /// and ends after its call, whose answer nobody gets.
    pub fn kill(&self) {
        self.0.kill();
    }
}

/// What is waited for, and ended when nobody waits any more.
struct Stopping<'c> {
    core: &'c Core,
    running: Running,
}

impl Stopping<'_> {
    /// Ends the worker; one that is a task is gone then.
    async fn end(mut self) {
        self.core.end();
        if let Running::Task(task) = &mut self.running
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
    fn take_running(&self) -> Option<Running> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn kill(&self) {
        self.stopping.store(true, Ordering::Release);
        self.end();
        // A stop that is under way has no reason to wait any more.
        self.killed.cancel();
    }

    fn end(&self) {
        match &self.ender {
            Ender::Task(task) => task.abort(),
            Ender::Thread(desk) => self.give_up(desk),
        }
    }

    /// Nobody waits any more for a thread that may block, neither for the call that it runs nor for its turn.
    fn give_up(&self, desk: &Desk) {
        desk.abandon(&self.board);
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
        // No method has a `?` in its name, so that a route with a query is looked at again only when it is none of them.
        let named = |route: &str| {
            let name = route.strip_prefix(PREFIX)?;
            self.methods.iter().position(|known| *known == name)
        };
        let Some(method) = named(request.route.as_str()).or_else(|| named(request.route.path())) else {
            return self.other(&request);
        };
        if self.stopping.load(Ordering::Acquire) {
            return Err(Error::not_started(Code::Unavailable, "the worker takes no new calls"));
        }
        let place = self.board.admit().map_err(|Refusal { calls_max }| {
            Error::not_started(
                Code::ResourceExhausted,
                format!("{calls_max} calls run or wait at this rank, which is calls_max of its HostOptions"),
            )
        })?;
        let keep_deadline = self.lane == Lane::Blocking;
        let (answer, job) = answer_and_job(request, method, self.methods[method], place, keep_deadline);
        self.queue.put(Item::Call(job)).map_err(|_| Error::not_started(Code::Unavailable, "the worker has ended"))?;
        Ok(answer)
    }

    /// The status, or what the worker does not have.
    fn other(&self, request: &Request) -> Result<BoxFuture<'static, Result<Response>>> {
        if request.verb == Verb::Get && request.route.path() == STATUS_ROUTE {
            let text = serde_json::to_vec(&self.board.status())
                .map_err(|error| Error::internal("the status cannot be written").caused_by(error))?;
            return Ok(Box::pin(async move { Ok(Response::json(text)) }));
        }
        Err(Error::not_started(
            Code::NotFound,
            format!("no method at {}; this worker handles {}", request.route, self.methods.join(", ")),
        ))
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
            Ok(answer) => answer,
            Err(error) => {
                let WorkerEnv { rank, group, .. } = &self.0.env;
                let error = error.about(format!("rank {rank} of {group}"));
                Box::pin(async move { Err(error) })
            }
        }
    }

    /// [`HostOptions::calls_max`].
    fn bounds_calls(&self) -> bool {
        true
    }
}

impl fmt::Debug for WorkerHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let WorkerEnv { rank, group, incarnation, .. } = &self.0.env;
        write!(f, "WorkerHost(rank {rank} of {group}, incarnation {incarnation})")
    }
}

/// What a panic says.
fn panic_text(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&'static str>().copied()).unwrap_or("not a text")
}

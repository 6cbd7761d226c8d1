//! The worker's side: takes items from a pool, runs them through the worker's own client, and returns the responses.

use std::collections::{BTreeMap, VecDeque};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use gym_core::base::host_name;
use gym_core::message::{CALL_WAIT_METADATA, CALL_WAIT_TIMEOUT, TraceContext};
use gym_core::registry::MemberTiming;
use gym_core::transport::{ConnectOptions, RetryPolicy};
use gym_core::{
    CallContext, CancelToken, Code, Endpoint, Error, Incarnation, Message, Request, Response, Result, Route, World,
};
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::client::{CallOptions, ServerClient};
use crate::transport::ReconnectingPeer;
use crate::transport::body;
use crate::work::message::{self, AnswerBody, DoneBody, ItemBody, PollBody, WORK_ROUTE};

/// Time that a poll may take in addition to its wait. Shorter than the silence after which the pool removes the worker, so that a
/// connection that carries nothing any more is replaced before. Grows with the attempts at one poll and with its bytes.
const POLL_MARGIN_TIMEOUT: Duration = Duration::from_secs(8);

/// The slowest transfer of responses that is not taken for a broken connection.
const BYTES_PER_SECOND_MIN: usize = 1 << 20;

/// Maximum number of bytes of the responses in one poll, which is larger only if a single response is. A server accepts four times
/// as much.
const DONE_BYTES_MAX: usize = 64 << 20;

/// Maximum number of bytes of one response. Over HTTP, a server accepts this much and the JSON beside it.
const RESPONSE_BYTES_MAX: usize = 255 << 20;

/// Responses wait for others for at most this time, so that small rollouts share a poll.
const FLUSH_DELAY_MAX: Duration = Duration::from_millis(5);

/// Longest pause between two attempts to reach a pool whose items run: after [`CALL_WAIT_TIMEOUT`] without a connection, it is gone. The pool has given up
/// the worker before that.
const POOL_LOOKUP_INTERVAL: Duration = Duration::from_millis(250);

/// Settings of a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct WorkPullerOptions {
    /// The worker's name: unique among the workers of a pool.
    pub name: String,
    /// The incarnation of this process, higher than that of an earlier process of this name.
    pub incarnation: Incarnation,
    /// Number of items that the worker runs at a time. Default: 256.
    pub capacity: u32,
    /// How long a poll waits for work; the pool may answer sooner. Default: 5 s.
    pub wait: Duration,
    /// Servers that the worker serves; `None`, the default, for all.
    pub servers: Option<Vec<String>>,
    /// The cluster's member with the name of the worker; `None`, the default, if there is none. A pool of the same cluster then gives the worker work
    /// only while the head server lists the member as serving, and waits for a silent worker as long as the head server does.
    pub member: Option<PullingMember>,
}

/// The member of a cluster that takes work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PullingMember {
    /// The incarnation of its process.
    pub incarnation: Incarnation,
    /// The intervals of its heartbeats.
    pub timing: MemberTiming,
}

impl WorkPullerOptions {
    /// Returns the defaults for a worker of this name that starts now.
    #[must_use]
    pub fn new(name: impl Into<String>, world: &World) -> Self {
        let incarnation = Incarnation(u64::try_from(world.now().as_millis()).unwrap_or(u64::MAX));
        let name = name.into();
        Self { name, incarnation, capacity: 256, wait: Duration::from_secs(5), servers: None, member: None }
    }

    /// Returns the defaults for this process: its name is that of the machine with the number of the process.
    #[must_use]
    pub fn of_this_process(world: &World) -> Self {
        Self::new(format!("{}-{}", host_name(), std::process::id()), world)
    }
}

/// Takes work from one pool until it is drained or dropped. Dropping it cancels the items that it runs.
#[derive(Debug)]
pub struct WorkPuller {
    drain: CancelToken,
    task: JoinSet<()>,
}

impl WorkPuller {
    /// Begins to take work from the pool at `endpoints`, and runs it through `client`. All polls share one connection, which the
    /// worker opens. While the pool cannot be reached, the worker tries again with increasing waits.
    ///
    /// Must be called within a tokio runtime.
    #[must_use]
    pub fn start(endpoints: &[Endpoint], client: ServerClient, options: WorkPullerOptions, world: &World) -> Self {
        Self::sharing(endpoints, client, options, world, Arc::default())
    }

    /// Like [`WorkPuller::start`], with a count of the running items of several pools of one worker.
    pub(super) fn sharing(
        endpoints: &[Endpoint],
        client: ServerClient,
        options: WorkPullerOptions,
        world: &World,
        running: Arc<AtomicUsize>,
    ) -> Self {
        let drain = CancelToken::new();
        let pool = Arc::new(ReconnectingPeer::new(framed_first(endpoints), ConnectOptions::default()));
        let state = PullerState {
            next_poll: 1,
            queue: 0,
            incarnation: options.incarnation,
            running: BTreeMap::new(),
            tasks: JoinSet::new(),
            done: VecDeque::new(),
            first_done: None,
            took: None,
            polls: FuturesUnordered::new(),
            rng: world.rng(),
            unreached: None,
            all_running: running,
            pool,
            client,
            options,
        };
        let mut task = JoinSet::new();
        task.spawn(state.pull(drain.clone()).boxed());
        Self { drain, task }
    }

    /// Takes no more work, and finishes what runs within `grace`. Returns `false` if items were still running and were cancelled.
    #[must_use = "a future does nothing until it is awaited"]
    pub fn drain(mut self, grace: Duration) -> BoxFuture<'static, bool> {
        Box::pin(async move {
            self.drain.cancel();
            let ended = tokio::time::timeout(grace, async { while self.task.join_next().await.is_some() {} }).await;
            ended.is_ok()
        })
    }

    /// Returns `true` if the worker has stopped by itself, because the pool has ended or another worker has its name.
    #[must_use]
    pub fn has_ended(&mut self) -> bool {
        while self.task.try_join_next().is_some() {}
        self.task.is_empty()
    }
}

/// Adds the framed endpoint of each HTTP endpoint before it: many calls over one connection.
fn framed_first(endpoints: &[Endpoint]) -> Vec<Endpoint> {
    let mut all = Vec::new();
    for endpoint in endpoints {
        if endpoint.scheme() == "http"
            && let Ok(framed) = Endpoint::parse(&format!("http+frames://{}", endpoint.address()))
            && !endpoints.contains(&framed)
        {
            all.push(framed);
        }
        all.push(endpoint.clone());
    }
    all
}

/// An item that has ended, with its result.
struct Ended {
    id: u64,
    began: Instant,
    result: Result<Response>,
}

/// The end of a poll: its request and the answer.
struct Polled {
    number: u64,
    incarnation: Incarnation,
    body: Request,
    attempts: u32,
    answer: Result<AnswerBody>,
    segments: Vec<Bytes>,
}

struct PullerState {
    options: WorkPullerOptions,
    client: ServerClient,
    pool: Arc<ReconnectingPeer>,
    incarnation: Incarnation,
    /// The id of the pool's queue.
    queue: u64,
    next_poll: u64,
    /// The items that run, with the token that cancels each.
    running: BTreeMap<u64, CancelToken>,
    tasks: JoinSet<Ended>,
    /// Responses that no poll has carried. At most one for each item that the pool has assigned, which the capacity bounds.
    done: VecDeque<Ended>,
    first_done: Option<Instant>,
    /// Moving average of the time that an item takes here.
    took: Option<Duration>,
    /// At most two: one that waits at the pool, and one that carries responses and ends the first.
    polls: FuturesUnordered<BoxFuture<'static, Polled>>,
    rng: fastrand::Rng,
    /// The time since which no connection to the pool can be opened.
    unreached: Option<Instant>,
    /// Items that run for all pools of this worker.
    all_running: Arc<AtomicUsize>,
}

impl Drop for PullerState {
    fn drop(&mut self) {
        self.all_running.fetch_sub(self.running.len(), Ordering::Relaxed);
    }
}

impl PullerState {
    async fn pull(mut self, drain: CancelToken) {
        let mut draining = false;
        // The pool knows that this worker takes no more work.
        let mut told = false;
        loop {
            let now = Instant::now();
            let flush_at = self.flush_at(now);
            let idle = self.running.is_empty() && self.done.is_empty();
            match self.polls.len() {
                0 if draining && idle => break self.leave().await,
                0 => self.send_poll(draining),
                // Ends the poll that waits, so that the pool gives this worker no more work.
                1 if draining && !told => {
                    self.send_poll(draining);
                    told = true;
                }
                1 if flush_at.is_some_and(|at| at <= now) => self.send_poll(draining),
                _ => {}
            }
            let flushes = self.polls.len() < 2 && flush_at.is_some();
            tokio::select! {
                biased;
                () = drain.cancelled(), if !draining => draining = true,
                Some(ended) = self.tasks.join_next(), if !self.tasks.is_empty() => {
                    if let Ok(ended) = ended {
                        self.ended(ended);
                    }
                }
                Some(polled) = self.polls.next(), if !self.polls.is_empty() => {
                    if !self.polled(polled) {
                        break;
                    }
                }
                () = tokio::time::sleep_until(flush_at.unwrap_or(now)), if flushes => {}
            }
        }
    }

    /// Returns the time at which the finished responses are sent: at once if many or all items have finished, or else a little
    /// later than the first of them.
    fn flush_at(&self, now: Instant) -> Option<Instant> {
        let first = self.first_done?;
        if self.running.is_empty() || self.done.len() >= (self.options.capacity as usize / 4).max(1) {
            return Some(now);
        }
        Some(first + (self.took.unwrap_or_default() / 8).min(FLUSH_DELAY_MAX))
    }

    fn ended(&mut self, ended: Ended) {
        if self.running.remove(&ended.id).is_none() {
            return;
        }
        self.all_running.fetch_sub(1, Ordering::Relaxed);
        let took = ended.began.elapsed();
        self.took = Some(self.took.map_or(took, |average| average - average / 8 + took / 8));
        self.first_done.get_or_insert_with(Instant::now);
        self.done.push_back(ended);
    }

    /// Sends the next poll, with the responses that fit.
    fn send_poll(&mut self, draining: bool) {
        let (mut done, mut segments, mut bytes) = (Vec::new(), Vec::new(), 0);
        while let Some(ended) = self.done.pop_front() {
            let Ended { id, result, .. } = &ended;
            let length = result.as_ref().map_or(0, |response| response.message.len());
            if !done.is_empty() && bytes + length > DONE_BYTES_MAX {
                self.done.push_front(ended);
                break;
            }
            bytes += length;
            let (failed, response) = match result {
                Ok(_) if length > RESPONSE_BYTES_MAX => {
                    let text =
                        format!("the response has {length} bytes; a worker returns at most {RESPONSE_BYTES_MAX}");
                    (true, Response::from_error(&Error::finished(Code::ResourceExhausted, text)))
                }
                Ok(response) => (false, response.clone()),
                Err(error) => (true, Response::from_error(error)),
            };
            let (content_type, count) = message::append(&response.message, &mut segments);
            let metadata = message::pairs(&response.metadata);
            done.push(DoneBody { id: *id, status: response.status.0, failed, content_type, metadata, segments: count });
        }
        if self.done.is_empty() {
            self.first_done = None;
        }
        let elsewhere = self.all_running.load(Ordering::Relaxed).saturating_sub(self.running.len());
        let capacity = self.options.capacity.saturating_sub(u32::try_from(elsewhere).unwrap_or(u32::MAX)).max(1);
        let wait_ms = u64::try_from(self.options.wait.as_millis()).unwrap_or(u64::MAX);
        let body = PollBody {
            worker: self.options.name.clone(),
            incarnation: self.incarnation.0,
            member: self.options.member.map(|member| member.incarnation.0),
            timing: self.options.member.map(|member| member.timing),
            queue: self.queue,
            poll: self.next_poll,
            capacity: if draining { 0 } else { capacity },
            // The last poll of a worker that ends has nothing to wait for.
            wait_ms: if draining && self.running.is_empty() { 0 } else { wait_ms },
            servers: self.options.servers.clone(),
            done,
            leave: false,
        };
        self.next_poll += 1;
        match self.request(&body, segments) {
            Ok(request) => self.polls.push(self.exchange(body.poll, request, 0, Duration::ZERO)),
            Err(error) => tracing::error!(%error, "a poll could not be written"),
        }
    }

    fn request(&self, body: &PollBody, segments: Vec<Bytes>) -> Result<Request> {
        // Each attempt gets its own deadline.
        let cx = CallContext::within(Duration::ZERO);
        let mut request = Request::post(cx, Route::from_static(WORK_ROUTE), body::write(body)?);
        request.message.segments = segments;
        Ok(request)
    }

    /// Sends a poll after `wait`.
    fn exchange(&self, number: u64, body: Request, attempts: u32, wait: Duration) -> BoxFuture<'static, Polled> {
        let (pool, transports) = (Arc::clone(&self.pool), self.client.transports().clone());
        let transfer = Duration::from_secs((body.message.len() / BYTES_PER_SECOND_MIN) as u64);
        let response_timeout = self.options.wait + POLL_MARGIN_TIMEOUT * (attempts + 1).min(10) + transfer;
        let incarnation = self.incarnation;
        Box::pin(async move {
            if !wait.is_zero() {
                tokio::time::sleep(wait).await;
            }
            let mut request = body.clone();
            request.context = CallContext::within(response_timeout);
            let response = pool.call(&transports, &request).await.and_then(Response::into_result);
            let (answer, segments) = match response {
                Ok(response) => {
                    let answer = serde_json::from_slice(&response.message.head.to_bytes()).map_err(|error| {
                        Error::finished(Code::DataLoss, "the pool's answer cannot be read").caused_by(error)
                    });
                    (answer, response.message.segments)
                }
                Err(error) => (Err(error), Vec::new()),
            };
            Polled { number, incarnation, body, attempts, answer, segments }
        })
    }

    /// Applies the answer to a poll; returns `false` if the worker must stop.
    fn polled(&mut self, polled: Polled) -> bool {
        let Polled { number, incarnation, body, attempts, answer, segments } = polled;
        if incarnation != self.incarnation {
            return true;
        }
        let answer = match answer {
            Ok(answer) => answer,
            Err(error) if error.code() == Code::FailedPrecondition => {
                tracing::error!(worker = self.options.name, %error, "the pool does not take this worker, which takes no more of its work");
                return false;
            }
            // Sending it again cannot succeed. Its responses are given up, for example because they are larger than the pool accepts.
            Err(error) if error.code() == Code::InvalidArgument => {
                tracing::error!(worker = self.options.name, %error, "the pool rejects a poll");
                self.restart();
                return number > 1;
            }
            Err(error) => {
                let attempts = attempts.saturating_add(1);
                let mut wait = RetryPolicy::default().backoff(attempts, &mut self.rng);
                if error.code() == Code::Unavailable && !self.running.is_empty() {
                    let since = *self.unreached.get_or_insert_with(Instant::now);
                    if since.elapsed() >= CALL_WAIT_TIMEOUT {
                        let rollouts = self.running.len();
                        tracing::warn!(worker = self.options.name, rollouts, %error, "the pool is gone; what runs for it is dropped");
                        self.restart();
                        return true;
                    }
                    wait = wait.min(POOL_LOOKUP_INTERVAL);
                }
                if attempts == 1 {
                    tracing::warn!(worker = self.options.name, %error, "the pool did not answer; trying again");
                }
                // The same poll again: the pool may have answered it.
                self.polls.push(self.exchange(number, body, attempts, wait));
                return true;
            }
        };
        self.unreached = None;
        if answer.restart {
            tracing::warn!(worker = self.options.name, "the pool does not know this worker any more; starting again");
            self.restart();
            return true;
        }
        if answer.closed {
            tracing::info!(worker = self.options.name, "the pool has ended");
            return false;
        }
        self.queue = answer.queue;
        for id in answer.cancel {
            if let Some(cancel) = self.running.get(&id) {
                cancel.cancel();
            }
        }
        let mut segments = segments.into_iter();
        for item in answer.items {
            match message::next(&mut segments, item.content_type.as_deref(), item.segments) {
                Ok(message) => self.begin(item, message),
                Err(error) => {
                    tracing::error!(%error, "the pool's answer cannot be read");
                    break;
                }
            }
        }
        true
    }

    fn restart(&mut self) {
        self.all_running.fetch_sub(self.running.len(), Ordering::Relaxed);
        self.running.clear();
        self.tasks.abort_all();
        self.tasks = JoinSet::new();
        self.done.clear();
        self.first_done = None;
        self.polls = FuturesUnordered::new();
        self.unreached = None;
        self.incarnation.0 += 1;
        (self.queue, self.next_poll) = (0, 1);
    }

    fn begin(&mut self, item: ItemBody, message: Message) {
        let mut cx = CallContext::within(Duration::from_millis(item.timeout_ms));
        cx.trace = item.traceparent.as_deref().and_then(TraceContext::from_traceparent).unwrap_or_default();
        cx.reply_bytes_max = item.reply_bytes_max;
        cx.metadata = message::metadata(item.metadata);
        // The call is not sent again, so nothing of it goes on once it is dropped.
        cx.metadata.push(CALL_WAIT_METADATA, "0");
        if self.running.insert(item.id, cx.cancel.clone()).is_some() {
            return;
        }
        self.all_running.fetch_add(1, Ordering::Relaxed);
        let mut request = Request::post(cx, item.route, "");
        request.message = message;
        let (client, server, id) = (self.client.clone(), item.server, item.id);
        let options = CallOptions { idempotent: item.repeatable };
        let began = Instant::now();
        let running = async move {
            let sent = AssertUnwindSafe(client.send(&server, &request, options)).catch_unwind().await;
            Ended {
                id,
                began,
                result: sent.unwrap_or_else(|_| Err(Error::internal("the call panicked on its worker"))),
            }
        };
        self.tasks.spawn(running.boxed());
    }

    /// Tells the pool that this worker ends. Best effort: a silent worker is removed.
    async fn leave(&mut self) {
        let body = PollBody {
            worker: self.options.name.clone(),
            incarnation: self.incarnation.0,
            queue: self.queue,
            poll: self.next_poll,
            leave: true,
            ..PollBody::default()
        };
        if let Ok(request) = self.request(&body, Vec::new()) {
            let mut request = request;
            request.context = CallContext::within(Duration::from_secs(2));
            let told = self.pool.call(self.client.transports(), &request).await;
            if let Err(error) = told.and_then(Response::into_result) {
                tracing::debug!(%error, "the pool was not told that this worker ends");
            }
        }
    }
}

//! Keeps a process a member of a cluster: joins, sends heartbeats, joins again after a restart of the head server, and leaves.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use gym_core::registry::{
    Heartbeat, HeartbeatReply, JoinedMember, MemberLease, MemberRegistry, MemberSpec, MemberState, MemberTiming,
};
use gym_core::{CallContext, CancelToken, Code, Error, Incarnation, Result, World};
use tokio::task::JoinHandle;
use tokio::time::Instant;

/// Waits between two attempts to reach the head server: doubled from the first to the last. The last is short, because a restarted head
/// is complete only when all members have returned.
const FIRST_RETRY_INTERVAL: Duration = Duration::from_millis(50);
const LAST_RETRY_INTERVAL: Duration = Duration::from_millis(500);
/// Time between two messages while a head server does not respond.
const LOG_INTERVAL: Duration = Duration::from_secs(10);
/// Time that a heartbeat's response may take beyond the interval.
const REPLY_TIMEOUT: Duration = Duration::from_secs(5);
/// The part of the interval after which the next heartbeat is sent. The one before it is still at the head server, which therefore notices
/// the end of this process at any time. If its response is lost, nothing is late. Half, because a busy machine may delay a process.
const NEXT_BEFORE_END: f64 = 0.5;
/// Maximum number of heartbeats without a response, of which two are usual: more than are sent while a response takes [`REPLY_TIMEOUT`].
const SENT_MAX: usize = 8;
/// The largest part of a wait that is drawn at random, so that the members of a restarted head do not return at one instant.
const JITTER: f64 = 0.5;

/// Checks the servers of a member, before it serves.
pub type HealthCheck = Arc<dyn Fn() -> BoxFuture<'static, Result<()>> + Send + Sync>;

/// The options of a member besides those of its heartbeats.
#[non_exhaustive]
pub struct MemberOptions {
    /// The time for which an unreachable head server is tried at the start. Default: 5 minutes.
    pub join_within: Duration,
    /// Checks the member's own servers, when it joins and whenever it returns. Default: no check.
    pub health: HealthCheck,
    /// Cancelled when the member must finish its work and leave. Default: a token that nothing else holds.
    pub drain: CancelToken,
}

impl Default for MemberOptions {
    fn default() -> Self {
        Self {
            join_within: Duration::from_secs(300),
            health: Arc::new(|| Box::pin(async { Ok(()) })),
            drain: CancelToken::new(),
        }
    }
}

impl fmt::Debug for MemberOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemberOptions").field("join_within", &self.join_within).finish_non_exhaustive()
    }
}

/// A membership. Dropping the keeper ends its heartbeats, and the head server notices; [`MemberKeeper::leave`] says so.
#[derive(Debug)]
pub struct MemberKeeper {
    name: String,
    incarnation: Incarnation,
    timing: MemberTiming,
    stop: CancelToken,
    drain: CancelToken,
    task: JoinHandle<()>,
}

impl MemberKeeper {
    /// Joins, and sends heartbeats from then on. Waits for a head server that does not respond, and says so.
    ///
    /// # Errors
    /// The head server's rejection. `Unavailable` if it cannot be reached within [`MemberOptions::join_within`].
    #[must_use = "a future does nothing until it is awaited"]
    pub fn join<'a>(
        registry: Arc<dyn MemberRegistry>,
        cx: &'a CallContext,
        spec: MemberSpec,
        options: MemberOptions,
        world: &World,
    ) -> BoxFuture<'a, Result<Self>> {
        let (name, incarnation, timing) = (spec.name.clone(), spec.incarnation, spec.timing);
        let mut member = Membership {
            registry,
            world: world.clone(),
            spec,
            options,
            rng: world.rng(),
            seq: 0,
            next_heartbeat: Instant::now(),
            known: MemberState::Joining,
            healthy: false,
            said_draining: false,
            round_trip_us: None,
            was_missed: false,
        };
        Box::pin(async move {
            let within = cx.child().at_most(member.options.join_within);
            let lease = member.join(&within).await?;
            let (stop, drain) = (CancelToken::new(), member.options.drain.clone());
            let task = tokio::spawn(member.keep(lease, stop.clone()).boxed());
            Ok(Self { name, incarnation, timing, stop, drain, task })
        })
    }

    /// Returns the name of the member.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the incarnation of the process as the member.
    #[must_use]
    pub fn incarnation(&self) -> Incarnation {
        self.incarnation
    }

    /// Returns the intervals of its heartbeats.
    #[must_use]
    pub fn timing(&self) -> MemberTiming {
        self.timing
    }

    /// Returns the token that is cancelled when the member must finish its work and leave.
    #[must_use]
    pub fn draining(&self) -> &CancelToken {
        &self.drain
    }

    /// Ends the membership within `grace`. Call this after the last response: calls in flight are not ended, but get no new attempts either.
    #[must_use = "a future does nothing until it is awaited"]
    pub fn leave(mut self, grace: Duration) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            self.stop.cancel();
            if tokio::time::timeout(grace, &mut self.task).await.is_err() {
                tracing::warn!("the head server did not respond in time; it notices that this worker has left");
            }
        })
    }
}

impl Drop for MemberKeeper {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct Membership {
    registry: Arc<dyn MemberRegistry>,
    spec: MemberSpec,
    options: MemberOptions,
    /// Its clock is read each time that the member joins.
    world: World,
    rng: fastrand::Rng,
    /// The number of the newest heartbeat.
    seq: u64,
    next_heartbeat: Instant,
    /// The state as the head server last said it.
    known: MemberState,
    /// All own servers responded before the newest heartbeat.
    healthy: bool,
    /// The newest heartbeat says that the member drains.
    said_draining: bool,
    /// A measured round trip that no heartbeat has told.
    round_trip_us: Option<u64>,
    /// The head server has missed heartbeats, and the member has not served since.
    was_missed: bool,
}

/// A measurement of the round trip, in microseconds; `None` if the head server did not respond.
type Ping = BoxFuture<'static, Option<u64>>;

/// Heartbeats without a response, with their numbers.
type SentHeartbeats = FuturesUnordered<BoxFuture<'static, (u64, Result<HeartbeatReply>)>>;

impl Membership {
    /// Joins, and repeats that while the head server does not respond.
    async fn join(&mut self, cx: &CallContext) -> Result<MemberLease> {
        let (mut wait, mut said, mut before) = (FIRST_RETRY_INTERVAL, None::<Instant>, None);
        loop {
            self.spec.tell_time(&self.world);
            let error = match self.registry.join(cx, self.spec.clone()).await {
                Ok(JoinedMember { lease, replicas, warnings }) => {
                    warnings.iter().for_each(|warning| tracing::warn!(member = self.spec.name, "{warning}"));
                    for (server, replica) in self.spec.servers.iter_mut().zip(replicas) {
                        server.replica = Some(replica);
                    }
                    return Ok(lease);
                }
                Err(error) => error.after_attempt(before.as_ref()),
            };
            // The lease of an earlier process with this name ends soon, if that process is dead.
            let temporary = matches!(error.code(), Code::Unavailable | Code::DeadlineExceeded | Code::AlreadyExists);
            if !temporary || cx.check().is_err() || cx.remaining() < wait {
                return Err(error);
            }
            if said.is_none_or(|said| said.elapsed() >= LOG_INTERVAL) {
                said = Some(Instant::now());
                match error.code() {
                    Code::AlreadyExists => {
                        tracing::warn!(member = self.spec.name, %error, "waiting for the name of this worker")
                    }
                    _ => {
                        let left = cx.remaining().as_secs();
                        tracing::warn!(
                            member = self.spec.name, %error,
                            "waiting for the head server, up to {left} s more: start it, or correct its address"
                        );
                    }
                }
            }
            self.pause(&mut wait).await;
            before = Some(error);
        }
    }

    async fn pause(&mut self, wait: &mut Duration) {
        tokio::time::sleep(wait.mul_f64(1.0 - JITTER * self.rng.f64())).await;
        *wait = (*wait * 2).min(LAST_RETRY_INTERVAL);
    }

    /// Sends heartbeats until the member stops or its name is taken.
    async fn keep(mut self, mut lease: MemberLease, stop: CancelToken) {
        let mut wait = FIRST_RETRY_INTERVAL;
        let mut warned = false;
        let mut sent = SentHeartbeats::new();
        let mut ping: Option<Ping> = None;
        let drain = self.options.drain.clone();
        loop {
            let now = Instant::now();
            if self.next_heartbeat <= now {
                self.check_health().await;
                if sent.len() < SENT_MAX {
                    sent.push(self.send(&lease));
                }
                ping.get_or_insert_with(|| self.ping());
                self.next_heartbeat = now + self.spec.timing.heartbeat.mul_f64(NEXT_BEFORE_END);
            }
            let (seq, replied) = tokio::select! {
                biased;
                () = stop.cancelled() => break,
                // The next heartbeat says so.
                () = drain.cancelled(), if !self.said_draining => {
                    self.next_heartbeat = now;
                    continue;
                }
                Some(replied) = sent.next(), if !sent.is_empty() => replied,
                measured = async { ping.as_mut()?.await }, if ping.is_some() => {
                    (self.round_trip_us, ping) = (measured, None);
                    continue;
                }
                () = tokio::time::sleep_until(self.next_heartbeat) => continue,
            };
            match replied {
                Ok(reply) => {
                    if std::mem::take(&mut warned) {
                        tracing::info!(member = self.spec.name, "the head server responds again");
                    }
                    wait = FIRST_RETRY_INTERVAL;
                    self.learn(reply, seq);
                }
                Err(error) if error.code() == Code::NotFound => {
                    sent.clear();
                    let cx = CallContext::within(self.options.join_within);
                    let joined = tokio::select! {
                        biased;
                        () = stop.cancelled() => return,
                        joined = self.join(&cx) => joined,
                    };
                    match joined {
                        Ok(again) => {
                            tracing::info!(member = self.spec.name, "joined again");
                            (lease, self.known) = (again, MemberState::Joining);
                        }
                        Err(error) if matches!(error.code(), Code::AlreadyExists | Code::InvalidArgument) => {
                            return self.ended(&error);
                        }
                        Err(error) => tracing::warn!(member = self.spec.name, %error, "not joined; trying again"),
                    }
                    self.next_heartbeat = Instant::now();
                }
                // A newer one is on its way.
                Err(_) if seq < self.seq => {}
                Err(error) => {
                    if !std::mem::replace(&mut warned, true) {
                        tracing::warn!(member = self.spec.name, %error, "the head server does not respond; this worker serves on");
                    }
                    tokio::select! {
                        biased;
                        () = stop.cancelled() => break,
                        () = self.pause(&mut wait) => self.next_heartbeat = Instant::now(),
                    }
                }
            }
        }
        let cx = CallContext::within(REPLY_TIMEOUT);
        if let Err(error) = self.registry.leave(&cx, lease).await {
            tracing::debug!(member = self.spec.name, %error, "did not leave; the head server notices");
        }
    }

    /// Checks the member's own servers, if the head server waits for that.
    async fn check_health(&mut self) {
        self.healthy = false;
        if self.known == MemberState::Joining {
            match (self.options.health)().await {
                Ok(()) => self.healthy = true,
                Err(error) => {
                    tracing::warn!(member = self.spec.name, %error, "a server of this worker does not respond; it gets no work");
                }
            }
        }
    }

    fn send(&mut self, lease: &MemberLease) -> BoxFuture<'static, (u64, Result<HeartbeatReply>)> {
        // Each has a number of its own: the head server tells a late end of an earlier connection from a new one.
        self.seq += 1;
        // A head that waits for a healthy heartbeat must not wait for the interval.
        let known = if self.healthy { MemberState::Serving } else { self.known };
        self.said_draining = self.options.drain.is_cancelled();
        let heartbeat = Heartbeat {
            lease: lease.clone(),
            seq: self.seq,
            healthy: self.healthy,
            draining: self.said_draining,
            round_trip_us: self.round_trip_us.take(),
            known,
        };
        let (registry, limit) = (Arc::clone(&self.registry), self.spec.timing.heartbeat + REPLY_TIMEOUT);
        Box::pin(async move { (heartbeat.seq, registry.heartbeat(&CallContext::within(limit), &heartbeat).await) })
    }

    /// Measures the round trip to the head server with a request of its own: the response to a heartbeat waits at the head server.
    fn ping(&self) -> Ping {
        let registry = Arc::clone(&self.registry);
        Box::pin(async move {
            let began = Instant::now();
            registry.ping(&CallContext::within(REPLY_TIMEOUT)).await.ok()?;
            Some(u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX))
        })
    }

    fn learn(&mut self, reply: HeartbeatReply, seq: u64) {
        let changed = std::mem::replace(&mut self.known, reply.state) != reply.state;
        if changed {
            self.say_state(reply.state);
        }
        if changed || seq == self.seq {
            self.next_heartbeat = Instant::now();
        }
        if reply.state == MemberState::Draining {
            self.options.drain.cancel();
        }
    }

    /// Says that the head server took this member for lost, and that it no longer does.
    fn say_state(&mut self, now: MemberState) {
        let member = self.spec.name.as_str();
        match now {
            MemberState::Joining => {
                self.was_missed = true;
                tracing::warn!(
                    member,
                    "the head server has missed heartbeats of this worker, which gets no new work until its servers have responded"
                );
            }
            MemberState::Serving if std::mem::take(&mut self.was_missed) => {
                tracing::info!(member, "this worker gets work again");
            }
            _ => {}
        }
    }

    /// Ends a membership that another process has taken.
    fn ended(&self, error: &Error) {
        tracing::error!(member = self.spec.name, %error, "this worker cannot be a member any more; it finishes its work");
        self.options.drain.cancel();
    }
}

//! Calls servers by *name*: resolves the name, chooses a replica, and repeats a failed call if that is safe.
//!
//! An episode whose server keeps state uses a [`Session`](super::Session). A session stays with the first replica that answered,
//! and carries its cookies.

mod away;
mod follow;

use std::collections::BTreeMap;
use std::future::{Future, ready};
use std::pin::Pin;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::TryFutureExt as _;
use futures_util::future::Either;
use gym_core::message::EXECUTION_METADATA;
use gym_core::observe::stall::HandlerLabel;
use gym_core::observe::waits::{PendingWait, Wait, WaitKind, WaitTarget};
use gym_core::registry::{AffinityCounts, Balance, DEFAULT_TTL, Instance, MemberRegistry, Registry};
use gym_core::transport::{RetryPolicy, retry_after};
use gym_core::{CallContext, Code, Error, Execution, Incarnation, Request, Response, Result, Rope, Route, World};
use parking_lot::{Mutex, RwLock};
use pin_project_lite::pin_project;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::client::background::BackgroundTasks;
use crate::client::outage::Outages;
use crate::client::replicas::pending::PendingCallGuard;
use crate::client::replicas::{ABSENT, Replica, ReplicaLoss, ReplicaSet, SessionAffinity, replica};
use crate::client::url::EndpointUrl;
use crate::registry::nearest::nearest;
use crate::transport::Transports;

/// Maximum redirects of one call.
const HOPS_MAX: usize = 3;

/// Time until a resolved name is resolved again. A failed call resolves the name at once; this limit bounds the time in which a
/// *new* replica receives no calls.
const RESOLVE_INTERVAL: Duration = Duration::from_secs(1);

/// Time for which an unregistered name is not resolved again, so that callers that wait for a server do not all query the registry.
const ABSENT_FOR: Duration = Duration::from_millis(100);

/// Time after which a server that a restarted head server does not list yet gets no new calls, because most have returned.
const SETTLES_AFTER: Duration = Duration::from_secs(2);

/// Time within which a server that is not away answers.
const PROMPT_ANSWER_TIMEOUT: Duration = Duration::from_millis(100);

/// Number of times that a call is repeated although its server answers at once.
const REJECTIONS_MAX: u32 = 2;

/// Limit of the question for the names of all servers, for an error.
const NEAR_TIMEOUT: Duration = Duration::from_secs(1);

/// Calls servers by name. Cheap to clone; clones share channels and counters.
///
/// ```
/// use gym_client::{CallOptions, ServerClient};
/// use gym_core::{CallContext, Response, Result};
///
/// async fn ask(client: &ServerClient, cx: &CallContext) -> Result<Response> {
///     let body = r#"{"input": "2 + 2"}"#;
///     client.post(cx, "policy_model", "/v1/responses", body, CallOptions::idempotent()).await?.into_result()
/// }
/// ```
#[derive(Clone, Debug)]
pub struct ServerClient {
    pub(super) inner: Arc<ClientState>,
}

#[derive(Debug)]
pub(super) struct ClientState {
    registry: Arc<dyn Registry>,
    transports: Transports,
    balance: Option<Balance>,
    /// The number of sessions created.
    pub(super) sessions: AtomicU64,
    pub(super) policy: RetryPolicy,
    pub(super) rng: Mutex<fastrand::Rng>,
    names: RwLock<BTreeMap<String, Arc<ReplicaSet>>>,
    asking: Mutex<BTreeMap<String, Arc<tokio::sync::Mutex<ResolveLock>>>>,
    background: BackgroundTasks,
    pub(super) outages: Arc<Outages>,
    /// `true` once the client learns of lost servers; see [`ServerClient::follow`].
    pub(super) follows: AtomicBool,
    /// The life of the head server that recovers, and since when.
    pub(super) recovering: Mutex<Option<(u64, Instant)>>,
    /// The tasks that follow clusters.
    pub(super) followers: Mutex<JoinSet<()>>,
    /// The members of the cluster.
    pub(super) members: OnceLock<Arc<dyn MemberRegistry>>,
}

/// Held by the one caller that queries the registry for a name; the others wait for the result. A thousand rollouts that start
/// together cause one query and share the channels.
#[derive(Debug, Default)]
struct ResolveLock {
    /// Time and content of the last response that had no replica.
    last: Option<(Instant, ResolveMiss)>,
}

/// A response of the registry without a replica.
#[derive(Debug)]
enum ResolveMiss {
    Absent,
    Failed(Code, String),
}

/// Options of a call.
///
/// ```
/// use gym_client::CallOptions;
///
/// // The client may send the message again, although the server may have run it.
/// assert!(CallOptions::idempotent().idempotent);
/// assert!(!CallOptions::default().idempotent);
/// ```
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct CallOptions {
    /// Repeats the message even if the server may have executed it. Off by default. A `/run` with a call id is repeated without it, once, if a reused
    /// connection broke and the server joins equal runs ([`JOINS_RUNS_LABEL`](crate::JOINS_RUNS_LABEL)).
    pub idempotent: bool,
}

impl CallOptions {
    /// Returns options of a call that can be executed twice without harm.
    #[must_use]
    pub fn idempotent() -> Self {
        Self { idempotent: true }
    }
}

impl ServerClient {
    /// Creates a client of the servers in `registry`.
    #[must_use]
    pub fn new(registry: Arc<dyn Registry>, transports: Transports, world: &World) -> Self {
        Self {
            inner: Arc::new(ClientState {
                registry,
                transports,
                balance: None,
                sessions: AtomicU64::new(0),
                policy: RetryPolicy::default(),
                rng: Mutex::new(world.rng()),
                names: RwLock::default(),
                asking: Mutex::default(),
                background: BackgroundTasks::default(),
                outages: Arc::default(),
                follows: AtomicBool::new(false),
                recovering: Mutex::default(),
                followers: Mutex::default(),
                members: OnceLock::new(),
            }),
        }
    }

    /// Returns a client of the same servers with another load balancing and retry policy. It has its own channels and counters. The
    /// index of a weight is the rank of a replica.
    #[must_use]
    pub fn with(&self, balance: Balance, policy: RetryPolicy) -> Self {
        let inner = &self.inner;
        Self {
            inner: Arc::new(ClientState {
                registry: Arc::clone(&inner.registry),
                transports: inner.transports.clone(),
                balance: Some(balance),
                sessions: AtomicU64::new(0),
                policy,
                rng: Mutex::new(inner.rng.lock().fork()),
                names: RwLock::default(),
                asking: Mutex::default(),
                background: BackgroundTasks::default(),
                outages: Arc::default(),
                follows: AtomicBool::new(false),
                recovering: Mutex::default(),
                followers: Mutex::default(),
                members: inner.members.clone(),
            }),
        }
    }

    /// Runs calls that outlive their caller, such as the one that closes the session of a cancelled episode. `calls` must have a
    /// deadline. They are dropped if this client already runs 16,384 such calls, and outside of a Tokio runtime.
    pub fn in_background(&self, calls: impl Future<Output = ()> + Send + 'static) {
        self.inner.background.spawn(calls);
    }

    /// Returns the transports over which servers are called.
    #[must_use]
    pub fn transports(&self) -> &Transports {
        &self.inner.transports
    }

    /// Returns the registry in which names are resolved.
    #[must_use]
    pub fn registry(&self) -> &Arc<dyn Registry> {
        &self.inner.registry
    }

    /// Returns a function that returns the choices by session affinity so far, by server, for metrics. It does not keep the client.
    pub fn affinity_counts(&self) -> impl Fn() -> Vec<(String, AffinityCounts)> + Send + Sync + 'static {
        let inner = Arc::downgrade(&self.inner);
        move || {
            let Some(inner) = inner.upgrade() else { return Vec::new() };
            let names = inner.names.read();
            names.iter().filter_map(|(server, known)| Some((server.clone(), known.affinity()?))).collect()
        }
    }

    /// Sends a `POST` with a JSON body to a route of the named server. Any complete response is `Ok`, including error statuses.
    ///
    /// # Errors
    /// `Unavailable, NotStarted` if no server of this name is registered, or every replica has weight 0; otherwise the error of the
    /// last attempt.
    pub async fn post(
        &self,
        cx: &CallContext,
        server: &str,
        route: impl Into<Route>,
        body: impl Into<Rope>,
        options: CallOptions,
    ) -> Result<Response> {
        self.send(server, &Request::post(cx.clone(), route, body), options).await
    }

    /// Sends a `GET` to a route of the named server.
    ///
    /// # Errors
    /// As [`ServerClient::post`].
    pub async fn get(&self, cx: &CallContext, server: &str, route: impl Into<Route>) -> Result<Response> {
        self.send(server, &Request::get(cx.clone(), route), CallOptions::idempotent()).await
    }

    /// Sends a request to a replica of the named server, and to another one if the call fails and may be repeated.
    ///
    /// # Errors
    /// As [`ServerClient::post`].
    pub fn send(
        &self,
        server: &str,
        request: &Request,
        options: CallOptions,
    ) -> impl Future<Output = Result<Response>> + Send {
        self.dispatch(server, request, options, None).map_ok(|(_, response)| response)
    }

    /// Returns the replica that answered, and its response.
    #[expect(clippy::manual_async_fn, reason = "the future of an async fn holds its arguments twice")]
    pub(super) fn dispatch(
        &self,
        server: &str,
        request: &Request,
        options: CallOptions,
        session: Option<SessionAffinity>,
    ) -> impl Future<Output = Result<(Arc<Replica>, Response)>> + Send {
        async move {
            // Not repeated, because the registry's client has already repeated its call.
            let resolved = self.resolve(&request.context, server).await;
            let chosen = resolved.map_err(|error| about(error, server, request))?.choose(server, &[], request, session);
            let (failed, error) = match chosen {
                Ok(replica) => match self.call(server, &replica, request, options).await {
                    Ok(response) => return Ok((replica, response)),
                    Err(error) => (Some(replica.number), error),
                },
                // A replica that can be chosen may register later.
                Err(error) => (None, error),
            };
            // Boxed, because a repetition is rare, and every waiting call would be as large otherwise.
            Box::pin(self.dispatch_again(server, request, options, session, failed, error)).await
        }
    }

    /// Repeats a call that failed with `error`, at the replica of rank `failed` if one was chosen.
    async fn dispatch_again(
        &self,
        server: &str,
        request: &Request,
        options: CallOptions,
        session: Option<SessionAffinity>,
        failed: Option<u32>,
        error: Error,
    ) -> Result<(Arc<Replica>, Response)> {
        let cx = &request.context;
        let failed = Mutex::new(Vec::from_iter(failed));
        let attempt = async || {
            self.forget(server);
            let exclude = failed.lock().clone();
            let replica = self.resolve(cx, server).await?.choose(server, &exclude, request, session)?;
            let result = self.call(server, &replica, request, options).await;
            if result.is_err() {
                failed.lock().push(replica.number);
            }
            result.map(|response| (replica, response))
        };
        let (began, mut error) = (Instant::now(), error);
        // A server that answers and rejects calls has no outage.
        let mut rejected = 0;
        loop {
            error = match self.resend(error, cx, options.idempotent, |_| attempt()).await {
                Ok(done) => return Ok(done),
                Err(error) if rejected == REJECTIONS_MAX || !self.waits_for(server, request, &error) => {
                    return Err(about(self.with_near_name(cx, server, error).await, server, request));
                }
                Err(error) => error,
            };
            let asked = Instant::now();
            self.until_back(cx, server, error, began).await.map_err(|error| about(error, server, request))?;
            rejected = if asked.elapsed() < PROMPT_ANSWER_TIMEOUT { rejected + 1 } else { 0 };
            failed.lock().clear();
            error = match attempt().await {
                Ok(done) => return Ok(done),
                Err(error) => error,
            };
        }
    }

    /// Adds the nearest name to the error of a name that no server has. The registry is asked only then.
    async fn with_near_name(&self, cx: &CallContext, server: &str, error: Error) -> Error {
        if error.code() != Code::Unavailable || !error.chain().iter().any(|link| link.message == ABSENT) {
            return error;
        }
        let cx = cx.child().at_most(NEAR_TIMEOUT);
        let Ok(all) = self.inner.registry.list(&cx).await else { return error };
        match nearest(server, all.iter().map(|known| known.name.as_str())) {
            Some(near) if near != server => {
                Error::not_started(Code::Unavailable, format!("{ABSENT}; did you mean `{near}`?"))
                    .about(server.to_owned())
            }
            _ => error,
        }
    }

    /// Repeats a call whose first attempt failed with `error`, for as long as [`RetryPolicy::next_wait`] allows. Every call of this
    /// client and of its sessions is repeated here.
    ///
    /// Returns a box: a repetition is rare, and would otherwise make the future of every call as large as a second call.
    pub(super) fn resend<'a, T, F, Fut>(
        &'a self,
        error: Error,
        cx: &'a CallContext,
        idempotent: bool,
        attempt: F,
    ) -> Pin<Box<impl Future<Output = Result<T>> + Send + use<'a, T, F, Fut>>>
    where
        T: Send + 'a,
        F: FnMut(u32) -> Fut + Send + 'a,
        Fut: Future<Output = Result<T>> + Send + 'a,
    {
        // Only here, because nearly every call succeeds at once and needs no generator.
        let mut rng = self.inner.rng.lock().fork();
        Box::pin(async move { retry_after(error, cx, &self.inner.policy, &mut rng, idempotent, attempt).await })
    }

    /// Calls a replica once, and follows its redirects: those that keep method and body, on the same host and port.
    pub(super) fn call<'a>(
        &'a self,
        server: &'a str,
        replica: &'a Arc<Replica>,
        request: &'a Request,
        options: CallOptions,
    ) -> impl Future<Output = Result<Response>> + Send + use<'a> {
        self.call_once(server, replica, request, options).and_then(move |response| match response.status.0 {
            // Boxed, because a redirect is rare.
            300..400 => Either::Right(Box::pin(self.redirected(server, replica, request, options, response))),
            _ => Either::Left(ready(Ok(response))),
        })
    }

    /// Returns the response to which a redirect leads. Another redirect would change the method, lose the body, or send cookies to another
    /// server; and a response with a status 3xx has no content, which a caller could take for an empty answer.
    async fn redirected(
        &self,
        server: &str,
        replica: &Arc<Replica>,
        request: &Request,
        options: CallOptions,
        mut response: Response,
    ) -> Result<Response> {
        let http = replica.peer.endpoints().iter().find(|endpoint| endpoint.scheme() == "http");
        let origin = http.and_then(|endpoint| EndpointUrl::parse(&endpoint.to_string()).ok());
        let mut again = request.clone();
        for hop in 0.. {
            let (status, place) = (response.status.0, response.metadata.get("location").unwrap_or_default().to_owned());
            if !(300..400).contains(&status) {
                break;
            }
            let target = origin.as_ref().filter(|_| matches!(status, 307 | 308) && !place.is_empty());
            let target = target.and_then(|origin| origin.redirected(again.route.as_str(), &place));
            let why = match target {
                Some(target) if hop < HOPS_MAX => {
                    again.route = Route::from(target);
                    response = self.call_once(server, replica, &again, options).await?;
                    continue;
                }
                Some(_) => format!("after {HOPS_MAX} redirects, it refers to {place}: a loop"),
                None if place.is_empty() => "it refers to nothing".to_owned(),
                None => format!("it refers to {place}"),
            };
            let text = format!(
                "answered {status}, and {why}; only 307 and 308 to the same host and port are followed: correct the server's route, or the address under which it is registered"
            );
            return Err(about(Error::finished(Code::Internal, text), server, request));
        }
        Ok(response)
    }

    fn call_once<'a>(
        &'a self,
        server: &'a str,
        replica: &'a Arc<Replica>,
        request: &'a Request,
        options: CallOptions,
    ) -> impl Future<Output = Result<Response>> + Send + use<'a> {
        let repeatable = options.idempotent || replica.joins(request);
        ReplicaCall {
            call: replica.peer.call_with(&self.inner.transports, request, repeatable),
            loss: replica.loss(),
            wait: PendingWait::default(),
            _counted: replica.pending.begin(),
            server,
            replica,
            request,
        }
    }

    pub(super) fn resolve(
        &self,
        cx: &CallContext,
        server: &str,
    ) -> impl Future<Output = Result<Arc<ReplicaSet>>> + Send {
        match self.known(server) {
            Some(known) if known.stale_from > Instant::now() => Either::Left(ready(Ok(known))),
            // Boxed, because a query is rare, and every waiting call would be as large otherwise.
            known => Either::Right(Box::pin(self.query(cx, server, known))),
        }
    }

    async fn query(&self, cx: &CallContext, server: &str, known: Option<Arc<ReplicaSet>>) -> Result<Arc<ReplicaSet>> {
        let asking = Arc::clone(self.inner.asking.lock().entry(server.to_owned()).or_default());
        let mut asked = match (asking.try_lock(), known) {
            (Ok(asked), _) => asked,
            // Another caller queries the registry; until the result arrives, the known replicas are used.
            (Err(_), Some(known)) if !known.doubtful => return Ok(known),
            (Err(_), _) => {
                let from = Instant::now();
                // This fair lock is held during the query on purpose: every caller that waits here needs the same result.
                let asked = cx.bound(Execution::NotStarted, async { Ok(asking.lock().await) }).await?;
                match (&asked.last, self.known(server)) {
                    (Some((at, _)), _) if *at < from => {}
                    (Some((_, ResolveMiss::Failed(..))), Some(known)) => return Ok(known),
                    (Some((_, ResolveMiss::Failed(code, why))), None) => {
                        return Err(Error::not_started(*code, why.clone()));
                    }
                    (Some((_, ResolveMiss::Absent)), _) => return Ok(Arc::new(ReplicaSet::absent())),
                    (None, _) => {}
                }
                asked
            }
        };
        // Another caller may have queried the registry while this one waited.
        let known = self.known(server);
        let now = Instant::now();
        if let Some(known) = &known
            && known.stale_from > now
        {
            return Ok(Arc::clone(known));
        }
        if let Some((at, ResolveMiss::Absent)) = &asked.last
            && known.is_none()
            && at.elapsed() < ABSENT_FOR
        {
            return Ok(Arc::new(ReplicaSet::absent()));
        }
        let instances = match self.inner.registry.resolve(cx, server).await {
            Ok(instances) => instances,
            Err(error) => {
                // A cancelled or expired call says nothing about the state of the registry.
                if cx.check().is_ok() {
                    asked.last = Some((Instant::now(), ResolveMiss::Failed(error.code(), error.to_string())));
                }
                let Some(known) = known else { return Err(error) };
                // The head server is unreachable: the known replicas are used, and later calls do not query it each time.
                tracing::debug!(server, %error, "resolve from the cache");
                return Ok(self.keep(server, known.replicas.clone(), Some(&known), known.seen));
            }
        };
        if instances.is_empty() {
            // A restarted head server has no registrations yet. The known replicas are used for the duration of a lease. A call
            // to a stopped server fails and shows that it has exited.
            if let Some(known) = &known
                && known.seen.elapsed() < DEFAULT_TTL
            {
                return Ok(self.keep(server, known.replicas.clone(), Some(known), known.seen));
            }
            asked.last = Some((Instant::now(), ResolveMiss::Absent));
            return Ok(Arc::new(ReplicaSet::absent()));
        }
        asked.last = None;
        let follows = self.inner.follows.load(Relaxed);
        let mut replicas: Vec<_> =
            instances.into_iter().map(|instance| replica(instance, known.as_deref(), follows)).collect();
        if let Some((_, since)) = *self.inner.recovering.lock() {
            // The head server was restarted, and not all servers have returned yet: those that are known still serve.
            let known = known.iter().flat_map(|known| &known.replicas).filter(|known| !known.is_lost());
            let absent = known
                .filter(|known| replicas.iter().all(|replica| !replica.is(known.incarnation, known.peer.endpoints())));
            let absent: Vec<_> = absent.cloned().collect();
            if since.elapsed() >= SETTLES_AFTER {
                // It may have ended meanwhile. Calls in flight to it go on, and others go to those that have returned.
                absent.iter().for_each(|replica| replica.pause());
            }
            replicas.extend(absent);
        }
        Ok(self.keep(server, replicas, known.as_deref(), Instant::now()))
    }

    fn keep(
        &self,
        server: &str,
        replicas: Vec<Arc<Replica>>,
        known: Option<&ReplicaSet>,
        seen: Instant,
    ) -> Arc<ReplicaSet> {
        let stale_from = Instant::now() + RESOLVE_INTERVAL;
        let fresh = || ReplicaSet::picker(self.inner.balance.as_ref(), &replicas);
        let picker = known.map_or_else(fresh, |known| Arc::clone(&known.picker));
        let resolved = Arc::new(ReplicaSet { replicas, picker, seen, stale_from, doubtful: false });
        let mut names = self.inner.names.write();
        names.insert(server.to_owned(), Arc::clone(&resolved));
        resolved
    }

    pub(super) fn known(&self, server: &str) -> Option<Arc<ReplicaSet>> {
        self.inner.names.read().get(server).cloned()
    }

    /// Ends the calls in flight to a server that is lost, and makes the next call query the registry.
    pub(super) fn lose(&self, server: &str, number: u32, incarnation: Incarnation, reason: &str) {
        if let Some(known) = self.known(server) {
            let lost =
                known.replicas.iter().find(|replica| replica.number == number && replica.incarnation == incarnation);
            if let Some(replica) = lost {
                replica.lose(reason);
                self.forget(server);
            }
        }
    }

    /// Ends the calls in flight to all known servers that are not listed.
    pub(super) fn keep_only(&self, listed: &[Instance]) {
        let names: Vec<_> = {
            let names = self.inner.names.read();
            names.iter().map(|(name, known)| (name.clone(), Arc::clone(known))).collect()
        };
        for (name, known) in names {
            for replica in &known.replicas {
                let is = |there: &Instance| there.name == name && replica.is(there.incarnation, &there.endpoints);
                if !listed.iter().any(is) {
                    self.lose(&name, replica.number, replica.incarnation, "the head server no longer lists the server");
                }
            }
        }
    }

    /// Makes the next call query the registry.
    pub(super) fn forget(&self, server: &str) {
        let mut names = self.inner.names.write();
        if let Some(known) = names.get(server) {
            let (replicas, picker, seen) = (known.replicas.clone(), Arc::clone(&known.picker), known.seen);
            let doubted = ReplicaSet { replicas, picker, seen, stale_from: Instant::now(), doubtful: true };
            names.insert(server.to_owned(), Arc::new(doubted));
        }
    }
}

pin_project! {
    /// A call to a replica, which ends when the replica is lost, and which is recorded as a wait.
    struct ReplicaCall<'a, F> {
        #[pin]
        call: F,
        loss: Option<ReplicaLoss<'a>>,
        wait: PendingWait,
        _counted: PendingCallGuard,
        server: &'a str,
        replica: &'a Arc<Replica>,
        request: &'a Request,
    }
}

impl<F: Future<Output = Result<Response>>> Future for ReplicaCall<'_, F> {
    type Output = Result<Response>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<Response>> {
        let this = self.project();
        if let Poll::Ready(answered) = this.call.poll(cx) {
            return Poll::Ready(answered.and_then(rejection));
        }
        if let Some(Poll::Ready(lost)) = this.loss.as_mut().map(|loss| Pin::new(loss).poll(cx)) {
            return Poll::Ready(Err(lost));
        }
        this.wait.note(Poll::Pending, || {
            let (cx, path) = (&this.request.context, this.request.route.path());
            let wait = Wait::new(WaitKind::Call, cx.trace.trace_id).until(cx.deadline);
            wait.of(HandlerLabel::new(this.server, path)).on(Arc::clone(this.replica) as Arc<dyn WaitTarget>)
        })
    }
}

/// Returns a rejection as an error, and any other response unchanged.
///
/// A server with another incarnation at this address, or one without capacity, rejects a call before it runs anything. Another
/// replica may serve the call. Servers of other programs do not mark their rejections, so their responses stay responses.
fn rejection(response: Response) -> Result<Response> {
    let not_started = response.metadata.get(EXECUTION_METADATA) == Some(Execution::NotStarted.as_str());
    if not_started && matches!(response.status.0, 429 | 503) { response.into_result() } else { Ok(response) }
}

/// Adds the failed call to an error without a subject.
pub(super) fn about(error: Error, server: &str, request: &Request) -> Error {
    let error = error.of_nested_call();
    match error.subject() {
        "" => error.about(format!("{} {server}{}", request.verb, request.route)),
        _ => error,
    }
}

#[cfg(test)]
mod tests {
    use gym_core::{Message, Status};

    use super::*;

    #[test]
    fn a_response_is_a_rejection_if_its_server_says_that_nothing_ran() {
        let not_started = Some(Execution::NotStarted.as_str());
        let table = [
            (200, not_started, false),
            (422, not_started, false),
            (500, not_started, false),
            (429, not_started, true),
            (503, not_started, true),
            (429, None, false),
            (503, None, false),
            (503, Some(Execution::Finished.as_str()), false),
            (503, Some(Execution::Unknown.as_str()), false),
        ];
        for (status, execution, rejected) in table {
            let mut response = Response::new(Status(status), Message::json("{}"));
            if let Some(execution) = execution {
                response.metadata.push(EXECUTION_METADATA, execution);
            }
            let result = rejection(response);
            assert_eq!(result.is_err(), rejected, "{status} {execution:?}");
            assert!(result.is_ok() || result.unwrap_err().may_resend(false), "{status} {execution:?}");
        }
    }
}

//! Calls a server by *name*: resolves it, picks a replica, sends again what may be sent again.
//!
//! An episode whose server keeps state goes through a [`Session`](super::Session), which stays with the replica that it first
//! reached and carries its cookies.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use gym_core::message::EXECUTION_METADATA;
use gym_core::registry::{Balance, DEFAULT_TTL, Picker, Registry};
use gym_core::transport::{RetryPolicy, retry_after};
use gym_core::{CallContext, Code, Error, Execution, Request, Response, Result, Rope, Route, World};
use tokio::time::Instant;

use crate::client::replicas::{Replica, ReplicaSet, replica};
use crate::transport::Transports;

/// How long a resolved name is used before the registry is asked again. A server that moved is found at once by the failed
/// call; this bounds how long a *new* replica goes unused.
const RESOLVE_EVERY: Duration = Duration::from_secs(1);

/// How long nobody asks again for a name that nobody had: callers who wait for a server to come do not come together.
const ABSENT_FOR: Duration = Duration::from_millis(100);

/// Calls servers by name. Cheap to clone; clones share channels and counters.
#[derive(Clone, Debug)]
pub struct ServerClient {
    pub(super) inner: Arc<ClientState>,
}

#[derive(Debug)]
pub(super) struct ClientState {
    registry: Arc<dyn Registry>,
    transports: Transports,
    balance: Balance,
    pub(super) policy: RetryPolicy,
    pub(super) rng: Mutex<fastrand::Rng>,
    names: RwLock<BTreeMap<String, Arc<ReplicaSet>>>,
    asking: Mutex<BTreeMap<String, Arc<tokio::sync::Mutex<ResolveLock>>>>,
}

/// Held by the one caller that asks the registry for a name; the others wait for its answer. A thousand rollouts that begin
/// together ask once, and share the channels that come of it.
#[derive(Debug, Default)]
struct ResolveLock {
    /// When the last question was answered, if the answer was not kept as [`ReplicaSet`].
    last: Option<(Instant, ResolveMiss)>,
}

/// An answer of the registry that gives no replica.
#[derive(Debug)]
enum ResolveMiss {
    Absent,
    Failed(Code, String),
}

/// What a call needs beyond its body.
#[derive(Clone, Copy, Debug, Default)]
pub struct CallOptions {
    /// Whether the same message may be sent again when its fate is unknown.
    pub idempotent: bool,
}

impl CallOptions {
    /// A call whose repetition does no harm.
    #[must_use]
    pub fn idempotent() -> Self {
        Self { idempotent: true }
    }
}

impl ServerClient {
    /// A client of the servers that `registry` knows.
    #[must_use]
    pub fn new(registry: Arc<dyn Registry>, transports: Transports, world: &World) -> Self {
        Self {
            inner: Arc::new(ClientState {
                registry,
                transports,
                balance: Balance::default(),
                policy: RetryPolicy::default(),
                rng: Mutex::new(world.rng()),
                names: RwLock::default(),
                asking: Mutex::default(),
            }),
        }
    }

    /// The same servers, with another way to choose a replica and retry policy; channels and counters are its own. A weight's
    /// index is the rank of the replica that it is for.
    #[must_use]
    pub fn with(&self, balance: Balance, policy: RetryPolicy) -> Self {
        let inner = &self.inner;
        Self {
            inner: Arc::new(ClientState {
                registry: Arc::clone(&inner.registry),
                transports: inner.transports.clone(),
                balance,
                policy,
                rng: Mutex::new(lock(&inner.rng).fork()),
                names: RwLock::default(),
                asking: Mutex::default(),
            }),
        }
    }

    /// The transports that servers are reached by.
    #[must_use]
    pub fn transports(&self) -> &Transports {
        &self.inner.transports
    }

    /// The registry that names are looked up in.
    #[must_use]
    pub fn registry(&self) -> &Arc<dyn Registry> {
        &self.inner.registry
    }

    /// `POST` of a JSON text to a route of the named server. Any complete answer is `Ok`.
    ///
    /// # Errors
    /// `Unavailable, NotStarted` when nobody serves that name, or none that does has a weight; otherwise the last attempt's error.
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

    /// `GET` of a route of the named server.
    ///
    /// # Errors
    /// As [`ServerClient::post`].
    pub async fn get(&self, cx: &CallContext, server: &str, route: impl Into<Route>) -> Result<Response> {
        self.send(server, &Request::get(cx.clone(), route), CallOptions::idempotent()).await
    }

    /// Sends a request to any replica of the named server, and to another one when it may be sent again.
    ///
    /// # Errors
    /// As [`ServerClient::post`].
    pub async fn send(&self, server: &str, request: &Request, options: CallOptions) -> Result<Response> {
        self.dispatch(server, request, options).await.map(|(_, response)| response)
    }

    /// The replica that answered, and its answer.
    pub(super) async fn dispatch(
        &self,
        server: &str,
        request: &Request,
        options: CallOptions,
    ) -> Result<(Arc<Replica>, Response)> {
        let cx = &request.context;
        // A registry that cannot be asked has been tried often enough by its own client.
        let resolved = self.resolve(cx, server).await.map_err(|error| about(error, server, request))?;
        let (rank, error) = match resolved.choose(server, &[]) {
            Ok(replica) => match self.call(&replica, request).await {
                Ok(response) => return Ok((replica, response)),
                Err(error) => (Some(replica.rank), error),
            },
            // One that can be chosen may come.
            Err(error) => (None, error),
        };
        if !error.may_resend(options.idempotent) {
            return Err(about(error, server, request));
        }
        // Only now, because nearly every call succeeds at once and needs no generator.
        let mut rng = lock(&self.inner.rng).fork();
        let failed = Mutex::new(Vec::from_iter(rank));
        // Boxed: it is rare, and would otherwise make every waiting call as large as a second one.
        Box::pin(retry_after(error, cx, &self.inner.policy, &mut rng, options.idempotent, |_| async {
            self.forget(server);
            let exclude = lock(&failed).clone();
            let replica = self.resolve(cx, server).await?.choose(server, &exclude)?;
            let result = self.call(&replica, request).await;
            if result.is_err() {
                lock(&failed).push(replica.rank);
            }
            result.map(|response| (replica, response))
        }))
        .await
        .map_err(|error| about(error, server, request))
    }

    pub(super) async fn call(&self, replica: &Replica, request: &Request) -> Result<Response> {
        let _pending = replica.pending.begin();
        let response = replica.peer.call(&self.inner.transports, request).await?;
        // Another life of the server at this address, or one without room, refuses before it runs anything: that is no
        // answer, and another replica may give one. Foreign servers do not say so, and their answers stay answers.
        let refused = response.metadata.get(EXECUTION_METADATA) == Some(Execution::NotStarted.as_str());
        if refused && matches!(response.status.0, 429 | 503) {
            return response.into_result();
        }
        Ok(response)
    }

    async fn resolve(&self, cx: &CallContext, server: &str) -> Result<Arc<ReplicaSet>> {
        let known = self.known(server);
        if let Some(known) = &known
            && known.stale_from > Instant::now()
        {
            return Ok(Arc::clone(known));
        }
        let asking = Arc::clone(lock(&self.inner.asking).entry(server.to_owned()).or_default());
        let mut asked = match (asking.try_lock(), known) {
            (Ok(asked), _) => asked,
            // Somebody is asking already; until the answer is there, what was known goes on being used.
            (Err(_), Some(known)) if !known.doubtful => return Ok(known),
            (Err(_), _) => {
                let from = Instant::now();
                // A fair lock held over the question on purpose: whoever waits here wants the same answer.
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
        // Asked and answered while this caller waited?
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
                // A caller that has left, or had no time, says nothing about the registry.
                if cx.check().is_ok() {
                    asked.last = Some((Instant::now(), ResolveMiss::Failed(error.code(), error.to_string())));
                }
                let Some(known) = known else { return Err(error) };
                // The head is away: what was known goes on being used, and is not asked about by every call.
                tracing::debug!(server, %error, "resolve from the cache");
                return Ok(self.keep(server, known.replicas.clone(), Some(&known), known.seen));
            }
        };
        if instances.is_empty() {
            // A head that was restarted knows nobody until they register again. What was known goes on being used for as
            // long as a lease would have lasted: a server that is gone shows by its failed call.
            if let Some(known) = &known
                && known.seen.elapsed() < DEFAULT_TTL
            {
                return Ok(self.keep(server, known.replicas.clone(), Some(known), known.seen));
            }
            asked.last = Some((Instant::now(), ResolveMiss::Absent));
            return Ok(Arc::new(ReplicaSet::absent()));
        }
        asked.last = None;
        let replicas = instances.into_iter().map(|instance| replica(instance, known.as_deref())).collect();
        Ok(self.keep(server, replicas, known.as_deref(), Instant::now()))
    }

    fn keep(
        &self,
        server: &str,
        replicas: Vec<Arc<Replica>>,
        known: Option<&ReplicaSet>,
        seen: Instant,
    ) -> Arc<ReplicaSet> {
        let stale_from = Instant::now() + RESOLVE_EVERY;
        let fresh = || Arc::new(Picker::new(self.inner.balance.clone()));
        let picker = known.map_or_else(fresh, |known| Arc::clone(&known.picker));
        let resolved = Arc::new(ReplicaSet { replicas, picker, seen, stale_from, doubtful: false });
        let mut names = self.inner.names.write().unwrap_or_else(PoisonError::into_inner);
        names.insert(server.to_owned(), Arc::clone(&resolved));
        resolved
    }

    fn known(&self, server: &str) -> Option<Arc<ReplicaSet>> {
        self.inner.names.read().unwrap_or_else(PoisonError::into_inner).get(server).cloned()
    }

    /// Has the next call ask the registry again.
    fn forget(&self, server: &str) {
        let mut names = self.inner.names.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = names.get(server) {
            let (replicas, picker, seen) = (known.replicas.clone(), Arc::clone(&known.picker), known.seen);
            let doubted = ReplicaSet { replicas, picker, seen, stale_from: Instant::now(), doubtful: true };
            names.insert(server.to_owned(), Arc::new(doubted));
        }
    }
}

/// Says which call failed, unless the error says so already.
pub(super) fn about(error: Error, server: &str, request: &Request) -> Error {
    match error.subject() {
        "" => error.about(format!("{} {server}{}", request.verb, request.route)),
        _ => error,
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

//! Calls a server by *name*: resolves it, picks a replica, sends again what may be sent again.
//!
//! An episode whose server keeps state goes through a [`Session`], which stays with the replica that it first reached and
//! carries its cookies.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use gym_core::{
    Balance, CallContext, Code, ConnectOptions, DEFAULT_TTL, EXECUTION_METADATA, Error, Execution, Incarnation,
    Instance, Load, Picker, Registry, Request, Response, Result, RetryPolicy, Rope, Route, World, retry_after,
};
use tokio::time::Instant;

use crate::cookies::CookieJar;
use crate::peer::Peer;
use crate::pick::Pending;
use crate::transports::Transports;

/// How long a resolved name is used before the registry is asked again. A server that moved is found at once by the failed
/// call; this bounds how long a *new* replica goes unused.
const RESOLVE_EVERY: Duration = Duration::from_secs(1);

/// How long nobody asks again for a name that nobody had: callers who wait for a server to come do not come together.
const ABSENT_FOR: Duration = Duration::from_millis(100);

/// Calls servers by name. Cheap to clone; clones share channels and counters.
#[derive(Clone, Debug)]
pub struct ServerClient {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    registry: Arc<dyn Registry>,
    transports: Transports,
    balance: Balance,
    policy: RetryPolicy,
    rng: Mutex<fastrand::Rng>,
    names: RwLock<BTreeMap<String, Arc<Resolved>>>,
    asking: Mutex<BTreeMap<String, Arc<tokio::sync::Mutex<Asked>>>>,
}

/// What a name resolved to.
#[derive(Debug)]
struct Resolved {
    replicas: Vec<Arc<Replica>>,
    /// Of this name alone: whose turn it is among its replicas is nothing to those of another.
    picker: Arc<Picker>,
    /// When the registry last had them.
    seen: Instant,
    stale_from: Instant,
    /// A call to it failed: it must not be used before the registry was asked again.
    doubtful: bool,
}

impl Resolved {
    /// Nobody, for the one call that asked.
    fn absent() -> Self {
        let (replicas, picker, now) = (Vec::new(), Arc::default(), Instant::now());
        Self { replicas, picker, seen: now, stale_from: now, doubtful: true }
    }

    /// A replica, if it can be helped none that has `failed`. By rank, which a replica keeps, while its place among those that live now
    /// changes: a weight is a replica's.
    fn choose(&self, server: &str, failed: &[u32]) -> Result<Arc<Replica>> {
        let load = |replica: &Arc<Replica>| Load { index: replica.rank as usize, pending: replica.pending.count() };
        let open = self.replicas.iter().filter(|replica| !failed.contains(&replica.rank));
        let chosen = self.picker.pick(&open.map(load).collect::<Vec<_>>());
        // All have failed once: any of them again.
        let chosen = chosen.or_else(|| self.picker.pick(&self.replicas.iter().map(load).collect::<Vec<_>>()));
        let replica = chosen.and_then(|rank| self.replicas.iter().find(|replica| replica.rank as usize == rank));
        replica.cloned().ok_or_else(|| match self.replicas.len() {
            0 => absent(server),
            count => {
                let why = format!("its {count} replicas have weight 0, which is never chosen");
                Error::not_started(Code::Unavailable, why).about(server.to_owned())
            }
        })
    }
}

/// Held by the one caller that asks the registry for a name; the others wait for its answer. A thousand rollouts that begin
/// together ask once, and share the channels that come of it.
#[derive(Debug, Default)]
struct Asked {
    /// When the last question was answered, if the answer was not kept as [`Resolved`].
    last: Option<(Instant, Fruitless)>,
}

/// An answer of the registry that gives no replica.
#[derive(Debug)]
enum Fruitless {
    Absent,
    Failed(Code, String),
}

#[derive(Debug)]
struct Replica {
    peer: Peer,
    incarnation: Incarnation,
    rank: u32,
    pending: Pending,
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
            inner: Arc::new(Inner {
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
            inner: Arc::new(Inner {
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

    /// An episode's calls: they stay with the replica first reached, and carry its cookies.
    #[must_use]
    pub fn session(&self) -> Session {
        Session { client: self.clone(), servers: Vec::new() }
    }

    /// The replica that answered, and its answer.
    async fn dispatch(
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

    async fn call(&self, replica: &Replica, request: &Request) -> Result<Response> {
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

    async fn resolve(&self, cx: &CallContext, server: &str) -> Result<Arc<Resolved>> {
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
                    (Some((_, Fruitless::Failed(..))), Some(known)) => return Ok(known),
                    (Some((_, Fruitless::Failed(code, why))), None) => {
                        return Err(Error::not_started(*code, why.clone()));
                    }
                    (Some((_, Fruitless::Absent)), _) => return Ok(Arc::new(Resolved::absent())),
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
        if let Some((at, Fruitless::Absent)) = &asked.last
            && known.is_none()
            && at.elapsed() < ABSENT_FOR
        {
            return Ok(Arc::new(Resolved::absent()));
        }
        let instances = match self.inner.registry.resolve(cx, server).await {
            Ok(instances) => instances,
            Err(error) => {
                // A caller that has left, or had no time, says nothing about the registry.
                if cx.check().is_ok() {
                    asked.last = Some((Instant::now(), Fruitless::Failed(error.code(), error.to_string())));
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
            asked.last = Some((Instant::now(), Fruitless::Absent));
            return Ok(Arc::new(Resolved::absent()));
        }
        asked.last = None;
        let replicas = instances.into_iter().map(|instance| replica(instance, known.as_deref())).collect();
        Ok(self.keep(server, replicas, known.as_deref(), Instant::now()))
    }

    fn keep(
        &self,
        server: &str,
        replicas: Vec<Arc<Replica>>,
        known: Option<&Resolved>,
        seen: Instant,
    ) -> Arc<Resolved> {
        let stale_from = Instant::now() + RESOLVE_EVERY;
        let fresh = || Arc::new(Picker::new(self.inner.balance.clone()));
        let picker = known.map_or_else(fresh, |known| Arc::clone(&known.picker));
        let resolved = Arc::new(Resolved { replicas, picker, seen, stale_from, doubtful: false });
        let mut names = self.inner.names.write().unwrap_or_else(PoisonError::into_inner);
        names.insert(server.to_owned(), Arc::clone(&resolved));
        resolved
    }

    fn known(&self, server: &str) -> Option<Arc<Resolved>> {
        self.inner.names.read().unwrap_or_else(PoisonError::into_inner).get(server).cloned()
    }

    /// Has the next call ask the registry again.
    fn forget(&self, server: &str) {
        let mut names = self.inner.names.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = names.get(server) {
            let (replicas, picker, seen) = (known.replicas.clone(), Arc::clone(&known.picker), known.seen);
            let doubted = Resolved { replicas, picker, seen, stale_from: Instant::now(), doubtful: true };
            names.insert(server.to_owned(), Arc::new(doubted));
        }
    }
}

/// The replica of an instance: the known one, with its channel and counter, when it is still the same life.
fn replica(instance: Instance, known: Option<&Resolved>) -> Arc<Replica> {
    let same = known.and_then(|known| {
        known.replicas.iter().find(|replica| {
            replica.rank == instance.rank
                && replica.incarnation == instance.incarnation
                && replica.peer.endpoints() == instance.endpoints
        })
    });
    match same {
        Some(replica) => Arc::clone(replica),
        None => Arc::new(Replica {
            peer: Peer::new(instance.endpoints, ConnectOptions::to_incarnation(instance.incarnation)),
            incarnation: instance.incarnation,
            rank: instance.rank,
            pending: Pending::default(),
        }),
    }
}

/// The calls of one episode. Each server it talks to is one replica from the first call on, with a jar of cookies.
#[derive(Debug)]
pub struct Session {
    client: ServerClient,
    /// A few, in a list: a tree's smallest node is larger than all that most episodes keep.
    servers: Vec<Bound>,
}

#[derive(Debug)]
struct Bound {
    server: String,
    replica: Option<Arc<Replica>>,
    jar: CookieJar,
}

impl Session {
    /// The cookies held for a server; what is set here goes with the next call.
    pub fn jar(&mut self, server: &str) -> &mut CookieJar {
        &mut self.bound(server).jar
    }

    /// `POST` of a JSON text. Any complete answer is `Ok`.
    ///
    /// # Errors
    /// Before the first answer as [`ServerClient::post`]. After it, a replica that is gone is `FailedPrecondition`: the
    /// session is lost, and only a new episode can help.
    pub fn post(
        &mut self,
        cx: &CallContext,
        server: &str,
        route: impl Into<Route>,
        body: impl Into<Rope>,
    ) -> impl Future<Output = Result<Response>> + Send {
        let mut request = Request::post(cx.clone(), route, body);
        let client = self.client.clone();
        let bound = self.bound(server);
        if let Some(cookies) = bound.jar.header() {
            request.context.metadata.push("cookie", cookies);
        }
        async move {
            let response = bound.call(&client, &request).await?;
            bound.jar.merge(&response.metadata);
            Ok(response)
        }
    }

    fn bound(&mut self, server: &str) -> &mut Bound {
        let at = self.servers.iter().position(|bound| bound.server == server).unwrap_or_else(|| {
            // Model and resources are all that most agents call.
            self.servers.reserve_exact(2);
            self.servers.push(Bound { server: server.to_owned(), replica: None, jar: CookieJar::new() });
            self.servers.len() - 1
        });
        &mut self.servers[at]
    }
}

impl Bound {
    /// The answer of the replica that the session is at, or of the one that it stays at from now on.
    async fn call(&mut self, client: &ServerClient, request: &Request) -> Result<Response> {
        let Some(replica) = &self.replica else {
            let (replica, response) = client.dispatch(&self.server, request, CallOptions::default()).await?;
            self.replica = Some(replica);
            return Ok(response);
        };
        let mut result = client.call(replica, request).await;
        if let Err(error) = result {
            let mut rng = lock(&client.inner.rng).fork();
            let (cx, policy) = (&request.context, &client.inner.policy);
            let again = |_| client.call(replica, request);
            result = Box::pin(retry_after(error, cx, policy, &mut rng, false, again)).await;
        }
        result.map_err(|error| {
            let lost = error.code() == Code::Unavailable;
            let error = about(error, &self.server, request);
            if !lost {
                return error;
            }
            Error::new(Code::FailedPrecondition, error.execution(), "the server of this session is gone")
                .about(self.server.clone())
                .caused_by(error)
        })
    }
}

/// Nobody of that name is registered. Not `NotFound`: a server that is being restarted is registered again in a moment.
fn absent(server: &str) -> Error {
    Error::not_started(Code::Unavailable, "no server of this name is registered").about(server.to_owned())
}

/// Says which call failed, unless the error says so already.
fn about(error: Error, server: &str, request: &Request) -> Error {
    match error.subject() {
        "" => error.about(format!("{} {server}{}", request.verb, request.route)),
        _ => error,
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

//! The head server: resolves names to running servers, for clients of this SDK and of NeMo Gym.
//!
//! | route | purpose |
//! |---|---|
//! | `POST /registry/register`, `renew`, `deregister`, `watch`; `GET /registry/instances[?name=…]` | leases, see [`gym_client::registry`] |
//! | `GET /global_config_dict_yaml` | the merged configuration, as a JSON string of YAML, with the live servers' host and port |
//! | `GET /cluster/configuration` | the configuration that the head server was given, for workers without files: [`gym_client::registry::SharedConfiguration`] |
//! | `GET /server_instances` | the live servers, in NeMo Gym's form |
//! | `GET /`, `/livez` | 200 |
//! | `GET /health`, `/healthz`, `/readyz` | 503 until all requested servers serve, then 200 |
//! | `GET /metrics` | Prometheus |
//! | `GET /ui`, `/ui/state`, `/ui/waits`, `/ui/rollout` | a page that shows the cluster and its collections, and its data |
//! | `POST /collections/report` | what a collector reports once a second: [`gym_client::collect::monitor`] |
//! | `GET /waits` | what the calls of the process wait for, for `rgym stuck` |
//! | `GET /cluster/targets` | the processes with metrics, for the service discovery of Prometheus |
//!
//! The head server is only on the control path: rollouts and tensors never pass through it. Its state is soft: after a
//! restart, the servers register again within a heartbeat.

pub(crate) mod collections;
mod monitoring;
pub(crate) mod page;
#[cfg(test)]
mod sources;
#[cfg(feature = "http")]
pub(crate) mod suspects;
pub(crate) mod waits;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::BoxFuture;
#[cfg(feature = "http")]
use gym_client::Transports;
use gym_client::collect::monitor::{CollectionMonitor, CollectionReport, REPORT_ROUTE};
use gym_client::registry::{DrainRequest, RosterRequest, SharedConfiguration, WatchRequest};
use gym_core::observe::waits::{WAITS_ROUTE, WaitQuery, report as waits_of_process};
use gym_core::registry::{
    Heartbeat, Instance, Lease, Member, MemberRegistry, MemberSpec, MemberState, MemberTuning, MemoryRegistry,
    Registration, Registry, TuningDifference, tuning_differences,
};
use gym_core::{CallContext, Error, Handler, Message, Request, Response, Result, Status, Verb, World};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::head::collections::Collections;
use crate::head::monitoring::ClusterMetrics;
use crate::head::waits::ShownWaits;
use crate::metrics::{Metrics, RouteMetrics};
use crate::role::reply;

/// The port that NeMo Gym's tools expect.
pub const HEAD_PORT: u16 = 11_000;

/// The label of a registration with the server's start, in seconds since 1970.
pub(crate) const START_TIME_LABEL: &str = "start_time";

/// The longest wait of one `watch` request; the watcher then sends another request.
const WATCH_WAIT_MAX: Duration = Duration::from_secs(60);

/// Difference of two clocks from which times in logs and rows mislead.
const CLOCKS_APART_MAX: Duration = Duration::from_secs(60);

/// The build of the SDK in this program, which members compare; the program around it does not matter. In a checkout, it changes with each
/// change of the SDK's sources. A package has no build script: its version names its sources, because each of our crates requires the others in
/// exactly its own version.
pub(crate) const BUILD: &str = match option_env!("GYM_SOURCES") {
    Some(of_checkout) => of_checkout,
    None => concat!("gym-server ", env!("CARGO_PKG_VERSION")),
};

/// The workers that a head server waits for.
#[derive(Debug)]
pub(crate) struct MissingMembers {
    expected: usize,
    serving: usize,
    /// Workers that joined and do not serve.
    others: Vec<Member>,
}

impl fmt::Display for MissingMembers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} expected workers serve", self.serving, self.expected)?;
        for member in &self.others {
            write!(f, "; {} is {}", member.spec.name, member.state)?;
            if !member.reason.is_empty() {
                write!(f, ": {}", member.reason)?;
            }
        }
        Ok(())
    }
}

/// Returns the text of `/global_config_dict_yaml` for the live servers.
pub type GlobalConfig = Arc<dyn Fn(&[Instance]) -> String + Send + Sync>;

/// The head server's handler. Cheap to clone; clones share the state.
#[derive(Clone)]
pub struct HeadServer(Arc<HeadState>);

struct HeadState {
    registry: MemoryRegistry,
    config: GlobalConfig,
    shared: SharedConfiguration,
    ready: AtomicBool,
    /// Members that must serve before the cluster is ready; 0 once it was.
    expected: AtomicUsize,
    collections: Collections,
    waits: ShownWaits,
    start_time: f64,
    world: World,
    metrics: Metrics,
    routes: RouteMetrics,
    cluster: ClusterMetrics,
}

impl HeadServer {
    /// Creates a head server over `registry` that serves the text of `config`. `/health` reports 503 until [`HeadServer::set_ready`].
    #[must_use]
    pub fn new(registry: MemoryRegistry, config: GlobalConfig, world: &World, metrics: Metrics) -> Self {
        let cluster = ClusterMetrics::default();
        metrics.with(|known| cluster.register(known));
        let routes = metrics.route("head_server", "all");
        let start_time = world.now().as_secs_f64();
        Self(Arc::new(HeadState {
            registry,
            config,
            shared: SharedConfiguration::default(),
            ready: AtomicBool::new(false),
            expected: AtomicUsize::new(0),
            collections: Collections::default(),
            waits: ShownWaits::default(),
            start_time,
            world: world.clone(),
            metrics,
            routes,
            cluster,
        }))
    }

    /// Makes `/health` wait for this number of members.
    #[cfg(feature = "http")]
    #[must_use]
    pub(crate) fn expecting(self, members: usize) -> Self {
        self.0.expected.store(members, Ordering::Relaxed);
        if members > 0 {
            self.0.metrics.with(|known| ClusterMetrics::register_expected(known, members));
        }
        self
    }

    /// Gives this configuration to workers without files.
    ///
    /// # Panics
    /// If the head server was cloned before.
    #[cfg(feature = "http")]
    #[must_use]
    pub(crate) fn sharing(mut self, shared: SharedConfiguration) -> Self {
        Arc::get_mut(&mut self.0).expect("nothing else has this head server yet").shared = shared;
        self
    }

    /// Asks the processes of the cluster over these transports what their calls wait for, when the page shows it.
    ///
    /// # Panics
    /// If the head server was cloned before.
    #[cfg(feature = "http")]
    #[must_use]
    pub(crate) fn following(mut self, transports: Transports) -> Self {
        Arc::get_mut(&mut self.0).expect("nothing else has this head server yet").waits = ShownWaits::over(transports);
        self
    }

    /// Returns what the head server waits for; `None` once all expected workers have served.
    #[cfg(feature = "cli")]
    pub(crate) async fn missing_members(&self) -> Result<Option<MissingMembers>> {
        self.0.missing_members(&CallContext::default()).await
    }

    /// Makes `/health` report from now on that all servers serve.
    pub fn set_ready(&self) {
        self.0.ready.store(true, Ordering::Release);
    }

    /// Returns what takes the reports of collections, which the page shows.
    #[must_use]
    pub fn monitor(&self) -> Arc<dyn CollectionMonitor> {
        Arc::new(self.0.collections.clone())
    }

    /// Returns the registry.
    #[must_use]
    pub fn registry(&self) -> &MemoryRegistry {
        &self.0.registry
    }
}

impl fmt::Debug for HeadServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HeadServer")
    }
}

impl Handler for HeadServer {
    fn handle(&self, request: Request) -> BoxFuture<'static, Result<Response>> {
        let head = Arc::clone(&self.0);
        Box::pin(async move {
            let counted = head.routes.begin();
            let response = head.answer(request).await.unwrap_or_else(|error| reply::of_error(&error));
            counted.finish(&response);
            Ok(response)
        })
    }
}

impl HeadState {
    async fn answer(&self, request: Request) -> Result<Response> {
        let cx = &request.context;
        if request.verb == Verb::Post
            && let Some(rejected) = request.reject_browsers()
        {
            return Ok(rejected);
        }
        match (request.verb, request.route.path()) {
            (Verb::Get | Verb::Head, "/" | "/livez") => Ok(reply::ok()),
            (Verb::Get | Verb::Head, "/health" | "/healthz" | "/readyz") => self.health(cx).await,
            (Verb::Get, "/metrics") => self.metrics(cx).await,
            (Verb::Get | Verb::Head, "/ui" | "/ui/") => Ok(page::live_page()),
            (Verb::Get, "/ui/state") => {
                let millis = |time: f64| (time * 1e3) as u64;
                let times = (millis(self.world.now().as_secs_f64()), millis(self.start_time));
                let expected = self.missing_members(cx).await?.map_or(0, |missing| missing.expected);
                let query = request.route.query().unwrap_or_default();
                json(&page::state(cx, query, &self.registry, &self.collections, (times.0, times.1, expected)).await?)
            }
            (Verb::Get, "/ui/rollout") => {
                json(&page::rollout(cx, request.route.query().unwrap_or_default(), &self.collections).await?)
            }
            (Verb::Get, "/ui/waits") => {
                let (servers, members) = (self.registry.list(cx).await?, self.registry.members(cx).await?);
                json(&*self.waits.get(servers, members, &self.collections.collectors()).await)
            }
            (Verb::Post, REPORT_ROUTE) => {
                json(&self.collections.report(cx, &read::<CollectionReport>(&request.message)?).await?)
            }
            (Verb::Get, WAITS_ROUTE) => {
                json(&waits_of_process(&WaitQuery::parse(request.route.query().unwrap_or_default())))
            }
            (Verb::Get, "/global_config_dict_yaml") => json(&(self.config)(&self.serving(cx).await?)),
            (Verb::Get, "/server_instances") => {
                let now: Vec<Value> =
                    self.serving(cx).await?.iter().map(|instance| self.nemo_gym_instance(instance)).collect();
                json(&now)
            }
            (Verb::Get, "/registry/instances") => match query(request.route.query().unwrap_or_default(), "name") {
                Some(name) => json(&self.registry.resolve(cx, &name).await?),
                None => json(&self.registry.list(cx).await?),
            },
            (Verb::Post, "/registry/register") => {
                let registration: Registration = read(&request.message)?;
                let (name, endpoint) = (registration.name.clone(), registration.endpoints.first().cloned());
                let lease = self.registry.register(cx, registration).await?;
                tracing::info!(name, replica = lease.replica, ?endpoint, "{name} registered successfully");
                json(&lease)
            }
            (Verb::Post, "/registry/renew") => {
                self.registry.renew(cx, &read::<Lease>(&request.message)?).await?;
                Ok(reply::ok())
            }
            (Verb::Post, "/registry/deregister") => {
                let lease: Lease = read(&request.message)?;
                tracing::info!(name = lease.name, replica = lease.replica, "deregistered");
                self.registry.deregister(cx, lease).await?;
                Ok(reply::ok())
            }
            (Verb::Post, "/registry/watch") => self.watch(&read(&request.message)?).await,
            (Verb::Post, "/cluster/join") => self.join(cx, read(&request.message)?).await,
            (Verb::Post, "/cluster/beat") => {
                let heartbeat: Heartbeat = read(&request.message)?;
                self.cluster.heard(&heartbeat);
                json(&self.registry.heartbeat(cx, &heartbeat).await?)
            }
            (Verb::Post, "/cluster/leave") => {
                self.registry.leave(cx, read(&request.message)?).await?;
                Ok(reply::ok())
            }
            (Verb::Post, "/cluster/drain") => {
                self.registry.drain(cx, &read::<DrainRequest>(&request.message)?.name).await?;
                Ok(reply::ok())
            }
            (Verb::Get, "/cluster/configuration") => json(&self.shared),
            (Verb::Get, "/cluster/targets") => {
                json(&monitoring::targets(&self.registry.members(cx).await?, &self.registry.list(cx).await?))
            }
            (Verb::Get, "/cluster/members") => json(&self.registry.members(cx).await?),
            (Verb::Post, "/cluster/roster") => {
                let RosterRequest { seen, wait_ms } = read(&request.message)?;
                let wait = Duration::from_millis(wait_ms).min(WATCH_WAIT_MAX);
                json(&self.registry.roster(cx, seen, wait).await?)
            }
            (
                _,
                "/registry/register"
                | "/registry/renew"
                | "/registry/deregister"
                | "/registry/watch"
                | "/cluster/join"
                | "/cluster/beat"
                | "/cluster/leave"
                | "/cluster/drain"
                | "/cluster/roster"
                | REPORT_ROUTE,
            ) => Ok(reply::method_not_allowed("POST")),
            (
                _,
                "/"
                | "/livez"
                | "/health"
                | "/healthz"
                | "/readyz"
                | "/metrics"
                | "/ui"
                | "/ui/state"
                | "/ui/rollout"
                | "/ui/waits"
                | WAITS_ROUTE
                | "/global_config_dict_yaml"
                | "/server_instances"
                | "/registry/instances"
                | "/cluster/configuration"
                | "/cluster/members"
                | "/cluster/targets",
            ) => Ok(reply::method_not_allowed("GET")),
            _ => Ok(reply::not_found()),
        }
    }

    /// Returns the servers that get work. NeMo Gym's clients know no other ones.
    async fn serving(&self, cx: &CallContext) -> Result<Vec<Instance>> {
        let mut servers = self.registry.list(cx).await?;
        servers.retain(|server| !server.paused);
        Ok(servers)
    }

    /// Adds a member. Warns of what will go wrong with it, here and where the member runs.
    async fn join(&self, cx: &CallContext, spec: MemberSpec) -> Result<Response> {
        let mut warnings = Vec::new();
        let clock = Duration::from_millis(spec.clock_ms);
        let apart = self.world.now().abs_diff(clock);
        if spec.clock_ms > 0 && apart > CLOCKS_APART_MAX {
            warnings.push(format!(
                "the worker's clock differs from that of the head server by {} s; times in logs and rows will not agree",
                apart.as_secs()
            ));
        }
        if !spec.build.is_empty() && spec.build != BUILD {
            warnings.push(format!(
                "the worker runs another build of the SDK than the head server: {}, not {BUILD}; build both from the same sources",
                spec.build
            ));
        }
        let (name, host) = (spec.name.clone(), spec.host.clone());
        let mut joined = self.registry.join(cx, spec).await?;
        warnings.iter().for_each(|warning| tracing::warn!(member = name, host, "{warning}"));
        for difference in self.tuning_differences(cx, &name).await? {
            // A cluster of a hundred workers with two values has one line about them, and each worker that joins is told.
            if difference.is_new {
                tracing::warn!(member = name, host, "{}", difference.text);
            }
            warnings.push(difference.text);
        }
        joined.warnings = warnings;
        json(&joined)
    }

    /// Compares the tuning of a member that has joined with that of the others.
    async fn tuning_differences(&self, cx: &CallContext, name: &str) -> Result<Vec<TuningDifference>> {
        let mut members = self.registry.members(cx).await?;
        members.retain(|member| member.state != MemberState::Gone && member.spec.tuning.is_some());
        // The new one is the last.
        members.sort_by_key(|member| member.spec.name == name);
        if members.last().is_none_or(|member| member.spec.name != name) {
            return Ok(Vec::new());
        }
        let tuned: Vec<(&str, &MemberTuning)> = members
            .iter()
            .filter_map(|member| Some((member.spec.name.as_str(), member.spec.tuning.as_ref()?)))
            .collect();
        Ok(tuning_differences(&tuned))
    }

    async fn health(&self, cx: &CallContext) -> Result<Response> {
        if !self.ready.load(Ordering::Acquire) {
            return Ok(Response::new(Status(503), Message::json(r#"{"status":"starting"}"#)));
        }
        let Some(missing) = self.missing_members(cx).await? else { return Ok(reply::ok()) };
        let others: Vec<Value> = missing
            .others
            .iter()
            .map(|member| json!({"name": member.spec.name, "state": member.state, "reason": member.reason}))
            .collect();
        let (expected, serving) = (missing.expected, missing.serving);
        let body = json!({"status": "waiting for workers", "expected": expected, "serving": serving, "others": others});
        Ok(Response::new(Status(503), Message::json(body.to_string())))
    }

    /// Returns what the head server waits for; `None` once all expected workers have served.
    async fn missing_members(&self, cx: &CallContext) -> Result<Option<MissingMembers>> {
        let expected = self.expected.load(Ordering::Relaxed);
        if expected == 0 {
            return Ok(None);
        }
        let members = self.registry.members(cx).await?;
        let (serving, others): (Vec<_>, Vec<_>) =
            members.into_iter().partition(|member| member.state == MemberState::Serving);
        if serving.len() >= expected {
            // From now on, a worker that ends does not make the head server unready.
            self.expected.store(0, Ordering::Relaxed);
            return Ok(None);
        }
        Ok(Some(MissingMembers { expected, serving: serving.len(), others }))
    }

    async fn metrics(&self, cx: &CallContext) -> Result<Response> {
        self.cluster.update(self.registry.list(cx).await?.len(), &self.registry.members(cx).await?);
        Ok(reply::metrics(cx, &self.metrics))
    }

    async fn watch(&self, request: &WatchRequest) -> Result<Response> {
        let mut states = self.registry.watch(&request.name);
        let wait = Duration::from_millis(request.wait_ms).min(WATCH_WAIT_MAX);
        let deadline = tokio::time::Instant::now() + wait;
        let mut now = Vec::new();
        while let Ok(Some(state)) = tokio::time::timeout_at(deadline, states.next()).await {
            now = state;
            if request.seen.as_ref() != Some(&now) {
                break;
            }
        }
        json(&now)
    }

    /// Returns a server in the form of NeMo Gym's `/server_instances`.
    fn nemo_gym_instance(&self, instance: &Instance) -> Value {
        let label = |name: &str| instance.labels.get(name).map(String::as_str);
        let http = instance.endpoints.iter().find(|endpoint| endpoint.scheme() == "http");
        let (host, port) = http.and_then(|http| http.address().rsplit_once(':')).unwrap_or_default();
        json!({
            "config_path": instance.name,
            "dir_path": label("dir_path"),
            "entrypoint": label("entrypoint"),
            "host": host,
            "name": instance.implementation,
            "pid": label("pid").and_then(|pid| pid.parse::<u32>().ok()),
            "port": port.parse::<u16>().ok(),
            "process_name": instance.name,
            "server_type": instance.kind.as_str(),
            "start_time": label(START_TIME_LABEL).and_then(|time| time.parse().ok()).unwrap_or(self.start_time),
            "status": null,
            "uptime_seconds": null,
            "url": http.map(gym_core::Endpoint::as_str),
        })
    }
}

/// Returns the address of a server over HTTP if it has one, because others see it too.
fn url_of(server: &Instance) -> String {
    let http = server.endpoints.iter().find(|endpoint| endpoint.scheme() == "http");
    http.or(server.endpoints.first()).map(ToString::to_string).unwrap_or_default()
}

fn json(value: &impl Serialize) -> Result<Response> {
    let text =
        serde_json::to_vec(value).map_err(|error| Error::internal("cannot serialize the response").caused_by(error))?;
    Ok(Response::json(text))
}

fn read<T: DeserializeOwned>(message: &Message) -> Result<T> {
    serde_json::from_slice(&message.head.to_bytes())
        .map_err(|error| Error::invalid("the body is invalid").caused_by(error))
}

/// Returns the value of a key in a query string. Server names need no escapes, so escapes are not decoded.
fn query(text: &str, key: &str) -> Option<String> {
    text.split('&').find_map(|pair| {
        let (name, value) = pair.split_once('=')?;
        (name == key).then(|| value.to_owned())
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use gym_client::registry::RemoteRegistry;
    use gym_core::message::ContentType;
    use gym_core::registry::{HeartbeatReply, JoinedMember, MemberLimits, RosterUpdate};
    use gym_core::server::ServerKind;
    use gym_core::testing::conformance::{MemberFixture, members};
    use gym_core::{Endpoint, Incarnation};

    use super::*;
    use crate::testing::{TestNetwork, world};

    fn registration(name: &str, port: u16, incarnation: u64) -> Registration {
        let mut registration =
            Registration::new(name, ServerKind::Agent, [Endpoint::parse(&format!("http://127.0.0.1:{port}")).unwrap()]);
        registration.implementation = "simple_agent".to_owned();
        registration.incarnation = Incarnation(incarnation);
        registration.ttl = Duration::from_secs(30);
        registration.labels = BTreeMap::from([("pid".to_owned(), "77".to_owned())]);
        registration
    }

    fn head() -> HeadServer {
        let config: GlobalConfig = Arc::new(|instances| format!("live: {}\n", instances.len()));
        HeadServer::new(MemoryRegistry::with_limits(1, MemberLimits::default()), config, &world(), Metrics::new())
    }

    async fn get(head: &HeadServer, route: &'static str) -> (u16, Value) {
        let response = head.handle(Request::get(CallContext::default(), route)).await.unwrap();
        (response.status.0, serde_json::from_slice(&response.message.head.to_bytes()).unwrap())
    }

    async fn post(head: &HeadServer, route: &'static str, body: &impl Serialize) -> (u16, Value) {
        let body = serde_json::to_vec(body).unwrap();
        let response = head.handle(Request::post(CallContext::default(), route, body)).await.unwrap();
        (response.status.0, serde_json::from_slice(&response.message.head.to_bytes()).unwrap())
    }

    #[tokio::test(start_paused = true)]
    async fn health_is_503_until_all_servers_serve() {
        let head = head();
        assert_eq!(get(&head, "/health").await, (503, json!({"status": "starting"})));
        assert_eq!(get(&head, "/").await.0, 200);
        head.set_ready();
        assert_eq!(get(&head, "/readyz").await, (200, json!({"status": "ok"})));
    }

    /// Both directions: a worker of that commit at this head server, and a client of this one at a head server of that commit.
    #[tokio::test(start_paused = true)]
    async fn messages_of_an_earlier_commit_are_understood() {
        let recorded: Vec<Value> =
            serde_json::from_str(include_str!("../../../tests/data/cluster/3baa8bc1.json")).unwrap();
        let of = |route: &str| recorded.iter().find(|message| message["route"] == route).unwrap();
        let answer = |route| of(route)["response"].clone();
        serde_json::from_value::<JoinedMember>(answer("/cluster/join")).unwrap();
        let heartbeat: HeartbeatReply = serde_json::from_value(answer("/cluster/beat")).unwrap();
        let roster: RosterUpdate = serde_json::from_value(answer("/cluster/roster")).unwrap();
        let members: Vec<Member> = serde_json::from_value(answer("/cluster/members")).unwrap();
        let servers: Vec<Instance> = serde_json::from_value(answer("/registry/instances")).unwrap();
        assert_eq!(heartbeat.state, MemberState::Serving);
        assert_eq!((roster.changes.len(), roster.suspects.len(), servers.len()), (3, 0, 3));
        assert_eq!((members[0].state, members[0].gone_in_ms), (MemberState::Suspect, None));

        let head = head();
        let (status, joined) = post(&head, "/cluster/join", &of("/cluster/join")["request"]).await;
        assert_eq!(status, 200, "{joined}");
        let mut heartbeat = of("/cluster/beat")["request"].clone();
        heartbeat["term"] = joined["lease"]["term"].clone();
        let (status, reply) = post(&head, "/cluster/beat", &heartbeat).await;
        assert_eq!((status, &reply["state"]), (200, &json!("serving")), "{reply}");
        let mut seen = of("/cluster/roster")["request"].clone();
        seen["wait_ms"] = json!(0);
        let (status, roster) = post(&head, "/cluster/roster", &seen).await;
        assert_eq!((status, roster["changes"].as_array().map(Vec::len)), (200, Some(3)), "{roster}");
        for route in [REPORT_ROUTE, "/cluster/drain"] {
            assert_eq!(post(&head, route, &of(route)["request"]).await.0, 200, "{route}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_member_whose_tuning_differs_is_told_on_which_members() {
        let head = head();
        let settings = |version: &str| MemberTuning::new([("NCCL".to_owned(), version.to_owned())]);
        let joined = async |name: &str, tuning: Option<MemberTuning>| {
            let mut spec = MemberSpec::new(name, Incarnation(1));
            spec.tuning = tuning;
            let (status, joined) = post(&head, "/cluster/join", &spec).await;
            (status, joined["warnings"][0].as_str().map(str::to_owned))
        };
        assert_eq!(joined("a", Some(settings("2.27.3"))).await, (200, None));
        assert_eq!(joined("of-before", None).await, (200, None), "nothing is known of it");
        let (_, told) = joined("b", Some(settings("2.26.2"))).await;
        let words =
            "NCCL differs between workers: `2.26.2` on b; `2.27.3` on a; install the same version on all workers";
        assert_eq!(told.as_deref(), Some(words));
        let (_, told) = joined("c", Some(settings("2.27.3"))).await;
        assert!(told.is_some_and(|told| told.contains("`2.27.3` on a, c")));
        let many = (0..100).map(|n| (n.to_string(), String::new())).collect();
        let many = MemberTuning { settings: many, ..settings("2.27.3") };
        assert_eq!(joined("d", Some(many)).await.0, 422);
    }

    #[tokio::test(start_paused = true)]
    async fn web_pages_change_nothing() {
        let head = head();
        let routes =
            ["/registry/register", "/registry/deregister", "/cluster/join", "/cluster/drain", "/cluster/leave"];
        for route in routes.into_iter().chain([REPORT_ROUTE]) {
            // A page of another site can make a browser send these two kinds of requests without asking the server first.
            let mut of_page = Request::post(CallContext::default(), route, "{}");
            of_page.context.metadata.push("origin", "https://example.org");
            assert_eq!(head.handle(of_page).await.unwrap().status.0, 403, "{route}");
            let mut of_form = Request::post(CallContext::default(), route, "{}");
            of_form.message.content_type = ContentType::from_media_type("application/x-www-form-urlencoded");
            let response = head.handle(of_form).await.unwrap();
            assert_eq!(response.status.0, 415, "{route}");
            let text = String::from_utf8(response.message.head.to_bytes().to_vec()).unwrap();
            assert!(text.contains("content-type: application/json"), "{text}");
        }
        let mut read = Request::get(CallContext::default(), "/server_instances");
        read.context.metadata.push("origin", "https://example.org");
        assert_eq!(head.handle(read).await.unwrap().status.0, 200);
    }

    #[tokio::test(start_paused = true)]
    async fn a_registered_server_is_visible_to_both_kinds_of_clients_until_its_lease_expires() {
        let head = head();
        let (status, lease) = post(&head, "/registry/register", &registration("a", 7001, 1)).await;
        assert_eq!((status, &lease["rank"]), (200, &json!(0)));
        assert_eq!(get(&head, "/global_config_dict_yaml").await.1, json!("live: 1\n"));
        let (_, instances) = get(&head, "/server_instances").await;
        assert_eq!(instances[0]["process_name"], "a");
        assert_eq!((&instances[0]["host"], &instances[0]["port"]), (&json!("127.0.0.1"), &json!(7001)));
        assert_eq!(instances[0]["pid"], 77);
        let mut later = registration("b", 7002, 1);
        later.labels = BTreeMap::from([(START_TIME_LABEL.to_owned(), "1700000000.25".to_owned())]);
        assert_eq!(post(&head, "/registry/register", &later).await.0, 200);
        let (_, instances) = get(&head, "/server_instances").await;
        assert_eq!(instances[1]["start_time"], 1_700_000_000.25, "its own, not that of the head server");
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(get(&head, "/registry/instances?name=c").await.1, json!([]));
        tokio::time::advance(Duration::from_secs(20)).await;
        assert_eq!(post(&head, "/registry/renew", &lease).await.0, 200);
        tokio::time::advance(Duration::from_secs(31)).await;
        assert_eq!(get(&head, "/registry/instances?name=a").await.1, json!([]));
        assert_eq!(post(&head, "/registry/renew", &lease).await.0, 404);
    }

    #[cfg(feature = "cli")]
    #[tokio::test(start_paused = true)]
    async fn an_expired_lease_is_logged_with_its_server() {
        use parking_lot::Mutex;

        use tracing_subscriber::fmt::MakeWriter;

        #[derive(Clone, Default)]
        struct Log(Arc<Mutex<Vec<u8>>>);
        impl std::io::Write for Log {
            fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
                self.0.lock().extend_from_slice(bytes);
                Ok(bytes.len())
            }
            fn flush(&mut self) -> std::io::Result<()> {
                Ok(())
            }
        }
        impl<'a> MakeWriter<'a> for Log {
            type Writer = Self;
            fn make_writer(&'a self) -> Self {
                self.clone()
            }
        }

        let log = Log::default();
        let subscriber = tracing_subscriber::fmt().with_writer(log.clone()).with_ansi(false).finish();
        let _guard = tracing::subscriber::set_default(subscriber);
        let head = head();
        assert_eq!(post(&head, "/registry/register", &registration("a", 7001, 1)).await.0, 200);
        let (_, live) = post(&head, "/registry/register", &registration("b", 7002, 1)).await;
        tokio::time::advance(Duration::from_secs(20)).await;
        assert_eq!(post(&head, "/registry/renew", &live).await.0, 200);
        let logged = || String::from_utf8(log.0.lock().clone()).unwrap();
        assert!(!logged().contains("expired"), "{}", logged());
        tokio::time::advance(Duration::from_secs(11)).await;
        assert_eq!(post(&head, "/registry/renew", &live).await.0, 200);
        let text = logged();
        let line = text.lines().find(|line| line.contains("a lease has expired")).unwrap();
        assert!(
            line.contains("WARN") && line.contains("server=\"a\"") && line.contains("http://127.0.0.1:7001"),
            "{line}"
        );
        assert_eq!(text.matches("expired").count(), 1, "{text}");
    }

    /// A head server that is called through its routes.
    #[derive(Debug)]
    struct CalledHead {
        registry: Arc<dyn MemberRegistry>,
        _network: TestNetwork,
    }

    impl MemberFixture for CalledHead {
        fn registry(&self) -> Arc<dyn MemberRegistry> {
            Arc::clone(&self.registry)
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_registry_of_a_remote_head_conforms() {
        members(|| {
            let mut network = TestNetwork::new();
            network.serve("head", head());
            let endpoint = Endpoint::parse("mem://head").unwrap();
            let registry = RemoteRegistry::new(endpoint, network.client(&[]).transports().clone(), world());
            CalledHead { registry: Arc::new(registry), _network: network }
        })
        .await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_second_server_of_the_same_name_and_rank_is_refused_unless_it_is_a_newer_life() {
        let head = head();
        let at = |port, incarnation| {
            let mut registration = registration("a", port, incarnation);
            registration.replica = Some(0);
            registration
        };
        assert_eq!(post(&head, "/registry/register", &at(7001, 5)).await.0, 200);
        assert_eq!(post(&head, "/registry/register", &at(7001, 5)).await.0, 200, "a replay is not a second server");
        let (status, why) = post(&head, "/registry/register", &at(7002, 4)).await;
        assert_eq!(status, 409);
        assert!(why.as_str().unwrap().contains("replica 0 is live at http://127.0.0.1:7001"), "{why}");
        assert_eq!(post(&head, "/registry/register", &at(7002, 6)).await.0, 200);
        assert_eq!(get(&head, "/server_instances").await.1[0]["port"], 7002);
    }

    #[tokio::test(start_paused = true)]
    async fn a_watch_answers_at_the_change_or_at_the_end_of_its_wait() {
        let head = head();
        let watch = |seen| WatchRequest { name: "a".to_owned(), seen, wait_ms: 5_000 };
        assert_eq!(post(&head, "/registry/watch", &watch(None)).await.1, json!([]));
        let began = tokio::time::Instant::now();
        assert_eq!(post(&head, "/registry/watch", &watch(Some(Vec::new()))).await.1, json!([]));
        assert_eq!(began.elapsed().as_secs(), 5);
        let (seen, _) = tokio::join!(async { post(&head, "/registry/watch", &watch(Some(Vec::new()))).await }, async {
            post(&head, "/registry/register", &registration("a", 7001, 1)).await
        },);
        assert_eq!(seen.1[0]["name"], "a");
    }

    #[tokio::test(start_paused = true)]
    async fn unknown_routes_and_invalid_bodies_get_the_responses_that_clients_expect() {
        let head = head();
        assert_eq!(get(&head, "/nothing").await, (404, json!({"detail": "Not Found"})));
        assert_eq!(get(&head, "/registry/renew").await, (405, json!({"detail": "Method Not Allowed"})));
        let (status, body) = post(&head, "/registry/register", &json!({"name": 5})).await;
        assert_eq!(status, 422);
        assert!(body["detail"][0]["msg"].as_str().unwrap().contains("invalid type"), "{body}");
        let mut none = registration("a", 1, 1);
        none.endpoints = Vec::new();
        let (status, body) = post(&head, "/registry/register", &none).await;
        assert_eq!(status, 422);
        assert!(body.to_string().contains("at least one endpoint"), "{body}");
    }
}

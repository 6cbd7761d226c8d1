//! The registry of a head server, over any transport.
//!
//! | call | route | body |
//! |---|---|---|
//! | register | `POST /registry/register` | [`Registration`] → [`Lease`] |
//! | renew | `POST /registry/renew` | [`Lease`] |
//! | deregister | `POST /registry/deregister` | [`Lease`] |
//! | resolve | `GET /registry/instances?name=…` | → list of [`Instance`] |
//! | list | `GET /registry/instances` | → list of [`Instance`] |
//! | watch | `POST /registry/watch` | `{name, seen, wait_ms}` → list of [`Instance`], as soon as it differs from `seen` |
//! | join | `POST /cluster/join` | [`MemberSpec`] → [`JoinedMember`] |
//! | heartbeat | `POST /cluster/beat` | [`Heartbeat`] → [`HeartbeatReply`], when the state differs or the interval is over |
//! | leave | `POST /cluster/leave` | [`MemberLease`] |
//! | drain | `POST /cluster/drain` | `{name}` |
//! | configuration | `GET /cluster/configuration` | → [`SharedConfiguration`] |
//! | members | `GET /cluster/members` | → list of [`Member`] |
//! | roster | `POST /cluster/roster` | `{seen, wait_ms}` → [`RosterUpdate`], as soon as there is a change |

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::BoxFuture;
use futures_util::stream::{self, BoxStream, StreamExt};
use gym_core::registry::{
    Heartbeat, HeartbeatReply, Instance, JoinedMember, Lease, Member, MemberLease, MemberRegistry, MemberSpec,
    Registration, Registry, RosterUpdate, RosterVersion,
};
use gym_core::transport::{ConnectOptions, RetryPolicy, retry};
use gym_core::{CallContext, Endpoint, Error, Request, Response, Result, World};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::transport::ReconnectingPeer;
use crate::transport::Transports;

/// Timeout of one registry call.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);

/// Time after which the head server answers a watch without a change: shorter than the idle limits of proxies.
const WATCH_TIMEOUT: Duration = Duration::from_secs(20);

/// The body of `POST /registry/watch`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct WatchRequest {
    /// The name to watch.
    pub name: String,
    /// The instances that the watcher has; `None` requests an immediate answer.
    pub seen: Option<Vec<Instance>>,
    /// Maximum milliseconds to wait for a change.
    pub wait_ms: u64,
}

/// The body of `POST /cluster/roster`.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct RosterRequest {
    /// The version that the watcher has; `None` requests an immediate answer with all servers.
    pub seen: Option<RosterVersion>,
    /// Maximum milliseconds to wait for a change.
    pub wait_ms: u64,
}

/// The body of `POST /cluster/drain`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DrainRequest {
    /// The name of the member.
    pub name: String,
}

/// The configuration that a head server was given, for workers without files of their own.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedConfiguration {
    /// The text for [`ConfigLoader::base`](crate::config::ConfigLoader::base); `None` if the head server was given no server. Contains
    /// secrets.
    #[serde(default)]
    pub yaml: Option<String>,
    /// The servers that the process of the head server serves itself.
    #[serde(default)]
    pub served: Vec<String>,
}

/// The registry of a head server. Cheap to clone.
#[derive(Clone, Debug)]
pub struct RemoteRegistry {
    peer: Arc<ReconnectingPeer>,
    transports: Transports,
    world: World,
}

impl RemoteRegistry {
    /// Creates a client of the head server at `head`. The first call connects.
    #[must_use]
    pub fn new(head: Endpoint, transports: Transports, world: World) -> Self {
        Self { peer: Arc::new(ReconnectingPeer::new(vec![head], ConnectOptions::default())), transports, world }
    }

    /// Returns the endpoint of the head server.
    #[must_use]
    pub fn head(&self) -> &Endpoint {
        &self.peer.endpoints()[0]
    }

    /// Sends a request to the head server, and repeats it while that is safe.
    ///
    /// # Errors
    /// The error of the last attempt; an error status is an error.
    pub fn send<'a>(&'a self, request: &'a Request, idempotent: bool) -> BoxFuture<'a, Result<Response>> {
        Box::pin(async move {
            let mut rng = self.world.rng();
            retry(&request.context, &RetryPolicy::default(), &mut rng, idempotent, |_| async {
                self.peer.call_with(&self.transports, request, idempotent).await?.into_result()
            })
            .await
            .map_err(|error| match error.subject() {
                "" => error.about(format!("{} {}{}", request.verb, self.head(), request.route)),
                _ => error,
            })
        })
    }

    /// Returns the configuration that the head server was given.
    ///
    /// # Errors
    /// `NotFound` if the head server has no such route, as that of NeMo Gym.
    pub async fn configuration(&self, cx: &CallContext) -> Result<SharedConfiguration> {
        self.get(cx, "/cluster/configuration".to_owned()).await
    }

    /// Returns the text of `/global_config_dict_yaml`: the merged configuration with the addresses of the live servers.
    ///
    /// # Errors
    /// The error of the request; `DataLoss` if the response cannot be parsed.
    pub async fn global_configuration(&self, cx: &CallContext) -> Result<String> {
        self.get(cx, "/global_config_dict_yaml".to_owned()).await
    }

    async fn post(&self, cx: &CallContext, route: &'static str, body: &impl Serialize) -> Result<Response> {
        let json = serde_json::to_vec(body).map_err(|error| Error::internal("cannot serialise").caused_by(error))?;
        // Every call may be repeated: the head server recognizes a repeated registration, and the others change nothing twice.
        self.send(&Request::post(cx.child().at_most(CALL_TIMEOUT), route, json), true).await
    }

    /// Sends a long poll once: its caller decides what a failure means.
    async fn poll<T: DeserializeOwned>(
        &self,
        cx: &CallContext,
        route: &'static str,
        body: &impl Serialize,
    ) -> Result<T> {
        let json = serde_json::to_vec(body).map_err(|error| Error::internal("cannot serialise").caused_by(error))?;
        let response = self.peer.call(&self.transports, &Request::post(cx.clone(), route, json)).await?;
        read(&response.into_result().map_err(|error| error.about(format!("POST {}{route}", self.head())))?)
    }

    async fn get<T: DeserializeOwned>(&self, cx: &CallContext, route: String) -> Result<T> {
        let response = self.send(&Request::get(cx.child().at_most(CALL_TIMEOUT), route), true).await?;
        read(&response)
    }

    async fn changed(&self, name: &str, seen: Option<&Vec<Instance>>) -> Result<Vec<Instance>> {
        let request = WatchRequest { name: name.to_owned(), seen: seen.cloned(), wait_ms: millis(WATCH_TIMEOUT) };
        let json =
            serde_json::to_vec(&request).map_err(|error| Error::internal("cannot serialise").caused_by(error))?;
        let cx = CallContext::within(WATCH_TIMEOUT + CALL_TIMEOUT);
        read(&self.send(&Request::post(cx, "/registry/watch", json), true).await?)
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

fn read<T: DeserializeOwned>(response: &Response) -> Result<T> {
    serde_json::from_slice(&response.message.head.to_bytes())
        .map_err(|error| Error::finished(gym_core::Code::DataLoss, "the head's answer cannot be read").caused_by(error))
}

#[async_trait]
impl Registry for RemoteRegistry {
    async fn register(&self, cx: &CallContext, registration: Registration) -> Result<Lease> {
        read(&self.post(cx, "/registry/register", &registration).await?)
    }

    async fn renew(&self, cx: &CallContext, lease: &Lease) -> Result<()> {
        self.post(cx, "/registry/renew", lease).await.map(drop)
    }

    async fn deregister(&self, cx: &CallContext, lease: Lease) -> Result<()> {
        self.post(cx, "/registry/deregister", &lease).await.map(drop)
    }

    async fn resolve(&self, cx: &CallContext, name: &str) -> Result<Vec<Instance>> {
        self.get(cx, format!("/registry/instances?name={name}")).await
    }

    async fn list(&self, cx: &CallContext) -> Result<Vec<Instance>> {
        self.get(cx, "/registry/instances".to_owned()).await
    }

    fn watch(&self, name: &str) -> BoxStream<'static, Vec<Instance>> {
        let start = (self.clone(), name.to_owned(), None::<Vec<Instance>>);
        stream::unfold(start, |(registry, name, mut seen)| async move {
            loop {
                match registry.changed(&name, seen.as_ref()).await {
                    Ok(now) if seen.as_ref() != Some(&now) => {
                        seen = Some(now.clone());
                        return Some((now, (registry, name, seen)));
                    }
                    Ok(_) => {}
                    // `send` waits between its attempts; this wait covers a head server that rejects at once.
                    Err(error) => {
                        tracing::debug!(%error, "watch again");
                        tokio::time::sleep(RetryPolicy::default().backoff_max).await;
                    }
                }
            }
        })
        .boxed()
    }
}

#[async_trait]
impl MemberRegistry for RemoteRegistry {
    async fn join(&self, cx: &CallContext, spec: MemberSpec) -> Result<JoinedMember> {
        read(&self.post(cx, "/cluster/join", &spec).await?)
    }

    async fn heartbeat(&self, cx: &CallContext, heartbeat: &Heartbeat) -> Result<HeartbeatReply> {
        self.poll(cx, "/cluster/beat", heartbeat).await
    }

    async fn ping(&self, cx: &CallContext) -> Result<()> {
        self.get::<serde::de::IgnoredAny>(cx, "/livez".to_owned()).await.map(drop)
    }

    async fn leave(&self, cx: &CallContext, lease: MemberLease) -> Result<()> {
        self.post(cx, "/cluster/leave", &lease).await.map(drop)
    }

    async fn drain(&self, cx: &CallContext, name: &str) -> Result<()> {
        self.post(cx, "/cluster/drain", &DrainRequest { name: name.to_owned() }).await.map(drop)
    }

    async fn members(&self, cx: &CallContext) -> Result<Vec<Member>> {
        self.get(cx, "/cluster/members".to_owned()).await
    }

    async fn roster(&self, cx: &CallContext, seen: Option<RosterVersion>, wait: Duration) -> Result<RosterUpdate> {
        let cx = cx.child().at_most(wait + CALL_TIMEOUT);
        self.poll(&cx, "/cluster/roster", &RosterRequest { seen, wait_ms: millis(wait) }).await
    }
}

//! Registrations with leases: a lease that is not renewed within its time to live expires, and watchers are notified.
//!
//! `RegistryState` has the rules, without clock and tasks. [`MemoryRegistry`] applies them with tokio's clock. A head
//! server serves one over the network; a program with all servers in one process uses it directly.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::stream::{self, BoxStream, StreamExt};
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use crate::base::error::{Code, Error, Result};
use crate::message::{CallContext, Incarnation};
use crate::server::ServerKind;
use crate::transport::Endpoint;

/// The default lifetime of a lease without a renewal: three missed heartbeats of ten seconds.
pub const DEFAULT_TTL: Duration = Duration::from_secs(30);

/// A server's request to be listed in the registry.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Registration {
    /// The instance name of the configuration; replicas share it.
    pub name: String,
    /// The number of the replica; `None` for the lowest free rank.
    #[serde(default)]
    pub rank: Option<u32>,
    /// The role of the server.
    pub kind: ServerKind,
    /// The implementation's name, such as `simple_agent`.
    #[serde(default)]
    pub implementation: String,
    /// The addresses of the server, in order of preference.
    pub endpoints: Vec<Endpoint>,
    /// The incarnation of the server; higher than that of all earlier ones.
    #[serde(with = "incarnation")]
    pub incarnation: Incarnation,
    /// The lifetime of the lease without a renewal, in milliseconds on the wire.
    #[serde(rename = "ttl_ms", with = "millis")]
    pub ttl: Duration,
    /// Additional labels for clients, such as `pid` and `entrypoint`.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
}

impl Registration {
    /// Creates the registration of a server's first incarnation.
    ///
    /// Defaults: the lowest free rank, incarnation 1, a lease of [`DEFAULT_TTL`], no implementation name and no labels.
    /// A server that restarts must set a higher incarnation.
    #[must_use]
    pub fn new(name: impl Into<String>, kind: ServerKind, endpoints: impl Into<Vec<Endpoint>>) -> Self {
        Self {
            name: name.into(),
            rank: None,
            kind,
            implementation: String::new(),
            endpoints: endpoints.into(),
            incarnation: Incarnation(1),
            ttl: DEFAULT_TTL,
            labels: BTreeMap::new(),
        }
    }
}

/// A live server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Instance {
    /// The instance name of the configuration; replicas share it.
    pub name: String,
    /// The number of the replica.
    pub rank: u32,
    /// The role of the server.
    pub kind: ServerKind,
    /// The implementation's name, such as `simple_agent`.
    #[serde(default)]
    pub implementation: String,
    /// The addresses of the server, in order of preference.
    pub endpoints: Vec<Endpoint>,
    /// The incarnation of the server.
    #[serde(with = "incarnation")]
    pub incarnation: Incarnation,
    /// Additional labels for clients, such as `pid` and `entrypoint`.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
}

/// A registration that expires unless it is renewed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    /// The name of the instance.
    pub name: String,
    /// The number of the replica.
    pub rank: u32,
    /// The incarnation of the server.
    #[serde(with = "incarnation")]
    pub incarnation: Incarnation,
    /// The lifetime of the lease without a renewal, in milliseconds on the wire. Renew after a third of it.
    #[serde(rename = "ttl_ms", with = "millis")]
    pub ttl: Duration,
}

mod millis {
    use serde::{Deserialize, Deserializer, Serializer};
    use std::time::Duration;

    pub(super) fn serialize<S: Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
        u64::deserialize(deserializer).map(Duration::from_millis)
    }
}

mod incarnation {
    use crate::message::Incarnation;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(incarnation: &Incarnation, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(incarnation.0)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Incarnation, D::Error> {
        u64::deserialize(deserializer).map(Incarnation)
    }
}

/// Maps names to live servers. Servers register and renew; clients resolve and watch.
///
/// A call may be repeated if its response was lost: a repeated registration returns the same lease.
#[async_trait]
pub trait Registry: fmt::Debug + Send + Sync + 'static {
    /// Adds an instance. A newer incarnation replaces an older one with the same name and rank.
    ///
    /// # Errors
    /// `AlreadyExists` if the same or a newer incarnation with this name and rank is live. `InvalidArgument` if the
    /// registration has no endpoint, an invalid name, or a lifetime of 0.
    async fn register(&self, cx: &CallContext, registration: Registration) -> Result<Lease>;

    /// Renews a lease.
    ///
    /// # Errors
    /// `NotFound` if the lease has expired or was replaced: register again.
    async fn renew(&self, cx: &CallContext, lease: &Lease) -> Result<()>;

    /// Ends a lease. Succeeds if the lease has expired.
    async fn deregister(&self, cx: &CallContext, lease: Lease) -> Result<()>;

    /// Returns the live instances with this name, by rank; empty if there are none.
    async fn resolve(&self, cx: &CallContext, name: &str) -> Result<Vec<Instance>>;

    /// Returns all live instances, by name and rank.
    async fn list(&self, cx: &CallContext) -> Result<Vec<Instance>>;

    /// Returns a stream of the live instances with this name: the current ones first, then again after each change.
    fn watch(&self, name: &str) -> BoxStream<'static, Vec<Instance>>;
}

/// The rules of a registry: no clock, no tasks, no network.
#[derive(Debug, Default)]
pub(crate) struct RegistryState {
    entries: BTreeMap<(String, u32), Entry>,
}

#[derive(Debug)]
struct Entry {
    instance: Instance,
    ttl: Duration,
    expires: Instant,
}

impl RegistryState {
    /// Implements [`Registry::register`].
    ///
    /// # Errors
    /// The same errors.
    pub(crate) fn register(&mut self, now: Instant, registration: Registration) -> Result<Lease> {
        let Registration { name, rank, kind, implementation, endpoints, incarnation, ttl, labels } = registration;
        let refused = |code, why: String| Err(Error::not_started(code, why).about(format!("register {name}")));
        if name.is_empty() || name.contains(|c: char| c.is_whitespace() || c.is_control()) {
            return refused(
                Code::InvalidArgument,
                "the name is empty or contains whitespace or control characters; use a name such as math_server".into(),
            );
        }
        if endpoints.is_empty() {
            return refused(Code::InvalidArgument, "at least one endpoint is needed".into());
        }
        if ttl.is_zero() {
            return refused(Code::InvalidArgument, "ttl_ms must be more than 0".into());
        }
        self.expire(now);
        let replayed = self.entries.values().map(|entry| &entry.instance).find(|there| {
            (&there.name, there.incarnation, there.kind, &there.endpoints) == (&name, incarnation, kind, &endpoints)
        });
        let rank = rank.or_else(|| replayed.map(|there| there.rank)).unwrap_or_else(|| {
            (0..).find(|rank| !self.entries.contains_key(&(name.clone(), *rank))).unwrap_or_default()
        });
        if let Some(known) = self.entries.get(&(name.clone(), rank)) {
            let there = &known.instance;
            // A repeated registration, sent again because the response was lost, is not a second server.
            let replay = there.incarnation == incarnation && there.endpoints == endpoints && there.kind == kind;
            if there.incarnation >= incarnation && !replay {
                // All of them, because the first may be reachable within its own process only.
                let places: Vec<_> = there.endpoints.iter().map(Endpoint::as_str).collect();
                return refused(
                    Code::AlreadyExists,
                    format!(
                        "rank {rank} is live at {} with incarnation {}; stop it, or choose another name or rank",
                        places.join(" and "),
                        there.incarnation
                    ),
                );
            }
        }
        let lease = Lease { name: name.clone(), rank, incarnation, ttl };
        let instance = Instance { name: name.clone(), rank, kind, implementation, endpoints, incarnation, labels };
        self.entries.insert((name, rank), Entry { instance, ttl, expires: now + ttl });
        Ok(lease)
    }

    /// Implements [`Registry::renew`].
    ///
    /// # Errors
    /// The same errors.
    pub(crate) fn renew(&mut self, now: Instant, lease: &Lease) -> Result<()> {
        self.expire(now);
        match self.held(lease) {
            Some(entry) => {
                entry.expires = now + entry.ttl;
                Ok(())
            }
            None => Err(Error::not_started(Code::NotFound, "the lease has expired or was replaced; register again")
                .about(format!("renew {} rank {}", lease.name, lease.rank))),
        }
    }

    /// Implements [`Registry::deregister`]. Returns `true` if the lease was live.
    pub(crate) fn deregister(&mut self, lease: &Lease) -> bool {
        self.held(lease).is_some() && self.entries.remove(&(lease.name.clone(), lease.rank)).is_some()
    }

    /// Removes expired leases and returns the names that changed.
    pub(crate) fn expire(&mut self, now: Instant) -> BTreeSet<String> {
        let mut changed = BTreeSet::new();
        self.entries.retain(|(name, rank), entry| {
            let lives = entry.expires > now;
            if !lives {
                let endpoint = entry.instance.endpoints.last().map_or("", Endpoint::as_str);
                tracing::warn!(server = name, rank, ttl = ?entry.ttl, endpoint, "a lease has expired: the server did not renew it");
                changed.insert(name.clone());
            }
            lives
        });
        changed
    }

    /// Returns the time when the next lease expires, unless it is renewed.
    pub(crate) fn next_expiry(&self) -> Option<Instant> {
        self.entries.values().map(|entry| entry.expires).min()
    }

    /// Implements [`Registry::resolve`].
    pub(crate) fn resolve(&self, now: Instant, name: &str) -> Vec<Instance> {
        self.entries
            .range((name.to_owned(), 0)..=(name.to_owned(), u32::MAX))
            .filter(|(_, entry)| entry.expires > now)
            .map(|(_, entry)| entry.instance.clone())
            .collect()
    }

    /// Implements [`Registry::list`].
    pub(crate) fn list(&self, now: Instant) -> Vec<Instance> {
        self.entries.values().filter(|entry| entry.expires > now).map(|entry| entry.instance.clone()).collect()
    }

    fn held(&mut self, lease: &Lease) -> Option<&mut Entry> {
        self.entries
            .get_mut(&(lease.name.clone(), lease.rank))
            .filter(|entry| entry.instance.incarnation == lease.incarnation)
    }
}

/// A registry in the memory of one process. Cheap to clone; clones share it.
#[derive(Clone, Debug, Default)]
pub struct MemoryRegistry {
    state: Arc<Mutex<RegistryState>>,
    changed: Arc<Notify>,
}

impl MemoryRegistry {
    /// Creates an empty registry.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    fn state(&self) -> MutexGuard<'_, RegistryState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[async_trait]
impl Registry for MemoryRegistry {
    async fn register(&self, _: &CallContext, registration: Registration) -> Result<Lease> {
        let lease = self.state().register(Instant::now(), registration)?;
        self.changed.notify_waiters();
        Ok(lease)
    }

    async fn renew(&self, _: &CallContext, lease: &Lease) -> Result<()> {
        self.state().renew(Instant::now(), lease)
    }

    async fn deregister(&self, _: &CallContext, lease: Lease) -> Result<()> {
        if self.state().deregister(&lease) {
            self.changed.notify_waiters();
        }
        Ok(())
    }

    async fn resolve(&self, _: &CallContext, name: &str) -> Result<Vec<Instance>> {
        Ok(self.state().resolve(Instant::now(), name))
    }

    async fn list(&self, _: &CallContext) -> Result<Vec<Instance>> {
        Ok(self.state().list(Instant::now()))
    }

    fn watch(&self, name: &str) -> BoxStream<'static, Vec<Instance>> {
        let start = (self.clone(), name.to_owned(), None::<Vec<Instance>>);
        stream::unfold(start, |(registry, name, last)| async move {
            loop {
                let changed = registry.changed.notified();
                let (now, expiry) = {
                    let state = registry.state();
                    (state.resolve(Instant::now(), &name), state.next_expiry())
                };
                if last.as_ref() != Some(&now) {
                    return Some((now.clone(), (registry.clone(), name, Some(now))));
                }
                match expiry {
                    None => changed.await,
                    Some(expiry) => tokio::select! {
                        biased;
                        () = changed => {}
                        () = sleep_until(expiry) => {
                            registry.state().expire(Instant::now());
                        }
                    },
                }
            }
        })
        .boxed()
    }
}

//! Registrations with leases: a lease that is not renewed within its time to live expires, and watchers are notified.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::stream::BoxStream;
use serde::{Deserialize, Serialize};

use crate::base::error::Result;
use crate::message::{CallContext, Incarnation};
use crate::server::ServerKind;
use crate::transport::Endpoint;

/// The default lifetime of a lease without a renewal: three missed heartbeats of ten seconds.
pub const DEFAULT_TTL: Duration = Duration::from_secs(30);

/// A server's request to be listed in the registry.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Registration {
    /// The instance name of the configuration; replicas share it.
    pub name: String,
    /// The number of the replica; `None` for the lowest free number.
    #[serde(default, rename = "rank")]
    pub replica: Option<u32>,
    /// The role of the server.
    pub kind: ServerKind,
    /// The implementation's name, such as `simple_agent`.
    #[serde(default)]
    pub implementation: String,
    /// The addresses of the server, in order of preference.
    pub endpoints: Vec<Endpoint>,
    /// The incarnation of the server; higher than that of all earlier ones.
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
    /// Defaults: the lowest free number, incarnation 1, a lease of [`DEFAULT_TTL`], no implementation name and no labels.
    /// A server that restarts must set a higher incarnation.
    #[must_use]
    pub fn new(name: impl Into<String>, kind: ServerKind, endpoints: impl Into<Vec<Endpoint>>) -> Self {
        Self {
            name: name.into(),
            replica: None,
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
    #[serde(rename = "rank")]
    pub replica: u32,
    /// The role of the server.
    pub kind: ServerKind,
    /// The implementation's name, such as `simple_agent`.
    #[serde(default)]
    pub implementation: String,
    /// The addresses of the server, in order of preference.
    pub endpoints: Vec<Endpoint>,
    /// The incarnation of the server.
    pub incarnation: Incarnation,
    /// Additional labels for clients, such as `pid` and `entrypoint`.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// The cluster's member that has the server; `None` for a server that registered alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub member: Option<String>,
    /// `true` if the server must get no new work, because its member is joining, suspect or draining. Calls in flight go on.
    #[serde(default, skip_serializing_if = "is_false")]
    pub paused: bool,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
fn is_false(value: &bool) -> bool {
    !value
}

/// A registration that expires unless it is renewed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    /// The name of the instance.
    pub name: String,
    /// The number of the replica.
    #[serde(rename = "rank")]
    pub replica: u32,
    /// The incarnation of the server.
    pub incarnation: Incarnation,
    /// The lifetime of the lease without a renewal, in milliseconds on the wire. Renew after a third of it.
    #[serde(rename = "ttl_ms", with = "millis")]
    pub ttl: Duration,
}

pub(super) mod millis {
    use serde::{Deserialize, Deserializer, Serializer};
    use std::time::Duration;

    pub(in crate::registry) fn serialize<S: Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX))
    }

    pub(in crate::registry) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
        u64::deserialize(deserializer).map(Duration::from_millis)
    }
}

/// Maps names to live servers. Servers register and renew; clients resolve and watch.
///
/// A call may be repeated if its response was lost: a repeated registration returns the same lease.
#[async_trait]
pub trait Registry: fmt::Debug + Send + Sync + 'static {
    /// Adds an instance. A newer incarnation replaces an older one with the same name and replica.
    ///
    /// # Errors
    /// `AlreadyExists` if the same or a newer incarnation with this name and replica is live. `InvalidArgument` if the
    /// registration has no endpoint, an invalid name, or a lifetime of 0.
    async fn register(&self, cx: &CallContext, registration: Registration) -> Result<Lease>;

    /// Renews a lease.
    ///
    /// # Errors
    /// `NotFound` if the lease has expired or was replaced: register again.
    async fn renew(&self, cx: &CallContext, lease: &Lease) -> Result<()>;

    /// Ends a lease. Succeeds if the lease has expired.
    async fn deregister(&self, cx: &CallContext, lease: Lease) -> Result<()>;

    /// Returns the live instances with this name, by replica; empty if there are none.
    async fn resolve(&self, cx: &CallContext, name: &str) -> Result<Vec<Instance>>;

    /// Returns all live instances, by name and replica.
    async fn list(&self, cx: &CallContext) -> Result<Vec<Instance>>;

    /// Returns a stream of the live instances with this name: the current ones first, then again after each change.
    fn watch(&self, name: &str) -> BoxStream<'static, Vec<Instance>>;
}

//! The members of a cluster: processes that joined a head server, each with its servers.
//!
//! A member joins once, and then has a long poll in flight at all times. Each poll is a heartbeat, its response carries commands, and its end shows
//! each side that the other one is gone:
//!
//! ```text
//!            join            healthy heartbeat              drain
//!   (none) ───────► Joining ───────────────────► Serving ───────────► Draining ───► gone: it left
//!                      ▲                            │                    │
//!                      │ a heartbeat                │ connection broken, or two heartbeats missed
//!                      └───────── Suspect ◄─────────┴────────────────────┘
//!                                    │ 100 ms after the break, or the timeout after the last heartbeat;
//!                                    │ meanwhile, the head server asks it directly
//!                                    └────────────────────────────────────────────────► gone: it was lost
//! ```
//!
//! `MemberTable` (`table.rs`) has the rules, without clock and sockets.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::lease::{Instance, millis};
use super::tuning::MemberTuning;
use crate::base::World;
use crate::base::error::{Error, Result};
use crate::message::Incarnation;
use crate::server::ServerKind;
use crate::transport::Endpoint;

/// Time between two heartbeats of a member, unless it sets another one: `WORKER_HEARTBEAT_INTERVAL`.
pub const DEFAULT_HEARTBEAT_INTERVAL: Duration = Duration::from_secs(30);

/// Time after which a silent member is gone, unless it sets another one: `WORKER_TIMEOUT`.
pub const DEFAULT_MEMBER_TIMEOUT: Duration = Duration::from_secs(300);

/// Time in which a member whose connection broke may return, unless it sets another one.
pub const DEFAULT_RECONNECT_TIMEOUT: Duration = Duration::from_millis(100);

/// Missed heartbeats that make a member suspect.
pub const MISSED_MAX: u32 = 2;

/// The limits of a head server's memory. A request beyond a limit is an error with the limit.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemberLimits {
    /// Members that have joined. Default: 4,096.
    pub members_max: usize,
    /// Servers of all members, and servers that registered without a member. Default: 16,384.
    pub servers_max: usize,
    /// Bytes of the names, labels, endpoints and tuning of one member with its servers, or of one server without a member. Default: 64 KiB.
    pub member_bytes_max: usize,
    /// The longest time after which a silent member or server is gone. Default: 1 hour.
    pub timeout_max: Duration,
}

impl MemberLimits {
    /// No limits, for a registry that only its own process fills.
    pub(super) const NONE: Self = Self {
        members_max: usize::MAX,
        servers_max: usize::MAX,
        member_bytes_max: usize::MAX,
        timeout_max: Duration::MAX,
    };
}

impl Default for MemberLimits {
    fn default() -> Self {
        Self {
            members_max: 4_096,
            servers_max: 16_384,
            member_bytes_max: 64 << 10,
            timeout_max: Duration::from_secs(3_600),
        }
    }
}

/// The intervals of a member's heartbeats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberTiming {
    /// Time between two heartbeats, in milliseconds on the wire. Default: [`DEFAULT_HEARTBEAT_INTERVAL`].
    #[serde(rename = "heartbeat_ms", with = "millis")]
    pub heartbeat: Duration,
    /// Time after which a silent member is gone, in milliseconds on the wire. Default: [`DEFAULT_MEMBER_TIMEOUT`].
    #[serde(rename = "timeout_ms", with = "millis")]
    pub timeout: Duration,
    /// Time in which a member whose connection broke may return, in milliseconds on the wire. Default: [`DEFAULT_RECONNECT_TIMEOUT`].
    #[serde(rename = "reconnect_ms", with = "millis")]
    pub reconnect: Duration,
}

impl Default for MemberTiming {
    fn default() -> Self {
        Self {
            heartbeat: DEFAULT_HEARTBEAT_INTERVAL,
            timeout: DEFAULT_MEMBER_TIMEOUT,
            reconnect: DEFAULT_RECONNECT_TIMEOUT,
        }
    }
}

impl MemberTiming {
    /// Checks the intervals.
    ///
    /// # Errors
    /// `InvalidArgument` with the interval and its fix.
    pub fn check(&self, timeout_max: Duration) -> Result<()> {
        if self.heartbeat.is_zero() || self.reconnect.is_zero() {
            return Err(Error::invalid("the interval of heartbeats, and the time to reconnect, must be more than 0"));
        }
        if self.timeout < self.heartbeat * (MISSED_MAX + 1) {
            return Err(Error::invalid(format!(
                "the timeout {:?} is less than three heartbeats of {:?}, so a living worker could be declared gone\n  fix: raise \
                 WORKER_TIMEOUT or lower WORKER_HEARTBEAT_INTERVAL",
                self.timeout, self.heartbeat
            )));
        }
        if self.timeout > timeout_max {
            return Err(Error::invalid(format!(
                "the timeout {:?} is longer than the limit of {timeout_max:?}\n  fix: lower WORKER_TIMEOUT",
                self.timeout
            )));
        }
        Ok(())
    }
}

/// A server of a member.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MemberServer {
    /// The instance name of the configuration; replicas share it.
    pub name: String,
    /// The number of the replica in an earlier membership, kept if it is free; `None` for the lowest free one.
    #[serde(default, rename = "rank")]
    pub replica: Option<u32>,
    /// The role of the server.
    pub kind: ServerKind,
    /// The implementation's name, such as `simple_agent`.
    #[serde(default)]
    pub implementation: String,
    /// The addresses of the server, in order of preference, as other machines reach them.
    pub endpoints: Vec<Endpoint>,
    /// Additional labels for clients, such as `pid` and `entrypoint`.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
}

impl MemberServer {
    /// Creates a server without labels, for the lowest free number.
    #[must_use]
    pub fn new(name: impl Into<String>, kind: ServerKind, endpoints: impl Into<Vec<Endpoint>>) -> Self {
        Self {
            name: name.into(),
            replica: None,
            kind,
            implementation: String::new(),
            endpoints: endpoints.into(),
            labels: BTreeMap::new(),
        }
    }
}

/// A process that joins a cluster.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct MemberSpec {
    /// The name, unique in the cluster; by default the name of the host.
    pub name: String,
    /// The incarnation of the process; higher than that of all earlier ones.
    pub incarnation: Incarnation,
    /// The build of the program, to find members that run another one.
    #[serde(default)]
    pub build: String,
    /// The host at which other machines reach the member.
    #[serde(default)]
    pub host: String,
    /// The member's clock when it joins, in milliseconds since 1970, or 0 to tell none: the head warns of a clock that differs.
    #[serde(default)]
    pub clock_ms: u64,
    /// Additional labels, such as `pid` and `cpus`.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// The intervals of its heartbeats.
    #[serde(flatten)]
    pub timing: MemberTiming,
    /// Its servers.
    #[serde(default)]
    pub servers: Vec<MemberServer>,
    /// Its offer to worker groups, if it runs a node agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<MemberNode>,
    /// The settings that must be the same on all members, if it has libraries with such settings.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tuning: Option<MemberTuning>,
}

/// A member that starts ranks of worker groups.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MemberNode {
    /// The addresses of its agent, in order of preference, as other machines reach them.
    pub endpoints: Vec<Endpoint>,
    /// The build of the program: an agent starts worker types of its own program only.
    pub build: String,
    /// The number of GPUs that it offers.
    #[serde(default)]
    pub gpus: u32,
}

impl MemberSpec {
    /// Creates a member without servers, with the default intervals.
    #[must_use]
    pub fn new(name: impl Into<String>, incarnation: Incarnation) -> Self {
        Self {
            name: name.into(),
            incarnation,
            build: String::new(),
            host: String::new(),
            clock_ms: 0,
            labels: BTreeMap::new(),
            timing: MemberTiming::default(),
            servers: Vec::new(),
            node: None,
            tuning: None,
        }
    }

    /// Creates a member for this process, with its clock and the labels `pid` and `cpus`. Other machines reach it at `host`.
    #[must_use]
    pub fn of_this_process(
        name: impl Into<String>,
        incarnation: Incarnation,
        host: impl Into<String>,
        timing: MemberTiming,
        world: &World,
    ) -> Self {
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let labels = [("pid", std::process::id().to_string()), ("cpus", cpus.to_string())];
        Self {
            host: host.into(),
            clock_ms: clock_ms(world),
            labels: labels.into_iter().map(|(key, value)| (key.to_owned(), value)).collect(),
            timing,
            ..Self::new(name, incarnation)
        }
    }

    /// Sets the member's clock to now, unless it tells none. A member that joins again does so: its clock at the first time says nothing any more.
    pub fn tell_time(&mut self, world: &World) {
        if self.clock_ms > 0 {
            self.clock_ms = clock_ms(world);
        }
    }

    /// Returns the bytes of the texts that a head server stores.
    pub(super) fn bytes(&self) -> usize {
        let labels = |labels: &BTreeMap<String, String>| {
            labels.iter().map(|(key, value)| key.len() + value.len()).sum::<usize>()
        };
        let endpoints =
            |endpoints: &[Endpoint]| endpoints.iter().map(|endpoint| endpoint.as_str().len()).sum::<usize>();
        let servers = self.servers.iter().map(|server| {
            server.name.len() + server.implementation.len() + labels(&server.labels) + endpoints(&server.endpoints)
        });
        let node = self.node.as_ref().map_or(0, |node| node.build.len() + endpoints(&node.endpoints));
        let tuning = self.tuning.as_ref().map_or(0, MemberTuning::bytes);
        let of_process = self.name.len() + self.build.len() + self.host.len() + labels(&self.labels);
        of_process + servers.sum::<usize>() + node + tuning
    }
}

fn clock_ms(world: &World) -> u64 {
    u64::try_from(world.now().as_millis()).unwrap_or(u64::MAX)
}

/// The right of a process to be a member under its name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberLease {
    /// The name of the member.
    pub name: String,
    /// The incarnation of its process.
    pub incarnation: Incarnation,
    /// The life of the head server that granted it. A restarted head has another one.
    pub term: u64,
}

/// The response to a request to join.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JoinedMember {
    /// The lease.
    pub lease: MemberLease,
    /// The numbers of the replicas, in the order of the servers.
    #[serde(rename = "ranks")]
    pub replicas: Vec<u32>,
    /// Facts about this member that a person should know, for example that its clock differs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

/// A heartbeat.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Heartbeat {
    /// The lease.
    #[serde(flatten)]
    pub lease: MemberLease,
    /// Numbers the heartbeats of a lease; an older one than the last is ignored.
    pub seq: u64,
    /// `true` if the member has just checked its own servers and all of them responded.
    #[serde(default)]
    pub healthy: bool,
    /// `true` if the member requests that it be drained, for example after its first SIGTERM.
    #[serde(default)]
    pub draining: bool,
    /// A round trip to the head server that the member has measured since its last heartbeat, in microseconds. The member measures, because the
    /// head server cannot call one behind a router.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub round_trip_us: Option<u64>,
    /// The state that the member knows; the response arrives as soon as it has another one, or when a heartbeat is due.
    pub known: MemberState,
}

/// The response to a heartbeat: what the member has to know. It describes a state, so a lost response changes nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeartbeatReply {
    /// The life of the head server.
    pub term: u64,
    /// The state of the member. `Joining` asks for a healthy heartbeat, `Draining` to finish and leave.
    pub state: MemberState,
}

/// The state of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemberState {
    /// Has joined or returned; serves after a heartbeat says that it is healthy.
    Joining,
    /// Gets work.
    Serving,
    /// Gets no new work: its connection broke, or it has missed two heartbeats.
    Suspect,
    /// Finishes its work, gets no new work, and then leaves.
    Draining,
    /// Has left or was lost. Its calls in flight have ended, and its work has moved.
    Gone,
}

impl MemberState {
    /// Returns the name, as in a configuration and on the wire.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Joining => "joining",
            Self::Serving => "serving",
            Self::Suspect => "suspect",
            Self::Draining => "draining",
            Self::Gone => "gone",
        }
    }
}

impl fmt::Display for MemberState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A member, as a roster lists it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Member {
    /// The specification with which the member joined.
    #[serde(flatten)]
    pub spec: MemberSpec,
    /// Its state.
    pub state: MemberState,
    /// The reason of the state, for people: `no heartbeat for 60.0 s`; empty if there is none.
    #[serde(default)]
    pub reason: String,
    /// Milliseconds since its last heartbeat. Of a member that is gone: when it was removed.
    pub silent_ms: u64,
    /// Milliseconds for which it has been in its state. `None` from a head server of an earlier version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since_ms: Option<u64>,
    /// Milliseconds until a suspect member is gone, unless it sends a heartbeat. `None` in other states.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gone_in_ms: Option<u64>,
}

impl Member {
    /// Returns the reason of the state, with the time that a suspect member has left; empty if there is none.
    #[must_use]
    pub fn why(&self) -> String {
        match self.gone_in_ms {
            Some(left) => with_time_left(&self.reason, Duration::from_millis(left)),
            None => self.reason.clone(),
        }
    }
}

/// Adds the time after which a suspect member is gone to the reason why it is suspect.
fn with_time_left(reason: &str, left: Duration) -> String {
    format!("{reason}; gone in {:.0} s unless it returns", left.as_secs_f64())
}

/// A member that is suspect, as an update of the roster lists it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SuspectMember {
    /// Its name.
    pub name: String,
    /// The incarnation of its process.
    pub incarnation: Incarnation,
    /// The reason, for people: `no heartbeat for 60.0 s`.
    pub reason: String,
    /// Time until it is gone, unless it sends a heartbeat, in milliseconds on the wire.
    #[serde(rename = "gone_in_ms", with = "millis")]
    pub gone_in: Duration,
}

impl SuspectMember {
    /// Returns the reason, with the time that is left.
    #[must_use]
    pub fn why(&self) -> String {
        with_time_left(&self.reason, self.gone_in)
    }
}

/// A server that is gone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GoneServer {
    /// The instance name.
    pub name: String,
    /// The number of the replica.
    #[serde(rename = "rank")]
    pub replica: u32,
    /// The incarnation that is gone.
    pub incarnation: Incarnation,
    /// The member that had the server, which is gone too; `None` for a server that registered alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub member: Option<String>,
    /// The reason, for people, if the server was lost: `worker-2 is gone: its connection broke`. Calls in flight to it then have no response to
    /// wait for. `None` if it left, after its last response.
    pub lost: Option<String>,
}

/// A change of the servers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ServerChange {
    /// A server that is new or has changed.
    Present(Instance),
    /// A server that is gone.
    Gone(GoneServer),
}

impl ServerChange {
    /// Returns the server if it is gone.
    #[must_use]
    pub fn gone(&self) -> Option<&GoneServer> {
        match self {
            Self::Gone(gone) => Some(gone),
            Self::Present(_) => None,
        }
    }
}

/// A point in the history of the servers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RosterVersion {
    /// The life of the head server.
    pub term: u64,
    /// The number of changes in that life.
    pub version: u64,
}

/// The servers of a cluster, or their changes since a version.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RosterUpdate {
    /// The version after these changes.
    #[serde(flatten)]
    pub now: RosterVersion,
    /// `true` if `changes` lists all servers. Servers that are not listed are gone, unless the head server recovers.
    pub complete: bool,
    /// `true` while members of an earlier life of the head server may return. Known servers stay known.
    pub recovering: bool,
    /// All members that are suspect and have servers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub suspects: Vec<SuspectMember>,
    /// The changes, in order.
    pub changes: Vec<ServerChange>,
}

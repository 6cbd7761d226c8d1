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
//!                                    │ 100 ms after the break, or the timeout after the last heartbeat
//!                                    └────────────────────────────────────────────────► gone: it was lost
//! ```
//!
//! `MemberTable` has the rules, without clock and sockets.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::lease::{Instance, millis};
use crate::base::World;
use crate::base::error::{Code, Error, Result};
use crate::message::Incarnation;
use crate::server::ServerKind;
use crate::transport::Endpoint;

/// Time between two heartbeats of a member, unless it sets another one: `WORKER_HEARTBEAT_INTERVAL`.
pub const DEFAULT_HEARTBEAT: Duration = Duration::from_secs(30);

/// Time after which a silent member is gone, unless it sets another one: `WORKER_TIMEOUT`.
pub const DEFAULT_MEMBER_TIMEOUT: Duration = Duration::from_secs(300);

/// Time in which a member whose connection broke may return, unless it sets another one.
pub const DEFAULT_RECONNECT: Duration = Duration::from_millis(100);

/// Missed heartbeats that make a member suspect.
const MISSED_MAX: u32 = 2;

/// Members that left or were lost, which a roster still lists.
const GONE_MAX: usize = 256;

/// Changes of servers that a watcher can read one by one; an older watcher reads all servers.
const CHANGES_MAX: usize = 4_096;

/// The limits of a head server's memory. A request beyond a limit is an error with the limit.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemberLimits {
    /// Members that have joined. Default: 4,096.
    pub members_max: usize,
    /// Servers of all members, and servers that registered without a member. Default: 16,384.
    pub servers_max: usize,
    /// Bytes of the names, labels and endpoints of one member with its servers, or of one server without a member. Default: 64 KiB.
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
    /// Time between two heartbeats, in milliseconds on the wire. Default: [`DEFAULT_HEARTBEAT`].
    #[serde(rename = "heartbeat_ms", with = "millis")]
    pub heartbeat: Duration,
    /// Time after which a silent member is gone, in milliseconds on the wire. Default: [`DEFAULT_MEMBER_TIMEOUT`].
    #[serde(rename = "timeout_ms", with = "millis")]
    pub timeout: Duration,
    /// Time in which a member whose connection broke may return, in milliseconds on the wire. Default: [`DEFAULT_RECONNECT`].
    #[serde(rename = "reconnect_ms", with = "millis")]
    pub reconnect: Duration,
}

impl Default for MemberTiming {
    fn default() -> Self {
        Self { heartbeat: DEFAULT_HEARTBEAT, timeout: DEFAULT_MEMBER_TIMEOUT, reconnect: DEFAULT_RECONNECT }
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
    #[serde(default)]
    pub rank: Option<u32>,
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

/// A process that joins a cluster.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
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
    /// The member's clock, in milliseconds since 1970: the head warns of a clock that differs.
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
    /// What it offers to worker groups, if it runs a node agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<MemberNode>,
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
            clock_ms: u64::try_from(world.now().as_millis()).unwrap_or(u64::MAX),
            labels: labels.into_iter().map(|(key, value)| (key.to_owned(), value)).collect(),
            timing,
            ..Self::new(name, incarnation)
        }
    }

    /// Returns the bytes of the texts that a head server stores.
    fn bytes(&self) -> usize {
        let labels = |labels: &BTreeMap<String, String>| {
            labels.iter().map(|(key, value)| key.len() + value.len()).sum::<usize>()
        };
        let endpoints =
            |endpoints: &[Endpoint]| endpoints.iter().map(|endpoint| endpoint.as_str().len()).sum::<usize>();
        let servers = self.servers.iter().map(|server| {
            server.name.len() + server.implementation.len() + labels(&server.labels) + endpoints(&server.endpoints)
        });
        let node = self.node.as_ref().map_or(0, |node| node.build.len() + endpoints(&node.endpoints));
        self.name.len() + self.build.len() + self.host.len() + labels(&self.labels) + servers.sum::<usize>() + node
    }
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
    pub ranks: Vec<u32>,
    /// What a person should know about this member, for example that its clock differs.
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
    /// What the member said when it joined.
    #[serde(flatten)]
    pub spec: MemberSpec,
    /// Its state.
    pub state: MemberState,
    /// The reason of the state, for people: `2 heartbeats missed`; empty if there is none.
    #[serde(default)]
    pub reason: String,
    /// Milliseconds since its last heartbeat.
    pub silent_ms: u64,
}

/// A server that is gone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GoneServer {
    /// The instance name.
    pub name: String,
    /// The number of the replica.
    pub rank: u32,
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
    /// `true` while the head server has just started, and members may not have returned yet. Known servers stay known.
    pub recovering: bool,
    /// The changes, in order.
    pub changes: Vec<ServerChange>,
}

/// A transition of a member's state, for logs and metrics.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MemberEvent {
    pub(crate) name: String,
    pub(crate) from: Option<MemberState>,
    pub(crate) to: MemberState,
    pub(crate) reason: String,
    /// The member did not leave by itself.
    pub(crate) lost: bool,
}

/// The rules of membership: no clock, no tasks, no network.
#[derive(Debug)]
pub(crate) struct MemberTable {
    term: u64,
    limits: MemberLimits,
    members: BTreeMap<String, Entry>,
    /// Servers by name and replica.
    servers: BTreeMap<(String, u32), Instance>,
    gone: VecDeque<Member>,
    changes: VecDeque<ServerChange>,
    version: u64,
    /// The end of the time in which members return after a start of the head.
    recovers_until: Option<Instant>,
}

#[derive(Debug)]
struct Entry {
    spec: MemberSpec,
    state: MemberState,
    /// A request to drain outlives a suspicion.
    drain: bool,
    reason: String,
    heard: Instant,
    seq: u64,
    /// The connection broke at this time, and no heartbeat has arrived since.
    broken: Option<Instant>,
    ranks: Vec<u32>,
}

impl Entry {
    fn lease(&self, term: u64) -> MemberLease {
        MemberLease { name: self.spec.name.clone(), incarnation: self.spec.incarnation, term }
    }

    /// The time at which the member becomes suspect without another heartbeat.
    fn suspect_at(&self) -> Instant {
        self.heard + self.spec.timing.heartbeat * MISSED_MAX
    }

    fn gone_at(&self) -> Instant {
        let silent = self.heard + self.spec.timing.timeout;
        self.broken.map_or(silent, |broken| silent.min(broken + self.spec.timing.reconnect))
    }

    fn next_change(&self) -> Instant {
        if self.state == MemberState::Suspect { self.gone_at() } else { self.suspect_at().min(self.gone_at()) }
    }
}

impl MemberTable {
    pub(crate) fn new(term: u64, limits: MemberLimits) -> Self {
        Self {
            term,
            limits,
            members: BTreeMap::new(),
            servers: BTreeMap::new(),
            gone: VecDeque::new(),
            changes: VecDeque::new(),
            version: 0,
            recovers_until: None,
        }
    }

    pub(crate) fn recover_until(&mut self, until: Instant) {
        self.recovers_until = Some(until);
    }

    /// Adds a member. A repeated request of the same process returns the same lease.
    pub(crate) fn join(&mut self, now: Instant, spec: MemberSpec) -> Result<(JoinedMember, Vec<MemberEvent>)> {
        let refused = |code, why: String| Err(Error::not_started(code, why).about(format!("join as {}", spec.name)));
        if spec.name.is_empty() || spec.name.contains(|c: char| c.is_whitespace() || c.is_control()) {
            return refused(
                Code::InvalidArgument,
                "the name is empty or contains whitespace or control characters; set another one with --name"
                    .to_owned(),
            );
        }
        spec.timing.check(self.limits.timeout_max)?;
        if let Some(server) = spec.servers.iter().find(|server| server.endpoints.is_empty() || server.name.is_empty()) {
            return refused(Code::InvalidArgument, format!("server `{}` has no name or no endpoint", server.name));
        }
        let bytes = spec.bytes();
        if bytes > self.limits.member_bytes_max {
            let max = self.limits.member_bytes_max;
            return refused(
                Code::InvalidArgument,
                format!("its names, labels and endpoints have {bytes} bytes; the limit is {max}"),
            );
        }
        let mut events = self.tick(now);
        if let Some(known) = self.members.get_mut(&spec.name) {
            if known.spec.incarnation == spec.incarnation && known.spec.host == spec.host {
                // Sent again because the response was lost, or joined again because the member doubts its lease.
                known.heard = now;
                known.broken = None;
                return Ok((
                    JoinedMember { lease: known.lease(self.term), ranks: known.ranks.clone(), warnings: Vec::new() },
                    events,
                ));
            }
            let replaced = known.spec.incarnation < spec.incarnation && known.state == MemberState::Suspect;
            if !replaced {
                return refused(
                    Code::AlreadyExists,
                    format!(
                        "a {} member has this name at host `{}` (incarnation {})\n  fix: stop it, or set another name with --name",
                        known.state, known.spec.host, known.spec.incarnation
                    ),
                );
            }
            events.extend(self.remove(now, &spec.name, "a newer process with its name has joined", true));
        }
        if self.members.len() >= self.limits.members_max {
            let max = self.limits.members_max;
            return refused(Code::ResourceExhausted, format!("the cluster has its maximum of {max} members"));
        }
        if self.servers.len().saturating_add(spec.servers.len()) > self.limits.servers_max {
            let max = self.limits.servers_max;
            return refused(Code::ResourceExhausted, format!("the cluster has its maximum of {max} servers"));
        }
        let ranks: Vec<u32> = spec.servers.iter().map(|server| self.place(server, &spec)).collect();
        let name = spec.name.clone();
        let entry = Entry {
            spec,
            state: MemberState::Joining,
            drain: false,
            reason: String::new(),
            heard: now,
            seq: 0,
            broken: None,
            ranks: ranks.clone(),
        };
        let lease = entry.lease(self.term);
        self.members.insert(name.clone(), entry);
        events.push(MemberEvent { name, from: None, to: MemberState::Joining, reason: String::new(), lost: false });
        Ok((JoinedMember { lease, ranks, warnings: Vec::new() }, events))
    }

    /// Lists a server under the lowest free rank of its name, not serving yet.
    fn place(&mut self, server: &MemberServer, member: &MemberSpec) -> u32 {
        let free = server.rank.filter(|rank| self.server(&server.name, *rank).is_none());
        let rank = free.unwrap_or_else(|| self.lowest_free_rank(&server.name));
        self.put(Instance {
            name: server.name.clone(),
            rank,
            kind: server.kind,
            implementation: server.implementation.clone(),
            endpoints: server.endpoints.clone(),
            incarnation: member.incarnation,
            labels: server.labels.clone(),
            member: Some(member.name.clone()),
            paused: true,
        });
        rank
    }

    pub(super) fn lowest_free_rank(&self, name: &str) -> u32 {
        (0..).find(|rank| self.server(name, *rank).is_none()).unwrap_or_default()
    }

    /// Lists a server, or replaces the one with its name and rank.
    pub(super) fn put(&mut self, instance: Instance) {
        self.servers.insert((instance.name.clone(), instance.rank), instance.clone());
        self.record(ServerChange::Present(instance));
    }

    /// Removes a server, with the reason if it was lost.
    pub(super) fn take(&mut self, key: &(String, u32), lost: Option<&str>) {
        let Some(Instance { name, rank, incarnation, member, .. }) = self.servers.remove(key) else { return };
        let lost = lost.map(str::to_owned);
        self.record(ServerChange::Gone(GoneServer { name, rank, incarnation, member, lost }));
    }

    pub(super) fn server(&self, name: &str, rank: u32) -> Option<&Instance> {
        self.servers.get(&(name.to_owned(), rank))
    }

    pub(super) fn server_count(&self) -> usize {
        self.servers.len()
    }

    pub(super) fn limits(&self) -> &MemberLimits {
        &self.limits
    }

    fn record(&mut self, change: ServerChange) {
        self.version += 1;
        if self.changes.len() == CHANGES_MAX {
            self.changes.pop_front();
        }
        self.changes.push_back(change);
    }

    /// Records a heartbeat, and returns the member's state.
    pub(crate) fn beat(&mut self, now: Instant, beat: &Heartbeat) -> Result<(MemberState, Vec<MemberEvent>)> {
        let mut events = self.tick(now);
        let Some(entry) = self.held(&beat.lease) else { return Err(unknown(&beat.lease)) };
        if beat.seq < entry.seq {
            return Ok((entry.state, events));
        }
        (entry.seq, entry.heard, entry.broken) = (beat.seq, now, None);
        entry.drain |= beat.draining;
        let to = match (entry.drain, entry.state) {
            (true, _) => MemberState::Draining,
            // Probed before it serves: what it missed may have been long.
            (false, MemberState::Suspect) => MemberState::Joining,
            (false, MemberState::Joining) if beat.healthy => MemberState::Serving,
            (false, state) => state,
        };
        events.extend(self.enter(&beat.lease.name, to, ""));
        Ok((to, events))
    }

    /// Records that the connection of a heartbeat broke.
    pub(crate) fn connection_lost(&mut self, now: Instant, lease: &MemberLease, seq: u64) -> Vec<MemberEvent> {
        let mut events = self.tick(now);
        let Some(entry) = self.held(lease) else { return events };
        // A newer heartbeat has arrived over another connection.
        if entry.seq == seq {
            entry.broken = Some(now);
            events.extend(self.enter(&lease.name, MemberState::Suspect, "its connection broke"));
        }
        events
    }

    /// Ends a membership. Succeeds if it has ended.
    pub(crate) fn leave(&mut self, now: Instant, lease: &MemberLease) -> Vec<MemberEvent> {
        let mut events = self.tick(now);
        if self.held(lease).is_some() {
            events.extend(self.remove(now, &lease.name, "it left", false));
        }
        events
    }

    /// Requests that a member finish its work and leave.
    pub(crate) fn drain(&mut self, now: Instant, name: &str) -> Result<Vec<MemberEvent>> {
        let mut events = self.tick(now);
        let Some(entry) = self.members.get_mut(name) else {
            let names: Vec<&str> = self.members.keys().map(String::as_str).collect();
            let known = if names.is_empty() {
                "the cluster has no members".to_owned()
            } else {
                format!("the members are {}", names.join(", "))
            };
            return Err(Error::not_started(Code::NotFound, format!("no member has this name; {known}"))
                .about(format!("drain {name}")));
        };
        entry.drain = true;
        if entry.state != MemberState::Suspect {
            events.extend(self.enter(name, MemberState::Draining, "it was asked to drain"));
        }
        Ok(events)
    }

    /// Applies all that is due.
    pub(crate) fn tick(&mut self, now: Instant) -> Vec<MemberEvent> {
        let due = |entry: &&Entry| entry.next_change() <= now;
        let names: Vec<String> = self.members.values().filter(due).map(|entry| entry.spec.name.clone()).collect();
        let mut events = Vec::new();
        for name in names {
            let entry = &self.members[&name];
            let reason = match entry.broken {
                Some(_) => "its connection broke".to_owned(),
                None => format!("no heartbeat for {:.1} s", now.saturating_duration_since(entry.heard).as_secs_f64()),
            };
            if entry.gone_at() <= now {
                events.extend(self.remove(now, &name, &reason, true));
            } else {
                events.extend(self.enter(&name, MemberState::Suspect, &reason));
            }
        }
        if self.recovers_until.is_some_and(|until| until <= now) {
            self.recovers_until = None;
            // Watchers learn that servers which did not return are gone.
            self.version += 1;
            self.changes.clear();
        }
        events
    }

    /// Returns the time of the next change without further input.
    pub(crate) fn next_change(&self) -> Option<Instant> {
        self.members.values().map(Entry::next_change).chain(self.recovers_until).min()
    }

    fn enter(&mut self, name: &str, to: MemberState, reason: &str) -> Option<MemberEvent> {
        let entry = self.members.get_mut(name)?;
        let from = std::mem::replace(&mut entry.state, to);
        if from == to {
            return None;
        }
        reason.clone_into(&mut entry.reason);
        let servers: Vec<(String, u32)> =
            entry.spec.servers.iter().zip(&entry.ranks).map(|(server, rank)| (server.name.clone(), *rank)).collect();
        let paused = to != MemberState::Serving;
        for key in servers {
            if let Some(instance) = self.servers.get(&key).filter(|instance| instance.paused != paused) {
                self.put(Instance { paused, ..instance.clone() });
            }
        }
        Some(MemberEvent { name: name.to_owned(), from: Some(from), to, reason: reason.to_owned(), lost: false })
    }

    fn remove(&mut self, now: Instant, name: &str, reason: &str, lost: bool) -> Option<MemberEvent> {
        let entry = self.members.remove(name)?;
        let why = lost.then(|| format!("{name} is gone: {reason}"));
        for (server, rank) in entry.spec.servers.iter().zip(&entry.ranks) {
            self.take(&(server.name.clone(), *rank), why.as_deref());
        }
        if self.gone.len() == GONE_MAX {
            self.gone.pop_front();
        }
        let from = entry.state;
        self.gone.push_back(Member {
            silent_ms: silent_ms(now, entry.heard),
            spec: entry.spec,
            state: MemberState::Gone,
            reason: reason.to_owned(),
        });
        Some(MemberEvent {
            name: name.to_owned(),
            from: Some(from),
            to: MemberState::Gone,
            reason: reason.to_owned(),
            lost,
        })
    }

    fn held(&mut self, lease: &MemberLease) -> Option<&mut Entry> {
        let term = self.term;
        self.members
            .get_mut(&lease.name)
            .filter(|entry| entry.spec.incarnation == lease.incarnation && lease.term == term)
    }

    pub(super) fn heartbeat_of(&self, lease: &MemberLease) -> Option<Duration> {
        self.members.get(&lease.name).map(|entry| entry.spec.timing.heartbeat)
    }

    pub(super) fn state_of(&self, lease: &MemberLease) -> Option<MemberState> {
        let entry = self.members.get(&lease.name);
        entry
            .filter(|entry| entry.spec.incarnation == lease.incarnation && lease.term == self.term)
            .map(|entry| entry.state)
    }

    /// Returns the members, and those that left or were lost.
    pub(crate) fn members(&self, now: Instant) -> Vec<Member> {
        let live = self.members.values().map(|entry| Member {
            spec: entry.spec.clone(),
            state: entry.state,
            reason: entry.reason.clone(),
            silent_ms: silent_ms(now, entry.heard),
        });
        // A process that returned is no longer gone.
        let gone = self.gone.iter().filter(|gone| !self.members.contains_key(&gone.spec.name)).cloned();
        live.chain(gone).collect()
    }

    /// Returns the servers of the members with this name, by rank.
    pub(crate) fn resolve<'a>(&'a self, name: &str) -> impl Iterator<Item = &'a Instance> + use<'a> {
        self.servers.range((name.to_owned(), 0)..=(name.to_owned(), u32::MAX)).map(|(_, instance)| instance)
    }

    pub(crate) fn servers(&self) -> impl Iterator<Item = &Instance> {
        self.servers.values()
    }

    pub(crate) fn version(&self) -> RosterVersion {
        RosterVersion { term: self.term, version: self.version }
    }

    /// Returns the changes since a version; all servers if it is unknown or too old.
    pub(crate) fn since(&self, seen: Option<RosterVersion>) -> RosterUpdate {
        let recovering = self.recovers_until.is_some();
        let missed = seen
            .filter(|seen| seen.term == self.term)
            .and_then(|seen| usize::try_from(self.version.checked_sub(seen.version)?).ok())
            .filter(|missed| *missed <= self.changes.len());
        let changes = match missed {
            Some(missed) => self.changes.iter().skip(self.changes.len() - missed).cloned().collect(),
            None => self.servers.values().cloned().map(ServerChange::Present).collect(),
        };
        RosterUpdate { now: self.version(), complete: missed.is_none(), recovering, changes }
    }
}

fn silent_ms(now: Instant, heard: Instant) -> u64 {
    u64::try_from(now.saturating_duration_since(heard).as_millis()).unwrap_or(u64::MAX)
}

pub(super) fn unknown(lease: &MemberLease) -> Error {
    Error::not_started(Code::NotFound, "the head server does not have this member; join again")
        .about(format!("heartbeat of {}", lease.name))
}

//! The rules of membership, without clock and sockets: who is a member, in which state, and with which servers.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use tokio::time::Instant;

use super::lease::Instance;
use super::member::{
    GoneServer, Heartbeat, JoinedMember, MISSED_MAX, Member, MemberLease, MemberLimits, MemberServer, MemberSpec,
    MemberState, RosterUpdate, RosterVersion, ServerChange, SuspectMember,
};
use super::tuning::MemberTuning;
use crate::base::error::{Code, Error, Result};
use crate::message::Incarnation;

/// Members that left or were lost, which a roster still lists.
const GONE_MAX: usize = 256;

/// Changes of servers that a watcher can read one by one; an older watcher reads all servers.
const CHANGES_MAX: usize = 4_096;

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
    /// Members that left or were lost, and when.
    gone: VecDeque<(Member, Instant)>,
    changes: VecDeque<ServerChange>,
    version: u64,
    /// The end of the time in which members return after a start of the head.
    recovers_until: Option<Instant>,
}

#[derive(Debug)]
struct Entry {
    spec: MemberSpec,
    state: MemberState,
    /// The time at which it entered the state.
    since: Instant,
    /// A request to drain outlives a suspicion.
    drain: bool,
    reason: String,
    /// The result of a direct question to a suspect member; empty before.
    asked: String,
    heard: Instant,
    seq: u64,
    /// The connection broke at this time, and no heartbeat has arrived since.
    broken: Option<Instant>,
    replicas: Vec<u32>,
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

    /// Returns the reason of the state, with what the member did when it was asked.
    fn why(&self) -> String {
        if self.asked.is_empty() { self.reason.clone() } else { format!("{}; {}", self.reason, self.asked) }
    }

    /// Returns the member as a roster lists it.
    fn member(&self, now: Instant, state: MemberState) -> Member {
        let suspect = state == MemberState::Suspect;
        Member {
            spec: self.spec.clone(),
            state,
            reason: self.why(),
            silent_ms: millis(now.saturating_duration_since(self.heard)),
            since_ms: Some(millis(now.saturating_duration_since(self.since))),
            gone_in_ms: suspect.then(|| millis(self.gone_at().saturating_duration_since(now))),
        }
    }

    /// Returns the names and replicas of its servers.
    fn server_keys(&self) -> Vec<(String, u32)> {
        self.spec.servers.iter().zip(&self.replicas).map(|(server, replica)| (server.name.clone(), *replica)).collect()
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
        spec.tuning.as_ref().map_or(Ok(()), MemberTuning::check)?;
        if let Some(server) = spec.servers.iter().find(|server| server.endpoints.is_empty() || server.name.is_empty()) {
            return refused(Code::InvalidArgument, format!("server `{}` has no name or no endpoint", server.name));
        }
        let bytes = spec.bytes();
        if bytes > self.limits.member_bytes_max {
            let max = self.limits.member_bytes_max;
            return refused(
                Code::InvalidArgument,
                format!("its names, labels, endpoints and tuning have {bytes} bytes; the limit is {max}"),
            );
        }
        let mut events = self.tick(now);
        if let Some(known) = self.members.get_mut(&spec.name) {
            if known.spec.incarnation == spec.incarnation && known.spec.host == spec.host {
                // Sent again because the response was lost, or joined again because the member doubts its lease.
                known.heard = now;
                known.broken = None;
                known.spec.clock_ms = spec.clock_ms;
                return Ok((
                    JoinedMember {
                        lease: known.lease(self.term),
                        replicas: known.replicas.clone(),
                        warnings: Vec::new(),
                    },
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
        let replicas: Vec<u32> = spec.servers.iter().map(|server| self.place(server, &spec)).collect();
        let name = spec.name.clone();
        let entry = Entry {
            spec,
            state: MemberState::Joining,
            since: now,
            drain: false,
            reason: String::new(),
            asked: String::new(),
            heard: now,
            seq: 0,
            broken: None,
            replicas: replicas.clone(),
        };
        let lease = entry.lease(self.term);
        self.members.insert(name.clone(), entry);
        events.push(MemberEvent { name, from: None, to: MemberState::Joining, reason: String::new(), lost: false });
        Ok((JoinedMember { lease, replicas, warnings: Vec::new() }, events))
    }

    /// Lists a server under the lowest free number of its name, not serving yet.
    fn place(&mut self, server: &MemberServer, member: &MemberSpec) -> u32 {
        let free = server.replica.filter(|replica| self.server(&server.name, *replica).is_none());
        let replica = free.unwrap_or_else(|| self.lowest_free_replica(&server.name));
        self.put(Instance {
            name: server.name.clone(),
            replica,
            kind: server.kind,
            implementation: server.implementation.clone(),
            endpoints: server.endpoints.clone(),
            incarnation: member.incarnation,
            labels: server.labels.clone(),
            member: Some(member.name.clone()),
            paused: true,
        });
        replica
    }

    pub(super) fn lowest_free_replica(&self, name: &str) -> u32 {
        (0..).find(|replica| self.server(name, *replica).is_none()).unwrap_or_default()
    }

    /// Lists a server, or replaces the one with its name and replica.
    pub(super) fn put(&mut self, instance: Instance) {
        self.servers.insert((instance.name.clone(), instance.replica), instance.clone());
        self.record(ServerChange::Present(instance));
    }

    /// Removes a server, with the reason if it was lost.
    pub(super) fn take(&mut self, key: &(String, u32), lost: Option<&str>) {
        let Some(Instance { name, replica, incarnation, member, .. }) = self.servers.remove(key) else { return };
        let lost = lost.map(str::to_owned);
        self.record(ServerChange::Gone(GoneServer { name, replica, incarnation, member, lost }));
    }

    pub(super) fn server(&self, name: &str, replica: u32) -> Option<&Instance> {
        self.servers.get(&(name.to_owned(), replica))
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
    pub(crate) fn heartbeat(&mut self, now: Instant, heartbeat: &Heartbeat) -> Result<(MemberState, Vec<MemberEvent>)> {
        let mut events = self.tick(now);
        let Some(entry) = self.held(&heartbeat.lease) else { return Err(unknown(&heartbeat.lease)) };
        if heartbeat.seq < entry.seq {
            return Ok((entry.state, events));
        }
        (entry.seq, entry.heard, entry.broken) = (heartbeat.seq, now, None);
        entry.drain |= heartbeat.draining;
        let to = match (entry.drain, entry.state) {
            (true, _) => MemberState::Draining,
            // Probed before it serves: what it missed may have been long.
            (false, MemberState::Suspect) => MemberState::Joining,
            (false, MemberState::Joining) if heartbeat.healthy => MemberState::Serving,
            (false, state) => state,
        };
        events.extend(self.enter(now, &heartbeat.lease.name, to, ""));
        Ok((to, events))
    }

    /// Records that the connection of a heartbeat broke.
    pub(crate) fn connection_lost(&mut self, now: Instant, lease: &MemberLease, seq: u64) -> Vec<MemberEvent> {
        let mut events = self.tick(now);
        let Some(entry) = self.held(lease) else { return events };
        // A newer heartbeat has arrived over another connection.
        if entry.seq == seq {
            entry.broken = Some(now);
            events.extend(self.enter(now, &lease.name, MemberState::Suspect, "its connection broke"));
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
            events.extend(self.enter(now, name, MemberState::Draining, "it was asked to drain"));
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
                events.extend(self.enter(now, &name, MemberState::Suspect, &reason));
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

    /// Notes what a suspect member did when it was asked directly. Returns `false` if it is not suspect, or nothing is new.
    pub(crate) fn note_asked(&mut self, name: &str, incarnation: Incarnation, asked: &str) -> bool {
        let suspect = self.members.get_mut(name).filter(|entry| {
            entry.state == MemberState::Suspect && entry.spec.incarnation == incarnation && entry.asked != asked
        });
        let Some(entry) = suspect else { return false };
        asked.clone_into(&mut entry.asked);
        // Watchers learn it with an update of its servers.
        for key in entry.server_keys() {
            if let Some(server) = self.servers.get(&key).cloned() {
                self.put(server);
            }
        }
        true
    }

    fn enter(&mut self, now: Instant, name: &str, to: MemberState, reason: &str) -> Option<MemberEvent> {
        let entry = self.members.get_mut(name)?;
        let from = std::mem::replace(&mut entry.state, to);
        if from == to {
            return None;
        }
        reason.clone_into(&mut entry.reason);
        entry.asked.clear();
        entry.since = now;
        let paused = to != MemberState::Serving;
        for key in entry.server_keys() {
            if let Some(instance) = self.servers.get(&key).filter(|instance| instance.paused != paused) {
                self.put(Instance { paused, ..instance.clone() });
            }
        }
        Some(MemberEvent { name: name.to_owned(), from: Some(from), to, reason: reason.to_owned(), lost: false })
    }

    fn remove(&mut self, now: Instant, name: &str, reason: &str, lost: bool) -> Option<MemberEvent> {
        let entry = self.members.remove(name)?;
        let why = lost.then(|| format!("{name} is gone: {reason}"));
        for (server, replica) in entry.spec.servers.iter().zip(&entry.replicas) {
            self.take(&(server.name.clone(), *replica), why.as_deref());
        }
        if self.gone.len() == GONE_MAX {
            self.gone.pop_front();
        }
        let from = entry.state;
        self.gone.push_back((Member { reason: reason.to_owned(), ..entry.member(now, MemberState::Gone) }, now));
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
        let live = self.members.values().map(|entry| entry.member(now, entry.state));
        // A process that returned is no longer gone.
        let gone = self.gone.iter().filter(|(gone, _)| !self.members.contains_key(&gone.spec.name));
        let gone = gone.map(|(gone, since)| Member {
            since_ms: Some(millis(now.saturating_duration_since(*since))),
            ..gone.clone()
        });
        live.chain(gone).collect()
    }

    /// Returns the servers of the members with this name, by replica.
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
    pub(crate) fn since(&self, now: Instant, seen: Option<RosterVersion>) -> RosterUpdate {
        let recovering = self.recovers_until.is_some();
        let missed = seen
            .filter(|seen| seen.term == self.term)
            .and_then(|seen| usize::try_from(self.version.checked_sub(seen.version)?).ok())
            .filter(|missed| *missed <= self.changes.len());
        let changes = match missed {
            Some(missed) => self.changes.iter().skip(self.changes.len() - missed).cloned().collect(),
            None => self.servers.values().cloned().map(ServerChange::Present).collect(),
        };
        let suspects =
            self.members.values().filter(|entry| entry.state == MemberState::Suspect && !entry.spec.servers.is_empty());
        let suspects = suspects.map(|entry| SuspectMember {
            name: entry.spec.name.clone(),
            incarnation: entry.spec.incarnation,
            reason: entry.why(),
            gone_in: entry.gone_at().saturating_duration_since(now),
        });
        RosterUpdate {
            now: self.version(),
            complete: missed.is_none(),
            recovering,
            suspects: suspects.collect(),
            changes,
        }
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

pub(super) fn unknown(lease: &MemberLease) -> Error {
    Error::not_started(Code::NotFound, "the head server does not have this member; join again")
        .about(format!("heartbeat of {}", lease.name))
}

//! What the audit knows of the members of a cluster: their heartbeats as they reached the head server, and what a pool was told.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use gym_client::work::WorkerSnapshot;
use gym_core::registry::{
    Heartbeat, Instance, Member, MemberSpec, MemberState, MemberTiming, RosterUpdate, ServerChange,
};
use gym_core::rollout::Attempt;
use gym_core::{Incarnation, Request, Response};
use parking_lot::Mutex;
use tokio::time::Instant;

use super::Audit;

/// A process under its name as a member.
type MemberId = (String, Incarnation);

#[derive(Debug, Default)]
pub(super) struct ClusterTruth {
    /// The life of the head server.
    term: u64,
    /// The members that joined this life of the head server.
    members: BTreeMap<MemberId, Contact>,
    /// Members that no fault reaches.
    unharmed: BTreeSet<String>,
    /// The processes of each member in the order in which they started. Their incarnations are times of clocks that are set back.
    lives: BTreeMap<String, Vec<Incarnation>>,
    /// Members that have served.
    served: BTreeSet<String>,
    /// How often each attempt began, and how often an agent ran it. A collector that was killed repeats the numbers of attempts without an
    /// outcome.
    begun: BTreeMap<Attempt, u32>,
    ran: BTreeMap<Attempt, u32>,
    counts: BTreeMap<&'static str, u64>,
}

/// The contact of a member with the head server.
#[derive(Debug)]
struct Contact {
    timing: MemberTiming,
    heard: Instant,
    seq: u64,
    /// The connection of the newest heartbeat broke at this time.
    broken: Option<Instant>,
}

/// A request of a member that is in progress. Dropping it before its answer means that the connection broke.
pub(super) enum Membership {
    Join(Audit, Box<MemberSpec>, u64),
    Heartbeat(HeartbeatInProgress),
}

pub(super) struct HeartbeatInProgress {
    audit: Audit,
    heartbeat: Heartbeat,
    answered: bool,
}

impl Drop for HeartbeatInProgress {
    fn drop(&mut self) {
        if !self.answered {
            self.audit.heartbeat_broke(&self.heartbeat);
        }
    }
}

impl Membership {
    pub(super) fn answered(self, response: &Response) {
        match self {
            Self::Join(audit, spec, term) if response.status.is_success() => audit.joined(*spec, term),
            Self::Join(..) => {}
            Self::Heartbeat(mut heartbeat) => heartbeat.answered = true,
        }
    }
}

impl ClusterTruth {
    fn life(&self, name: &str, life: Incarnation) -> usize {
        self.lives.get(name).and_then(|lives| lives.iter().rposition(|known| *known == life)).unwrap_or_default()
    }
}

impl Audit {
    /// Counts something that some seed should have.
    pub(crate) fn count(&self, what: &'static str, count: u64) {
        *self.truth.lock().cluster.counts.entry(what).or_default() += count;
    }

    pub(crate) fn counts(&self) -> BTreeMap<&'static str, u64> {
        self.truth.lock().cluster.counts.clone()
    }

    /// Names the members that no fault reaches: once they serve, they go on serving.
    pub(crate) fn expect_unharmed(&self, names: impl Iterator<Item = &'static str>) {
        self.truth.lock().cluster.unharmed = names.map(str::to_owned).collect();
    }

    /// A process of a member has started.
    pub(crate) fn member_started(&self, name: &str, life: Incarnation) {
        self.truth.lock().cluster.lives.entry(name.to_owned()).or_default().push(life);
    }

    /// Returns the number of a process of a member, in the order in which they started.
    fn life(&self, name: &str, life: Incarnation) -> usize {
        self.truth.lock().cluster.life(name, life)
    }

    /// A head server without knowledge of its earlier life.
    pub(crate) fn head_started(&self, term: u64) {
        let cluster = &mut self.truth.lock().cluster;
        cluster.term = term;
        cluster.members.clear();
    }

    pub(super) fn membership(&self, request: &Request, term: u64) -> Option<Membership> {
        let body = request.message.head.to_bytes();
        match request.route.path() {
            "/cluster/join" => Some(Membership::Join(self.clone(), serde_json::from_slice(&body).ok()?, term)),
            "/cluster/beat" => {
                let heartbeat: Heartbeat = serde_json::from_slice(&body).ok()?;
                self.heartbeat(&heartbeat);
                Some(Membership::Heartbeat(HeartbeatInProgress { audit: self.clone(), heartbeat, answered: false }))
            }
            _ => None,
        }
    }

    fn joined(&self, spec: MemberSpec, term: u64) {
        let contact = Contact { timing: spec.timing, heard: Instant::now(), seq: 0, broken: None };
        let cluster = &mut self.truth.lock().cluster;
        if term != cluster.term {
            // An older head server that goes on beside the new one.
            return;
        }
        let known = cluster.members.entry((spec.name, spec.incarnation)).or_insert(contact);
        (known.heard, known.broken) = (Instant::now(), None);
    }

    fn heartbeat(&self, heartbeat: &Heartbeat) {
        let cluster = &mut self.truth.lock().cluster;
        let id = (heartbeat.lease.name.clone(), heartbeat.lease.incarnation);
        let contact = cluster.members.get_mut(&id).filter(|contact| contact.seq <= heartbeat.seq);
        if let Some(contact) = contact.filter(|_| heartbeat.lease.term == cluster.term) {
            (contact.seq, contact.heard, contact.broken) = (heartbeat.seq, Instant::now(), None);
        }
    }

    fn heartbeat_broke(&self, heartbeat: &Heartbeat) {
        let cluster = &mut self.truth.lock().cluster;
        let id = (heartbeat.lease.name.clone(), heartbeat.lease.incarnation);
        let contact = cluster.members.get_mut(&id).filter(|contact| contact.seq == heartbeat.seq);
        if let Some(contact) = contact.filter(|_| heartbeat.lease.term == cluster.term) {
            contact.broken = Some(Instant::now());
        }
    }

    /// Checks what the head server says: no member is gone that was not silent and whose connection did not break.
    pub(crate) fn check_roster(&self, update: &RosterUpdate) {
        // A head server that was killed says nothing any more.
        if update.now.term != self.truth.lock().cluster.term {
            return;
        }
        for change in &update.changes {
            let gone = match change {
                ServerChange::Gone(gone) => gone,
                ServerChange::Present(server) => {
                    self.check_unharmed(server);
                    continue;
                }
            };
            let (Some(name), Some(reason)) = (&gone.member, &gone.lost) else { continue };
            self.count("member gone", 1);
            if self.truth.lock().cluster.unharmed.contains(name) {
                self.violation(format_args!("{name} is gone, and no fault had reached it"));
            }
            let violation = {
                let cluster = &mut self.truth.lock().cluster;
                let lost = cluster.life(name, gone.incarnation);
                let newer =
                    cluster.members.keys().any(|(other, life)| other == name && cluster.life(name, *life) > lost);
                let contact = cluster.members.remove(&(name.clone(), gone.incarnation));
                contact.filter(|_| !newer).and_then(|contact| {
                    let Contact { timing, heard, broken, .. } = contact;
                    let silent = heard.elapsed() >= timing.timeout;
                    let broke = broken.is_some_and(|at| at.elapsed() >= timing.reconnect);
                    (!silent && !broke).then(|| format!("{:?} after its last heartbeat", heard.elapsed()))
                })
            };
            if let Some(violation) = violation {
                self.violation(format_args!("a living member is gone ({reason}): {name}, {violation}"));
            }
        }
    }

    /// Checks that only members that serve get work, and that the servers of a member that is gone are not listed.
    pub(crate) fn check_listed(&self, members: &[Member], servers: &[Instance]) {
        for member in members.iter().filter(|member| member.state != MemberState::Serving) {
            let of_member = |server: &&Instance| {
                server.member.as_ref() == Some(&member.spec.name) && server.incarnation == member.spec.incarnation
            };
            let gets_work = |server: &&Instance| member.state == MemberState::Gone || !server.paused;
            if let Some(server) = servers.iter().filter(of_member).find(gets_work) {
                let (name, state) = (&member.spec.name, member.state);
                self.violation(format_args!("{} is listed for work, and its member {name} is {state}", server.name));
            }
        }
    }

    fn check_unharmed(&self, server: &Instance) {
        let Some(name) = server.member.as_ref().filter(|name| self.truth.lock().cluster.unharmed.contains(*name))
        else {
            return;
        };
        if !server.paused {
            self.truth.lock().cluster.served.insert(name.clone());
        } else if self.truth.lock().cluster.served.contains(name) {
            self.violation(format_args!("{name} got no work for a moment, and no fault had reached it"));
        }
    }

    pub(super) fn attempt_begins(&self, attempt: Attempt) {
        *self.truth.lock().cluster.begun.entry(attempt).or_default() += 1;
    }

    /// Checks that an attempt runs once.
    pub(crate) fn runs(&self, attempt: Attempt) {
        let (ran, begun) = {
            let cluster = &mut self.truth.lock().cluster;
            let ran = cluster.ran.entry(attempt).or_default();
            *ran += 1;
            (*ran, cluster.begun.get(&attempt).copied().unwrap_or_default())
        };
        if ran > begun {
            self.violation(format_args!("{attempt} began {begun} times and ran {ran} times"));
        }
    }
}

/// The audit of one pool.
#[derive(Clone, Debug)]
pub(crate) struct PoolAudit {
    audit: Audit,
    told: Arc<Mutex<Told>>,
}

/// What a pool was told, and what it did.
#[derive(Debug, Default)]
struct Told {
    /// The incarnation of each member, and whether it serves; `None` until the pool has heard anything.
    members: Option<BTreeMap<String, (Incarnation, bool)>>,
    /// Members that are lost and have not returned.
    lost: BTreeSet<MemberId>,
    /// The member that each worker was at its last poll.
    polled: BTreeMap<String, Incarnation>,
    /// The items that were handed to each worker.
    handed: BTreeMap<MemberId, BTreeSet<u64>>,
}

impl PoolAudit {
    pub(crate) fn new(audit: Audit) -> Self {
        Self { audit, told: Arc::default() }
    }

    /// The pool is told what a head server lists.
    pub(crate) fn heard(&self, update: &RosterUpdate) {
        let told = &mut *self.told.lock();
        let members = told.members.get_or_insert_default();
        if update.complete && !update.recovering {
            members.clear();
        }
        for change in &update.changes {
            match change {
                ServerChange::Present(server) => {
                    if let Some(name) = &server.member {
                        let id = (name.clone(), server.incarnation);
                        told.lost.remove(&id);
                        // Another process is gone. If its clock was set back before it started, the pool can tell only if the list had the
                        // older one.
                        let number = |life| self.audit.life(name, life);
                        let listed = members.get(name).map(|(life, _)| *life);
                        let older = told.polled.get(name).filter(|life| {
                            number(**life) < number(server.incarnation)
                                && (**life < server.incarnation || listed == Some(**life))
                        });
                        told.lost.extend(older.map(|life| (name.clone(), *life)));
                        members.insert(name.clone(), (server.incarnation, !server.paused));
                    }
                }
                ServerChange::Gone(gone) => {
                    let Some(name) = &gone.member else { continue };
                    if members.get(name).is_some_and(|(life, _)| *life == gone.incarnation) {
                        members.remove(name);
                        if gone.lost.is_some() {
                            told.lost.insert((name.clone(), gone.incarnation));
                        }
                    }
                }
            }
        }
    }

    /// A worker polls as this member.
    pub(crate) fn polls(&self, worker: &str, member: Option<Incarnation>) {
        let Some(member) = member else { return };
        let told = &mut *self.told.lock();
        let newest = told.polled.entry(worker.to_owned()).or_insert(member);
        // A poll of an earlier process may arrive late.
        if self.audit.life(worker, member) > self.audit.life(worker, *newest) {
            *newest = member;
        }
    }

    /// Checks that members which the pool was told are lost hold no work.
    pub(crate) fn check_lost(&self, workers: &[WorkerSnapshot]) {
        let told = self.told.lock();
        let is_lost = |worker: &WorkerSnapshot| {
            let life = told.polled.get(&*worker.name);
            life.is_some_and(|life| told.lost.contains(&(worker.name.to_string(), *life)))
        };
        let held = workers.iter().find(|worker| worker.held > 0 && is_lost(worker));
        if let Some(worker) = held {
            self.audit.violation(format_args!("the pool was told that {} is lost, and waits for it", worker.name));
        }
    }

    /// Checks that the pool gives no new work to a member that it was told is gone or paused.
    pub(crate) fn handed_out(&self, worker: &str, member: Option<Incarnation>, items: &BTreeSet<u64>) {
        let Some(member) = member else {
            return self.audit.violation(format_args!("{worker} does not say that it is a member"));
        };
        let violation = {
            let told = &mut *self.told.lock();
            let of_worker = told.members.as_ref().map(|members| members.get(worker).copied());
            let serves = of_worker.is_none_or(|of_worker| of_worker == Some((member, true)));
            let handed = told.handed.entry((worker.to_owned(), member)).or_default();
            let new: Vec<u64> = items.difference(handed).copied().collect();
            handed.extend(items);
            (!new.is_empty() && !serves).then(|| format!("items {new:?}, and the pool was told {of_worker:?}"))
        };
        if let Some(violation) = violation {
            self.audit.violation(format_args!("{worker} {member} got {violation}"));
        }
    }
}

//! The rules of a registry: no clock, no tasks, no network.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::Instant;

use super::lease::{Instance, Lease, Registration};
use super::member::MemberLimits;
use super::table::MemberTable;
use crate::base::error::{Code, Error, Result};
use crate::transport::Endpoint;

/// Servers that registered alone, with a lease each, beside those of the members.
#[derive(Debug)]
pub(crate) struct RegistryState {
    leases: BTreeMap<(String, u32), LeaseEntry>,
    pub(super) members: MemberTable,
}

#[derive(Debug)]
struct LeaseEntry {
    ttl: Duration,
    expires: Instant,
}

impl RegistryState {
    pub(crate) fn new(term: u64, limits: MemberLimits) -> Self {
        Self { leases: BTreeMap::new(), members: MemberTable::new(term, limits) }
    }

    /// Implements [`Registry::register`](super::Registry::register).
    ///
    /// # Errors
    /// The same errors.
    pub(crate) fn register(&mut self, now: Instant, registration: Registration) -> Result<Lease> {
        let Registration { name, replica, kind, implementation, endpoints, incarnation, ttl, labels } = registration;
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
        let limits = self.members.limits().clone();
        if ttl > limits.timeout_max {
            let max = limits.timeout_max.as_millis();
            return refused(Code::InvalidArgument, format!("ttl_ms is {}; the limit is {max}", ttl.as_millis()));
        }
        let texts = labels.iter().map(|(key, value)| key.len() + value.len());
        let bytes: usize = texts.chain(endpoints.iter().map(|endpoint| endpoint.as_str().len())).sum::<usize>()
            + name.len()
            + implementation.len();
        if bytes > limits.member_bytes_max {
            let max = limits.member_bytes_max;
            return refused(
                Code::InvalidArgument,
                format!("its name, labels and endpoints have {bytes} bytes; the limit is {max}"),
            );
        }
        self.expire(now);
        let replayed = self.members.servers().find(|there| {
            (&there.name, there.incarnation, there.kind, &there.endpoints) == (&name, incarnation, kind, &endpoints)
        });
        let replica = replica
            .or_else(|| replayed.map(|there| there.replica))
            .unwrap_or_else(|| self.members.lowest_free_replica(&name));
        match self.members.server(&name, replica) {
            Some(there) => {
                // A repeated registration, sent again because the response was lost, is not a second server.
                let replay = there.incarnation == incarnation && there.endpoints == endpoints && there.kind == kind;
                if there.member.is_some() || (there.incarnation >= incarnation && !replay) {
                    // All of them, because the first may be reachable within its own process only.
                    let places: Vec<_> = there.endpoints.iter().map(Endpoint::as_str).collect();
                    return refused(
                        Code::AlreadyExists,
                        format!(
                            "replica {replica} is live at {} with incarnation {}; stop it, or choose another name or number",
                            places.join(" and "),
                            there.incarnation
                        ),
                    );
                }
            }
            None if self.members.server_count() >= limits.servers_max => {
                let max = limits.servers_max;
                return refused(Code::ResourceExhausted, format!("the registry has its maximum of {max} servers"));
            }
            None => {}
        }
        let lease = Lease { name: name.clone(), replica, incarnation, ttl };
        let (member, paused) = (None, false);
        let instance = Instance {
            name: name.clone(),
            replica,
            kind,
            implementation,
            endpoints,
            incarnation,
            labels,
            member,
            paused,
        };
        self.members.put(instance);
        self.leases.insert((name, replica), LeaseEntry { ttl, expires: now + ttl });
        Ok(lease)
    }

    /// Implements [`Registry::renew`](super::Registry::renew).
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
                .about(format!("renew {} replica {}", lease.name, lease.replica))),
        }
    }

    /// Implements [`Registry::deregister`](super::Registry::deregister). Returns `true` if the lease was live.
    pub(crate) fn deregister(&mut self, lease: &Lease) -> bool {
        if self.held(lease).is_none() {
            return false;
        }
        let key = (lease.name.clone(), lease.replica);
        self.leases.remove(&key);
        // The calls in flight end as they would have ended: the server still answers them.
        self.members.take(&key, None);
        true
    }

    /// Removes expired leases and returns the names that changed.
    pub(crate) fn expire(&mut self, now: Instant) -> BTreeSet<String> {
        let mut changed = BTreeSet::new();
        let members = &mut self.members;
        self.leases.retain(|key, entry| {
            let lives = entry.expires > now;
            if !lives {
                let (name, replica) = key;
                let endpoint = members.server(name, *replica).and_then(|there| there.endpoints.last());
                let endpoint = endpoint.map_or("", Endpoint::as_str);
                tracing::warn!(server = name, replica, ttl = ?entry.ttl, endpoint, "a lease has expired: the server did not renew it");
                members.take(key, Some(&format!("its lease of {:?} has expired", entry.ttl)));
                changed.insert(name.clone());
            }
            lives
        });
        changed
    }

    /// Returns the time when the next lease expires, unless it is renewed.
    pub(crate) fn next_expiry(&self) -> Option<Instant> {
        self.leases.values().map(|entry| entry.expires).min()
    }

    /// Implements [`Registry::resolve`](super::Registry::resolve).
    pub(crate) fn resolve(&self, now: Instant, name: &str) -> Vec<Instance> {
        self.members.resolve(name).filter(|instance| self.lives(now, instance)).cloned().collect()
    }

    /// Implements [`Registry::list`](super::Registry::list).
    pub(crate) fn list(&self, now: Instant) -> Vec<Instance> {
        self.members.servers().filter(|instance| self.lives(now, instance)).cloned().collect()
    }

    fn lives(&self, now: Instant, instance: &Instance) -> bool {
        // Without a lease, it belongs to a member.
        self.leases.get(&(instance.name.clone(), instance.replica)).is_none_or(|entry| entry.expires > now)
    }

    fn held(&mut self, lease: &Lease) -> Option<&mut LeaseEntry> {
        let held = self.members.server(&lease.name, lease.replica);
        held.filter(|there| there.incarnation == lease.incarnation)?;
        self.leases.get_mut(&(lease.name.clone(), lease.replica))
    }
}

//! A registry in the memory of one process: the rules with tokio's clock.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::stream::{self, BoxStream, StreamExt};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use super::lease::{Instance, Lease, Registration, Registry};
use super::member::{
    Heartbeat, HeartbeatReply, JoinedMember, Member, MemberLease, MemberLimits, MemberSpec, MemberState, RosterUpdate,
    RosterVersion,
};
use super::membership::MemberRegistry;
use super::state::RegistryState;
use super::table::MemberEvent;
use crate::base::error::Result;
use crate::message::{CallContext, Incarnation};

/// A registry in the memory of one process. Cheap to clone; clones share it.
#[derive(Clone, Debug)]
pub struct MemoryRegistry {
    state: Arc<Mutex<RegistryState>>,
    changed: Arc<Notify>,
}

impl Default for MemoryRegistry {
    fn default() -> Self {
        Self::with_limits(0, MemberLimits::NONE)
    }
}

impl MemoryRegistry {
    /// Creates an empty registry for the servers of one process, which needs no limits.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates the empty registry of a head server. `term` identifies this life of the head: a random number.
    #[must_use]
    pub fn with_limits(term: u64, limits: MemberLimits) -> Self {
        Self { state: Arc::new(Mutex::new(RegistryState::new(term, limits))), changed: Arc::default() }
    }

    /// Marks the registry as recovering for this time: members of an earlier life of the head may return. Meanwhile, clients keep the
    /// servers that they know.
    pub fn recover_for(&self, time: Duration) {
        self.state.lock().members.recover_until(Instant::now() + time);
    }

    /// Notes what a suspect member did when it was asked directly: it is part of the reason that rosters show. Does nothing if the member is not
    /// suspect any more, or is another process.
    pub fn note_asked(&self, name: &str, incarnation: Incarnation, asked: &str) {
        if self.state.lock().members.note_asked(name, incarnation, asked) {
            tracing::info!(member = name, "a suspect worker was asked: {asked}");
            self.changed.notify_waiters();
        }
    }

    /// Applies a change of the members, logs it and wakes the watchers.
    fn apply<T>(&self, change: impl FnOnce(&mut RegistryState) -> Result<(T, Vec<MemberEvent>)>) -> Result<T> {
        let (result, events) = change(&mut self.state.lock())?;
        events.iter().for_each(log);
        if !events.is_empty() {
            self.changed.notify_waiters();
        }
        Ok(result)
    }

    /// Applies all that is due, and returns the time of the next change.
    fn tick(&self) -> Option<Instant> {
        let (events, expired, next) = {
            let mut state = self.state.lock();
            let (events, expired) = (state.members.tick(Instant::now()), state.expire(Instant::now()));
            (events, expired, [state.members.next_change(), state.next_expiry()].into_iter().flatten().min())
        };
        events.iter().for_each(log);
        if !events.is_empty() || !expired.is_empty() {
            self.changed.notify_waiters();
        }
        next
    }

    /// Waits until `ready` returns a value, at most until `deadline`, and applies what becomes due meanwhile.
    async fn wait_for<T>(&self, deadline: Instant, mut ready: impl FnMut(&RegistryState) -> Option<T>) -> Option<T> {
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            // Registered before the state is read, so that no change is missed.
            changed.as_mut().enable();
            let next = self.tick();
            if let Some(found) = ready(&self.state.lock()) {
                return Some(found);
            }
            let until = next.map_or(deadline, |next| next.min(deadline));
            tokio::select! {
                biased;
                () = changed => {}
                () = sleep_until(until) => {
                    if until == deadline {
                        // What is due at this very moment counts.
                        self.tick();
                        return ready(&self.state.lock());
                    }
                }
            }
        }
    }
}

fn log(event: &MemberEvent) {
    let MemberEvent { name, from, to, reason, lost } = event;
    match to {
        MemberState::Joining if from.is_none() => {
            tracing::info!(member = name, "worker registered: {name} registered successfully")
        }
        MemberState::Suspect => tracing::warn!(member = name, reason, "a worker is suspect and gets no new work"),
        MemberState::Gone if *lost => tracing::warn!(member = name, reason, "a worker is gone"),
        MemberState::Gone => tracing::info!(member = name, "a worker has left"),
        _ if reason.is_empty() => tracing::info!(member = name, state = %to, "a worker changed its state"),
        _ => tracing::info!(member = name, state = %to, reason, "a worker changed its state"),
    }
}

/// Reports a broken connection unless the heartbeat has got its response.
struct BrokenUnlessAnswered<'a> {
    registry: &'a MemoryRegistry,
    heartbeat: Option<&'a Heartbeat>,
}

impl Drop for BrokenUnlessAnswered<'_> {
    fn drop(&mut self) {
        if let Some(heartbeat) = self.heartbeat {
            let lost = self.registry.apply(|state| {
                Ok(((), state.members.connection_lost(Instant::now(), &heartbeat.lease, heartbeat.seq)))
            });
            debug_assert!(lost.is_ok(), "the closure returns no error");
        }
    }
}

#[async_trait]
impl Registry for MemoryRegistry {
    async fn register(&self, _: &CallContext, registration: Registration) -> Result<Lease> {
        let lease = self.state.lock().register(Instant::now(), registration)?;
        self.changed.notify_waiters();
        Ok(lease)
    }

    async fn renew(&self, _: &CallContext, lease: &Lease) -> Result<()> {
        self.state.lock().renew(Instant::now(), lease)
    }

    async fn deregister(&self, _: &CallContext, lease: Lease) -> Result<()> {
        if self.state.lock().deregister(&lease) {
            self.changed.notify_waiters();
        }
        Ok(())
    }

    async fn resolve(&self, _: &CallContext, name: &str) -> Result<Vec<Instance>> {
        Ok(self.state.lock().resolve(Instant::now(), name))
    }

    async fn list(&self, _: &CallContext) -> Result<Vec<Instance>> {
        Ok(self.state.lock().list(Instant::now()))
    }

    fn watch(&self, name: &str) -> BoxStream<'static, Vec<Instance>> {
        let start = (self.clone(), name.to_owned(), None::<Vec<Instance>>);
        stream::unfold(start, |(registry, name, last)| async move {
            loop {
                let changed = registry.changed.notified();
                let (now, expiry) = {
                    let state = registry.state.lock();
                    let due = [state.next_expiry(), state.members.next_change()].into_iter().flatten().min();
                    (state.resolve(Instant::now(), &name), due)
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
                            registry.tick();
                        }
                    },
                }
            }
        })
        .boxed()
    }
}

#[async_trait]
impl MemberRegistry for MemoryRegistry {
    async fn join(&self, _: &CallContext, spec: MemberSpec) -> Result<JoinedMember> {
        self.apply(|state| state.members.join(Instant::now(), spec))
    }

    async fn heartbeat(&self, cx: &CallContext, heartbeat: &Heartbeat) -> Result<HeartbeatReply> {
        let (lease, mut state) =
            (&heartbeat.lease, self.apply(|state| state.members.heartbeat(Instant::now(), heartbeat))?);
        let mut answered = BrokenUnlessAnswered { registry: self, heartbeat: Some(heartbeat) };
        if state == heartbeat.known {
            let wait = self.state.lock().members.heartbeat_of(lease).unwrap_or_default();
            let deadline = (Instant::now() + wait).min(cx.deadline);
            let waited = self.wait_for(deadline, |now| {
                let now = now.members.state_of(lease);
                (now != Some(state)).then_some(now)
            });
            match waited.await {
                None => {}
                Some(Some(changed)) => state = changed,
                Some(None) => {
                    answered.heartbeat = None;
                    return Err(super::table::unknown(lease));
                }
            }
        }
        answered.heartbeat = None;
        Ok(HeartbeatReply { term: lease.term, state })
    }

    async fn leave(&self, _: &CallContext, lease: MemberLease) -> Result<()> {
        self.apply(|state| Ok(((), state.members.leave(Instant::now(), &lease))))
    }

    async fn drain(&self, _: &CallContext, name: &str) -> Result<()> {
        self.apply(|state| Ok(((), state.members.drain(Instant::now(), name)?)))
    }

    async fn members(&self, _: &CallContext) -> Result<Vec<Member>> {
        self.tick();
        Ok(self.state.lock().members.members(Instant::now()))
    }

    async fn roster(&self, cx: &CallContext, seen: Option<RosterVersion>, wait: Duration) -> Result<RosterUpdate> {
        let deadline = (Instant::now() + wait).min(cx.deadline);
        let changed = self.wait_for(deadline, |state| (Some(state.members.version()) != seen).then_some(()));
        changed.await;
        Ok(self.state.lock().members.since(Instant::now(), seen))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::conformance::{MemberFixture, members};

    impl MemberFixture for MemoryRegistry {
        fn registry(&self) -> Arc<dyn MemberRegistry> {
            Arc::new(self.clone())
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_registry_of_a_process_conforms() {
        members(|| MemoryRegistry::with_limits(1, MemberLimits::default())).await;
    }
}

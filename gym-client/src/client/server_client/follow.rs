//! Follows the servers of a cluster: calls in flight to a server that is lost end at once.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use futures_util::FutureExt as _;
use gym_core::registry::{Instance, MemberRegistry, RosterUpdate, RosterVersion, ServerChange};
use tokio::time::Instant;

use crate::client::server_client::{ClientState, ServerClient};
use crate::registry::{RosterNews, follow_roster};

impl ServerClient {
    /// Follows the servers of a cluster. A call in flight to a server that is lost ends at once with `Unavailable, Unknown`, whichever
    /// transport carries it; new servers get calls at once; servers that are suspect get no new calls. While a restarted head server
    /// recovers, known servers stay known. Must be called within a tokio runtime, before the first call.
    pub fn follow(&self, registry: Arc<dyn MemberRegistry>) {
        self.inner.follows.store(true, Relaxed);
        self.set_members(Arc::clone(&registry));
        let state = Arc::downgrade(&self.inner);
        let mut warned = false;
        let task = follow_roster(registry, move |news| {
            let Some(inner) = state.upgrade() else { return false };
            match news {
                RosterNews::Update(update, seen) => {
                    if std::mem::take(&mut warned) {
                        tracing::info!("the head server responds again");
                    }
                    Self { inner }.apply(update, seen);
                }
                RosterNews::Away(error) => {
                    warned = true;
                    tracing::warn!(%error, "the head server does not respond; calls go on to the servers that are known");
                }
                // Names are resolved as before.
                RosterNews::Unsupported(error) => tracing::debug!(%error, "the head server has no roster"),
            }
            true
        });
        // Ends with the client.
        self.inner.followers.lock().spawn(task.boxed());
    }

    /// Sets the members of the cluster, without following its servers: for a client in the process of the head server, which loses no
    /// server of its own. A registry that was set before remains.
    pub fn set_members(&self, registry: Arc<dyn MemberRegistry>) {
        let _ = self.inner.members.set(registry);
    }

    /// Returns the members of the cluster that this client belongs to; `None` if it knows of none.
    #[must_use]
    pub fn members(&self) -> Option<&Arc<dyn MemberRegistry>> {
        self.inner.members.get()
    }

    fn apply(&self, update: &RosterUpdate, seen: Option<RosterVersion>) {
        let state: &ClientState = &self.inner;
        {
            let (mut recovering, term) = (state.recovering.lock(), update.now.term);
            let same = recovering.filter(|(known, _)| *known == term);
            *recovering = update.recovering.then(|| same.unwrap_or_else(|| (term, Instant::now())));
        }
        for change in &update.changes {
            match change {
                ServerChange::Present(server) => self.forget(&server.name),
                ServerChange::Gone(gone) => {
                    if let Some(reason) = &gone.lost {
                        self.lose(&gone.name, gone.replica, gone.incarnation, reason);
                    }
                    self.forget(&gone.name);
                }
            }
        }
        if update.complete && !update.recovering && seen.is_some() {
            let present = update.changes.iter().filter_map(|change| match change {
                ServerChange::Present(server) => Some(server.clone()),
                ServerChange::Gone(_) => None,
            });
            self.keep_only(&present.collect::<Vec<Instance>>());
        }
    }
}

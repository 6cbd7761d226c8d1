//! Follows the servers of a cluster: calls in flight to a server that is lost end at once.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use futures_util::FutureExt as _;
use gym_core::registry::{Instance, MemberRegistry, RosterUpdate, RosterVersion, ServerChange};
use gym_core::{CallContext, Code};

use crate::client::server_client::{ClientState, ServerClient, lock};

/// Time after which the head server answers without a change: shorter than the idle limits of proxies.
const ROSTER_WAIT: Duration = Duration::from_secs(20);

/// Time between two attempts while the head server does not respond.
const RETRY_EVERY: Duration = Duration::from_millis(200);

impl ServerClient {
    /// Follows the servers of a cluster. A call in flight to a server that is lost ends at once with `Unavailable, Unknown`, whichever
    /// transport carries it; new servers get calls at once; servers that are suspect get no new calls. While a restarted head server
    /// recovers, known servers stay known. Must be called within a tokio runtime, before the first call.
    pub fn follow(&self, registry: Arc<dyn MemberRegistry>) {
        self.inner.follows.store(true, Relaxed);
        let state = Arc::downgrade(&self.inner);
        let task = async move {
            let mut seen: Option<RosterVersion> = None;
            let mut warned = false;
            loop {
                let update = registry.roster(&CallContext::within(ROSTER_WAIT * 2), seen, ROSTER_WAIT).await;
                let Some(inner) = state.upgrade() else { return };
                match update {
                    Ok(update) => {
                        if std::mem::take(&mut warned) {
                            tracing::info!("the head server responds again");
                        }
                        Self { inner }.apply(&update, seen);
                        seen = Some(update.now);
                    }
                    Err(error) => {
                        // A head server of another version: names are resolved as before.
                        if matches!(error.code(), Code::NotFound | Code::Unimplemented) {
                            tracing::debug!(%error, "the head server has no roster");
                            return;
                        }
                        if !std::mem::replace(&mut warned, true) {
                            tracing::warn!(%error, "the head server does not respond; calls go on to the servers that are known");
                        }
                        tokio::time::sleep(RETRY_EVERY).await;
                    }
                }
            }
        };
        // Ends with the client.
        lock(&self.inner.followers).spawn(task.boxed());
    }

    fn apply(&self, update: &RosterUpdate, seen: Option<RosterVersion>) {
        let state: &ClientState = &self.inner;
        state.recovering.store(update.recovering, Relaxed);
        for change in &update.changes {
            match change {
                ServerChange::Present(server) => self.forget(&server.name),
                ServerChange::Gone(gone) => {
                    if let Some(reason) = &gone.lost {
                        self.lose(&gone.name, gone.rank, gone.incarnation, reason);
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

//! State that the supervisors of a launcher's children share: the settings, and the watchdog with its registered
//! leaders.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use tokio::sync::Mutex;

use crate::launch::error::LaunchError;
use crate::launch::lines::LineSink;
use crate::launch::process::tree::SessionLeader;
use crate::launch::process::watchdog::Watchdog;

/// The state that supervisors share. It does not own the children, so dropping the launcher ends them.
pub(super) struct SupervisionContext {
    pub(super) shim: PathBuf,
    pub(super) identity: String,
    pub(super) grace: Duration,
    /// The files that the watchdog locks.
    pub(super) locks: Vec<PathBuf>,
    pub(super) sink: LineSink,
    pub(super) watchdog: Mutex<WatchdogState>,
}

#[derive(Debug, Default)]
pub(super) struct WatchdogState {
    pub(super) watchdog: Option<Watchdog>,
    pub(super) leaders: Vec<SessionLeader>,
    /// Time since the start of the machine at which the children are killed.
    pub(super) lease: Option<Duration>,
}

impl fmt::Debug for SupervisionContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SupervisionContext")
            .field("shim", &self.shim)
            .field("identity", &self.identity)
            .finish_non_exhaustive()
    }
}

impl SupervisionContext {
    /// Registers a child with the watchdog. Starts the watchdog for the first child, and again if it has ended.
    pub(super) async fn register(&self, leader: SessionLeader) -> Result<(), LaunchError> {
        let mut guarded = self.watchdog.lock().await;
        guarded.leaders.push(leader);
        if let Some(watchdog) = &mut guarded.watchdog
            && watchdog.register(leader).await.is_ok()
        {
            return Ok(());
        }
        if let Some(dead) = guarded.watchdog.take() {
            tracing::warn!("the watchdog ended; starting another");
            dead.discard().await;
        }
        let failed = |reason| LaunchError::Watchdog { shim: self.shim.clone(), reason };
        let started = async {
            let started = Watchdog::start(&self.shim, &self.identity, self.grace, &self.locks).await;
            let mut fresh = started.map_err(failed)?;
            if let Some(until) = guarded.lease {
                fresh.lease(until).await.map_err(|error| failed(error.to_string()))?;
            }
            for known in &guarded.leaders {
                fresh.register(*known).await.map_err(|error| failed(error.to_string()))?;
            }
            Ok(fresh)
        };
        match started.await {
            Ok(fresh) => {
                guarded.watchdog = Some(fresh);
                Ok(())
            }
            Err(error) => {
                guarded.leaders.retain(|known| *known != leader);
                Err(error)
            }
        }
    }

    /// Sets the time at which the watchdog kills the children. A watchdog that has ended is replaced at the next start of a child.
    pub(super) async fn lease(&self, until: Duration) {
        let mut guarded = self.watchdog.lock().await;
        guarded.lease = guarded.lease.max(Some(until));
        if let Some(watchdog) = &mut guarded.watchdog {
            let _ = watchdog.lease(until).await;
        }
    }

    pub(super) async fn forget(&self, leader: SessionLeader) {
        let mut guarded = self.watchdog.lock().await;
        guarded.leaders.retain(|known| *known != leader);
        if let Some(watchdog) = &mut guarded.watchdog {
            // A dead watchdog is detected and replaced at the next start. A stale entry does no harm, because the start
            // time distinguishes a new process with the same ID.
            let _ = watchdog.forget(leader).await;
        }
    }
}

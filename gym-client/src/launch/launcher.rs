//! Starts children and stops them all.

use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex as StdMutex, PoisonError};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use tokio::sync::{Mutex, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::launch::child::{ChildHandle, ChildState, ChildSupervisor};
use crate::launch::context::SupervisionContext;
use crate::launch::error::LaunchError;
use crate::launch::lines::LineSink;
use crate::launch::process::{roles, tree};
use crate::launch::spec::{ChildSpec, RestartBudget};

/// Starts children, restarts them within their budgets, and stops them all.
///
/// Dropping it ends them too, but in no order and without waiting: the watchdog does it. Use
/// [`shutdown`](Self::shutdown) for an orderly end.
#[derive(Debug)]
pub struct Launcher {
    shared: Arc<SupervisionContext>,
    seed: u64,
    children: StdMutex<ChildTable>,
}

#[derive(Debug, Default)]
struct ChildTable {
    closed: bool,
    next_mark: u64,
    /// In the order of their starts.
    entries: Vec<ChildEntry>,
}

#[derive(Debug)]
struct ChildEntry {
    handle: ChildHandle,
    grace: Duration,
    /// `None` while the first start is under way.
    supervisor: Option<JoinHandle<()>>,
}

/// Settings of a [`Launcher`].
pub struct LauncherBuilder {
    shim: Option<PathBuf>,
    seed: u64,
    grace: Duration,
    sink: LineSink,
}

impl fmt::Debug for LauncherBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LauncherBuilder")
            .field("shim", &self.shim)
            .field("seed", &self.seed)
            .field("grace", &self.grace)
            .finish_non_exhaustive()
    }
}

impl LauncherBuilder {
    /// The executable that becomes shim and watchdog; its `main` must call [`enter`](crate::launch::enter) first. Default: the running
    /// executable by `/proc/self/exe`, which stays right when the file is replaced or deleted meanwhile.
    #[must_use]
    pub fn shim(mut self, executable: impl Into<PathBuf>) -> Self {
        self.shim = Some(executable.into());
        self
    }

    /// The seed of the jitter between restarts; each child's also depends on its name. Default 0.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// How long the watchdog waits between `SIGTERM` and `SIGKILL` when the controller died. Default 3 s.
    #[must_use]
    pub fn orphan_grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }

    /// Where the children's output lines go. Default: nowhere.
    #[must_use]
    pub fn lines(mut self, sink: LineSink) -> Self {
        self.sink = sink;
        self
    }

    /// Makes the launcher. No process is started before the first child.
    ///
    /// # Errors
    /// [`LaunchError::NotEntered`] when no shim is named and this program did not call [`enter`](crate::launch::enter).
    pub fn build(self) -> Result<Launcher, LaunchError> {
        let shim = match self.shim {
            Some(shim) => shim,
            None if roles::entered() => Path::new("/proc/self/exe").to_owned(),
            None => return Err(LaunchError::NotEntered),
        };
        Ok(Launcher {
            shared: Arc::new(SupervisionContext {
                shim,
                identity: identity(),
                grace: self.grace,
                sink: self.sink,
                watchdog: Mutex::default(),
            }),
            seed: self.seed,
            children: StdMutex::default(),
        })
    }
}

/// Names this launcher on this machine, until reboot: process, its start time, and a count within the process.
fn identity() -> String {
    static LAUNCHERS: AtomicU64 = AtomicU64::new(0);
    let pid = std::process::id();
    let start = i32::try_from(pid).ok().and_then(tree::start_ticks).unwrap_or(0);
    format!("{pid}-{start}-{}", LAUNCHERS.fetch_add(1, Ordering::Relaxed))
}

impl Launcher {
    /// A launcher with default settings.
    ///
    /// # Errors
    /// [`LaunchError::NotEntered`] when this program did not call [`enter`](crate::launch::enter).
    pub fn new() -> Result<Self, LaunchError> {
        Self::builder().build()
    }

    /// Settings first.
    #[must_use]
    pub fn builder() -> LauncherBuilder {
        LauncherBuilder { shim: None, seed: 0, grace: Duration::from_secs(3), sink: Arc::new(|_, _, _| {}) }
    }

    /// Starts a child and watches it. Returns when the program is being executed, which is before it serves anything.
    ///
    /// A failure of this first start is returned and not retried; later ones count against the restart budget.
    ///
    /// # Errors
    /// See [`LaunchError`]: wrong specification, program or folder missing, no resources, launcher shut down.
    #[must_use = "a future does nothing until it is awaited"]
    pub fn spawn(&self, spec: ChildSpec) -> BoxFuture<'_, Result<ChildHandle, LaunchError>> {
        Box::pin(async move {
            let name: Arc<str> = spec.name.as_str().into();
            let (state_sender, state) = watch::channel(ChildState::Starting { incarnation: 1 });
            let (stop, stop_receiver) = watch::channel(None);
            let handle = ChildHandle { name: name.clone(), stop, state };
            let mark = self.reserve(&handle, spec.stop_grace)?;
            // Unless the start succeeds (an error, or this future dropped), the reservation is taken back.
            let mut reservation = NameReservation { launcher: self, name: &name, kept: false };
            let mut hasher = DefaultHasher::new();
            (self.seed, &*name).hash(&mut hasher);
            let supervisor = ChildSupervisor {
                shared: self.shared.clone(),
                budget: RestartBudget::new(spec.restart, hasher.finish()),
                spec,
                mark,
                state: state_sender,
                stop: stop_receiver,
            };
            let first = supervisor.start(1).await?;
            let mut children = self.lock();
            if let Some(entry) = children.entries.iter_mut().find(|entry| entry.handle.name == name) {
                entry.supervisor = Some(tokio::spawn(supervisor.run(first).boxed()));
                reservation.kept = true;
            }
            drop(children);
            Ok(handle)
        })
    }

    /// Takes the name and the place in the order.
    fn reserve(&self, handle: &ChildHandle, grace: Duration) -> Result<String, LaunchError> {
        let mut children = self.lock();
        if children.closed {
            return Err(LaunchError::ShutDown { name: handle.name.to_string() });
        }
        children.entries.retain(|entry| !entry.handle.state.borrow().is_final());
        if children.entries.iter().any(|entry| entry.handle.name == handle.name) {
            return Err(LaunchError::DuplicateName { name: handle.name.to_string() });
        }
        children.entries.push(ChildEntry { handle: handle.clone(), grace, supervisor: None });
        children.next_mark += 1;
        Ok(format!("{}.{}", self.shared.identity, children.next_mark))
    }

    /// The children that are not final, in the order of their starts.
    #[must_use]
    pub fn children(&self) -> Vec<ChildHandle> {
        let children = self.lock();
        let living = children.entries.iter().filter(|entry| !entry.handle.state.borrow().is_final());
        living.map(|entry| entry.handle.clone()).collect()
    }

    /// Stops all children, the last started first, each gone before the next is asked. Each gets its own
    /// [`stop_grace`](ChildSpec::stop_grace), and all together `grace`: when that is over, the rest is killed at once.
    /// Then no child can be started any more.
    ///
    /// # Errors
    /// The first child that could not be stopped; the others are stopped all the same.
    #[must_use = "a future does nothing until it is awaited"]
    pub fn shutdown(&self, grace: Duration) -> BoxFuture<'_, Result<(), LaunchError>> {
        Box::pin(async move {
            let until = Instant::now() + grace;
            let stopping: Vec<(ChildHandle, Duration)> = {
                let mut children = self.lock();
                children.closed = true;
                children.entries.iter().rev().map(|entry| (entry.handle.clone(), entry.grace)).collect()
            };
            let mut failed = None;
            for (handle, own) in stopping {
                let left = until.saturating_duration_since(Instant::now());
                if let Err(error) = handle.stop(own.min(left)).await {
                    failed = failed.or(Some(error));
                }
            }
            let watchdog = self.shared.watchdog.lock().await.watchdog.take();
            if let Some(watchdog) = watchdog {
                // It has nothing left to end, unless a child could not be stopped.
                watchdog.end(self.shared.grace + tree::KILL_WAIT + Duration::from_secs(1)).await;
            }
            failed.map_or(Ok(()), Err)
        })
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, ChildTable> {
        self.children.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Launcher {
    fn drop(&mut self) {
        for entry in &self.lock().entries {
            if let Some(supervisor) = &entry.supervisor {
                // Takes the process handle with it, which kills the child; its family is the watchdog's, whose pipe
                // closes with the last supervisor.
                supervisor.abort();
            }
        }
    }
}

/// Takes a name back when the child did not come to life.
struct NameReservation<'a> {
    launcher: &'a Launcher,
    name: &'a Arc<str>,
    kept: bool,
}

impl Drop for NameReservation<'_> {
    fn drop(&mut self) {
        if !self.kept {
            self.launcher.lock().entries.retain(|entry| entry.handle.name != *self.name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_did_not_enter_is_told_to() {
        // The test harness owns `main` here, so `enter` was not called.
        let text = Launcher::new().expect_err("not entered").to_string();
        assert!(text.contains("launch::enter()") && text.contains("first line of main"), "{text}");
    }

    #[test]
    fn launchers_of_one_process_have_different_identities() {
        assert_ne!(identity(), identity());
    }
}

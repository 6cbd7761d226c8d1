//! Starts child processes and stops all of them.

use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use gym_core::base::process::OWN_PROGRAM;
use parking_lot::Mutex as StdMutex;
use tokio::sync::{Mutex, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::launch::child::{ChildHandle, ChildState, ChildSupervisor};
use crate::launch::context::SupervisionContext;
use crate::launch::error::LaunchError;
use crate::launch::lines::LineSink;
use crate::launch::process::tree::ProcessTree;
use crate::launch::process::{roles, tree};
use crate::launch::spec::{ChildSpec, RestartBudget};

/// Starts children, restarts them within their limits, and stops all of them.
///
/// Dropping the launcher also ends the children, but in no order and without waiting, because the watchdog does it. Use
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
    /// In the order in which they were started.
    entries: Vec<ChildEntry>,
}

#[derive(Debug)]
struct ChildEntry {
    handle: ChildHandle,
    grace: Duration,
    /// `None` during the first start.
    supervisor: Option<JoinHandle<()>>,
}

/// Builds a [`Launcher`]; each method documents its default.
pub struct LauncherBuilder {
    shim: Option<PathBuf>,
    seed: u64,
    grace: Duration,
    locks: Vec<PathBuf>,
    sink: LineSink,
}

impl fmt::Debug for LauncherBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LauncherBuilder")
            .field("shim", &self.shim)
            .field("seed", &self.seed)
            .field("grace", &self.grace)
            .field("locks", &self.locks)
            .finish_non_exhaustive()
    }
}

impl LauncherBuilder {
    /// Sets the executable for shim and watchdog. Its `main` must call [`enter`](crate::launch::enter) first. Default:
    /// the running executable through `/proc/self/exe`, which remains valid if the file is replaced or deleted.
    #[must_use]
    pub fn shim(mut self, executable: impl Into<PathBuf>) -> Self {
        self.shim = Some(executable.into());
        self
    }

    /// Sets the seed of the jitter between restarts; the jitter of a child also depends on its name. Default: 0.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Sets the time that the watchdog waits between `SIGTERM` and `SIGKILL` after the controller has died. Default: 3
    /// s. If it is zero, children get no `SIGTERM`.
    #[must_use]
    pub fn orphan_grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }

    /// Sets files that are locked (flock(2), shared) from the first start of a child until all children have ended, even if the controller dies before
    /// them. Default: none.
    #[must_use]
    pub fn locks(mut self, files: Vec<PathBuf>) -> Self {
        self.locks = files;
        self
    }

    /// Sets the sink for the children's output lines. Default: output is discarded.
    #[must_use]
    pub fn lines(mut self, sink: LineSink) -> Self {
        self.sink = sink;
        self
    }

    /// Creates the launcher. Starts no process before the first child.
    ///
    /// # Errors
    /// [`LaunchError::NotEntered`] if no shim is set and this program did not call [`enter`](crate::launch::enter).
    pub fn build(self) -> Result<Launcher, LaunchError> {
        let shim = match self.shim {
            Some(shim) => shim,
            None if roles::entered() => Path::new(OWN_PROGRAM).to_owned(),
            None => return Err(LaunchError::NotEntered),
        };
        Ok(Launcher {
            shared: Arc::new(SupervisionContext {
                shim,
                identity: identity(),
                grace: self.grace,
                locks: self.locks,
                sink: self.sink,
                watchdog: Mutex::default(),
            }),
            seed: self.seed,
            children: StdMutex::default(),
        })
    }
}

/// Returns a name of this launcher that is unique on this machine until reboot: process ID, start time and a count
/// within the process.
fn identity() -> String {
    static LAUNCHERS: AtomicU64 = AtomicU64::new(0);
    let pid = std::process::id();
    let start = i32::try_from(pid).ok().and_then(gym_core::base::process::start_ticks).unwrap_or(0);
    format!("{pid}-{start}-{}", LAUNCHERS.fetch_add(1, Ordering::Relaxed))
}

impl Launcher {
    /// Creates a launcher with default settings.
    ///
    /// # Errors
    /// [`LaunchError::NotEntered`] if this program did not call [`enter`](crate::launch::enter).
    pub fn new() -> Result<Self, LaunchError> {
        Self::builder().build()
    }

    /// Returns a builder with default settings.
    #[must_use]
    pub fn builder() -> LauncherBuilder {
        LauncherBuilder {
            shim: None,
            seed: 0,
            grace: Duration::from_secs(3),
            locks: Vec::new(),
            sink: Arc::new(|_, _, _| {}),
        }
    }

    /// Starts a child and supervises it. Returns when the program is being executed, before it serves requests.
    ///
    /// If this first start fails, the error is returned without a retry; later starts count towards the restart limit.
    ///
    /// # Errors
    /// See [`LaunchError`]: invalid specification, missing program or directory, insufficient resources, launcher shut
    /// down.
    #[must_use = "a future does nothing until it is awaited"]
    pub fn spawn(&self, spec: ChildSpec) -> BoxFuture<'_, Result<ChildHandle, LaunchError>> {
        Box::pin(async move {
            let name: Arc<str> = spec.name.as_str().into();
            let (state_sender, state) = watch::channel(ChildState::Starting { incarnation: 1 });
            let (stop, stop_receiver) = watch::channel(None);
            let tree = ProcessTree { leaders: Vec::new(), mark: self.next_mark() };
            let handle = ChildHandle { name: name.clone(), stop, state, tree: Arc::new(StdMutex::new(tree)) };
            self.reserve(&handle, spec.stop_grace)?;
            // Unless the start succeeds (an error, or this future dropped), the reservation is taken back.
            let mut reservation = NameReservation { launcher: self, name: &name, kept: false };
            let mut hasher = DefaultHasher::new();
            (self.seed, &*name).hash(&mut hasher);
            let supervisor = ChildSupervisor {
                shared: self.shared.clone(),
                budget: RestartBudget::new(spec.restart, hasher.finish()),
                spec,
                tree: Arc::clone(&handle.tree),
                state: state_sender,
                stop: stop_receiver,
            };
            let first = supervisor.start(1).await?;
            let mut children = self.children.lock();
            if let Some(entry) = children.entries.iter_mut().find(|entry| entry.handle.name == name) {
                entry.supervisor = Some(tokio::spawn(supervisor.run(first).boxed()));
                reservation.kept = true;
            }
            drop(children);
            Ok(handle)
        })
    }

    /// Returns a mark that no other child of the machine has.
    fn next_mark(&self) -> String {
        let mut children = self.children.lock();
        children.next_mark += 1;
        format!("{}.{}", self.shared.identity, children.next_mark)
    }

    /// Reserves the child's name and its position in the order of starts.
    fn reserve(&self, handle: &ChildHandle, grace: Duration) -> Result<(), LaunchError> {
        let mut children = self.children.lock();
        if children.closed {
            return Err(LaunchError::ShutDown { name: handle.name.to_string() });
        }
        children.entries.retain(|entry| !entry.handle.state.borrow().is_final());
        if children.entries.iter().any(|entry| entry.handle.name == handle.name) {
            return Err(LaunchError::DuplicateName { name: handle.name.to_string() });
        }
        children.entries.push(ChildEntry { handle: handle.clone(), grace, supervisor: None });
        Ok(())
    }

    /// Limits the life of the children: they are killed at this time since the start of the machine, unless a later one is set before.
    /// The watchdog does it, so it also happens while this process is stopped. Without a call, there is no limit.
    pub async fn lease(&self, until: Duration) {
        self.shared.lease(until).await;
    }

    /// Returns the children that have not ended, in the order of their starts.
    #[must_use]
    pub fn children(&self) -> Vec<ChildHandle> {
        let children = self.children.lock();
        let living = children.entries.iter().filter(|entry| !entry.handle.state.borrow().is_final());
        living.map(|entry| entry.handle.clone()).collect()
    }

    /// Stops all children, the last started first, and waits for each before it stops the next. Each child gets its own
    /// [`stop_grace`](ChildSpec::stop_grace); all together get `grace`, after which the rest is killed at once. Later
    /// starts are rejected.
    ///
    /// # Errors
    /// The error of the first child that could not be stopped; the others are stopped nevertheless.
    #[must_use = "a future does nothing until it is awaited"]
    pub fn shutdown(&self, grace: Duration) -> BoxFuture<'_, Result<(), LaunchError>> {
        Box::pin(async move {
            let until = Instant::now() + grace;
            let stopping: Vec<(ChildHandle, Duration)> = {
                let mut children = self.children.lock();
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
                // The watchdog has no process left to end, unless a child could not be stopped.
                watchdog.end(self.shared.grace + tree::KILL_TIMEOUT + Duration::from_secs(1)).await;
            }
            failed.map_or(Ok(()), Err)
        })
    }
}

impl Drop for Launcher {
    fn drop(&mut self) {
        for entry in &self.children.lock().entries {
            if let Some(supervisor) = &entry.supervisor {
                // Drops the process handle, which kills the child. The watchdog ends its descendants when the last
                // supervisor closes the pipe.
                supervisor.abort();
            }
        }
    }
}

/// Releases the name if the start failed.
struct NameReservation<'a> {
    launcher: &'a Launcher,
    name: &'a Arc<str>,
    kept: bool,
}

impl Drop for NameReservation<'_> {
    fn drop(&mut self) {
        if !self.kept {
            self.launcher.children.lock().entries.retain(|entry| entry.handle.name != *self.name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_did_not_call_enter_gets_an_error_that_says_so() {
        // The test harness owns `main`, so `enter` was not called.
        let text = Launcher::new().expect_err("not entered").to_string();
        assert!(text.contains("launch::enter()") && text.contains("first line of main"), "{text}");
    }

    #[test]
    fn launchers_of_one_process_have_different_identities() {
        assert_ne!(identity(), identity());
    }
}

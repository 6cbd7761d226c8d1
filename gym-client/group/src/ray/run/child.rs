//! A driver that is a child of this program: its events come by a pipe, and it ends with this program.

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use gym_client::launch::{
    ChildHandle, ChildSpec, ChildState, LaunchError, Launcher, OutputTail, RestartPolicy, Stream,
};
use gym_core::{CallContext, Code, Error, Execution, Result};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::ray::event::{MARK, RunEnd};
use crate::ray::job::DRIVER_TIMEOUT;
use crate::ray::package::{SHIM, SHIM_FILE};

/// Runs the file of the driver, which is too long for a list of processes. Without the working directory, whose files could be imported instead of Ray.
const RUN_SHIM: &str =
    "import sys; sys.path[:] = [path for path in sys.path if path]; import os; exec(os.environ.pop('GYM_RAY_SHIM'))";

/// A driver that runs as a child of this program. Dropping the last clone kills it.
#[derive(Clone, Debug)]
pub(super) struct ChildDriver(Arc<Running>);

#[derive(Debug)]
struct Running {
    launcher: Launcher,
    child: ChildHandle,
    began: Instant,
    output: Arc<Output>,
    /// `true` once its node is known to be one of the cluster.
    is_checked: AtomicBool,
}

/// The output of a driver.
#[derive(Default)]
struct Output {
    /// Its events that were not taken yet: those of the last second, of which each share has a few.
    events: Mutex<String>,
    /// The last of its other lines.
    last: OutputTail,
    /// Notified of an event.
    news: Notify,
}

impl fmt::Debug for Output {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Output").field("last", &self.last).finish_non_exhaustive()
    }
}

impl Output {
    fn take(&self, stream: Stream, line: &str) {
        if stream == Stream::Stdout && line.starts_with(MARK) {
            let mut events = self.events.lock();
            events.push_str(line);
            events.push('\n');
            drop(events);
            self.news.notify_one();
        } else if !line.trim().is_empty() {
            tracing::debug!(line, "the driver of a job on Ray printed a line");
            self.last.push(line);
        }
    }
}

impl ChildDriver {
    /// Starts a driver with this interpreter. `name` says what it is for, in Ray's dashboard and in a list of processes. `auth_mode` is that of the cluster:
    /// without it, Ray takes a token that it finds on this machine as a reason to require one.
    pub(super) async fn start(
        cx: &CallContext,
        python: &Path,
        name: &str,
        spec: String,
        auth_mode: Option<String>,
    ) -> Result<Self> {
        let output = Arc::new(Output::default());
        let lines = Arc::clone(&output);
        let launcher = Launcher::builder()
            .lines(Arc::new(move |_, stream, line| lines.take(stream, line)))
            .orphan_grace(DRIVER_TIMEOUT);
        let launcher = launcher.build().map_err(|error| of_launch(python, error))?;
        let mut child = ChildSpec::new("the driver", python)
            .arg("-c")
            .arg(RUN_SHIM)
            .arg(SHIM_FILE)
            .arg(name)
            .env("GYM_RAY_SHIM", SHIM)
            .env("GYM_RAY_SPEC", spec)
            .restart(RestartPolicy::NEVER)
            .stop_grace(DRIVER_TIMEOUT);
        if let Some(mode) = auth_mode {
            child = child.env("RAY_AUTH_MODE", mode);
        }
        let started = async { launcher.spawn(child).await.map_err(|error| of_launch(python, error)) };
        let child = cx.bound(Execution::NotStarted, started).await?;
        tracing::info!(python = %python.display(), "a driver for Ray was started as a child of this program");
        Ok(Self(Arc::new(Running {
            launcher,
            child,
            began: Instant::now(),
            output,
            is_checked: AtomicBool::new(false),
        })))
    }

    /// Returns the events since the last call, and the end of the driver if it has ended.
    pub(super) fn news(&self) -> (String, Option<RunEnd>) {
        let ended = match &*self.0.child.events().borrow() {
            ChildState::GaveUp(report) => Some(format!("its driver has ended: {}", report.reason)),
            ChildState::Stopped(_) => Some("its driver was stopped".to_owned()),
            _ => None,
        };
        // After the state: the last events come before the end.
        let events = std::mem::take(&mut *self.0.output.events.lock());
        (events, ended.map(|why| RunEnd { code: None, why }))
    }

    /// Gives events back that were not used: the next call of [`ChildDriver::news`] returns them first.
    pub(super) fn put_back(&self, events: &str) {
        self.0.output.events.lock().insert_str(0, events);
    }

    /// Returns for how long it runs.
    pub(super) fn age(&self) -> Duration {
        self.0.began.elapsed()
    }

    /// Returns `true` once [`ChildDriver::set_checked`] was called.
    pub(super) fn is_checked(&self) -> bool {
        self.0.is_checked.load(Ordering::Relaxed)
    }

    /// Notes that its node is one of the cluster.
    pub(super) fn set_checked(&self) {
        self.0.is_checked.store(true, Ordering::Relaxed);
    }

    /// Waits for events that were not taken, or for this time.
    pub(super) async fn changed(&self, at_most: Duration) {
        let _ = tokio::time::timeout(at_most, self.0.output.news.notified()).await;
    }

    /// Returns the last lines that it printed, without its events.
    pub(super) fn last_lines(&self) -> Arc<[String]> {
        self.0.output.last.lines()
    }

    /// Stops the driver, which stops its agents first.
    pub(super) async fn stop(&self) -> Result<()> {
        self.0
            .launcher
            .shutdown(DRIVER_TIMEOUT)
            .await
            .map_err(|error| Error::internal("stop the driver").caused_by(error))
    }
}

fn of_launch(python: &Path, error: LaunchError) -> Error {
    let message = match &error {
        LaunchError::ProgramNotFound { .. } | LaunchError::NotExecutable { .. } => {
            format!(
                "{error}\n  fix: name the Python that has Ray in RayDriver::Child; {} cannot be run",
                python.display()
            )
        }
        _ => error.to_string(),
    };
    Error::not_started(Code::FailedPrecondition, message).caused_by(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_kept_apart_from_other_lines() {
        let output = Output::default();
        for line in ["@gym {\"seq\":1}", "", "a warning", " ", "@gym {\"seq\":2}", "an error"] {
            output.take(Stream::Stdout, line);
        }
        output.take(Stream::Stderr, "@gym {}");
        assert_eq!(*output.events.lock(), "@gym {\"seq\":1}\n@gym {\"seq\":2}\n");
        assert_eq!(*output.last.lines(), ["a warning", "an error", "@gym {}"]);
    }
}

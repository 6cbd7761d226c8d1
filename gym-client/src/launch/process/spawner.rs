//! The thread that starts processes.
//!
//! The kernel sends the parent-death signal when the *thread* that forked ends, not when the process ends. A runtime's
//! worker thread may end earlier and would take the children with it. This thread never ends.

use std::io;
use std::sync::{Once, OnceLock};

use gym_core::base::process::ignores_signal;
use tokio::process::{Child, Command};
use tokio::runtime::Handle;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, oneshot};

/// Capacity of the queue. A start takes about a millisecond, so 64 queued starts need 64 simultaneous callers; further
/// callers wait.
const QUEUE: usize = 64;

struct SpawnRequest {
    command: Command,
    runtime: Handle,
    reply: oneshot::Sender<io::Result<Child>>,
}

static JOBS: OnceLock<mpsc::Sender<SpawnRequest>> = OnceLock::new();

/// Spawns `command` from the permanent thread; the child is registered with the calling runtime.
pub(in crate::launch) async fn spawn(command: Command) -> io::Result<Child> {
    let (reply, answer) = oneshot::channel();
    restore_defaults();
    let job = SpawnRequest { command, runtime: Handle::current(), reply };
    let gone = |what: &str| io::Error::other(format!("the thread that starts processes {what}"));
    jobs()?.send(job).await.map_err(|_| gone("ended"))?;
    answer.await.map_err(|_| gone("dropped the request"))?
}

/// Gives children the default reaction to the signals that stop them, if this process was started with the signals ignored, as by a
/// shell's `&`. A program inherits an ignored signal and may never learn of it; a signal with a handler becomes a default one.
///
/// The handler does nothing, so this process ignores the signals as before, unless the program listens to them.
fn restore_defaults() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let ignored = |kind: &SignalKind| ignores_signal(kind.as_raw_value());
        for kind in [SignalKind::interrupt(), SignalKind::terminate()].into_iter().filter(ignored) {
            if let Err(error) = signal(kind) {
                tracing::warn!(?kind, %error, "children ignore a signal that stops them, as this process does");
            }
        }
    });
}

fn jobs() -> io::Result<&'static mpsc::Sender<SpawnRequest>> {
    if let Some(jobs) = JOBS.get() {
        return Ok(jobs);
    }
    let (sender, receiver) = mpsc::channel(QUEUE);
    std::thread::Builder::new().name("gym-launch".to_owned()).spawn(move || serve(receiver))?;
    // Two concurrent first callers may both start a thread; the second thread's sender is dropped, and the thread ends
    // unused.
    Ok(JOBS.get_or_init(|| sender))
}

fn serve(mut jobs: mpsc::Receiver<SpawnRequest>) {
    while let Some(SpawnRequest { mut command, runtime, reply }) = jobs.blocking_recv() {
        let _entered = runtime.enter();
        // tokio panics here if the runtime is shutting down. The thread must survive, because its end kills all
        // children.
        let spawned = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| command.spawn()));
        let _ = reply.send(spawned.unwrap_or_else(|_| Err(io::Error::other("the runtime is shutting down"))));
    }
}

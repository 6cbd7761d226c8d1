//! The thread that starts processes.
//!
//! The kernel sends the parent-death signal when the *thread* that forked ends, not the process. A runtime's worker may
//! end while the process lives on, and would take the children with it; this thread never ends.

use std::io;
use std::sync::OnceLock;

use tokio::process::{Child, Command};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};

/// A start takes about a millisecond, so a queue this long means 64 callers at the same instant; more wait their turn.
const QUEUE: usize = 64;

struct SpawnRequest {
    command: Command,
    runtime: Handle,
    reply: oneshot::Sender<io::Result<Child>>,
}

static JOBS: OnceLock<mpsc::Sender<SpawnRequest>> = OnceLock::new();

/// Spawns `command` from the permanent thread; the child belongs to the calling runtime.
pub(in crate::launch) async fn spawn(command: Command) -> io::Result<Child> {
    let (reply, answer) = oneshot::channel();
    let job = SpawnRequest { command, runtime: Handle::current(), reply };
    let gone = |what: &str| io::Error::other(format!("the thread that starts processes {what}"));
    jobs()?.send(job).await.map_err(|_| gone("is gone"))?;
    answer.await.map_err(|_| gone("dropped the request"))?
}

fn jobs() -> io::Result<&'static mpsc::Sender<SpawnRequest>> {
    if let Some(jobs) = JOBS.get() {
        return Ok(jobs);
    }
    let (sender, receiver) = mpsc::channel(QUEUE);
    std::thread::Builder::new().name("gym-launch".to_owned()).spawn(move || serve(receiver))?;
    // Two first callers may both start a thread; the loser's sender is dropped and its thread ends unused.
    Ok(JOBS.get_or_init(|| sender))
}

fn serve(mut jobs: mpsc::Receiver<SpawnRequest>) {
    while let Some(SpawnRequest { mut command, runtime, reply }) = jobs.blocking_recv() {
        let _entered = runtime.enter();
        // A runtime that is shutting down makes tokio panic here. The thread must survive: its end kills all children.
        let spawned = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| command.spawn()));
        let _ = reply.send(spawned.unwrap_or_else(|_| Err(io::Error::other("the runtime is shutting down"))));
    }
}

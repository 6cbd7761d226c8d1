//! Turns a process into a worker: the worker's side of the handshake.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use gym_core::base::runtime_threads;
use gym_core::group::{WorkerEnv, WorkerHost};
use gym_core::transport::Listener;
use gym_core::{CancelToken, Handler, Incarnation, Result};
use tokio::signal::unix::{SignalKind, signal};

use crate::group::provision::local::affinity::bind_to_gpu;
use crate::group::provision::local::handshake::{ASSIGNMENT_VARIABLE, HandshakeReply, WORKER_ROLE, WorkerAssignment};
use crate::group::provision::variables::process_variables;
use crate::group::provision::workers::Workers;

/// Time for running calls after a worker process was asked to exit. The launcher's own grace period takes precedence if it is
/// shorter.
const DRAIN_GRACE: Duration = Duration::from_secs(30);
/// Exit status of a process that could not become a worker.
const START_FAILED: i32 = 1;

static ENTERED: AtomicBool = AtomicBool::new(false);

/// Records that this process is no worker, so that the program may be run again as one.
pub(in crate::group::provision) fn set_entered() {
    ENTERED.store(true, Ordering::Release);
}

impl Workers {
    /// Runs the worker of a worker process until it is asked to exit, and returns the exit status.
    pub(in crate::group::provision) fn be_worker(&self) -> i32 {
        // Must run before other threads exist.
        bind_to_gpu();
        let runtime =
            match tokio::runtime::Builder::new_multi_thread().worker_threads(runtime_threads()).enable_all().build() {
                Ok(runtime) => runtime,
                Err(error) => {
                    eprintln!("gym worker: start a runtime: {error}");
                    return START_FAILED;
                }
            };
        runtime.block_on(async {
            let assignment = match std::env::var(ASSIGNMENT_VARIABLE) {
                Ok(text) => serde_json::from_str::<WorkerAssignment>(&text).map_err(|error| error.to_string()),
                Err(error) => Err(error.to_string()),
            };
            let assignment = match assignment {
                Ok(assignment) => assignment,
                Err(error) => {
                    eprintln!("gym worker: {ASSIGNMENT_VARIABLE}: {error}; {WORKER_ROLE} is for worker processes only");
                    return START_FAILED;
                }
            };
            let token = assignment.token.clone();
            match self.make(assignment).await {
                Ok((host, listener, handler)) => {
                    let reply = HandshakeReply::Serves(listener.endpoints().to_vec());
                    // If the pipe has no reader, the controller has exited, and this process is about to be killed.
                    let _ = say(&reply.line(&token));
                    serve_until_signalled(host, listener, handler).await
                }
                Err(error) => {
                    let _ = say(&HandshakeReply::Failed(error.to_string()).line(&token));
                    eprintln!("gym worker: {error}");
                    START_FAILED
                }
            }
        })
    }

    async fn make(&self, assignment: WorkerAssignment) -> Result<(WorkerHost, Box<dyn Listener>, Arc<dyn Handler>)> {
        let WorkerAssignment {
            worker, group, rank, world_size, local_rank, node_rank, incarnation, address, init, ..
        } = assignment;
        let mut env = WorkerEnv::new(group, rank, world_size);
        env.local_rank = local_rank;
        env.node_rank = node_rank;
        env.incarnation = Incarnation(incarnation);
        env.variables = process_variables();
        let host = self.kind(&worker)?.start(env, init).await?;
        let (listener, handler) = address.open(&self.transports(), Arc::new(host.clone())).await?;
        Ok((host, listener, handler))
    }
}

/// Returns `true` if [`Workers::enter`] ran in this process, so that running the program again does not run its `main` twice.
pub(crate) fn entered() -> bool {
    ENTERED.load(Ordering::Acquire)
}

fn say(line: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(line.as_bytes())?;
    out.flush()
}

async fn serve_until_signalled(host: WorkerHost, listener: Box<dyn Listener>, handler: Arc<dyn Handler>) -> i32 {
    let drain = CancelToken::new();
    let signalled = drain.clone();
    let signals = [SignalKind::interrupt(), SignalKind::terminate()].map(signal);
    let [Ok(mut interrupt), Ok(mut terminate)] = signals else {
        eprintln!("gym worker: cannot listen for signals");
        return START_FAILED;
    };
    let watch = tokio::spawn(async move {
        tokio::select! { biased;
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
        signalled.cancel();
    });
    let served = gym_core::transport::serve(listener, handler, drain, DRAIN_GRACE).await;
    watch.abort();
    // All calls have ended or were aborted by now; a blocked thread ends with the process.
    let stopped = host.stop(Duration::from_secs(1)).await;
    match served.and(stopped) {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("gym worker: {error}");
            START_FAILED
        }
    }
}

//! Turns a process into a worker: the worker's side of the handshake.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use gym_client::transport::Transports;
use gym_core::base::runtime_threads;
use gym_core::group::{STATUS_ROUTE, WorkerEnv, WorkerHost};
use gym_core::transport::{Listener, handler_fn};
use gym_core::{CancelToken, Code, Endpoint, Error, Handler, Incarnation, Request, Result};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;

use crate::collective::HostCollectives;
use crate::provision::local::address::ListenAddress;
use crate::provision::local::affinity::bind_to_gpu;
use crate::provision::local::handshake::{ASSIGNMENT_VARIABLE, HandshakeReply, WORKER_ROLE, WorkerAssignment};
use crate::provision::variables::process_variables;
use crate::provision::workers::Workers;

/// Time for running calls after a worker process was asked to exit. The launcher's own grace period takes precedence if it is
/// shorter.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(30);
/// Exit status of a process that could not become a worker.
const START_FAILED: i32 = 1;

static ENTERED: AtomicBool = AtomicBool::new(false);

/// Records that this process is no worker, so that the program may be run again as one.
pub(in crate::provision) fn set_entered() {
    ENTERED.store(true, Ordering::Release);
}

impl Workers {
    /// Runs the worker of a worker process until it is asked to exit, and returns the exit status.
    pub(in crate::provision) fn be_worker(&self) -> i32 {
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
            worker,
            group,
            rank,
            world_size,
            local_rank,
            node_rank,
            incarnation,
            address,
            collectives,
            init,
            ..
        } = assignment;
        let transports = address.scoped(&self.transports())?;
        let mut env = WorkerEnv::new(group, rank, world_size);
        env.local_rank = local_rank;
        env.node_rank = node_rank;
        env.incarnation = Incarnation(incarnation);
        env.variables = process_variables();
        env.peers = collectives.peers(
            &env.group,
            rank,
            Arc::new(HostCollectives::sharing(transports.clone(), collectives.sharing(), collectives.shared_bytes)),
        );
        let host = self.kind(&worker)?.start(env, init).await?;
        let control = serve_status(address.for_control(&self.transports()), self.transports(), host.clone()).await?;
        host.set_control(control);
        let (listener, handler) = address.open(&transports, Arc::new(host.clone())).await?;
        Ok((host, listener, handler))
    }
}

/// Serves the status of a worker on a thread with I/O of its own, so that a method that computes on the threads of the runtime delays no heartbeat. The
/// thread ends with the process. Returns its endpoints; none if no transport of this program listens without a configuration.
async fn serve_status(address: ListenAddress, transports: Transports, host: WorkerHost) -> Result<Vec<Endpoint>> {
    let handler = Arc::new(handler_fn(move |request: Request| {
        let host = host.clone();
        async move {
            match request.route.path() {
                STATUS_ROUTE => host.handle(request).await,
                _ => Err(Error::not_started(Code::NotFound, format!("only {STATUS_ROUTE} is served here"))),
            }
        }
    }));
    let (opened, opening) = oneshot::channel();
    let serving = move || {
        let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
            Ok(runtime) => runtime,
            Err(error) => {
                return drop(
                    opened.send(Err(Error::internal("cannot start a runtime for heartbeats").caused_by(error))),
                );
            }
        };
        runtime.block_on(async {
            let opened_at = match address.scoped(&transports) {
                Ok(transports) => address.open(&transports, handler).await,
                Err(error) => Err(error),
            };
            match opened_at {
                Ok((listener, handler)) => {
                    let _ = opened.send(Ok(listener.endpoints().to_vec()));
                    let ended = gym_core::transport::serve(listener, handler, CancelToken::new(), Duration::ZERO).await;
                    eprintln!("gym worker: the listener for heartbeats has ended: {ended:?}");
                }
                Err(error) if error.code() == Code::Unimplemented => drop(opened.send(Ok(Vec::new()))),
                Err(error) => drop(opened.send(Err(error))),
            }
        });
    };
    let spawned = std::thread::Builder::new().name("gym-heartbeat".to_owned()).spawn(serving);
    spawned.map_err(|error| Error::internal("cannot start the thread for heartbeats").caused_by(error))?;
    let endpoints = opening.await.map_err(|_| Error::internal("the thread for heartbeats has ended"))?;
    endpoints.map_err(|error| error.about("listen for heartbeats"))
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
    let served = gym_core::transport::serve(listener, handler, drain, DRAIN_TIMEOUT).await;
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

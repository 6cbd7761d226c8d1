//! SIGINT and SIGTERM: the first requests a graceful stop, the second an immediate one.

use futures_util::FutureExt as _;
use gym_core::CancelToken;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::JoinHandle;

use crate::cli::exit::Failure;

/// The stops that signals have requested. Dropping it ends the listener.
#[derive(Debug)]
pub(in crate::cli) struct StopSignals {
    /// Cancelled at the first signal.
    pub(in crate::cli) graceful: CancelToken,
    /// Cancelled at the second signal.
    pub(in crate::cli) immediate: CancelToken,
    listener: JoinHandle<()>,
}

impl StopSignals {
    /// Starts listening; before this call, a signal ends the process.
    pub(in crate::cli) fn listen() -> Result<Self, Failure> {
        let failed = |error| Failure::Failed(format!("cannot listen for signals: {error}"));
        let interrupt = signal(SignalKind::interrupt()).map_err(failed)?;
        let terminate = signal(SignalKind::terminate()).map_err(failed)?;
        let (graceful, immediate) = (CancelToken::new(), CancelToken::new());
        let listener = tokio::spawn(listen([interrupt, terminate], graceful.clone(), immediate.clone()).boxed());
        Ok(Self { graceful, immediate, listener })
    }
}

async fn listen([mut interrupt, mut terminate]: [Signal; 2], graceful: CancelToken, immediate: CancelToken) {
    for token in [graceful, immediate] {
        tokio::select! {
            biased;
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
        token.cancel();
    }
}

impl Drop for StopSignals {
    fn drop(&mut self) {
        self.listener.abort();
    }
}

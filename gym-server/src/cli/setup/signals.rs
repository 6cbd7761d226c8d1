//! SIGINT and SIGTERM: the first asks for an graceful end, the second for one at once.

use futures_util::FutureExt as _;
use gym_core::CancelToken;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::JoinHandle;

use crate::cli::exit::Failure;

/// What the signals have asked for. Dropping it stops listening.
#[derive(Debug)]
pub(in crate::cli) struct StopSignals {
    /// Fires at the first signal.
    pub(in crate::cli) graceful: CancelToken,
    /// Fires at the second.
    pub(in crate::cli) immediate: CancelToken,
    listener: JoinHandle<()>,
}

impl StopSignals {
    /// Listens from now on; until then a signal ends the process.
    pub(in crate::cli) fn listen() -> Result<Self, Failure> {
        let failed = |error| Failure::Failed(format!("signals cannot be received: {error}"));
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

//! SIGINT and SIGTERM: the first asks for an orderly end, the second for one at once.

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::Failure;

/// What the signals have asked for. Dropping it stops listening.
#[derive(Debug)]
pub(super) struct Stop {
    /// Fires at the first signal.
    pub(super) orderly: CancellationToken,
    /// Fires at the second.
    pub(super) at_once: CancellationToken,
    listener: JoinHandle<()>,
}

impl Stop {
    /// Listens from now on; until then a signal ends the process.
    pub(super) fn listen() -> Result<Self, Failure> {
        let failed = |error| Failure::Failed(format!("signals cannot be received: {error}"));
        let interrupt = signal(SignalKind::interrupt()).map_err(failed)?;
        let terminate = signal(SignalKind::terminate()).map_err(failed)?;
        let (orderly, at_once) = (CancellationToken::new(), CancellationToken::new());
        let listener = tokio::spawn(listen([interrupt, terminate], orderly.clone(), at_once.clone()));
        Ok(Self { orderly, at_once, listener })
    }
}

async fn listen([mut interrupt, mut terminate]: [Signal; 2], orderly: CancellationToken, at_once: CancellationToken) {
    for token in [orderly, at_once] {
        tokio::select! {
            biased;
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
        token.cancel();
    }
}

impl Drop for Stop {
    fn drop(&mut self) {
        self.listener.abort();
    }
}

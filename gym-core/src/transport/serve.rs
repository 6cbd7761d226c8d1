//! The only accept loop: serves a handler to every peer of a listener until it is drained.

use std::sync::Arc;
use std::time::Duration;

use crate::base::cancel::CancelToken;
use crate::base::error::Result;
use crate::transport::{Handler, Listener};
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use tokio::task::JoinSet;

/// Serves every peer of `listener` with `handler`. When `drain` fires, no new peers and calls are accepted. Running calls have
/// `grace` to finish, then their connections are broken.
///
/// # Errors
/// The error that ended the listener.
pub fn serve(
    mut listener: Box<dyn Listener>,
    handler: Arc<dyn Handler>,
    drain: CancelToken,
    grace: Duration,
) -> BoxFuture<'static, Result<()>> {
    Box::pin(async move {
        let mut peers = JoinSet::new();
        let ended = loop {
            tokio::select! {
                biased;
                () = drain.cancelled() => break Ok(()),
                // Removes finished peers, so that the set contains only connected ones.
                Some(_) = peers.join_next(), if !peers.is_empty() => {}
                accepted = listener.accept() => match accepted {
                    Ok(peer) => {
                        let (handler, drain) = (Arc::clone(&handler), drain.clone());
                        let served = async move {
                            let address = Arc::clone(&peer.peer().address);
                            if let Err(error) = peer.serve(handler, drain).await {
                                tracing::debug!(%address, %error, "a peer ended with an error");
                            }
                        };
                        peers.spawn(served.boxed());
                    }
                    Err(error) => {
                        // Connected peers are served until their calls finish.
                        drain.cancel();
                        break Err(error);
                    }
                },
            }
        };
        drop(listener);
        let drained = tokio::time::timeout(grace, async { while peers.join_next().await.is_some() {} }).await;
        if drained.is_err() {
            tracing::warn!(
                peers = peers.len(),
                ?grace,
                "calls were still running at the end of the grace; breaking them"
            );
        }
        peers.shutdown().await;
        ended
    })
}

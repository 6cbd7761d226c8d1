//! Keeps a server registered: renews its lease, registers again when the head has forgotten it, lets go at the end.

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use gym_core::registry::{Lease, Registration, Registry};
use gym_core::{CallContext, CancelToken, Code, Result};
use tokio::task::JoinHandle;

/// A registered server. Dropping it stops the renewals; [`LeaseKeeper::end`] tells the head as well.
#[derive(Debug)]
pub struct LeaseKeeper {
    stop: CancelToken,
    task: JoinHandle<()>,
    lease: Lease,
}

impl LeaseKeeper {
    /// Registers and goes on renewing, at a third of the lease's time to live. A head that is away is tried again until it is
    /// back; one that has forgotten the lease (it was restarted) gets the registration again.
    ///
    /// # Errors
    /// The first registration's.
    #[must_use = "a future does nothing until it is awaited"]
    pub fn start<'a>(
        registry: Arc<dyn Registry>,
        cx: &'a CallContext,
        registration: Registration,
    ) -> BoxFuture<'a, Result<Self>> {
        Box::pin(async move {
            let lease = registry.register(cx, registration.clone()).await?;
            let stop = CancelToken::new();
            let task = tokio::spawn(renew(registry, registration, lease.clone(), stop.clone()).boxed());
            Ok(Self { stop, task, lease })
        })
    }

    /// The lease as it was granted.
    #[must_use]
    pub fn lease(&self) -> &Lease {
        &self.lease
    }

    /// Deregisters, within `grace`.
    #[must_use = "a future does nothing until it is awaited"]
    pub fn end(mut self, grace: Duration) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            self.stop.cancel();
            if tokio::time::timeout(grace, &mut self.task).await.is_err() {
                tracing::warn!(
                    name = self.lease.name,
                    "the head did not take the deregistration in time; the lease runs out"
                );
            }
        })
    }
}

impl Drop for LeaseKeeper {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn renew(registry: Arc<dyn Registry>, registration: Registration, mut lease: Lease, stop: CancelToken) {
    let period = (lease.ttl / 3).max(Duration::from_millis(1));
    loop {
        tokio::select! {
            biased;
            () = stop.cancelled() => break,
            () = tokio::time::sleep(period) => {}
        }
        let cx = CallContext::within(period);
        let renewed = tokio::select! {
            biased;
            () = stop.cancelled() => break,
            renewed = registry.renew(&cx, &lease) => renewed,
        };
        let Err(error) = renewed else { continue };
        if error.code() != Code::NotFound {
            tracing::warn!(name = lease.name, %error, "the lease was not renewed; trying again");
            continue;
        }
        // The same rank again if it is free; another one if somebody has come meanwhile and no rank was asked for.
        let same = Registration { rank: Some(lease.rank), ..registration.clone() };
        let again = match registry.register(&cx, same).await {
            Err(error) if error.code() == Code::AlreadyExists && registration.rank.is_none() => {
                registry.register(&cx, registration.clone()).await
            }
            again => again,
        };
        match again {
            Ok(again) => {
                tracing::info!(name = lease.name, "registered again");
                lease = again;
            }
            // A newer incarnation has our place: this life is over, and saying so once is enough.
            Err(error) if error.code() == Code::AlreadyExists => {
                tracing::error!(name = lease.name, %error, "another server has taken this name");
                return;
            }
            Err(error) => tracing::warn!(name = lease.name, %error, "not registered; trying again"),
        }
    }
    let cx = CallContext::within(period.min(Duration::from_secs(2)));
    if let Err(error) = registry.deregister(&cx, lease.clone()).await {
        tracing::debug!(name = lease.name, %error, "not deregistered; the lease runs out");
    }
}

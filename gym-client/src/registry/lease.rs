//! Keeps a server registered: renews its lease, registers again after a restart of the head server, and deregisters at the end.

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use gym_core::registry::{Lease, Registration, Registry};
use gym_core::{CallContext, CancelToken, Code, Result};
use tokio::task::JoinHandle;

/// A registered server. Dropping the keeper stops the renewals; [`LeaseKeeper::end`] deregisters as well.
#[derive(Debug)]
pub struct LeaseKeeper {
    stop: CancelToken,
    task: JoinHandle<()>,
    lease: Lease,
}

impl LeaseKeeper {
    /// Registers, then renews the lease after each third of its time to live. If the head server is unreachable, the next renewal
    /// tries again. If the head server has no such lease, because it was restarted, the server registers again.
    ///
    /// # Errors
    /// The error of the first registration.
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

    /// Returns the lease as the registry granted it.
    #[must_use]
    pub fn lease(&self) -> &Lease {
        &self.lease
    }

    /// Deregisters within `grace`. If the registry does not answer in time, the lease expires.
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
        // The same number if it is free. If another server has taken it and no number was requested, another one.
        let mut same = registration.clone();
        same.replica = Some(lease.replica);
        let again = match registry.register(&cx, same).await {
            Err(error) if error.code() == Code::AlreadyExists && registration.replica.is_none() => {
                registry.register(&cx, registration.clone()).await
            }
            again => again,
        };
        match again {
            Ok(again) => {
                tracing::info!(name = lease.name, "registered again");
                lease = again;
            }
            // A newer incarnation has taken the place: this one ends, and logs it once.
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

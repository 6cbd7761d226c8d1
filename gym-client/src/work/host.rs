//! Serves a pool to the workers of a registry: listens, and registers with the label that workers look for.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use gym_core::registry::Registration;
use gym_core::server::ServerKind;
use gym_core::transport::{ListenOptions, serve};
use gym_core::{CallContext, CancelToken, Endpoint, Handler, Incarnation, Result, World};
use tokio::task::JoinSet;

use crate::client::ServerClient;
use crate::registry::{LeaseKeeper, is_unspecified, own_address};
use crate::transport::HTTP;
use crate::work::pool::WorkPool;
use crate::work::watch::WORK_LABEL;

/// The implementation under which the pool of a collector is registered. It is not a server of the configuration.
pub const COLLECTOR_POOL: &str = "collector";

/// Limit for the registration.
const REGISTER_TIMEOUT: Duration = Duration::from_secs(30);

/// A pool that listens and is registered. Dropping it closes the listener; the lease then expires.
#[derive(Debug)]
pub struct PoolHost {
    pool: WorkPool,
    lease: LeaseKeeper,
    drain: CancelToken,
    serving: JoinSet<Result<()>>,
    endpoints: Vec<Endpoint>,
}

impl PoolHost {
    /// Listens at `host` on a free port, over the transports of `client`, and registers the pool as `name` in the client's registry. The
    /// pool follows the members of the client's cluster. If other machines reach `host`, it gives work only to them.
    ///
    /// # Errors
    /// The errors of the listener and of the registration.
    pub async fn start(pool: WorkPool, name: &str, host: &str, client: &ServerClient, world: &World) -> Result<Self> {
        let handler: Arc<dyn Handler> = Arc::new(pool.clone());
        Self::start_with(handler, pool, name, host, client, world).await
    }

    /// Like [`PoolHost::start`], with a handler that answers further routes, such as `/metrics`, and passes all other requests to `pool`.
    ///
    /// # Errors
    /// As [`PoolHost::start`].
    pub async fn start_with(
        handler: Arc<dyn Handler>,
        pool: WorkPool,
        name: &str,
        host: &str,
        client: &ServerClient,
        world: &World,
    ) -> Result<Self> {
        pool.listens_at(host);
        let mut place = ListenOptions::default().at(host.to_owned(), 0);
        if is_unspecified(host) {
            place = place.advertised_as(own_address().to_string());
        }
        let listened = client.transports().listen(place, handler, &[HTTP]).await;
        let (listener, handler) = listened.map_err(|error| error.about(format!("listen for workers on {host}")))?;
        let mut endpoints = listener.endpoints().to_vec();
        endpoints.retain(|endpoint| endpoint.scheme() != "http+frames");
        let drain = CancelToken::new();
        let mut serving = JoinSet::new();
        serving.spawn(serve(listener, handler, drain.clone(), Duration::from_secs(2)));
        let mut registration = Registration::new(name, ServerKind::Environment, endpoints.clone());
        COLLECTOR_POOL.clone_into(&mut registration.implementation);
        registration.incarnation = Incarnation(u64::try_from(world.now().as_millis()).unwrap_or(u64::MAX));
        registration.labels = BTreeMap::from([
            (WORK_LABEL.to_owned(), "1".to_owned()),
            ("pid".to_owned(), std::process::id().to_string()),
        ]);
        let cx = CallContext::within(REGISTER_TIMEOUT);
        if let Some(members) = client.members() {
            pool.follow(Arc::clone(members));
        }
        let lease = LeaseKeeper::start(Arc::clone(client.registry()), &cx, registration).await?;
        Ok(Self { pool, lease, drain, serving, endpoints })
    }

    /// Returns the endpoints that workers poll.
    #[must_use]
    pub fn endpoints(&self) -> &[Endpoint] {
        &self.endpoints
    }

    /// Deregisters the pool, ends it, and closes its listener.
    #[must_use = "a future does nothing until it is awaited"]
    pub fn end(mut self, grace: Duration) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            self.lease.end(grace).await;
            self.pool.close();
            self.drain.cancel();
            let ending = async { while self.serving.join_next().await.is_some() {} };
            if tokio::time::timeout(grace, ending).await.is_err() {
                tracing::debug!("workers were still connected at the end of the grace");
            }
        })
    }
}

//! Bundles that are held on nodes.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::stream::BoxStream;
use gym_core::{CallContext, Result};

use crate::placement::Placement;
use crate::provision::deployment::{Deployment, LaunchSpec, Reservation};
use crate::provision::events::{NodeEvent, NodeStatus};
use crate::provision::nodes::deployment::NodesDeployment;
use crate::provision::nodes::state::NodesState;

#[derive(Debug)]
pub(crate) struct NodesReservation(pub(super) Arc<NodesState>);

#[cfg(feature = "ray")]
impl NodesReservation {
    /// Takes the news that an engine is about to take these nodes away.
    pub(crate) fn drain(&self, is: impl Fn(&str) -> bool, why: &str) {
        self.0.drain(is, why);
    }
}

#[async_trait]
impl Reservation for NodesReservation {
    fn placement(&self) -> Arc<Placement> {
        self.0.placement()
    }

    fn nodes(&self) -> Vec<NodeStatus> {
        self.0.statuses()
    }

    fn events(&self) -> BoxStream<'static, NodeEvent> {
        self.0.log().stream()
    }

    async fn launch(&self, cx: &CallContext, spec: LaunchSpec) -> Result<Arc<dyn Deployment>> {
        Ok(Arc::new(NodesDeployment::launch(&self.0, cx, spec).await?))
    }

    async fn release(&self, grace: Duration) -> Result<()> {
        self.0.release(grace).await
    }
}

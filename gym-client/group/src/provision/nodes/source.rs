//! The agents of a controller: which there are, and who decides on the bundles that each of them has.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use gym_core::registry::{MemberRegistry, MemberState};
use gym_core::{CallContext, Endpoint, Result};

use crate::placement::{NodeResources, Placement, place};
use crate::provision::deployment::ReserveRequest;
use crate::provision::nodes::moving::{BundleMoves, move_bundles};

/// Where the agents of a controller come from.
#[async_trait]
pub(crate) trait NodeSource: fmt::Debug + Send + Sync + 'static {
    /// Returns the agents that there are now: a name for errors, and the endpoints.
    async fn agents(&self, cx: &CallContext) -> Result<Vec<(String, Vec<Endpoint>)>>;

    /// Places the bundles of a request on `nodes`, by what is free there.
    ///
    /// # Errors
    /// The errors of [`place`].
    fn place(&self, request: &ReserveRequest, nodes: &[NodeResources]) -> Result<Placement> {
        place(&request.cluster, nodes, request.unified)
    }

    /// Places the bundles of lost hosts, given by position and name, on `nodes`. `kept` are the names of the nodes that have the other bundles.
    ///
    /// # Errors
    /// The errors of [`place`].
    fn move_lost(
        &self,
        request: &ReserveRequest,
        placement: &Placement,
        lost: &BTreeMap<usize, String>,
        kept: &BTreeSet<String>,
        nodes: &[NodeResources],
    ) -> Result<BundleMoves> {
        let lost = lost.keys().copied().collect();
        move_bundles(&request.cluster, request.unified, placement, &lost, kept, nodes)
    }
}

/// The members of a cluster that run an agent.
pub(super) struct MemberAgents(pub(super) Arc<dyn MemberRegistry>);

impl fmt::Debug for MemberAgents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MemberAgents")
    }
}

#[async_trait]
impl NodeSource for MemberAgents {
    async fn agents(&self, cx: &CallContext) -> Result<Vec<(String, Vec<Endpoint>)>> {
        let members = self.0.members(cx).await?;
        let serving = members.into_iter().filter(|member| member.state == MemberState::Serving);
        Ok(serving.filter_map(|member| Some((member.spec.name, member.spec.node?.endpoints))).collect())
    }
}

/// Agents at known endpoints.
#[derive(Debug)]
pub(super) struct FixedAgents(pub(super) Vec<Endpoint>);

#[async_trait]
impl NodeSource for FixedAgents {
    async fn agents(&self, _: &CallContext) -> Result<Vec<(String, Vec<Endpoint>)>> {
        Ok(self.0.iter().map(|agent| (agent.as_str().to_owned(), vec![agent.clone()])).collect())
    }
}

//! Plans of everything at once: those of a cluster and of a group, with one network, one script and one end of the faults.

use std::fmt;

use super::{Plan, Setting};
use crate::groups::GroupPlan;
use crate::script::normalized;

/// The parameters of a seed. The network and the script are those of the deployment.
#[derive(Clone, Debug)]
pub(crate) struct WholePlan {
    pub(crate) deployment: Plan,
    pub(crate) group: GroupPlan,
}

impl WholePlan {
    pub(crate) fn drawn(seed: u64, first: bool) -> Self {
        let (mut deployment, mut group) = (Plan::drawn(seed, Setting::Cluster), GroupPlan::drawn(seed));
        if !first {
            (deployment, group) = (deployment.with_additions(), group.with_additions());
        }
        // Calls of groups need ordered connections.
        deployment.faults.reorder = 0.0;
        deployment.turns = true;
        deployment.heals_at = deployment.heals_at.max(group.heals_at);
        group.heals_at = deployment.heals_at;
        deployment.script.append(&mut group.script);
        let mut this = Self { deployment, group };
        this.deployment.script =
            normalized(std::mem::take(&mut this.deployment.script), &this.hosts(), this.group.heals_at);
        this
    }

    pub(crate) fn hosts(&self) -> Vec<&'static str> {
        [self.deployment.hosts(), self.group.hosts()].concat()
    }
}

impl fmt::Display for WholePlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:?}", self.group)?;
        self.deployment.fmt(f)
    }
}

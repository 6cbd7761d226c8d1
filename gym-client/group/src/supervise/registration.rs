//! Registrations of the groups that run on the bundles of a cluster.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use gym_core::{Code, Error, Result};
use parking_lot::Mutex;

use crate::Gate;
use crate::provision::BundleId;
use crate::supervise::supervisor::GroupStop;
use crate::usage::node::NodeMonitor;

/// The groups that run on a cluster's bundles.
#[derive(Debug, Default)]
pub(crate) struct ClusterGroups(Mutex<(u64, BTreeMap<u64, RegisteredGroup>)>);

#[derive(Debug)]
struct RegisteredGroup {
    group: Arc<str>,
    bundles: Arc<BTreeSet<BundleId>>,
    /// Stops the group; `None` while it starts.
    stop: Option<GroupStop>,
}

/// The registration of a group on its cluster; it ends when dropped.
#[derive(Debug)]
pub(crate) struct GroupRegistration {
    groups: Arc<ClusterGroups>,
    number: u64,
}

/// The links from a group to the cluster that it runs on.
#[derive(Debug)]
pub(crate) struct ClusterBinding {
    pub(crate) gate: Option<Arc<dyn Gate>>,
    pub(crate) registration: GroupRegistration,
    pub(crate) monitor: Option<Arc<NodeMonitor>>,
}

impl ClusterGroups {
    pub(crate) fn admit(
        self: &Arc<Self>,
        group: Arc<str>,
        bundles: &Arc<BTreeSet<BundleId>>,
        max: Option<u32>,
    ) -> Result<GroupRegistration> {
        let mut groups = self.0.lock();
        let there = groups.1.values().filter(|registered| !registered.bundles.is_disjoint(bundles));
        let names: Vec<&str> = there.map(|registered| &*registered.group).collect();
        if max.is_some_and(|max| names.len() >= max as usize) {
            let message = format!(
                "its bundles are used by {}, and no more groups may share them; shut that group down, use other bundles, or \
                 set enable_colocation or raise max_colocated_worker_groups",
                names.join(", ")
            );
            return Err(Error::not_started(Code::ResourceExhausted, message).about(format!("start group {group}")));
        }
        groups.0 += 1;
        let number = groups.0;
        groups.1.insert(number, RegisteredGroup { group, bundles: Arc::clone(bundles), stop: None });
        Ok(GroupRegistration { groups: Arc::clone(self), number })
    }

    pub(crate) fn stops(&self) -> Vec<GroupStop> {
        self.0.lock().1.values().filter_map(|registered| registered.stop.clone()).collect()
    }
}

impl GroupRegistration {
    /// Returns the number of the group on the cluster.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// Stores the handle that stops the group.
    pub(crate) fn ends_by(&self, stop: GroupStop) {
        if let Some(registered) = self.groups.0.lock().1.get_mut(&self.number) {
            registered.stop = Some(stop);
        }
    }
}

impl Drop for GroupRegistration {
    fn drop(&mut self) {
        self.groups.0.lock().1.remove(&self.number);
    }
}

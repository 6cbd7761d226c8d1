//! The suite that every group passes, on ranks that a provisioner started.

use std::sync::Arc;

use async_trait::async_trait;
use gym_client::Transports;
use gym_core::CallContext;
use gym_core::transport::TransportPolicy;
use gym_group::testing::{GroupFixture, GroupSetup, TestGroup, TestWorkerKind, group};
use gym_group::{Group, GroupOptions};
use gym_group::{LaunchSpec, Provisioner, RankPlace};
use gym_group::{Rank, WorkerGroupExt};

use super::{LONG, provisioners};

pub(super) struct Provisioned {
    provisioner: Box<dyn Provisioner>,
    options: GroupOptions,
    policy: Option<TransportPolicy>,
}

impl Provisioned {
    /// Ranks of `provisioner` that are reached over `transports`; told to offer what `policy` allows.
    pub(super) fn over(
        provisioner: Box<dyn Provisioner>,
        transports: Transports,
        policy: Option<TransportPolicy>,
    ) -> Self {
        Self { provisioner, options: GroupOptions::new(transports), policy }
    }

    pub(super) async fn pass(self) {
        group(&self).await;
    }
}

#[derive(Debug)]
struct Started(Arc<Group>);

#[async_trait(?Send)]
impl GroupFixture for Provisioned {
    async fn start(&self, setup: GroupSetup) -> Box<dyn TestGroup> {
        let worker = match setup.worker {
            TestWorkerKind::Async => "test-async",
            TestWorkerKind::Blocking => "test-blocking",
        };
        let worker = format!("{worker}-{}", setup.calls_max);
        let ranks = u32::try_from(setup.layout.size()).expect("a case has few ranks");
        let init = serde_json::value::to_raw_value(&()).expect("JSON");
        let places = (0..ranks).map(|rank| RankPlace::on_one_node(rank, ranks)).collect();
        let mut options = self.options.clone();
        options.layout = Some(setup.layout);
        let mut spec = LaunchSpec::new("tested", worker, init, places);
        spec.transport_policy.clone_from(&self.policy);
        let group = Group::start(&CallContext::within(LONG), &*self.provisioner, spec, options).await;
        Box::new(Started(Arc::new(group.expect("the suite's workers start"))))
    }
}

#[async_trait(?Send)]
impl TestGroup for Started {
    fn group(&self) -> Arc<dyn WorkerGroupExt> {
        Arc::clone(&self.0) as _
    }

    async fn replace(&self, rank: Rank) {
        self.0.kill(rank).await.expect("it lives");
        self.0.restart_failed_workers(&CallContext::within(LONG)).await.expect("restarts");
    }
}

async fn run(which: usize) {
    let (_, provisioner, transports) = provisioners().swap_remove(which);
    Provisioned::over(provisioner, transports, None).pass().await;
}

pub(crate) async fn processes_pass_the_suite_of_all_groups() {
    run(0).await;
}

pub(crate) async fn ranks_in_one_process_pass_the_suite_of_all_groups() {
    run(1).await;
}

pub(crate) async fn ranks_on_two_nodes_pass_the_suite_of_all_groups() {
    run(2).await;
}

//! Tied ranks are one model: they end together, start together and serve together.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::stream::BoxStream;
use gym_client::Transports;
use gym_core::transport::InProcess;
use gym_core::{CallContext, Code, Incarnation, Result};
use gym_group::placement::{ClusterSpec, Placement, WorkersOn};
use gym_group::{
    Deployment, GroupRequest, InProcessRanks, LaunchSpec, NodeEvent, NodeStatus, ProcessUsage, Provisioner, RankEvent,
    Reservation, ReserveRequest, VirtualCluster,
};
use gym_group::{Dispatch, ExitCause, FailureKind, Rank, RankState, WorkerGroup, WorkerGroupExt};
use gym_group::{Group, GroupOptions, RankStatus};
use rustix::process::Signal;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::types::{Describe, Init, Job, Meet, Warm, Work, workers};
use super::{LONG, alive, here, options, pid, provisioners, signal, spec, start, status, stop, until};

/// Restarts of the engine that is made fit again and again.
const LIVES: u32 = 10;

/// Two engines of two ranks each.
fn engines(worker: &str) -> LaunchSpec {
    let mut spec = spec(worker, 4);
    for place in &mut spec.ranks {
        place.tied = place.rank / 2;
    }
    spec
}

async fn lives(group: &Group) -> Vec<u64> {
    let ranks = group.call(Describe, ()).deadline(LONG).await.expect("all answer").into_values();
    ranks.into_iter().map(|rank| rank.incarnation).collect()
}

pub(crate) async fn tied_ranks_end_and_come_back_together() {
    for (name, provisioner, transports) in provisioners() {
        let mut options = GroupOptions::new(transports).restarting(2);
        options.backoff_min = Duration::from_millis(5);
        let cx = CallContext::within(LONG);
        let group = Group::start(&cx, &*provisioner, engines("obedient"), options).await.expect(name);
        let mut view = group.view();
        group.kill(3).await.expect("it lives");
        let healthy = |life: u64| {
            move |member: &gym_group::RankView| member.incarnation.0 == life && member.state == RankState::Healthy
        };
        loop {
            timeout(LONG, view.changed()).await.expect("in time").expect("supervised");
            let now = view.borrow_and_update().clone();
            let [left, right] = [2, 3].map(|rank| now.member(rank).expect("a rank").clone());
            assert_eq!(left.incarnation, right.incarnation, "{name}: one life, one number");
            assert_eq!(left.state == RankState::Healthy, right.state == RankState::Healthy, "{name}: {now:?}");
            if healthy(2)(&left) {
                assert_eq!(left.exit.expect("it ended").cause, ExitCause::Tied, "{name}");
                assert_eq!(right.exit.expect("it ended").cause, ExitCause::Died, "{name}");
                break;
            }
        }
        assert_eq!(lives(&group).await, [1, 1, 2, 2], "{name}: the other engine was left alone");
        let used: Vec<u32> = group.worker_status().iter().map(|rank| rank.restarts_used).collect();
        assert_eq!(used, [0, 0, 1, 1], "{name}: one restart of the whole");
        stop(&group).await;
    }
}

pub(crate) async fn a_call_to_a_tied_rank_fails_with_the_rank_that_it_is_tied_to() {
    let group = start(engines("obedient"), options()).await.expect("starts");
    let (leader, other) = (pid(&group, 0), pid(&group, 1));
    let job = Job { ms: 3_600_000, tells: false };
    let call = group.call(Work, job).dispatch(Dispatch::rank(0)).deadline(LONG).start().await.expect("started");
    signal(other, Signal::KILL);
    let error = call.await.expect_err("half of it is gone");
    assert_eq!(error.first().and_then(gym_group::RankOutcome::kind), Some(FailureKind::Died), "{error:?}");
    assert!(error.to_string().contains("ended with a rank to which it is tied: rank 1 died by signal 9"), "{error}");
    until("its process is gone", || !alive(leader)).await;
    assert_eq!(group.restart_failed_workers(&CallContext::within(LONG)).await.expect("restarts"), [0, 1]);
    assert_eq!(lives(&group).await, [2, 2, 1, 1]);
    stop(&group).await;
}

pub(crate) async fn tied_ranks_are_warmed_together_and_retired_together() {
    let group = start(engines("obedient"), options().restarting(1).on_restart(Warm, true)).await.expect("starts");
    signal(pid(&group, 0), Signal::KILL);
    until("they serve again", || {
        [0, 1].iter().all(|rank| {
            let now = status(&group, *rank);
            (now.incarnation.0, now.state) == (2, RankState::Healthy)
        })
    })
    .await;
    let warmed: Vec<u32> = group
        .call(Describe, ())
        .deadline(LONG)
        .await
        .expect("answers")
        .into_values()
        .iter()
        .map(|rank| rank.warmed)
        .collect();
    assert_eq!(warmed, [1, 1, 0, 0]);
    signal(pid(&group, 1), Signal::KILL);
    until("both are retired", || [0, 1].iter().all(|rank| status(&group, *rank).state == RankState::Retired)).await;
    let error = group.restart_failed_workers(&CallContext::within(LONG)).await.expect_err("no budget");
    assert_eq!(error.code(), Code::ResourceExhausted);
    assert!(error.to_string().contains("ranks [0, 1]"), "{error}");
    stop(&group).await;
}

pub(crate) async fn ranks_are_tied_as_the_request_to_the_cluster_says() {
    let mut spec = ClusterSpec::new([4]);
    spec.use_gpus = false;
    let cluster = VirtualCluster::new(spec, here()).expect("valid").simulate_nodes(&[4]);
    let mut request = GroupRequest::new("engines", "obedient", &Init::default(), options()).expect("JSON");
    request.on = WorkersOn::Tied(vec![(0, vec![0, 1]), (0, vec![2]), (0, vec![3])]);
    let cx = CallContext::within(LONG);
    let group = cluster.start(&cx, request).await.expect("starts");
    let ranks = group.call(Describe, ()).deadline(LONG).await.expect("all answer").into_values();
    let ports: Vec<_> = ranks.iter().map(|rank| rank.variables.get("VLLM_PORT").map(String::as_str)).collect();
    assert_eq!(ports, [Some("7000"), None, Some("7200"), Some("7300")], "leaders know where their engines meet");
    group.kill(1).await.expect("it lives");
    until("both are dead", || [0, 1].iter().all(|rank| status(&group, *rank).state == RankState::Dead)).await;
    group.restart_failed_workers(&cx).await.expect("restarts");
    assert_eq!(lives(&group).await, [2, 2, 1, 1]);
    stop(&group).await;
}

pub(crate) async fn a_tied_group_of_which_one_does_not_start_is_ended() {
    let error = start(engines("first-only"), options()).await.expect_err("rank 1 does not start");
    let dead: Vec<_> =
        error.failed().filter(|(_, state, _)| *state == RankState::Dead).map(|(rank, ..)| rank).collect();
    assert!(dead.contains(&0) && dead.contains(&1) || dead.contains(&2) && dead.contains(&3), "{error}");
    assert!(error.to_string().contains("only rank 0 has room"), "{error}");
}

pub(crate) async fn tied_ranks_are_made_fit_by_one_call_in_which_they_may_meet() {
    let switchboard = InProcess::new();
    let mut spec = ClusterSpec::new([2]);
    (spec.use_gpus, spec.enable_colocation) = (false, Some(true));
    let cluster = VirtualCluster::new(spec, InProcessRanks::new(workers(), switchboard.clone())).expect("valid");
    let cluster = cluster.simulate_nodes(&[2]);
    let cx = CallContext::within(LONG);
    let mut options = GroupOptions::new(Transports::from_features(switchboard)).restarting(LIVES);
    (options.backoff_min, options.backoff_max) = (Duration::from_millis(1), Duration::from_millis(1));
    let warmed = options.clone().on_restart(Meet, ());
    let mut request = GroupRequest::new("engine", "meeting", &Init::default(), warmed).expect("JSON");
    request.on = WorkersOn::Tied(vec![(0, vec![0, 1])]);
    let engine = cluster.start(&cx, request).await.expect("starts");
    let request = GroupRequest::new("busy", "obedient", &Init::default(), options).expect("JSON");
    let busy = Arc::new(cluster.start(&cx, request).await.expect("starts"));
    let mut calls = JoinSet::new();
    for _ in 0..4 {
        let busy = Arc::clone(&busy);
        calls.spawn(async move {
            loop {
                busy.call(Describe, ()).deadline(LONG).await.expect("its turn comes");
            }
        });
    }
    for life in 1..=LIVES {
        engine.kill(0).await.expect("it lives");
        until("they serve again", || {
            let serves = |status: &RankStatus| status.incarnation.0 > life.into() && status.state == RankState::Healthy;
            engine.worker_status().iter().all(serves)
        })
        .await;
    }
    calls.shutdown().await;
    stop(&engine).await;
    stop(&busy).await;
}

/// Ranks of a provisioner that panics when it is first asked to restart some.
#[derive(Debug)]
struct Clumsy(Box<dyn Provisioner>);

#[derive(Debug)]
struct ClumsyReservation(Arc<dyn Reservation>);

#[derive(Debug)]
struct ClumsyRanks {
    ranks: Arc<dyn Deployment>,
    stumbled: AtomicBool,
}

#[async_trait]
impl Provisioner for Clumsy {
    async fn reserve(&self, cx: &CallContext, request: &ReserveRequest) -> Result<Arc<dyn Reservation>> {
        Ok(Arc::new(ClumsyReservation(self.0.reserve(cx, request).await?)))
    }
}

#[async_trait]
impl Reservation for ClumsyReservation {
    fn placement(&self) -> Arc<Placement> {
        self.0.placement()
    }

    fn nodes(&self) -> Vec<NodeStatus> {
        self.0.nodes()
    }

    fn events(&self) -> BoxStream<'static, NodeEvent> {
        self.0.events()
    }

    async fn launch(&self, cx: &CallContext, spec: LaunchSpec) -> Result<Arc<dyn Deployment>> {
        Ok(Arc::new(ClumsyRanks { ranks: self.0.launch(cx, spec).await?, stumbled: AtomicBool::new(false) }))
    }

    async fn release(&self, grace: Duration) -> Result<()> {
        self.0.release(grace).await
    }
}

#[async_trait]
impl Deployment for ClumsyRanks {
    fn events(&self) -> BoxStream<'static, RankEvent> {
        self.ranks.events()
    }

    async fn restart(&self, cx: &CallContext, lives: &[(Rank, Incarnation)]) -> Result<()> {
        assert!(self.stumbled.swap(true, Ordering::Relaxed), "no node is left");
        self.ranks.restart(cx, lives).await
    }

    async fn kill(&self, rank: Rank, life: Option<Incarnation>) -> Result<()> {
        self.ranks.kill(rank, life).await
    }

    fn usage(&self) -> BTreeMap<Rank, ProcessUsage> {
        self.ranks.usage()
    }

    async fn shutdown(&self, grace: Duration) -> Result<()> {
        self.ranks.shutdown(grace).await
    }
}

pub(crate) async fn a_restart_that_panics_is_one_that_failed() {
    for (name, provisioner, transports) in provisioners() {
        let mut options = GroupOptions::new(transports).restarting(3);
        options.backoff_min = Duration::from_millis(1);
        let cx = CallContext::within(LONG);
        let provisioner = Clumsy(provisioner);
        let group = Group::start(&cx, &provisioner, engines("obedient"), options).await.expect(name);
        group.kill(1).await.expect("it lives");
        until("they serve in their third life", || {
            let now = status(&group, 0);
            (now.incarnation.0, now.state) == (3, RankState::Healthy)
        })
        .await;
        let exit = group.view().borrow().member(0).and_then(|member| member.exit.clone()).expect("an end");
        assert_eq!((exit.incarnation, exit.cause), (2, ExitCause::StartFailed), "{name}: {exit}");
        assert!(
            exit.to_string().contains("could not be started again") && exit.to_string().contains("no node is left")
        );
        assert_eq!(lives(&group).await, [3, 3, 1, 1], "{name}");
        stop(&group).await;
    }
}

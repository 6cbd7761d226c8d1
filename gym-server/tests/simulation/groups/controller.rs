//! The controller: a program that starts a group, calls it, restarts what fails, and starts another group when one is given up.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream::BoxStream;
use gym_client::Transports;
use gym_core::{CallContext, CancelToken, Code, Endpoint, Error, Incarnation, Result};
use gym_group::placement::Placement;
use gym_group::{
    Deployment, Group, GroupOptions, GroupRequest, LaunchSpec, NodeEvent, NodeStatus, Nodes, ProcessUsage, Provisioner,
    RankEvent, Reservation, ReserveRequest, VirtualCluster,
};
use gym_group::{Dispatch, GroupError, Rank, RankState, WorkerGroup, WorkerGroupExt};
use tokio::time::Instant;

use super::audit::GroupAudit;
use super::plan::{GroupPlan, HOSTS};
use super::worker::{Counted, counter};
use super::{SECRET, WORKER, agent_endpoint};
use crate::whole::ServingGroup;

/// Limits the start of a group.
const START_TIMEOUT: Duration = Duration::from_secs(40);
/// Limits the start of a rank.
const RANK_STARTS_TIMEOUT: Duration = Duration::from_secs(15);
/// Limits a restart that the controller asks for.
const RESTART_TIMEOUT: Duration = Duration::from_secs(60);

/// The time between two looks at ranks that serve after the faults.
const LOOK_AFTER: Duration = Duration::from_secs(2);

/// One life of the controller's process.
pub(super) struct Controller {
    pub(super) life: u64,
    pub(super) transports: Transports,
    pub(super) rng: fastrand::Rng,
    pub(super) plan: GroupPlan,
    pub(super) audit: GroupAudit,
    /// The group that serves, for the policy of this process.
    pub(super) serving: ServingGroup,
    pub(super) healed: CancelToken,
    pub(super) serves: CancelToken,
    pub(super) until: CancelToken,
    pub(super) done: CancelToken,
}

/// The reason why the controller leaves a group.
enum Left {
    /// Its ranks served after the faults.
    Done,
    /// It reported that it cannot go on.
    GaveUp,
}

impl Controller {
    pub(super) async fn run(mut self) {
        for number in 1_u64.. {
            if let Left::Done = self.play(number).await {
                break;
            }
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
        self.audit.count("ranks serve after the faults");
        self.done.cancel();
        // The process goes on, without a group.
        std::future::pending().await
    }

    /// Starts a group, plays with it and ends it.
    async fn play(&mut self, number: u64) -> Left {
        let name = format!("group-{}-{number}", self.life);
        let endpoints = HOSTS.iter().take(self.plan.hosts).map(|host| Endpoint::parse(&agent_endpoint(host)));
        let endpoints = endpoints.collect::<Result<Vec<_>>>().expect("endpoints");
        let nodes = Nodes::at(endpoints, self.transports.clone(), SECRET).with(self.plan.nodes.clone());
        let provisioner = AuditedNodes { nodes, audit: self.audit.clone() };
        let mut cluster = VirtualCluster::new(self.plan.cluster.clone(), provisioner).expect("a valid cluster");
        if self.plan.unified {
            cluster = cluster.unified();
        }
        let mut options = GroupOptions::new(self.transports.clone());
        if self.plan.restarts {
            options = options.restarting(self.plan.max_restarts);
        }
        options.max_restarts = self.plan.max_restarts;
        (options.backoff_min, options.backoff_max) = (self.plan.backoff_min, self.plan.backoff_max);
        (options.heartbeat, options.silence_max) = (self.plan.heartbeat, self.plan.heartbeat * 3);
        if self.plan.prepares {
            options = options.on_restart(counter::prepare, ());
            options.prepare_timeout = self.plan.deadline * 3;
        }
        let mut request = GroupRequest::new(name.clone(), WORKER, &self.life, options).expect("a number is JSON");
        (request.on, request.start_timeout) = (self.plan.on(), RANK_STARTS_TIMEOUT);
        let left = match cluster.start(&CallContext::within(START_TIMEOUT), request).await {
            Ok(group) => {
                self.audit.note("controller", format_args!("{name} serves"));
                let group = Arc::new(group);
                self.serve(Some(Arc::clone(&group)));
                let left = self.use_group(&group).await;
                self.serve(None);
                let grace = Duration::from_millis(self.rng.u64(..500));
                if let Err(error) = group.shutdown(grace).await {
                    self.refused("a shutdown", &error);
                }
                left
            }
            Err(error) => {
                self.refused("the start of a group", &error);
                Left::GaveUp
            }
        };
        if let Err(error) = cluster.shutdown(Duration::ZERO).await {
            self.refused("a release", &error);
        }
        drop(cluster);
        self.audit.group_ended(&name);
        left
    }

    /// Records a failure, which must be typed.
    fn refused(&self, what: &str, error: &Error) {
        self.audit.note("controller", format_args!("{what} failed: {:?}", error.code()));
        match error.code() {
            Code::ResourceExhausted => self.audit.count("no room"),
            Code::Unavailable | Code::DeadlineExceeded => {}
            _ => self.audit.violation(format_args!("{what} failed without its type: {error}")),
        }
    }

    fn serve(&self, group: Option<Arc<Group>>) {
        *self.serving.lock() = group;
    }

    async fn use_group(&mut self, group: &Group) -> Left {
        loop {
            let pause = Duration::from_millis(self.rng.u64(..400));
            tokio::time::sleep(pause).await;
            if self.rng.u8(..20) == 0 && !self.healed.is_cancelled() {
                let rank = self.rng.u32(..u32::try_from(self.plan.cluster.world_size()).unwrap_or(1));
                if group.kill(rank).await.is_ok() {
                    self.audit.count("rank killed");
                }
            }
            let healed = self.healed.is_cancelled();
            let calls = if healed { 1 } else { self.rng.u32(1..=self.plan.callers) };
            let calls: Vec<(Counted, Option<Rank>)> = (0..calls).map(|_| self.draw(healed)).collect();
            let (audit, deadline) = (&self.audit, self.plan.deadline);
            let called = join_all(calls.into_iter().map(|(args, rank)| call(group, audit, args, rank, deadline))).await;
            if healed && called.iter().all(|call| call.is_ok()) {
                self.serves.cancel();
                return self.keep(group).await;
            }
            let failed: Vec<GroupError> = called.into_iter().filter_map(std::result::Result::err).collect();
            let late: Vec<Rank> = failed.iter().flat_map(GroupError::unanswered).collect();
            if !late.is_empty() && self.rng.bool() {
                // What hangs is restarted.
                let restarted = group.restart_workers(&CallContext::within(RESTART_TIMEOUT), late).await;
                if let Err(error) = restarted {
                    self.restart_failed(&error);
                }
            } else if !self.plan.restarts || self.rng.u8(..4) == 0 {
                // Also ranks whose preparation failed.
                let restarted = group.restart_failed_workers(&CallContext::within(RESTART_TIMEOUT)).await;
                if let Err(error) = restarted {
                    self.restart_failed(&error);
                }
            }
            if group.worker_status().iter().any(|rank| rank.state == RankState::Retired) {
                self.audit.count("budget spent");
                return Left::GaveUp;
            }
        }
    }

    /// Looks after the ranks until nobody needs them: a message that a fault has delayed ends a reservation after the faults.
    async fn keep(&self, group: &Group) -> Left {
        loop {
            tokio::select! {
                biased;
                () = self.until.cancelled() => return Left::Done,
                () = tokio::time::sleep(LOOK_AFTER) => {}
            }
            let states = group.worker_status();
            if states.iter().any(|rank| rank.state == RankState::Retired) {
                return Left::GaveUp;
            }
            if !self.plan.restarts && states.iter().any(|rank| rank.state == RankState::Dead) {
                let restarted = group.restart_failed_workers(&CallContext::within(RESTART_TIMEOUT)).await;
                if let Err(error) = restarted {
                    self.restart_failed(&error);
                }
            }
        }
    }

    fn restart_failed(&self, error: &Error) {
        self.audit.note("controller", format_args!("a restart failed: {:?}", error.code()));
        let typed = matches!(
            error.code(),
            Code::ResourceExhausted | Code::Unavailable | Code::DeadlineExceeded | Code::FailedPrecondition
        );
        if !typed {
            self.audit.violation(format_args!("a restart failed without its type: {error}"));
        }
    }

    /// Draws a call: to all ranks after the faults, otherwise also to one.
    fn draw(&mut self, healed: bool) -> (Counted, Option<Rank>) {
        let ranks = u32::try_from(self.plan.cluster.world_size()).unwrap_or(1);
        let one = (!healed && self.rng.bool()).then(|| self.rng.u32(..ranks));
        let lasts_max = u64::try_from(self.plan.call_max.as_millis()).unwrap_or(1);
        let lasts = if healed { Duration::ZERO } else { Duration::from_millis(self.rng.u64(..=lasts_max)) };
        let fails = !healed && self.rng.u8(..10) == 0;
        (Counted { call: self.audit.call(), lasts, fails }, one)
    }
}

/// Makes one call, and compares its outcome with what ran.
pub(crate) async fn call(
    group: &Group,
    audit: &GroupAudit,
    args: Counted,
    rank: Option<Rank>,
    deadline: Duration,
) -> Result<(), GroupError> {
    let began = Instant::now();
    audit.note("controller", format_args!("calls {args:?} at {rank:?}"));
    let called = group.call(counter::count, args).deadline(deadline);
    let called = match rank {
        Some(rank) => called.dispatch(Dispatch::rank(rank)),
        None => called,
    };
    match called.await {
        Ok(gathered) => {
            let ranks = rank.map_or(0..group.layout().size(), |rank| rank as usize..rank as usize + 1);
            audit.succeeded(args.call, ranks.map(|rank| Rank::try_from(rank).unwrap_or(Rank::MAX)));
            if gathered.replies().len() != rank.map_or(group.layout().size(), |_| 1) {
                audit.violation(format_args!("call {} has {} replies", args.call, gathered.replies().len()));
            }
            Ok(())
        }
        Err(error) => {
            audit.failed(args.call, &error, began.elapsed(), deadline);
            Err(error)
        }
    }
}

/// Nodes whose reservations are recorded.
#[derive(Debug)]
struct AuditedNodes {
    nodes: Nodes,
    audit: GroupAudit,
}

#[async_trait]
impl Provisioner for AuditedNodes {
    async fn reserve(&self, cx: &CallContext, request: &ReserveRequest) -> Result<Arc<dyn Reservation>> {
        let reservation = self.nodes.reserve(cx, request).await?;
        Ok(Arc::new(AuditedReservation { reservation, audit: self.audit.clone() }))
    }
}

/// A reservation whose deployments are recorded.
#[derive(Debug)]
struct AuditedReservation {
    reservation: Arc<dyn Reservation>,
    audit: GroupAudit,
}

#[async_trait]
impl Reservation for AuditedReservation {
    fn placement(&self) -> Arc<Placement> {
        self.reservation.placement()
    }

    fn nodes(&self) -> Vec<NodeStatus> {
        self.reservation.nodes()
    }

    fn events(&self) -> BoxStream<'static, NodeEvent> {
        self.reservation.events()
    }

    async fn launch(&self, cx: &CallContext, spec: LaunchSpec) -> Result<Arc<dyn Deployment>> {
        let group = Arc::clone(&spec.group);
        let deployment = self.reservation.launch(cx, spec).await?;
        Ok(Arc::new(AuditedDeployment { deployment, group, audit: self.audit.clone() }))
    }

    async fn release(&self, grace: Duration) -> Result<()> {
        self.reservation.release(grace).await
    }
}

/// A deployment whose events are recorded as the supervisor reads them.
#[derive(Debug)]
struct AuditedDeployment {
    deployment: Arc<dyn Deployment>,
    group: Arc<str>,
    audit: GroupAudit,
}

#[async_trait]
impl Deployment for AuditedDeployment {
    fn events(&self) -> BoxStream<'static, RankEvent> {
        let (group, audit) = (Arc::clone(&self.group), self.audit.clone());
        self.deployment.events().inspect(move |event| audit.event(&group, event)).boxed()
    }

    async fn restart(&self, cx: &CallContext, lives: &[(Rank, Incarnation)]) -> Result<()> {
        let restarted = self.deployment.restart(cx, lives).await;
        if let Err(error) = &restarted {
            self.audit.note("controller", format_args!("{lives:?} are not restarted: {:?}", error.code()));
            if error.code() == Code::ResourceExhausted {
                self.audit.count("no room");
            }
        }
        restarted
    }

    async fn kill(&self, rank: Rank, life: Option<Incarnation>) -> Result<()> {
        self.deployment.kill(rank, life).await
    }

    fn usage(&self) -> std::collections::BTreeMap<Rank, ProcessUsage> {
        self.deployment.usage()
    }

    async fn shutdown(&self, grace: Duration) -> Result<()> {
        self.deployment.shutdown(grace).await
    }
}

//! Everything at once: the cluster of rollouts and the worker group, on one network. The controller serves the policy, and each turn of an agent is
//! a call of a rank, as in a training program. So a fault of a node reaches a rollout as the error of a model.

use std::sync::Arc;
use std::time::Duration;

use gym_core::server::ServerKind;
use gym_core::testing::net::SimHost;
use gym_core::testing::{Faults, SimNet};
use gym_core::transport::serve;
use gym_core::{
    CallContext, CancelToken, Code, Endpoint, Error, Execution, ModelResponse, ModelServer, RawObject, Result,
    SessionId, World,
};
use gym_group::Group;
use gym_group::{Rank, WorkerGroup as _};
use gym_server::role::{RoleServer, ServerContext};
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::groups::{CONTROLLER, Counted, GroupAudit, Playing, call};
use crate::plan::{LateCheck, WholePlan};
use crate::scenario::{Deployment, Report};
use crate::servers::not_here;

/// The server that agents call for each turn.
pub(crate) const POLICY: &str = "policy";

/// What some seed must have besides what the cluster and the group have.
pub(crate) const COUNTED_IN_WHOLE: [&str; 2] = [TURN, TURN_FAILED];
const TURN: &str = "turn of an agent";
const TURN_FAILED: &str = "turn that failed at the ranks";

/// The time between two attempts of the policy to find a rank.
const RETRY_INTERVAL: Duration = Duration::from_millis(200);

/// Plays a seed.
pub(crate) async fn play(plan: WholePlan, late_check: LateCheck) -> Report {
    let began = Instant::now();
    let text = plan.to_string();
    let WholePlan { deployment, group } = plan;
    let (script, heals_at) = (deployment.script.clone(), deployment.heals_at);
    fastrand::seed(deployment.seed);
    let net = SimNet::new(deployment.seed, deployment.faults.clone());
    let until = CancelToken::new();
    let group = Playing::start_all(group, net.clone(), until.clone());
    let mut deployment = Deployment::start_all(deployment, late_check, net.clone());
    for (at, step) in script {
        tokio::time::sleep_until(began + at).await;
        // A step without a host is for both: what it does not concern ignores it.
        let of_group = step.host().map(|host| group.has(host));
        if of_group != Some(false) {
            group.follow(step);
        }
        if of_group != Some(true) {
            deployment.follow(step);
        }
    }
    tokio::time::sleep_until(began + heals_at).await;
    net.set_faults(Faults::calm());
    group.heal();
    deployment.heal();
    group.serves_again().await;
    deployment.is_done().await;
    // Now no rollout needs the ranks.
    until.cancel();
    let of_group = group.end().await;
    let mut report = deployment.end();
    report.violations.extend(of_group.violations);
    for (what, count) in of_group.counts {
        *report.counts.entry(what).or_default() += count;
    }
    (report.took, report.plan, report.trace) = (began.elapsed(), text, net.trace());
    report
}

/// Where the controller puts the group that serves, for the policy of the same process.
pub(crate) type ServingGroup = Arc<Mutex<Option<Arc<Group>>>>;

/// A model whose turns are calls of the ranks of a group, in turn.
struct Policy {
    group: ServingGroup,
    audit: GroupAudit,
    deadline: Duration,
    lasts_max: Duration,
    turns: Mutex<u32>,
}

/// Serves the policy until its host ends.
pub(crate) fn serve_policy(
    host: &SimHost,
    world: &World,
    group: ServingGroup,
    audit: GroupAudit,
    [deadline, lasts_max]: [Duration; 2],
) {
    let policy = Policy { group, audit, deadline, lasts_max, turns: Mutex::default() };
    let handler = Arc::new(RoleServer::model(policy, &ServerContext::new(POLICY, "ranks", world)));
    let listener = host.listen(POLICY).expect("a host that has just started listens nowhere");
    host.spawn(async move {
        // Ends with the host.
        let _ = serve(Box::new(listener), handler, CancelToken::new(), Duration::ZERO).await;
    });
}

/// Returns where agents find the policy.
pub(crate) fn policy() -> (ServerKind, Endpoint) {
    (ServerKind::Model, Endpoint::parse(&format!("sim://{CONTROLLER}/{POLICY}")).expect("an endpoint"))
}

impl ModelServer for Policy {
    async fn responses(&self, cx: &CallContext, _: &SessionId, _: &RawObject) -> Result<ModelResponse> {
        loop {
            let group = self.group.lock().clone();
            let error = match group {
                Some(group) => match self.turn(&group).await {
                    Ok(()) => {
                        self.audit.count(TURN);
                        return Ok(ModelResponse(RawObject::parse(r#"{"status":"completed","output":[]}"#)?));
                    }
                    Err(error) => error,
                },
                None => Error::not_started(Code::Unavailable, "the controller has no group that serves"),
            };
            // What may have run is not repeated here; the caller decides.
            if error.execution() != Execution::NotStarted || cx.remaining() <= RETRY_INTERVAL {
                self.audit.count(TURN_FAILED);
                return Err(error);
            }
            tokio::time::sleep(RETRY_INTERVAL).await;
        }
    }

    async fn chat_completions(&self, _: &CallContext, _: &SessionId, _: &RawObject) -> Result<RawObject> {
        Err(not_here())
    }
}

impl Policy {
    async fn turn(&self, group: &Group) -> Result<()> {
        let turn = {
            let mut turns = self.turns.lock();
            *turns += 1;
            *turns
        };
        let rank: Rank = turn % Rank::try_from(group.layout().size()).unwrap_or(1);
        let args = Counted {
            call: self.audit.call(),
            lasts: self.lasts_max.min(Duration::from_millis(u64::from(turn % 7) * 20)),
            fails: false,
        };
        Ok(call(group, &self.audit, args, Some(rank), self.deadline).await?)
    }
}

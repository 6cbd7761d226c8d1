//! A worker group on node agents: a controller, and hosts whose agents run the ranks as tasks.
//!
//! A host of the setting is two hosts of the network: the process of the agent, and those of its ranks. So an agent can be stopped while its ranks
//! run, and its watchdog ends them with the lease. A crash ends both.

mod audit;
mod controller;
mod plan;
mod worker;

use std::sync::Arc;
use std::time::Duration;

use gym_client::Transports;
use gym_core::testing::net::SimHost;
use gym_core::testing::{Faults, SimFiles, SimNet};
use gym_core::{CancelToken, World};
use gym_group::HostOptions;
use gym_group::placement::NodeResources;
use gym_group::{InProcessRanks, NodeAgent, NodeOptions, RankOverrides, WorkerKind, Workers};
use tokio::time::Instant;

use crate::scenario::{Clocks, Report};
use crate::script::Step;
use crate::whole::{ServingGroup, serve_policy};
pub(crate) use audit::GroupAudit;
use controller::Controller;
pub(crate) use controller::call;
use plan::HOSTS;
pub(crate) use plan::{CONTROLLER, COUNTED_IN_GROUPS, GroupPlan, INJECTED_IN_GROUPS};
pub(crate) use worker::Counted;
use worker::{Counter, HOST_VARIABLE};

/// The join secret of all agents.
const SECRET: &str = "secret";
/// The name of the worker type.
const WORKER: &str = "counter";
/// The name under which an agent listens is that of its node.
fn agent_endpoint(host: &str) -> String {
    format!("sim://{host}/{host}")
}

/// The time after the end of the faults within which the ranks serve again. Leases, pauses, starts and calls that wait for a lost response last
/// seconds each; nothing waits for the default deadline of a call.
const DONE_TIMEOUT: Duration = Duration::from_secs(150);
/// Limits the end of a group whose nodes are well.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(30);

/// Plays a seed.
pub(crate) async fn play(plan: GroupPlan) -> Report {
    // Sessions, ports and pauses are drawn from it.
    fastrand::seed(plan.seed);
    let net = SimNet::new(plan.seed, plan.faults.clone());
    // Nobody else needs the ranks.
    let until = CancelToken::new();
    until.cancel();
    let this = Playing::start_all(plan, net, until);
    for (at, step) in &this.plan.script {
        tokio::time::sleep_until(this.began + *at).await;
        this.follow(*step);
    }
    tokio::time::sleep_until(this.began + this.plan.heals_at).await;
    this.net.set_faults(Faults::calm());
    this.heal();
    this.serves_again().await;
    this.end().await
}

/// A controller and node agents that run.
pub(crate) struct Playing {
    plan: GroupPlan,
    net: SimNet,
    audit: GroupAudit,
    began: Instant,
    clocks: Clocks,
    healed: CancelToken,
    /// The ranks have served after the faults.
    serves: CancelToken,
    /// Others need the ranks until this is cancelled.
    until: CancelToken,
    done: CancelToken,
}

impl Playing {
    /// Starts the controller, which keeps its ranks for others until `until` is cancelled, and the agents.
    pub(crate) fn start_all(plan: GroupPlan, net: SimNet, until: CancelToken) -> Self {
        let audit = GroupAudit::new(&net, plan.nodes.lease);
        audit.enter();
        let (healed, serves, done) = (CancelToken::new(), CancelToken::new(), CancelToken::new());
        let (began, clocks) = (Instant::now(), Clocks::default());
        let this = Self { plan, net, audit, began, clocks, healed, serves, until, done };
        for host in HOSTS.into_iter().take(this.plan.hosts) {
            this.start_agent(host);
        }
        this.start_controller();
        this
    }

    /// Returns `true` for a host of the group.
    pub(crate) fn has(&self, host: &str) -> bool {
        self.plan.hosts().contains(&host)
    }

    /// The faults have ended.
    pub(crate) fn heal(&self) {
        self.net.note("script", format_args!("the faults have ended"));
        self.healed.cancel();
    }

    /// Waits until the ranks serve after the faults.
    pub(crate) async fn serves_again(&self) {
        if tokio::time::timeout(DONE_TIMEOUT, self.serves.cancelled()).await.is_err() {
            self.audit.violation(format_args!("the ranks do not serve {DONE_TIMEOUT:?} after the healing"));
        }
    }

    /// Waits until the group was shut down, and returns what was found.
    pub(crate) async fn end(&self) -> Report {
        if tokio::time::timeout(SHUTDOWN_TIMEOUT, self.done.cancelled()).await.is_err() {
            self.audit.violation(format_args!("the group is not shut down within {SHUTDOWN_TIMEOUT:?}"));
        }
        let recovered = self.began.elapsed().saturating_sub(self.plan.heals_at);
        self.audit.note_recovery(recovered);
        // Nothing lives longer than its lease.
        tokio::time::sleep(self.plan.nodes.lease + audit::MARGIN_TIMEOUT).await;
        self.audit.check_end();
        let counts = self.audit.calls();
        Report {
            trace: self.net.trace(),
            violations: self.audit.violations(),
            completed: counts.succeeded,
            given_up: counts.failed,
            attempts: counts.begun,
            took: self.began.elapsed(),
            counts: self.audit.counts(),
            plan: self.plan.to_string(),
        }
    }

    pub(crate) fn follow(&self, step: Step) {
        self.net.note("script", format_args!("{step}"));
        if let Some((host, kind)) = plan::injects(step).or(step.shared_fault()) {
            self.net.injected(host, kind);
        }
        match step {
            Step::Crash(host) => self.kill(host),
            Step::Restart(host) => {
                self.kill(host);
                self.start(host);
            }
            Step::Start(host) => self.start(host),
            Step::Freeze(host) => self.net.freeze(host),
            Step::FreezeMachine(host) => {
                self.net.freeze(host);
                self.net.freeze(plan::ranks_of(host));
            }
            Step::Thaw(host) => {
                self.net.thaw(host);
                if host != CONTROLLER {
                    self.net.thaw(plan::ranks_of(host));
                }
            }
            Step::Isolate(host) => {
                self.net.isolate(host);
                if host != CONTROLLER {
                    self.net.isolate(plan::ranks_of(host));
                }
            }
            Step::Reconnect(host) => {
                self.net.reconnect(host);
                if host != CONTROLLER {
                    self.net.reconnect(plan::ranks_of(host));
                }
            }
            Step::Mute(host) => {
                self.net.mute(host);
                if host != CONTROLLER {
                    self.net.mute(plan::ranks_of(host));
                }
            }
            Step::Unmute(host) => {
                self.net.unmute(host);
                if host != CONTROLLER {
                    self.net.unmute(plan::ranks_of(host));
                }
            }
            Step::Slow(host, delay) | Step::Swap(host, delay) => {
                self.net.slow(host, delay);
                if host != CONTROLLER {
                    self.net.slow(plan::ranks_of(host), delay);
                }
            }
            Step::Clock(host, ms) => self.clocks.step(host, ms),
            Step::Reseed(seed) => {
                self.net.reseed(seed);
                fastrand::seed(seed);
            }
            // Of the other settings.
            Step::Kill
            | Step::Reboot(_)
            | Step::EndInWrite(..)
            | Step::SecondHead
            | Step::OneHead
            | Step::Disk(_)
            | Step::DiskFault(_)
            | Step::Stop => {}
        }
    }

    fn kill(&self, host: &'static str) {
        self.net.crash(host);
        if host == CONTROLLER {
            self.audit.controller_died();
        } else {
            self.net.crash(plan::ranks_of(host));
        }
    }

    fn start(&self, host: &'static str) {
        if host == CONTROLLER { self.start_controller() } else { self.start_agent(host) }
    }

    fn start_agent(&self, name: &'static str) {
        let (host, ranks) = (self.net.host(name), self.net.host(plan::ranks_of(name)));
        let world = self.world(&host);
        let kind = WorkerKind::of::<Counter>()
            .with_host(in_task())
            .with_configure(move |_| RankOverrides::variables([(HOST_VARIABLE.to_owned(), name.to_owned())].into()));
        let workers = Workers::new().with(WORKER, kind).over(over(&ranks));
        let ranks = InProcessRanks::new(workers, over(&ranks));
        let mut options = NodeOptions::new(SECRET);
        name.clone_into(&mut options.name);
        options.resources = NodeResources::new(name, self.plan.cpus, Vec::new());
        let (transports, audit) = (over(&host), self.audit.clone());
        host.spawn(async move {
            match NodeAgent::start_in_process(ranks, transports, &world, options).await {
                Ok(_agent) => std::future::pending().await,
                Err(error) => audit.violation(format_args!("{name} does not start: {error}")),
            }
        });
    }

    fn start_controller(&self) {
        let host = self.net.host(CONTROLLER);
        self.audit.controller_started(host.life());
        // Of this life of the controller: the group ends with it.
        let serving = ServingGroup::default();
        if !self.until.is_cancelled() {
            let limits = [self.plan.deadline, self.plan.call_max];
            serve_policy(&host, &self.world(&host), Arc::clone(&serving), self.audit.clone(), limits);
        }
        let controller = Controller {
            life: host.life(),
            transports: over(&host),
            rng: fastrand::Rng::with_seed(self.plan.seed ^ (host.life() << 32)),
            plan: self.plan.clone(),
            audit: self.audit.clone(),
            serving,
            healed: self.healed.clone(),
            serves: self.serves.clone(),
            until: self.until.clone(),
            done: self.done.clone(),
        };
        host.spawn(controller.run());
    }

    fn world(&self, host: &SimHost) -> World {
        let seed = self.plan.seed.wrapping_mul(1_000_003) ^ (host.life() << 48);
        // Incarnations of agents are times.
        let now = Duration::from_secs(1_700_000_000) + self.began.elapsed();
        self.clocks.of(host.name(), World::new(Arc::new(SimFiles::new(seed)), seed, now))
    }
}

fn over(host: &SimHost) -> Transports {
    Transports::new().with(host.clone())
}

/// A worker that starts on another thread would make the order of events depend on that thread.
fn in_task() -> HostOptions {
    let mut options = HostOptions::default();
    options.starts_in_task = true;
    options
}

//! Plays one seed: builds the deployment, follows the script, removes the faults, and runs the audit.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::sync::{Arc, Once};
use std::time::Duration;

use gym_client::registry::{LeaseKeeper, RemoteRegistry};
use gym_client::{ServerClient, Transports};
use gym_core::registry::{MemberLimits, MemberRegistry, MemberState, MemoryRegistry, Registration, Registry};
use gym_core::server::ServerKind;
use gym_core::testing::net::{SimHost, Trace};
use gym_core::testing::{Faults, FileFault, SimFiles, SimNet};
use gym_core::transport::{Fenced, serve};
use gym_core::{CallContext, CancelToken, Endpoint, Handler, Incarnation, World};
use gym_server::environment::{Relay, RelayConfig};
use gym_server::head::HeadServer;
use gym_server::metrics::Metrics;
use gym_server::role::{RoleServer, ServerContext};
use parking_lot::Mutex;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::audit::{Audit, AuditedHead, AuditedIncarnation, Counts};
use crate::case::{AnyPlan, Case};
use crate::cluster::{CollectorPools, Worker};
use crate::collector::{Collector, OUTPUT, Orders, rows};
use crate::groups;
use crate::plan::{
    AGENT_RESTART, AGENTS, COLLECTOR, COLLECTOR_CRASH, COLLECTOR_KILL, ClusterPlan, DISK_FULL, DISK_STALL, DISK_WELL,
    END_IN_WRITE, FROZEN, HEAD, HEAD_KILL, HEAD_RESTART, ISOLATED, LateCheck, OPEN_FAILED, Plan, RELAY, RESOURCES,
    STOP, SYNC_FAILED, WORKER_KILL, WORKERS,
};
use crate::script::Step;
use crate::servers::{SmallAgent, SmallResources};
use crate::values;
use crate::whole;

/// The time after the end of the faults within which everything must be done. Attempts, leases and partitions last seconds.
const DONE_TIMEOUT: Duration = Duration::from_secs(900);

/// The time after the end of the faults after which all members serve and go on serving.
const COMPLETE_TIMEOUT: Duration = Duration::from_secs(20);

/// The time after a restart of the head server after which all workers serve again, if nothing else happened.
const COMPLETE_AFTER_RESTART: Duration = Duration::from_secs(2);

/// The result of a seed.
pub(crate) struct Report {
    pub(crate) trace: Trace,
    pub(crate) violations: Vec<String>,
    pub(crate) completed: u64,
    pub(crate) given_up: u64,
    pub(crate) attempts: u64,
    pub(crate) took: Duration,
    /// What was counted besides the faults.
    pub(crate) counts: BTreeMap<&'static str, u64>,
    pub(crate) plan: String,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { violations, completed, given_up, attempts, took, .. } = self;
        writeln!(f, "{completed} completed, {given_up} given up, {attempts} attempts, {took:?}")?;
        write!(f, "{}", self.plan)?;
        writeln!(f, "injected: {:?}", self.trace.faults())?;
        violations.iter().try_for_each(|violation| writeln!(f, "VIOLATION {violation}"))
    }
}

/// Plays a case on this thread.
pub(crate) fn run(case: &Case, late_check: LateCheck) -> Report {
    watch_for_panics();
    PANICKED.set(false);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime without I/O can be built");
    let mut report = runtime.block_on(async {
        match case.plan() {
            AnyPlan::Group(plan) => groups::play(plan).await,
            AnyPlan::Deployment(plan) => Deployment::play(plan, late_check).await,
            AnyPlan::Whole(plan) => whole::play(*plan, late_check).await,
            AnyPlan::Values(plan) => values::play(plan).await,
        }
    });
    if PANICKED.get() {
        let panic = PANIC.take();
        report.violations.push(format!("something panicked: {panic}"));
    }
    report
}

thread_local! {
    static PANICKED: Cell<bool> = const { Cell::new(false) };
    static PANIC: RefCell<String> = const { RefCell::new(String::new()) };
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

/// Prints no panics of this thread. They are violations nevertheless.
pub(crate) fn be_quiet(quiet: bool) {
    QUIET.set(quiet);
}

/// Records panics; otherwise a panic inside a task would only be one more failed rollout.
fn watch_for_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            PANICKED.set(true);
            PANIC.set(info.to_string());
            if !QUIET.get() {
                before(info);
            }
        }));
    });
}

/// Servers or a cluster, and a collector, that run.
pub(crate) struct Deployment {
    plan: Plan,
    late_check: LateCheck,
    net: SimNet,
    audit: Audit,
    files: SimFiles,
    registry: Arc<Mutex<MemoryRegistry>>,
    orders: Orders,
    clocks: Clocks,
    began: Instant,
    auditor: JoinSet<()>,
}

/// The clocks of hosts, which a script sets.
#[derive(Debug, Default)]
pub(crate) struct Clocks(RefCell<BTreeMap<String, (i64, Vec<World>)>>);

impl Clocks {
    /// Returns the world of a process of this host.
    pub(crate) fn of(&self, host: &str, world: World) -> World {
        let mut hosts = self.0.borrow_mut();
        let (stepped_ms, worlds) = hosts.entry(host.to_owned()).or_default();
        world.step_clock(*stepped_ms);
        worlds.push(world.clone());
        world
    }

    pub(crate) fn step(&self, host: &str, ms: i64) {
        let mut hosts = self.0.borrow_mut();
        let (stepped_ms, worlds) = hosts.entry(host.to_owned()).or_default();
        *stepped_ms += ms;
        worlds.iter().for_each(|world| world.step_clock(ms));
    }
}

impl Deployment {
    async fn play(plan: Plan, late_check: LateCheck) -> Report {
        let net = SimNet::new(plan.seed, plan.faults.clone());
        let mut this = Self::start_all(plan, late_check, net);
        for (at, step) in this.plan.script.clone() {
            tokio::time::sleep_until(this.began + at).await;
            this.follow(step);
        }
        tokio::time::sleep_until(this.began + this.plan.heals_at).await;
        this.net.set_faults(Faults::calm());
        this.heal();
        this.is_done().await;
        this.end()
    }

    /// Starts all hosts on this network.
    pub(crate) fn start_all(plan: Plan, late_check: LateCheck, net: SimNet) -> Self {
        let began = Instant::now();
        let files = SimFiles::new(plan.seed);
        files.set_latency_max(DISK_WELL);
        let (audit, registry): (_, Arc<Mutex<MemoryRegistry>>) = (Audit::new(&net), Arc::default());
        let (orders, clocks) = (Orders::default(), Clocks::default());
        audit.expect_unharmed(plan.unharmed().into_iter());
        let (of_registry, of_audit) = (Arc::clone(&registry), audit.clone());
        let hosts = plan.hosts();
        let mut this =
            Self { plan, late_check, net, audit, files, registry, orders, clocks, began, auditor: JoinSet::new() };
        for host in hosts {
            this.start(host);
        }
        match &this.plan.cluster {
            None => this.auditor.spawn(audit_leases(of_audit, of_registry)),
            Some(_) => this.auditor.spawn(audit_members(of_audit, of_registry)),
        };
        this
    }

    /// The faults have ended.
    pub(crate) fn heal(&self) {
        self.files.clear_fault();
        self.orders.healed.cancel();
    }

    /// Waits until the collector is done and all workers serve.
    pub(crate) async fn is_done(&self) {
        if tokio::time::timeout(DONE_TIMEOUT, self.orders.done.cancelled()).await.is_err() {
            self.audit.violation(format_args!("not done {DONE_TIMEOUT:?} after the healing"));
        }
        if self.plan.cluster.is_some() {
            tokio::time::sleep_until(self.began + self.plan.heals_at + COMPLETE_TIMEOUT).await;
            self.check_members().await;
        }
    }

    /// Returns what was found.
    pub(crate) fn end(&mut self) -> Report {
        self.auditor.abort_all();
        let counts = self.check_end();
        Report {
            trace: self.net.trace(),
            violations: self.audit.violations(),
            counts: self.audit.counts(),
            completed: counts.completed,
            given_up: counts.given_up,
            attempts: counts.attempts,
            took: self.began.elapsed(),
            plan: self.plan.to_string(),
        }
    }

    fn check_end(&self) -> Counts {
        let wanted: Vec<_> = rows(&self.plan).iter().map(|row| row.key).collect();
        self.audit.check_end(&self.files, Path::new(OUTPUT), &wanted, self.plan.options.attempts_max)
    }

    /// Checks that all workers serve.
    async fn check_members(&self) {
        let registry = self.registry.lock().clone();
        let members = registry.members(&CallContext::default()).await.unwrap_or_default();
        for worker in self.plan.hosts().into_iter().filter(|host| WORKERS.contains(host)) {
            let member = members.iter().find(|member| member.spec.name == worker);
            if member.is_none_or(|member| member.state != MemberState::Serving) {
                let state = member.map(|member| (member.state, &member.reason));
                self.audit.violation(format_args!("{worker} is {state:?} {COMPLETE_TIMEOUT:?} after the healing"));
            }
        }
    }

    pub(crate) fn follow(&mut self, step: Step) {
        self.net.note("script", format_args!("{step}"));
        if let Some((host, kind)) = step.shared_fault() {
            self.net.injected(host, kind);
        }
        match step {
            Step::Crash(host) => {
                self.net.crash(host);
                if self.plan.cluster.is_some() && host != COLLECTOR {
                    self.net.injected(host, if host == HEAD { HEAD_KILL } else { WORKER_KILL });
                }
                if host == COLLECTOR {
                    self.net.injected(host, COLLECTOR_CRASH);
                    self.files = self.files.crash();
                    self.audit.check_acknowledged(&self.files, Path::new(OUTPUT));
                }
            }
            Step::Kill => {
                self.net.crash(COLLECTOR);
                self.net.injected(COLLECTOR, COLLECTOR_KILL);
                self.files = self.files.kill();
                self.audit.check_acknowledged(&self.files, Path::new(OUTPUT));
            }
            Step::EndInWrite(nth, end) => {
                self.net.injected(COLLECTOR, END_IN_WRITE);
                self.files.end_at_step(nth, end);
            }
            Step::Freeze(host) => {
                self.net.injected(host, FROZEN);
                self.net.freeze(host);
            }
            Step::Thaw(host) => self.net.thaw(host),
            Step::Isolate(host) => {
                self.net.injected(host, ISOLATED);
                self.net.isolate(host);
            }
            Step::Reconnect(host) => self.net.reconnect(host),
            Step::Start(host) => {
                if host == HEAD {
                    self.net.injected(host, HEAD_RESTART);
                } else if AGENTS.contains(&host) {
                    self.net.injected(host, AGENT_RESTART);
                }
                self.start(host);
            }
            Step::Restart(host) => {
                self.follow(Step::Crash(host));
                self.follow(Step::Start(host));
            }
            // Of groups and of values.
            Step::FreezeMachine(_) | Step::Reboot(_) => {}
            Step::Mute(host) => self.net.mute(host),
            Step::Unmute(host) => self.net.unmute(host),
            Step::Slow(host, delay) | Step::Swap(host, delay) => self.net.slow(host, delay),
            Step::Clock(host, ms) => self.clocks.step(host, ms),
            Step::SecondHead => {
                let host = self.net.host_beside(HEAD);
                self.start_head(&host);
            }
            Step::OneHead => self.net.end_older(HEAD),
            Step::Reseed(seed) => {
                self.net.reseed(seed);
                self.files.reseed(seed);
            }
            Step::Disk(latency) => {
                if latency > DISK_WELL {
                    self.net.injected("disk", DISK_STALL);
                }
                self.files.set_latency_max(latency);
            }
            Step::DiskFault(fault) => {
                let kind = match fault {
                    FileFault::DiskFull => DISK_FULL,
                    FileFault::SyncFailed => SYNC_FAILED,
                    FileFault::OpenFailed => OPEN_FAILED,
                };
                self.net.injected("disk", kind);
                self.files.fail_write(0, fault);
            }
            Step::Stop => {
                self.net.injected(COLLECTOR, STOP);
                self.orders.stop.lock().cancel();
            }
        }
    }

    fn start(&self, name: &'static str) {
        let host = self.net.host(name);
        match name {
            HEAD => self.start_head(&host),
            COLLECTOR => {
                let client = self.client(&host);
                let pools =
                    self.plan.cluster.as_ref().and_then(|cluster| self.collector_pools(&host, &client, cluster));
                let collector = Collector {
                    client,
                    pools,
                    world: self.world(&host),
                    rows: rows(&self.plan),
                    plan: self.plan.clone(),
                    late_check: self.late_check,
                    net: self.net.clone(),
                    audit: self.audit.clone(),
                    files: self.files.next_process(),
                    orders: self.orders.clone(),
                };
                host.spawn(collector.run());
            }
            _ if self.plan.cluster.is_some() => self.start_worker(&host, name),
            _ => self.start_server(&host, name),
        }
    }

    /// Lets the collector's client follow the cluster, and returns what hosts its pools.
    fn collector_pools(&self, host: &SimHost, client: &ServerClient, cluster: &ClusterPlan) -> Option<CollectorPools> {
        let remote = self.remote(host);
        if !cluster.pull {
            client.follow(Arc::new(remote));
            return None;
        }
        let (host, world, audit) = (host.clone(), self.world(host), self.audit.clone());
        let keeps_all = self.plan.only_restarts_head();
        Some(CollectorPools {
            host,
            remote,
            world,
            audit,
            silence_max: cluster.silence_max,
            ttl: self.plan.ttl,
            keeps_all,
        })
    }

    fn start_worker(&self, host: &SimHost, name: &'static str) {
        let Some(cluster) = &self.plan.cluster else { return };
        let worker = Worker {
            name,
            host: host.clone(),
            remote: self.remote(host),
            world: self.world(host),
            audit: self.audit.clone(),
            cluster: cluster.clone(),
            steps: self.plan.steps,
            think_max: self.plan.think_max,
            turns: self.plan.turns,
        };
        host.spawn(worker.run());
    }

    /// Starts a head server. A restarted head server has lost its state.
    fn start_head(&self, host: &SimHost) {
        let term = host.life() + 1;
        let registry = match &self.plan.cluster {
            None => MemoryRegistry::new(),
            Some(cluster) => {
                let registry = MemoryRegistry::with_limits(term, MemberLimits::default());
                // As the head server of a stack does.
                registry.recover_for(cluster.timing.timeout);
                self.audit.head_started(term);
                registry
            }
        };
        *self.registry.lock() = registry.clone();
        let lookup = self.plan.cluster.as_ref().map_or(Duration::ZERO, |cluster| cluster.lookup);
        if host.life() > 0 {
            let within = COMPLETE_AFTER_RESTART + lookup;
            host.spawn(check_return(registry.clone(), within, self.plan.returning(), self.audit.clone()));
        }
        let config = Arc::new(|_: &[gym_core::registry::Instance]| String::new());
        let head = HeadServer::new(registry, config, &self.world(host), Metrics::new());
        self.serve(host, Arc::new(AuditedHead { head: Arc::new(head), term, audit: self.audit.clone(), lookup }));
    }

    fn start_server(&self, host: &SimHost, name: &'static str) {
        let (client, world) = (self.client(host), self.world(host));
        let life = Incarnation(host.life() + 1);
        let (name, replica, kind) = match name {
            RELAY => (RELAY, 0, ServerKind::Environment),
            RESOURCES => (RESOURCES, 0, ServerKind::Resources),
            agent => ("agent", u32::from(agent == AGENTS[1]), ServerKind::Agent),
        };
        let (context, registry) = (ServerContext::new(name, "small", &world), Arc::clone(client.registry()));
        let Plan { steps, think_max, ttl, .. } = self.plan;
        let handler: Arc<dyn Handler> = match kind {
            ServerKind::Environment => {
                Arc::new(RoleServer::environment(Relay::new(RelayConfig::new("agent"), client), &context))
            }
            ServerKind::Resources => {
                let server = SmallResources { audit: self.audit.clone(), sessions: Arc::default(), steps };
                Arc::new(RoleServer::resources(server, &context))
            }
            _ => Arc::new(RoleServer::agent(
                SmallAgent { client, world: world.clone(), steps, think_max, runs_once: None, turns: false },
                &context,
            )),
        };
        let handler = AuditedIncarnation { life, handler, audit: self.audit.clone() };
        let endpoint = self.serve(host, Arc::new(Fenced::new(life, handler)));
        let mut registration = Registration::new(name, kind, [endpoint]);
        registration.replica = Some(replica);
        registration.implementation = "small".to_owned();
        registration.incarnation = life;
        registration.ttl = ttl;
        host.spawn(stay_registered(registry, registration));
    }

    fn serve(&self, host: &SimHost, handler: Arc<dyn Handler>) -> Endpoint {
        let listener = host.listen("gym").expect("a host that has just started listens nowhere");
        let endpoint = Endpoint::parse(&format!("sim://{}/gym", host.name())).expect("an endpoint");
        host.spawn(async move {
            // Ends with the host.
            let _ = serve(Box::new(listener), handler, CancelToken::new(), Duration::ZERO).await;
        });
        endpoint
    }

    fn remote(&self, host: &SimHost) -> RemoteRegistry {
        let transports = Transports::new().with_connector(Arc::new(host.clone()));
        let head = Endpoint::parse("sim://head/gym").expect("an endpoint");
        RemoteRegistry::new(head, transports, self.world(host))
    }

    fn client(&self, host: &SimHost) -> ServerClient {
        let transports = Transports::new().with_connector(Arc::new(host.clone()));
        let head = Endpoint::parse("sim://head/gym").expect("an endpoint");
        let world = self.world(host);
        let registry = RemoteRegistry::new(head, transports.clone(), world.clone());
        ServerClient::new(Arc::new(registry), transports, &world)
    }

    fn world(&self, host: &SimHost) -> World {
        let hosts = self.plan.hosts();
        let index = hosts.iter().position(|known| *known == host.name()).unwrap_or_default() as u64;
        let seed = self.plan.seed.wrapping_mul(1_000_003) ^ (index << 40) ^ (host.life() << 48);
        // Incarnations of members are times.
        let since = if self.plan.cluster.is_some() { self.began.elapsed() } else { Duration::ZERO };
        let now = Duration::from_secs(1_700_000_000) + since;
        self.clocks.of(host.name(), World::new(Arc::new(self.files.clone()), seed, now))
    }
}

async fn audit_leases(audit: Audit, registry: Arc<Mutex<MemoryRegistry>>) {
    loop {
        tokio::time::sleep(Duration::from_millis(250)).await;
        let registry = registry.lock().clone();
        audit.check_leases(&registry).await;
    }
}

/// Checks that all workers are back soon after a restart of the head server. Ends with this life of it.
async fn check_return(registry: MemoryRegistry, within: Duration, workers: Vec<&'static str>, audit: Audit) {
    tokio::time::sleep(within).await;
    let members = registry.members(&CallContext::default()).await.unwrap_or_default();
    for worker in workers {
        let state = members.iter().find(|member| member.spec.name == worker).map(|member| member.state);
        if state != Some(MemberState::Serving) {
            audit.violation(format_args!("{worker} is {state:?} {within:?} after a restart of the head"));
        }
        audit.count("worker back after a restart of the head", 1);
    }
}

/// Passes on what each life of the head server says of its members.
async fn audit_members(audit: Audit, registry: Arc<Mutex<MemoryRegistry>>) {
    let (mut seen, mut recovering) = (None, false);
    loop {
        let registry = registry.lock().clone();
        // Of this life of the head server only, which ends meanwhile.
        let update = registry.roster(&CallContext::default(), seen, Duration::from_millis(500)).await;
        let Ok(update) = update else { continue };
        // Only a complete list says which members did not return.
        if recovering && !update.recovering && !update.complete {
            audit.violation(format_args!("the recovery of the head has ended, and a watcher was not told who is left"));
        }
        (seen, recovering) = (Some(update.now), update.recovering);
        audit.check_roster(&update);
        let members = registry.members(&CallContext::default()).await.unwrap_or_default();
        audit.check_listed(&members, &registry.list(&CallContext::default()).await.unwrap_or_default());
    }
}

async fn stay_registered(registry: Arc<dyn Registry>, registration: Registration) {
    loop {
        match LeaseKeeper::start(
            Arc::clone(&registry),
            &CallContext::within(Duration::from_secs(5)),
            registration.clone(),
        )
        .await
        {
            Ok(_kept) => std::future::pending().await,
            Err(_) => tokio::time::sleep(Duration::from_millis(500)).await,
        }
    }
}

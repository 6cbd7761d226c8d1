//! Plays one seed: builds the deployment, follows the script, removes the faults, and runs the audit.

use std::cell::Cell;
use std::fmt;
use std::path::Path;
use std::sync::{Arc, Mutex, Once, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream;
use gym_client::collect::ledger::{JsonlLedger, OpenMode, RecoveryReport};
use gym_client::collect::{Driver, OutputFiles, RolloutRow, RunEnd, write_new_file};
use gym_client::registry::{LeaseKeeper, RemoteRegistry};
use gym_client::{ServerClient, Transports};
use gym_core::base::Files as _;
use gym_core::registry::{MemoryRegistry, Registration, Registry};
use gym_core::rollout::{KeyState, Ledger, TaskKey};
use gym_core::server::ServerKind;
use gym_core::testing::net::{SimHost, Trace};
use gym_core::testing::{Faults, FileFault, SimFiles, SimNet};
use gym_core::transport::{Fenced, serve};
use gym_core::{CallContext, CancelToken, Code, Endpoint, Handler, Incarnation, RawObject, Result, World};
use gym_server::environment::{Relay, RelayConfig};
use gym_server::head::HeadServer;
use gym_server::metrics::Metrics;
use gym_server::role::{RoleServer, ServerContext};
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::audit::{Audit, AuditedHead, AuditedIncarnation, AuditedLedger, Counts};
use crate::plan::{
    AGENT_RESTART, AGENTS, COLLECTOR, COLLECTOR_CRASH, COLLECTOR_KILL, DISK_FULL, DISK_STALL, DISK_WELL, END_IN_WRITE,
    HEAD, HEAD_RESTART, HOSTS, LateCheck, Plan, RELAY, RESOURCES, STOP, SYNC_FAILED, Step,
};
use crate::servers::{SmallAgent, SmallResources};

const OUTPUT: &str = "out/rollouts.jsonl";

/// The time after the end of the faults within which everything must be done. Attempts, leases and partitions last seconds.
const DONE_WITHIN: Duration = Duration::from_secs(900);

/// Collector runs after the end of the faults. Each run attempts every open rollout.
const RUNS_AFTER_HEALING: u32 = 12;

/// The result of a seed.
pub(crate) struct Report {
    pub(crate) seed: u64,
    pub(crate) trace: Trace,
    pub(crate) violations: Vec<String>,
    pub(crate) completed: u64,
    pub(crate) given_up: u64,
    pub(crate) attempts: u64,
    pub(crate) took: Duration,
    plan: Plan,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seed, violations, completed, given_up, attempts, took, .. } = self;
        writeln!(f, "seed {seed}: {completed} completed, {given_up} given up, {attempts} attempts, {took:?}")?;
        write!(f, "{}", self.plan)?;
        writeln!(f, "injected: {:?}", self.trace.faults())?;
        violations.iter().try_for_each(|violation| writeln!(f, "VIOLATION {violation}"))
    }
}

/// Plays a seed on this thread.
pub(crate) fn run(seed: u64, late_check: LateCheck) -> Report {
    let plan = Plan::drawn(seed);
    watch_for_panics();
    PANICKED.set(false);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime without I/O can be built");
    let mut report = runtime.block_on(Deployment::play(plan, late_check));
    if PANICKED.get() {
        report.violations.push("something panicked; see above".to_owned());
    }
    report
}

thread_local! {
    static PANICKED: Cell<bool> = const { Cell::new(false) };
}

/// Records panics; otherwise a panic inside a task would only be one more failed rollout.
fn watch_for_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            PANICKED.set(true);
            before(info);
        }));
    });
}

/// The signals to and from the collector.
#[derive(Clone, Default)]
struct Orders {
    stop: Arc<Mutex<CancelToken>>,
    healed: CancelToken,
    done: CancelToken,
}

struct Deployment {
    plan: Plan,
    late_check: LateCheck,
    net: SimNet,
    audit: Audit,
    files: SimFiles,
    registry: Arc<Mutex<MemoryRegistry>>,
    orders: Orders,
}

impl Deployment {
    async fn play(plan: Plan, late_check: LateCheck) -> Report {
        let began = Instant::now();
        let net = SimNet::new(plan.seed, plan.faults.clone());
        let files = SimFiles::new(plan.seed);
        files.set_latency_max(DISK_WELL);
        let (audit, registry) = (Audit::new(&net), Arc::default());
        let mut this = Self { plan, late_check, net, audit, files, registry, orders: Orders::default() };
        for host in HOSTS {
            this.start(host);
        }
        let auditor = tokio::spawn(audit_leases(this.audit.clone(), Arc::clone(&this.registry)));
        for (at, step) in this.plan.script.clone() {
            tokio::time::sleep_until(began + at).await;
            this.follow(step);
        }
        tokio::time::sleep_until(began + this.plan.heals_at).await;
        this.net.set_faults(Faults::calm());
        this.files.clear_fault();
        this.orders.healed.cancel();
        if tokio::time::timeout(DONE_WITHIN, this.orders.done.cancelled()).await.is_err() {
            this.audit.violation(format_args!("not done {DONE_WITHIN:?} after the healing"));
        }
        auditor.abort();
        let counts = this.check_end();
        Report {
            seed: this.plan.seed,
            trace: this.net.trace(),
            violations: this.audit.violations(),
            completed: counts.completed,
            given_up: counts.given_up,
            attempts: counts.attempts,
            took: began.elapsed(),
            plan: this.plan,
        }
    }

    fn check_end(&self) -> Counts {
        let wanted: Vec<_> = rows(&self.plan).iter().map(|row| row.key).collect();
        self.audit.check_end(&self.files, Path::new(OUTPUT), &wanted, self.plan.options.attempts_max)
    }

    fn follow(&mut self, step: Step) {
        self.net.note("script", format_args!("{step}"));
        match step {
            Step::Crash(host) => {
                self.net.crash(host);
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
            Step::Start(host) => {
                if host == HEAD {
                    self.net.injected(host, HEAD_RESTART);
                } else if AGENTS.contains(&host) {
                    self.net.injected(host, AGENT_RESTART);
                }
                self.start(host);
            }
            Step::Disk(latency) => {
                if latency > DISK_WELL {
                    self.net.injected("disk", DISK_STALL);
                }
                self.files.set_latency_max(latency);
            }
            Step::DiskFault(fault) => {
                self.net.injected("disk", if fault == FileFault::DiskFull { DISK_FULL } else { SYNC_FAILED });
                self.files.fail_write(0, fault);
            }
            Step::Stop => {
                self.net.injected(COLLECTOR, STOP);
                self.orders.stop.lock().unwrap_or_else(PoisonError::into_inner).cancel();
            }
        }
    }

    fn start(&self, name: &'static str) {
        let host = self.net.host(name);
        match name {
            HEAD => self.start_head(&host),
            COLLECTOR => {
                let collector = Collector {
                    client: self.client(&host),
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
            _ => self.start_server(&host, name),
        }
    }

    /// Starts a head server. A restarted head server has lost its state.
    fn start_head(&self, host: &SimHost) {
        let registry = MemoryRegistry::new();
        *self.registry.lock().unwrap_or_else(PoisonError::into_inner) = registry.clone();
        let config = Arc::new(|_: &[gym_core::registry::Instance]| String::new());
        let head = HeadServer::new(registry, config, &self.world(host), Metrics::new());
        self.serve(host, Arc::new(AuditedHead { head, audit: self.audit.clone() }));
    }

    fn start_server(&self, host: &SimHost, name: &'static str) {
        let (client, world) = (self.client(host), self.world(host));
        let life = Incarnation(host.life() + 1);
        let (name, rank, kind) = match name {
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
            _ => Arc::new(RoleServer::agent(SmallAgent { client, world: world.clone(), steps, think_max }, &context)),
        };
        let handler = AuditedIncarnation { life, handler, audit: self.audit.clone() };
        let endpoint = self.serve(host, Arc::new(Fenced::new(life, handler)));
        let registration = Registration {
            name: name.to_owned(),
            rank: Some(rank),
            kind,
            implementation: "small".to_owned(),
            endpoints: vec![endpoint],
            incarnation: life,
            ttl,
            labels: Default::default(),
        };
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

    fn client(&self, host: &SimHost) -> ServerClient {
        let transports = Transports::new().with_connector(Arc::new(host.clone()));
        let head = Endpoint::parse("sim://head/gym").expect("an endpoint");
        let world = self.world(host);
        let registry = RemoteRegistry::new(head, transports.clone(), world.clone());
        ServerClient::new(Arc::new(registry), transports, &world)
    }

    fn world(&self, host: &SimHost) -> World {
        let index = HOSTS.iter().position(|known| *known == host.name()).unwrap_or_default() as u64;
        let seed = self.plan.seed.wrapping_mul(1_000_003) ^ (index << 40) ^ (host.life() << 48);
        World::new(Arc::new(self.files.clone()), seed, Duration::from_secs(1_700_000_000))
    }
}

async fn audit_leases(audit: Audit, registry: Arc<Mutex<MemoryRegistry>>) {
    loop {
        tokio::time::sleep(Duration::from_millis(250)).await;
        let registry = registry.lock().unwrap_or_else(PoisonError::into_inner).clone();
        audit.check_leases(&registry).await;
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

/// Returns the rollouts as the lines of the materialized inputs.
fn lines(plan: &Plan) -> Vec<String> {
    let padding = "x".repeat(plan.padding);
    let keys = (0..plan.tasks).flat_map(|task| (0..plan.repeats).map(move |repeat| (task, repeat)));
    keys.map(|(task, repeat)| {
        format!(
            r#"{{"responses_create_params":{{"input":[]}},"_ng_task_index":{task},"_ng_rollout_index":{repeat},"x":"{padding}"}}"#
        )
    })
    .collect()
}

fn rows(plan: &Plan) -> Vec<RolloutRow> {
    let keys = (0..plan.tasks).flat_map(|task| (0..plan.repeats).map(move |repeat| TaskKey::new(task, repeat)));
    keys.zip(lines(plan))
        .map(|(key, line)| RolloutRow {
            key,
            agent: "agent".into(),
            server: RELAY.into(),
            result_type: None,
            row: RawObject::parse(line).expect("an object"),
        })
        .collect()
}

/// One incarnation of the collector's process. It starts run after run, like a shell loop.
struct Collector {
    client: ServerClient,
    world: World,
    rows: Vec<RolloutRow>,
    plan: Plan,
    late_check: LateCheck,
    net: SimNet,
    audit: Audit,
    files: SimFiles,
    orders: Orders,
}

impl Collector {
    async fn run(mut self) {
        let mut after_healing = 0;
        loop {
            // The state at the start of the run: a run that still met faults does not count.
            let healed = self.orders.healed.is_cancelled();
            let open = self.once().await;
            if self.files.has_ended() {
                // Within a write.
                self.net.note(COLLECTOR, format_args!("has ended"));
                self.files = self.files.next_process();
                self.audit.check_acknowledged(&self.files, Path::new(OUTPUT));
            }
            if healed {
                after_healing += 1;
                if open == Some(0) || after_healing == RUNS_AFTER_HEALING {
                    break;
                }
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        self.orders.done.cancel();
    }

    /// Runs one collection. Returns the number of open rollouts, or `None` if it is unknown.
    async fn once(&self) -> Option<usize> {
        let cx = CallContext::within(Duration::from_secs(120));
        let (ledger, opened) = match self.prepare(&cx).await {
            Ok(prepared) => prepared,
            Err(error) => {
                self.net.note(COLLECTOR, format_args!("cannot prepare the run: {error:?}"));
                if error.code() == Code::DataLoss {
                    self.audit.violation(format_args!("the ledger does not open again: {error}"));
                }
                return None;
            }
        };
        self.audit.opened(&self.files, Path::new(OUTPUT));
        self.net.note(COLLECTOR, format_args!("opens the ledger: {opened:?}"));
        let ledger = match self.late_check {
            LateCheck::On => ledger,
            LateCheck::Off => ledger.without_late_check(),
        };
        let ledger = Arc::new(AuditedLedger { ledger, audit: self.audit.clone() });
        let driver = Driver::new(
            self.client.clone(),
            Arc::clone(&ledger) as Arc<dyn Ledger>,
            &self.world,
            self.plan.options.clone(),
        );
        let stop = CancelToken::new();
        *self.orders.stop.lock().unwrap_or_else(PoisonError::into_inner) = stop.clone();
        let rows = self.rows.clone();
        let ended = Arc::new(driver).run(stream::iter(rows.into_iter().map(Ok)), stop).await;
        self.net.note(COLLECTOR, format_args!("ends a run: {ended:?}"));
        let closed = ledger.ledger.close(&cx).await;
        self.net.note(COLLECTOR, format_args!("closes the ledger: {closed:?}"));
        match ended {
            Ok(RunEnd::Exhausted | RunEnd::Stopped | RunEnd::FailedFast) => {}
            Err(_) => return None,
        }
        let open =
            |state| matches!(state, KeyState::Open { failures, .. } if failures < self.plan.options.attempts_max);
        Some(self.rows.iter().filter(|row| open(ledger.state(row.key))).count())
    }

    /// Writes the inputs and opens the ledger in the order of `RolloutCollector::collect`.
    async fn prepare(&self, cx: &CallContext) -> Result<(JsonlLedger, RecoveryReport)> {
        let OutputFiles { rollouts, failures, materialized, .. } = OutputFiles::beside(OUTPUT);
        let partial = materialized.with_extension("jsonl.partial");
        let [rollouts, failures, inputs] = [&rollouts, &failures, &materialized].map(|path| self.files.length(path));
        let recorded =
            rollouts.await?.is_some_and(|length| length > 0) || failures.await?.is_some_and(|length| length > 0);
        if recorded && inputs.await?.is_none_or(|length| length == 0) {
            self.audit.violation("there are outcomes, and their inputs are lost");
        }
        let lines = lines(&self.plan);
        let wanted = lines.iter().map(|line| format!("{line}\n")).collect::<String>();
        let (sender, chunks) = mpsc::channel(1);
        let producing = async {
            for line in lines {
                // Fails after an error of the disk, which the other end reports.
                let _ = sender.send(Bytes::from(line + "\n")).await;
            }
            drop(sender);
            Ok(())
        };
        write_new_file(&self.files, &partial, chunks, producing).await?;
        let opened = JsonlLedger::open(cx, Arc::new(self.files.clone()), OUTPUT, OpenMode::Resume).await?;
        // A resumed collection may add rows, so it replaces its inputs too.
        if !recorded || self.world.rng().bool() {
            self.files.rename(&partial, &materialized).await?;
        } else {
            self.files.remove(&partial).await?;
        }
        if self.files.contents(&materialized) != wanted.as_bytes() {
            self.audit.violation("the inputs are not what was written");
        }
        Ok(opened)
    }
}

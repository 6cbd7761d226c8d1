//! Values by reference: processes on up to three nodes put values, fetch those of one another, use them for a while, and are killed meanwhile.
//! The two processes of a node share its directory. It is a real one, in memory, because the kernel's locks are what keeps processes apart;
//! network, time, processes and the random numbers are simulated.

mod audit;
mod plan;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use gym_client::Transports;
use gym_client::values::{HeldValue, ValueRef, Values, ValuesOptions};
use gym_core::testing::net::SimHost;
use gym_core::testing::{Faults, SimFiles, SimNet};
use gym_core::transport::{Backend, BoundListener, Connector, ListenOptions};
use gym_core::{CallContext, CancelToken, Code, Handler, Result, World};
use tempfile::TempDir;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::scenario::{Clocks, Report};
use crate::script::Step;
pub(crate) use audit::COUNTED_IN_VALUES;
use audit::{CUT_SHORT, MARGIN_TIMEOUT, ValuesAudit, contents};
use plan::node_of;
pub(crate) use plan::{INJECTED_IN_VALUES, ValuesPlan};

/// The most bytes of values that a process holds.
const MEMORY_MAX: u64 = 64 << 20;
/// The time after the end of the faults after which nothing of them is left: requests and pauses last seconds.
const SETTLED_AFTER: Duration = Duration::from_secs(15);
/// Limits a fetch that nothing prevents.
const FETCH_TIMEOUT: Duration = Duration::from_secs(10);
/// The values that a process holds at a time.
const HELD_MAX: u32 = 4;

/// Plays a seed.
pub(crate) async fn play(plan: ValuesPlan) -> Report {
    fastrand::seed(plan.seed);
    let this = Playing::start_all(plan);
    for (at, step) in &this.plan.script {
        sleep_until(this.began + *at).await;
        this.follow(*step);
    }
    sleep_until(this.began + this.plan.heals_at).await;
    this.net.set_faults(Faults::calm());
    this.net.note("script", format_args!("the faults have ended"));
    this.healed.cancel();
    sleep(SETTLED_AFTER).await;
    this.all_are_reached().await;
    this.ends.cancel();
    // What a process keeps up is noticed to be gone after its lease, and removed at the next look.
    sleep(this.plan.lease * 4 + Duration::from_secs(2)).await;
    this.nothing_is_left().await;
    let [attempts, completed, given_up] = this.audit.fetches();
    Report {
        trace: this.net.trace(),
        violations: this.audit.violations(),
        completed,
        given_up,
        attempts,
        took: this.began.elapsed(),
        counts: this.audit.counts(),
        plan: this.plan.to_string(),
    }
}

/// Processes that run.
struct Playing {
    plan: Arc<ValuesPlan>,
    net: SimNet,
    audit: ValuesAudit,
    began: Instant,
    clocks: Clocks,
    directories: TempDir,
    processes: RefCell<BTreeMap<&'static str, Process>>,
    /// The faults have ended; processes put and fetch nothing more.
    healed: CancelToken,
    /// No value is held or used from now on.
    ends: CancelToken,
}

/// One process. Clones share it.
#[derive(Clone)]
struct Process {
    host: SimHost,
    name: &'static str,
    values: Values,
    world: World,
    directory: PathBuf,
    plan: Arc<ValuesPlan>,
    audit: ValuesAudit,
    healed: CancelToken,
    ends: CancelToken,
    /// Values that it holds, and fetches that it waits for.
    holds: Arc<AtomicU32>,
    fetches: Arc<AtomicU32>,
}

/// A host whose only service is that of its values.
#[derive(Debug)]
struct ValuesHost(SimHost);

#[async_trait]
impl Backend for ValuesHost {
    fn connectors(&self) -> Vec<Arc<dyn Connector>> {
        self.0.connectors()
    }

    async fn listen(&self, _: &ListenOptions, handler: Arc<dyn Handler>) -> Result<Option<BoundListener>> {
        Backend::listen(&self.0, &ListenOptions::named("values"), handler).await
    }
}

impl Playing {
    fn start_all(plan: ValuesPlan) -> Self {
        let plan = Arc::new(plan);
        let net = SimNet::new(plan.seed, plan.faults.clone());
        let audit = ValuesAudit::new(&net, Arc::clone(&plan));
        let memory = Path::new("/dev/shm");
        let directories = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
        let this = Self {
            net,
            audit,
            began: Instant::now(),
            clocks: Clocks::default(),
            directories: directories.expect("a directory can be created"),
            processes: RefCell::default(),
            healed: CancelToken::new(),
            ends: CancelToken::new(),
            plan,
        };
        for process in this.plan.processes() {
            this.start(process);
        }
        this
    }

    fn follow(&self, step: Step) {
        self.net.note("script", format_args!("{step}"));
        if let Some((process, kind)) = plan::injects(step).or(step.shared_fault()) {
            self.net.injected(process, kind);
        }
        match step {
            Step::Crash(process) => self.kill(process),
            Step::Start(process) => self.start(process),
            Step::Restart(process) => {
                self.kill(process);
                self.start(process);
            }
            Step::Reboot(process) => self.reboot(node_of(process)),
            Step::Freeze(process) => self.net.freeze(process),
            Step::Thaw(process) => self.net.thaw(process),
            Step::Isolate(process) => self.net.isolate(process),
            Step::Reconnect(process) => self.net.reconnect(process),
            Step::Mute(process) => self.net.mute(process),
            Step::Unmute(process) => self.net.unmute(process),
            Step::Slow(process, delay) | Step::Swap(process, delay) => self.net.slow(process, delay),
            Step::Clock(process, ms) => {
                self.audit.clock_set(node_of(process));
                // The processes of a machine have one clock.
                self.on_node(node_of(process)).into_iter().for_each(|process| self.clocks.step(process, ms));
            }
            Step::Reseed(seed) => {
                self.net.reseed(seed);
                fastrand::seed(seed);
            }
            // Of the other settings.
            Step::Kill
            | Step::EndInWrite(..)
            | Step::FreezeMachine(_)
            | Step::SecondHead
            | Step::OneHead
            | Step::Disk(_)
            | Step::DiskFault(_)
            | Step::Stop => {}
        }
    }

    fn on_node(&self, node: &str) -> Vec<&'static str> {
        self.plan.processes().into_iter().filter(|process| node_of(process) == node).collect()
    }

    fn directory(&self, node: &str) -> PathBuf {
        self.directories.path().join(node)
    }

    fn kill(&self, name: &'static str) {
        let Some(process) = self.processes.borrow_mut().remove(name) else { return };
        process.world.kill();
        self.audit.died(name, &process.directory);
        self.net.crash(name);
    }

    /// All processes of a node start again, without the files that were in its memory.
    fn reboot(&self, node: &str) {
        let processes = self.on_node(node);
        processes.iter().for_each(|process| self.kill(process));
        // There is none before the first fetch.
        let _ = std::fs::remove_dir_all(self.directory(node));
        processes.into_iter().for_each(|process| self.start(process));
    }

    fn start(&self, name: &'static str) {
        if self.processes.borrow().contains_key(name) {
            return;
        }
        let host = self.net.host(name);
        let seed = self.plan.seed.wrapping_mul(1_000_003) ^ u64::from(name.as_bytes()[0]) << 32;
        let seed = seed ^ u64::from(name.as_bytes()[2]) << 40 ^ host.life() << 48;
        let now = Duration::from_secs(1_700_000_000) + self.began.elapsed();
        let world = self.clocks.of(name, World::new(Arc::new(SimFiles::new(seed)), seed, now));
        let directory = self.directory(node_of(name));
        let mut options = ValuesOptions::default();
        (options.lease, options.memory_max) = (self.plan.lease, MEMORY_MAX);
        (options.copies, options.copies_max) = (Some(directory.clone()), self.plan.copies_max);
        let transports = Transports::new().with(ValuesHost(host.clone()));
        let process = Process {
            values: Values::in_world(transports, options, &world),
            name,
            world,
            directory,
            plan: Arc::clone(&self.plan),
            audit: self.audit.clone(),
            healed: self.healed.clone(),
            ends: self.ends.clone(),
            holds: Arc::default(),
            fetches: Arc::default(),
            host,
        };
        self.processes.borrow_mut().insert(name, process.clone());
        process.host.clone().spawn(process.work());
    }

    /// Checks that each process gets every value that is held, among them one of each process.
    async fn all_are_reached(&self) {
        let processes: Vec<Process> = self.processes.borrow().values().cloned().collect();
        for process in &processes {
            process.put().await;
        }
        for reference in self.audit.held() {
            for process in &processes {
                process.fetch(&reference, FETCH_TIMEOUT, Duration::ZERO, true).await;
            }
        }
    }

    /// Checks that values that are gone take neither memory nor files.
    async fn nothing_is_left(&self) {
        let processes: Vec<Process> = self.processes.borrow().values().cloned().collect();
        for process in &processes {
            let all = vec![0; usize::try_from(MEMORY_MAX).unwrap_or_default()];
            match process.values.put("all", all).await {
                Ok(held) => held.release(),
                Err(error) => self.audit.violation(format_args!("memory is still taken: {error}")),
            }
            self.audit.check_empty(node_of(process.name), &process.directory);
        }
    }
}

impl Process {
    /// Puts and fetches values until the faults have ended.
    async fn work(self) {
        let mut rng = fastrand::Rng::with_seed(self.plan.seed ^ self.world.rng().u64(..));
        let pause_max = u64::try_from(self.plan.pause_max.as_millis()).unwrap_or(u64::MAX);
        let millis = |rng: &mut fastrand::Rng, longest: Duration| {
            Duration::from_millis(rng.u64(1..=u64::try_from(longest.as_millis()).unwrap_or(u64::MAX)))
        };
        while !self.healed.is_cancelled() {
            sleep(Duration::from_millis(rng.u64(1..=pause_max))).await;
            if rng.u8(..3) == 0 && self.holds.load(Ordering::Relaxed) < HELD_MAX {
                self.put().await;
                continue;
            }
            let waits = self.fetches.load(Ordering::Relaxed) >= self.plan.callers;
            let Some(reference) = self.audit.recent(&mut rng).filter(|_| !waits) else { continue };
            let (deadline, used) = (millis(&mut rng, self.plan.deadline_max), millis(&mut rng, self.plan.held_max));
            // Nothing prevents a calm fetch.
            let deadline = if self.plan.is_calm() { FETCH_TIMEOUT } else { deadline };
            let cut = (rng.u8(..8) == 0 && !self.plan.is_calm())
                .then(|| millis(&mut rng, deadline / 4 + Duration::from_millis(1)));
            let this = self.clone();
            self.fetches.fetch_add(1, Ordering::Relaxed);
            self.host.spawn(async move {
                let fetch = this.fetch(&reference, deadline, used, false);
                match cut {
                    None => fetch.await,
                    Some(cut) => {
                        if timeout(cut, fetch).await.is_err() {
                            this.audit.count(CUT_SHORT);
                        }
                    }
                }
                this.fetches.fetch_sub(1, Ordering::Relaxed);
            });
        }
    }

    /// Puts a value, and holds it for a while.
    async fn put(&self) {
        let number = self.audit.next();
        let held = match self.values.put(&format!("value-{number}"), contents(number)).await {
            Ok(held) => held,
            Err(error) if error.code() == Code::ResourceExhausted => return,
            Err(error) => return self.audit.violation(format_args!("a value cannot be put: {error}")),
        };
        self.audit.put(held.reference(), number, self.name);
        self.holds.fetch_add(1, Ordering::Relaxed);
        let this = self.clone();
        self.host.spawn(async move { this.hold(held, number).await });
    }

    async fn hold(self, held: HeldValue, number: u64) {
        // Those that are put after the faults are held to the end.
        let held_max = u64::try_from(self.plan.held_max.as_millis()).unwrap_or(u64::MAX);
        let time = Duration::from_millis(1 + number.wrapping_mul(2_654_435_761) % held_max);
        if self.healed.is_cancelled() || number.is_multiple_of(5) {
            self.ends.cancelled().await;
        } else {
            sleep(time).await;
        }
        let at_once = number.is_multiple_of(3);
        self.audit.ends(&held, at_once);
        if at_once {
            held.release();
        } else {
            drop(held);
        }
        self.holds.fetch_sub(1, Ordering::Relaxed);
    }

    /// Fetches a value and uses it for a while.
    async fn fetch(&self, reference: &ValueRef, deadline: Duration, used: Duration, settled: bool) {
        let began = Instant::now();
        self.audit.begins(self.name, reference);
        let value = self.values.fetch(&CallContext::within(deadline), reference).await;
        if began.elapsed() > deadline + MARGIN_TIMEOUT {
            self.audit.violation(format_args!("a fetch took longer than its deadline"));
        }
        let fetched = match value {
            Ok(value) => value.bytes().await.map(|bytes| (value, bytes)),
            Err(error) => Err(error),
        };
        let at = [self.name, node_of(self.name)];
        self.audit.check(at, reference, began, fetched.as_ref().map(|(_, bytes)| bytes), settled);
        self.audit.check_room(&self.directory);
        let Ok((value, bytes)) = fetched else { return };
        tokio::select! {
            biased;
            () = self.ends.cancelled() => {}
            () = sleep(used) => {}
        }
        // The file of a value that is used stays as it is.
        if let Some(path) = value.path()
            && !std::fs::read(path).is_ok_and(|found| found == bytes)
        {
            self.audit.violation(format_args!("the copy of a value that is used was changed or removed"));
        }
    }
}

//! Derives a plan from a seed before the run: the network, the disk, the sizes, and a script of events.

mod cluster;
mod whole;

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use gym_client::collect::{DriverOptions, FailFast};
use gym_core::testing::{Faults, FileEnd, FileFault};
use gym_core::transport::RetryPolicy;

use crate::script::{Additions, Script, Step, normalized};

pub(crate) use cluster::{ClusterPlan, FROZEN, HEAD_KILL, INJECTED_IN_CLUSTERS, ISOLATED, WORKER_KILL, WORKERS};
pub(crate) use whole::WholePlan;

pub(crate) const HEAD: &str = "head";
pub(crate) const RELAY: &str = "relay";
pub(crate) const RESOURCES: &str = "resources";
pub(crate) const AGENTS: [&str; 2] = ["agent-0", "agent-1"];
pub(crate) const COLLECTOR: &str = "collector";
/// The hosts of the servers' world, in the order in which they start.
pub(crate) const HOSTS: [&str; 6] = [HEAD, RESOURCES, AGENTS[0], AGENTS[1], RELAY, COLLECTOR];

/// Kinds of faults that the scenario itself injects.
pub(crate) const DISK_STALL: &str = "disk stall";
pub(crate) const DISK_FULL: &str = "disk full";
pub(crate) const SYNC_FAILED: &str = "sync failed";
pub(crate) const OPEN_FAILED: &str = "file not opened";
pub(crate) const STOP: &str = "stop asked for";
pub(crate) const COLLECTOR_CRASH: &str = "collector crash";
pub(crate) const COLLECTOR_KILL: &str = "collector killed";
pub(crate) const HEAD_RESTART: &str = "head restart";
pub(crate) const AGENT_RESTART: &str = "agent restart";
pub(crate) const END_IN_WRITE: &str = "end within a write";
pub(crate) const INJECTED: [&str; 10] = [
    DISK_STALL,
    DISK_FULL,
    SYNC_FAILED,
    OPEN_FAILED,
    STOP,
    COLLECTOR_CRASH,
    COLLECTOR_KILL,
    END_IN_WRITE,
    HEAD_RESTART,
    AGENT_RESTART,
];

/// What a seed plays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Setting {
    /// A head server, a relay, agents and a resources server, which register one by one, and a collector that calls them.
    Servers,
    /// A head server, workers that join it, and a collector whose rollouts they take.
    Cluster,
    /// A controller, node agents, and a worker group on them.
    Groups,
    /// A cluster and a group at once: the ranks of the group are the policy of the rollouts.
    Whole,
    /// Processes that put values and fetch those of one another.
    Values,
}

pub(crate) const SETTINGS: [Setting; 5] =
    [Setting::Servers, Setting::Cluster, Setting::Groups, Setting::Whole, Setting::Values];

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Servers => "servers",
            Self::Cluster => "cluster",
            Self::Groups => "groups",
            Self::Whole => "whole",
            Self::Values => "values",
        })
    }
}

impl FromStr for Setting {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = SETTINGS.into_iter().find(|setting| setting.to_string() == text);
        known.ok_or_else(|| format!("`{text}` is no setting; expected servers, cluster, groups, whole or values"))
    }
}

/// Determines if the ledger rejects late attempts. A test shows that `Off` is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LateCheck {
    On,
    Off,
}

/// The parameters of a seed.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) seed: u64,
    pub(crate) faults: Faults,
    pub(crate) tasks: u32,
    pub(crate) repeats: u32,
    /// Tool calls in each episode.
    pub(crate) steps: u32,
    /// Maximum thinking time of a model.
    pub(crate) think_max: Duration,
    pub(crate) ttl: Duration,
    pub(crate) concurrency: u32,
    /// Of the driver, but for its concurrency.
    pub(crate) options: DriverOptions,
    /// From this time on, no faults occur.
    pub(crate) heals_at: Duration,
    pub(crate) script: Script,
    /// Extra bytes in each row: with them, files have more pages than one.
    pub(crate) padding: usize,
    /// The workers; `None` if the seed plays servers that register one by one.
    pub(crate) cluster: Option<ClusterPlan>,
    /// Agents have turns of a policy, whose ranks are another plan's.
    pub(crate) turns: bool,
}

/// Latency of an append on a healthy disk.
pub(crate) const DISK_WELL: Duration = Duration::from_millis(5);

impl Plan {
    pub(crate) fn drawn(seed: u64, setting: Setting) -> Self {
        match setting {
            Setting::Servers => Self::of_servers(seed),
            Setting::Cluster => cluster::plan(seed),
            Setting::Groups | Setting::Whole | Setting::Values => unreachable!("it has a plan of its own"),
        }
    }

    /// Adds the faults that came after the first plans. Plans without them are those of the first seeds.
    pub(crate) fn with_additions(mut self) -> Self {
        let mut rng = fastrand::Rng::with_seed(self.seed ^ 0xadd1_7104_5eed_0a11);
        if rng.u8(..4) == 0 || self.only_restarts_head() {
            return self;
        }
        if self.cluster.as_ref().is_none_or(|cluster| !cluster.calm) {
            self.faults.corrupt = if rng.bool() { 0.03 * rng.f64() } else { 0.0 };
            self.faults.duplicate = if rng.bool() { 0.2 * rng.f64() } else { 0.0 };
            self.faults.duplicate_routes = &["/registry/", "/cluster/", "/work/"];
        }
        let (hosts, heals_at) = (self.hosts(), self.heals_at);
        let additions = Additions { hosts: &hosts, heals_at, disk: true, two_heads: self.cluster.is_some() };
        self.script.extend(additions.drawn(&mut rng));
        self.script = normalized(self.script, &hosts, heals_at);
        self
    }

    /// Returns the server that the collector calls.
    pub(crate) fn server(&self) -> &'static str {
        if self.cluster.is_some() { "agent" } else { RELAY }
    }

    /// Returns the hosts in the order in which they start.
    pub(crate) fn hosts(&self) -> Vec<&'static str> {
        match &self.cluster {
            None => HOSTS.to_vec(),
            Some(cluster) => {
                [HEAD].into_iter().chain(WORKERS.into_iter().take(cluster.workers)).chain([COLLECTOR]).collect()
            }
        }
    }

    /// Returns the workers that no fault reaches: there are only faults of the script, and they strike others than the worker and its
    /// head server.
    pub(crate) fn unharmed(&self) -> Vec<&'static str> {
        if self.strikes(|_, host| host == HEAD) { Vec::new() } else { self.untouched() }
    }

    /// Returns the workers that notice a fault only if the head server is killed.
    pub(crate) fn returning(&self) -> Vec<&'static str> {
        let otherwise = self.strikes(|step, host| host == HEAD && !matches!(step, Step::Crash(_) | Step::Start(_)));
        if otherwise { Vec::new() } else { self.untouched() }
    }

    /// Returns `true` if nothing happens on these hosts but restarts of the head server: then no worker is lost.
    pub(crate) fn only_restarts_head(&self) -> bool {
        let calm = self.cluster.as_ref().is_some_and(|cluster| cluster.calm);
        let hosts = self.hosts();
        let steps = self.script.iter().map(|(_, step)| *step);
        let here: Vec<Step> = steps.filter(|step| step.host().is_none_or(|host| hosts.contains(&host))).collect();
        calm && !here.is_empty() && here.iter().all(|step| matches!(step, Step::Crash(HEAD) | Step::Start(HEAD)))
    }

    fn untouched(&self) -> Vec<&'static str> {
        let Some(cluster) = self.cluster.as_ref().filter(|cluster| cluster.calm) else { return Vec::new() };
        let workers = WORKERS.into_iter().take(cluster.workers);
        workers.filter(|worker| !self.strikes(|_, host| host == *worker)).collect()
    }

    fn strikes(&self, is: impl Fn(Step, &'static str) -> bool) -> bool {
        self.script.iter().any(|(_, step)| step.host().is_some_and(|host| is(*step, host)))
    }

    fn of_servers(seed: u64) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed ^ 0x5eed_0f7e_57ab_1e00);
        let faults = Faults::drawn(&mut rng);
        let millis = |rng: &mut fastrand::Rng, from, to| Duration::from_millis(rng.u64(from..=to));
        let heals_at = millis(&mut rng, 15_000, 45_000);
        let concurrency = u32::try_from(rng.usize(1..=12)).expect("a small number");
        let mut options = DriverOptions::default();
        options.attempts_max = rng.u32(3..=6);
        options.attempt_timeout = millis(&mut rng, 2_000, 10_000);
        options.record_timeout = millis(&mut rng, 500, 3_000);
        options.stop_grace = millis(&mut rng, 0, 3_000);
        options.fail_fast = FailFast::Never;
        options.backoff = {
            let mut policy = RetryPolicy::default();
            policy.backoff_min = Duration::from_millis(200);
            policy
        };
        // A separate generator, so that a seed keeps the other steps that it had before there were these.
        let mut ends = fastrand::Rng::with_seed(seed ^ 0x0ddb_a11e_0f5e_7e11);
        Self {
            seed,
            padding: [0, 300, 3_000][ends.usize(..3)],
            tasks: rng.u32(2..=8),
            repeats: rng.u32(1..=3),
            steps: rng.u32(0..=3),
            think_max: millis(&mut rng, 10, 1_500),
            ttl: millis(&mut rng, 2_000, 8_000),
            script: with_ends(script(&mut rng, heals_at), &mut ends, heals_at),
            faults,
            concurrency,
            options,
            heals_at,
            cluster: None,
            turns: false,
        }
    }
}

/// Returns steps at random times before the end of the faults, at which all hosts run and the disk is healthy.
fn script(rng: &mut fastrand::Rng, heals_at: Duration) -> Script {
    let every_ms = rng.u64(1_000..8_000);
    // Each seed uses a random subset of the kinds of steps.
    let kinds: Vec<u8> = (0..5).filter(|_| rng.u8(..3) > 0).collect();
    let mut script = Vec::new();
    let mut up_from = HOSTS.map(|host| (host, Duration::ZERO));
    let mut disk_well_from = Duration::ZERO;
    let mut at = Duration::ZERO;
    loop {
        at += Duration::from_millis(rng.u64(1..=every_ms * 2));
        let lasts = Duration::from_millis(rng.u64(100..10_000));
        if at >= heals_at || kinds.is_empty() {
            break;
        }
        match kinds[rng.usize(..kinds.len())] {
            0 | 1 => {
                let (host, up_from) = &mut up_from[rng.usize(..HOSTS.len())];
                if *up_from <= at {
                    *up_from = (at + lasts).min(heals_at);
                    let kill = *host == COLLECTOR && rng.bool();
                    let ends = if kill { Step::Kill } else { Step::Crash(host) };
                    script.extend([(at, ends), (*up_from, Step::Start(host))]);
                }
            }
            2 if disk_well_from <= at => {
                disk_well_from = (at + lasts).min(heals_at);
                let latency = Duration::from_millis(rng.u64(500..25_000));
                script.extend([(at, Step::Disk(latency)), (disk_well_from, Step::Disk(DISK_WELL))]);
            }
            2 => {}
            3 => {
                let fault = if rng.bool() { FileFault::DiskFull } else { FileFault::SyncFailed };
                script.push((at, Step::DiskFault(fault)));
            }
            _ => script.push((at, Step::Stop)),
        }
    }
    script.sort_by_key(|(at, _)| *at);
    script
}

/// Adds ends within a write: when a collector starts, and at random times.
fn with_ends(mut script: Script, rng: &mut fastrand::Rng, heals_at: Duration) -> Script {
    let mut times: Vec<Duration> =
        script.iter().filter(|(_, step)| *step == Step::Start(COLLECTOR)).map(|(at, _)| *at).collect();
    times.push(Duration::ZERO);
    times.retain(|_| rng.u8(..3) == 0);
    if rng.u8(..3) == 0 {
        times.extend((0..rng.u8(..6)).map(|_| Duration::from_millis(rng.u64(..15_000))));
    }
    for at in times.into_iter().filter(|at| *at < heals_at) {
        let end = if rng.bool() { FileEnd::Crash } else { FileEnd::Kill };
        script.push((at, Step::EndInWrite(rng.u64(..24), end)));
    }
    script.sort_by_key(|(at, _)| *at);
    script
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "network: {}", self.faults)?;
        let Self { tasks, repeats, steps, think_max, ttl, concurrency, options, heals_at, padding, .. } = self;
        writeln!(
            f,
            "{tasks} tasks x {repeats} with {padding} bytes, {steps} steps, thinks up to {think_max:?}, lease {ttl:?}, {concurrency} at once, {} attempts of \
             {:?} + {:?}, heals at {heals_at:?}",
            options.attempts_max, options.attempt_timeout, options.record_timeout,
        )?;
        if let Some(cluster) = &self.cluster {
            writeln!(f, "{cluster:?}")?;
        }
        self.script.iter().try_for_each(|(at, step)| writeln!(f, "{:>8} ms  {step}", at.as_millis()))
    }
}

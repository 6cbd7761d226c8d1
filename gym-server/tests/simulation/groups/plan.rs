//! Derives the plan of a group from a seed: the hosts, the network, the options, and a script of events.

use std::fmt;
use std::time::Duration;

use gym_core::testing::Faults;
use gym_group::NodesOptions;
use gym_group::placement::{ClusterSpec, PlacementStrategy, WorkersOn};

use crate::script::{Additions, Script, Step, normalized};

pub(crate) const CONTROLLER: &str = "controller";
pub(crate) const HOSTS: [&str; 4] = ["node-0", "node-1", "node-2", "node-3"];
/// The hosts of the ranks, in the order of their agents.
const RANKS_OF: [&str; 4] = ["ranks-0", "ranks-1", "ranks-2", "ranks-3"];

/// Returns the host of the ranks of an agent.
pub(crate) fn ranks_of(host: &str) -> &'static str {
    let at = HOSTS.iter().position(|known| *known == host).expect("an agent's host");
    RANKS_OF[at]
}

const NODE_KILLED: &str = "node killed";
const NODE_RESTARTED: &str = "node killed and restarted at once";
const AGENT_FROZEN: &str = "agent frozen";
const MACHINE_FROZEN: &str = "machine frozen";
const NODE_ISOLATED: &str = "cable of a node cut";
const CONTROLLER_KILLED: &str = "controller killed";
const CONTROLLER_FROZEN: &str = "controller frozen";
const CONTROLLER_ISOLATED: &str = "cable of the controller cut";

/// The kinds of faults that the script injects, of which some seed must have each.
pub(crate) const INJECTED_IN_GROUPS: [&str; 8] = [
    NODE_KILLED,
    NODE_RESTARTED,
    AGENT_FROZEN,
    MACHINE_FROZEN,
    NODE_ISOLATED,
    CONTROLLER_KILLED,
    CONTROLLER_FROZEN,
    CONTROLLER_ISOLATED,
];

/// What some seed must have besides the faults.
pub(crate) const COUNTED_IN_GROUPS: [&str; 12] = [
    "rank killed",
    "rank restarted in place",
    "rank restarted elsewhere",
    "rank ended by its lease",
    "rank ended with its node",
    "ranks of a dead controller ended",
    "call whose execution is unknown",
    "call that did not start",
    "call that ended early because its rank ended",
    "budget spent",
    "no room",
    "ranks serve after the faults",
];

/// Returns the fault of a step.
pub(crate) fn injects(step: Step) -> Option<(&'static str, &'static str)> {
    let of = |host, of_controller, of_node| Some((host, if host == CONTROLLER { of_controller } else { of_node }));
    match step {
        Step::Crash(host) => of(host, CONTROLLER_KILLED, NODE_KILLED),
        Step::Restart(host) => of(host, CONTROLLER_KILLED, NODE_RESTARTED),
        Step::Freeze(host) => of(host, CONTROLLER_FROZEN, AGENT_FROZEN),
        Step::FreezeMachine(host) => Some((host, MACHINE_FROZEN)),
        Step::Isolate(host) => of(host, CONTROLLER_ISOLATED, NODE_ISOLATED),
        _ => None,
    }
}

/// The parameters of a seed.
#[derive(Clone, Debug)]
pub(crate) struct GroupPlan {
    pub(crate) seed: u64,
    pub(crate) faults: Faults,
    pub(crate) hosts: usize,
    /// CPUs of each host; each rank needs one.
    pub(crate) cpus: u32,
    pub(crate) cluster: ClusterSpec,
    pub(crate) unified: bool,
    /// The number of ranks that are tied to one another.
    pub(crate) tied: usize,
    pub(crate) nodes: NodesOptions,
    /// Restarts ranks by itself; otherwise the controller asks for it.
    pub(crate) restarts: bool,
    pub(crate) max_restarts: u32,
    pub(crate) backoff_min: Duration,
    pub(crate) backoff_max: Duration,
    pub(crate) heartbeat: Duration,
    /// Prepares restarted ranks.
    pub(crate) prepares: bool,
    /// The number of calls that may be in flight.
    pub(crate) callers: u32,
    pub(crate) call_max: Duration,
    pub(crate) deadline: Duration,
    /// From this time on, no faults occur.
    pub(crate) heals_at: Duration,
    pub(crate) script: Script,
}

impl GroupPlan {
    /// Returns the assignment of workers to bundles.
    pub(crate) fn on(&self) -> WorkersOn {
        if self.tied == 1 {
            return WorkersOn::EachBundle;
        }
        let bundles: Vec<u32> = (0..).take(self.cluster.world_size()).collect();
        WorkersOn::Tied(bundles.chunks(self.tied).map(|tied| (0, tied.to_vec())).collect())
    }

    /// Returns the hosts of the script.
    pub(crate) fn hosts(&self) -> Vec<&'static str> {
        [CONTROLLER].into_iter().chain(HOSTS.into_iter().take(self.hosts)).collect()
    }

    /// Adds the faults that came after the first plans. Plans without them are those of the first seeds.
    pub(crate) fn with_additions(mut self) -> Self {
        let mut rng = fastrand::Rng::with_seed(self.seed ^ 0xadd1_7104_5eed_0a11);
        if rng.u8(..4) == 0 {
            return self;
        }
        // A call runs at most once, so no request of a group may arrive twice.
        self.faults.corrupt = if rng.bool() { 0.03 * rng.f64() } else { 0.0 };
        let (hosts, heals_at) = (self.hosts(), self.heals_at);
        let additions = Additions { hosts: &hosts, heals_at, disk: false, two_heads: false };
        self.script.extend(additions.drawn(&mut rng));
        self.script = normalized(self.script, &hosts, heals_at);
        self
    }

    pub(crate) fn drawn(seed: u64) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed ^ 0x0def_5eed_90af_1173);
        let millis = |rng: &mut fastrand::Rng, from, to| Duration::from_millis(rng.u64(from..=to));
        let mut faults = if rng.u8(..4) == 0 { Faults::calm() } else { Faults::drawn(&mut rng) };
        // Calls of groups need ordered connections.
        faults.reorder = 0.0;
        let hosts = rng.usize(2..=HOSTS.len());
        let (cpus, ranks) = (rng.u32(2..=3), rng.usize(1..=4));
        // Bundles that are placed one by one, or all on one host. There is room for them when all hosts are well.
        let together = rng.bool() && ranks <= cpus as usize;
        let mut cluster =
            ClusterSpec::new(if together { vec![u32::try_from(ranks).unwrap_or(1)] } else { vec![1; ranks] });
        let unified = rng.u8(..4) == 0;
        cluster.use_gpus = false;
        let strategies = [PlacementStrategy::Pack, PlacementStrategy::Spread, PlacementStrategy::StrictSpread];
        let strict = if ranks <= hosts { 1 } else { 0 };
        cluster.placement_group_strategy = strategies[rng.usize(..2 + strict)];
        let mut nodes = NodesOptions::default();
        nodes.lease = millis(&mut rng, 400, 6_000);
        nodes.reconnect = millis(&mut rng, 50, 1_000);
        nodes.wait_for_room = millis(&mut rng, 500, 15_000);
        let heals_at = millis(&mut rng, 8_000, 30_000);
        Self {
            seed,
            faults,
            hosts,
            cpus,
            cluster,
            unified,
            tied: if together || unified { rng.usize(1..=2) } else { 1 },
            nodes,
            restarts: rng.u8(..4) > 0,
            max_restarts: rng.u32(1..=8),
            backoff_min: millis(&mut rng, 50, 1_000),
            backoff_max: millis(&mut rng, 1_000, 5_000),
            heartbeat: millis(&mut rng, 500, 3_000),
            prepares: rng.bool(),
            callers: rng.u32(1..=3),
            call_max: millis(&mut rng, 1, 800),
            deadline: millis(&mut rng, 500, 6_000),
            script: script(&mut rng, heals_at, hosts),
            heals_at,
        }
    }
}

/// Returns steps at random times before the end of the faults, at which all hosts run and are connected.
fn script(rng: &mut fastrand::Rng, heals_at: Duration, hosts: usize) -> Script {
    let every_ms = rng.u64(300..5_000);
    // Each seed uses a random subset of the kinds of steps.
    let kinds: Vec<u8> = (0..5).filter(|_| rng.u8(..3) > 0).collect();
    let hosts = [CONTROLLER].into_iter().chain(HOSTS.into_iter().take(hosts));
    let mut well_from: Vec<(&'static str, Duration)> = hosts.map(|host| (host, Duration::ZERO)).collect();
    let mut script = Vec::new();
    let mut at = Duration::ZERO;
    loop {
        at += Duration::from_millis(rng.u64(1..=every_ms * 2));
        let lasts = Duration::from_millis(rng.u64(10..8_000));
        if at >= heals_at || kinds.is_empty() {
            break;
        }
        let kind = kinds[rng.usize(..kinds.len())];
        let which = if rng.u8(..6) == 0 { 0 } else { rng.usize(1..well_from.len()) };
        let (host, well_from) = &mut well_from[which];
        if *well_from > at {
            continue;
        }
        let until = (at + lasts).min(heals_at);
        let half = at + (until - at) / 2;
        *well_from = until;
        script.extend(match kind {
            0 => vec![(at, Step::Crash(host)), (until, Step::Start(host))],
            1 => vec![(at, Step::Restart(host))],
            // Also killed while it stands still.
            2 if rng.u8(..5) == 0 => {
                vec![(at, Step::Freeze(host)), (half, Step::Crash(host)), (until, Step::Start(host))]
            }
            2 => vec![(at, Step::Freeze(host)), (until, Step::Thaw(host))],
            3 if *host == CONTROLLER => vec![(at, Step::Freeze(host)), (until, Step::Thaw(host))],
            3 => vec![(at, Step::FreezeMachine(host)), (until, Step::Thaw(host))],
            _ => vec![(at, Step::Isolate(host)), (until, Step::Reconnect(host))],
        });
    }
    script.sort_by_key(|(at, _)| *at);
    script
}

impl fmt::Display for GroupPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "network: {}", self.faults)?;
        writeln!(f, "{:?}", Self { script: Vec::new(), ..self.clone() })?;
        self.script.iter().try_for_each(|(at, step)| writeln!(f, "{:>8} ms  {step}", at.as_millis()))
    }
}

//! Derives the plan of values from a seed: the processes, the network, the options, and a script of events.

use std::fmt;
use std::time::Duration;

use gym_core::testing::Faults;

use crate::script::{Additions, Script, Step, normalized};

/// The processes, two on each node. The letter is that of the node.
const PROCESSES: [&str; 6] = ["a-0", "a-1", "b-0", "b-1", "c-0", "c-1"];

/// Returns the node of a process.
pub(super) fn node_of(process: &str) -> &str {
    &process[..1]
}

const KILLED: &str = "process killed";
const KILLED_AND_STARTED: &str = "process killed and started at once";
const PROCESS_FROZEN: &str = "process frozen";
const CUT_OFF: &str = "cable of a process cut";
const REBOOTED: &str = "node rebooted";

/// The kinds of faults that the script injects, of which some seed must have each.
pub(crate) const INJECTED_IN_VALUES: [&str; 5] = [KILLED, KILLED_AND_STARTED, PROCESS_FROZEN, CUT_OFF, REBOOTED];

/// Returns the fault of a step.
pub(super) fn injects(step: Step) -> Option<(&'static str, &'static str)> {
    match step {
        Step::Crash(process) => Some((process, KILLED)),
        Step::Restart(process) => Some((process, KILLED_AND_STARTED)),
        Step::Freeze(process) => Some((process, PROCESS_FROZEN)),
        Step::Isolate(process) => Some((process, CUT_OFF)),
        Step::Reboot(process) => Some((process, REBOOTED)),
        _ => None,
    }
}

/// The parameters of a seed.
#[derive(Clone, Debug)]
pub(crate) struct ValuesPlan {
    pub(crate) seed: u64,
    pub(crate) faults: Faults,
    pub(crate) nodes: usize,
    /// The network has no faults.
    calm: bool,
    pub(crate) lease: Duration,
    /// The room for the copies of each node, in bytes.
    pub(crate) copies_max: Option<u64>,
    /// The longest pause of a process between two things that it does.
    pub(crate) pause_max: Duration,
    /// Fetches that a process may have at a time.
    pub(crate) callers: u32,
    pub(crate) deadline_max: Duration,
    /// The longest time for which a value is held, and for which a fetched one is used.
    pub(crate) held_max: Duration,
    /// From this time on, no faults occur.
    pub(crate) heals_at: Duration,
    pub(crate) script: Script,
}

impl ValuesPlan {
    pub(crate) fn processes(&self) -> Vec<&'static str> {
        PROCESSES.into_iter().take(self.nodes * 2).collect()
    }

    /// Returns `true` if no fault reaches anybody: each fetch of a value that is held then succeeds.
    pub(super) fn is_calm(&self) -> bool {
        self.calm && self.script.iter().all(|(_, step)| matches!(step, Step::Reseed(_)))
    }

    pub(crate) fn drawn(seed: u64) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed ^ 0x7a1e_0f5e_ed5e_ed17);
        let millis = |rng: &mut fastrand::Rng, from, to| Duration::from_millis(rng.u64(from..=to));
        let calm = rng.u8(..5) == 0;
        let mut faults = if calm { Faults::calm() } else { Faults::drawn(&mut rng) };
        if !calm {
            faults.corrupt = if rng.bool() { 0.03 * rng.f64() } else { 0.0 };
            faults.duplicate = if rng.bool() { 0.2 * rng.f64() } else { 0.0 };
            faults.duplicate_routes = &["/values/"];
        }
        let heals_at = millis(&mut rng, 3_000, 15_000);
        let mut plan = Self {
            seed,
            faults,
            nodes: rng.usize(1..=3),
            calm,
            lease: millis(&mut rng, 100, 3_000),
            // Two or three of the larger values.
            copies_max: (rng.u8(..3) == 0).then(|| rng.u64(45_000..90_000)),
            pause_max: millis(&mut rng, 50, 1_000),
            callers: rng.u32(1..=4),
            deadline_max: millis(&mut rng, 500, 6_000),
            held_max: millis(&mut rng, 200, 6_000),
            heals_at,
            script: Script::new(),
        };
        if !calm {
            let processes = plan.processes();
            plan.script = script(&mut rng, heals_at, &processes);
            let additions = Additions { hosts: &processes, heals_at, disk: false, two_heads: false };
            plan.script.extend(additions.drawn(&mut rng));
            plan.script = normalized(plan.script, &processes, heals_at);
        }
        plan
    }
}

/// Returns steps at random times before the end of the faults.
fn script(rng: &mut fastrand::Rng, heals_at: Duration, processes: &[&'static str]) -> Script {
    let every_ms = rng.u64(200..3_000);
    // Each seed uses a random subset of the kinds of steps.
    let kinds: Vec<u8> = (0..5).filter(|_| rng.u8(..3) > 0).collect();
    let mut script = Script::new();
    let mut at = Duration::ZERO;
    loop {
        at += Duration::from_millis(rng.u64(1..=every_ms * 2));
        let until = (at + Duration::from_millis(rng.u64(10..5_000))).min(heals_at);
        if at >= heals_at || kinds.is_empty() {
            return script;
        }
        let process = processes[rng.usize(..processes.len())];
        script.extend(match kinds[rng.usize(..kinds.len())] {
            0 => vec![(at, Step::Crash(process)), (until, Step::Start(process))],
            1 => vec![(at, Step::Restart(process))],
            2 => vec![(at, Step::Freeze(process)), (until, Step::Thaw(process))],
            3 => vec![(at, Step::Isolate(process)), (until, Step::Reconnect(process))],
            _ => vec![(at, Step::Reboot(process))],
        });
    }
}

impl fmt::Display for ValuesPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "network: {}", self.faults)?;
        writeln!(f, "{:?}", Self { script: Vec::new(), ..self.clone() })?;
        self.script.iter().try_for_each(|(at, step)| writeln!(f, "{:>8} ms  {step}", at.as_millis()))
    }
}

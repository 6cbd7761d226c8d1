//! Plans of a cluster: workers that are killed, frozen, cut off and restarted, and a head server that is killed and restarted.

use std::time::Duration;

use gym_client::collect::{DriverOptions, FailFast};
use gym_core::registry::MemberTiming;
use gym_core::testing::{Faults, FileFault};
use gym_core::transport::RetryPolicy;

use super::{COLLECTOR, DISK_WELL, HEAD, Plan, with_ends};
use crate::script::{Script, Step};

pub(crate) const WORKERS: [&str; 3] = ["worker-0", "worker-1", "worker-2"];

pub(crate) const WORKER_KILL: &str = "worker killed";
pub(crate) const HEAD_KILL: &str = "head killed";
pub(crate) const FROZEN: &str = "process frozen";
pub(crate) const ISOLATED: &str = "cable cut";
/// Kinds of faults that the scenario injects, of which some seed of a cluster must have each.
pub(crate) const INJECTED_IN_CLUSTERS: [&str; 4] = [WORKER_KILL, HEAD_KILL, FROZEN, ISOLATED];

/// The parameters of a cluster.
#[derive(Clone, Debug)]
pub(crate) struct ClusterPlan {
    /// Number of workers.
    pub(crate) workers: usize,
    /// Number of rollouts that a worker runs at a time.
    pub(crate) capacity: u32,
    pub(crate) timing: MemberTiming,
    /// Silence after which the pool itself gives up a worker.
    pub(crate) silence_max: Duration,
    /// Workers pull their work; otherwise the collector calls their agents by name.
    pub(crate) pull: bool,
    /// The network has no faults of its own, only those of the script.
    pub(crate) calm: bool,
    /// Time in which a worker looks up the name of its head server, each time that it joins.
    pub(crate) lookup: Duration,
}

/// A resolver that is slow.
const SLOW_LOOKUP: Duration = Duration::from_secs(3);

pub(super) fn plan(seed: u64) -> Plan {
    let mut rng = fastrand::Rng::with_seed(seed ^ 0xc105_7e25_0f3e_3b05);
    let millis = |rng: &mut fastrand::Rng, from, to| Duration::from_millis(rng.u64(from..=to));
    // A separate generator, so that a seed keeps the other steps that it had before there were these.
    let mut restarts = fastrand::Rng::with_seed(seed ^ 0x4ead_4e57_a475_0038);
    let only_head = restarts.u8(..8) == 0;
    let lookup = [Duration::ZERO, SLOW_LOOKUP][restarts.usize(..2)];
    let calm = rng.u8(..4) == 0 || only_head;
    let faults = if calm { Faults::calm() } else { Faults::drawn(&mut rng) };
    let heals_at = millis(&mut rng, 8_000, 20_000);
    let heartbeat = millis(&mut rng, 300, 1_500);
    let cluster = ClusterPlan {
        workers: rng.usize(1..=WORKERS.len()),
        capacity: rng.u32(1..=6),
        timing: MemberTiming { heartbeat, timeout: heartbeat * rng.u32(3..=5), reconnect: millis(&mut rng, 50, 400) },
        silence_max: millis(&mut rng, 2_000, 10_000),
        pull: rng.u8(..4) > 0,
        calm,
        lookup,
    };
    let concurrency = u32::try_from(rng.usize(1..=16)).expect("a small number");
    let mut options = DriverOptions::default();
    options.attempts_max = rng.u32(3..=6);
    // Each seed ends, however often its workers are lost.
    options.lost_max = 1_000;
    options.attempt_timeout = millis(&mut rng, 4_000, 20_000);
    options.record_timeout = millis(&mut rng, 500, 3_000);
    options.stop_grace = millis(&mut rng, 0, 3_000);
    options.fail_fast = FailFast::Never;
    options.backoff = {
        let mut policy = RetryPolicy::default();
        policy.backoff_min = Duration::from_millis(200);
        policy
    };
    let mut script = script(&mut rng, heals_at, cluster.workers);
    if only_head {
        script = restarts_of_head(&mut restarts, heals_at);
    }
    Plan {
        seed,
        padding: [0, 300][rng.usize(..2)],
        tasks: rng.u32(2..=10),
        repeats: rng.u32(1..=3),
        steps: rng.u32(0..=3),
        think_max: millis(&mut rng, 10, 2_000),
        ttl: millis(&mut rng, 2_000, 8_000),
        script: if rng.u8(..4) == 0 && !only_head { with_ends(script, &mut rng, heals_at) } else { script },
        faults,
        concurrency,
        options,
        heals_at,
        cluster: Some(cluster),
        turns: false,
    }
}

/// Returns a script that kills and starts the head server, and nothing else.
fn restarts_of_head(rng: &mut fastrand::Rng, heals_at: Duration) -> Script {
    let (mut script, mut at) = (Vec::new(), Duration::ZERO);
    loop {
        at += Duration::from_millis(rng.u64(500..6_000));
        let until = at + Duration::from_millis(rng.u64(10..4_000));
        if until >= heals_at {
            return script;
        }
        script.extend([(at, Step::Crash(HEAD)), (until, Step::Start(HEAD))]);
        at = until;
    }
}

/// Returns steps at random times before the end of the faults, at which all hosts run and are connected.
fn script(rng: &mut fastrand::Rng, heals_at: Duration, workers: usize) -> Script {
    let every_ms = rng.u64(500..5_000);
    // Each seed uses a random subset of the kinds of steps.
    let kinds: Vec<u8> = (0..7).filter(|_| rng.u8(..3) > 0).collect();
    let mut script = Vec::new();
    let mut well_from =
        [HEAD, COLLECTOR].into_iter().chain(WORKERS.into_iter().take(workers)).map(|host| (host, Duration::ZERO));
    let mut well_from: Vec<(&'static str, Duration)> = well_from.by_ref().collect();
    let mut at = Duration::ZERO;
    loop {
        at += Duration::from_millis(rng.u64(1..=every_ms * 2));
        let lasts = Duration::from_millis(rng.u64(10..8_000));
        if at >= heals_at || kinds.is_empty() {
            break;
        }
        let kind = kinds[rng.usize(..kinds.len())];
        let host = match kind {
            0 => 0,
            1 => 1,
            _ => rng.usize(2..well_from.len()),
        };
        // Any process may also be stopped or cut off, not only a worker.
        let host = if kind > 2 && rng.u8(..5) == 0 { rng.usize(..2) } else { host };
        let (host, well_from) = &mut well_from[host];
        if *well_from > at {
            continue;
        }
        let until = (at + lasts).min(heals_at);
        let steps = match kind {
            0 | 2 => vec![(at, Step::Crash(host)), (until, Step::Start(host))],
            1 => vec![(at, if rng.bool() { Step::Kill } else { Step::Crash(host) }), (until, Step::Start(host))],
            // Also killed while it stands still.
            3 if rng.u8(..5) == 0 && !matches!(*host, HEAD | COLLECTOR) => {
                vec![(at, Step::Freeze(host)), (at + (until - at) / 2, Step::Crash(host)), (until, Step::Start(host))]
            }
            3 => vec![(at, Step::Freeze(host)), (until, Step::Thaw(host))],
            4 => vec![(at, Step::Isolate(host)), (until, Step::Reconnect(host))],
            5 => {
                let fault = if rng.bool() { FileFault::DiskFull } else { FileFault::SyncFailed };
                script.push((at, if rng.bool() { Step::DiskFault(fault) } else { Step::Stop }));
                continue;
            }
            _ => {
                let latency = Duration::from_millis(rng.u64(500..5_000));
                script.extend([(at, Step::Disk(latency)), (until, Step::Disk(DISK_WELL))]);
                continue;
            }
        };
        *well_from = until;
        script.extend(steps);
    }
    script.sort_by_key(|(at, _)| *at);
    script
}

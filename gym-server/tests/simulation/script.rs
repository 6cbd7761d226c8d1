//! The events of a scenario: steps at times, and what keeps a changed script valid.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use gym_core::testing::{FileEnd, FileFault};

use crate::plan::{COLLECTOR, DISK_WELL, HEAD};

/// Kinds of faults that the settings share, of which some seed must have each.
const SLOW: &str = "slow host";
const CLOCK: &str = "clock set";
const MEMORY: &str = "memory pressure";
pub(crate) const SHARED: [&str; 3] = [SLOW, CLOCK, MEMORY];

/// One event of a script.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Crash(&'static str),
    /// Ends the collector's process. Its machine continues, and its written data remains.
    Kill,
    /// Ends the collector's process within the n-th step that changes a file: also while it prepares a run, which takes
    /// too little time for a crash at a random moment.
    EndInWrite(u64, FileEnd),
    Start(&'static str),
    /// Crashes a host and starts it at once.
    Restart(&'static str),
    /// Restarts the machine of a process, and with it all its processes. Its memory is lost, and what is in memory only.
    Reboot(&'static str),
    /// Stops the processes of a host, which keep their connections. Of a node, that of its agent.
    Freeze(&'static str),
    FreezeMachine(&'static str),
    Thaw(&'static str),
    /// Cuts the cable of a host.
    Isolate(&'static str),
    Reconnect(&'static str),
    /// Loses what a host sends.
    Mute(&'static str),
    Unmute(&'static str),
    /// Sets the additional delay of each message from or to a host.
    Slow(&'static str, Duration),
    /// The same, because its memory is full: it swaps.
    Swap(&'static str, Duration),
    /// Sets the clock of a host forward or back, in milliseconds.
    Clock(&'static str, i64),
    /// Starts a head server beside the one that runs, as behind an address that moved.
    SecondHead,
    /// Ends the older one.
    OneHead,
    /// Sets the maximum latency of appends.
    Disk(Duration),
    DiskFault(FileFault),
    Stop,
    /// Draws everything random from here on from another seed.
    Reseed(u64),
}

/// Steps in the order of their times.
pub(crate) type Script = Vec<(Duration, Step)>;

impl Step {
    /// Returns the host that a step strikes or heals.
    pub(crate) fn host(self) -> Option<&'static str> {
        match self {
            Self::Crash(host)
            | Self::Start(host)
            | Self::Restart(host)
            | Self::Reboot(host)
            | Self::Freeze(host)
            | Self::FreezeMachine(host)
            | Self::Thaw(host)
            | Self::Isolate(host)
            | Self::Reconnect(host)
            | Self::Mute(host)
            | Self::Unmute(host)
            | Self::Slow(host, _)
            | Self::Swap(host, _)
            | Self::Clock(host, _) => Some(host),
            Self::SecondHead | Self::OneHead => Some(HEAD),
            Self::Kill | Self::EndInWrite(..) | Self::Disk(_) | Self::DiskFault(_) | Self::Stop | Self::Reseed(_) => {
                None
            }
        }
    }

    /// Returns the fault of a step that all settings follow alike, and the host that it strikes.
    pub(crate) fn shared_fault(self) -> Option<(&'static str, &'static str)> {
        match self {
            Self::Slow(host, delay) if !delay.is_zero() => Some((host, SLOW)),
            Self::Swap(host, _) => Some((host, MEMORY)),
            Self::Clock(host, _) => Some((host, CLOCK)),
            _ => None,
        }
    }

    /// Returns `true` if the step only ends a fault.
    pub(crate) fn heals(self) -> bool {
        match self {
            Self::Start(_) | Self::Thaw(_) | Self::Reconnect(_) | Self::Unmute(_) | Self::OneHead => true,
            Self::Slow(_, delay) => delay.is_zero(),
            Self::Disk(latency) => latency <= DISK_WELL,
            _ => false,
        }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Crash(host) => write!(f, "crash {host}"),
            Self::Kill => f.write_str("kill the collector"),
            Self::EndInWrite(nth, end) => write!(f, "{end:?} within the {nth}. next step of a write"),
            Self::Start(host) => write!(f, "start {host}"),
            Self::Restart(host) => write!(f, "crash and start {host}"),
            Self::Reboot(host) => write!(f, "restart the machine of {host}"),
            Self::Freeze(host) => write!(f, "freeze the process of {host}"),
            Self::FreezeMachine(host) => write!(f, "freeze all processes of {host}"),
            Self::Thaw(host) => write!(f, "thaw {host}"),
            Self::Isolate(host) => write!(f, "cut the cable of {host}"),
            Self::Reconnect(host) => write!(f, "plug the cable of {host} in"),
            Self::Mute(host) => write!(f, "lose what {host} sends"),
            Self::Unmute(host) => write!(f, "lose nothing more that {host} sends"),
            Self::Slow(host, delay) if delay.is_zero() => write!(f, "{host} is as fast as before"),
            Self::Slow(host, delay) => write!(f, "{host} needs {delay:?} more for each message"),
            Self::Swap(host, delay) => {
                write!(f, "the memory of {host} is full; it needs {delay:?} more for each message")
            }
            Self::Clock(host, ms) => write!(f, "set the clock of {host} by {ms} ms"),
            Self::SecondHead => f.write_str("start a second head server beside the first"),
            Self::OneHead => f.write_str("end the older head server"),
            Self::Disk(latency) => write!(f, "appends take up to {latency:?}"),
            Self::DiskFault(FileFault::DiskFull) => f.write_str("the next append finds the disk full"),
            Self::DiskFault(FileFault::SyncFailed) => f.write_str("the next sync fails"),
            Self::DiskFault(FileFault::OpenFailed) => f.write_str("the next file cannot be opened"),
            Self::Stop => f.write_str("ask the collector to stop"),
            Self::Reseed(seed) => write!(f, "go on with seed {seed}"),
        }
    }
}

/// What a script has done to a host so far.
#[derive(Clone, Copy, Debug, Default)]
struct HostFaults {
    down: bool,
    frozen: bool,
    isolated: bool,
    mute: bool,
    slow: bool,
}

/// Leaves out steps that have no meaning where they are, such as the start of a host that runs, and ends what has not ended at
/// `heals_at`: so any part of a script is a script.
pub(crate) fn normalized(mut script: Script, hosts: &[&'static str], heals_at: Duration) -> Script {
    script.sort_by_key(|(at, _)| *at);
    script.retain(|(at, step)| *at <= heals_at && step.host().is_none_or(|host| hosts.contains(&host)));
    let mut states: BTreeMap<&'static str, HostFaults> = BTreeMap::new();
    let (mut two_heads, mut disk_slow) = (false, false);
    script.retain_mut(|(_, step)| {
        let mut unused = HostFaults::default();
        let host = if *step == Step::Kill { Some(COLLECTOR) } else { step.host() };
        let state = host.map_or(&mut unused, |host| states.entry(host).or_default());
        // Only what changes something is kept.
        match *step {
            Step::Crash(_) | Step::Kill => {
                two_heads &= host != Some(HEAD);
                let crashes = set_flag(&mut state.down, true);
                state.frozen = false;
                crashes
            }
            Step::Start(_) => set_flag(&mut state.down, false),
            Step::Restart(host) => {
                if set_flag(&mut state.down, false) {
                    *step = Step::Start(host);
                }
                state.frozen = false;
                true
            }
            Step::Reboot(_) => {
                (state.down, state.frozen) = (false, false);
                true
            }
            Step::Freeze(_) | Step::FreezeMachine(_) => !state.down && set_flag(&mut state.frozen, true),
            Step::Thaw(_) => set_flag(&mut state.frozen, false),
            Step::Isolate(_) => set_flag(&mut state.isolated, true),
            Step::Reconnect(_) => set_flag(&mut state.isolated, false),
            Step::Mute(_) => set_flag(&mut state.mute, true),
            Step::Unmute(_) => set_flag(&mut state.mute, false),
            Step::Slow(_, delay) => set_flag(&mut state.slow, !delay.is_zero()) || !delay.is_zero(),
            Step::Swap(..) => {
                state.slow = true;
                true
            }
            Step::SecondHead => !state.down && !state.frozen && set_flag(&mut two_heads, true),
            Step::OneHead => set_flag(&mut two_heads, false),
            Step::Disk(latency) => {
                let slow = latency > DISK_WELL;
                set_flag(&mut disk_slow, slow) || slow
            }
            Step::Clock(..) | Step::EndInWrite(..) | Step::DiskFault(_) | Step::Stop | Step::Reseed(_) => true,
        }
    });
    for (host, state) in states {
        let ends = [
            (state.frozen, Step::Thaw(host)),
            (state.isolated, Step::Reconnect(host)),
            (state.mute, Step::Unmute(host)),
            (state.slow, Step::Slow(host, Duration::ZERO)),
            (state.down, Step::Start(host)),
        ];
        script.extend(ends.into_iter().filter(|(lasts, _)| *lasts).map(|(_, end)| (heals_at, end)));
    }
    script.extend(two_heads.then_some((heals_at, Step::OneHead)));
    script.extend(disk_slow.then_some((heals_at, Step::Disk(DISK_WELL))));
    script
}

fn set_flag(flag: &mut bool, to: bool) -> bool {
    std::mem::replace(flag, to) != to
}

/// What a setting can have of the faults that were added to the first plans.
pub(crate) struct Additions<'a> {
    pub(crate) hosts: &'a [&'static str],
    pub(crate) heals_at: Duration,
    /// There is a disk.
    pub(crate) disk: bool,
    /// The head server can run twice.
    pub(crate) two_heads: bool,
}

impl Additions<'_> {
    /// Draws steps at random times.
    pub(crate) fn drawn(&self, rng: &mut fastrand::Rng) -> Script {
        let every_ms = rng.u64(1_000..8_000);
        // Each seed uses a random subset of the kinds of steps.
        let kinds: Vec<u8> = (0..6).filter(|_| rng.u8(..2) > 0).collect();
        let mut script = Script::new();
        let mut at = Duration::ZERO;
        loop {
            at += Duration::from_millis(rng.u64(1..=every_ms * 2));
            let until = (at + Duration::from_millis(rng.u64(10..8_000))).min(self.heals_at);
            if at >= self.heals_at || kinds.is_empty() {
                return script;
            }
            let host = self.hosts[rng.usize(..self.hosts.len())];
            match kinds[rng.usize(..kinds.len())] {
                0 => {
                    let delay = Duration::from_millis(rng.u64(20..3_000));
                    script.extend([(at, Step::Slow(host, delay)), (until, Step::Slow(host, Duration::ZERO))]);
                }
                1 => script.extend([(at, Step::Mute(host)), (until, Step::Unmute(host))]),
                2 => {
                    // Time servers step by less than a second, and people by hours.
                    let ms = [500, 3_000, 3_600_000][rng.usize(..3)];
                    script.push((at, Step::Clock(host, if rng.bool() { ms } else { -ms })));
                }
                // The machine swaps, until its kernel kills the process.
                5 => {
                    let delay = Duration::from_millis(rng.u64(20..3_000));
                    script.extend([
                        (at, Step::Swap(host, delay)),
                        (until, Step::Restart(host)),
                        (until, Step::Slow(host, Duration::ZERO)),
                    ]);
                }
                3 if self.disk => script.push((at, Step::DiskFault(FileFault::OpenFailed))),
                4 if self.two_heads => script.extend([(at, Step::SecondHead), (until, Step::OneHead)]),
                _ => {}
            }
        }
    }
}

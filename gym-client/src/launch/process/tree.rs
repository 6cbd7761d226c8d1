//! Finds and ends all processes that belong to a child.
//!
//! Linux has no handle for "this process and all its descendants" that an unprivileged process can always create
//! (cgroups need delegation). A process belongs to the tree if one of four criteria applies: the child's process group,
//! its session, the mark in the environment that every descendant inherits, or descent (parent process IDs) from any
//! such process. A grandchild that calls `setsid`, forks twice and closes its files still carries the mark. A process
//! is missed only if it *also* replaces its environment after its parent has ended. `PR_SET_CHILD_SUBREAPER` would find
//! that process too. But it is a setting of the whole process: the controller would inherit zombies that it cannot reap
//! without also reaping the user's own children.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::time::Duration;

use rustix::process::{Pid, PidfdFlags, Signal};
use tokio::time::Instant;

use crate::transport::process_cpu;

/// Environment variable with the launchers and children from which a process descends, separated by `:`.
pub(in crate::launch) const MARK_VARIABLE: &str = "GYM_LAUNCH_MARK";
/// Interval between checks of processes that cannot be waited for: short compared to any grace, long compared to one
/// check.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Limit for killed processes to disappear; only a process blocked in the kernel (a dead network mount) takes longer.
pub(in crate::launch) const KILL_WAIT: Duration = Duration::from_secs(5);

/// The child that leads a process group and session. The start time distinguishes it from a later process with the same
/// ID.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::launch) struct SessionLeader {
    pub(in crate::launch) pid: i32,
    pub(in crate::launch) start_ticks: u64,
}

/// The criteria by which members are found.
#[derive(Debug, Clone)]
pub(in crate::launch) struct ProcessTree {
    pub(in crate::launch) leaders: Vec<SessionLeader>,
    /// `launcher.child`, or `launcher.` for all children of a launcher.
    pub(in crate::launch) mark: String,
}

/// A living process of a tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::launch) struct TreeProcess {
    pid: i32,
    start_ticks: u64,
    group: i32,
}

/// What the living processes of a tree use together.
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::launch) struct TreeUsage {
    pub(in crate::launch) processes: usize,
    /// CPU time, with that of the processes for which they have waited, in clock ticks.
    pub(in crate::launch) cpu_ticks: u64,
    /// Resident memory, in pages. Shared pages count for each process.
    pub(in crate::launch) resident_pages: u64,
}

/// The line that `/proc/PID/stat` reports for a process.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ProcessStat {
    state: u8,
    pub(crate) parent: i32,
    group: i32,
    pub(crate) session: i32,
    /// CPU time used, user and system, in clock ticks.
    pub(crate) cpu_ticks: u64,
    /// CPU time of the processes for which it has waited, in clock ticks.
    pub(in crate::launch) waited_ticks: u64,
    /// Start time, in clock ticks since boot.
    pub(crate) start_ticks: u64,
    /// Resident memory, in pages.
    pub(crate) resident_pages: u64,
}

impl ProcessStat {
    /// Reads the line of a process, which may be a zombie.
    pub(in crate::launch) fn read(pid: i32) -> Option<Self> {
        Self::parse(&fs::read(format!("/proc/{pid}/stat")).ok()?)
    }

    /// Parses the fields after the last `)`: the name before it may contain any characters, including blanks and
    /// parentheses.
    pub(crate) fn parse(text: &[u8]) -> Option<Self> {
        let close = memchr::memrchr(b')', text)?;
        let rest = std::str::from_utf8(text.get(close + 1..)?).ok()?;
        let mut fields = rest.split_ascii_whitespace();
        let state = *fields.next()?.as_bytes().first()?;
        let parent = fields.next()?.parse().ok()?;
        let group = fields.next()?.parse().ok()?;
        let session = fields.next()?.parse().ok()?;
        // Fields 14 to 17, 22 and 24 of the line (proc_pid_stat(5)), counted from 1; six were consumed above.
        let user: u64 = fields.nth(7)?.parse().ok()?;
        let system: u64 = fields.next()?.parse().ok()?;
        let (waited_user, waited_system): (u64, u64) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
        let start_ticks = fields.nth(4)?.parse().ok()?;
        let resident_pages = fields.nth(1)?.parse().ok()?;
        Some(Self {
            state,
            parent,
            group,
            session,
            cpu_ticks: user.saturating_add(system),
            waited_ticks: waited_user.saturating_add(waited_system),
            start_ticks,
            resident_pages,
        })
    }

    /// Returns all living processes by ID. Reads `/proc`, so call it outside of the runtime's threads.
    pub(crate) fn all() -> io::Result<BTreeMap<i32, Self>> {
        let mut all = BTreeMap::new();
        for entry in fs::read_dir("/proc")? {
            let Some(pid) = entry?.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else { continue };
            if let Some(stat) = Self::read(pid).filter(|stat| stat.alive()) {
                all.insert(pid, stat);
            }
        }
        Ok(all)
    }

    /// Returns `false` for a zombie, which has ended and waits for its parent.
    fn alive(self) -> bool {
        !matches!(self.state, b'Z' | b'X' | b'x')
    }
}

/// Adds the processes that descend from members. Bounded by the number of processes.
pub(crate) fn add_descendants(all: &BTreeMap<i32, ProcessStat>, members: &mut BTreeSet<i32>) {
    loop {
        let descends = |(pid, stat): &(&i32, &ProcessStat)| !members.contains(pid) && members.contains(&stat.parent);
        let more: Vec<i32> = all.iter().filter(descends).map(|(pid, _)| *pid).collect();
        if more.is_empty() {
            return;
        }
        members.extend(more);
    }
}

/// What this process and all its descendants use together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FamilyUsage {
    /// CPU time, user and system, with that of the descendants that have ended. Descendants have a resolution of 10 ms.
    pub cpu: Duration,
    /// Resident memory in bytes. Shared pages count for each process.
    pub resident_bytes: u64,
}

/// Returns what this process and all its descendants use together. Reads `/proc`, so call it outside of the runtime's threads.
///
/// # Errors
/// `/proc` cannot be read.
pub fn family_usage() -> io::Result<FamilyUsage> {
    let own = i32::try_from(std::process::id()).unwrap_or(0);
    let all = ProcessStat::all()?;
    let mut family = BTreeSet::from([own]);
    add_descendants(&all, &mut family);
    let members = || family.iter().filter_map(|pid| Some((*pid, all.get(pid)?)));
    // Of this process, the kernel has a finer clock.
    let ticks: u64 = members().map(|(pid, stat)| stat.waited_ticks + if pid == own { 0 } else { stat.cpu_ticks }).sum();
    let pages: u64 = members().map(|(_, stat)| stat.resident_pages).sum();
    let (per_second, page) = (rustix::param::clock_ticks_per_second().max(1), rustix::param::page_size() as u64);
    let cpu = process_cpu() + Duration::from_millis(ticks.saturating_mul(1_000) / per_second);
    Ok(FamilyUsage { cpu, resident_bytes: pages.saturating_mul(page) })
}

/// Returns the start time of process `pid`, in clock ticks since boot.
pub(in crate::launch) fn start_ticks(pid: i32) -> Option<u64> {
    ProcessStat::read(pid).map(|stat| stat.start_ticks)
}

impl ProcessTree {
    /// Returns all living members, ordered by process ID. Reads `/proc`, so call it outside of the runtime's threads.
    fn look(&self) -> io::Result<Vec<TreeProcess>> {
        let own = i32::try_from(std::process::id()).unwrap_or(0);
        let mut all = ProcessStat::all()?;
        all.remove(&own);
        // If the ID belongs to a process that started later, the whole old group has ended; otherwise the ID would not
        // be free.
        let leaders: Vec<i32> = self
            .leaders
            .iter()
            .filter(|leader| all.get(&leader.pid).is_none_or(|stat| stat.start_ticks == leader.start_ticks))
            .map(|leader| leader.pid)
            .collect();
        let belongs = |pid: i32, stat: &ProcessStat| {
            leaders.contains(&pid)
                || leaders.contains(&stat.group)
                || leaders.contains(&stat.session)
                || self.marks(pid)
        };
        let mut found: BTreeSet<i32> =
            all.iter().filter(|(pid, stat)| belongs(**pid, stat)).map(|(pid, _)| *pid).collect();
        add_descendants(&all, &mut found);
        let process = |pid: i32| {
            let stat = all.get(&pid)?;
            Some(TreeProcess { pid, start_ticks: stat.start_ticks, group: stat.group })
        };
        Ok(found.into_iter().filter_map(process).collect())
    }

    /// Returns what all living members use together. Reads `/proc`, so call it outside of the runtime's threads.
    pub(in crate::launch) fn usage(&self) -> io::Result<TreeUsage> {
        let members = self.look()?;
        let stats = members.iter().filter_map(|member| ProcessStat::read(member.pid));
        Ok(stats.fold(TreeUsage::default(), |sum, stat| TreeUsage {
            processes: sum.processes + 1,
            cpu_ticks: sum.cpu_ticks + stat.cpu_ticks + stat.waited_ticks,
            resident_pages: sum.resident_pages + stat.resident_pages,
        }))
    }

    /// Returns `true` if the environment of `pid` contains the mark. An unreadable environment belongs to another user.
    fn marks(&self, pid: i32) -> bool {
        let Ok(environment) = fs::read(format!("/proc/{pid}/environ")) else { return false };
        carries_mark(&environment, &self.mark)
    }

    async fn members(&self) -> Vec<TreeProcess> {
        let tree = self.clone();
        // Without `/proc`, processes cannot be identified safely; the parent-death signal still applies.
        tokio::task::spawn_blocking(move || tree.look().unwrap_or_default()).await.unwrap_or_default()
    }

    fn signal(&self, members: &[TreeProcess], signal: Signal) {
        for leader in &self.leaders {
            // One call for the whole group, so that no member can fork between two calls. An ID without members may
            // belong to another group by now.
            if members.iter().any(|member| member.group == leader.pid)
                && let Some(group) = Pid::from_raw(leader.pid)
            {
                let _ = rustix::process::kill_process_group(group, signal);
            }
        }
        for member in members {
            // Each process gets the signal once: many servers treat a second SIGINT as "exit at once".
            if !self.leaders.iter().any(|leader| leader.pid == member.group) {
                member.signal(signal);
            }
        }
    }

    /// Ends the tree: sends each signal of `steps` at its time from now, then repeats `SIGKILL` until no process is
    /// left or [`KILL_WAIT`] has passed. Returns the remaining processes.
    ///
    /// Does not reap: the caller waits for its own child.
    pub(in crate::launch) async fn end(&self, steps: &[(Duration, Signal)]) -> Vec<TreeProcess> {
        let begin = Instant::now();
        let last = steps.last().map_or(Duration::ZERO, |(after, _)| *after);
        let mut taken = 0;
        let mut members = self.members().await;
        let mut look = tokio::time::interval(LOOK_EVERY);
        look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            if members.is_empty() {
                return members;
            }
            let elapsed = begin.elapsed();
            let due = steps.iter().take_while(|(after, _)| *after <= elapsed).count();
            if due > taken {
                taken = due;
                self.signal(&members, steps[due - 1].1);
            }
            if elapsed >= last + KILL_WAIT {
                return members;
            }
            look.tick().await;
            // A full check reads one file per process of the machine, so it runs only when the known members have ended
            // or are being killed.
            if taken == steps.len() {
                members = self.members().await;
                self.signal(&members, Signal::KILL);
            } else {
                members.retain(|member| member.alive());
                if members.is_empty() {
                    members = self.members().await;
                    if let Some((_, signal)) = taken.checked_sub(1).and_then(|at| steps.get(at)) {
                        self.signal(&members, *signal);
                    }
                }
            }
        }
    }
}

impl TreeProcess {
    pub(in crate::launch) fn pid(&self) -> i32 {
        self.pid
    }

    fn alive(self) -> bool {
        ProcessStat::read(self.pid).is_some_and(|stat| stat.alive() && stat.start_ticks == self.start_ticks)
    }

    /// Signals exactly this process: opens a handle, then checks the identity, so a process that reused the ID is never
    /// signalled.
    fn signal(&self, signal: Signal) {
        let Some(pid) = Pid::from_raw(self.pid) else { return };
        match rustix::process::pidfd_open(pid, PidfdFlags::empty()) {
            Ok(handle) => {
                if self.alive() {
                    let _ = rustix::process::pidfd_send_signal(handle, signal);
                }
            }
            // Kernels before 5.3, or a sandbox that filters the call.
            Err(rustix::io::Errno::NOSYS | rustix::io::Errno::PERM) => {
                if self.alive() {
                    let _ = rustix::process::kill_process(pid, signal);
                }
            }
            Err(_) => {}
        }
    }
}

fn carries_mark(environment: &[u8], mark: &str) -> bool {
    environment
        .split(|byte| *byte == 0)
        .filter_map(|entry| entry.strip_prefix(MARK_VARIABLE.as_bytes())?.strip_prefix(b"="))
        .flat_map(|value| value.split(|byte| *byte == b':'))
        .any(|one| if mark.ends_with('.') { one.starts_with(mark.as_bytes()) } else { one == mark.as_bytes() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_blanks_and_parentheses_does_not_shift_the_fields() {
        let line = b"77 (a) b (c)) S 12 34 56 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 987654 1 55 3";
        let stat = ProcessStat::parse(line).expect("parses");
        assert_eq!((stat.state, stat.parent, stat.group, stat.session), (b'S', 12, 34, 56));
        assert_eq!((stat.start_ticks, stat.cpu_ticks, stat.waited_ticks, stat.resident_pages), (987_654, 11, 15, 55));
    }

    #[test]
    fn a_short_or_empty_line_is_no_process() {
        for line in [&b""[..], b"77", b"77 (a)", b"77 (a) S 1 2", b"77 (a) S x y z"] {
            assert!(ProcessStat::parse(line).is_none(), "{line:?}");
        }
    }

    #[test]
    fn a_family_uses_at_least_what_its_first_process_uses() {
        let before = family_usage().expect("/proc is there");
        let mut shell = std::process::Command::new("sh");
        let counted = shell.args(["-c", "i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done"]).status();
        assert!(counted.expect("a shell").success());
        let after = family_usage().expect("/proc is there");
        assert!(
            after.cpu >= before.cpu + Duration::from_millis(50),
            "the child's time counts after its end: {after:?}"
        );
        assert!(after.resident_bytes > 1 << 20);
    }

    #[test]
    fn own_process_has_a_start_time() {
        let own = i32::try_from(std::process::id()).expect("fits");
        assert!(start_ticks(own).is_some_and(|ticks| ticks > 0));
    }

    #[test]
    fn marks_match_whole_or_by_launcher_and_never_by_accident() {
        let environment = b"A=1\0GYM_LAUNCH_MARK=9-8-0.1:10-5-0.12\0B=2\0";
        assert!(carries_mark(environment, "10-5-0.12"));
        assert!(carries_mark(environment, "9-8-0.1"));
        assert!(carries_mark(environment, "10-5-0."));
        assert!(!carries_mark(environment, "10-5-0.1"), "a longer child number");
        assert!(!carries_mark(environment, "0-5-0."), "the end of another launcher's name");
        assert!(!carries_mark(b"X=GYM_LAUNCH_MARK=9-8-0.1\0", "9-8-0.1"), "in another variable's value");
    }
}

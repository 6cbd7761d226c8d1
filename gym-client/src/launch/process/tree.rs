//! Finds and ends all processes that belong to a child.
//!
//! Linux has no handle for "this process and all its descendants" that an unprivileged process can always create
//! (cgroups need delegation). A process belongs to the tree if one of four criteria applies: the child's process group,
//! its session, the mark in the environment that every descendant inherits, or descent (parent process IDs) from any
//! such process. A grandchild that calls `setsid`, forks twice and closes its files still carries the mark. A process
//! is missed only if it *also* replaces its environment after its parent has ended. `PR_SET_CHILD_SUBREAPER` would find
//! that process too. But it is a setting of the whole process: the controller would inherit zombies that it cannot reap
//! without also reaping the user's own children.

use std::collections::BTreeSet;
use std::io;
use std::time::Duration;

use rustix::process::{Pid, PidfdFlags, Signal};
use tokio::time::Instant;

use gym_core::base::process::{MemoryUsage, ProcessStat, ProcessTable, add_descendants};

/// Interval between checks of processes that cannot be waited for: short compared to any grace, long compared to one
/// check.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Limit for killed processes to disappear; only a process blocked in the kernel (a dead network mount) takes longer.
pub(in crate::launch) const KILL_TIMEOUT: Duration = Duration::from_secs(5);

/// The child that leads a process group and session. The start time distinguishes it from a later process with the same
/// ID.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SessionLeader {
    /// The process ID.
    pub pid: i32,
    /// The start time, in clock ticks since boot.
    pub start_ticks: u64,
}

/// The processes of a child and their descendants, by the criteria that find them.
#[derive(Debug, Clone)]
pub struct ProcessTree {
    /// The children.
    pub leaders: Vec<SessionLeader>,
    /// `launcher.child`, or `launcher.` for all children of a launcher.
    pub mark: String,
}

/// A living process of a tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::launch) struct TreeProcess {
    pid: i32,
    start_ticks: u64,
    group: i32,
}

/// The resources that the living processes of a tree use together.
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::launch) struct TreeUsage {
    pub(in crate::launch) processes: usize,
    /// CPU time, with that of the processes for which they have waited, in clock ticks.
    pub(in crate::launch) cpu_ticks: u64,
    pub(in crate::launch) memory: MemoryUsage,
}

impl ProcessTree {
    /// Returns the living members. This is the only answer to the question which processes belong to a child: what is measured is what is ended.
    #[must_use]
    pub fn members(&self, table: &ProcessTable) -> BTreeSet<i32> {
        let all = &table.processes;
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
                || table.carries(pid, &self.mark)
        };
        let mut found: BTreeSet<i32> =
            all.iter().filter(|(pid, stat)| belongs(**pid, stat)).map(|(pid, _)| *pid).collect();
        add_descendants(all, &mut found);
        found
    }

    /// Returns what all living members use together. Reads `/proc`, so call it outside of the runtime's threads. The memory is precise if more
    /// than `precise_above` bytes are resident.
    pub(in crate::launch) fn usage(&self, precise_above: u64) -> io::Result<TreeUsage> {
        let table = ProcessTable::read()?;
        let members = self.members(&table);
        let ticks = |pid: &i32| table.processes.get(pid).map(|stat| stat.cpu_ticks.saturating_add(stat.waited_ticks));
        Ok(TreeUsage {
            processes: members.len(),
            cpu_ticks: members.iter().filter_map(ticks).sum(),
            memory: table.memory(&members, precise_above),
        })
    }

    /// Returns all living members, ordered by process ID.
    async fn look(&self) -> Vec<TreeProcess> {
        let tree = self.clone();
        let look = move || {
            // Without `/proc`, processes cannot be identified safely; the parent-death signal still applies.
            let Ok(table) = ProcessTable::read() else { return Vec::new() };
            let process = |pid: i32| {
                let stat = table.processes.get(&pid)?;
                Some(TreeProcess { pid, start_ticks: stat.start_ticks, group: stat.group })
            };
            tree.members(&table).into_iter().filter_map(process).collect()
        };
        tokio::task::spawn_blocking(look).await.unwrap_or_default()
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
    /// left or [`KILL_TIMEOUT`] has passed. Returns the remaining processes.
    ///
    /// Does not reap: the caller waits for its own child.
    pub(in crate::launch) async fn end(&self, steps: &[(Duration, Signal)]) -> Vec<TreeProcess> {
        let begin = Instant::now();
        let last = steps.last().map_or(Duration::ZERO, |(after, _)| *after);
        let mut taken = 0;
        let mut members = self.look().await;
        let mut look = tokio::time::interval(POLL_INTERVAL);
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
            if elapsed >= last + KILL_TIMEOUT {
                return members;
            }
            look.tick().await;
            // A full check reads one file per process of the machine, so it runs only when the known members have ended
            // or are being killed.
            if taken == steps.len() {
                members = self.look().await;
                self.signal(&members, Signal::KILL);
            } else {
                members.retain(|member| member.alive());
                if members.is_empty() {
                    members = self.look().await;
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

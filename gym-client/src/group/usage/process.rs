//! CPU and memory usage of a worker process and its descendants.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::group::usage::gpu::GpuSampler;
use crate::launch::process::tree::{ProcessStat, add_descendants};

/// Usage of a worker with its child processes, as last sampled.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProcessUsage {
    /// CPU time since the previous sample, in percent of one core: 250 is two and a half cores. `None` in the first sample.
    pub cpu_percent: Option<f64>,
    /// Resident memory in bytes. Shared pages count once for each process.
    pub resident_bytes: u64,
    /// The highest resident memory in bytes, including the kernel's record for the worker's main process.
    pub peak_resident_bytes: u64,
    /// Number of processes.
    pub processes: u32,
    /// GPU memory of the processes in bytes, up to some seconds old. `None` if there is no GPU or no `nvidia-smi`. Also `None` if
    /// the driver lists none of the processes: they use no GPU, or have other process IDs outside of their container.
    pub gpu_memory_bytes: Option<u64>,
}

/// Measures one worker across samples.
#[derive(Debug)]
pub(crate) struct UsageMeter {
    leader: i32,
    last: Option<(Instant, u64)>,
    peak_bytes: u64,
}

impl UsageMeter {
    /// Creates a meter of the session of process `leader`; every child of the launcher leads a session.
    pub(crate) fn new(leader: i32) -> Self {
        Self { leader, last: None, peak_bytes: 0 }
    }

    /// Takes one sample. Returns `None` if the worker has exited.
    pub(crate) fn sample(
        &mut self,
        processes: &BTreeMap<i32, ProcessStat>,
        gpu: Option<&GpuSampler>,
        now: Instant,
        units: KernelUnits,
    ) -> Option<ProcessUsage> {
        let members = members(processes, self.leader);
        if members.is_empty() {
            return None;
        }
        let resident_bytes =
            members.values().map(|stat| stat.resident_pages).sum::<u64>().saturating_mul(units.page_bytes);
        let record = high_water_bytes(self.leader).unwrap_or(0);
        self.peak_bytes = self.peak_bytes.max(resident_bytes).max(record);
        let ticks = members.values().map(|stat| stat.cpu_ticks).sum::<u64>();
        let cpu_percent = self.last.and_then(|(then, before)| {
            let seconds = now.duration_since(then).as_secs_f64();
            // The CPU time of a child that ended is no longer in the sum.
            let used = ticks.saturating_sub(before);
            #[expect(clippy::cast_precision_loss, reason = "a percentage")]
            (seconds > 0.0).then(|| 100.0 * used as f64 / units.ticks_per_second as f64 / seconds)
        });
        self.last = Some((now, ticks));
        Some(ProcessUsage {
            cpu_percent,
            resident_bytes,
            peak_resident_bytes: self.peak_bytes,
            processes: u32::try_from(members.len()).unwrap_or(u32::MAX),
            gpu_memory_bytes: gpu.and_then(|gpu| gpu.held_bytes(members.keys().copied())),
        })
    }
}

/// The kernel's units of time and memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KernelUnits {
    pub(crate) page_bytes: u64,
    pub(crate) ticks_per_second: u64,
}

impl KernelUnits {
    pub(crate) fn of_this_machine() -> Self {
        Self {
            page_bytes: rustix::param::page_size() as u64,
            ticks_per_second: rustix::param::clock_ticks_per_second(),
        }
    }
}

/// Returns the processes of the leader's session, and their descendants outside of it.
fn members(processes: &BTreeMap<i32, ProcessStat>, leader: i32) -> BTreeMap<i32, &ProcessStat> {
    let mut found: BTreeSet<i32> =
        processes.iter().filter(|(_, stat)| stat.session == leader).map(|(pid, _)| *pid).collect();
    add_descendants(processes, &mut found);
    found.into_iter().filter_map(|pid| Some((pid, processes.get(&pid)?))).collect()
}

/// Returns the kernel's record of a process's resident memory (`VmHWM`), in bytes.
fn high_water_bytes(pid: i32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    const UNITS: KernelUnits = KernelUnits { page_bytes: 4096, ticks_per_second: 100 };
    /// No process has this number, so the kernel's record adds nothing.
    const LEADER: i32 = i32::MAX;

    fn process(parent: i32, session: i32, ticks: u64, pages: u64) -> ProcessStat {
        let line = format!("1 (w) S {parent} 1 {session} 0 0 0 0 0 0 0 {ticks} 0 0 0 0 0 0 0 7 0 {pages}");
        ProcessStat::parse(line.as_bytes()).expect("parses")
    }

    #[test]
    fn a_worker_counts_with_its_session_and_its_descendants() {
        let all = BTreeMap::from([
            (LEADER, process(1, LEADER, 10, 100)),
            (20, process(LEADER, LEADER, 5, 10)),
            (30, process(20, 30, 5, 1)),
            (40, process(1, 40, 1_000, 1_000)),
        ]);
        let usage = UsageMeter::new(LEADER).sample(&all, None, Instant::now(), UNITS).expect("alive");
        assert_eq!((usage.resident_bytes, usage.processes, usage.cpu_percent), (111 * 4096, 3, None));
    }

    #[test]
    fn processor_time_is_the_share_since_the_last_sample_and_the_peak_stays() {
        let mut meter = UsageMeter::new(LEADER);
        let begin = Instant::now();
        let mut at = |seconds: u64, ticks, pages| {
            let all = BTreeMap::from([(LEADER, process(1, LEADER, ticks, pages))]);
            meter.sample(&all, None, begin + Duration::from_secs(seconds), UNITS).expect("alive")
        };
        assert_eq!(at(0, 100, 50).cpu_percent, None);
        let busy = at(2, 400, 20);
        assert_eq!(busy.cpu_percent, Some(150.0));
        assert_eq!((busy.resident_bytes, busy.peak_resident_bytes), (20 * 4096, 50 * 4096));
        assert_eq!(at(4, 300, 20).cpu_percent, Some(0.0), "a child that ended does not make it negative");
    }

    #[test]
    fn a_worker_that_is_gone_uses_nothing_that_can_be_told() {
        assert_eq!(UsageMeter::new(LEADER).sample(&BTreeMap::new(), None, Instant::now(), UNITS), None);
    }

    #[test]
    fn this_process_has_a_record() {
        let own = i32::try_from(std::process::id()).expect("fits");
        assert!(high_water_bytes(own).is_some_and(|bytes| bytes > 1 << 20));
    }
}

//! CPU and memory usage of a worker's processes: those that end with it.

use std::collections::BTreeSet;

use gym_client::launch::ProcessTree;
use gym_core::base::process::{MemoryUsage, ProcessTable, peak_resident_bytes};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::usage::gpu::GpuSampler;

/// Usage of a worker with all processes that it started, as last sampled. These are the processes that end with the worker, including those that left its
/// session and whose parents have ended (daemons).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ProcessUsage {
    /// CPU time since the previous sample, in percent of one core: 250 is two and a half cores. `None` in the first sample.
    pub cpu_percent: Option<f64>,
    /// Resident memory in bytes. Shared pages count once for each process.
    pub resident_bytes: u64,
    /// The memory that a limit counts, in bytes: proportional set sizes, in which a page that N processes share counts as an N-th of a page for each, and
    /// files in `/dev/shm` (or of `memfd_create`) that a process has open and none has mapped. Read only while it may exceed nine tenths of the limit,
    /// because the kernel visits every page for it; otherwise `None`.
    #[serde(default)]
    pub counted_bytes: Option<u64>,
    /// The highest resident memory in bytes, including the kernel's record for the worker's main process.
    pub peak_resident_bytes: u64,
    /// Number of processes.
    pub processes: u32,
    /// GPU memory of the processes in bytes, up to some seconds old. `None` if there is no GPU or no `nvidia-smi`. Also `None` if
    /// the driver lists none of the processes: they use no GPU, or have other process IDs outside of their container.
    pub gpu_memory_bytes: Option<u64>,
}

/// One reading of the processes of one worker.
#[derive(Debug)]
pub(crate) struct ProcessSample {
    members: BTreeSet<i32>,
    cpu_ticks: u64,
    memory: MemoryUsage,
    /// The kernel's record of the resident memory of the main process.
    record_bytes: u64,
}

impl ProcessSample {
    /// Returns `None` if the worker has no process. The memory is precise if it may be more than `precise_above` bytes. Reads `/proc`, so
    /// call it outside of the runtime's threads.
    pub(crate) fn take(table: &ProcessTable, tree: &ProcessTree, precise_above: u64) -> Option<Self> {
        let members = tree.members(table);
        let record_bytes = tree.leaders.iter().filter_map(|leader| peak_resident_bytes(leader.pid)).max().unwrap_or(0);
        let (cpu_ticks, memory) = (table.cpu_ticks(&members), table.memory(&members, precise_above));
        (!members.is_empty()).then_some(Self { members, cpu_ticks, memory, record_bytes })
    }
}

/// Measures one worker across samples.
#[derive(Debug, Default)]
pub(crate) struct UsageMeter {
    last: Option<(Instant, u64)>,
    peak_bytes: u64,
}

impl UsageMeter {
    pub(crate) fn add(&mut self, sample: &ProcessSample, gpu: Option<&GpuSampler>, now: Instant) -> ProcessUsage {
        let MemoryUsage { resident_bytes, counted_bytes } = sample.memory;
        self.peak_bytes = self.peak_bytes.max(resident_bytes).max(sample.record_bytes);
        let cpu_percent = self.last.and_then(|(then, before)| {
            let seconds = now.duration_since(then).as_secs_f64();
            // The CPU time of a child that ended is no longer in the sum.
            let used = sample.cpu_ticks.saturating_sub(before);
            #[expect(clippy::cast_precision_loss, reason = "a percentage")]
            (seconds > 0.0).then(|| 100.0 * used as f64 / rustix::param::clock_ticks_per_second() as f64 / seconds)
        });
        self.last = Some((now, sample.cpu_ticks));
        ProcessUsage {
            cpu_percent,
            resident_bytes,
            counted_bytes,
            peak_resident_bytes: self.peak_bytes,
            processes: u32::try_from(sample.members.len()).unwrap_or(u32::MAX),
            gpu_memory_bytes: gpu.and_then(|gpu| gpu.held_bytes(sample.members.iter().copied())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gym_client::launch::SessionLeader;
    use std::fs;
    use std::path::Path;
    use std::time::Duration;

    /// No process of this machine has this number, so the kernel's record adds nothing.
    const LEADER: i32 = i32::MAX;

    fn page() -> u64 {
        rustix::param::page_size() as u64
    }

    /// Adds a process to a folder like `/proc`.
    fn process(proc: &Path, pid: i32, parent: i32, session: i32, ticks: u64, pages: u64) {
        let folder = proc.join(pid.to_string());
        fs::create_dir_all(&folder).expect("a folder");
        let stat = format!("1 (w) S {parent} {session} {session} 0 0 0 0 0 0 0 {ticks} 0 0 0 0 0 0 0 7 0 {pages}");
        fs::write(folder.join("stat"), stat).expect("writes");
    }

    fn write(proc: &Path, pid: i32, file: &str, text: &str) {
        fs::write(proc.join(format!("{pid}/{file}")), text).expect("writes");
    }

    fn sample(proc: &Path, precise_above: u64) -> Option<ProcessSample> {
        let tree =
            ProcessTree { leaders: vec![SessionLeader { pid: LEADER, start_ticks: 7 }], mark: "1-2-0.3".to_owned() };
        ProcessSample::take(&ProcessTable::read_below(proc).expect("a folder"), &tree, precise_above)
    }

    #[test]
    fn a_worker_counts_with_all_processes_that_end_with_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let proc = folder.path();
        process(proc, LEADER, 1, LEADER, 10, 100);
        process(proc, 20, LEADER, LEADER, 5, 10);
        process(proc, 30, 20, 30, 5, 1);
        // A daemon, the child of a daemon without the mark, one of another worker, and one of somebody else.
        process(proc, 40, 1, 40, 5, 1_000);
        write(proc, 40, "environ", "A=1\0GYM_LAUNCH_MARK=9-9-0.1:1-2-0.3\0");
        process(proc, 50, 40, 50, 5, 10_000);
        process(proc, 60, 1, 60, 5, 100_000);
        write(proc, 60, "environ", "GYM_LAUNCH_MARK=1-2-0.30\0");
        process(proc, 70, 1, 70, 5, 1_000_000);
        let usage = UsageMeter::default().add(&sample(proc, u64::MAX).expect("alive"), None, Instant::now());
        assert_eq!((usage.resident_bytes, usage.processes, usage.cpu_percent), (11_111 * page(), 5, None));
    }

    #[test]
    fn pages_that_processes_share_count_once_against_a_limit() {
        let folder = tempfile::tempdir().expect("a folder");
        let proc = folder.path();
        let pss = |kilobytes: u32| {
            format!("0-f ---p 00000000 00:00 0 [rollup]\nRss: 9 kB\nPss:   {kilobytes} kB\nPss_Anon: 7 kB\n")
        };
        for (pid, parent) in [(LEADER, 1), (20, LEADER), (30, LEADER), (40, LEADER)] {
            process(proc, pid, parent, LEADER, 0, 100);
        }
        write(proc, LEADER, "smaps_rollup", &pss(60));
        write(proc, 20, "smaps_rollup", &pss(20));
        // Unreadable, or without the line: the resident size counts.
        write(proc, 40, "smaps_rollup", "Rss: 9 kB\n");
        let at = |precise_above| {
            UsageMeter::default().add(&sample(proc, precise_above).expect("alive"), None, Instant::now())
        };
        let (exact, cheap) = (at(400 * page() - 1), at(400 * page()));
        assert_eq!((exact.resident_bytes, exact.counted_bytes), (400 * page(), Some((80 << 10) + 200 * page())));
        assert_eq!(cheap.counted_bytes, None, "not read below the threshold");
        // Processes that ended, or began anew, after the table was read.
        let table = ProcessTable::read_below(proc).expect("a folder");
        fs::remove_dir_all(proc.join("30")).expect("removes");
        let stat = "1 (w) S 1 1 1 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 8 0 100";
        write(proc, 40, "stat", stat);
        let tree = ProcessTree { leaders: vec![SessionLeader { pid: LEADER, start_ticks: 7 }], mark: String::new() };
        let late = ProcessSample::take(&table, &tree, 0).expect("alive");
        assert_eq!(late.memory.counted_bytes, Some(80 << 10), "they use nothing");
    }

    #[test]
    fn processor_time_is_the_share_since_the_last_sample_and_the_peak_stays() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut meter = UsageMeter::default();
        let begin = Instant::now();
        let mut at = |seconds: u64, ticks, pages| {
            process(folder.path(), LEADER, 1, LEADER, ticks * rustix::param::clock_ticks_per_second() / 100, pages);
            meter.add(&sample(folder.path(), u64::MAX).expect("alive"), None, begin + Duration::from_secs(seconds))
        };
        assert_eq!(at(0, 100, 50).cpu_percent, None);
        let busy = at(2, 400, 20);
        assert_eq!(busy.cpu_percent, Some(150.0));
        assert_eq!((busy.resident_bytes, busy.peak_resident_bytes), (20 * page(), 50 * page()));
        assert_eq!(at(4, 300, 20).cpu_percent, Some(0.0), "a child that ended does not make it negative");
    }

    #[test]
    fn a_worker_that_is_gone_uses_nothing_that_can_be_told() {
        assert!(sample(tempfile::tempdir().expect("a folder").path(), 0).is_none());
    }

    #[test]
    fn this_process_has_a_record() {
        let own = i32::try_from(std::process::id()).expect("fits");
        assert!(peak_resident_bytes(own).is_some_and(|bytes| bytes > 1 << 20));
    }
}

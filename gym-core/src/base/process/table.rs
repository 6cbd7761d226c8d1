//! All processes of this machine: which of them belong together, and the memory and CPU time that they use together.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::base::process::stat::ProcessStat;
use crate::base::process::{PROC, kilobytes, process_cpu, ticks};

/// Environment variable with the launchers and children from which a process descends, separated by `:`.
pub const MARK_VARIABLE: &str = "GYM_LAUNCH_MARK";

/// The living processes of a machine at one moment, without this process, which belongs to no child of its own.
#[derive(Debug)]
pub struct ProcessTable {
    proc: PathBuf,
    /// The processes by ID.
    pub processes: BTreeMap<i32, ProcessStat>,
    /// The value of [`MARK_VARIABLE`] of the processes that have one.
    marks: BTreeMap<i32, Vec<u8>>,
    /// All shared memory of the machine, including files in `/dev/shm`.
    shared_bytes: u64,
}

/// Memory that processes use together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUsage {
    /// Resident memory. Pages that processes share count for each process.
    pub resident_bytes: u64,
    /// The memory that a limit counts: proportional set sizes, in which a page that N processes of the machine share counts as an N-th of a page for each, and files of
    /// shared memory that are open and not mapped. `None` if it is far below the limit and was not read.
    pub counted_bytes: Option<u64>,
}

impl ProcessTable {
    /// Reads the processes of this machine from `/proc`, so call it outside of the runtime's threads.
    ///
    /// # Errors
    /// `/proc` cannot be read.
    pub fn read() -> io::Result<Self> {
        let mut table = Self::read_below(Path::new(PROC))?;
        table.processes.remove(&i32::try_from(std::process::id()).unwrap_or(0));
        Ok(table)
    }

    /// Reads the processes of a machine whose `/proc` is this folder.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn read_below(proc: &Path) -> io::Result<Self> {
        let processes = ProcessStat::all(proc)?;
        // An unreadable environment belongs to another user.
        let marks = |pid: &i32| {
            let marks = marks_in(&fs::read(proc.join(format!("{pid}/environ"))).ok()?);
            (!marks.is_empty()).then_some((*pid, marks))
        };
        let marks = processes.keys().filter_map(marks).collect();
        let shared = fs::read_to_string(proc.join("meminfo")).ok().and_then(|text| kilobytes(&text, "Shmem:"));
        Ok(Self { proc: proc.to_owned(), processes, marks, shared_bytes: shared.unwrap_or(0) })
    }

    /// Returns `true` if the process has inherited this mark.
    #[must_use]
    pub fn carries(&self, pid: i32, mark: &str) -> bool {
        self.marks.get(&pid).is_some_and(|marks| carries_mark(marks, mark))
    }

    /// Returns the CPU time of these processes, in clock ticks.
    #[must_use]
    pub fn cpu_ticks(&self, members: &BTreeSet<i32>) -> u64 {
        members.iter().filter_map(|pid| Some(self.processes.get(pid)?.cpu_ticks)).sum()
    }

    /// Returns the memory of these processes; precisely, if it may be more than `precise_above` bytes. The kernel visits every page for the proportional set
    /// size, which takes tens of milliseconds for each gigabyte of small pages.
    #[must_use]
    pub fn memory(&self, members: &BTreeSet<i32>, precise_above: u64) -> MemoryUsage {
        let resident = |pid: &i32| self.processes.get(pid).map(|stat| stat.resident_bytes());
        let resident_bytes: u64 = members.iter().filter_map(resident).sum();
        // Most looks end here: there is not enough shared memory on the machine.
        let may_exceed = |more: u64| resident_bytes.saturating_add(more) > precise_above;
        let open_bytes = if may_exceed(self.shared_bytes) { self.open_bytes(members) } else { 0 };
        let counted_bytes = may_exceed(open_bytes)
            .then(|| members.iter().map(|pid| self.proportional_bytes(*pid)).sum::<u64>().saturating_add(open_bytes));
        MemoryUsage { resident_bytes, counted_bytes }
    }

    /// Returns the size of the files of shared memory that these processes have open, and none of them has mapped: pages of those that are mapped are in the
    /// sizes of the processes.
    fn open_bytes(&self, members: &BTreeSet<i32>) -> u64 {
        let mut files = BTreeMap::new();
        for pid in members {
            let Ok(open) = fs::read_dir(self.proc.join(format!("{pid}/fd"))) else { continue };
            for file in open.flatten().map(|entry| entry.path()) {
                // Only then asks for the size, which waits if the file is on a dead network mount.
                let is_shared = fs::read_link(&file).is_ok_and(|name| is_shared_memory(&name.to_string_lossy()));
                if let Some(found) = is_shared.then(|| fs::metadata(&file).ok()).flatten().filter(fs::Metadata::is_file)
                {
                    // stat(2): blocks of 512 bytes.
                    files.insert((found.dev(), found.ino()), found.blocks().saturating_mul(512));
                }
            }
        }
        for pid in members {
            // Files are rare, and a process has thousands of mappings.
            if files.is_empty() {
                break;
            }
            let maps = fs::read_to_string(self.proc.join(format!("{pid}/maps"))).unwrap_or_default();
            for mapped in maps.lines().filter_map(mapped_file) {
                files.remove(&mapped);
            }
        }
        files.into_values().sum()
    }

    /// Returns the proportional set size of a process. Where the kernel does not tell it, the resident size counts: the file is missing before Linux 4.14,
    /// and belongs to another user after a change of the user. A process that has ended since uses nothing.
    fn proportional_bytes(&self, pid: i32) -> u64 {
        let rollup = fs::read_to_string(self.proc.join(format!("{pid}/smaps_rollup")));
        if let Some(bytes) = rollup.ok().and_then(|text| kilobytes(&text, "Pss:")) {
            return bytes;
        }
        let known = self.processes.get(&pid).map(|stat| stat.start_ticks);
        let now = ProcessStat::read_below(&self.proc, pid);
        now.filter(|stat| stat.alive() && Some(stat.start_ticks) == known).map_or(0, ProcessStat::resident_bytes)
    }
}

impl MemoryUsage {
    /// Returns the memory that counts against a limit.
    #[must_use]
    pub fn for_limit(self) -> u64 {
        self.counted_bytes.unwrap_or(self.resident_bytes)
    }
}

/// Returns `true` for the name of a file in shared memory, of POSIX or without a name, as links in `/proc/PID/fd` have it.
fn is_shared_memory(name: &str) -> bool {
    name.starts_with("/dev/shm/") || name.starts_with("/memfd:")
}

/// Returns the device and the inode of the file in a line of `/proc/PID/maps`, if it is in shared memory.
fn mapped_file(line: &str) -> Option<(u64, u64)> {
    // proc_pid_maps(5): addresses, permissions, offset, device in hexadecimal, inode, name.
    let name = line.get(line.find('/')?..)?;
    let mut fields = line.split_ascii_whitespace().skip(3);
    let (major, minor) = fields.next()?.split_once(':')?;
    let number = |text| u32::from_str_radix(text, 16).ok();
    let device = rustix::fs::makedev(number(major)?, number(minor)?);
    is_shared_memory(name).then_some((device, fields.next()?.parse().ok()?))
}

/// Returns the values of [`MARK_VARIABLE`] in an environment.
fn marks_in(environment: &[u8]) -> Vec<u8> {
    let entries = environment.split(|byte| *byte == 0);
    let values = entries.filter_map(|entry| entry.strip_prefix(MARK_VARIABLE.as_bytes())?.strip_prefix(b"="));
    values.collect::<Vec<_>>().join(&b':')
}

fn carries_mark(marks: &[u8], mark: &str) -> bool {
    let mut all = marks.split(|byte| *byte == b':');
    all.any(|one| if mark.ends_with('.') { one.starts_with(mark.as_bytes()) } else { one == mark.as_bytes() })
}

/// Adds the processes that descend from members. Bounded by the number of processes.
pub fn add_descendants(all: &BTreeMap<i32, ProcessStat>, members: &mut BTreeSet<i32>) {
    loop {
        let descends = |(pid, stat): &(&i32, &ProcessStat)| !members.contains(pid) && members.contains(&stat.parent);
        let more: Vec<i32> = all.iter().filter(descends).map(|(pid, _)| *pid).collect();
        if more.is_empty() {
            return;
        }
        members.extend(more);
    }
}

/// The resources that this process and all its descendants use together.
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
    let all = ProcessStat::all(Path::new(PROC))?;
    let mut family = BTreeSet::from([own]);
    add_descendants(&all, &mut family);
    let members = || family.iter().filter_map(|pid| Some((*pid, all.get(pid)?)));
    // Of this process, the kernel has a finer clock.
    let used: u64 = members().map(|(pid, stat)| stat.waited_ticks + if pid == own { 0 } else { stat.cpu_ticks }).sum();
    let cpu = process_cpu() + ticks(used);
    Ok(FamilyUsage { cpu, resident_bytes: members().map(|(_, stat)| stat.resident_bytes()).sum() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;
    use std::os::unix::fs::symlink;

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
    fn marks_match_whole_or_by_launcher_and_never_by_accident() {
        let marks = marks_in(b"A=1\0GYM_LAUNCH_MARK=9-8-0.1:10-5-0.12\0B=2\0");
        assert!(carries_mark(&marks, "10-5-0.12"));
        assert!(carries_mark(&marks, "9-8-0.1"));
        assert!(carries_mark(&marks, "10-5-0."));
        assert!(!carries_mark(&marks, "10-5-0.1"), "a longer child number");
        assert!(!carries_mark(&marks, "0-5-0."), "the end of another launcher's name");
        assert!(!carries_mark(&marks_in(b"X=GYM_LAUNCH_MARK=9-8-0.1\0"), "9-8-0.1"), "in another variable's value");
    }

    #[test]
    fn an_open_file_in_shared_memory_counts_once_and_not_beside_its_mapping() {
        let folder = tempfile::tempdir().expect("a folder");
        let proc = folder.path();
        let mut shared = tempfile::NamedTempFile::new_in("/dev/shm").expect("shared memory");
        shared.write_all(&vec![1; 3 << 20]).expect("writes");
        let other = tempfile::NamedTempFile::new_in(proc).expect("a file that is no shared memory");
        for pid in [10, 20] {
            fs::create_dir_all(proc.join(format!("{pid}/fd"))).expect("a folder");
            fs::write(
                proc.join(format!("{pid}/stat")),
                format!("1 (w) S 1 1 {pid} 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 7 0 0"),
            )
            .expect("writes");
            fs::write(proc.join(format!("{pid}/smaps_rollup")), "Pss: 1024 kB\n").expect("writes");
            symlink(shared.path(), proc.join(format!("{pid}/fd/3"))).expect("links");
            symlink(shared.path(), proc.join(format!("{pid}/fd/4"))).expect("links");
            symlink(other.path(), proc.join(format!("{pid}/fd/5"))).expect("links");
            symlink("socket:[77]", proc.join(format!("{pid}/fd/6"))).expect("links");
        }
        let counted = |precise_above| {
            let table = ProcessTable::read_below(proc).expect("reads");
            table.memory(&BTreeSet::from([10, 20]), precise_above).counted_bytes
        };
        fs::write(proc.join("meminfo"), "Shmem:  1024 kB\n").expect("writes");
        assert_eq!(counted(2 << 20), None, "the machine has less shared memory than that");
        fs::write(proc.join("meminfo"), "Shmem:  9000 kB\n").expect("writes");
        assert_eq!((counted(2 << 20), counted(3 << 20)), (Some(5 << 20), None));
        let found = shared.as_file().metadata().expect("is there");
        let device = format!("{:02x}:{:02x}", rustix::fs::major(found.dev()), rustix::fs::minor(found.dev()));
        let line = format!("7f0-7f1 rw-s 00000000 {device} {} {:>30}", found.ino(), "/dev/shm/torch (deleted)\n");
        fs::write(proc.join("20/maps"), line).expect("writes");
        assert_eq!(counted(2 << 20), None, "what is mapped is in the sizes of the processes");
    }
}

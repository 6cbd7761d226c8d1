//! The whole machine: its clock, memory, CPU time, and who listens on its ports.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::base::process::{PROC, kilobytes, ticks};

/// The memory of a machine, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SystemMemory {
    /// All memory.
    pub total_bytes: u64,
    /// The memory that programs can get without swapping.
    pub available_bytes: u64,
}

impl SystemMemory {
    /// Returns the memory of this machine; `None` if `/proc/meminfo` does not tell it.
    #[must_use]
    pub fn read() -> Option<Self> {
        Self::parse(&fs::read_to_string(Path::new(PROC).join("meminfo")).ok()?)
    }

    fn parse(text: &str) -> Option<Self> {
        let bytes = |name: &str| kilobytes(text, name);
        Some(Self { total_bytes: bytes("MemTotal:")?, available_bytes: bytes("MemAvailable:")? })
    }
}

/// Returns the CPU time that all programs of this machine have used, from the first line of `/proc/stat` (proc_stat(5)).
///
/// # Errors
/// `/proc` cannot be read.
pub fn system_cpu() -> io::Result<Duration> {
    let text = fs::read_to_string(Path::new(PROC).join("stat"))?;
    let mut fields =
        text.lines().next().unwrap_or_default().split_whitespace().skip(1).map_while(|field| field.parse::<u64>().ok());
    // User, nice and system, then idle and waiting for a disk, then interrupts and stolen time.
    let busy: u64 = fields.by_ref().take(3).sum::<u64>() + fields.skip(2).take(3).sum::<u64>();
    Ok(ticks(busy))
}

/// Returns the time since the start of the machine, including the time for which it was suspended.
#[must_use]
pub fn since_boot() -> Duration {
    super::duration(rustix::time::clock_gettime(rustix::time::ClockId::Boottime))
}

/// Returns the process that listens on a TCP port of this machine, such as `python3 (process 17)`; `None` if it belongs to another user. Visits the open files
/// of all processes, so call it outside of the runtime's threads.
#[must_use]
pub fn listener(port: u16) -> Option<String> {
    let proc = Path::new(PROC);
    let inodes: Vec<String> = ["net/tcp", "net/tcp6"]
        .into_iter()
        .filter_map(|table| fs::read_to_string(proc.join(table)).ok())
        .flat_map(|table| table.lines().skip(1).filter_map(|line| listening_inode(line, port)).collect::<Vec<_>>())
        .collect();
    let sockets: Vec<PathBuf> = inodes.iter().map(|inode| PathBuf::from(format!("socket:[{inode}]"))).collect();
    let processes = fs::read_dir(proc).ok()?.filter_map(Result::ok);
    for process in processes {
        let Some(id) = process.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        let Ok(open) = fs::read_dir(process.path().join("fd")) else { continue };
        let mut links = open.filter_map(|link| fs::read_link(link.ok()?.path()).ok());
        if links.any(|link| sockets.contains(&link)) {
            let name = fs::read_to_string(process.path().join("comm")).unwrap_or_default();
            return Some(format!("{} (process {id})", name.trim()));
        }
    }
    None
}

/// Returns the inode in a line of `/proc/net/tcp` if it listens on the port.
fn listening_inode(line: &str, port: u16) -> Option<String> {
    let mut fields = line.split_whitespace();
    let (local, state, inode) = (fields.nth(1)?, fields.nth(1)?, fields.nth(5)?);
    let (_, local) = local.rsplit_once(':')?;
    // 0A is TCP_LISTEN.
    (state == "0A" && u16::from_str_radix(local, 16) == Ok(port)).then(|| inode.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_read_as_the_kernel_writes_it() {
        let text = "MemTotal:       16384 kB\nMemFree:            1 kB\nMemAvailable:    8192 kB\n";
        let memory = SystemMemory { total_bytes: 16_384 << 10, available_bytes: 8_192 << 10 };
        assert_eq!(SystemMemory::parse(text), Some(memory));
        assert_eq!(SystemMemory::parse("MemTotal: 3 kB\n"), None);
    }
}

//! One process, as `/proc/PID/stat` describes it.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;

use crate::base::process::PROC;

/// The line that `/proc/PID/stat` reports for a process.
#[derive(Debug, Clone, Copy)]
pub struct ProcessStat {
    pub(super) state: u8,
    /// Threads that have not ended. The first of them may have: it is a zombie then, and the process is none.
    threads: u64,
    pub(super) parent: i32,
    /// The process group.
    pub group: i32,
    /// The session.
    pub session: i32,
    /// CPU time used, user and system, in clock ticks.
    pub cpu_ticks: u64,
    /// CPU time of the processes for which it has waited, in clock ticks.
    pub waited_ticks: u64,
    /// Start time, in clock ticks since boot.
    pub start_ticks: u64,
    /// Resident memory, in pages.
    pub(super) resident_pages: u64,
}

impl ProcessStat {
    /// Reads the line of a process, which may be a zombie.
    #[must_use]
    pub fn read(pid: i32) -> Option<Self> {
        Self::read_below(Path::new(PROC), pid)
    }

    pub(super) fn read_below(proc: &Path, pid: i32) -> Option<Self> {
        Self::parse(&fs::read(proc.join(format!("{pid}/stat"))).ok()?)
    }

    /// Parses the fields after the last `)`: the name before it may contain any characters, including blanks and
    /// parentheses.
    fn parse(text: &[u8]) -> Option<Self> {
        let close = memchr::memrchr(b')', text)?;
        let rest = std::str::from_utf8(text.get(close + 1..)?).ok()?;
        let mut fields = rest.split_ascii_whitespace();
        let state = *fields.next()?.as_bytes().first()?;
        let parent = fields.next()?.parse().ok()?;
        let group = fields.next()?.parse().ok()?;
        let session = fields.next()?.parse().ok()?;
        // Fields 14 to 17, 20, 22 and 24 of the line (proc_pid_stat(5)), counted from 1; six were consumed above.
        let user: u64 = fields.nth(7)?.parse().ok()?;
        let system: u64 = fields.next()?.parse().ok()?;
        let (waited_user, waited_system): (u64, u64) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
        let threads = fields.nth(2)?.parse().ok()?;
        let start_ticks = fields.nth(1)?.parse().ok()?;
        let resident_pages = fields.nth(1)?.parse().ok()?;
        Some(Self {
            state,
            threads,
            parent,
            group,
            session,
            cpu_ticks: user.saturating_add(system),
            waited_ticks: waited_user.saturating_add(waited_system),
            start_ticks,
            resident_pages,
        })
    }

    /// Returns all living processes by ID.
    pub(super) fn all(proc: &Path) -> io::Result<BTreeMap<i32, Self>> {
        let mut all = BTreeMap::new();
        for entry in fs::read_dir(proc)? {
            let Some(pid) = entry?.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else { continue };
            if let Some(stat) = Self::read_below(proc, pid).filter(|stat| stat.alive()) {
                all.insert(pid, stat);
            }
        }
        Ok(all)
    }

    /// Returns the resident memory, in bytes.
    pub(super) fn resident_bytes(self) -> u64 {
        self.resident_pages.saturating_mul(rustix::param::page_size() as u64)
    }

    /// Returns `false` for a zombie, which has ended and waits for its parent.
    #[must_use]
    pub fn alive(self) -> bool {
        self.threads > 1 || !matches!(self.state, b'Z' | b'X' | b'x')
    }
}

/// Returns the start time of process `pid`, in clock ticks since boot.
#[must_use]
pub fn start_ticks(pid: i32) -> Option<u64> {
    ProcessStat::read(pid).map(|stat| stat.start_ticks)
}

/// Describes the state of a process of this machine that should respond: "is stopped (SIGSTOP); kill -CONT continues it". Returns `None` for a process that
/// runs, or waits as usual.
#[must_use]
pub fn unusual_state(pid: u32) -> Option<&'static str> {
    let Some(stat) = i32::try_from(pid).ok().and_then(ProcessStat::read) else {
        return Some("has ended");
    };
    match stat.state {
        b'T' => Some("is stopped (SIGSTOP); kill -CONT continues it"),
        b't' => Some("is stopped by a debugger"),
        b'D' => Some("waits for a disk or a device"),
        _ if !stat.alive() => Some("has ended"),
        _ => None,
    }
}

/// Returns `true` if there is a process with this ID, which may be a zombie, and also if `/proc` cannot tell.
#[must_use]
pub fn exists(pid: u32) -> bool {
    fs::exists(Path::new(PROC).join(pid.to_string())).unwrap_or(true)
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
    fn a_process_whose_first_thread_has_ended_lives() {
        let alive = |threads: u32| {
            let line = format!("7 (w) Z 1 1 1 0 0 0 0 0 0 0 0 0 0 0 0 0 {threads} 0 7 0 0");
            ProcessStat::parse(line.as_bytes()).expect("parses").alive()
        };
        assert_eq!((alive(1), alive(2)), (false, true));
    }

    #[test]
    fn own_process_has_a_start_time() {
        let own = i32::try_from(std::process::id()).expect("fits");
        assert!(start_ticks(own).is_some_and(|ticks| ticks > 0));
    }
}

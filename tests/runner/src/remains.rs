//! What the tests must not leave on the machine: processes, network namespaces, listening sockets, and files in `/dev/shm`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::getuid;

use crate::process;

/// What is on the machine at one moment.
pub(crate) struct Remains(BTreeMap<String, Source>);

/// Who can say whether an entry is of the tests.
#[derive(Clone, Copy, PartialEq)]
enum Source {
    /// Whatever is new is of the tests.
    Any,
    /// A socket: its inode leads to its process.
    Socket(u64),
}

impl Remains {
    /// Looks at the machine. `shared_memory` is the folder of shared memory.
    pub(crate) fn now(shared_memory: &Path) -> Self {
        let mut found = BTreeMap::new();
        for folder in [Path::new("/run/netns"), shared_memory] {
            for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
                if entry.metadata().is_ok_and(|about| about.uid() == getuid().as_raw()) {
                    found.insert(entry.path().display().to_string(), Source::Any);
                }
            }
        }
        for file in ["tcp", "tcp6"] {
            for line in fs::read_to_string(format!("/proc/net/{file}")).unwrap_or_default().lines().skip(1) {
                let fields: Vec<&str> = line.split_ascii_whitespace().collect();
                let [_, local, _, "0A", _, _, _, user, _, inode, ..] = fields[..] else { continue };
                let port = local.rsplit_once(':').and_then(|(_, port)| u16::from_str_radix(port, 16).ok());
                if let (Some(port), Ok(inode)) = (port, inode.parse())
                    && user.parse() == Ok(getuid().as_raw())
                {
                    found.insert(format!("a listening socket at port {port} ({file})"), Source::Socket(inode));
                }
            }
        }
        for line in fs::read_to_string("/proc/net/unix").unwrap_or_default().lines().skip(1) {
            let fields: Vec<&str> = line.split_ascii_whitespace().collect();
            if let [.., inode, path] = fields[..]
                && let (7.., Ok(inode)) = (fields.len() - 1, inode.parse())
            {
                found.insert(format!("the Unix socket {path}"), Source::Socket(inode));
            }
        }
        Self(found)
    }

    /// Returns what is new and stays for this time, and the living children of this process but one, which it kills. Sockets of other programs do
    /// not count.
    pub(crate) fn added(&self, shared_memory: &Path, ending: Duration, busy: Option<&process::Busy>) -> Vec<String> {
        let begun = Instant::now();
        loop {
            let mut processes = process::children();
            processes.retain(|pid| busy.is_none_or(|busy| busy.pid() != *pid));
            let mut new: Vec<String> = processes.iter().map(|pid| process::describe(*pid)).collect();
            let now = Self::now(shared_memory);
            let unknown: BTreeSet<u64> = now.0.values().filter_map(|source| source.inode()).collect();
            let foreign = foreign(&unknown);
            let added = now.0.iter().filter(|(name, _)| !self.0.contains_key(*name));
            let own = added.filter(|(_, source)| source.inode().is_none_or(|inode| !foreign.contains(&inode)));
            new.extend(own.map(|(name, _)| name.clone()));
            if new.is_empty() || begun.elapsed() > ending {
                processes.iter().copied().for_each(process::kill);
                // A killed process takes a moment to end.
                while process::children().iter().any(|pid| processes.contains(pid)) && begun.elapsed() < 2 * ending {
                    std::thread::sleep(Duration::from_millis(5));
                }
                return new;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Source {
    fn inode(self) -> Option<u64> {
        match self {
            Self::Any => None,
            Self::Socket(inode) => Some(inode),
        }
    }
}

/// Returns the sockets that a process outside the tests holds.
fn foreign(sockets: &BTreeSet<u64>) -> BTreeSet<u64> {
    let mut found = BTreeSet::new();
    for pid in process::all().into_iter().filter(|pid| !process::is_descendant(*pid)) {
        for file in fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten() {
            let target = fs::read_link(file.path()).unwrap_or_default();
            let inode = target.to_str().and_then(|text| text.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok());
            found.extend(inode.filter(|inode| sockets.contains(inode)));
        }
    }
    found
}

//! The control groups that limit the memory of a process, and the kernel's count of the processes that it killed there.
//!
//! The kernel ends a process with `SIGKILL` when the memory of a container is used up, as anybody may. Only a counter of the control group tells the
//! difference. Version 1 has it in `memory.oom_control`, version 2 in `memory.events`. Both count a kill in the group of the process that was
//! killed, even if the limit of a group above it was reached, or all memory of the machine is used up.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Component, Path, PathBuf};
use std::process::ExitStatus;

use parking_lot::Mutex;
use rustix::process::Signal;

/// Limits from here on are none: version 1 writes the largest number of pages, in bytes.
const NO_LIMIT: u64 = 1 << 62;
/// Exit status of a shell, or another program that runs a program, if that was killed.
const KILLED_BELOW: i32 = 128 + Signal::KILL.as_raw();

/// Version of the control groups that limit memory. A machine may have both; the memory controller is in one of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// Each controller has a hierarchy of its own.
    One,
    /// One hierarchy.
    Two,
}

/// The control group of a process for memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryGroup {
    /// The version of the memory controller.
    pub version: Version,
    /// Where the groups are mounted: the outermost one that can be seen.
    pub mount: PathBuf,
    /// The folder of the group.
    pub path: PathBuf,
}

/// The counters of a control group, and of those around it, when a process began to run in it.
#[derive(Debug)]
pub struct MemoryWatch {
    group: MemoryGroup,
    kills: u64,
    /// How often each group reached its limit, from the group of the process to the outermost one.
    hits: Vec<u64>,
}

/// The kernel killed a process because memory was used up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryKill {
    /// The control group that reached its limit, with the limit in bytes. `None` if no limit was reached, so the machine has no memory left.
    pub limit: Option<(PathBuf, u64)>,
}

impl MemoryGroup {
    /// Returns the group of a process on this machine, if its files can be read.
    #[must_use]
    pub fn of(pid: impl fmt::Display) -> Option<Self> {
        Self::below(Path::new("/"), pid)
    }

    /// Returns the group of a process on a machine whose `/proc` and mounts are below `root`.
    #[must_use]
    pub fn below(root: &Path, pid: impl fmt::Display) -> Option<Self> {
        let proc = root.join("proc");
        let groups = fs::read_to_string(proc.join(format!("{pid}/cgroup"))).ok()?;
        let (version, group) = group_in(&groups)?;
        let mounts = fs::read_to_string(proc.join("self/mountinfo")).ok()?;
        let (top, point) = mounts.lines().find_map(|line| mount_in(line, version))?;
        let mount = root.join(point.trim_start_matches('/'));
        // In a container without a namespace of its own, the path is that of the host, of which only the part below `top` is mounted.
        let inside = Path::new(group).strip_prefix(top).ok();
        let inside = inside.filter(|path| path.components().all(|part| matches!(part, Component::Normal(_))));
        // `join` with an empty path would end in a slash.
        let path = inside.filter(|path| *path != Path::new("")).map_or_else(|| mount.clone(), |path| mount.join(path));
        Some(Self { version, mount, path })
    }

    /// Returns the group and those around it, the innermost first.
    fn levels(&self) -> impl Iterator<Item = &Path> {
        self.path.ancestors().take_while(|path| path.starts_with(&self.mount))
    }

    /// Returns how many processes of the group the kernel has killed because memory was used up.
    fn kills(&self) -> Option<u64> {
        let file = match self.version {
            Version::One => "memory.oom_control",
            Version::Two => "memory.events",
        };
        count(&self.path.join(file), "oom_kill")
    }

    /// Returns how often the group at `path` has reached its own limit.
    fn hits(&self, path: &Path) -> u64 {
        let failures = |file: &str| number(&path.join(file)).unwrap_or(0);
        match self.version {
            Version::One => failures("memory.failcnt").saturating_add(failures("memory.memsw.failcnt")),
            // Until Linux 5.2 there is no local file, and the other one is local.
            Version::Two => ["memory.events.local", "memory.events"]
                .iter()
                .find_map(|file| count(&path.join(file), "oom"))
                .unwrap_or(0),
        }
    }

    /// Returns the limit of the group at `path`, in bytes.
    fn limit(&self, path: &Path) -> Option<u64> {
        let files: &[&str] = match self.version {
            Version::One => &["memory.limit_in_bytes", "memory.memsw.limit_in_bytes"],
            Version::Two => &["memory.max"],
        };
        files.iter().filter_map(|file| number(&path.join(file))).min().filter(|limit| *limit < NO_LIMIT)
    }
}

impl MemoryWatch {
    /// Begins to watch the group of a process. Returns `None` if the machine does not count there, such as in the outermost group of version 2.
    #[must_use]
    pub fn start(pid: impl fmt::Display) -> Option<Self> {
        Self::over(MemoryGroup::of(pid)?)
    }

    fn over(group: MemoryGroup) -> Option<Self> {
        let kills = group.kills()?;
        let hits = group.levels().map(|path| group.hits(path)).collect();
        Some(Self { group, kills, hits })
    }

    /// Returns the kill, if the process ended as one that was killed, and the kernel has killed a process of the group since the start. A kill explains one end,
    /// so that the next process of the group that anybody kills is not the kernel's.
    #[must_use]
    pub fn explains(&self, status: ExitStatus) -> Option<MemoryKill> {
        const EXPLAINED_MAX: usize = 1024;
        static EXPLAINED: Mutex<BTreeMap<PathBuf, u64>> = Mutex::new(BTreeMap::new());
        let is_killed = status.signal() == Some(Signal::KILL.as_raw()) || status.code() == Some(KILLED_BELOW);
        let kills = self.group.kills().filter(|_| is_killed)?;
        let mut explained = EXPLAINED.lock();
        if explained.len() >= EXPLAINED_MAX {
            explained.retain(|path, _| path.exists());
        }
        let known = explained.entry(self.group.path.clone()).or_default();
        let before = self.kills.max(*known);
        if kills <= before {
            return None;
        }
        *known = before + 1;
        let reached = self.group.levels().zip(&self.hits).filter(|(path, before)| self.group.hits(path) > **before);
        let limits = reached.filter_map(|(path, _)| Some((path.to_owned(), self.group.limit(path)?)));
        Some(MemoryKill { limit: limits.min_by_key(|(_, bytes)| *bytes) })
    }
}

impl MemoryKill {
    /// Returns `true` if the group at `path` reached its limit.
    #[must_use]
    pub fn is_of(&self, path: &Path) -> bool {
        self.limit.as_ref().is_some_and(|(reached, _)| reached == path)
    }
}

impl fmt::Display for MemoryKill {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.limit {
            Some((path, bytes)) => write!(
                f,
                "the kernel killed it because the processes of the control group {} together used its limit of {bytes} bytes of memory; raise the \
                 memory limit of the container, or lower what the processes in it use",
                path.display()
            ),
            None => f.write_str(
                "the kernel killed it because the machine had no memory left; lower what the processes of the machine use, or take a larger one",
            ),
        }
    }
}

/// Returns the version that limits memory, and the group, from the lines of `/proc/PID/cgroup`.
fn group_in(lines: &str) -> Option<(Version, &str)> {
    let fields = || lines.lines().filter_map(|line| line.split_once(':')?.1.split_once(':'));
    let one = fields().find(|(controllers, _)| controllers.split(',').any(|name| name == "memory"));
    let two = || lines.lines().find_map(|line| line.strip_prefix("0::"));
    one.map(|(_, path)| (Version::One, path)).or_else(|| Some((Version::Two, two()?)))
}

/// Returns the group that a line of `/proc/self/mountinfo` mounts, and the mount point, if the line is of the memory controller.
fn mount_in(line: &str, version: Version) -> Option<(&str, &str)> {
    // proc_pid_mountinfo(5): ID, parent, device, root, mount point, options, optional fields, " - ", type, source, options of the file system.
    let (mount, system) = line.split_once(" - ")?;
    let mut system = system.split(' ');
    let (kind, options) = (system.next()?, system.nth(1).unwrap_or_default());
    let is_it = match version {
        Version::One => kind == "cgroup" && options.split(',').any(|option| option == "memory"),
        Version::Two => kind == "cgroup2",
    };
    let mut mount = mount.split(' ').skip(3);
    is_it.then_some((mount.next()?, mount.next()?))
}

/// Returns the number in a line `NAME NUMBER` of a file.
fn count(file: &Path, name: &str) -> Option<u64> {
    let text = fs::read_to_string(file).ok()?;
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok())
}

/// Returns the number that a file consists of.
fn number(file: &Path) -> Option<u64> {
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine in a folder: `/proc/7/cgroup`, the mounts, and the files of groups.
    fn machine(groups: &str, mounts: &str, files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("a folder");
        let proc = [("proc/7/cgroup", groups), ("proc/self/mountinfo", mounts)];
        proc.iter().chain(files).for_each(|(path, text)| write(root.path(), path, text));
        root
    }

    fn write(root: &Path, path: &str, text: &str) {
        let path = root.join(path);
        fs::create_dir_all(path.parent().expect("a parent")).expect("folders");
        fs::write(path, text).expect("writes");
    }

    const ONE: &str = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory";
    const TWO: &str = "41 31 0:38 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw,nsdelegate";
    const HYBRID: &str = "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n\
                          34 31 0:31 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n\
                          35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory";
    /// A container of Docker with the group of the host: only the own part is mounted.
    const PART: &str = "35 31 0:32 /docker/f00 /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory";

    #[test]
    fn the_group_of_a_process_is_found_in_both_versions() {
        type Found = Option<(Version, &'static str)>;
        let cases: [(&str, &str, Found); 9] = [
            ("4:memory:/a/b\n0::/\n", ONE, Some((Version::One, "sys/fs/cgroup/memory/a/b"))),
            ("3:cpu,memory:/a\n", ONE, Some((Version::One, "sys/fs/cgroup/memory/a"))),
            ("4:memory:/\n", ONE, Some((Version::One, "sys/fs/cgroup/memory"))),
            ("4:memory:/a:b\n0::/\n", HYBRID, Some((Version::One, "sys/fs/cgroup/memory/a:b"))),
            ("4:memory:/docker/f00\n", PART, Some((Version::One, "sys/fs/cgroup/memory"))),
            ("4:memory:/docker/f00/in\n", PART, Some((Version::One, "sys/fs/cgroup/memory/in"))),
            ("0::/user.slice/run.scope\n", TWO, Some((Version::Two, "sys/fs/cgroup/user.slice/run.scope"))),
            ("0::/../../above\n", TWO, Some((Version::Two, "sys/fs/cgroup"))),
            ("1:name=systemd:/\n", TWO, None),
        ];
        for (groups, mounts, expected) in cases {
            let root = machine(groups, mounts, &[]);
            let found = MemoryGroup::below(root.path(), 7);
            let expected = expected.map(|(version, path)| (version, root.path().join(path)));
            assert_eq!(found.map(|group| (group.version, group.path)), expected, "{groups:?}");
        }
        assert_eq!(MemoryGroup::below(machine("", ONE, &[]).path(), 8), None, "no such process");
    }

    const KILLED: i32 = 9;
    const OUTER: &str = "sys/fs/cgroup/a";

    #[test]
    fn a_kill_is_told_by_the_counter_and_the_limit_by_the_group_that_reached_it() {
        let one: &[(&str, &str)] = &[
            ("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "300000000\n"),
            ("sys/fs/cgroup/memory/a/memory.failcnt", "12\n"),
            ("sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", "9223372036854771712\n"),
            ("sys/fs/cgroup/memory/a/b/memory.failcnt", "0\n"),
            ("sys/fs/cgroup/memory/a/b/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"),
        ];
        let two: &[(&str, &str)] = &[
            ("sys/fs/cgroup/a/memory.max", "5000\n"),
            ("sys/fs/cgroup/a/memory.events", "low 0\nmax 9\noom 4\noom_kill 5\n"),
            ("sys/fs/cgroup/a/memory.events.local", "low 0\nmax 9\noom 2\noom_kill 0\n"),
            ("sys/fs/cgroup/a/b/memory.max", "max\n"),
            ("sys/fs/cgroup/a/b/memory.events", "low 0\nhigh 0\nmax 0\noom 0\noom_kill 3\n"),
        ];
        let mut old = two.to_vec();
        old.remove(2);
        let oom_control = "sys/fs/cgroup/memory/a/b/memory.oom_control";
        let (one_killed, one_limit) =
            ((oom_control, "oom_kill 4\n"), ("sys/fs/cgroup/memory/a/memory.failcnt", "20\n"));
        let swap_limit = ("sys/fs/cgroup/memory/a/memory.memsw.failcnt", "2\n");
        let two_killed = ("sys/fs/cgroup/a/b/memory.events", "oom 0\noom_kill 4\n");
        let local = ("sys/fs/cgroup/a/memory.events.local", "max 9\noom 3\n");
        let old_limit = ("sys/fs/cgroup/a/memory.events", "max 9\noom 5\noom_kill 6\n");
        let own_limit =
            [("sys/fs/cgroup/a/b/memory.max", "4000\n"), ("sys/fs/cgroup/a/b/memory.events", "oom 1\noom_kill 5\n")];
        let (in_one, in_two) = (("4:memory:/a/b\n", ONE), ("0::/a/b\n", TWO));
        let machine_has_none = Some(None);
        let limit = |path: &'static str, bytes| Some(Some((path, bytes)));
        type Case<'a> = (
            &'a str,
            (&'a str, &'a str),
            &'a [(&'a str, &'a str)],
            &'a [(&'a str, &'a str)],
            i32,
            Option<Option<(&'static str, u64)>>,
        );
        let cases: [Case<'_>; 12] = [
            (
                "a limit of version 1",
                in_one,
                one,
                &[one_killed, one_limit],
                KILLED,
                limit("sys/fs/cgroup/memory/a", 300_000_000),
            ),
            (
                "a limit with swap",
                in_one,
                one,
                &[one_killed, swap_limit],
                KILLED,
                limit("sys/fs/cgroup/memory/a", 300_000_000),
            ),
            (
                "the shell of a killed program",
                in_one,
                one,
                &[one_killed, one_limit],
                137 << 8,
                limit("sys/fs/cgroup/memory/a", 300_000_000),
            ),
            ("no limit was reached", in_one, one, &[one_killed], KILLED, machine_has_none),
            ("killed by somebody", in_one, one, &[one_limit], KILLED, None),
            ("another signal", in_one, one, &[one_killed, one_limit], 15, None),
            ("its own exit", in_one, one, &[one_killed, one_limit], 1 << 8, None),
            ("the limit above", in_two, two, &[two_killed, local], KILLED, limit(OUTER, 5000)),
            ("the limit above, before Linux 5.2", in_two, &old, &[two_killed, old_limit], KILLED, limit(OUTER, 5000)),
            ("its own limit", in_two, two, &own_limit, KILLED, limit("sys/fs/cgroup/a/b", 4000)),
            ("a neighbor's kill", in_two, two, &[old_limit], KILLED, None),
            ("memory of the machine", in_two, two, &[two_killed], KILLED, machine_has_none),
        ];
        for (name, (groups, mounts), before, after, status, expected) in cases {
            let root = machine(groups, mounts, before);
            let group = MemoryGroup::below(root.path(), 7).expect("a group");
            let watch = MemoryWatch::over(group).expect("counters");
            after.iter().for_each(|(path, text)| write(root.path(), path, text));
            let found = watch.explains(ExitStatus::from_raw(status));
            let expected =
                expected.map(|limit| MemoryKill { limit: limit.map(|(path, bytes)| (root.path().join(path), bytes)) });
            assert_eq!(found, expected, "{name}");
        }
    }

    #[test]
    fn one_kill_explains_one_end() {
        let events = ("sys/fs/cgroup/memory.events", "oom 0\noom_kill 3\n");
        let root = machine("0::/\n", TWO, &[events]);
        let start = || MemoryWatch::over(MemoryGroup::below(root.path(), 7).expect("a group")).expect("counters");
        let explained = |watch: &MemoryWatch| watch.explains(ExitStatus::from_raw(KILLED)).is_some();
        let ranks = [start(), start(), start()];
        write(root.path(), events.0, "oom 0\noom_kill 5\n");
        assert_eq!(ranks.each_ref().map(explained), [true, true, false], "two of three were killed by the kernel");
        assert!(!explained(&start()), "a kill before its start");
    }

    #[test]
    fn a_kill_is_told_with_the_limit_and_the_fix() {
        let limit = Some((PathBuf::from("/sys/fs/cgroup/pod"), 300));
        let text = MemoryKill { limit }.to_string();
        for part in ["/sys/fs/cgroup/pod", "300 bytes of memory", "raise the memory limit of the container"] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(MemoryKill { limit: None }.to_string().contains("no memory left"));
    }
}

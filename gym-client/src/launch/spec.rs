//! The specification of a child: its program, environment and restart policy.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{Access, access};
use tokio::time::Instant;

use crate::launch::error::LaunchError;

/// The kernel's limit for one argument or one `NAME=value`, including the terminating zero byte (`MAX_ARG_STRLEN`).
const TEXT_BYTES_MAX: usize = 128 * 1024;
/// Search path for programs if the child's environment is cleared and has no `PATH`.
pub(super) const DEFAULT_PATH: &str = "/usr/local/bin:/usr/bin:/bin";

/// Number and delays of the restarts of a child that exits; the default is five in ten minutes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct RestartPolicy {
    /// Maximum number of restarts within `window`; 0 means never. Default: 5.
    pub max_restarts: u32,
    /// Delay before the first restart; it doubles with every restart inside the window. Default: 0.5 s.
    pub backoff_min: Duration,
    /// Maximum delay. Default: 30 s.
    pub backoff_max: Duration,
    /// Restarts before this time span no longer count. Default: 10 minutes.
    pub window: Duration,
}

impl RestartPolicy {
    /// Never restarts: the first exit is final.
    pub const NEVER: Self = Self {
        max_restarts: 0,
        backoff_min: Duration::ZERO,
        backoff_max: Duration::ZERO,
        window: Duration::from_secs(600),
    };
}

impl Default for RestartPolicy {
    /// Returns five restarts in ten minutes, 0.5 s to 30 s apart.
    fn default() -> Self {
        Self {
            max_restarts: 5,
            backoff_min: Duration::from_millis(500),
            backoff_max: Duration::from_secs(30),
            window: Duration::from_secs(600),
        }
    }
}

/// The specification of a child program; [`ChildSpec::new`] sets the defaults.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ChildSpec {
    /// Name of the child, unique among the running children of a launcher; prefixes log lines.
    pub name: String,
    /// A path, or a name that is searched in the child's `PATH`. A relative path starts at `cwd`.
    pub program: PathBuf,
    /// Arguments after the program's name. Default: none.
    pub args: Vec<OsString>,
    /// Variables added to the inherited environment. Default: none.
    pub env: BTreeMap<OsString, OsString>,
    /// Start with an empty environment instead of the inherited one. Default: `false`.
    pub env_clear: bool,
    /// Working directory. Default: that of the launching process.
    pub cwd: Option<PathBuf>,
    /// Restart policy for an exit that was not requested, with any status. Default: [`RestartPolicy::default`].
    pub restart: RestartPolicy,
    /// Time between the request to stop and the kill, for processes that remain after the program exits on its own, and
    /// for [`Launcher::shutdown`](crate::launch::launcher::Launcher::shutdown). Default: 5 s.
    pub stop_grace: Duration,
    /// Directory of a control group. The child joins it before its program is executed, so all its descendants are in
    /// it. Default: none.
    pub cgroup: Option<PathBuf>,
}

impl ChildSpec {
    /// Creates a specification with the defaults of the fields: inherited environment and working directory, default
    /// restart policy, and 5 s to stop.
    pub fn new(name: impl Into<String>, program: impl Into<PathBuf>) -> Self {
        Self {
            name: name.into(),
            program: program.into(),
            args: Vec::new(),
            env: BTreeMap::new(),
            env_clear: false,
            cwd: None,
            restart: RestartPolicy::default(),
            stop_grace: Duration::from_secs(5),
            cgroup: None,
        }
    }

    /// Adds an argument.
    #[must_use]
    pub fn arg(mut self, argument: impl Into<OsString>) -> Self {
        self.args.push(argument.into());
        self
    }

    /// Sets an environment variable.
    #[must_use]
    pub fn env(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.env.insert(name.into(), value.into());
        self
    }

    /// Sets the working directory.
    #[must_use]
    pub fn cwd(mut self, cwd: impl Into<PathBuf>) -> Self {
        self.cwd = Some(cwd.into());
        self
    }

    /// Sets the restart policy.
    #[must_use]
    pub fn restart(mut self, policy: RestartPolicy) -> Self {
        self.restart = policy;
        self
    }

    /// Sets the time between the request to stop and the kill.
    #[must_use]
    pub fn stop_grace(mut self, grace: Duration) -> Self {
        self.stop_grace = grace;
        self
    }

    /// Sets the control group.
    #[must_use]
    pub fn cgroup(mut self, folder: impl Into<PathBuf>) -> Self {
        self.cgroup = Some(folder.into());
        self
    }

    /// Checks the specification as far as possible before a process exists, and finds the program.
    ///
    /// In the child, an error could only become an exit status and a line on standard error.
    pub(super) fn resolve(&self) -> Result<PathBuf, LaunchError> {
        self.check_text()?;
        if let Some(cwd) = &self.cwd {
            let problem = match std::fs::metadata(cwd) {
                Ok(found) if found.is_dir() => None,
                Ok(_) => Some("not a directory".to_owned()),
                Err(error) => Some(error.to_string()),
            };
            if let Some(problem) = problem {
                return Err(LaunchError::WorkingDirectory { name: self.name.clone(), cwd: cwd.clone(), problem });
            }
        }
        if self.program.as_os_str().as_bytes().contains(&b'/') {
            let path = self.absolute(&self.program);
            return match self.executable(&path) {
                Ok(()) => Ok(path),
                Err(Some(problem)) => {
                    Err(LaunchError::NotExecutable { name: self.name.clone(), program: path, problem })
                }
                Err(None) => {
                    Err(LaunchError::ProgramNotFound { name: self.name.clone(), program: path, looked_in: None })
                }
            };
        }
        self.search()
    }

    fn search(&self) -> Result<PathBuf, LaunchError> {
        let inherited = if self.env_clear { None } else { std::env::var_os("PATH") };
        let path = self.env.get(OsStr::new("PATH")).cloned().or(inherited).unwrap_or_else(|| DEFAULT_PATH.into());
        let mut refused = None;
        for folder in std::env::split_paths(&path) {
            let candidate = self.absolute(&folder.join(&self.program));
            match self.executable(&candidate) {
                Ok(()) => return Ok(candidate),
                Err(Some(problem)) => refused = refused.or(Some((candidate, problem))),
                Err(None) => {}
            }
        }
        Err(match refused {
            Some((program, problem)) => LaunchError::NotExecutable { name: self.name.clone(), program, problem },
            None => LaunchError::ProgramNotFound {
                name: self.name.clone(),
                program: self.program.clone(),
                looked_in: Some(path.to_string_lossy().into_owned()),
            },
        })
    }

    /// Keeps symbolic links: a Python interpreter finds its virtual environment through the link by which it was
    /// started.
    fn absolute(&self, path: &Path) -> PathBuf {
        let base = self.cwd.clone().unwrap_or_default();
        let joined = base.join(path);
        std::path::absolute(&joined).unwrap_or(joined)
    }

    /// Returns `Err(None)` if the file does not exist, and `Err(Some(problem))` if it exists but cannot be executed.
    fn executable(&self, path: &Path) -> Result<(), Option<&'static str>> {
        let found = std::fs::metadata(path).map_err(|error| match error.kind() {
            std::io::ErrorKind::PermissionDenied => {
                Some("in a directory without permission to enter; correct its permissions")
            }
            _ => None,
        })?;
        if found.is_dir() {
            return Err(Some("a directory, not a program; name the file in it"));
        }
        // Mode bits are not sufficient: `noexec` mounts and access lists also count.
        access(path, Access::EXEC_OK)
            .map_err(|_| Some("not executable; chmod +x it, or run it through its interpreter"))
    }

    fn check_text(&self) -> Result<(), LaunchError> {
        let fault = |what: String, problem: &str| {
            Err(LaunchError::Text { name: self.name.escape_debug().to_string(), what, problem: problem.to_owned() })
        };
        if self.name.is_empty() || self.name.chars().any(char::is_control) {
            return fault(
                "its name".to_owned(),
                "is empty or has control characters; choose a printable name, because it prefixes log lines",
            );
        }
        let too_long = |bytes: usize| {
            format!("is {bytes} bytes long; the kernel accepts at most {}, so pass it in a file", TEXT_BYTES_MAX - 1)
        };
        for (at, argument) in
            std::iter::once(self.program.as_os_str()).chain(self.args.iter().map(|a| &**a)).enumerate()
        {
            let what = if at == 0 { "its program".to_owned() } else { format!("argument {at}") };
            if argument.as_bytes().contains(&0) {
                return fault(what, "contains a zero byte; remove it");
            }
            if argument.len() >= TEXT_BYTES_MAX {
                return fault(what, &too_long(argument.len()));
            }
        }
        if self.program.as_os_str().is_empty() {
            return fault("its program".to_owned(), "is empty; set it");
        }
        for (name, value) in &self.env {
            let what = format!("variable {}", name.to_string_lossy().escape_debug());
            let bytes = name.as_bytes();
            if bytes.is_empty() || bytes.contains(&b'=') || bytes.contains(&0) {
                return fault(what, "has a name that is empty or contains = or a zero byte; rename it");
            }
            if value.as_bytes().contains(&0) {
                return fault(what, "contains a zero byte; remove it");
            }
            if bytes.len() + 1 + value.len() >= TEXT_BYTES_MAX {
                return fault(what, &too_long(bytes.len() + 1 + value.len()));
            }
        }
        Ok(())
    }
}

/// Counts restarts and computes delays; independent of processes.
#[derive(Debug)]
pub(super) struct RestartBudget {
    policy: RestartPolicy,
    used: VecDeque<Instant>,
    random: fastrand::Rng,
}

impl RestartBudget {
    pub(super) fn new(policy: RestartPolicy, seed: u64) -> Self {
        Self { policy, used: VecDeque::new(), random: fastrand::Rng::with_seed(seed) }
    }

    pub(super) fn policy(&self) -> RestartPolicy {
        self.policy
    }

    /// Returns the delay before the next restart and counts the restart; `None` if the limit is reached.
    pub(super) fn next(&mut self, now: Instant) -> Option<Duration> {
        while self.used.front().is_some_and(|first| now.duration_since(*first) > self.policy.window) {
            self.used.pop_front();
        }
        let used = u32::try_from(self.used.len()).unwrap_or(u32::MAX);
        if used >= self.policy.max_restarts {
            return None;
        }
        self.used.push_back(now);
        let doubled = self.policy.backoff_min.saturating_mul(1_u32.checked_shl(used).unwrap_or(u32::MAX));
        // Between half and all of the delay, so that children that died together do not restart together.
        Some(doubled.min(self.policy.backoff_max).mul_f64(0.5 + self.random.f64() / 2.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy() -> RestartPolicy {
        RestartPolicy {
            max_restarts: 4,
            backoff_min: Duration::from_millis(100),
            backoff_max: Duration::from_millis(300),
            window: Duration::from_secs(60),
        }
    }

    #[test]
    fn pauses_double_up_to_the_longest_and_then_the_budget_is_spent() {
        let now = Instant::now();
        for seed in 0..200 {
            let mut budget = RestartBudget::new(policy(), seed);
            for whole in [100, 200, 300, 300] {
                let pause = budget.next(now).expect("within the budget");
                let whole = Duration::from_millis(whole);
                assert!(pause >= whole / 2 && pause <= whole, "seed {seed}: {pause:?} of {whole:?}");
            }
            assert_eq!(budget.next(now), None, "seed {seed}");
        }
    }

    #[test]
    fn restarts_before_the_window_are_forgiven() {
        let now = Instant::now();
        let mut budget = RestartBudget::new(policy(), 7);
        while budget.next(now).is_some() {}
        let later = now + Duration::from_secs(61);
        let pause = budget.next(later).expect("the window has passed");
        assert!(pause <= Duration::from_millis(100), "the pause starts small again: {pause:?}");
    }

    #[test]
    fn one_seed_gives_the_same_pauses() {
        let now = Instant::now();
        let pauses = |seed| {
            let mut budget = RestartBudget::new(policy(), seed);
            std::iter::from_fn(|| budget.next(now)).collect::<Vec<_>>()
        };
        assert_eq!(pauses(3), pauses(3));
        assert_ne!(pauses(3), pauses(4));
    }

    #[test]
    fn a_huge_budget_does_not_overflow_the_pause() {
        let now = Instant::now();
        let mut budget = RestartBudget::new(RestartPolicy { max_restarts: 100, ..policy() }, 1);
        let last = std::iter::from_fn(|| budget.next(now)).last().expect("100 restarts");
        assert!(last <= Duration::from_millis(300), "{last:?}");
    }

    #[test]
    fn mistakes_are_named_with_their_fix() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let plain = folder.path().join("plain.txt");
        std::fs::write(&plain, "no program").expect("writes");
        let long = "x".repeat(TEXT_BYTES_MAX);
        let cases: Vec<(ChildSpec, &[&str])> = vec![
            (ChildSpec::new("math", "no-such-program-here"), &["math", "no-such-program-here", "looked in", "install"]),
            (ChildSpec::new("math", "/no/such/program"), &["/no/such/program", "not found"]),
            (ChildSpec::new("math", &plain), &["plain.txt", "chmod +x"]),
            (ChildSpec::new("math", folder.path()), &["a directory, not a program"]),
            (ChildSpec::new("math", "sh").cwd("/no/such/folder"), &["/no/such/folder", "correct `cwd`"]),
            (ChildSpec::new("math", "sh").cwd(&plain), &["plain.txt", "not a directory"]),
            (ChildSpec::new("math", "sh").env("BIG", long.clone()), &["variable BIG", "131071", "in a file"]),
            (ChildSpec::new("math", "sh").arg(long), &["argument 1", "131071"]),
            (ChildSpec::new("math", "sh").env("A=B", "1"), &["A=B", "rename"]),
            (ChildSpec::new("math", "sh").env("A", "\0"), &["variable A", "zero byte"]),
            (ChildSpec::new("math", "sh").arg("a\0b"), &["argument 1", "zero byte"]),
            (ChildSpec::new("ma\nth", "sh"), &["its name", "control characters"]),
            (ChildSpec::new("", "sh"), &["its name"]),
            (ChildSpec::new("math", ""), &["its program", "empty"]),
        ];
        for (spec, expected) in cases {
            let text = spec.resolve().expect_err("a mistake").to_string();
            for word in expected {
                assert!(text.contains(word), "{word:?} missing in: {text}");
            }
        }
    }

    #[test]
    fn a_relative_program_counts_from_the_working_directory_and_path_from_the_child() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let link = folder.path().join("tool");
        std::os::unix::fs::symlink("/bin/sh", &link).expect("links");
        let relative = ChildSpec::new("math", "./tool").cwd(folder.path()).resolve().expect("found");
        assert!(relative.ends_with("tool") && relative.is_absolute(), "the link itself: {}", relative.display());
        let searched = ChildSpec::new("math", "tool").env("PATH", folder.path()).resolve().expect("found");
        assert_eq!(searched, link);
    }
}

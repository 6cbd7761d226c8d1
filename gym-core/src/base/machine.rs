//! This machine: its name, its folder for temporary files, and the limit on file descriptors. Each connection needs one, and many systems start programs with 1,024.

use std::error::Error;
use std::ffi::OsString;
use std::io;
use std::path::PathBuf;

use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Returns the name of this machine; `localhost` if it has none.
#[must_use]
pub fn host_name() -> String {
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    if name.is_empty() { "localhost".to_owned() } else { name }
}

/// Returns the folder for temporary files: that of the variable `TMPDIR`, as an absolute path, or `/tmp` if the variable is empty or not set, or its
/// path has more than `bytes_max` bytes. The path of a Unix socket has at most 107 (unix(7)).
#[must_use]
pub fn temporary_folder(bytes_max: usize) -> PathBuf {
    chosen_folder(std::env::var_os("TMPDIR"), bytes_max)
}

fn chosen_folder(named: Option<OsString>, bytes_max: usize) -> PathBuf {
    // Other processes, which start elsewhere, get paths below it.
    let absolute = named.filter(|named| !named.is_empty()).and_then(|named| std::path::absolute(named).ok());
    absolute.filter(|path| path.as_os_str().len() <= bytes_max).unwrap_or_else(|| PathBuf::from("/tmp"))
}

/// Raises the soft limit on file descriptors to the hard limit, and returns the new soft limit. A failure is logged at
/// debug level.
pub fn raise_descriptors() -> u64 {
    let limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum
        && let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum })
    {
        tracing::debug!(%error, ?limit, "limit on file descriptors not raised");
    }
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// Returns the threads of a runtime: those of the variable `TOKIO_WORKER_THREADS`, or one for each core. tokio's own default panics if the variable
/// is empty, as compose files write `VAR: ${VAR:-}`.
#[must_use]
pub fn runtime_threads() -> usize {
    let wanted = std::env::var("TOKIO_WORKER_THREADS").ok().and_then(|threads| threads.parse().ok());
    wanted.filter(|threads| *threads > 0).unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from))
}

/// Returns `true` if an error, or one of its causes, is that this process or this machine has no file descriptor left (`EMFILE`, `ENFILE`).
#[must_use]
pub fn is_out_of_descriptors(error: &(dyn Error + 'static)) -> bool {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(error) = error.downcast_ref::<io::Error>() {
            if matches!(Errno::from_io_error(error), Some(Errno::MFILE | Errno::NFILE)) {
                return true;
            }
            // The source of an I/O error is that of the error in it, not this error itself.
            next = error.get_ref().map(|inner| inner as &(dyn Error + 'static));
        } else {
            next = error.source();
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn temporary_files_have_an_absolute_short_path_whatever_the_variable_is() {
        let chosen = |named: Option<&str>| chosen_folder(named.map(OsString::from), 20);
        let here = std::env::current_dir().unwrap().join("jobs");
        for (named, folder) in [(None, "/tmp"), (Some(""), "/tmp"), (Some("/scratch/7"), "/scratch/7")] {
            assert_eq!(chosen(named), PathBuf::from(folder), "{named:?}");
        }
        assert_eq!(chosen(Some("/scratch/slurm_jobdir_7")), PathBuf::from("/tmp"));
        assert_eq!(chosen_folder(Some("jobs".into()), usize::MAX), here);
    }
}

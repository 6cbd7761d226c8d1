//! The limit on file descriptors. Each connection needs one, and many systems start programs with 1,024.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

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

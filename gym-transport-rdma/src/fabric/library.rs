//! UCX, opened with settings that it survives, and the reasons where it cannot be.

use crate::fabric::options::FabricError;
use crate::machine::{Live, Machine};
use crate::sys::{self, Library, LoadOptions};
use crate::tuning;
use crate::ucx::Status;

/// Loads UCX, unless it cannot read a setting: 1.13 dies of some values (signal 11), in whichever process reads them.
///
/// # Errors
/// The setting, or why the library cannot be loaded.
pub(crate) fn load(options: &LoadOptions) -> Result<&'static Library, FabricError> {
    if let Some(setting) = tuning::unreadable(&Live::new()) {
        return Err(FabricError::Setting(setting));
    }
    Ok(sys::load(options)?)
}

/// Returns `UCX_NET_DEVICES` for a machine with so many interfaces that UCX would abort the process; nothing on others, or where
/// a setting names devices.
pub(crate) fn bounded(settings: &[(String, String)]) -> Option<(String, String)> {
    const NAME: &str = "NET_DEVICES";
    if settings.iter().any(|(name, _)| name == NAME) {
        return None;
    }
    let devices = tuning::devices_of_crowd(&Live::new())?;
    tracing::warn!(devices, "ucx is kept to some devices, because this machine has more than it can take");
    Some((NAME.to_owned(), devices))
}

/// Returns the reason of a refusal, with what UCX leaves out.
pub(crate) fn refused((what, status): (String, Status)) -> FabricError {
    let status = explained(&what, status.to_string(), &Live::new());
    FabricError::Ucx { what, status }
}

/// A worker has its queues in `/dev/shm`, and UCX does not say so when they do not fit.
fn explained(what: &str, status: String, machine: &dyn Machine) -> String {
    let of_memory = ["resources", "memory"].iter().any(|word| status.to_lowercase().contains(word));
    if what != "open a worker" || !of_memory {
        return status;
    }
    let place = match machine.space("/dev/shm") {
        Ok(space) => {
            format!("/dev/shm has {}, of which {} are free", tuning::size(space.total), tuning::size(space.free))
        }
        Err(_) => "/dev/shm is not there, or cannot be read".to_owned(),
    };
    format!("{status}; its queues are in shared memory: {place}; fix: {}", tuning::MORE_SHARED_MEMORY)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::Folder;

    #[test]
    fn a_worker_that_does_not_fit_names_shared_memory_and_the_remedy() {
        let root = tempfile::tempdir().expect("folder");
        std::fs::create_dir_all(root.path().join("dev/shm")).expect("folders");
        std::fs::create_dir_all(root.path().join("proc/self")).expect("folders");
        let mounts = "shm /dev/shm tmpfs rw,size=8g 0 0\nshm /dev/shm tmpfs rw,size=64m 0 0\n";
        std::fs::write(root.path().join("proc/self/mounts"), mounts).expect("writes");
        let machine = Folder::new(root.path());
        let text = explained("open a worker", "No resources (UCX status -2)".to_owned(), &machine);
        assert!(
            text.contains("/dev/shm has 64 MiB, of which 64 MiB are free; fix: ") && text.contains("--shm-size=8g"),
            "{text}"
        );
        assert_eq!(explained("start UCX with", "No memory".to_owned(), &machine), "No memory");
        assert_eq!(explained("open a worker", "Busy".to_owned(), &machine), "Busy");
    }
}

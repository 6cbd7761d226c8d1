//! Listen addresses of worker processes: a Unix socket in a directory that only this user can enter, TCP, or UCX.

use std::fs::File;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use gym_client::transport::Transports;
use gym_core::base::{is_out_of_descriptors, temporary_folder};
use gym_core::group::Rank;
use gym_core::transport::{ListenOptions, Listener, TransportPolicy};
use gym_core::{Code, Error, Handler, Incarnation, Result};
use serde::{Deserialize, Serialize};

/// The listen address and the transports of one worker process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ListenAddress {
    transports: Vec<String>,
    host: Option<String>,
    socket: Option<PathBuf>,
}

/// The listen addresses of a group's workers.
#[derive(Debug)]
pub(crate) struct ListenAddresses {
    transports: Vec<String>,
    host: Option<String>,
    directory: Option<SocketDirectory>,
}

impl ListenAddresses {
    /// Creates the listen addresses of a group on this machine: at `host`, or at Unix sockets. Transports whose peers connect over
    /// another transport first need a host.
    pub(crate) fn open(host: Option<&str>, transports: &Transports) -> Result<Self> {
        let needs_host = !transports.meets_over().is_empty();
        let host = host.or(needs_host.then_some("127.0.0.1")).map(str::to_owned);
        let directory = if host.is_some() {
            None
        } else {
            let parent = temporary_folder(PARENT_BYTES_MAX);
            Some(SocketDirectory::create(&parent).map_err(|error| no_folder(&parent, error))?)
        };
        Ok(Self { transports: allowed_names(transports), host, directory })
    }

    /// Returns the address of an incarnation. Each incarnation has its own, so that a caller of an old one cannot reach a new one.
    pub(crate) fn of(&self, rank: Rank, incarnation: Incarnation) -> ListenAddress {
        let socket = self.directory.as_ref().map(|directory| directory.path().join(format!("{rank}.{incarnation}")));
        ListenAddress { transports: self.transports.clone(), host: self.host.clone(), socket }
    }
}

impl ListenAddress {
    /// Returns the address at which the same worker listens for heartbeats: over the transports that need no configuration.
    pub(crate) fn for_control(&self, transports: &Transports) -> Self {
        let transports = transports.clone().with_policy(TransportPolicy::unconfigured());
        let socket = self.socket.as_ref().map(|socket| socket.with_added_extension(CONTROL_EXTENSION));
        Self { transports: allowed_names(&transports), host: self.host.clone(), socket }
    }

    /// Returns the transports of this program, restricted to those of this address: for listening at it, and for connecting from it to addresses like it.
    pub(crate) fn scoped(&self, transports: &Transports) -> Result<Transports> {
        let policy = TransportPolicy::named(self.transports.iter().cloned())?;
        Ok(transports.scoped(&policy, self.host.as_deref().and_then(|host| host.parse().ok())))
    }

    /// Listens at this address over [scoped](Self::scoped) transports. Returns the handler to serve: `handler`, or `handler` behind
    /// the routes that peers need to connect.
    pub(crate) async fn open(
        &self,
        transports: &Transports,
        handler: Arc<dyn Handler>,
    ) -> Result<(Box<dyn Listener>, Arc<dyn Handler>)> {
        let mut options = ListenOptions::default();
        if let Some(host) = &self.host {
            options = options.at(host.clone(), 0);
        }
        if let Some(socket) = &self.socket {
            options = options.socket(socket.clone());
        }
        transports.listen(options, handler, &[]).await
    }
}

fn allowed_names(transports: &Transports) -> Vec<String> {
    let allowed = transports.known().into_iter().filter(|transport| transports.policy().allows(*transport));
    allowed.map(|transport| transport.as_str().to_owned()).collect()
}

/// A directory that only this user can enter. Dropping it removes it with its contents. If a controller was killed, the next one
/// removes its directory. The lock was released with the process, even if the process ID is reused or has another namespace.
#[derive(Debug)]
pub(crate) struct SocketDirectory {
    path: PathBuf,
    /// Locked until this is dropped.
    _held: File,
}

fn no_folder(parent: &Path, error: io::Error) -> Error {
    let refusal = match is_out_of_descriptors(&error) {
        true => {
            let text = "too many open files\n  fix: raise the limit (`ulimit -n`)";
            Error::not_started(Code::ResourceExhausted, text)
        }
        false => Error::internal(
            "no folder for the workers' sockets can be made here\n  fix: set TMPDIR to a folder that can be written to",
        ),
    };
    refusal.about(parent.display().to_string()).caused_by(error)
}

/// Prefix of the names of such directories.
const PREFIX: &str = "gym-workers-";
/// Distinguishes the socket for heartbeats from that for calls.
const CONTROL_EXTENSION: &str = "c";
/// The path of a socket has at most 107 bytes. Below the folder, it has the directory's random name, and a rank with its incarnation and an extension.
const PARENT_BYTES_MAX: usize = 107 - (1 + PREFIX.len() + 16) - (1 + 10 + 1 + 20 + 1 + CONTROL_EXTENSION.len());

impl SocketDirectory {
    fn create(parent: &Path) -> io::Result<Self> {
        sweep(parent);
        const SWEPT: [io::ErrorKind; 3] =
            [io::ErrorKind::AlreadyExists, io::ErrorKind::NotFound, io::ErrorKind::WouldBlock];
        // A missing parent directory causes the same error at each attempt.
        let mut refused = None;
        // If another process has created the directory on purpose, a few further names are drawn.
        for _ in 0..16 {
            let path = parent.join(format!("{PREFIX}{:016x}", fastrand::u64(..)));
            match std::fs::DirBuilder::new().mode(0o700).create(&path).and_then(|()| lock_directory(&path)) {
                Ok(held) if is_at(&held, &path) => return Ok(Self { path, _held: held }),
                // Another controller removed the directory before it was locked, or is about to remove it.
                Ok(_) => {}
                Err(error) if SWEPT.contains(&error.kind()) => refused = Some(error),
                Err(error) => return Err(error),
            }
        }
        Err(refused.unwrap_or_else(|| io::ErrorKind::AlreadyExists.into()))
    }

    fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for SocketDirectory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

fn lock_directory(directory: &Path) -> io::Result<File> {
    let file = File::open(directory)?;
    file.try_lock()?;
    Ok(file)
}

fn is_at(file: &File, path: &Path) -> bool {
    let place = |metadata: std::fs::Metadata| (metadata.dev(), metadata.ino());
    let held = file.metadata().map(place).ok();
    held.is_some() && held == std::fs::metadata(path).map(place).ok()
}

/// Removes the directories of controllers that were killed. A directory that cannot be opened or removed belongs to another user.
fn sweep(parent: &Path) {
    let Ok(entries) = std::fs::read_dir(parent) else { return };
    for entry in entries.filter_map(Result::ok) {
        if entry.file_name().to_string_lossy().starts_with(PREFIX)
            && let Ok(_held) = lock_directory(&entry.path())
        {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn sockets_lie_in_a_folder_of_ones_own_that_goes_with_the_group() {
        let transports = Transports::standard().with_policy(TransportPolicy::unconfigured());
        let addresses = ListenAddresses::open(None, &transports).expect("a folder");
        let first = addresses.of(3, Incarnation(1)).socket.expect("a path");
        assert_ne!(Some(&first), addresses.of(3, Incarnation(2)).socket.as_ref());
        let folder = first.parent().expect("a folder").to_owned();
        assert_eq!(std::fs::metadata(&folder).expect("is there").permissions().mode() & 0o777, 0o700);
        std::fs::write(&first, "").expect("writes");
        drop(addresses);
        assert!(!folder.exists());
    }

    #[cfg(feature = "rdma")]
    #[test]
    fn the_groups_configuration_decides_whether_ucx_is_listened_on_besides() {
        let address = |policy: TransportPolicy| {
            let transports = Transports::standard().with_policy(policy);
            ListenAddresses::open(None, &transports).expect("addresses").of(0, Incarnation(1))
        };
        let required = address(TransportPolicy::auto().require("rdma"));
        assert_eq!(
            (required.transports, required.host.as_deref()),
            (["mem", "shm", "rdma"].map(str::to_owned).to_vec(), Some("127.0.0.1"))
        );
        let unconfigured = address(TransportPolicy::unconfigured());
        assert_eq!((unconfigured.transports, unconfigured.host), (["mem", "http"].map(str::to_owned).to_vec(), None));
    }

    #[test]
    fn folders_of_the_dead_are_removed_and_those_of_the_living_stay() {
        let parent = tempfile::tempdir().expect("a folder");
        let of_the_dead = parent.path().join(format!("{PREFIX}0123456789abcdef"));
        let of_somebody_else = parent.path().join("gym-0123456789abcdef");
        for folder in [&of_the_dead, &of_somebody_else] {
            std::fs::create_dir(folder).expect("makes");
            std::fs::write(folder.join("0.1"), "").expect("writes");
        }
        let living = SocketDirectory::create(parent.path()).expect("a folder");
        let next = SocketDirectory::create(parent.path()).expect("another");
        assert!(!of_the_dead.exists());
        assert!(of_somebody_else.exists() && living.path().exists() && next.path().exists());
    }
}

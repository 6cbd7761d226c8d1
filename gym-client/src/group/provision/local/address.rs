//! How worker processes are reached: over a Unix socket in a folder that only this user can enter, over TCP, or by UCX.

use std::fs::File;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use std::sync::Arc;

use gym_core::group::Rank;
use gym_core::transport::{ListenOptions, Listener, Transport, TransportPolicy};
use gym_core::{Error, Handler, Incarnation, Result};
use serde::{Deserialize, Serialize};

use crate::transport::Transports;

/// Where one worker process listens, and by which transports.
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
    /// Those of a group on this machine: at `host`, or at sockets. What has to be met over HTTP needs a host.
    pub(crate) fn open(host: Option<&str>, policy: &TransportPolicy, known: &[Transport]) -> Result<Self> {
        let allowed = known.iter().filter(|transport| policy.allows(**transport));
        let transports = allowed.map(|transport| transport.as_str().to_owned()).collect();
        let host = host.or(policy.uses_ucx().then_some("127.0.0.1")).map(str::to_owned);
        let directory = if host.is_some() {
            None
        } else {
            Some(SocketDirectory::create(&std::env::temp_dir()).map_err(|error| {
                Error::internal(
                    "cannot make a folder for the workers' sockets; set TMPDIR to one that can be written to",
                )
                .caused_by(error)
            })?)
        };
        Ok(Self { transports, host, directory })
    }

    /// Each incarnation has an address of its own, so that a caller of an old one cannot reach a new one.
    pub(crate) fn of(&self, rank: Rank, incarnation: Incarnation) -> ListenAddress {
        let socket = self.directory.as_ref().map(|directory| directory.path().join(format!("{rank}.{incarnation}")));
        ListenAddress { transports: self.transports.clone(), host: self.host.clone(), socket }
    }
}

impl ListenAddress {
    /// Listens at it by the transports of this program; what is to be served there is `handler`, or it with what they need before it.
    pub(crate) async fn open(
        &self,
        transports: &Transports,
        handler: Arc<dyn Handler>,
    ) -> Result<(Box<dyn Listener>, Arc<dyn Handler>)> {
        let policy = TransportPolicy::named(self.transports.iter().cloned())?;
        let transports = transports.scoped(&policy, self.host.as_deref().and_then(|host| host.parse().ok()));
        let mut options = ListenOptions::default();
        if let Some(host) = &self.host {
            options = options.at(host.clone(), 0);
        }
        if let Some(socket) = &self.socket {
            options = options.socket(socket.clone());
        }
        // Whoever has UCX meets over HTTP.
        let needed: &[Transport] = if policy.uses_ucx() { &[Transport::HTTP] } else { &[] };
        transports.listen(options, handler, needed).await
    }
}

/// A folder that only this user can enter; removed with all that is in it on drop. One of a controller that was killed goes when
/// the next one starts: its lock went with its process, whatever became of process ids and their namespaces meanwhile.
#[derive(Debug)]
pub(crate) struct SocketDirectory {
    path: PathBuf,
    /// Locked as long as this lives.
    _held: File,
}

/// How the names of such folders begin.
const PREFIX: &str = "gym-workers-";

impl SocketDirectory {
    fn create(parent: &Path) -> io::Result<Self> {
        sweep(parent);
        const SWEPT: [io::ErrorKind; 3] =
            [io::ErrorKind::AlreadyExists, io::ErrorKind::NotFound, io::ErrorKind::WouldBlock];
        // A parent that is not there says so too, each time.
        let mut refused = None;
        // A name that somebody took on purpose is drawn again, a few times.
        for _ in 0..16 {
            let path = parent.join(format!("{PREFIX}{:016x}", fastrand::u64(..)));
            match std::fs::DirBuilder::new().mode(0o700).create(&path).and_then(|()| lock_directory(&path)) {
                Ok(held) if is_at(&held, &path) => return Ok(Self { path, _held: held }),
                // Somebody swept it away before it was held, or is about to.
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

/// Removes what controllers left that nobody could ask to clean up. What cannot be opened or removed is another user's.
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

//! How worker processes are reached: over a Unix socket in a folder that only this user can enter, over TCP, or by UCX.

use std::fs::File;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use std::sync::Arc;

use gym_core::{Error, Handler, Incarnation, Ladder, Level, Listener, Rank, Result};
use serde::{Deserialize, Serialize};

/// How the workers of a group are reached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Listen {
    /// Framed connections over Unix sockets: the least latency between processes of one machine.
    #[default]
    Unix,
    /// HTTP and framed connections on a free port of the loopback interface.
    Tcp,
    /// The same, and UCX, whose shared memory is the fastest way between processes. A group whose configuration names a
    /// `transport` with UCX is reached so whatever stands here.
    Ucx,
}

/// What one worker process listens on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Door {
    Unix(PathBuf),
    Tcp,
    /// UCX besides, by these rungs.
    Ucx(Vec<Level>),
}

/// The doors of a group's workers.
#[derive(Debug)]
pub(crate) enum Doors {
    Unix(PrivateFolder),
    Tcp,
    Ucx(Vec<Level>),
}

impl Doors {
    /// `ladder` is that of the group's configuration, and comes first.
    pub(crate) fn open(listen: Listen, ladder: Option<&Ladder>) -> Result<Self> {
        if let Some(ladder) = ladder.filter(|ladder| ladder.uses_ucx()) {
            return Ok(Self::Ucx(Level::ALL.into_iter().filter(|level| ladder.allows(*level)).collect()));
        }
        match listen {
            // A configuration without UCX loads none.
            Listen::Ucx if ladder.is_some() => Ok(Self::Tcp),
            Listen::Unix => Ok(Self::Unix(PrivateFolder::create(&std::env::temp_dir()).map_err(|error| {
                Error::internal(
                    "cannot make a folder for the workers' sockets; set TMPDIR to one that can be written to",
                )
                .caused_by(error)
            })?)),
            Listen::Tcp => Ok(Self::Tcp),
            Listen::Ucx => Ok(Self::Ucx(Level::ALL.to_vec())),
        }
    }

    /// Each life has a door of its own: nobody can knock at an old one and meet the new one.
    pub(crate) fn of(&self, rank: Rank, incarnation: Incarnation) -> Door {
        match self {
            Self::Unix(folder) => Door::Unix(folder.path().join(format!("{rank}.{incarnation}"))),
            Self::Tcp => Door::Tcp,
            Self::Ucx(levels) => Door::Ucx(levels.clone()),
        }
    }
}

impl Door {
    /// Listens at it; what is to be served there is `handler`, as it is or with what UCX needs before it.
    ///
    /// # Errors
    /// The listener's own; `Unimplemented` when this program was built without the transport.
    pub(crate) async fn open(&self, handler: Arc<dyn Handler>) -> Result<(Box<dyn Listener>, Arc<dyn Handler>)> {
        let listener = self.listen()?;
        match self {
            Self::Unix(_) | Self::Tcp => Ok((listener, handler)),
            Self::Ucx(levels) => {
                let ladder = Ladder::of(levels.iter().copied())?;
                let loopback = std::net::Ipv4Addr::LOCALHOST.into();
                crate::Offer::new(&ladder, Some(loopback)).listen(listener, handler).await
            }
        }
    }

    #[cfg(feature = "http")]
    fn listen(&self) -> Result<Box<dyn Listener>> {
        use gym_transport_http::{FramesConfig, HttpConfig, HttpListener, UnixListener};
        match self {
            Self::Unix(path) => Ok(Box::new(UnixListener::bind(path, FramesConfig::default())?)),
            Self::Tcp | Self::Ucx(_) => {
                let loopback = (std::net::Ipv4Addr::LOCALHOST, 0).into();
                Ok(Box::new(HttpListener::bind(loopback, HttpConfig::default())?))
            }
        }
    }

    #[cfg(not(feature = "http"))]
    fn listen(&self) -> Result<Box<dyn Listener>> {
        let message =
            "this program was built without the feature `http` of gym-client, which worker processes listen with";
        Err(Error::not_started(gym_core::Code::Unimplemented, message))
    }
}

/// A folder that only this user can enter; removed with all that is in it on drop. One of a controller that was killed goes when
/// the next one starts: its lock went with its process, whatever became of process ids and their namespaces meanwhile.
#[derive(Debug)]
pub(crate) struct PrivateFolder {
    path: PathBuf,
    /// Locked as long as this lives.
    _held: File,
}

/// How the names of such folders begin.
const PREFIX: &str = "gym-workers-";

impl PrivateFolder {
    fn create(parent: &Path) -> io::Result<Self> {
        sweep(parent);
        const SWEPT: [io::ErrorKind; 3] =
            [io::ErrorKind::AlreadyExists, io::ErrorKind::NotFound, io::ErrorKind::WouldBlock];
        // A parent that is not there says so too, each time.
        let mut refused = None;
        // A name that somebody took on purpose is drawn again, a few times.
        for _ in 0..16 {
            let path = parent.join(format!("{PREFIX}{:016x}", fastrand::u64(..)));
            match std::fs::DirBuilder::new().mode(0o700).create(&path).and_then(|()| hold(&path)) {
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

impl Drop for PrivateFolder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

fn hold(folder: &Path) -> io::Result<File> {
    let file = File::open(folder)?;
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
            && let Ok(_held) = hold(&entry.path())
        {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn sockets_lie_in_a_folder_of_ones_own_that_goes_with_the_group() {
        let doors = Doors::open(Listen::Unix, None).expect("a folder");
        let Door::Unix(first) = doors.of(3, Incarnation(1)) else { panic!("a path") };
        assert_ne!(Door::Unix(first.clone()), doors.of(3, Incarnation(2)));
        let folder = first.parent().expect("a folder").to_owned();
        assert_eq!(std::fs::metadata(&folder).expect("is there").permissions().mode() & 0o777, 0o700);
        std::fs::write(&first, "").expect("writes");
        drop(doors);
        assert!(!folder.exists());
    }

    #[test]
    fn the_groups_configuration_decides_whether_ucx_is_listened_on_besides() {
        let doors = |ladder: &Ladder| Doors::open(Listen::Tcp, Some(ladder)).expect("doors");
        let required = Ladder::auto().require(Level::Rdma).expect("a ladder");
        let allowed = vec![Level::InProcess, Level::SharedMemory, Level::Rdma];
        assert_eq!(doors(&required).of(0, Incarnation(1)), Door::Ucx(allowed));
        assert_eq!(doors(&Ladder::without_ucx()).of(0, Incarnation(1)), Door::Tcp);
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
        let living = PrivateFolder::create(parent.path()).expect("a folder");
        let next = PrivateFolder::create(parent.path()).expect("another");
        assert!(!of_the_dead.exists());
        assert!(of_somebody_else.exists() && living.path().exists() && next.path().exists());
    }
}

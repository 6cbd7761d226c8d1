//! How worker processes are reached: over a Unix socket in a folder that only this user can enter, or over TCP.

use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use gym_core::{Error, Incarnation, Listener, Rank, Result};
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
}

/// What one worker process listens on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Door {
    Unix(PathBuf),
    Tcp,
}

/// The doors of a group's workers.
#[derive(Debug)]
pub(crate) enum Doors {
    Unix(PrivateFolder),
    Tcp,
}

impl Doors {
    pub(crate) fn open(listen: Listen) -> Result<Self> {
        match listen {
            Listen::Unix => Ok(Self::Unix(PrivateFolder::create().map_err(|error| {
                Error::internal(
                    "cannot make a folder for the workers' sockets; set TMPDIR to one that can be written to",
                )
                .caused_by(error)
            })?)),
            Listen::Tcp => Ok(Self::Tcp),
        }
    }

    /// Each life has a door of its own: nobody can knock at an old one and meet the new one.
    pub(crate) fn of(&self, rank: Rank, incarnation: Incarnation) -> Door {
        match self {
            Self::Unix(folder) => Door::Unix(folder.path().join(format!("{rank}.{incarnation}"))),
            Self::Tcp => Door::Tcp,
        }
    }
}

impl Door {
    /// Listens at it. Within a tokio runtime.
    ///
    /// # Errors
    /// The listener's own; `Unimplemented` when this program was built without the transport.
    #[cfg(feature = "http")]
    pub(crate) fn listen(&self) -> Result<Box<dyn Listener>> {
        use gym_transport_http::{FramesConfig, HttpConfig, HttpListener, UnixListener};
        match self {
            Self::Unix(path) => Ok(Box::new(UnixListener::bind(path, FramesConfig::default())?)),
            Self::Tcp => {
                let loopback = (std::net::Ipv4Addr::LOCALHOST, 0).into();
                Ok(Box::new(HttpListener::bind(loopback, HttpConfig::default())?))
            }
        }
    }

    #[cfg(not(feature = "http"))]
    pub(crate) fn listen(&self) -> Result<Box<dyn Listener>> {
        let message =
            "this program was built without the feature `http` of gym-client, which worker processes listen with";
        Err(Error::not_started(gym_core::Code::Unimplemented, message))
    }
}

/// A folder that only this user can enter; removed with all that is in it on drop. One of a controller that was killed stays.
#[derive(Debug)]
pub(crate) struct PrivateFolder(PathBuf);

impl PrivateFolder {
    fn create() -> io::Result<Self> {
        let mut refused = None;
        // A name that somebody took on purpose is drawn again, a few times.
        for _ in 0..16 {
            let path = std::env::temp_dir().join(format!("gym-{:016x}", fastrand::u64(..)));
            match std::fs::DirBuilder::new().mode(0o700).create(&path) {
                Ok(()) => return Ok(Self(path)),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => refused = Some(error),
                Err(error) => return Err(error),
            }
        }
        Err(refused.unwrap_or_else(|| io::ErrorKind::AlreadyExists.into()))
    }

    fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for PrivateFolder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn sockets_lie_in_a_folder_of_ones_own_that_goes_with_the_group() {
        let doors = Doors::open(Listen::Unix).expect("a folder");
        let Door::Unix(first) = doors.of(3, Incarnation(1)) else { panic!("a path") };
        assert_ne!(Door::Unix(first.clone()), doors.of(3, Incarnation(2)));
        let folder = first.parent().expect("a folder").to_owned();
        assert_eq!(std::fs::metadata(&folder).expect("is there").permissions().mode() & 0o777, 0o700);
        std::fs::write(&first, "").expect("writes");
        drop(doors);
        assert!(!folder.exists());
    }
}

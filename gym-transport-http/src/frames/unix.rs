//! Listening on a Unix socket, for processes of this machine and user.

use std::fmt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use async_trait::async_trait;
use gym_core::message::PeerInfo;
use gym_core::transport::{Incoming, Listener};
use gym_core::{CancelToken, Code, Endpoint, Error, Handler, Result};
use tokio::net::UnixStream;
use tokio::sync::Semaphore;
use tokio::time::sleep;

use crate::frames::UNIX_SCHEME;
use crate::frames::config::FramesConfig;
use crate::frames::connection::answering::{ListenerState, serve};
use crate::frames::connection::socket::Socket;
use crate::wire::socket::ACCEPT_RETRY_DELAY;

/// Tells apart the listeners that this process makes at the same time.
static DRAFTS: AtomicU32 = AtomicU32::new(0);

/// What the kernel takes for a socket's path, its final zero included.
const PATH_BYTES_MAX: usize = 108;

/// Accepts framed connections on a path.
///
/// The socket may be used by its owner alone (0600), from the moment at which it has its name. A file that a dead process left
/// behind is replaced; one that somebody listens on, or that is no socket, is not. The file is removed with the listener.
pub struct UnixListener {
    listener: tokio::net::UnixListener,
    path: PathBuf,
    /// Device and file number of our own socket.
    identity: (u64, u64),
    endpoints: [Endpoint; 1],
    state: ListenerState,
}

impl UnixListener {
    /// Listens on a path. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// `AlreadyExists` when somebody listens there or it is not a socket, `InvalidArgument` when no socket can have that
    /// path, else `Unavailable`.
    pub fn bind(path: impl Into<PathBuf>, config: FramesConfig) -> Result<Self> {
        let path = path.into();
        claim(path, config)
            .map_err(|(path, error)| error.about(format!("listen on {UNIX_SCHEME}://{}", path.display())))
    }
}

fn claim(path: PathBuf, config: FramesConfig) -> Result<UnixListener, (PathBuf, Error)> {
    match listen(&path) {
        Ok((listener, identity, endpoint)) => {
            let calls = Arc::new(Semaphore::new(Semaphore::MAX_PERMITS));
            Ok(UnixListener {
                listener,
                path,
                identity,
                endpoints: [endpoint],
                state: ListenerState::new(config, calls),
            })
        }
        Err(error) => Err((path, error)),
    }
}

fn listen(path: &Path) -> Result<(tokio::net::UnixListener, (u64, u64), Endpoint)> {
    let text = path.to_str().filter(|_| path.is_absolute()).ok_or_else(|| {
        Error::invalid("the path of a socket must be absolute and UTF-8: it is an endpoint's address")
    })?;
    let endpoint = Endpoint::parse(&format!("{UNIX_SCHEME}://{text}"))?;
    // Under another name first: whoever can see the final name finds its permissions set.
    let draft = path.with_file_name(format!(".{}-{}", std::process::id(), DRAFTS.fetch_add(1, Relaxed)));
    if text.len().max(draft.as_os_str().len()) >= PATH_BYTES_MAX {
        return Err(Error::invalid(format!(
            "a socket's path has fewer than {PATH_BYTES_MAX} bytes; choose a shorter folder"
        )));
    }
    let cannot = |error: std::io::Error| Error::not_started(Code::Unavailable, "cannot listen").caused_by(error);
    let _ = std::fs::remove_file(&draft);
    let listener = tokio::net::UnixListener::bind(&draft).map_err(cannot)?;
    let named = std::fs::set_permissions(&draft, std::fs::Permissions::from_mode(0o600))
        .and_then(|()| std::fs::symlink_metadata(&draft))
        .map_err(cannot)
        .and_then(|metadata| publish(&draft, path).map(|()| (metadata.dev(), metadata.ino())));
    let _ = std::fs::remove_file(&draft);
    Ok((listener, named?, endpoint))
}

/// Gives the draft its final name, unless that is in use.
fn publish(draft: &Path, path: &Path) -> Result<()> {
    let cannot = |error: std::io::Error| Error::not_started(Code::Unavailable, "cannot listen").caused_by(error);
    match std::fs::hard_link(draft, path) {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
        other => return other.map_err(cannot),
    }
    let taken = |said: &'static str| Error::not_started(Code::AlreadyExists, said);
    let there = std::fs::symlink_metadata(path).map_err(cannot)?;
    if !there.file_type().is_socket() {
        return Err(taken("there is a file that is not a socket; remove it, or choose another path"));
    }
    match std::os::unix::net::UnixStream::connect(path) {
        // Left behind by a process that is gone.
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => {
            std::fs::rename(draft, path).map_err(cannot)
        }
        Ok(_) => Err(taken("somebody listens there")),
        Err(error) => Err(taken("there is a socket that cannot be asked whether it is in use").caused_by(error)),
    }
}

impl fmt::Debug for UnixListener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "UnixListener({})", self.path.display())
    }
}

impl Drop for UnixListener {
    fn drop(&mut self) {
        // Another process may have taken the name over.
        let ours = std::fs::symlink_metadata(&self.path).is_ok_and(|there| (there.dev(), there.ino()) == self.identity);
        if ours && let Err(error) = std::fs::remove_file(&self.path) {
            tracing::debug!(%error, path = %self.path.display(), "the socket's file stays");
        }
    }
}

#[async_trait]
impl Listener for UnixListener {
    fn endpoints(&self) -> &[Endpoint] {
        &self.endpoints
    }

    async fn accept(&mut self) -> Result<Box<dyn Incoming>> {
        loop {
            match self.listener.accept().await {
                Ok((stream, _)) => {
                    let pid = stream.peer_cred().ok().and_then(|cred| cred.pid());
                    let address = pid.map_or_else(|| "local process".to_owned(), |pid| format!("process {pid}"));
                    let peer = PeerInfo { address: address.into() };
                    return Ok(Box::new(UnixIncoming { stream, peer, state: self.state.clone() }));
                }
                Err(error) => {
                    // Out of descriptors or memory, or the peer gave up: neither ends the listener.
                    tracing::warn!(%error, "no new connections for {ACCEPT_RETRY_DELAY:?}");
                    sleep(ACCEPT_RETRY_DELAY).await;
                }
            }
        }
    }
}

/// One accepted local process.
#[derive(Debug)]
pub struct UnixIncoming {
    stream: UnixStream,
    peer: PeerInfo,
    state: ListenerState,
}

#[async_trait]
impl Incoming for UnixIncoming {
    fn peer(&self) -> &PeerInfo {
        &self.peer
    }

    async fn serve(self: Box<Self>, handler: Arc<dyn Handler>, drain: CancelToken) -> Result<()> {
        let about = format!("serve {}", self.peer.address);
        serve(Socket::Unix(self.stream), &[], self.state, handler, self.peer, drain)
            .await
            .map_err(|error| error.about(about))
    }
}

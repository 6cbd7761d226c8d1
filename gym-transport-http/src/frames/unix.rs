//! Listens on a Unix socket, for processes of this machine and user.

use std::fmt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use async_trait::async_trait;
use bytes::Bytes;
use gym_core::message::PeerInfo;
use gym_core::transport::{Incoming, Listener};
use gym_core::{CancelToken, Code, Endpoint, Error, Handler, Result};
use tokio::net::UnixStream;
use tokio::time::sleep;

use crate::frames::UNIX_SCHEME;
use crate::frames::config::FramesConfig;
use crate::frames::connection::socket::Socket;
use crate::frames::stream::{ByteStream, FramedServer};
use crate::wire::socket::ACCEPT_RETRY_INTERVAL;

/// Distinguishes the listeners that this process creates at the same time.
static DRAFTS: AtomicU32 = AtomicU32::new(0);

/// The kernel's limit for the path of a socket, including its final zero.
const PATH_BYTES_MAX: usize = 108;

/// Accepts framed connections on a path.
///
/// Only the owner can use the socket (0600), from the moment at which it has its name. A socket file that a dead process left
/// behind is replaced. A socket on which a process listens, or a file that is not a socket, is not replaced. Dropping the listener
/// removes the file.
pub struct UnixListener {
    listener: tokio::net::UnixListener,
    path: PathBuf,
    /// Device and file number of our own socket.
    identity: (u64, u64),
    endpoints: [Endpoint; 1],
    server: FramedServer,
}

impl UnixListener {
    /// Listens on a path. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// `AlreadyExists` if a process listens there or the file is not a socket; `InvalidArgument` if a socket cannot have that path;
    /// otherwise `Unavailable`.
    pub fn bind(path: impl Into<PathBuf>, config: FramesConfig) -> Result<Self> {
        let path = path.into();
        claim(path, config)
            .map_err(|(path, error)| error.about(format!("listen on {UNIX_SCHEME}://{}", path.display())))
    }
}

fn claim(path: PathBuf, config: FramesConfig) -> Result<UnixListener, (PathBuf, Error)> {
    match listen(&path) {
        Ok((listener, identity, endpoint)) => {
            Ok(UnixListener { listener, path, identity, endpoints: [endpoint], server: FramedServer::new(config) })
        }
        Err(error) => Err((path, error)),
    }
}

fn listen(path: &Path) -> Result<(tokio::net::UnixListener, (u64, u64), Endpoint)> {
    let text = path.to_str().filter(|_| path.is_absolute()).ok_or_else(|| {
        Error::invalid("the path of a socket must be absolute and UTF-8: it is an endpoint's address")
    })?;
    let endpoint = Endpoint::parse(&format!("{UNIX_SCHEME}://{text}"))?;
    // Created under another name first, so that the permissions are set before the final name exists.
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

/// Gives the draft its final name, unless that name is in use.
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
        // Left behind by a process that has exited.
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
        // Another process may have taken over the name.
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
                    return Ok(Box::new(UnixIncoming { stream, peer, server: self.server.clone() }));
                }
                Err(error) => {
                    // The process has no descriptors or memory left, or the peer disconnected: neither ends the listener.
                    tracing::warn!(%error, "no new connections for {ACCEPT_RETRY_INTERVAL:?}");
                    sleep(ACCEPT_RETRY_INTERVAL).await;
                }
            }
        }
    }
}

/// An accepted connection from a local process.
#[derive(Debug)]
pub struct UnixIncoming {
    stream: UnixStream,
    peer: PeerInfo,
    server: FramedServer,
}

#[async_trait]
impl Incoming for UnixIncoming {
    fn peer(&self) -> &PeerInfo {
        &self.peer
    }

    async fn serve(self: Box<Self>, handler: Arc<dyn Handler>, drain: CancelToken) -> Result<()> {
        let stream = ByteStream::socket(Socket::Unix(self.stream), Bytes::new());
        self.server.serve(stream, handler, self.peer, drain).await
    }
}

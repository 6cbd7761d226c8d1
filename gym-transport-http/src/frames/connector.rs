//! Opens framed connections.

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use gym_core::transport::mux::MuxLink;
use gym_core::transport::{ConnectOptions, Connector, PathInfo};
use gym_core::{CallContext, Channel, Code, Endpoint, Error, Execution, Result};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

use crate::frames::buffers::ReceiveBufferPool;
use crate::frames::config::FramesConfig;
use crate::frames::connection::calling::open;
use crate::frames::connection::send_queue::FrameSendQueue;
use crate::frames::connection::socket::Socket;
use crate::frames::{FRAMES_SCHEME, UNIX_SCHEME};
use crate::wire::address::parse;
use crate::wire::head::{HEAD_BYTES_MAX, HEADERS_MAX};
use crate::wire::headers::is_value;
use crate::wire::socket::connect;

/// What an HTTP connection is upgraded to.
pub(crate) const UPGRADE: &str = "gym-frames/1";
/// Where the upgrade is asked for. Any route does; this one tells a log reader what it was.
pub(crate) const ROUTE: &str = "/.gym/frames";
const SWITCHING_PROTOCOLS: u16 = 101;

/// Opens channels to `http+frames://host:port` or `unix+frames:///path`. Each has one connection of its own, opened at once.
///
/// | what happens | the caller gets |
/// |---|---|
/// | cannot connect, no HTTP or no greeting in time | `Unavailable`, not started |
/// | the peer speaks HTTP but takes no frames | `Unimplemented`, not started |
/// | no room by the deadline | `DeadlineExceeded`, not started |
/// | the message exceeds a limit of the peer | `ResourceExhausted`, not started |
/// | the connection breaks, or the peer is silent too long | `Unavailable`; unknown for calls under way |
/// | what comes back is not what a peer of ours sends | `DataLoss`, unknown |
/// | the reply is larger than `reply_bytes_max` | `ResourceExhausted`, finished |
/// | any complete reply, 4xx and 5xx too | that reply |
pub struct FramesConnector {
    scheme: &'static str,
    config: FramesConfig,
    pool: Arc<ReceiveBufferPool>,
}

impl FramesConnector {
    /// Over TCP, through an HTTP listener's port.
    #[must_use]
    pub fn tcp(config: FramesConfig) -> Self {
        Self::new(FRAMES_SCHEME, config)
    }

    /// Over Unix sockets.
    #[must_use]
    pub fn unix(config: FramesConfig) -> Self {
        Self::new(UNIX_SCHEME, config)
    }

    fn new(scheme: &'static str, config: FramesConfig) -> Self {
        let pool = ReceiveBufferPool::new(config.pool_bytes_max);
        Self { scheme, config, pool }
    }

    async fn open(&self, to: &Endpoint) -> Result<MuxLink<FrameSendQueue>> {
        let path = PathInfo::new(self.scheme, to.address(), true);
        let (socket, already) = if self.scheme == UNIX_SCHEME {
            let stream = UnixStream::connect(to.address()).await.map_err(refused)?;
            (Socket::Unix(stream), Bytes::new())
        } else {
            upgrade(to).await?
        };
        open(socket, &already, path, &self.config, Arc::clone(&self.pool)).await
    }
}

impl fmt::Debug for FramesConnector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FramesConnector({})", self.scheme)
    }
}

#[async_trait]
impl Connector for FramesConnector {
    fn scheme(&self) -> &'static str {
        self.scheme
    }

    fn transports(&self) -> Vec<gym_core::transport::Transport> {
        vec![gym_core::transport::Transport::HTTP]
    }

    async fn connect(&self, cx: &CallContext, to: &Endpoint, options: &ConnectOptions) -> Result<Channel> {
        cx.check()?;
        if to.scheme() != self.scheme {
            return Err(Error::invalid(format!("`{to}` is not an endpoint of {}", self.scheme)));
        }
        let patience = self.config.connect_timeout;
        let opened = cx.bound(Execution::NotStarted, async {
            tokio::time::timeout(patience, self.open(to))
                .await
                .map_err(|_| Error::not_started(Code::Unavailable, format!("no answer within {patience:?}")))
                .flatten()
        });
        // Nothing of a call has left, whatever went wrong.
        let link = opened
            .await
            .map_err(|error| error.with_execution(Execution::NotStarted).about(format!("connect to {to}")))?;
        Ok(Channel::new(link).fenced(options.incarnation))
    }
}

fn refused(error: std::io::Error) -> Error {
    Error::not_started(Code::Unavailable, "cannot connect").caused_by(error)
}

/// Asks an HTTP server for frames; the socket, and what came behind its consent.
async fn upgrade(to: &Endpoint) -> Result<(Socket, Bytes)> {
    let (address, _) = parse(to, FRAMES_SCHEME)?;
    let host = to.address();
    if !is_value(host) {
        return Err(Error::invalid(format!("`{to}` has a host that no HTTP request can name")));
    }
    let mut stream = connect(&address).await?;
    let question = format!("GET {ROUTE} HTTP/1.1\r\nhost: {host}\r\nconnection: upgrade\r\nupgrade: {UPGRADE}\r\n\r\n");
    stream.write_all(question.as_bytes()).await.map_err(broken)?;
    let mut answer = BytesMut::new();
    let (status, length) = loop {
        if let Some(head) = answer_head(&answer)? {
            break head;
        }
        if answer.len() >= HEAD_BYTES_MAX || stream.read_buf(&mut answer).await.map_err(broken)? == 0 {
            return Err(Error::not_started(Code::Unavailable, "the peer's answer to the upgrade has no end"));
        }
    };
    if status != SWITCHING_PROTOCOLS {
        return Err(Error::not_started(
            Code::Unimplemented,
            format!("the server there takes no frames: it answered {status}; use its http endpoint"),
        ));
    }
    Ok((Socket::Tcp(stream), answer.split_off(length).freeze()))
}

/// Status and length of an answer's head, once it is all there.
fn answer_head(bytes: &[u8]) -> Result<Option<(u16, usize)>> {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut head = httparse::Response::new(&mut headers);
    let no_http =
        |error| Error::not_started(Code::Unavailable, format!("the peer does not answer as an HTTP server: {error}"));
    Ok(match head.parse(bytes).map_err(no_http)? {
        httparse::Status::Complete(length) => head.code.map(|status| (status, length)),
        httparse::Status::Partial => None,
    })
}

fn broken(error: std::io::Error) -> Error {
    Error::not_started(Code::Unavailable, "the connection broke during the upgrade").caused_by(error)
}

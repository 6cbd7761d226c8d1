//! Opens framed connections.

use std::fmt;
use std::pin::pin;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use gym_core::{CallContext, Channel, Code, ConnectOptions, Connector, Endpoint, Error, Execution, PathInfo, Result};
use http::header::{CONNECTION, HOST, HeaderValue, UPGRADE as UPGRADE_HEADER};
use http::{Method, StatusCode};
use hyper::client::conn::http1::Builder;
use hyper_util::rt::TokioIo;
use tokio::net::{TcpStream, UnixStream};

use super::config::FramesConfig;
use super::link::FramesLink;
use super::pool::LandingPool;
use super::socket::Socket;
use super::{FRAMES_SCHEME, UNIX_SCHEME};
use crate::body::RopeBody;
use crate::connector::parse;
use crate::pool::connect_stream;

/// What an HTTP connection is upgraded to.
pub(crate) const UPGRADE: &str = "gym-frames/1";
/// Where the upgrade is asked for. Any route does; this one tells a log reader what it was.
pub(crate) const ROUTE: &str = "/.gym/frames";

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
    pool: Arc<LandingPool>,
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
        let pool = LandingPool::new(config.pool_bytes_max);
        Self { scheme, config, pool }
    }

    async fn open(&self, to: &Endpoint) -> Result<FramesLink> {
        let path = PathInfo::new(self.scheme, to.address(), true);
        let (socket, already) = if self.scheme == UNIX_SCHEME {
            let stream = UnixStream::connect(to.address()).await.map_err(|error| refused(error))?;
            (Socket::Unix(stream), Bytes::new())
        } else {
            upgrade(to).await?
        };
        FramesLink::open(socket, &already, path, &self.config, Arc::clone(&self.pool)).await
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
    let host = HeaderValue::from_str(to.address())
        .map_err(|_| Error::invalid(format!("`{to}` has a host that no HTTP request can name")))?;
    let stream = connect_stream(&address).await?;
    let no_http = |error: hyper::Error| {
        Error::not_started(Code::Unavailable, "the peer does not answer as an HTTP server").caused_by(error)
    };
    let (mut sender, connection) = Builder::new().handshake(TokioIo::new(stream)).await.map_err(no_http)?;
    let mut connection = pin!(connection.with_upgrades());
    let mut request = http::Request::new(RopeBody::default());
    *request.method_mut() = Method::GET;
    *request.uri_mut() = http::Uri::from_static(ROUTE);
    request.headers_mut().insert(HOST, host);
    request.headers_mut().insert(CONNECTION, HeaderValue::from_static("upgrade"));
    request.headers_mut().insert(UPGRADE_HEADER, HeaderValue::from_static(UPGRADE));
    let mut answer = pin!(sender.send_request(request));
    let mut ended = false;
    let response = tokio::select! {
        biased;
        response = &mut answer => response,
        _ = &mut connection => {
            ended = true;
            answer.await
        }
    };
    let response = response.map_err(no_http)?;
    if response.status() != StatusCode::SWITCHING_PROTOCOLS {
        return Err(Error::not_started(
            Code::Unimplemented,
            format!("the server there takes no frames: it answered {}; use its http endpoint", response.status()),
        ));
    }
    let mut upgraded = pin!(hyper::upgrade::on(response));
    let upgraded = tokio::select! {
        biased;
        upgraded = &mut upgraded => upgraded,
        _ = &mut connection, if !ended => upgraded.await,
    };
    let parts = upgraded
        .map_err(no_http)?
        .downcast::<TokioIo<TcpStream>>()
        .map_err(|_| Error::internal("hyper gave back another socket than it was given"))?;
    Ok((Socket::Tcp(parts.io.into_inner()), parts.read_buf))
}

//! Opens framed connections.

use std::fmt;

use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use gym_core::transport::{ConnectOptions, Connector};
use gym_core::{CallContext, Channel, Code, Endpoint, Error, Result};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

use crate::frames::config::FramesConfig;
use crate::frames::connection::socket::Socket;
use crate::frames::stream::{ByteStream, FramedClient};
use crate::frames::{FRAMES_SCHEME, UNIX_SCHEME};
use crate::wire::address::parse;
use crate::wire::head::{HEAD_BYTES_MAX, HEADERS_MAX};
use crate::wire::headers::is_value;
use crate::wire::socket::connect;

/// The protocol to which an HTTP connection is upgraded.
pub(crate) const UPGRADE: &str = "gym-frames/1";
/// Route of the upgrade request, which also identifies the request in access logs. Listeners accept upgrades only on this route.
pub(crate) const ROUTE: &str = "/.gym/frames";
const SWITCHING_PROTOCOLS: u16 = 101;

/// Opens channels to `http+frames://host:port` or `unix+frames:///path`. Each channel has its own connection, opened at once.
///
/// Errors are those of [`FramedClient`], and `Unimplemented, NotStarted` from a peer that speaks HTTP but does not accept frames.
/// Every complete reply is returned, including 4xx and 5xx.
pub struct FramesConnector {
    client: FramedClient,
}

impl FramesConnector {
    /// Creates a connector over TCP, through the port of an HTTP listener.
    #[must_use]
    pub fn tcp(config: FramesConfig) -> Self {
        Self { client: FramedClient::new(FRAMES_SCHEME, config) }
    }

    /// Creates a connector over Unix sockets.
    #[must_use]
    pub fn unix(config: FramesConfig) -> Self {
        Self { client: FramedClient::new(UNIX_SCHEME, config) }
    }
}

impl fmt::Debug for FramesConnector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FramesConnector({})", self.client.scheme())
    }
}

#[async_trait]
impl Connector for FramesConnector {
    fn scheme(&self) -> &'static str {
        self.client.scheme()
    }

    fn transports(&self) -> Vec<gym_core::transport::Transport> {
        vec![crate::HTTP]
    }

    async fn connect(&self, cx: &CallContext, to: &Endpoint, options: &ConnectOptions) -> Result<Channel> {
        let connecting = async {
            if self.scheme() == UNIX_SCHEME {
                let stream = UnixStream::connect(to.address()).await.map_err(refused)?;
                return Ok(ByteStream::socket(Socket::Unix(stream), Bytes::new()));
            }
            let (socket, already) = upgrade(to).await?;
            Ok(ByteStream::socket(socket, already))
        };
        self.client.connect(cx, to, options, connecting).await
    }
}

fn refused(error: std::io::Error) -> Error {
    Error::not_started(Code::Unavailable, "cannot connect").caused_by(error)
}

/// Requests an upgrade to frames from an HTTP server. Returns the socket, and the bytes that followed the server's response.
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

/// Returns the status and the length of a response's header section, once it is complete.
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

//! The calling end.

use std::collections::VecDeque;
use std::fmt;
use std::future::{poll_fn, ready};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use gym_core::{
    CallContext, Channel, Code, ConnectOptions, Connector, Endpoint, Error, Execution, Link, PathInfo, Reply, Request,
    Response, Result, Verb,
};
use http::Uri;
use tokio::sync::OwnedSemaphorePermit;

use crate::SCHEME;
use crate::body::pieces;
use crate::config::HttpConfig;
use crate::exchange::exchange;
use crate::head;
use crate::headers::is_value;
use crate::pool::{Address, Lane, Pool};

/// Opens channels to `http://host[:port][/prefix]`, ours and other people's. Each has its own connections, opened when needed.
///
/// | what happens | the caller gets |
/// |---|---|
/// | no free connection by the deadline | `DeadlineExceeded`, not started |
/// | cannot connect, or not in time | `Unavailable`, not started |
/// | no file descriptor left for it | `ResourceExhausted`, not started |
/// | the connection breaks before a byte has left | another one is tried; a new one: `Unavailable`, not started |
/// | it breaks afterwards | `Unavailable`, unknown |
/// | what comes back is not HTTP, or not a frame where it says so | `DataLoss`, unknown |
/// | the reply is larger than `reply_bytes_max` | `ResourceExhausted`, finished |
/// | any complete reply, 4xx and 5xx too | that reply |
///
/// Dropping a reply closes its connection, by which the peer knows that the call is cancelled. Bytes move while the reply is
/// polled.
#[derive(Clone, Debug, Default)]
pub struct HttpConnector {
    config: HttpConfig,
}

impl HttpConnector {
    /// A connector with these limits and timeouts.
    #[must_use]
    pub fn new(config: HttpConfig) -> Self {
        Self { config }
    }
}

#[async_trait]
impl Connector for HttpConnector {
    fn scheme(&self) -> &'static str {
        SCHEME
    }

    async fn connect(&self, cx: &CallContext, to: &Endpoint, options: &ConnectOptions) -> Result<Channel> {
        cx.check()?;
        let (address, prefix) = parse(to, SCHEME)?;
        let own = to.address().split('/').next().unwrap_or_default();
        let host = self.config.host.as_deref().unwrap_or(own);
        if !is_value(host) {
            return Err(Error::invalid(format!("`{to}` has a host that no HTTP request can name")));
        }
        let link = HttpLink {
            path: PathInfo::new(SCHEME, to.address(), false),
            pool: Arc::new(Pool::new(address, self.config.clone())),
            host: host.into(),
            prefix,
        };
        Ok(Channel::new(link).fenced(options.incarnation))
    }
}

/// Host, port and the prefix of every route.
pub(crate) fn parse(to: &Endpoint, scheme: &str) -> Result<(Address, Arc<str>)> {
    let wrong = |why: &str| Error::invalid(format!("`{to}` {why}; write {scheme}://host:port"));
    if to.scheme() != scheme {
        return Err(wrong("is not an HTTP endpoint"));
    }
    let (authority, prefix) = match to.address().find('/') {
        Some(slash) => to.address().split_at(slash),
        None => (to.address(), ""),
    };
    let authority: http::uri::Authority = authority.parse().map_err(|_| wrong("has no valid host and port"))?;
    if authority.as_str().contains('@') {
        return Err(wrong("has a user name, which is not sent"));
    }
    if prefix.contains(['?', '#']) {
        return Err(wrong("has a query"));
    }
    if !prefix.is_empty() && Uri::try_from(prefix).is_err() {
        return Err(wrong("has a path that HTTP cannot send"));
    }
    let host = authority.host().trim_start_matches('[').trim_end_matches(']').to_owned();
    let port = match authority.port_u16() {
        Some(port) => port,
        None if authority.as_str() == authority.host() => 80,
        None => return Err(wrong("has no valid port")),
    };
    Ok((Address { host, port }, prefix.into()))
}

struct HttpLink {
    path: PathInfo,
    pool: Arc<Pool>,
    host: Arc<str>,
    prefix: Arc<str>,
}

impl fmt::Debug for HttpLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HttpLink({:?})", self.pool)
    }
}

impl HttpLink {
    /// What goes over the wire, in pieces: the head, and the body as it is.
    fn pieces(&self, request: &Request) -> Result<VecDeque<Bytes>> {
        let mut pieces = pieces(&request.message);
        let length = pieces.iter().map(Bytes::len).sum();
        pieces.push_front(head::of_request(request, &self.host, &self.prefix, length)?.into());
        Ok(pieces)
    }

    fn subject(&self, request: &Request) -> String {
        format!("{} {} at {SCHEME}://{}", request.verb, request.route, self.path.peer)
    }
}

#[async_trait]
impl Link for HttpLink {
    async fn send(&self, request: Request) -> Result<Reply> {
        loop {
            let room = self.pool.room().await.map_err(|error| error.about(self.subject(&request)))?;
            let (lane, reused) = match self.pool.reuse() {
                Some(lane) => (lane, true),
                None => (self.pool.connect().await.map_err(|error| error.about(self.subject(&request)))?, false),
            };
            // Only now, so that the time that is left is told as it is.
            let pieces = match self.pieces(&request) {
                Ok(pieces) => pieces,
                Err(error) => {
                    self.pool.keep(lane);
                    return Err(error);
                }
            };
            let call = Call {
                pool: Arc::clone(&self.pool),
                path: self.path.clone(),
                verb: request.verb,
                route: request.route.clone(),
                reply_bytes_max: request.context.reply_bytes_max,
                room,
            };
            let mut reply: Reply = Box::pin(call.run(lane, pieces));
            // The first poll writes the request, so that it is on its way when this returns.
            match poll_fn(|cx| Poll::Ready(reply.as_mut().poll(cx))).await {
                Poll::Pending => return Ok(reply),
                // The peer closed an unused connection under us and has seen nothing: take another.
                Poll::Ready(Err(error)) if reused && error.execution() == Execution::NotStarted => {}
                Poll::Ready(Err(error)) if error.execution() == Execution::NotStarted => return Err(error),
                Poll::Ready(done) => return Ok(Box::pin(ready(done))),
            }
        }
    }

    fn path(&self) -> &PathInfo {
        &self.path
    }

    async fn closed(&self) -> Error {
        self.pool.closed.cancelled().await;
        Error::unknown(Code::Unavailable, "the channel was closed").about(self.path.peer.to_string())
    }

    async fn close(&self, grace: Duration) -> Result<()> {
        let drained = tokio::time::timeout(grace, self.pool.drain()).await;
        self.pool.close();
        drained.map_err(|_| {
            Error::unknown(Code::DeadlineExceeded, "calls were still running when the channel closed")
                .about(self.path.peer.to_string())
        })
    }
}

/// One call that has a connection.
struct Call {
    pool: Arc<Pool>,
    path: PathInfo,
    verb: Verb,
    route: gym_core::Route,
    reply_bytes_max: usize,
    room: OwnedSemaphorePermit,
}

impl Call {
    async fn run(self, mut lane: Lane, request: VecDeque<Bytes>) -> Result<Response> {
        let closed = self.pool.closed.clone();
        let answered = tokio::select! {
            biased;
            answered = exchange(&mut lane, request, self.verb, self.reply_bytes_max) => answered,
            () = closed.cancelled() => Err(Error::unknown(Code::Unavailable, "the channel was closed")),
        };
        match answered {
            Ok(response) => {
                self.pool.keep(lane);
                drop(self.room);
                Ok(response)
            }
            Err(error) => {
                let subject = format!("{} {} at {SCHEME}://{}", self.verb, self.route, self.path.peer);
                Err(error.about(subject))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<(String, u16, String)> {
        let (address, prefix) = parse(&Endpoint::parse(text)?, SCHEME)?;
        Ok((address.host, address.port, prefix.to_string()))
    }

    #[test]
    fn an_endpoint_is_host_port_and_prefix() {
        assert_eq!(parsed("http://a:1").unwrap(), ("a".into(), 1, String::new()));
        assert_eq!(parsed("http://a/x/y/").unwrap(), ("a".into(), 80, "/x/y".into()));
        assert_eq!(parsed("http://[::1]:2").unwrap(), ("::1".into(), 2, String::new()));
    }

    #[test]
    fn a_wrong_endpoint_is_named() {
        for text in [
            "https://a:1",
            "http://a:b",
            "http://u@a:1",
            "http://a:1/x?y",
            "http://a b",
            "http://a:1/x y",
            "http://a:1/x\r\ny: z",
        ] {
            let error = parsed(text).unwrap_err().to_string();
            assert!(error.contains(text), "{error}");
        }
    }
}

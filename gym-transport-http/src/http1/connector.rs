//! The connector, and single calls over pooled connections.

use std::collections::VecDeque;
use std::fmt;
use std::future::{poll_fn, ready};
use std::ops::Deref;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use gym_core::message::EXECUTION_METADATA;
use gym_core::transport::{ConnectOptions, Connector, Link, PathInfo, Reply};
use gym_core::{CallContext, Channel, Code, Endpoint, Error, Execution, Request, Response, Result, Verb};
use tokio::sync::OwnedSemaphorePermit;

use crate::http1::SCHEME;
use crate::http1::config::HttpConfig;
use crate::http1::exchange::exchange;
use crate::http1::pool::{ConnectionPool, PooledConnection};
use crate::wire::address::parse;
use crate::wire::body::pieces;
use crate::wire::head;
use crate::wire::headers::is_value;

/// Opens channels to `http://host[:port][/prefix]`, also of servers that do not use this SDK. Each channel has its own connections,
/// opened when needed.
///
/// | event | result for the caller |
/// |---|---|
/// | no free connection by the deadline | `DeadlineExceeded`, not started |
/// | cannot connect, or not in time | `Unavailable`, not started |
/// | no file descriptor left for the connection | `ResourceExhausted`, not started |
/// | a pooled connection breaks before a byte was sent | another connection is tried |
/// | a new connection breaks before a byte was sent | `Unavailable`, not started |
/// | a pooled connection breaks before the response begins, and the request is a `GET`, a `HEAD` or [`repeatable`](CallContext::repeatable) | a new connection is tried, once |
/// | a pooled connection breaks before the response begins, otherwise | `Unavailable`, unknown, of the class `transport_peer_drop` |
/// | the connection breaks afterwards | `Unavailable`, unknown |
/// | the response is not HTTP, or not a frame although it is marked as one | `DataLoss`, unknown |
/// | the reply is larger than `reply_bytes_max` | `ResourceExhausted`, finished |
/// | any complete reply, including 4xx and 5xx | that reply |
///
/// Dropping a reply closes its connection, which notifies the peer that the call is cancelled. Bytes are transferred while the
/// reply is polled.
#[derive(Clone, Debug, Default)]
pub struct HttpConnector {
    config: HttpConfig,
}

impl HttpConnector {
    /// Creates a connector with these limits and timeouts.
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

    fn transports(&self) -> Vec<gym_core::transport::Transport> {
        vec![crate::HTTP]
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
            pool: Arc::new(ConnectionPool::new(address, host.into(), prefix, self.config.clone())),
        };
        Ok(Channel::new(link).fenced(options.incarnation))
    }
}

struct HttpLink {
    path: PathInfo,
    pool: Arc<ConnectionPool>,
}

impl fmt::Debug for HttpLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HttpLink({:?})", self.pool)
    }
}

impl HttpLink {
    /// Returns `true` if the peer may receive the request twice. `GET` and `HEAD` change nothing (RFC 9110, section 9.2.2).
    fn repeats(&self, request: &Request) -> bool {
        request.context.repeatable
            || matches!(request.verb, Verb::Get | Verb::Head)
            || self.pool.config.repeats_on_new_connection
    }

    fn subject(&self, request: &Request) -> String {
        format!("{} {} at {SCHEME}://{}", request.verb, request.route, self.path.peer)
    }
}

#[async_trait]
impl Link for HttpLink {
    async fn send(&self, request: Request) -> Result<Reply> {
        let request = match self.repeats(&request) {
            true => Outgoing::Kept(Arc::new(request)),
            false => Outgoing::Once(request),
        };
        loop {
            let permit = self.pool.permit().await.map_err(|error| error.about(self.subject(&request)))?;
            let (connection, reused) = match self.pool.reuse() {
                Some(connection) => (connection, true),
                None => (self.pool.connect().await.map_err(|error| error.about(self.subject(&request)))?, false),
            };
            // Built only now, so that the remaining time that is sent is accurate.
            let pieces = match request_pieces(&request, &self.pool) {
                Ok(pieces) => pieces,
                Err(error) => {
                    self.pool.keep(connection);
                    return Err(error);
                }
            };
            let call = ActiveCall {
                pool: Arc::clone(&self.pool),
                path: self.path.clone(),
                verb: request.verb,
                route: request.route.clone(),
                reply_bytes_max: request.context.reply_bytes_max,
                permit,
                again: request.kept().filter(|_| reused),
            };
            let mut reply: Reply = Box::pin(call.run(connection, pieces));
            // The first poll writes the request, so that it is being sent when this returns.
            match poll_fn(|cx| Poll::Ready(reply.as_mut().poll(cx))).await {
                Poll::Pending => return Ok(reply),
                // The peer had closed the unused connection and received nothing: another connection is tried.
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

/// Returns the bytes of a request in pieces: the header section, and the body unchanged.
fn request_pieces(request: &Request, pool: &ConnectionPool) -> Result<VecDeque<Bytes>> {
    let mut pieces = pieces(&request.message);
    let length = pieces.iter().map(Bytes::len).sum();
    pieces.push_front(head::write_request(request, &pool.host, &pool.prefix, length)?.into());
    Ok(pieces)
}

/// A request to send. One that may be sent again is kept until the response arrives.
#[expect(clippy::large_enum_variant, reason = "most requests are sent once, and a box would cost each an allocation")]
enum Outgoing {
    Once(Request),
    Kept(Arc<Request>),
}

impl Outgoing {
    fn kept(&self) -> Option<Arc<Request>> {
        match self {
            Self::Once(_) => None,
            Self::Kept(request) => Some(Arc::clone(request)),
        }
    }
}

impl Deref for Outgoing {
    type Target = Request;

    fn deref(&self) -> &Request {
        match self {
            Self::Once(request) => request,
            Self::Kept(request) => request,
        }
    }
}

/// A call that has a connection.
struct ActiveCall {
    pool: Arc<ConnectionPool>,
    path: PathInfo,
    verb: Verb,
    route: gym_core::Route,
    reply_bytes_max: usize,
    permit: OwnedSemaphorePermit,
    /// The request that is sent over a new connection if this one breaks before the response begins.
    again: Option<Arc<Request>>,
}

impl ActiveCall {
    async fn run(self, mut connection: PooledConnection, request: VecDeque<Bytes>) -> Result<Response> {
        let closed = self.pool.closed.clone();
        let mut answered = tokio::select! {
            biased;
            answered = exchange(&mut connection, request, self.verb, self.reply_bytes_max) => answered,
            () = closed.cancelled() => Err(Error::unknown(Code::Unavailable, "the channel was closed")),
        };
        if let (Some(again), Err(error)) = (&self.again, &answered)
            && error.code() == Code::Unavailable
            && connection.silent
            && !closed.is_cancelled()
        {
            // Boxed, because it is rare, and every waiting call would be as large otherwise.
            let repeated = Box::pin(self.repeat(again, connection));
            let broke = answered;
            (connection, answered) = repeated.await;
            answered = after(broke, answered);
        }
        match answered {
            Ok(response) => {
                self.pool.keep(connection);
                drop(self.permit);
                Ok(response)
            }
            Err(error) => {
                let subject = format!("{} {} at {SCHEME}://{}", self.verb, self.route, self.path.peer);
                Err(error.about(subject))
            }
        }
    }

    async fn repeat(&self, request: &Request, broken: PooledConnection) -> (PooledConnection, Result<Response>) {
        let mut connection = match self.pool.connect().await {
            Ok(connection) => connection,
            Err(error) => return (broken, Err(error)),
        };
        // Built again, so that the remaining time that is sent is accurate.
        let request = match request_pieces(request, &self.pool) {
            Ok(request) => request,
            Err(error) => return (broken, Err(error)),
        };
        let answered = tokio::select! {
            biased;
            answered = exchange(&mut connection, request, self.verb, self.reply_bytes_max) => answered,
            () = self.pool.closed.cancelled() => Err(Error::unknown(Code::Unavailable, "the channel was closed")),
        };
        (connection, answered)
    }
}

/// Returns the result of a call that was repeated after it had failed with `first`. The first request may have run, whatever became of the second
/// one: a server that refused that one, because it has restarted or is full, says nothing about the first.
fn after(first: Result<Response>, second: Result<Response>) -> Result<Response> {
    let not_started = Some(Execution::NotStarted.as_str());
    match (first, second) {
        (Err(first), Ok(second)) if second.metadata.get(EXECUTION_METADATA) == not_started => Err(first),
        (Err(first), Err(second)) => {
            let execution = first.execution().max(second.execution());
            Err(second.with_execution(execution))
        }
        (_, second) => second,
    }
}

//! The calling end.

use std::fmt;
use std::future::{Future, poll_fn, ready};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use gym_core::{
    CallContext, Channel, Code, ConnectOptions, Connector, Endpoint, Error, Execution, Link, PathInfo, Reply, Request,
    Response, Result, Status, Verb,
};
use http::header::{HOST, HeaderValue};
use http::{Method, Uri};
use hyper::body::{Body, Incoming};
use tokio::sync::OwnedSemaphorePermit;

use crate::SCHEME;
use crate::body::{Gather, RopeBody, message_of, prefix_bytes};
use crate::config::HttpConfig;
use crate::headers::{media_types_of, metadata_of, put_content_type, put_context};
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
        let host = HeaderValue::from_str(to.address().split('/').next().unwrap_or_default())
            .map_err(|_| Error::invalid(format!("`{to}` has a host that no HTTP request can name")))?;
        let link = HttpLink {
            path: PathInfo::new(SCHEME, to.address(), false),
            pool: Arc::new(Pool::new(address, self.config.clone())),
            host,
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
    host: HeaderValue,
    prefix: Arc<str>,
}

impl fmt::Debug for HttpLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HttpLink({:?})", self.pool)
    }
}

impl HttpLink {
    fn wire_request(&self, request: &Request) -> Result<http::Request<RopeBody>> {
        let route = request.route.as_str();
        let target = if self.prefix.is_empty() {
            Bytes::copy_from_slice(route.as_bytes())
        } else {
            Bytes::from([self.prefix.as_bytes(), route.as_bytes()].concat())
        };
        let uri = Uri::from_maybe_shared(target).ok().filter(|_| route.starts_with('/') && !route.contains('#'));
        let uri = uri.ok_or_else(|| {
            Error::invalid(format!("route `{}` is not a path that HTTP can send", route.escape_debug()))
        })?;
        let mut wire_request = http::Request::new(RopeBody::of(&request.message));
        *wire_request.method_mut() = method(request.verb);
        *wire_request.uri_mut() = uri;
        let headers = wire_request.headers_mut();
        headers.reserve(8);
        headers.insert(HOST, self.host.clone());
        put_content_type(&request.message, headers)?;
        put_context(&request.context, headers)?;
        Ok(wire_request)
    }

    fn subject(&self, request: &Request) -> String {
        format!("{} {} at {SCHEME}://{}", request.verb, request.route, self.path.peer)
    }
}

fn method(verb: Verb) -> Method {
    match verb {
        Verb::Get => Method::GET,
        Verb::Head => Method::HEAD,
        Verb::Post => Method::POST,
        Verb::Put => Method::PUT,
        Verb::Patch => Method::PATCH,
        Verb::Delete => Method::DELETE,
        Verb::Options => Method::OPTIONS,
    }
}

#[async_trait]
impl Link for HttpLink {
    async fn send(&self, request: Request) -> Result<Reply> {
        loop {
            let room = self.pool.room().await.map_err(|error| error.about(self.subject(&request)))?;
            let (lane, reused) = match self.pool.reuse().await {
                Some(lane) => (lane, true),
                None => (self.pool.connect().await.map_err(|error| error.about(self.subject(&request)))?, false),
            };
            // Only now, so that the time that is left is told as it is.
            let wire_request = match self.wire_request(&request) {
                Ok(wire_request) => wire_request,
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
            let mut reply: Reply = Box::pin(call.run(lane, wire_request));
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
    async fn run(self, mut lane: Box<Lane>, request: http::Request<RopeBody>) -> Result<Response> {
        let closed = self.pool.closed.clone();
        let answered = tokio::select! {
            biased;
            answered = exchange(&mut lane, request, self.reply_bytes_max) => answered,
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

async fn exchange(lane: &mut Lane, request: http::Request<RopeBody>, reply_bytes_max: usize) -> Result<Response> {
    lane.watch.start();
    let mut answer = pin!(lane.sender.try_send_request(request));
    let answered = poll_fn(|cx| {
        let driven = lane.drive(cx);
        match (answer.as_mut().poll(cx), driven) {
            (Poll::Ready(answered), _) => Poll::Ready(Ok(answered)),
            (Poll::Pending, Poll::Ready(())) => Poll::Ready(Err(())),
            (Poll::Pending, Poll::Pending) => Poll::Pending,
        }
    })
    .await;
    let response = match answered {
        Ok(Ok(response)) => response,
        Ok(Err(failed)) => return Err(broken(lane, Some(failed.into_error()))),
        Err(()) => return Err(broken(lane, None)),
    };
    let (head, body) = response.into_parts();
    let (media_type, framed_head) = media_types_of(&head.headers);
    let framed = media_type == Some(gym_core::frame::FRAME_MEDIA_TYPE);
    // The bound is on the message; a frame has a prefix before it.
    let prefix = if framed { prefix_bytes(1 << 16) } else { 0 };
    let bytes = collect(lane, body, reply_bytes_max.saturating_add(prefix)).await?;
    let too_large = |length: Option<usize>| {
        let length = length.map_or_else(String::new, |length| format!(" of {length} bytes"));
        Error::finished(
            Code::ResourceExhausted,
            format!("the reply{length} is larger than reply_bytes_max = {reply_bytes_max}; raise it if this is wanted"),
        )
    };
    let bytes = bytes.ok_or_else(|| too_large(None))?;
    let message = message_of(bytes, media_type, framed_head, 1 << 16)
        .map_err(|error| Error::unknown(Code::DataLoss, "the reply is not the frame it says it is").caused_by(error))?;
    if message.len() > reply_bytes_max {
        return Err(too_large(Some(message.len())));
    }
    Ok(Response { status: Status(head.status.as_u16()), metadata: metadata_of(&head.headers, None), message })
}

/// The whole body, or none when it is longer than `bytes_max`.
async fn collect(lane: &mut Lane, body: Incoming, bytes_max: usize) -> Result<Option<Bytes>> {
    let Ok(mut gather) = Gather::new(body.size_hint().exact(), bytes_max) else { return Ok(None) };
    let mut body = pin!(body);
    while !body.is_end_stream() {
        let frame = poll_fn(|cx| {
            // What came with the last bytes is there already.
            if let Poll::Ready(frame) = body.as_mut().poll_frame(cx) {
                return Poll::Ready(Ok(frame));
            }
            let driven = lane.drive(cx);
            match (body.as_mut().poll_frame(cx), driven) {
                (Poll::Ready(frame), _) => Poll::Ready(Ok(frame)),
                (Poll::Pending, Poll::Ready(())) => Poll::Ready(Err(())),
                (Poll::Pending, Poll::Pending) => Poll::Pending,
            }
        })
        .await;
        match frame {
            Ok(None) => break,
            Ok(Some(Ok(frame))) => {
                // Trailers are dropped: nobody sends any to us.
                if let Ok(piece) = frame.into_data()
                    && gather.push(piece).is_err()
                {
                    return Ok(None);
                }
            }
            Ok(Some(Err(error))) => return Err(broken(lane, Some(error))),
            Err(()) => return Err(broken(lane, None)),
        }
    }
    Ok(Some(gather.finish()))
}

/// What a connection that broke during a call means for the call.
fn broken(lane: &Lane, error: Option<hyper::Error>) -> Error {
    let said = if !lane.watch.has_left() {
        Error::not_started(Code::Unavailable, "the connection was closed before anything was sent")
    } else if error.as_ref().is_some_and(hyper::Error::is_parse) {
        Error::unknown(Code::DataLoss, "what came back is not HTTP")
    } else {
        Error::unknown(Code::Unavailable, "the connection broke before the answer was complete")
    };
    match error {
        Some(error) => said.caused_by(error),
        None => said,
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
        for text in ["https://a:1", "http://a:b", "http://u@a:1", "http://a:1/x?y", "http://a b"] {
            let error = parsed(text).unwrap_err().to_string();
            assert!(error.contains(text), "{error}");
        }
    }
}

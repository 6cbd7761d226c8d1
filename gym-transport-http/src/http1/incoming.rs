//! An accepted connection.

use std::convert::Infallible;
use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::task::{Context, Poll};

use async_trait::async_trait;
use gym_core::message::PeerInfo;
use gym_core::transport::Incoming;
use gym_core::{CancelToken, Code, Error, Execution, Handler, Request, Response, Result, Route, Status, Verb};
use http::{HeaderValue, StatusCode};
use hyper::body::{Body, Incoming as WireBody};
use hyper::server::conn::http1::Builder;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{sleep_until, timeout};

use crate::frames::connection::answering::{ListenerState, serve as serve_frames};
use crate::frames::connection::socket::Socket;
use crate::frames::connector::{ROUTE, UPGRADE};
use crate::http1::activity::{ConnectionActivity, WatchedSocket};
use crate::http1::config::HttpConfig;
use crate::wire::body::{BodyCollector, BodyFormat, RopeBody};
use crate::wire::headers::{context_of, media_types_of, put_content_type, put_metadata};

/// An accepted connection, and the calls that arrive over it.
///
/// - A client that closes its sending side has disconnected, as in NeMo Gym's servers: the handler's future is dropped, and the
///   call's cancel token fires.
/// - A call whose deadline has passed before it starts is rejected with 504, not started.
/// - A body above `request_bytes_max` is rejected with 413 at once: by its announced length, or when it exceeds the limit. The rest is
///   read afterwards, without being kept, for at most `head_timeout`. If the connection broke instead, a client that is still sending
///   would not see the rejection and send the body again, and NeMo Gym's client would do so permanently.
/// - A request to upgrade to frames is accepted, on the same connection.
/// - Data that is not HTTP is rejected with 400, and the connection ends.
pub struct HttpIncoming {
    stream: TcpStream,
    peer: PeerInfo,
    config: Arc<HttpConfig>,
    calls: Arc<Semaphore>,
    frames: ListenerState,
    /// Released when the connection ends.
    permit: Option<OwnedSemaphorePermit>,
}

impl HttpIncoming {
    pub(crate) fn new(
        stream: TcpStream,
        peer: PeerInfo,
        config: Arc<HttpConfig>,
        calls: Arc<Semaphore>,
        frames: ListenerState,
        permit: Option<OwnedSemaphorePermit>,
    ) -> Self {
        Self { stream, peer, config, calls, frames, permit }
    }
}

impl fmt::Debug for HttpIncoming {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HttpIncoming({})", self.peer.address)
    }
}

#[async_trait]
impl Incoming for HttpIncoming {
    fn peer(&self) -> &PeerInfo {
        &self.peer
    }

    async fn serve(self: Box<Self>, handler: Arc<dyn Handler>, drain: CancelToken) -> Result<()> {
        let Self { stream, peer, config, calls, frames, permit } = *self;
        let activity = Arc::new(ConnectionActivity::new());
        let wire = TokioIo::new(WatchedSocket::new(stream, Arc::clone(&activity)));
        let server = Arc::new(ServerContext { handler, peer, config, calls, unread: UnreadSlot::default() });
        let upgrade = Arc::new(Mutex::new(None));
        let service = service_fn(|mut request: http::Request<WireBody>| {
            let asks = asks_for_frames(&request);
            if asks {
                *upgrade.lock() = Some(hyper::upgrade::on(&mut request));
            }
            let busy = BusyGuard::begin(Arc::clone(&activity));
            let server = Arc::clone(&server);
            async move {
                let _busy = busy;
                Ok::<_, Infallible>(if asks { switching_protocols() } else { answer(&server, request).await })
            }
        });
        // `pipeline_flush` is not used: it copies every body and delays responses while any other data has arrived. It delays
        // the 400 after invalid data permanently.
        let http = Builder::new().keep_alive(true).half_close(false).serve_connection(wire, service).with_upgrades();
        let mut connection = pin!(http);
        // Each connection has its own child token, because all connections would share the lock of the parent.
        let drain = drain.child_token();
        let mut drained = pin!(drain.cancelled());
        let mut draining = false;
        let (head_timeout, keep_alive_timeout) = (server.config.head_timeout, server.config.keep_alive_timeout);
        let mut alarm = pin!(sleep_until(activity.due(head_timeout, keep_alive_timeout).map_err(exceeded)?));
        let ended = poll_fn(|cx| {
            if let Poll::Ready(ended) = connection.as_mut().poll(cx) {
                return Poll::Ready(ended.map_err(connection_ended));
            }
            if !draining && drained.as_mut().poll(cx).is_ready() {
                draining = true;
                connection.as_mut().graceful_shutdown();
                if let Poll::Ready(ended) = connection.as_mut().poll(cx) {
                    return Poll::Ready(ended.map_err(connection_ended));
                }
            }
            poll_unread(&server, &activity, cx);
            while alarm.as_mut().poll(cx).is_ready() {
                match activity.due(head_timeout, keep_alive_timeout) {
                    Ok(next) => alarm.as_mut().reset(next),
                    Err(field) => return Poll::Ready(Err(exceeded(field))),
                }
            }
            Poll::Pending
        })
        .await;
        let upgrade = upgrade.lock().take();
        let ended = match (ended, upgrade) {
            (Ok(()), Some(upgrade)) => {
                let upgraded = upgrade.await.map_err(connection_ended).and_then(|upgraded| {
                    upgraded.downcast().map_err(|_| Error::internal("hyper gave back another socket than it was given"))
                });
                match upgraded {
                    Ok(hyper::upgrade::Parts { io, read_buf, .. }) => {
                        let io: TokioIo<WatchedSocket> = io;
                        let socket = Socket::Tcp(io.into_inner().into_inner());
                        let (handler, peer) = (Arc::clone(&server.handler), server.peer.clone());
                        Box::pin(serve_frames(socket, &read_buf, frames, handler, peer, drain.clone())).await
                    }
                    Err(error) => Err(error),
                }
            }
            (ended, _) => ended,
        };
        drop(permit);
        match ended {
            Err(error) if error.code() == Code::Cancelled => Ok(()),
            ended => ended.map_err(|error| error.about(format!("serve {}", server.peer.address))),
        }
    }
}

fn asks_for_frames(request: &http::Request<WireBody>) -> bool {
    // One header of each request is checked; the others are checked only if it is present.
    request.headers().get(http::header::UPGRADE).is_some_and(|wanted| wanted.as_bytes() == UPGRADE.as_bytes())
        && request.uri().path() == ROUTE
}

fn switching_protocols() -> http::Response<RopeBody> {
    let mut response = http::Response::new(RopeBody::default());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    response.headers_mut().insert(http::header::CONNECTION, HeaderValue::from_static("upgrade"));
    response.headers_mut().insert(http::header::UPGRADE, HeaderValue::from_static(UPGRADE));
    response
}

fn exceeded(field: &'static str) -> Error {
    Error::unknown(Code::DeadlineExceeded, format!("the client was silent for longer than {field}"))
}

/// Returns the error of a connection that ended: `InvalidArgument` if the client does not speak HTTP, or else `Cancelled`.
fn connection_ended(error: hyper::Error) -> Error {
    let code = if error.is_parse() { Code::InvalidArgument } else { Code::Cancelled };
    Error::unknown(code, "the connection ended").caused_by(error)
}

/// State that all calls of a connection share.
struct ServerContext {
    handler: Arc<dyn Handler>,
    peer: PeerInfo,
    config: Arc<HttpConfig>,
    calls: Arc<Semaphore>,
    /// The rest of a rejected body; a connection has one call at a time.
    unread: UnreadSlot,
}

/// A place for the rest of a rejected body. Each poll of a connection looks at the flag only.
#[derive(Default)]
struct UnreadSlot {
    holds: AtomicBool,
    body: Mutex<Option<UnreadBody>>,
}

/// The rest of a rejected body, and whether its time limit has begun.
struct UnreadBody {
    body: WireBody,
    limited: bool,
}

/// Reads and drops the rest of a rejected body.
fn poll_unread(server: &ServerContext, activity: &ConnectionActivity, cx: &mut Context<'_>) {
    // Connection and handler are polled by one task.
    if !server.unread.holds.load(Relaxed) {
        return;
    }
    let mut unread = server.unread.body.lock();
    let Some(rest) = unread.as_mut() else { return };
    if !rest.limited {
        rest.limited = true;
        activity.call_rejected();
    }
    while let Poll::Ready(frame) = Pin::new(&mut rest.body).poll_frame(cx) {
        if !matches!(frame, Some(Ok(_))) {
            *unread = None;
            server.unread.holds.store(false, Relaxed);
            return activity.call_ended();
        }
    }
}

/// Marks a call as running until the guard is dropped.
struct BusyGuard(Arc<ConnectionActivity>);

impl BusyGuard {
    fn begin(activity: Arc<ConnectionActivity>) -> Self {
        activity.call_began();
        Self(activity)
    }
}

impl Drop for BusyGuard {
    fn drop(&mut self) {
        self.0.call_ended();
    }
}

/// Cancels a call when it is dropped before the call is done, which means that the caller disconnected.
struct CancelOnDrop(Option<CancelToken>);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        if let Some(cancel) = self.0.take() {
            cancel.cancel();
        }
    }
}

async fn answer(server: &ServerContext, request: http::Request<WireBody>) -> http::Response<RopeBody> {
    let response = match call(server, request).await {
        Ok(response) => response,
        Err(refused) => refused,
    };
    wire_response(&response).unwrap_or_else(|error| {
        // This response contains nothing that could be rejected again.
        wire_response(&Response::from_error(&error.with_execution(Execution::Finished))).unwrap_or_default()
    })
}

fn wire_response(response: &Response) -> Result<http::Response<RopeBody>> {
    // A 1xx status only announces a response; as the response itself, it would leave the client waiting.
    let status = StatusCode::from_u16(response.status.0).ok().filter(|status| !status.is_informational());
    let status = status.ok_or_else(|| Error::internal(format!("status {} is no answer", response.status)))?;
    let mut wire = http::Response::new(RopeBody::of(&response.message));
    *wire.status_mut() = status;
    put_content_type(&response.message, wire.headers_mut())?;
    put_metadata(&response.metadata, wire.headers_mut())?;
    Ok(wire)
}

/// Returns a rejection with a status other than that of the error's code.
fn refusal(error: &Error, status: u16) -> Response {
    Response { status: Status(status), ..Response::from_error(error) }
}

/// Acquires a permit, reads the body and runs the handler. An error is a rejection: the handler did not run.
async fn call(server: &ServerContext, request: http::Request<WireBody>) -> Result<Response, Response> {
    let (head, body) = request.into_parts();
    let config = &server.config;
    let refuse = |error: Error| Response::from_error(&error);
    let context = context_of(&head.headers, config.default_deadline).map_err(refuse)?;
    let mut caller = CancelOnDrop(Some(context.cancel.clone()));
    let verb = Verb::from_name(head.method.as_str()).ok_or_else(|| {
        refusal(&Error::not_started(Code::Unimplemented, format!("method {} is not served", head.method)), 405)
    })?;

    // The permit is acquired before the body is read: waiting calls use the kernel's buffers, not ours.
    let _permit = match server.calls.try_acquire() {
        Ok(permit) => permit,
        Err(_) => context
            .bound(Execution::NotStarted, async {
                server.calls.acquire().await.map_err(|_| Error::not_started(Code::Unavailable, "the server has closed"))
            })
            .await
            .map_err(refuse)?,
    };
    let expects = head.headers.contains_key(http::header::EXPECT);
    let bytes = if body.is_end_stream() {
        bytes::Bytes::new()
    } else {
        let received = context.bound(Execution::NotStarted, receive(body, expects, config)).await;
        let received = received.map_err(|error| match error.code() {
            Code::InvalidArgument => refusal(&error, 400),
            _ => refuse(error),
        })?;
        received.map_err(|rest| {
            server.unread.holds.store(rest.is_some(), Relaxed);
            *server.unread.body.lock() = rest.map(|body| UnreadBody { body, limited: false });
            refusal(&too_long(config), 413)
        })?
    };
    let (media_type, framed_head) = media_types_of(&head.headers);
    let message = BodyFormat::of(media_type, framed_head).message(bytes, config.segments_max).map_err(|error| {
        let error = Error::from(error);
        let status = if error.code() == Code::ResourceExhausted { 413 } else { 400 };
        refusal(&Error::invalid(error.to_string()), status)
    })?;
    context.check().map_err(refuse)?;

    let route = head.uri.path_and_query().map_or("/", http::uri::PathAndQuery::as_str);
    let route = Route::from(route.to_owned());
    let request = Request { verb, route, context, peer: Some(server.peer.clone()), message };
    let answered = server.handler.handle(request).await;
    caller.0 = None;
    Ok(answered.unwrap_or_else(|error| Response::from_error(&error)))
}

/// Returns the error of a body above the limit. The code is not `ResourceExhausted`, because the same body would be too long again.
fn too_long(config: &HttpConfig) -> Error {
    let max = config.request_bytes_max;
    Error::invalid(format!("the body is larger than request_bytes_max = {max}; raise it on this server"))
}

/// Reads the whole body. If it is too long, returns the rest of it, unless the client does not have to send it.
async fn receive(
    mut body: WireBody,
    expects: bool,
    config: &HttpConfig,
) -> Result<std::result::Result<bytes::Bytes, Option<WireBody>>> {
    let Ok(mut collector) = BodyCollector::new(body.size_hint().exact(), config.request_bytes_max) else {
        // A client that asked before it sends the body does not have to send it.
        return Ok(Err((!expects).then_some(body)));
    };
    loop {
        let frame = poll_fn(|cx| Pin::new(&mut body).poll_frame(cx));
        let frame = timeout(config.body_timeout, frame).await.map_err(|_| {
            Error::not_started(
                Code::DeadlineExceeded,
                format!("no byte of the body came within body_timeout = {:?}", config.body_timeout),
            )
        })?;
        match frame {
            None => break,
            Some(Ok(frame)) => {
                if let Ok(piece) = frame.into_data()
                    && collector.push(piece).is_err()
                {
                    return Ok(Err(Some(body)));
                }
            }
            Some(Err(error)) => return Err(Error::invalid("the body is not what its headers say").caused_by(error)),
        }
        if body.is_end_stream() {
            break;
        }
    }
    Ok(Ok(collector.finish()))
}

//! Tests that are specific to this transport; the conformance suite tests the requirements of every transport.

mod bytes;
mod capacity;
mod endings;
mod places;

use std::sync::Arc;
use std::time::Duration;

use ::bytes::BytesMut;
use gym_core::message::PeerInfo;
use gym_core::transport::mux::MuxLink;
use gym_core::transport::mux::header::{put_request, put_response};
use gym_core::transport::{ConnectOptions, PathInfo};
use gym_core::{CallContext, CancelToken, Channel, Handler, Message, Request, Response, Result, Route, Verb};
use tokio::net::UnixStream;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;

use crate::frames::buffers::ReceiveBufferPool;
use crate::frames::codec::frame::{FRAME_BYTES, FrameKind, framed};
use crate::frames::config::FramesConfig;
use crate::frames::connection::answering::{ListenerState, serve};
use crate::frames::connection::calling;
use crate::frames::connection::send_queue::FrameSendQueue;
use crate::frames::connection::socket::Socket;

/// Far longer than any operation here takes, so that only a hang reaches it.
const LONG_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum number of calls in flight over a server's connections.
const CALLS_MAX: usize = 1_000_000;

async fn soon<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(LONG_TIMEOUT, future).await.expect("it does not hang")
}

fn post(route: &'static str) -> Request {
    Request::post(CallContext::within(LONG_TIMEOUT), route, "{}")
}

/// Two ends that are connected by a pair of sockets.
struct Joined {
    channel: Channel,
    caller_pool: Arc<ReceiveBufferPool>,
    listener: ListenerState,
    serving: JoinHandle<Result<()>>,
}

async fn joined(caller: FramesConfig, server: FramesConfig, handler: impl Handler) -> Joined {
    let (near, far) = UnixStream::pair().unwrap();
    let listener = ListenerState::new(server, Arc::new(Semaphore::new(CALLS_MAX)));
    let peer = PeerInfo { address: "the other end".into() };
    let serving = serve(Socket::Unix(far), &[], listener.clone(), Arc::new(handler), peer, CancelToken::new());
    let serving = tokio::spawn(serving);
    let caller_pool = ReceiveBufferPool::new(caller.pool_bytes_max);
    let channel = Channel::new(open(near, (&caller, &ConnectOptions::default()), &caller_pool).await);
    Joined { channel, caller_pool, listener, serving }
}

fn request_header(message: &Message) -> BytesMut {
    put_request(FRAME_BYTES, Verb::Post, &Route::from_static("/x"), &CallContext::default(), 9, message)
}

/// Returns the bytes that precede the message of a request.
fn request_frame(call: u64, message: &Message) -> BytesMut {
    framed(FrameKind::Request, call, request_header(message))
}

/// Returns the bytes that precede the message of a response.
fn response_frame(call: u64, response: &Response) -> BytesMut {
    framed(FrameKind::Response, call, put_response(FRAME_BYTES, response))
}

async fn open(
    near: UnixStream,
    config: (&FramesConfig, &ConnectOptions),
    pool: &Arc<ReceiveBufferPool>,
) -> MuxLink<FrameSendQueue> {
    let path = PathInfo::new("unix+frames", "/pair", true);
    soon(calling::open(Socket::Unix(near), &[], path, config, Arc::clone(pool))).await.unwrap()
}

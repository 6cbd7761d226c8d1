//! Both ends without a wire: a test decides when the messages of one end are delivered to the other.

mod calls;
mod headers;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use crate::base::cancel::CancelToken;
use bytes::{Bytes, BytesMut};
use tokio::sync::Semaphore;

use super::*;
use crate::base::error::{Error, Result};
use crate::message::CallContext;
use crate::message::PeerInfo;
use crate::message::frame::Lengths;
use crate::message::{Message, Request};
use crate::transport::Handler;
use crate::transport::{Channel, PathInfo};

/// Far longer than any test needs, so that only a hang reaches it.
const LONG_TIMEOUT: Duration = Duration::from_secs(20);
const CALLS_MAX: usize = 100;

#[derive(Debug)]
enum Posted {
    Request(u64, Bytes, Message, CapacityPermit),
    Response(u64, Bytes, Message, CapacityPermit),
    Failed(u64, Bytes, CapacityPermit),
    Cancel(u64, CapacityPermit),
    Drain,
    Heartbeat,
}

/// Stores the posted messages.
#[derive(Clone, Debug, Default)]
struct FakeSender(Arc<Mutex<PostedMessages>>);

#[derive(Debug, Default)]
struct PostedMessages {
    posted: VecDeque<Posted>,
    last_call: u64,
    /// How each request was to be sent; emptied by a flush.
    requests: Vec<Flush>,
    closed: bool,
}

impl FakeSender {
    fn put(&self, posted: Posted) {
        let mut messages = self.0.lock();
        if !messages.closed {
            messages.posted.push_back(posted);
        }
    }

    fn next(&self) -> Option<Posted> {
        self.0.lock().posted.pop_front()
    }

    fn requests_since_flush(&self) -> Vec<Flush> {
        self.0.lock().requests.clone()
    }

    fn is_closed(&self) -> bool {
        self.0.lock().closed
    }
}

/// Returns the bytes after the headroom, which must still be zero.
fn behind(header: BytesMut) -> Bytes {
    assert_eq!(header[..FakeSender::HEADROOM], [0; FakeSender::HEADROOM]);
    header.freeze().split_off(FakeSender::HEADROOM)
}

impl MessageSender for FakeSender {
    const HEADROOM: usize = 3;

    fn post_request(
        &self,
        header: BytesMut,
        message: &Message,
        permit: CapacityPermit,
        flush: Flush,
        register: impl FnOnce(u64) -> Result<()>,
    ) -> Result<u64> {
        let call = self.0.lock().last_call + 1;
        register(call)?;
        let mut messages = self.0.lock();
        messages.last_call = call;
        messages.requests.push(flush);
        drop(messages);
        self.put(Posted::Request(call, behind(header), message.clone(), permit));
        Ok(call)
    }

    fn post_response(&self, call: u64, header: BytesMut, message: &Message, permit: CapacityPermit, _flush: Flush) {
        self.put(Posted::Response(call, behind(header), message.clone(), permit));
    }

    fn flush(&self) {
        self.0.lock().requests.clear();
    }

    fn post_failed(&self, call: u64, reason: BytesMut, permit: CapacityPermit) {
        self.put(Posted::Failed(call, behind(reason), permit));
    }

    fn cancel(&self, call: u64, reply: CapacityPermit) {
        self.put(Posted::Cancel(call, reply));
    }

    fn post_drain(&self) {
        self.put(Posted::Drain);
    }

    fn post_heartbeat(&self) {
        self.put(Posted::Heartbeat);
    }

    fn close(&self) {
        let mut messages = self.0.lock();
        messages.closed = true;
        messages.posted.clear();
    }
}

/// Two ends that have exchanged their limits.
struct Pair {
    channel: Channel,
    calling: Arc<CallingEnd<FakeSender>>,
    answering: Arc<AnsweringEnd<FakeSender>>,
    ending: Option<EndOnDrop<FakeSender>>,
    calls: Arc<Semaphore>,
    limits: ConnectionLimits,
}

impl Pair {
    fn new(caller: &ConnectionLimits, server: ConnectionLimits, handler: impl Handler) -> Self {
        let announced = server.clone();
        Self::with_announced(caller, &announced, server, handler)
    }

    /// Creates ends whose caller received other limits than those of the server.
    fn with_announced(
        caller: &ConnectionLimits,
        announced: &ConnectionLimits,
        server: ConnectionLimits,
        handler: impl Handler,
    ) -> Self {
        let calls = Arc::new(Semaphore::new(CALLS_MAX));
        let calling = CallingEnd::new(FakeSender::default(), caller, Handshake::of(announced));
        let answering = AnsweringEnd::new(
            FakeSender::default(),
            server.clone(),
            Handshake::of(caller),
            Arc::clone(&calls),
            Arc::new(handler),
            PeerInfo::default(),
        );
        let channel = Channel::new(MuxLink::new(Arc::clone(&calling), PathInfo::new("pair", "peer", true)));
        let ending = answering.end_on_drop();
        Self { channel, calling, answering, ending: Some(ending), calls, limits: server }
    }

    /// Delivers the posted messages in both directions.
    fn deliver(&self) -> Result<()> {
        while let Some(posted) = self.calling.sender().next() {
            match posted {
                Posted::Request(call, mut header, message, _permit) => {
                    let lengths = Lengths::take(&mut header, &self.limits.message_limits())?;
                    let header = RequestHeader::read(header)?;
                    if self.answering.on_opening(call, &header, lengths.total)? {
                        self.answering.on_request(call, header, message.head.to_bytes(), message.segments);
                    }
                }
                Posted::Cancel(call, _permit) => self.answering.on_cancel(call),
                Posted::Heartbeat => {}
                other => panic!("{other:?} of a caller"),
            }
        }
        while let Some(posted) = self.answering.sender().next() {
            match posted {
                Posted::Response(call, mut header, message, _permit) => {
                    let lengths = Lengths::take(&mut header, &crate::message::frame::MessageLimits::default())?;
                    let header = ResponseHeader::read(header)?;
                    if self.calling.on_opening(call, lengths.total)? {
                        let response = header.into_response(message.head.to_bytes(), message.segments);
                        self.calling.on_answer(call, response);
                    }
                }
                Posted::Failed(call, reason, _permit) => self.calling.on_failed(call, reason)?,
                Posted::Drain => self.calling.on_drain(),
                Posted::Heartbeat => {}
                other => panic!("{other:?} of a server"),
            }
        }
        Ok(())
    }

    /// Delivers posted messages until the future completes.
    async fn during<T>(&self, future: impl Future<Output = T>) -> T {
        let mut future = std::pin::pin!(future);
        tokio::time::timeout(LONG_TIMEOUT, async {
            loop {
                if let std::task::Poll::Ready(done) = futures_util::poll!(&mut future) {
                    return done;
                }
                self.deliver().unwrap();
                tokio::task::yield_now().await;
            }
        })
        .await
        .expect("it does not hang")
    }

    fn calls_running(&self) -> usize {
        CALLS_MAX - self.calls.available_permits()
    }
}

fn post(route: &'static str) -> Request {
    Request::post(CallContext::within(LONG_TIMEOUT), route, "{}")
}

fn with_segment(route: &'static str, bytes: usize) -> Request {
    let mut request = post(route);
    request.message.segments.push(Bytes::from(vec![7; bytes]));
    request
}

fn wire_cut() -> Error {
    Error::unknown(crate::base::error::Code::Unavailable, "the wire was cut")
}

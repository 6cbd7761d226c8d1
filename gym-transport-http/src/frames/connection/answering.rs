//! The server end of a framed connection.

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use gym_core::message::PeerInfo;
use gym_core::transport::mux::{AnsweringEnd, PeerActivity, RequestHeader, heartbeat, malformed};
use gym_core::{CancelToken, Code, Error, Handler, Result};
use tokio::io::AsyncReadExt;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use crate::frames::buffers::ReceiveBufferPool;
use crate::frames::codec::decoder::{Decoder, Event};
use crate::frames::codec::frame::{FrameKind, greeting_frame};
use crate::frames::config::FramesConfig;
use crate::frames::connection::handshake::{broken, greeting};
use crate::frames::connection::send_queue::FrameSendQueue;
use crate::frames::connection::socket::{ReadHalf, Socket};

/// State that the connections of a listener share.
#[derive(Clone, Debug)]
pub(crate) struct ListenerState {
    config: FramesConfig,
    pub(crate) pool: Arc<ReceiveBufferPool>,
    /// Permits for the calls of all connections.
    pub(crate) calls: Arc<Semaphore>,
}

impl ListenerState {
    pub(crate) fn new(config: FramesConfig, calls: Arc<Semaphore>) -> Self {
        let pool = ReceiveBufferPool::new(config.pool_bytes_max);
        Self { config, pool, calls }
    }
}

/// Serves the calls of one connection. Returns when the peer disconnects, which it does soon after it was notified that `drain`
/// fired. Dropping the future drops its running calls.
pub(crate) async fn serve(
    socket: Socket,
    received: &[u8],
    listener: ListenerState,
    handler: Arc<dyn Handler>,
    peer: PeerInfo,
    drain: CancelToken,
) -> Result<()> {
    let ListenerState { config, pool, calls } = listener;
    let (mut read, write) = socket.split();
    let send_queue = FrameSendQueue::new(write);
    send_queue.post_urgent(greeting_frame(&config.limits));
    let mut decoder = Decoder::new(config.limits.message_limits(), Arc::clone(&pool), received);
    let limit = config.connect_timeout;
    let theirs = tokio::time::timeout(limit, greeting(&mut read, &mut decoder))
        .await
        .map_err(|_| Error::unknown(Code::DeadlineExceeded, format!("no greeting within {limit:?}")))
        .flatten()?;
    let end = AnsweringEnd::new(send_queue, config.limits.clone(), theirs, calls, handler, peer);
    let ending = end.end_on_drop();
    let heard = PeerActivity::default();
    let mut writer = JoinSet::new();
    let writing = Arc::clone(&end);
    writer.spawn(async move { writing.sender().run().await }.boxed());
    let trim = || pool.trim(config.limits.silence_max);
    let ended = tokio::select! {
        biased;
        ended = read_requests(&end, read, decoder, &heard) => ended,
        Some(ended) = writer.join_next() => Err(broken(ended.ok())),
        error = heartbeat(end.sender(), &heard, &config.limits, end.theirs(), trim) => Err(error),
        never = end.drain_with(&drain) => match never {},
    };
    drop(ending);
    pool.trim(Duration::ZERO);
    ended
}

async fn read_requests(
    end: &Arc<AnsweringEnd<FrameSendQueue>>,
    mut read: ReadHalf,
    mut decoder: Decoder,
    heard: &PeerActivity,
) -> Result<()> {
    // The header of the request that is being received.
    let mut header = None;
    loop {
        while let Some(event) = decoder.next()? {
            take_event(end, &mut decoder, &mut header, event)?;
        }
        match read.read(decoder.space()).await {
            Ok(0) if decoder.is_at_rest() => return Ok(()),
            Ok(0) => return Err(Error::unknown(Code::DataLoss, "the peer left in the middle of a request")),
            Ok(count) => decoder.advance(count),
            Err(error) => return Err(broken(Some(error))),
        }
        heard.record();
    }
}

fn take_event(
    end: &Arc<AnsweringEnd<FrameSendQueue>>,
    decoder: &mut Decoder,
    header: &mut Option<RequestHeader>,
    event: Event,
) -> Result<()> {
    match event {
        Event::Start(start) if start.kind == FrameKind::Request => {
            let read = RequestHeader::read(start.header)?;
            if end.on_opening(start.call, &read, start.total)? {
                *header = Some(read);
                decoder.keep();
            }
        }
        Event::Segment(start) => {
            let header = header.as_ref().ok_or_else(|| malformed("a segment without its beginning"))?;
            decoder.place(end.place(header, &start.head, start.segment, start.length));
        }
        Event::Complete(message) => {
            let header = header.take().ok_or_else(|| malformed("a request without its beginning"))?;
            end.on_request(message.call, header, message.head, message.segments);
        }
        Event::Cancel(call) => end.on_cancel(call),
        Event::Heartbeat => {}
        Event::Handshake(_) | Event::Start(_) | Event::Failed(..) | Event::Drain => {
            return Err(malformed(format!("{event:?} is not for a server")));
        }
    }
    Ok(())
}

//! The client end of a framed connection.

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;

use gym_core::transport::mux::{
    CallingEnd, ConnectionLimits, MuxLink, PeerActivity, ResponseHeader, heartbeat, malformed,
};
use gym_core::transport::{ConnectOptions, PathInfo};
use gym_core::{Code, Error, Result};
use tokio::io::AsyncReadExt;
use tokio::task::JoinSet;

use crate::frames::buffers::ReceiveBufferPool;
use crate::frames::codec::decoder::{Decoder, Event};
use crate::frames::codec::frame::{FrameKind, greeting_frame};
use crate::frames::config::FramesConfig;
use crate::frames::connection::handshake::{broken, greeting};
use crate::frames::connection::send_queue::FrameSendQueue;
use crate::frames::connection::socket::{ReadHalf, Socket};

type End = CallingEnd<FrameSendQueue>;

/// Exchanges handshakes over a connected socket.
pub(crate) async fn open(
    socket: Socket,
    received: &[u8],
    path: PathInfo,
    (config, options): (&FramesConfig, &ConnectOptions),
    pool: Arc<ReceiveBufferPool>,
) -> Result<MuxLink<FrameSendQueue>> {
    let (mut read, write) = socket.split();
    let send_queue = FrameSendQueue::new(write);
    let limits = config.limits.of_channel(options);
    send_queue.post_urgent(greeting_frame(&limits));
    let mut decoder = Decoder::new(config.limits.message_limits(), Arc::clone(&pool), received);
    let theirs = greeting(&mut read, &mut decoder).await?;
    let end = CallingEnd::new(send_queue, &limits, theirs);
    // The task ends when the client end does: with the last channel and call, or with the connection.
    tokio::spawn(drive(Arc::clone(&end), read, decoder, pool, (limits, config.limits.silence_max)).boxed());
    Ok(MuxLink::new(end, path))
}

/// Reads and writes until the connection ends.
async fn drive(
    end: Arc<End>,
    read: ReadHalf,
    decoder: Decoder,
    pool: Arc<ReceiveBufferPool>,
    (limits, unused_max): (ConnectionLimits, Duration),
) {
    let heard = PeerActivity::default();
    let mut writer = JoinSet::new();
    let writing = Arc::clone(&end);
    // Runs in a separate task, so that both directions can be busy at once.
    writer.spawn(async move { writing.sender().run().await }.boxed());
    let trim = || pool.trim(unused_max);
    let error = tokio::select! {
        biased;
        () = end.over() => Error::unknown(Code::Unavailable, "the channel was closed"),
        error = read_answers(&end, read, decoder, &heard) => error,
        Some(ended) = writer.join_next() => broken(ended.ok()),
        error = heartbeat(end.sender(), &heard, &limits, end.theirs(), trim) => error,
    };
    end.end(&error);
    pool.trim(Duration::ZERO);
}

async fn read_answers(end: &End, mut read: ReadHalf, mut decoder: Decoder, heard: &PeerActivity) -> Error {
    let mut header = None;
    loop {
        loop {
            match decoder.next() {
                Ok(Some(event)) => {
                    if let Err(error) = take_event(end, &mut decoder, &mut header, event) {
                        return error;
                    }
                }
                Ok(None) => break,
                Err(error) => return error,
            }
        }
        match read.read(decoder.space()).await {
            Ok(0) if decoder.is_at_rest() => return Error::unknown(Code::Unavailable, "the peer has left"),
            Ok(0) => return Error::unknown(Code::Unavailable, "the peer left in the middle of an answer"),
            Ok(count) => decoder.advance(count),
            Err(error) => return broken(Some(error)),
        }
        heard.record();
    }
}

fn take_event(end: &End, decoder: &mut Decoder, header: &mut Option<ResponseHeader>, event: Event) -> Result<()> {
    match event {
        Event::Start(start) if start.kind == FrameKind::Response => {
            if end.on_opening(start.call, start.total)? {
                *header = Some(ResponseHeader::read(start.header)?);
                decoder.keep();
            }
        }
        Event::Complete(message) => {
            let header = header.take().ok_or_else(|| malformed("an answer without its beginning"))?;
            end.on_answer(message.call, header.into_response(message.head, message.segments));
        }
        Event::Failed(call, reason) => end.on_failed(call, reason)?,
        Event::Drain => end.on_drain(),
        Event::Heartbeat => {}
        Event::Handshake(_) | Event::Start(_) | Event::Segment(_) | Event::Cancel(_) => {
            return Err(malformed(format!("{event:?} is not for a caller")));
        }
    }
    Ok(())
}

//! The answering end of a framed connection.

use std::sync::Arc;
use std::time::Duration;

use gym_core::mux::{AnsweringEnd, Heard, RequestHeader, heartbeat, malformed};
use gym_core::{Code, Error, Handler, PeerInfo, Result};
use tokio::io::AsyncReadExt;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::config::FramesConfig;
use super::decode::{Decoder, Event};
use super::layout::{Kind, greeting_frame};
use super::link::{broken, greeting};
use super::outbox::FramesOutbox;
use super::pool::LandingPool;
use super::socket::{ReadHalf, Socket};

/// What the connections of a listener share.
#[derive(Clone, Debug)]
pub(crate) struct Hall {
    config: FramesConfig,
    pub(super) pool: Arc<LandingPool>,
    /// Calls of all connections.
    pub(super) calls: Arc<Semaphore>,
}

impl Hall {
    pub(crate) fn new(config: FramesConfig, calls: Arc<Semaphore>) -> Self {
        let pool = LandingPool::new(config.pool_bytes_max);
        Self { config, pool, calls }
    }
}

/// Answers the calls of one connection. Ends when the peer leaves, which it does soon after it was told that `drain` fired.
/// Dropping the future drops its running calls.
pub(crate) async fn serve(
    socket: Socket,
    already: &[u8],
    hall: Hall,
    handler: Arc<dyn Handler>,
    peer: PeerInfo,
    drain: CancellationToken,
) -> Result<()> {
    let Hall { config, pool, calls } = hall;
    let (mut read, write) = socket.split();
    let outbox = FramesOutbox::new(write);
    outbox.post_urgent(greeting_frame(&config.limits));
    let mut decoder = Decoder::new(config.limits.of_message(), Arc::clone(&pool), already);
    let patience = config.connect_timeout;
    let theirs = tokio::time::timeout(patience, greeting(&mut read, &mut decoder))
        .await
        .map_err(|_| Error::unknown(Code::DeadlineExceeded, format!("no greeting within {patience:?}")))
        .flatten()?;
    let end = AnsweringEnd::new(outbox, config.limits.clone(), theirs, calls, handler, peer);
    let ending = end.end_on_drop();
    let heard = Heard::default();
    let mut writer = JoinSet::new();
    let writing = Arc::clone(&end);
    writer.spawn(async move { writing.outbox().run().await });
    let trim = || pool.trim(config.limits.silence_max);
    let ended = tokio::select! {
        biased;
        ended = read_requests(&end, read, decoder, &heard) => ended,
        Some(ended) = writer.join_next() => Err(broken(ended.ok())),
        error = heartbeat(end.outbox(), &heard, &config.limits, end.theirs(), trim) => Err(error),
        never = end.drain_with(&drain) => match never {},
    };
    drop(ending);
    pool.trim(Duration::ZERO);
    ended
}

async fn read_requests(
    end: &Arc<AnsweringEnd<FramesOutbox>>,
    mut read: ReadHalf,
    mut decoder: Decoder,
    heard: &Heard,
) -> Result<()> {
    // Of the request that is on its way in.
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
        heard.set();
    }
}

fn take_event(
    end: &Arc<AnsweringEnd<FramesOutbox>>,
    decoder: &mut Decoder,
    header: &mut Option<RequestHeader>,
    event: Event,
) -> Result<()> {
    match event {
        Event::Opening(opening) if opening.kind == Kind::Request => {
            let read = RequestHeader::read(opening.header)?;
            if end.on_opening(opening.call, &read, opening.total)? {
                *header = Some(read);
                decoder.keep()?;
            }
        }
        Event::Landed(landed) => {
            let header = header.take().ok_or_else(|| malformed("a request without its beginning"))?;
            end.on_request(landed.call, header, landed.head, landed.segments);
        }
        Event::Cancel(call) => end.on_cancel(call),
        Event::Heartbeat => {}
        Event::Greeting(_) | Event::Opening(_) | Event::Failed(..) | Event::Drain => {
            return Err(malformed(format!("{event:?} is not for a server")));
        }
    }
    Ok(())
}

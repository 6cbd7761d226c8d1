//! The calling end of a framed connection.

use std::sync::Arc;
use std::time::Duration;

use gym_core::mux::{CallingEnd, Greeting, Heard, Limits, MuxLink, ResponseHeader, heartbeat, malformed};
use gym_core::{Code, Error, PathInfo, Result};
use tokio::io::AsyncReadExt;
use tokio::task::JoinSet;

use super::config::FramesConfig;
use super::decode::{Decoder, Event};
use super::layout::{Kind, greeting_frame};
use super::outbox::FramesOutbox;
use super::pool::LandingPool;
use super::socket::{ReadHalf, Socket};

type End = CallingEnd<FramesOutbox>;

/// Exchanges greetings over a connected socket.
pub(super) async fn open(
    socket: Socket,
    already: &[u8],
    path: PathInfo,
    config: &FramesConfig,
    pool: Arc<LandingPool>,
) -> Result<MuxLink<FramesOutbox>> {
    let (mut read, write) = socket.split();
    let outbox = FramesOutbox::new(write);
    outbox.post_urgent(greeting_frame(&config.limits));
    let mut decoder = Decoder::new(config.limits.of_message(), Arc::clone(&pool), already);
    let theirs = greeting(&mut read, &mut decoder).await?;
    let end = CallingEnd::new(outbox, &config.limits, theirs);
    // It ends when the end is over: with the last channel and call, or with the connection.
    tokio::spawn(drive(Arc::clone(&end), read, decoder, pool, config.limits.clone()));
    Ok(MuxLink::new(end, path))
}

/// Reads until the peer's greeting is there.
pub(super) async fn greeting(read: &mut ReadHalf, decoder: &mut Decoder) -> Result<Greeting> {
    loop {
        match decoder.next()? {
            Some(Event::Greeting(payload)) => return Greeting::read(payload),
            Some(_) => return Err(malformed("the first frame is not a greeting")),
            None => {}
        }
        match read.read(decoder.space()).await {
            Ok(0) => return Err(Error::unknown(Code::Unavailable, "the peer left before its greeting")),
            Ok(count) => decoder.advance(count),
            Err(error) => {
                return Err(Error::unknown(Code::Unavailable, "no greeting came").caused_by(error));
            }
        }
    }
}

/// Moves bytes until the connection is over.
async fn drive(end: Arc<End>, read: ReadHalf, decoder: Decoder, pool: Arc<LandingPool>, limits: Limits) {
    let heard = Heard::default();
    let mut writer = JoinSet::new();
    let writing = Arc::clone(&end);
    // A task of its own, so that both directions can be busy at once.
    writer.spawn(async move { writing.outbox().run().await });
    let trim = || pool.trim(limits.silence_max);
    let error = tokio::select! {
        biased;
        () = end.over() => Error::unknown(Code::Unavailable, "the channel was closed"),
        error = read_answers(&end, read, decoder, &heard) => error,
        Some(ended) = writer.join_next() => broken(ended.ok()),
        error = heartbeat(end.outbox(), &heard, &limits, end.theirs(), trim) => error,
    };
    end.end(&error);
    pool.trim(Duration::ZERO);
}

/// What it means that the socket failed.
pub(super) fn broken(error: Option<std::io::Error>) -> Error {
    let said = Error::unknown(Code::Unavailable, "the connection broke");
    match error {
        Some(error) => said.caused_by(error),
        None => said,
    }
}

async fn read_answers(end: &End, mut read: ReadHalf, mut decoder: Decoder, heard: &Heard) -> Error {
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
        heard.set();
    }
}

fn take_event(end: &End, decoder: &mut Decoder, header: &mut Option<ResponseHeader>, event: Event) -> Result<()> {
    match event {
        Event::Opening(opening) if opening.kind == Kind::Response => {
            if end.on_opening(opening.call, opening.total)? {
                *header = Some(ResponseHeader::read(opening.header)?);
                decoder.keep()?;
            }
        }
        Event::Landed(landed) => {
            let header = header.take().ok_or_else(|| malformed("an answer without its beginning"))?;
            end.on_answer(landed.call, header.into_response(landed.head, landed.segments));
        }
        Event::Failed(call, reason) => end.on_failed(call, reason)?,
        Event::Drain => end.on_drain(),
        Event::Heartbeat => {}
        Event::Greeting(_) | Event::Opening(_) | Event::Cancel(_) => {
            return Err(malformed(format!("{event:?} is not for a caller")));
        }
    }
    Ok(())
}

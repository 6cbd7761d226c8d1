//! The calling end of a framed connection.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use gym_core::{Code, Error, Link, Message, PathInfo, Reply, Request, Response, Result};
use tokio::io::AsyncReadExt;
use tokio::task::JoinSet;

use super::calls::{Answer, Shared, units};
use super::config::FramesConfig;
use super::decode::{Decoder, Event};
use super::layout::{Greeting, Kind, ResponseHeader, malformed, read_failed};
use super::outbox::Outbox;
use super::pool::LandingPool;
use super::pulse::{Heard, heartbeat};
use super::socket::{ReadHalf, Socket};

/// One connection that takes many calls at a time.
pub(super) struct FramesLink {
    shared: Arc<Shared>,
    path: PathInfo,
}

impl FramesLink {
    /// Exchanges greetings over a connected socket.
    pub(super) async fn open(
        socket: Socket,
        already: &[u8],
        path: PathInfo,
        config: &FramesConfig,
        pool: Arc<LandingPool>,
    ) -> Result<Self> {
        let (mut read, write) = socket.split();
        let outbox = Outbox::new(write);
        outbox.post_urgent(Greeting::of(config).frame());
        let mut decoder = Decoder::new(config.limits(), Arc::clone(&pool), already);
        let theirs = greeting(&mut read, &mut decoder).await?;
        let shared = Arc::new(Shared::new(outbox, config, theirs));
        // It ends when `closed` fires: with the last channel and call, or with the connection.
        tokio::spawn(drive(Arc::clone(&shared), read, decoder, pool, config.silence_max));
        Ok(Self { shared, path })
    }

    fn subject(&self, request: &Request) -> String {
        format!("{} {} at {}://{}", request.verb, request.route, self.path.scheme, self.path.peer)
    }
}

impl fmt::Debug for FramesLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FramesLink({}://{})", self.path.scheme, self.path.peer)
    }
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

#[async_trait]
impl Link for FramesLink {
    async fn send(&self, request: Request) -> Result<Reply> {
        let pending = async {
            self.shared.check_open()?;
            self.shared.check_size(&request.message)?;
            let (room, reply_room) = self.shared.room(&request).await?;
            self.shared.hand_over(&request, room, reply_room)
        };
        let pending = pending.await.map_err(|error| error.about(self.subject(&request)))?;
        let Request { verb, route, .. } = request;
        let path = self.path.clone();
        Ok(Box::pin(async move {
            pending
                .answered()
                .await
                .map_err(|error| error.about(format!("{verb} {route} at {}://{}", path.scheme, path.peer)))
        }))
    }

    fn path(&self) -> &PathInfo {
        &self.path
    }

    async fn closed(&self) -> Error {
        self.shared.closed.cancelled().await;
        self.shared.lost(false).about(format!("{}://{}", self.path.scheme, self.path.peer))
    }

    async fn close(&self, grace: Duration) -> Result<()> {
        self.shared.refuse("the channel was closed", false);
        let drained = tokio::time::timeout(grace, async {
            loop {
                let idle = self.shared.idle.notified();
                if self.shared.lock().waiting.is_empty() {
                    return;
                }
                idle.await;
            }
        })
        .await;
        self.shared.end(&Error::unknown(Code::Unavailable, "the channel was closed"));
        drained.map_err(|_| {
            Error::unknown(Code::DeadlineExceeded, "calls were still running when the channel closed")
                .about(self.path.peer.to_string())
        })
    }
}

impl Drop for FramesLink {
    fn drop(&mut self) {
        // Replies that were started may still come, and the last of them closes.
        self.shared.refuse("the channel was dropped", true);
    }
}

/// Moves bytes until the connection is over.
async fn drive(shared: Arc<Shared>, read: ReadHalf, decoder: Decoder, pool: Arc<LandingPool>, silence_max: Duration) {
    let heard = Heard::default();
    let mut writer = JoinSet::new();
    let writing = Arc::clone(&shared);
    // A task of its own, so that both directions can be busy at once.
    writer.spawn(async move { writing.outbox.run().await });
    let error = tokio::select! {
        biased;
        () = shared.closed.cancelled() => Error::unknown(Code::Unavailable, "the channel was closed"),
        error = read_answers(&shared, read, decoder, &heard) => error,
        Some(ended) = writer.join_next() => broken(ended.ok()),
        error = heartbeat(&shared.outbox, &heard, &pool, silence_max, &shared.theirs) => error,
    };
    shared.end(&error);
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

async fn read_answers(shared: &Shared, mut read: ReadHalf, mut decoder: Decoder, heard: &Heard) -> Error {
    let mut header = None;
    loop {
        loop {
            match decoder.next() {
                Ok(Some(event)) => {
                    if let Err(error) = take_event(shared, &mut decoder, &mut header, event) {
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

fn take_event(shared: &Shared, decoder: &mut Decoder, header: &mut Option<ResponseHeader>, event: Event) -> Result<()> {
    match event {
        Event::Opening(opening) if opening.kind == Kind::Response => {
            let most = shared.lock().waiting.get(&opening.call).map(|waiting| waiting.reply_bytes_max);
            match most {
                // Its caller has left: read past it.
                None => {}
                Some(most) if opening.total > most => {
                    return Err(malformed(format!("an answer of {} bytes; {most} was the most", opening.total)));
                }
                Some(_) => {
                    *header = Some(ResponseHeader::read(opening.header)?);
                    decoder.keep()?;
                }
            }
        }
        Event::Landed(landed) => {
            let header = header.take().ok_or_else(|| malformed("an answer without its beginning"))?;
            if let Some(waiting) = shared.remove(landed.call) {
                let message =
                    Message { content_type: header.content_type, head: landed.head.into(), segments: landed.segments };
                // What has arrived keeps only its own bytes of room.
                let mut reply_room = waiting.reply_room;
                let room = reply_room.split(units(message.len()).min(reply_room.num_permits()));
                let response = Response { status: header.status, metadata: header.metadata, message };
                let _ = waiting.answer.send(Ok(Answer { response, _room: room }));
            }
        }
        Event::Failed(call, payload) => {
            let error = read_failed(payload)?;
            if let Some(waiting) = shared.remove(call) {
                let _ = waiting.answer.send(Err(error));
            }
        }
        Event::Drain => shared.refuse("the peer takes no new calls", true),
        Event::Heartbeat => {}
        Event::Greeting(_) | Event::Opening(_) | Event::Cancel(_) => {
            return Err(malformed(format!("{event:?} is not for a caller")));
        }
    }
    Ok(())
}

//! What comes to the calling end of a connection.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use bytes::Bytes;
use gym_core::mux::{CallingEnd, Greeting, Heard, Limits, ResponseHeader, malformed};
use gym_core::{Code, Error, Result};
use tokio::sync::oneshot;

use super::assembly::Landed;
use super::inbox::{Inbox, Opening, here};
use super::outbox::Outbox;
use super::wire::{Kind, Wire};
use crate::fabric::{Connection, Disposition, End, Lanes, Payload, PeerEvents};
use crate::pool::Pool;

/// The calling end of one connection, as its fabric sees it.
pub(crate) struct Caller {
    limits: Limits,
    cut: usize,
    opened: OnceLock<(Connection, Lanes)>,
    /// Who waits for the peer's greeting.
    waiting: Mutex<Option<oneshot::Sender<Result<Greeted>>>>,
    end: OnceLock<Arc<CallingEnd<Outbox>>>,
    inbox: Mutex<Inbox<ResponseHeader>>,
    pub(crate) heard: Heard,
}

/// A connection that takes calls.
pub(crate) struct Greeted {
    pub(crate) end: Arc<CallingEnd<Outbox>>,
    pub(crate) lanes: Lanes,
}

impl Caller {
    /// One whose peer's greeting somebody waits for.
    pub(crate) fn new(limits: Limits, cut: usize, pool: Pool) -> (Arc<Self>, oneshot::Receiver<Result<Greeted>>) {
        let (waiting, greeted) = oneshot::channel();
        let inbox = Inbox::new(limits.of_message(), pool);
        let caller = Self {
            limits,
            cut,
            opened: OnceLock::new(),
            waiting: Mutex::new(Some(waiting)),
            end: OnceLock::new(),
            inbox: Mutex::new(inbox),
            heard: Heard::default(),
        };
        (Arc::new(caller), greeted)
    }

    fn greet(&self, payload: &[u8]) -> Result<()> {
        let theirs = Greeting::read(Bytes::copy_from_slice(payload))?;
        let Some((connection, lanes)) = self.opened.get() else { return Err(malformed("a greeting before all else")) };
        let outbox = Outbox::new(connection.clone(), self.cut);
        let end = CallingEnd::new(outbox, &self.limits, theirs);
        if self.end.set(Arc::clone(&end)).is_err() {
            return Err(malformed("a second greeting"));
        }
        let told = self
            .take_waiting()
            .map(|waiting| waiting.send(Ok(Greeted { end: Arc::clone(&end), lanes: lanes.clone() })));
        if !matches!(told, Some(Ok(()))) {
            // Whoever wanted the connection has left.
            end.end(&Error::unknown(Code::Unavailable, "nobody waits for the connection any more"));
        }
        Ok(())
    }

    fn open(&self, end: &CallingEnd<Outbox>, opening: Option<Opening<ResponseHeader>>) -> Result<()> {
        let Some(opening) = opening else { return Ok(()) };
        let call = opening.0;
        if end.on_opening(call, opening.1.total)? {
            let landed = self.inbox().keep(opening);
            if let Some(landed) = landed {
                answer(end, call, landed);
            }
        }
        Ok(())
    }

    fn take_waiting(&self) -> Option<oneshot::Sender<Result<Greeted>>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn inbox(&self) -> MutexGuard<'_, Inbox<ResponseHeader>> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn answer(end: &CallingEnd<Outbox>, call: u64, landed: Landed<ResponseHeader>) {
    end.on_answer(call, landed.header.into_response(landed.head, landed.segments));
}

impl PeerEvents for Caller {
    fn opened(&self, connection: &Connection, lanes: &Lanes) {
        let _ = self.opened.set((connection.clone(), lanes.clone()));
    }

    fn message(&self, header: &[u8], payload: Payload<'_>) -> Result<Disposition> {
        self.heard.set();
        let wire = Wire::read(header)?;
        if wire.kind == Kind::Greeting {
            self.greet(here(&payload)?)?;
            return Ok(Disposition::Done);
        }
        let Some(end) = self.end.get() else {
            // It overtakes the greeting of a server that was told to stop before it began.
            if wire.kind == Kind::Drain {
                return Err(Error::not_started(Code::Unavailable, "the peer takes no new calls"));
            }
            return Err(malformed(format!("{:?} before the greeting", wire.kind)));
        };
        match wire.kind {
            Kind::Response => {
                let opening = self.inbox().begin(wire, &payload)?;
                self.open(end, opening)?;
            }
            Kind::Header => {
                let opening = self.inbox().more(wire, &payload)?;
                self.open(end, opening)?;
            }
            Kind::Piece => return self.inbox().piece(wire, &payload),
            Kind::Failed => {
                self.inbox().forget(wire.call);
                end.on_failed(wire.call, Bytes::copy_from_slice(here(&payload)?))?;
            }
            Kind::Drain => end.on_drain(),
            Kind::Ping => end.outbox().echo(wire.call),
            Kind::Pong => end.outbox().echoed(wire.call),
            Kind::Greeting | Kind::Request | Kind::Cancel => {
                return Err(malformed(format!("{:?} is not for a caller", wire.kind)));
            }
        }
        Ok(Disposition::Done)
    }

    fn landed(&self, key: u64, bytes: Bytes) {
        self.heard.set();
        let landed = self.inbox().landed(key, bytes);
        if let (Some((call, landed)), Some(end)) = (landed, self.end.get()) {
            answer(end, call, landed);
        }
    }

    fn ended(&self, why: End) {
        let error = match why {
            End::Closed => Error::unknown(Code::Unavailable, "the channel was closed"),
            End::ClosedByPeer if self.inbox().is_at_rest() => Error::unknown(Code::Unavailable, "the peer has left"),
            End::ClosedByPeer => Error::unknown(Code::Unavailable, "the peer left in the middle of an answer"),
            End::Lost(error) => error,
        };
        if let Some(end) = self.end.get() {
            end.end(&error);
        } else if let Some(waiting) = self.take_waiting() {
            let _ = waiting.send(Err(error));
        }
    }
}

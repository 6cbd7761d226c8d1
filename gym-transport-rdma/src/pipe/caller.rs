//! What comes to the calling end of a connection.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use bytes::Bytes;
use gym_core::mux::header::FAILED_BYTES_MAX;
use gym_core::mux::{CallingEnd, Greeting, Heard, Limits, ResponseHeader, Room, malformed};
use gym_core::{Code, Error, Result};
use tokio::sync::oneshot;

use super::assembly::Landed;
use super::inbox::{Inbox, Opening, here};
use super::outbox::{Answers, Carrier, Outbox};
use super::wire::{Kind, Wire};
use crate::fabric::{Connection, Disposition, End, Lanes, Payload, PeerEvents};

/// The calling end of one connection, as its fabric sees it.
pub(crate) struct Caller<C: Carrier = Connection> {
    limits: Limits,
    cut: usize,
    opened: OnceLock<(C, Lanes)>,
    /// Who waits for the peer's greeting.
    waiting: Mutex<Option<oneshot::Sender<Result<Greeted<C>>>>>,
    end: OnceLock<Arc<CallingEnd<Outbox<C>>>>,
    inbox: Arc<Mutex<Inbox<ResponseHeader>>>,
    pub(crate) heard: Heard,
}

/// A connection that takes calls.
pub(crate) struct Greeted<C: Carrier = Connection> {
    pub(crate) end: Arc<CallingEnd<Outbox<C>>>,
    pub(crate) lanes: Lanes,
}

impl<C: Carrier + Clone> Caller<C> {
    /// One whose peer's greeting somebody waits for.
    pub(crate) fn new(limits: Limits, cut: usize) -> (Arc<Self>, oneshot::Receiver<Result<Greeted<C>>>) {
        let (waiting, greeted) = oneshot::channel();
        // What lands of an answer that was given up keeps its call's room.
        let inbox = Inbox::new(limits.of_message(), usize::MAX);
        let caller = Self {
            limits,
            cut,
            opened: OnceLock::new(),
            waiting: Mutex::new(Some(waiting)),
            end: OnceLock::new(),
            inbox: Arc::new(Mutex::new(inbox)),
            heard: Heard::default(),
        };
        (Arc::new(caller), greeted)
    }

    fn greet(&self, payload: &[u8]) -> Result<()> {
        let theirs = Greeting::read(Bytes::copy_from_slice(payload))?;
        let Some((carrier, lanes)) = self.opened.get() else { return Err(malformed("a greeting before all else")) };
        let outbox = Outbox::new(carrier.clone(), self.cut, Answers::Taken(Arc::clone(&self.inbox)));
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

    fn open(&self, end: &CallingEnd<Outbox<C>>, opening: Option<Opening<ResponseHeader>>) -> Result<()> {
        let Some(opening) = opening else { return Ok(()) };
        let call = opening.0;
        if !end.on_opening(call, opening.1.total)? {
            return Ok(());
        }
        let landed = self.inbox().keep(opening)?;
        if let Some(landed) = landed {
            answer(end, call, landed);
        } else if !end.is_awaited(call) {
            // Its caller has left between, and found nothing to forget.
            self.inbox().forget(call, Room::default());
        }
        Ok(())
    }

    /// A call has no answer.
    fn fail(&self, end: &CallingEnd<Outbox<C>>, call: u64, reason: &[u8]) -> Result<()> {
        if reason.len() > FAILED_BYTES_MAX {
            return Err(malformed(format!("a reason of {} bytes; {FAILED_BYTES_MAX} are the most", reason.len())));
        }
        if self.inbox().forget(call, Room::default()) {
            return Err(malformed(format!("call {call} fails within its answer")));
        }
        end.on_failed(call, Bytes::copy_from_slice(reason))
    }

    fn take_waiting(&self) -> Option<oneshot::Sender<Result<Greeted<C>>>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    pub(super) fn on_opened(&self, carrier: &C, lanes: &Lanes) {
        let _ = self.opened.set((carrier.clone(), lanes.clone()));
    }

    pub(super) fn on_message(&self, header: &[u8], payload: &Payload<'_>) -> Result<Disposition> {
        self.heard.set();
        let wire = Wire::read(header)?;
        if wire.kind == Kind::Greeting {
            self.greet(here(payload)?)?;
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
                let opening = self.inbox().begin(wire, payload)?;
                self.open(end, opening)?;
            }
            Kind::Header => {
                let opening = self.inbox().more(wire, payload)?;
                self.open(end, opening)?;
            }
            Kind::Piece => return self.inbox().piece(wire, payload),
            Kind::Failed => self.fail(end, wire.call, here(payload)?)?,
            Kind::Drain => end.on_drain(),
            Kind::Ping => end.outbox().echo(wire.call),
            Kind::Pong => end.outbox().echoed(wire.call),
            Kind::Greeting | Kind::Request | Kind::Cancel => {
                return Err(malformed(format!("{:?} is not for a caller", wire.kind)));
            }
        }
        Ok(Disposition::Done)
    }

    pub(super) fn on_landed(&self, key: u64, bytes: Bytes) {
        self.heard.set();
        let landed = self.inbox().landed(key, bytes);
        if let (Some((call, landed)), Some(end)) = (landed, self.end.get()) {
            answer(end, call, landed);
        }
    }

    pub(super) fn on_ended(&self, why: End) {
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

    /// How many answers have begun, and are not complete.
    #[cfg(feature = "testing")]
    pub(super) fn keeps(&self) -> usize {
        self.inbox().incomplete()
    }

    fn inbox(&self) -> MutexGuard<'_, Inbox<ResponseHeader>> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn answer<C: Carrier>(end: &CallingEnd<Outbox<C>>, call: u64, landed: Landed<ResponseHeader>) {
    end.on_answer(call, landed.header.into_response(landed.head, landed.segments));
}

impl PeerEvents for Caller {
    fn opened(&self, connection: &Connection, lanes: &Lanes) {
        self.on_opened(connection, lanes);
    }

    fn message(&self, header: &[u8], payload: Payload<'_>) -> Result<Disposition> {
        self.on_message(header, &payload)
    }

    fn landed(&self, key: u64, bytes: Bytes) {
        self.on_landed(key, bytes);
    }

    fn ended(&self, why: End) {
        self.on_ended(why);
    }
}

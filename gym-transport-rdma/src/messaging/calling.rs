//! Calling end of a connection: receives responses from the fabric.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use bytes::Bytes;
use gym_core::transport::mux::header::FAILED_BYTES_MAX;
use gym_core::transport::mux::{
    CallingEnd, CapacityPermit, ConnectionLimits, Handshake, PeerActivity, ResponseHeader, malformed,
};
use gym_core::{Code, Error, Result};
use tokio::sync::oneshot;

use crate::fabric::{CloseReason, Connection, ConnectionEvents, Disposition, Lanes, Payload};
use crate::messaging::header::{AmHeader, AmKind};
use crate::messaging::reassembly::message::CompleteMessage;
use crate::messaging::reassembly::{FirstChunk, Reassembly, eager_bytes};
use crate::messaging::send_queue::{Carrier, EndRole, UcxSendQueue};

/// Handles the fabric's events of a connection to a peer that we call.
pub(crate) struct CallingEvents<C: Carrier = Connection> {
    limits: ConnectionLimits,
    cut: usize,
    opened: OnceLock<(C, Lanes)>,
    /// Waits for the peer's greeting.
    waiting: Mutex<Option<oneshot::Sender<Result<EstablishedConnection<C>>>>>,
    end: OnceLock<Arc<CallingEnd<UcxSendQueue<C>>>>,
    reassembly: Arc<Mutex<Reassembly<ResponseHeader>>>,
    pub(crate) heard: PeerActivity,
}

/// A connection that takes calls.
pub(crate) struct EstablishedConnection<C: Carrier = Connection> {
    pub(crate) end: Arc<CallingEnd<UcxSendQueue<C>>>,
    pub(crate) lanes: Lanes,
}

impl<C: Carrier + Clone> CallingEvents<C> {
    /// The receiver waits for the peer's greeting.
    pub(crate) fn new(
        limits: ConnectionLimits,
        cut: usize,
    ) -> (Arc<Self>, oneshot::Receiver<Result<EstablishedConnection<C>>>) {
        let (waiting, greeted) = oneshot::channel();
        // Chunks of a response whose call was cancelled hold the capacity of the call.
        let reassembly = Reassembly::new(limits.message_limits(), usize::MAX);
        let caller = Self {
            limits,
            cut,
            opened: OnceLock::new(),
            waiting: Mutex::new(Some(waiting)),
            end: OnceLock::new(),
            reassembly: Arc::new(Mutex::new(reassembly)),
            heard: PeerActivity::default(),
        };
        (Arc::new(caller), greeted)
    }

    fn greet(&self, payload: &[u8]) -> Result<()> {
        let theirs = Handshake::read(Bytes::copy_from_slice(payload))?;
        let Some((carrier, lanes)) = self.opened.get() else { return Err(malformed("a greeting before all else")) };
        let send_queue = UcxSendQueue::new(carrier.clone(), self.cut, EndRole::Calling(Arc::clone(&self.reassembly)));
        let end = CallingEnd::new(send_queue, &self.limits, theirs);
        if self.end.set(Arc::clone(&end)).is_err() {
            return Err(malformed("a second greeting"));
        }
        let told = self
            .take_waiting()
            .map(|waiting| waiting.send(Ok(EstablishedConnection { end: Arc::clone(&end), lanes: lanes.clone() })));
        if !matches!(told, Some(Ok(()))) {
            // Whoever wanted the connection has left.
            end.end(&Error::unknown(Code::Unavailable, "nobody waits for the connection any more"));
        }
        Ok(())
    }

    fn open(&self, end: &CallingEnd<UcxSendQueue<C>>, first_chunk: Option<FirstChunk<ResponseHeader>>) -> Result<()> {
        let Some(first_chunk) = first_chunk else { return Ok(()) };
        let call = first_chunk.0;
        if !end.on_opening(call, first_chunk.1.total)? {
            return Ok(());
        }
        let landed = self.reassembly().keep(first_chunk)?;
        if let Some(landed) = landed {
            answer(end, call, landed);
        } else if !end.is_awaited(call) {
            // Its caller has left between, and found nothing to forget.
            self.reassembly().forget(call, CapacityPermit::default());
        }
        Ok(())
    }

    /// A call has no answer.
    fn fail(&self, end: &CallingEnd<UcxSendQueue<C>>, call: u64, reason: &[u8]) -> Result<()> {
        if reason.len() > FAILED_BYTES_MAX {
            return Err(malformed(format!("a reason of {} bytes; {FAILED_BYTES_MAX} are the most", reason.len())));
        }
        if self.reassembly().forget(call, CapacityPermit::default()) {
            return Err(malformed(format!("call {call} fails within its answer")));
        }
        end.on_failed(call, Bytes::copy_from_slice(reason))
    }

    fn take_waiting(&self) -> Option<oneshot::Sender<Result<EstablishedConnection<C>>>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    pub(super) fn on_opened(&self, carrier: &C, lanes: &Lanes) {
        let _ = self.opened.set((carrier.clone(), lanes.clone()));
    }

    pub(super) fn on_message(&self, header: &[u8], payload: &Payload<'_>) -> Result<Disposition> {
        self.heard.record();
        let am = AmHeader::read(header)?;
        if am.kind == AmKind::Handshake {
            self.greet(eager_bytes(payload)?)?;
            return Ok(Disposition::Done);
        }
        let Some(end) = self.end.get() else {
            // It overtakes the greeting of a server that was told to stop before it began.
            if am.kind == AmKind::Drain {
                return Err(Error::not_started(Code::Unavailable, "the peer takes no new calls"));
            }
            return Err(malformed(format!("{:?} before the greeting", am.kind)));
        };
        match am.kind {
            AmKind::Response => {
                let first_chunk = self.reassembly().begin(am, payload)?;
                self.open(end, first_chunk)?;
            }
            AmKind::HeaderRest => {
                let first_chunk = self.reassembly().more(am, payload)?;
                self.open(end, first_chunk)?;
            }
            AmKind::Chunk => return self.reassembly().chunk(am, payload),
            AmKind::Failed => self.fail(end, am.call, eager_bytes(payload)?)?,
            AmKind::Drain => end.on_drain(),
            AmKind::Ping => end.sender().echo(am.call),
            AmKind::Pong => end.sender().echoed(am.call),
            AmKind::Handshake | AmKind::Request | AmKind::Cancel => {
                return Err(malformed(format!("{:?} is not for a caller", am.kind)));
            }
        }
        Ok(Disposition::Done)
    }

    pub(super) fn on_landed(&self, key: u64, bytes: Bytes) {
        self.heard.record();
        let landed = self.reassembly().landed(key, bytes);
        if let (Some((call, landed)), Some(end)) = (landed, self.end.get()) {
            answer(end, call, landed);
        }
    }

    pub(super) fn on_ended(&self, why: CloseReason) {
        let error = match why {
            CloseReason::Closed => Error::unknown(Code::Unavailable, "the channel was closed"),
            CloseReason::ClosedByPeer if self.reassembly().is_at_rest() => {
                Error::unknown(Code::Unavailable, "the peer has left")
            }
            CloseReason::ClosedByPeer => Error::unknown(Code::Unavailable, "the peer left in the middle of an answer"),
            CloseReason::Lost(error) => error,
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
        self.reassembly().incomplete()
    }

    fn reassembly(&self) -> MutexGuard<'_, Reassembly<ResponseHeader>> {
        self.reassembly.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn answer<C: Carrier>(end: &CallingEnd<UcxSendQueue<C>>, call: u64, landed: CompleteMessage<ResponseHeader>) {
    end.on_answer(call, landed.header.into_response(landed.head, landed.segments));
}

impl ConnectionEvents for CallingEvents {
    fn opened(&self, connection: &Connection, lanes: &Lanes) {
        self.on_opened(connection, lanes);
    }

    fn message(&self, header: &[u8], payload: Payload<'_>) -> Result<Disposition> {
        self.on_message(header, &payload)
    }

    fn landed(&self, key: u64, bytes: Bytes) {
        self.on_landed(key, bytes);
    }

    fn ended(&self, why: CloseReason) {
        self.on_ended(why);
    }
}

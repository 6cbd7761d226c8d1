//! Calling end of a connection: receives responses from the fabric.

use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use gym_core::transport::mux::header::FAILED_BYTES_MAX;
use gym_core::transport::mux::{
    CallingEnd, CapacityPermit, ConnectionLimits, Handshake, PeerActivity, ResponseHeader, malformed,
};
use gym_core::{Code, Error, Result};
use parking_lot::Mutex;
use tokio::sync::oneshot;

use crate::fabric::{CloseReason, Connection, ConnectionEvents, Disposition, Lanes, Payload};
use crate::messaging::header::{AmHeader, AmKind};
use crate::messaging::reassembly::message::CompleteMessage;
use crate::messaging::reassembly::{FirstChunk, Reassembly, eager_bytes};
use crate::messaging::send_queue::{Carrier, EndRole, UcxSendQueue};

/// Event receiver of a connection to a peer that this end calls.
pub(crate) struct CallingEvents<C: Carrier = Connection> {
    limits: ConnectionLimits,
    cut: usize,
    opened: OnceLock<(C, Lanes)>,
    /// Receives the connection once the peer's handshake has arrived.
    waiting: Mutex<Option<oneshot::Sender<Result<EstablishedConnection<C>>>>>,
    end: OnceLock<Arc<CallingEnd<UcxSendQueue<C>>>>,
    reassembly: Arc<Mutex<Reassembly<ResponseHeader>>>,
    pub(crate) activity: PeerActivity,
}

/// A connection that is ready for calls.
pub(crate) struct EstablishedConnection<C: Carrier = Connection> {
    pub(crate) end: Arc<CallingEnd<UcxSendQueue<C>>>,
    pub(crate) lanes: Lanes,
}

impl<C: Carrier + Clone> CallingEvents<C> {
    /// Creates the event receiver. The returned channel yields the connection after the peer's handshake.
    pub(crate) fn new(
        limits: ConnectionLimits,
        cut: usize,
    ) -> (Arc<Self>, oneshot::Receiver<Result<EstablishedConnection<C>>>) {
        let (waiting, established) = oneshot::channel();
        // The chunks of a response whose call was cancelled hold the capacity of the call.
        let reassembly = Reassembly::new(limits.message_limits(), usize::MAX);
        let caller = Self {
            limits,
            cut,
            opened: OnceLock::new(),
            waiting: Mutex::new(Some(waiting)),
            end: OnceLock::new(),
            reassembly: Arc::new(Mutex::new(reassembly)),
            activity: PeerActivity::default(),
        };
        (Arc::new(caller), established)
    }

    fn on_handshake(&self, payload: &[u8]) -> Result<()> {
        let theirs = Handshake::read(Bytes::copy_from_slice(payload))?;
        let Some((carrier, lanes)) = self.opened.get() else {
            return Err(malformed("a handshake before the connection opened"));
        };
        let send_queue = UcxSendQueue::new(carrier.clone(), self.cut, EndRole::Calling(Arc::clone(&self.reassembly)));
        let end = CallingEnd::new(send_queue, &self.limits, theirs);
        if self.end.set(Arc::clone(&end)).is_err() {
            return Err(malformed("a second handshake"));
        }
        let delivered = self
            .take_waiting()
            .map(|waiting| waiting.send(Ok(EstablishedConnection { end: Arc::clone(&end), lanes: lanes.clone() })));
        if !matches!(delivered, Some(Ok(()))) {
            // The caller that connected was cancelled.
            end.end(&Error::unknown(Code::Unavailable, "connecting was cancelled"));
        }
        Ok(())
    }

    fn open(&self, end: &CallingEnd<UcxSendQueue<C>>, first_chunk: Option<FirstChunk<ResponseHeader>>) -> Result<()> {
        let Some(first_chunk) = first_chunk else { return Ok(()) };
        let call = first_chunk.0;
        if !end.on_opening(call, first_chunk.1.total)? {
            return Ok(());
        }
        let landed = self.reassembly.lock().keep(first_chunk)?;
        if let Some(landed) = landed {
            complete(end, call, landed);
        } else if !end.is_awaited(call) {
            // The caller was cancelled meanwhile, before there was a message to discard.
            self.reassembly.lock().forget(call, CapacityPermit::default());
        }
        Ok(())
    }

    /// Fails a call, as the peer reports.
    fn fail(&self, end: &CallingEnd<UcxSendQueue<C>>, call: u64, reason: &[u8]) -> Result<()> {
        if reason.len() > FAILED_BYTES_MAX {
            return Err(malformed(format!("a reason of {} bytes; the maximum is {FAILED_BYTES_MAX}", reason.len())));
        }
        if self.reassembly.lock().forget(call, CapacityPermit::default()) {
            return Err(malformed(format!("call {call} fails within its response")));
        }
        end.on_failed(call, Bytes::copy_from_slice(reason))
    }

    fn take_waiting(&self) -> Option<oneshot::Sender<Result<EstablishedConnection<C>>>> {
        self.waiting.lock().take()
    }

    pub(super) fn on_opened(&self, carrier: &C, lanes: &Lanes) {
        let _ = self.opened.set((carrier.clone(), lanes.clone()));
    }

    /// Handles a message of the peer.
    ///
    /// # Errors
    /// If the message violates the protocol, or the peer drains before its handshake. The connection then ends.
    pub(super) fn on_message(&self, header: &[u8], payload: &Payload<'_>) -> Result<Disposition> {
        self.activity.record();
        let am = AmHeader::read(header)?;
        if am.kind == AmKind::Handshake {
            self.on_handshake(eager_bytes(payload)?)?;
            return Ok(Disposition::Done);
        }
        let Some(end) = self.end.get() else {
            // A server that was stopped before it began sends `Drain`, which overtakes its handshake.
            if am.kind == AmKind::Drain {
                return Err(Error::not_started(Code::Unavailable, "the peer is draining and accepts no new calls"));
            }
            return Err(malformed(format!("{:?} before the handshake", am.kind)));
        };
        match am.kind {
            AmKind::Response => {
                let first_chunk = self.reassembly.lock().begin(am, payload)?;
                self.open(end, first_chunk)?;
            }
            AmKind::HeaderRest => {
                let first_chunk = self.reassembly.lock().more(am, payload)?;
                self.open(end, first_chunk)?;
            }
            AmKind::Chunk => return self.reassembly.lock().chunk(am, payload),
            AmKind::Failed => self.fail(end, am.call, eager_bytes(payload)?)?,
            AmKind::Drain => end.on_drain(),
            AmKind::Ping => end.sender().echo(am.call),
            AmKind::Pong => end.sender().echoed(am.call),
            AmKind::Handshake | AmKind::Request | AmKind::Cancel => {
                return Err(malformed(format!("unexpected {:?} from an answering end", am.kind)));
            }
        }
        Ok(Disposition::Done)
    }

    pub(super) fn on_landed(&self, key: u64, bytes: Bytes) {
        self.activity.record();
        let landed = self.reassembly.lock().landed(key, bytes);
        if let (Some((call, landed)), Some(end)) = (landed, self.end.get()) {
            complete(end, call, landed);
        }
    }

    pub(super) fn on_ended(&self, why: CloseReason) {
        let error = match why {
            CloseReason::Closed => Error::unknown(Code::Unavailable, "the channel was closed"),
            CloseReason::ClosedByPeer if self.reassembly.lock().is_at_rest() => {
                Error::unknown(Code::Unavailable, "the peer disconnected")
            }
            CloseReason::ClosedByPeer => Error::unknown(Code::Unavailable, "the peer disconnected within a response"),
            CloseReason::Lost(error) => error,
        };
        if let Some(end) = self.end.get() {
            end.end(&error);
        } else if let Some(waiting) = self.take_waiting() {
            let _ = waiting.send(Err(error));
        }
    }

    /// Number of responses that are incomplete.
    #[cfg(feature = "testing")]
    pub(super) fn incomplete(&self) -> usize {
        self.reassembly.lock().incomplete()
    }
}

fn complete<C: Carrier>(end: &CallingEnd<UcxSendQueue<C>>, call: u64, landed: CompleteMessage<ResponseHeader>) {
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

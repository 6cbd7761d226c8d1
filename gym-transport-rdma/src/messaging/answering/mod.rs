//! Answering end of a connection: receives requests from the fabric.

pub(crate) mod request_queue;

use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use bytes::Bytes;
use gym_core::message::PeerInfo;
use gym_core::transport::mux::{AnsweringEnd, ConnectionLimits, Handshake, PeerActivity, malformed};
use gym_core::{CancelToken, Result};
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, mpsc};

use crate::fabric::{CloseReason, Connection, ConnectionEvents, Disposition, Lanes, Payload};
use crate::messaging::answering::request_queue::RequestQueue;
use crate::messaging::header::{AmHeader, AmKind};
use crate::messaging::reassembly::Reassembly;
use crate::messaging::send_queue::UcxSendQueue;

/// Event receiver of a connection whose peer calls this end.
pub(crate) struct AnsweringEvents {
    me: Weak<Self>,
    /// The peer's handshake.
    pub(crate) theirs: Handshake,
    pub(crate) peer: PeerInfo,
    /// Permit of a peer that has not connected yet.
    pending: Mutex<Option<OwnedSemaphorePermit>>,
    /// Receives the peer when it connects.
    arrivals: mpsc::Sender<ArrivedPeer>,
    serving: OnceLock<Serving>,
    requests: Mutex<RequestQueue>,
    pub(crate) activity: PeerActivity,
    ended: Mutex<Option<CloseReason>>,
    over: CancelToken,
}

/// A peer that has connected. Dropping it closes the connection, unless it is served.
pub(crate) struct ArrivedPeer {
    connection: Connection,
    pub(crate) lanes: Lanes,
    pub(crate) events: Arc<AnsweringEvents>,
    _pending: Option<OwnedSemaphorePermit>,
    served: bool,
}

impl ArrivedPeer {
    /// Takes the connection to serve it.
    pub(crate) fn served(mut self) -> (Connection, Arc<AnsweringEvents>) {
        self.served = true;
        (self.connection.clone(), Arc::clone(&self.events))
    }
}

impl Drop for ArrivedPeer {
    fn drop(&mut self) {
        if !self.served {
            self.connection.close(Duration::ZERO);
        }
    }
}

struct Serving {
    end: Arc<AnsweringEnd<UcxSendQueue>>,
    runtime: Handle,
}

impl AnsweringEvents {
    /// Creates the event receiver. It sends the peer to `arrivals` when the peer connects.
    pub(crate) fn new(
        limits: &ConnectionLimits,
        theirs: Handshake,
        peer: PeerInfo,
        arrivals: mpsc::Sender<ArrivedPeer>,
        pending: OwnedSemaphorePermit,
    ) -> Arc<Self> {
        // What a peer of this crate has in flight, cancelled or not. A message larger than the capacity is sent alone.
        let abandoned_bytes_max = limits.request_bytes_in_flight_max.max(limits.message_bytes_max);
        let requests = RequestQueue::new(Reassembly::new(limits.message_limits(), abandoned_bytes_max));
        Arc::new_cyclic(|me| Self {
            me: Weak::clone(me),
            theirs,
            peer,
            pending: Mutex::new(Some(pending)),
            arrivals,
            serving: OnceLock::new(),
            requests: Mutex::new(requests),
            activity: PeerActivity::default(),
            ended: Mutex::default(),
            over: CancelToken::new(),
        })
    }

    /// Delivers later messages to this end. Must be called in the tokio runtime that runs its handlers, before the
    /// handshake.
    pub(crate) fn serve(&self, end: Arc<AnsweringEnd<UcxSendQueue>>) {
        let _ = self.serving.set(Serving { end, runtime: Handle::current() });
    }

    /// Waits for the end of the connection.
    ///
    /// # Errors
    /// If the connection broke, or the peer closed it within a request.
    pub(crate) async fn over(&self) -> Result<()> {
        self.over.cancelled().await;
        match self.ended.lock().take() {
            Some(CloseReason::Lost(error)) => Err(error),
            Some(CloseReason::ClosedByPeer) if !self.requests.lock().is_at_rest() => {
                Err(malformed("the peer disconnected within a request"))
            }
            _ => Ok(()),
        }
    }

    fn take_pending(&self) -> Option<OwnedSemaphorePermit> {
        self.pending.lock().take()
    }

    fn begin(&self, serving: &Serving, am: AmHeader, payload: &Payload<'_>) -> Result<()> {
        // The queue is not locked while the end and its handler examine a request.
        let first_chunk = self.requests.lock().begin(am, payload)?;
        if let Some(first_chunk) = first_chunk
            && serving.end.on_opening(first_chunk.0, &first_chunk.1.header, first_chunk.1.total)?
        {
            self.requests.lock().keep(first_chunk)?;
            self.deliver_complete(serving);
        }
        Ok(())
    }

    fn cancel(&self, serving: &Serving, call: u64) -> Result<()> {
        let known = self.requests.lock().cancel(call)?;
        if known {
            serving.end.on_cancel(call);
            // Later requests may have waited only for this one.
            self.deliver_complete(serving);
        }
        Ok(())
    }

    fn deliver_complete(&self, serving: &Serving) {
        let mut inside = None;
        loop {
            let next = self.requests.lock().next();
            let Some((call, landed)) = next else { return };
            // The fabric's thread is not in a runtime, but handlers may need one.
            inside.get_or_insert_with(|| serving.runtime.enter());
            serving.end.on_request(call, landed.header, landed.head, landed.segments);
        }
    }
}

impl ConnectionEvents for AnsweringEvents {
    fn opened(&self, connection: &Connection, lanes: &Lanes) {
        let Some(events) = self.me.upgrade() else { return };
        let (connection, lanes, pending) = (connection.clone(), lanes.clone(), self.take_pending());
        // If the listener was dropped, the peer is dropped and its connection closed.
        let _ = self.arrivals.try_send(ArrivedPeer { connection, lanes, events, _pending: pending, served: false });
    }

    fn message(&self, header: &[u8], payload: Payload<'_>) -> Result<Disposition> {
        self.activity.record();
        let am = AmHeader::read(header)?;
        let Some(serving) = self.serving.get() else {
            return Err(malformed(format!("{:?} before the handshake", am.kind)));
        };
        match am.kind {
            AmKind::Request | AmKind::HeaderRest => self.begin(serving, am, &payload)?,
            AmKind::Chunk => return self.requests.lock().chunk(am, &payload),
            AmKind::Cancel => self.cancel(serving, am.call)?,
            AmKind::Ping => serving.end.sender().echo(am.call),
            AmKind::Pong => serving.end.sender().echoed(am.call),
            AmKind::Handshake | AmKind::Response | AmKind::Failed | AmKind::Drain => {
                return Err(malformed(format!("unexpected {:?} from a calling end", am.kind)));
            }
        }
        Ok(Disposition::Done)
    }

    fn landed(&self, key: u64, bytes: Bytes) {
        self.activity.record();
        self.requests.lock().landed(key, bytes);
        if let Some(serving) = self.serving.get() {
            self.deliver_complete(serving);
        }
    }

    fn ended(&self, why: CloseReason) {
        drop(self.take_pending());
        *self.ended.lock() = Some(why);
        self.over.cancel();
    }
}

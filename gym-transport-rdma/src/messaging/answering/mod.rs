//! Answering end of a connection: receives requests from the fabric.

pub(crate) mod request_queue;

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use bytes::Bytes;
use gym_core::message::PeerInfo;
use gym_core::transport::mux::{AnsweringEnd, ConnectionLimits, Handshake, PeerActivity, malformed};
use gym_core::{CancelToken, Result};
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, mpsc};

use crate::fabric::{CloseReason, Connection, ConnectionEvents, Disposition, Lanes, Payload};
use crate::messaging::answering::request_queue::RequestQueue;
use crate::messaging::header::{AmHeader, AmKind};
use crate::messaging::reassembly::Reassembly;
use crate::messaging::send_queue::UcxSendQueue;

/// Handles the fabric's events of a connection whose peer calls us.
pub(crate) struct AnsweringEvents {
    me: Weak<Self>,
    /// The peer's greeting.
    pub(crate) theirs: Handshake,
    pub(crate) peer: PeerInfo,
    /// The permit of a peer that is awaited.
    awaited: Mutex<Option<OwnedSemaphorePermit>>,
    /// Receives the peers that have arrived.
    arrivals: mpsc::Sender<ArrivedPeer>,
    serving: OnceLock<Serving>,
    requests: Mutex<RequestQueue>,
    pub(crate) heard: PeerActivity,
    ended: Mutex<Option<CloseReason>>,
    over: CancelToken,
}

/// A peer that has arrived. Its connection is closed unless it is served.
pub(crate) struct ArrivedPeer {
    connection: Connection,
    pub(crate) lanes: Lanes,
    pub(crate) events: Arc<AnsweringEvents>,
    _awaited: Option<OwnedSemaphorePermit>,
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
    /// Sends the peer to `arrivals` once it has arrived.
    pub(crate) fn new(
        limits: &ConnectionLimits,
        theirs: Handshake,
        peer: PeerInfo,
        arrivals: mpsc::Sender<ArrivedPeer>,
        awaited: OwnedSemaphorePermit,
    ) -> Arc<Self> {
        // What a peer of ours has under way, cancelled or not: one message that is longer than the capacity goes alone.
        let abandoned_bytes_max = limits.request_bytes_in_flight_max.max(limits.message_bytes_max);
        let requests = RequestQueue::new(Reassembly::new(limits.message_limits(), abandoned_bytes_max));
        Arc::new_cyclic(|me| Self {
            me: Weak::clone(me),
            theirs,
            peer,
            awaited: Mutex::new(Some(awaited)),
            arrivals,
            serving: OnceLock::new(),
            requests: Mutex::new(requests),
            heard: PeerActivity::default(),
            ended: Mutex::default(),
            over: CancelToken::new(),
        })
    }

    /// From now on an end takes what comes. To be called within the tokio runtime that is to run it, before the greeting.
    pub(crate) fn serve(&self, end: Arc<AnsweringEnd<UcxSendQueue>>) {
        let _ = self.serving.set(Serving { end, runtime: Handle::current() });
    }

    /// Waits for the end of the connection.
    ///
    /// # Errors
    /// When it broke.
    pub(crate) async fn over(&self) -> Result<()> {
        self.over.cancelled().await;
        match self.ended.lock().unwrap_or_else(PoisonError::into_inner).take() {
            Some(CloseReason::Lost(error)) => Err(error),
            Some(CloseReason::ClosedByPeer) if !self.requests().is_at_rest() => {
                Err(malformed("the peer left in the middle of a request"))
            }
            _ => Ok(()),
        }
    }

    fn take_awaited(&self) -> Option<OwnedSemaphorePermit> {
        self.awaited.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn requests(&self) -> MutexGuard<'_, RequestQueue> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin(&self, serving: &Serving, am: AmHeader, payload: &Payload<'_>) -> Result<()> {
        // The queue is not locked while the end and its handler look at a request.
        let first_chunk = self.requests().begin(am, payload)?;
        if let Some(first_chunk) = first_chunk
            && serving.end.on_opening(first_chunk.0, &first_chunk.1.header, first_chunk.1.total)?
        {
            self.requests().keep(first_chunk)?;
            self.hand_over(serving);
        }
        Ok(())
    }

    fn cancel(&self, serving: &Serving, call: u64) -> Result<()> {
        let known = self.requests().cancel(call)?;
        if known {
            serving.end.on_cancel(call);
            // Those behind it may have waited for it alone.
            self.hand_over(serving);
        }
        Ok(())
    }

    fn hand_over(&self, serving: &Serving) {
        let mut inside = None;
        loop {
            let next = self.requests().next();
            let Some((call, landed)) = next else { return };
            // The fabric's thread is in no runtime; handlers may want one.
            inside.get_or_insert_with(|| serving.runtime.enter());
            serving.end.on_request(call, landed.header, landed.head, landed.segments);
        }
    }
}

impl ConnectionEvents for AnsweringEvents {
    fn opened(&self, connection: &Connection, lanes: &Lanes) {
        let Some(events) = self.me.upgrade() else { return };
        let (connection, lanes, awaited) = (connection.clone(), lanes.clone(), self.take_awaited());
        // Dropped, and so closed, when the listener is gone.
        let _ = self.arrivals.try_send(ArrivedPeer { connection, lanes, events, _awaited: awaited, served: false });
    }

    fn message(&self, header: &[u8], payload: Payload<'_>) -> Result<Disposition> {
        self.heard.record();
        let am = AmHeader::read(header)?;
        let Some(serving) = self.serving.get() else {
            return Err(malformed(format!("{:?} before the greeting", am.kind)));
        };
        match am.kind {
            AmKind::Request | AmKind::HeaderRest => self.begin(serving, am, &payload)?,
            AmKind::Chunk => return self.requests().chunk(am, &payload),
            AmKind::Cancel => self.cancel(serving, am.call)?,
            AmKind::Ping => serving.end.sender().echo(am.call),
            AmKind::Pong => serving.end.sender().echoed(am.call),
            AmKind::Handshake | AmKind::Response | AmKind::Failed | AmKind::Drain => {
                return Err(malformed(format!("{:?} is not for a server", am.kind)));
            }
        }
        Ok(Disposition::Done)
    }

    fn landed(&self, key: u64, bytes: Bytes) {
        self.heard.record();
        self.requests().landed(key, bytes);
        if let Some(serving) = self.serving.get() {
            self.hand_over(serving);
        }
    }

    fn ended(&self, why: CloseReason) {
        drop(self.take_awaited());
        *self.ended.lock().unwrap_or_else(PoisonError::into_inner) = Some(why);
        self.over.cancel();
    }
}

//! What comes to the answering end of a connection.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use bytes::Bytes;
use gym_core::mux::{AnsweringEnd, Greeting, Heard, Limits, malformed};
use gym_core::{PeerInfo, Result};
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio_util::sync::CancellationToken;

use super::desk::Desk;
use super::inbox::Inbox;
use super::outbox::Outbox;
use super::wire::{Kind, Wire};
use crate::fabric::{Connection, Disposition, End, Lanes, Payload, PeerEvents};

/// The answering end of one connection, as its fabric sees it.
pub(crate) struct Answerer {
    me: Weak<Self>,
    /// What the peer has said of itself.
    pub(crate) theirs: Greeting,
    pub(crate) peer: PeerInfo,
    /// Its place among those who are awaited.
    awaited: Mutex<Option<OwnedSemaphorePermit>>,
    /// Where peers go that have come.
    door: mpsc::Sender<Opened>,
    serving: OnceLock<Serving>,
    desk: Mutex<Desk>,
    pub(crate) heard: Heard,
    ended: Mutex<Option<End>>,
    over: CancellationToken,
}

/// A peer that has come. Its connection is closed if nobody serves it.
pub(crate) struct Opened {
    connection: Connection,
    pub(crate) lanes: Lanes,
    pub(crate) events: Arc<Answerer>,
    _awaited: Option<OwnedSemaphorePermit>,
    served: bool,
}

impl Opened {
    /// Somebody is about to serve it.
    pub(crate) fn served(mut self) -> (Connection, Arc<Answerer>) {
        self.served = true;
        (self.connection.clone(), Arc::clone(&self.events))
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        if !self.served {
            self.connection.close(Duration::ZERO);
        }
    }
}

struct Serving {
    end: Arc<AnsweringEnd<Outbox>>,
    runtime: Handle,
}

impl Answerer {
    /// One whose peer goes to the door once it has come.
    pub(crate) fn new(
        limits: &Limits,
        theirs: Greeting,
        peer: PeerInfo,
        door: mpsc::Sender<Opened>,
        awaited: OwnedSemaphorePermit,
    ) -> Arc<Self> {
        // What a peer of ours has under way, cancelled or not: one message that is longer than the room goes alone.
        let given_up_bytes_max = limits.request_bytes_in_flight_max.max(limits.message_bytes_max);
        let desk = Desk::new(Inbox::new(limits.of_message(), given_up_bytes_max));
        Arc::new_cyclic(|me| Self {
            me: Weak::clone(me),
            theirs,
            peer,
            awaited: Mutex::new(Some(awaited)),
            door,
            serving: OnceLock::new(),
            desk: Mutex::new(desk),
            heard: Heard::default(),
            ended: Mutex::default(),
            over: CancellationToken::new(),
        })
    }

    /// From now on an end takes what comes. To be called within the tokio runtime that is to run it, before the greeting.
    pub(crate) fn serve(&self, end: Arc<AnsweringEnd<Outbox>>) {
        let _ = self.serving.set(Serving { end, runtime: Handle::current() });
    }

    /// Waits for the end of the connection.
    ///
    /// # Errors
    /// When it broke.
    pub(crate) async fn over(&self) -> Result<()> {
        self.over.cancelled().await;
        match self.ended.lock().unwrap_or_else(PoisonError::into_inner).take() {
            Some(End::Lost(error)) => Err(error),
            Some(End::ClosedByPeer) if !self.desk().is_at_rest() => {
                Err(malformed("the peer left in the middle of a request"))
            }
            _ => Ok(()),
        }
    }

    fn take_awaited(&self) -> Option<OwnedSemaphorePermit> {
        self.awaited.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn desk(&self) -> MutexGuard<'_, Desk> {
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin(&self, serving: &Serving, wire: Wire, payload: &Payload<'_>) -> Result<()> {
        // The desk is free while the end and its handler look at a request.
        let opening = self.desk().begin(wire, payload)?;
        if let Some(opening) = opening
            && serving.end.on_opening(opening.0, &opening.1.header, opening.1.total)?
        {
            self.desk().keep(opening)?;
            self.hand_over(serving);
        }
        Ok(())
    }

    fn cancel(&self, serving: &Serving, call: u64) -> Result<()> {
        let known = self.desk().cancel(call)?;
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
            let next = self.desk().next();
            let Some((call, landed)) = next else { return };
            // The fabric's thread is in no runtime; handlers may want one.
            inside.get_or_insert_with(|| serving.runtime.enter());
            serving.end.on_request(call, landed.header, landed.head, landed.segments);
        }
    }
}

impl PeerEvents for Answerer {
    fn opened(&self, connection: &Connection, lanes: &Lanes) {
        let Some(events) = self.me.upgrade() else { return };
        let (connection, lanes, awaited) = (connection.clone(), lanes.clone(), self.take_awaited());
        // Dropped, and so closed, when the listener is gone.
        let _ = self.door.try_send(Opened { connection, lanes, events, _awaited: awaited, served: false });
    }

    fn message(&self, header: &[u8], payload: Payload<'_>) -> Result<Disposition> {
        self.heard.set();
        let wire = Wire::read(header)?;
        let Some(serving) = self.serving.get() else {
            return Err(malformed(format!("{:?} before the greeting", wire.kind)));
        };
        match wire.kind {
            Kind::Request | Kind::Header => self.begin(serving, wire, &payload)?,
            Kind::Piece => return self.desk().piece(wire, &payload),
            Kind::Cancel => self.cancel(serving, wire.call)?,
            Kind::Ping => serving.end.outbox().echo(wire.call),
            Kind::Pong => serving.end.outbox().echoed(wire.call),
            Kind::Greeting | Kind::Response | Kind::Failed | Kind::Drain => {
                return Err(malformed(format!("{:?} is not for a server", wire.kind)));
            }
        }
        Ok(Disposition::Done)
    }

    fn landed(&self, key: u64, bytes: Bytes) {
        self.heard.set();
        self.desk().landed(key, bytes);
        if let Some(serving) = self.serving.get() {
            self.hand_over(serving);
        }
    }

    fn ended(&self, why: End) {
        drop(self.take_awaited());
        *self.ended.lock().unwrap_or_else(PoisonError::into_inner) = Some(why);
        self.over.cancel();
    }
}

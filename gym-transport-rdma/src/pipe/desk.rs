//! Requests that have come and are not handed over: they leave in the order in which they were sent.

use std::collections::{HashSet, VecDeque};

use bytes::Bytes;
use gym_core::Result;
use gym_core::mux::{RequestHeader, Room, malformed};

use super::assembly::Landed;
use super::inbox::{Inbox, Opening};
use super::wire::{Kind, Wire};
use crate::fabric::{Disposition, Payload};

/// Cancels that may be here before their requests: far more than a peer can have on their way.
const EARLY_MAX: usize = 1 << 16;

pub(crate) struct Desk {
    inbox: Inbox<RequestHeader>,
    /// Requests that were taken in, by their numbers; a message is there once it is complete.
    line: VecDeque<(u64, Option<Landed<RequestHeader>>)>,
    /// Calls whose cancel has overtaken them.
    early: HashSet<u64>,
    last_call: u64,
}

impl Desk {
    pub(crate) fn new(inbox: Inbox<RequestHeader>) -> Self {
        Self { inbox, line: VecDeque::new(), early: HashSet::new(), last_call: 0 }
    }

    /// A request, or more of the header of one. Its opening, when it is complete and not cancelled already.
    pub(crate) fn begin(&mut self, wire: Wire, payload: &Payload<'_>) -> Result<Option<Opening<RequestHeader>>> {
        let opening = match wire.kind {
            Kind::Header => self.inbox.more(wire, payload)?,
            _ => self.inbox.begin(wire, payload)?,
        };
        let Some(opening) = opening else { return Ok(None) };
        if opening.0 <= self.last_call {
            return Err(malformed(format!("call {} after call {}", opening.0, self.last_call)));
        }
        self.last_call = opening.0;
        Ok(Some(opening).filter(|(call, _)| !self.early.remove(call)))
    }

    /// A request that is wanted takes its place in line.
    ///
    /// # Errors
    /// When more are incomplete than a peer of ours sends at a time.
    pub(crate) fn keep(&mut self, opening: Opening<RequestHeader>) -> Result<()> {
        let call = opening.0;
        let landed = self.inbox.keep(opening)?;
        self.line.push_back((call, landed));
        Ok(())
    }

    /// A piece has come: where to put it.
    pub(crate) fn piece(&mut self, wire: Wire, payload: &Payload<'_>) -> Result<Disposition> {
        self.inbox.piece(wire, payload)
    }

    /// A piece is there.
    pub(crate) fn landed(&mut self, key: u64, bytes: Bytes) {
        if let Some((call, landed)) = self.inbox.landed(key, bytes)
            && let Ok(at) = self.place(call)
        {
            self.line[at].1 = Some(landed);
        }
    }

    /// The next request, if it is complete: nobody overtakes one that is not.
    pub(crate) fn next(&mut self) -> Option<(u64, Landed<RequestHeader>)> {
        let (call, landed) = self.line.front_mut()?;
        let next = Some((*call, landed.take()?));
        self.line.pop_front();
        next
    }

    /// The caller has left. Whether its request was here already; if not, it is remembered.
    ///
    /// # Errors
    /// When more is to be remembered than any peer of ours cancels.
    pub(crate) fn cancel(&mut self, call: u64) -> Result<bool> {
        if call > self.last_call {
            if self.early.len() >= EARLY_MAX {
                return Err(malformed("cancels of calls that never come"));
            }
            self.early.insert(call);
            return Ok(false);
        }
        // A peer of ours keeps its own room for a request until what it sent has landed.
        self.inbox.forget(call, Room::default());
        if let Ok(at) = self.place(call) {
            self.line.remove(at);
        }
        Ok(true)
    }

    /// Whether every message that began is complete.
    pub(crate) fn is_at_rest(&self) -> bool {
        self.inbox.is_at_rest()
    }

    fn place(&self, call: u64) -> Result<usize, usize> {
        self.line.binary_search_by_key(&call, |(call, _)| *call)
    }
}

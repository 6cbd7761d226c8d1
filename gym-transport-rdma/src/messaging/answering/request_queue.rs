//! Reorder queue: restores the order in which requests were sent.

use std::collections::{HashSet, VecDeque};

use bytes::Bytes;
use gym_core::Result;
use gym_core::transport::mux::{CapacityPermit, RequestHeader, malformed};

use crate::fabric::{Disposition, Payload};
use crate::messaging::header::{AmHeader, AmKind};
use crate::messaging::reassembly::message::CompleteMessage;
use crate::messaging::reassembly::{FirstChunk, Reassembly};

/// Cancels that may be here before their requests: far more than a peer can have on their way.
const EARLY_MAX: usize = 1 << 16;

/// Requests that have arrived and were not passed on.
pub(crate) struct RequestQueue {
    reassembly: Reassembly<RequestHeader>,
    /// Requests that were taken in, by their numbers; a message is there once it is complete.
    queue: VecDeque<(u64, Option<CompleteMessage<RequestHeader>>)>,
    /// Calls whose cancel has overtaken them.
    early: HashSet<u64>,
    last_call: u64,
}

impl RequestQueue {
    pub(crate) fn new(reassembly: Reassembly<RequestHeader>) -> Self {
        Self { reassembly, queue: VecDeque::new(), early: HashSet::new(), last_call: 0 }
    }

    /// A request, or more of the header of one. Its first chunk, when it is complete and not cancelled already.
    pub(crate) fn begin(&mut self, am: AmHeader, payload: &Payload<'_>) -> Result<Option<FirstChunk<RequestHeader>>> {
        let first_chunk = match am.kind {
            AmKind::HeaderRest => self.reassembly.more(am, payload)?,
            _ => self.reassembly.begin(am, payload)?,
        };
        let Some(first_chunk) = first_chunk else { return Ok(None) };
        if first_chunk.0 <= self.last_call {
            return Err(malformed(format!("call {} after call {}", first_chunk.0, self.last_call)));
        }
        self.last_call = first_chunk.0;
        Ok(Some(first_chunk).filter(|(call, _)| !self.early.remove(call)))
    }

    /// Appends a request that is wanted.
    ///
    /// # Errors
    /// When more are incomplete than a peer of ours sends at a time.
    pub(crate) fn keep(&mut self, first_chunk: FirstChunk<RequestHeader>) -> Result<()> {
        let call = first_chunk.0;
        let landed = self.reassembly.keep(first_chunk)?;
        self.queue.push_back((call, landed));
        Ok(())
    }

    /// A chunk has arrived. Returns whether and where to receive it.
    pub(crate) fn chunk(&mut self, am: AmHeader, payload: &Payload<'_>) -> Result<Disposition> {
        self.reassembly.chunk(am, payload)
    }

    /// A chunk has been received.
    pub(crate) fn landed(&mut self, key: u64, bytes: Bytes) {
        if let Some((call, landed)) = self.reassembly.landed(key, bytes)
            && let Ok(at) = self.position(call)
        {
            self.queue[at].1 = Some(landed);
        }
    }

    /// The next request, if it is complete: nobody overtakes one that is not.
    pub(crate) fn next(&mut self) -> Option<(u64, CompleteMessage<RequestHeader>)> {
        let (call, landed) = self.queue.front_mut()?;
        let next = Some((*call, landed.take()?));
        self.queue.pop_front();
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
        // A peer of ours holds its capacity for a request until what it sent has been received.
        self.reassembly.forget(call, CapacityPermit::default());
        if let Ok(at) = self.position(call) {
            self.queue.remove(at);
        }
        Ok(true)
    }

    /// Whether every message that began is complete.
    pub(crate) fn is_at_rest(&self) -> bool {
        self.reassembly.is_at_rest()
    }

    fn position(&self, call: u64) -> Result<usize, usize> {
        self.queue.binary_search_by_key(&call, |(call, _)| *call)
    }
}

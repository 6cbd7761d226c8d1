//! Reorder queue of requests: passes them on in the order in which they were sent.

use std::collections::{HashSet, VecDeque};

use bytes::Bytes;
use gym_core::Result;
use gym_core::transport::mux::{CapacityPermit, RequestHeader, malformed};

use crate::fabric::{Disposition, Payload};
use crate::messaging::header::{AmHeader, AmKind};
use crate::messaging::reassembly::message::CompleteMessage;
use crate::messaging::reassembly::{FirstChunk, Reassembly};

/// Maximum cancellations held before their requests arrive: far more than a peer of this crate has in flight.
const EARLY_CANCELS_MAX: usize = 1 << 16;

/// Requests that have arrived and were not passed on yet.
pub(crate) struct RequestQueue {
    reassembly: Reassembly<RequestHeader>,
    /// Accepted requests with their call numbers; the message is present once it is complete.
    queue: VecDeque<(u64, Option<CompleteMessage<RequestHeader>>)>,
    /// Calls whose cancellation has overtaken their request.
    early_cancels: HashSet<u64>,
    last_call: u64,
}

impl RequestQueue {
    pub(crate) fn new(reassembly: Reassembly<RequestHeader>) -> Self {
        Self { reassembly, queue: VecDeque::new(), early_cancels: HashSet::new(), last_call: 0 }
    }

    /// Receives the first chunk of a request, or more of its header. Returns the request if its header is complete and
    /// it is not cancelled.
    ///
    /// # Errors
    /// If the message is malformed or the call number is not greater than the previous one.
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
        Ok(Some(first_chunk).filter(|(call, _)| !self.early_cancels.remove(call)))
    }

    /// Appends an accepted request.
    ///
    /// # Errors
    /// If more requests are incomplete than a peer of this crate sends at a time.
    pub(crate) fn keep(&mut self, first_chunk: FirstChunk<RequestHeader>) -> Result<()> {
        let call = first_chunk.0;
        let landed = self.reassembly.keep(first_chunk)?;
        self.queue.push_back((call, landed));
        Ok(())
    }

    /// Receives a chunk. Returns whether and where to receive its payload.
    ///
    /// # Errors
    /// If the chunk does not match the layout of its message, or too many abandoned payloads are still being received.
    pub(crate) fn chunk(&mut self, am: AmHeader, payload: &Payload<'_>) -> Result<Disposition> {
        self.reassembly.chunk(am, payload)
    }

    /// Records that a chunk has been received.
    pub(crate) fn landed(&mut self, key: u64, bytes: Bytes) {
        if let Some((call, landed)) = self.reassembly.landed(key, bytes)
            && let Ok(at) = self.position(call)
        {
            self.queue[at].1 = Some(landed);
        }
    }

    /// Returns the next request if it is complete. No request overtakes an incomplete one.
    pub(crate) fn next(&mut self) -> Option<(u64, CompleteMessage<RequestHeader>)> {
        let (call, landed) = self.queue.front_mut()?;
        let next = Some((*call, landed.take()?));
        self.queue.pop_front();
        next
    }

    /// Cancels a call. Returns `true` if its request has arrived; otherwise, the cancellation is held until it does.
    ///
    /// # Errors
    /// If more cancellations are held than a peer of this crate can cause.
    pub(crate) fn cancel(&mut self, call: u64) -> Result<bool> {
        if call > self.last_call {
            if self.early_cancels.len() >= EARLY_CANCELS_MAX {
                return Err(malformed(format!("{EARLY_CANCELS_MAX} cancellations of calls that have not arrived")));
            }
            self.early_cancels.insert(call);
            return Ok(false);
        }
        // A peer of this crate holds the capacity of a request until everything that it sent has been received.
        self.reassembly.forget(call, CapacityPermit::default());
        if let Ok(at) = self.position(call) {
            self.queue.remove(at);
        }
        Ok(true)
    }

    /// Whether no message is incomplete.
    pub(crate) fn is_at_rest(&self) -> bool {
        self.reassembly.is_at_rest()
    }

    fn position(&self, call: u64) -> Result<usize, usize> {
        self.queue.binary_search_by_key(&call, |(call, _)| *call)
    }
}

//! Fuzz target: a calling end whose peer is the input.

use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use futures_util::FutureExt;
use gym_core::transport::mux::header::{put_failed, put_response};
use gym_core::transport::mux::{ConnectionLimits, Handshake, MuxLink};
use gym_core::transport::{Link, PathInfo, Reply};
use gym_core::{CallContext, Code, Error, Request, Response, Result, Status};

use crate::fabric::{ActiveMessage, CloseReason, Disposition, EagerBytes, Lanes, Payload};
use crate::messaging::calling::CallingEvents;
use crate::messaging::fuzzing::{CUT, PayloadsInFlight, byte, first_chunk, parts, raw, raw_announced};
use crate::messaging::header::{AmHeader, AmKind};
use crate::messaging::send_queue::{Carrier, UcxSendQueue};

/// Maximum pending calls.
const CALLS: usize = 8;

/// A network that accepts everything and delivers nothing.
#[derive(Clone, Debug)]
struct BlackHole;

impl Carrier for BlackHole {
    fn post(&self, mut message: ActiveMessage) -> Result<()> {
        if let Some(done) = message.done.take() {
            done(Ok(()));
        }
        Ok(())
    }

    fn close(&self, _grace: Duration) {}
}

/// State of a calling end under fuzzing.
struct Session {
    caller: Arc<CallingEvents<BlackHole>>,
    link: MuxLink<UcxSendQueue<BlackHole>>,
    /// Pending calls with their numbers.
    calls: Vec<(u64, Reply)>,
    last_call: u64,
    in_flight: PayloadsInFlight,
}

impl Session {
    fn new(limits: &ConnectionLimits) -> Self {
        let (caller, mut established) = CallingEvents::new(limits.clone(), CUT);
        caller.on_opened(&BlackHole, &Lanes::default());
        let mut handshake = BytesMut::with_capacity(Handshake::BYTES);
        Handshake::of(limits).put(&mut handshake);
        let am = AmHeader::bare(AmKind::Handshake, 0).write();
        caller.on_message(&am, &Payload::Eager(EagerBytes::Borrowed(&handshake))).expect("a valid handshake");
        let established = established.try_recv().expect("a handshake arrived").expect("the handshake was accepted");
        let link = MuxLink::new(established.end, PathInfo::new("ucx", "peer", true));
        Self { caller, link, calls: Vec::new(), last_call: 0, in_flight: PayloadsInFlight::default() }
    }

    /// Returns the number of a recent call.
    fn call(&self, input: &mut &[u8]) -> u64 {
        self.last_call.saturating_sub(u64::from(byte(input)) % CALLS as u64)
    }

    fn start(&mut self) {
        let request = Request::post(CallContext::default(), "/", "");
        if self.calls.len() < CALLS
            && let Some(Ok(reply)) = self.link.send(request).now_or_never()
        {
            self.last_call += 1;
            self.calls.push((self.last_call, reply));
        }
    }

    /// Polls a call for its response. `leaves`: the caller then drops it.
    fn look(&mut self, at: usize, leaves: bool) {
        if let Some((_, reply)) = self.calls.get_mut(at)
            && (reply.now_or_never().is_some() || leaves)
        {
            drop(self.calls.remove(at));
        }
    }

    fn message(&mut self, am: AmHeader, payload: &Payload<'_>) -> Result<()> {
        if let Disposition::Land { key } = self.caller.on_message(&am.write(), payload)? {
            self.in_flight.land(key, payload)?;
        }
        Ok(())
    }

    fn eager(&mut self, am: AmHeader, payload: &[u8]) -> Result<()> {
        self.message(am, &Payload::Eager(EagerBytes::Borrowed(payload)))
    }

    /// Performs the next step of the input: a raw message, a valid one, or an action of this end.
    fn step(&mut self, input: &mut &[u8]) -> Result<()> {
        match byte(input) % 9 {
            0 => {
                let (am, payload) = raw(input)?;
                self.message(am, &payload)
            }
            1 => {
                let (am, payload) = raw_announced(input)?;
                self.message(am, &payload)
            }
            2 => {
                let call = self.call(input);
                let (am, payload, chunks) = answer(call, &parts(input));
                self.in_flight.chunks.insert(call, chunks);
                self.message(am, &Payload::Eager(EagerBytes::Owned(payload)))
            }
            3 => {
                let call = self.call(input);
                let (am, payload) = self.in_flight.chunk(call, input);
                self.message(am, &payload)
            }
            4 => {
                let reason = put_failed(0, &Error::not_started(Code::Unavailable, "no"));
                let am = AmHeader::bare(AmKind::Failed, self.call(input));
                self.eager(am, &reason)
            }
            5 => {
                if let Some((key, bytes)) = self.in_flight.landed(input) {
                    self.caller.on_landed(key, bytes);
                }
                Ok(())
            }
            6 => {
                self.start();
                Ok(())
            }
            7 => {
                let (at, leaves) = (byte(input), byte(input));
                self.look(usize::from(at) % CALLS, leaves % 2 == 1);
                Ok(())
            }
            _ => {
                let kind = [AmKind::Ping, AmKind::Pong, AmKind::Ping, AmKind::Drain][usize::from(byte(input)) % 4];
                self.eager(AmHeader::bare(kind, 0), &[])
            }
        }
    }

    /// Ends the connection, and checks that every call is notified and that nothing is kept.
    fn end(mut self, ended: Result<()>) -> Result<usize> {
        let error =
            ended.as_ref().map_or_else(|error| Error::unknown(error.code(), "ended"), |()| Error::internal("left"));
        for (key, buffer) in std::mem::take(&mut self.in_flight.landing) {
            if ended.is_ok() {
                self.caller.on_landed(key, buffer.freeze());
            }
        }
        self.caller.on_ended(CloseReason::Lost(error));
        for (call, reply) in self.calls {
            assert!(reply.now_or_never().is_some(), "call {call} was not notified of the end of the connection");
        }
        ended.map(|()| self.in_flight.taken)
    }
}

/// Delivers the active messages that the input describes to a calling end. Payloads arrive in any order, and callers
/// start and cancel calls. Returns the total bytes of the buffers that were taken.
///
/// # Errors
/// The error that would have ended the connection.
pub fn take_responses(mut input: &[u8], limits: &ConnectionLimits) -> Result<usize> {
    let mut session = Session::new(limits);
    let mut result = Ok(());
    while result.is_ok() && input.has_remaining() {
        result = session.step(&mut input);
        assert!(session.caller.incomplete() <= session.calls.len(), "responses are kept only for pending calls");
    }
    session.end(result)
}

/// Generates a response's first chunk for a head and segments of these lengths, and the lengths of its chunks.
fn answer(call: u64, parts: &[usize]) -> (AmHeader, Bytes, Vec<usize>) {
    let header = |message: &_| put_response(0, &Response::new(Status::OK, gym_core::Message::clone(message)));
    first_chunk(AmHeader::bare(AmKind::Response, call), parts, header)
}

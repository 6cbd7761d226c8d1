//! A calling end, whose peer is the input.

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
use crate::messaging::fuzzing::{CUT, OnTheWay, byte, first_chunk, parts, raw, raw_announced};
use crate::messaging::header::{AmHeader, AmKind};
use crate::messaging::send_queue::{Carrier, UcxSendQueue};

/// Calls that wait at a time.
const CALLS: usize = 8;

/// A network that takes everything at once, and a peer that never sees it.
#[derive(Clone, Debug)]
struct Nowhere;

impl Carrier for Nowhere {
    fn post(&self, mut message: ActiveMessage) -> Result<()> {
        if let Some(done) = message.done.take() {
            done(Ok(()));
        }
        Ok(())
    }

    fn close(&self, _grace: Duration) {}
}

/// What a fuzzer's bytes do to a calling end.
struct Session {
    caller: Arc<CallingEvents<Nowhere>>,
    link: MuxLink<UcxSendQueue<Nowhere>>,
    /// Calls that wait, with their numbers.
    calls: Vec<(u64, Reply)>,
    last_call: u64,
    coming: OnTheWay,
}

impl Session {
    fn new(limits: &ConnectionLimits) -> Self {
        let (caller, mut greeted) = CallingEvents::new(limits.clone(), CUT);
        caller.on_opened(&Nowhere, &Lanes::default());
        let mut greeting = BytesMut::with_capacity(Handshake::BYTES);
        Handshake::of(limits).put(&mut greeting);
        let am = AmHeader::bare(AmKind::Handshake, 0).write();
        caller.on_message(&am, &Payload::Eager(EagerBytes::Borrowed(&greeting))).expect("as a peer of ours says it");
        let greeted = greeted.try_recv().expect("it was greeted").expect("well");
        let link = MuxLink::new(greeted.end, PathInfo::new("ucx", "peer", true));
        Self { caller, link, calls: Vec::new(), last_call: 0, coming: OnTheWay::default() }
    }

    /// The number of a call that may be there.
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

    /// A caller looks for its answer (`leaves`: for the last time).
    fn look(&mut self, at: usize, leaves: bool) {
        if let Some((_, reply)) = self.calls.get_mut(at)
            && (reply.now_or_never().is_some() || leaves)
        {
            drop(self.calls.remove(at));
        }
    }

    fn message(&mut self, am: AmHeader, payload: &Payload<'_>) -> Result<()> {
        if let Disposition::Land { key } = self.caller.on_message(&am.write(), payload)? {
            self.coming.land(key, payload)?;
        }
        Ok(())
    }

    fn eager(&mut self, am: AmHeader, payload: &[u8]) -> Result<()> {
        self.message(am, &Payload::Eager(EagerBytes::Borrowed(payload)))
    }

    /// The next thing that happens: a raw message, one that a peer of ours would send, or something at this end.
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
                self.coming.chunks.insert(call, chunks);
                self.message(am, &Payload::Eager(EagerBytes::Owned(payload)))
            }
            3 => {
                let call = self.call(input);
                let (am, payload) = self.coming.chunk(call, input);
                self.message(am, &payload)
            }
            4 => {
                let reason = put_failed(0, &Error::not_started(Code::Unavailable, "no"));
                let am = AmHeader::bare(AmKind::Failed, self.call(input));
                self.eager(am, &reason)
            }
            5 => {
                if let Some((key, bytes)) = self.coming.landed(input) {
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

    /// The connection ends: everybody is told, and nothing is kept for anybody.
    fn end(mut self, ended: Result<()>) -> Result<usize> {
        let told =
            ended.as_ref().map_or_else(|error| Error::unknown(error.code(), "ended"), |()| Error::internal("left"));
        for (key, buffer) in std::mem::take(&mut self.coming.landing) {
            if ended.is_ok() {
                self.caller.on_landed(key, buffer.freeze());
            }
        }
        self.caller.on_ended(CloseReason::Lost(told));
        for (call, reply) in self.calls {
            assert!(reply.now_or_never().is_some(), "nobody tells call {call} that the connection is over");
        }
        ended.map(|()| self.coming.taken)
    }
}

/// Delivers the active messages that the input describes to a calling end, with payloads in any order and callers that come and
/// leave. Returns the bytes of the buffers that were taken for them.
///
/// # Errors
/// What would have ended the connection.
pub fn take_responses(mut input: &[u8], limits: &ConnectionLimits) -> Result<usize> {
    let mut session = Session::new(limits);
    let mut went = Ok(());
    while went.is_ok() && input.has_remaining() {
        went = session.step(&mut input);
        assert!(session.caller.keeps() <= session.calls.len(), "what nobody waits for is not kept");
    }
    session.end(went)
}

/// An answer's first chunk with a head and segments of these lengths, as a peer of ours sends it, and the bytes of its chunks.
fn answer(call: u64, parts: &[usize]) -> (AmHeader, Bytes, Vec<usize>) {
    let header = |message: &_| put_response(0, &Response::new(Status::OK, gym_core::Message::clone(message)));
    first_chunk(AmHeader::bare(AmKind::Response, call), parts, header)
}

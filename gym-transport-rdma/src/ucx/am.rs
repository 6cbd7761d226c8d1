//! Active messages: sends and receives a header and a payload.

use std::ffi::c_void;
use std::rc::Rc;

use bytes::Bytes;

use super::endpoint::{Endpoint, EndpointKey};
use super::memory::Memory;
use super::operations::Operation;
use super::status::{Started, Status};
use super::worker::Worker;
use crate::memory::Buffer;
use crate::sys::ucp::*;

/// Maximum length of a header.
pub(crate) const HEADER_ROOM: usize = 128;

type AmCallback = unsafe extern "C" fn(
    *mut c_void,
    *const c_void,
    usize,
    *mut c_void,
    usize,
    *const ucp_am_recv_param_t,
) -> ucs_status_t;

/// Receives active messages. Called from within [`Worker::progress`], and from within [`Endpoint::send`] if a worker
/// sends to itself.
pub(crate) trait Receiver {
    /// Receives a message. `from` is the endpoint to respond on, if the sender asked for that. An announcement must not
    /// be dropped before `receive` has returned.
    fn receive(&self, header: &[u8], payload: Arrival<'_>, from: Option<EndpointKey>);
}

/// The payload of a received message.
pub(crate) enum Arrival<'a> {
    /// Bytes that are valid until `receive` returns.
    Eager(&'a [u8]),
    /// Announced, and still at the peer.
    Announced(Announcement),
}

/// The protocol by which a payload is sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Protocol {
    /// UCX decides.
    Any,
    /// Eager: with its header, whatever its length.
    Eager,
    /// Rendezvous: announced, whatever its length.
    Rendezvous,
}

/// A message to send.
pub(crate) struct Outgoing {
    pub(crate) id: u16,
    pub(crate) header: [u8; HEADER_ROOM],
    pub(crate) header_bytes: usize,
    pub(crate) payload: Bytes,
    pub(crate) protocol: Protocol,
    /// Gives the receiver an endpoint to respond on. Used for connections through a listener.
    pub(crate) reply: bool,
}

struct Sending<F> {
    message: Outgoing,
    worker: Rc<Worker>,
    /// Number of this operation in its worker.
    operation: usize,
    done: F,
}

impl<F: FnOnce(Result<(), Status>) + 'static> Operation for Sending<F> {
    fn cancel(self: Box<Self>) {
        let Self { done, message, worker, .. } = *self;
        drop(message);
        done(Err(Status::new(worker.library(), UCS_ERR_CANCELED)));
    }
}

impl Endpoint {
    /// Sends a message. Header and payload stay valid until `done` is called.
    ///
    /// `done` is called exactly once: before this returns, or from within [`Worker::progress`] or [`Worker::abandon`].
    pub(crate) fn send<F>(&self, message: Outgoing, memory: Option<&Memory>, done: F)
    where
        F: FnOnce(Result<(), Status>) + 'static,
    {
        let library = self.worker.library();
        if self.worker.is_destroyed() {
            return done(Err(Status::new(library, UCS_ERR_CANCELED)));
        }
        let worker = Rc::clone(&self.worker);
        let sending = Box::into_raw(Box::new(Sending { message, worker, operation: 0, done }));
        let operation = self.worker.began(sending);
        // SAFETY: just boxed; UCX has not seen it yet.
        unsafe { (*sending).operation = operation };
        // SAFETY: just boxed. UCX only reads through it, and exactly one of the branches below or the callback takes it
        // back.
        let message = unsafe { &(*sending).message };
        // SAFETY: all zeros is a valid value, with an empty mask.
        let mut params: ucp_request_param_t = unsafe { std::mem::zeroed() };
        params.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
        params.cb = ucp_request_param_t__bindgen_ty_1 { send: Some(on_sent::<F>) };
        params.user_data = sending.cast();
        params.flags = match message.protocol {
            Protocol::Any => 0,
            Protocol::Eager => UCP_AM_SEND_FLAG_EAGER,
            Protocol::Rendezvous => UCP_AM_SEND_FLAG_RNDV,
        };
        if message.reply {
            params.flags |= UCP_AM_SEND_FLAG_REPLY;
        }
        if let Some(memory) = memory.filter(|memory| memory.covers(&message.payload)) {
            params.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;
            params.memh = memory.raw;
        }
        let header_bytes = message.header_bytes.min(HEADER_ROOM);
        // SAFETY: the endpoint is live. Header and payload stay in the box (the payload behind `Bytes`, which does not
        // move it) until UCX has finished: `ucp_am_send_nbx` reads the header again when it has to queue the message.
        let started = Started::from(unsafe {
            (library.api.ucp_am_send_nbx)(
                self.raw,
                message.id.into(),
                message.header.as_ptr().cast(),
                header_bytes,
                message.payload.as_ptr().cast(),
                message.payload.len(),
                &raw const params,
            )
        });
        let result = match started {
            Started::Request(_) => return,
            Started::Done => Ok(()),
            Started::Failed(code) => Err(Status::new(library, code)),
        };
        // SAFETY: without a request, the callback is not called, so the box is still ours.
        let sending = unsafe { Box::from_raw(sending) };
        self.worker.ended(operation);
        (sending.done)(result);
    }
}

unsafe extern "C" fn on_sent<F>(request: *mut c_void, status: ucs_status_t, sending: *mut c_void)
where
    F: FnOnce(Result<(), Status>) + 'static,
{
    // SAFETY: the box passed to UCX in `send`, which calls this exactly once.
    let sending = unsafe { Box::from_raw(sending.cast::<Sending<F>>()) };
    let library = sending.worker.library();
    // SAFETY: the request that has just completed, freed once. UCX allows that in its own callback.
    unsafe { (library.api.ucp_request_free)(request) };
    let Sending { done, message, worker, operation } = *sending;
    worker.ended(operation);
    drop(message);
    done(Status::check(library, status));
    drop(worker);
}

/// A payload that the peer has announced. Dropping it rejects the payload, which completes the peer's send.
pub(crate) struct Announcement {
    worker: Rc<Worker>,
    descriptor: *mut c_void,
    length: usize,
}

struct Receiving<F> {
    buffer: Buffer,
    worker: Rc<Worker>,
    /// Number of this operation in its worker.
    operation: usize,
    received: usize,
    done: F,
}

impl<F: FnOnce(Result<Buffer, Status>) + 'static> Operation for Receiving<F> {
    fn cancel(self: Box<Self>) {
        let Self { done, buffer, worker, .. } = *self;
        drop(buffer);
        done(Err(Status::new(worker.library(), UCS_ERR_CANCELED)));
    }
}

impl Announcement {
    /// Returns the announced length in bytes.
    pub(crate) fn length(&self) -> usize {
        self.length
    }

    /// Receives the payload into a buffer of exactly its length. The buffer stays valid until `done` is called.
    ///
    /// `done` is called exactly once: before this returns, or from within [`Worker::progress`] or [`Worker::abandon`].
    pub(crate) fn fetch<F>(self, buffer: Buffer, memory: Option<&Memory>, done: F)
    where
        F: FnOnce(Result<Buffer, Status>) + 'static,
    {
        let library = self.worker.library();
        if buffer.len() != self.length {
            return done(Err(Status::new(library, UCS_ERR_MESSAGE_TRUNCATED)));
        }
        if self.worker.is_destroyed() {
            return done(Err(Status::new(library, UCS_ERR_CANCELED)));
        }
        let worker = Rc::clone(&self.worker);
        let receiving = Box::into_raw(Box::new(Receiving { buffer, worker, operation: 0, received: 0, done }));
        let operation = self.worker.began(receiving);
        // SAFETY: just boxed; UCX has not seen it yet.
        unsafe { (*receiving).operation = operation };
        // SAFETY: all zeros is a valid value, with an empty mask.
        let mut params: ucp_request_param_t = unsafe { std::mem::zeroed() };
        params.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_RECV_INFO;
        params.cb = ucp_request_param_t__bindgen_ty_1 { recv_am: Some(on_received::<F>) };
        params.user_data = receiving.cast();
        // SAFETY: just boxed. Exactly one of the branches below or the callback takes it back.
        let (place, received) = unsafe { ((*receiving).buffer.as_mut_ptr(), &raw mut (*receiving).received) };
        params.recv_info = ucp_request_param_t__bindgen_ty_2 { length: received };
        // SAFETY: `covers` only compares addresses.
        if let Some(memory) = memory.filter(|memory| memory.covers(unsafe { &(*receiving).buffer })) {
            params.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;
            params.memh = memory.raw;
        }
        let this = std::mem::ManuallyDrop::new(self);
        // SAFETY: the descriptor was announced and is used once (`ManuallyDrop` above prevents the release). The buffer
        // has `length` bytes and stays in its box until UCX has finished.
        let started = Started::from(unsafe {
            (library.api.ucp_am_recv_data_nbx)(
                this.worker.raw(),
                this.descriptor,
                place.cast(),
                this.length,
                &raw const params,
            )
        });
        // SAFETY: `this` is never dropped, so the `Rc` is released exactly once, here.
        drop(unsafe { std::ptr::read(&raw const this.worker) });
        let code = match started {
            Started::Request(_) => return,
            Started::Done => UCS_OK,
            Started::Failed(code) => code,
        };
        // SAFETY: without a request, the callback is not called, so the box is still ours.
        let receiving = *unsafe { Box::from_raw(receiving) };
        receiving.end(code);
    }
}

impl<F: FnOnce(Result<Buffer, Status>) + 'static> Receiving<F> {
    fn end(self, code: ucs_status_t) {
        let Self { buffer, worker, operation, received, done } = self;
        worker.ended(operation);
        let library = worker.library();
        let result = Status::check(library, code).and_then(|()| {
            // A peer that sends less than it announced would expose the previous contents of the buffer.
            if received == buffer.len() { Ok(buffer) } else { Err(Status::new(library, UCS_ERR_MESSAGE_TRUNCATED)) }
        });
        done(result);
    }
}

unsafe extern "C" fn on_received<F>(request: *mut c_void, status: ucs_status_t, length: usize, receiving: *mut c_void)
where
    F: FnOnce(Result<Buffer, Status>) + 'static,
{
    // SAFETY: the box passed to UCX in `fetch`, which calls this exactly once.
    let mut receiving = *unsafe { Box::from_raw(receiving.cast::<Receiving<F>>()) };
    // SAFETY: the request that has just completed, freed once. UCX allows that in its own callback.
    unsafe { (receiving.worker.library().api.ucp_request_free)(request) };
    receiving.received = length;
    receiving.end(status);
}

impl Drop for Announcement {
    fn drop(&mut self) {
        // The descriptor was destroyed with its worker.
        if self.worker.is_destroyed() {
            return;
        }
        self.worker.disarm();
        // SAFETY: the descriptor was announced, neither received nor released before, and its worker is live.
        unsafe { (self.worker.library().api.ucp_am_data_release)(self.worker.raw(), self.descriptor) }
    }
}

/// Message ids that get a receiver that discards messages. If a peer sends an id without a receiver, UCX 1.13 calls an
/// arbitrary address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum UnhandledIds {
    /// All ids, against unknown peers of a network. The table takes 1.5 MB.
    All,
    /// Ids below this crate's id. Sufficient for peers that share memory with us, because they could do worse by
    /// writing into it.
    Lower,
}

/// Sets the receivers of all ids, from the highest down, so that UCX's table grows once.
pub(super) fn set_receivers(worker: &Rc<Worker>, id: u16, unhandled: UnhandledIds) -> Result<(), Status> {
    let highest = match unhandled {
        UnhandledIds::All => u16::MAX,
        // UCX's table has an even number of entries.
        UnhandledIds::Lower => id | 1,
    };
    (0..=highest)
        .rev()
        .try_for_each(|each| set_receiver(worker, each, if each == id { on_message } else { on_unwanted }))
}

fn set_receiver(worker: &Rc<Worker>, id: u16, receiver: AmCallback) -> Result<(), Status> {
    // SAFETY: all zeros is a valid value, with an empty mask.
    let mut params: ucp_am_handler_param_t = unsafe { std::mem::zeroed() };
    params.field_mask = u64::from(
        UCP_AM_HANDLER_PARAM_FIELD_ID
            | UCP_AM_HANDLER_PARAM_FIELD_FLAGS
            | UCP_AM_HANDLER_PARAM_FIELD_CB
            | UCP_AM_HANDLER_PARAM_FIELD_ARG,
    );
    params.id = id.into();
    params.flags = UCP_AM_FLAG_WHOLE_MSG;
    params.cb = Some(receiver);
    params.arg = Rc::as_ptr(worker).cast_mut().cast();
    // SAFETY: a live worker and parameters with their mask. The argument is the worker, whose `Rc` keeps it in place
    // until it is destroyed; afterwards, UCX does not call.
    let code = unsafe { (worker.library().api.ucp_worker_set_am_recv_handler)(worker.raw(), &raw const params) };
    Status::check(worker.library(), code)
}

unsafe extern "C" fn on_unwanted(
    _: *mut c_void,
    _: *const c_void,
    _: usize,
    _: *mut c_void,
    _: usize,
    _: *const ucp_am_recv_param_t,
) -> ucs_status_t {
    UCS_OK
}

unsafe extern "C" fn on_message(
    worker: *mut c_void,
    header: *const c_void,
    header_bytes: usize,
    data: *mut c_void,
    length: usize,
    params: *const ucp_am_recv_param_t,
) -> ucs_status_t {
    // SAFETY: the argument passed in `set_receiver`: a worker in an `Rc`, which is alive because it is progressing or
    // sending to itself.
    let worker = unsafe {
        Rc::increment_strong_count(worker.cast_const().cast::<Worker>());
        Rc::from_raw(worker.cast_const().cast::<Worker>())
    };
    // SAFETY: UCX passes parameters that are valid during the call.
    let params = unsafe { &*params };
    // SAFETY: UCX passes `header_bytes` bytes that are valid during the call, or null for none.
    let header = unsafe { slice(header.cast(), header_bytes) };
    let from = (params.recv_attr & u64::from(UCP_AM_RECV_ATTR_FIELD_REPLY_EP) != 0)
        .then(|| EndpointKey(params.reply_ep.addr()));
    let Some(receiver) = worker.receiver() else { return UCS_OK };
    if params.recv_attr & u64::from(UCP_AM_RECV_ATTR_FLAG_RNDV) == 0 {
        // SAFETY: UCX passes `length` bytes that are valid during the call, or null for none.
        let payload = unsafe { slice(data.cast(), length) };
        receiver.receive(header, Arrival::Eager(payload), from);
        return UCS_OK;
    }
    let announced = Announcement { worker: Rc::clone(&worker), descriptor: data, length };
    // An announcement must not be rejected within this call, so the rejection waits until the receiver has returned.
    receiver.receive(header, Arrival::Announced(announced), from);
    UCS_INPROGRESS
}

/// # Safety
/// As for `std::slice::from_raw_parts`, except that `start` may be null if `length` is 0.
unsafe fn slice<'a>(start: *const u8, length: usize) -> &'a [u8] {
    if length == 0 {
        return &[];
    }
    // SAFETY: guaranteed by the caller.
    unsafe { std::slice::from_raw_parts(start, length) }
}

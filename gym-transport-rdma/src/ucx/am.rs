//! Active messages: a header and a payload, sent and received.

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

/// How long a header may be.
pub(crate) const HEADER_ROOM: usize = 128;

type AmCallback = unsafe extern "C" fn(
    *mut c_void,
    *const c_void,
    usize,
    *mut c_void,
    usize,
    *const ucp_am_recv_param_t,
) -> ucs_status_t;

/// What is given active messages. It must keep an announcement until `receive` has returned. Called from within [`Worker::progress`], and, where a worker sends to itself, from
/// within [`Endpoint::send`].
pub(crate) trait Receiver {
    /// A message has arrived. `from` is the endpoint to answer on, when the sender asked for that.
    fn receive(&self, header: &[u8], payload: Arrival<'_>, from: Option<EndpointKey>);
}

/// A payload that has arrived.
pub(crate) enum Arrival<'a> {
    /// Here, until `receive` returns.
    Eager(&'a [u8]),
    /// At the peer.
    Announced(Announcement),
}

/// How a payload goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Protocol {
    /// As UCX thinks best.
    Any,
    /// With its header, however long it is.
    Eager,
    /// Announced, however short it is.
    Rendezvous,
}

/// What is to be sent.
pub(crate) struct Outgoing {
    pub(crate) id: u16,
    pub(crate) header: [u8; HEADER_ROOM],
    pub(crate) header_bytes: usize,
    pub(crate) payload: Bytes,
    pub(crate) protocol: Protocol,
    /// Lets the receiver answer on the endpoint that it has from its listener.
    pub(crate) reply: bool,
}

struct Sending<F> {
    message: Outgoing,
    worker: Rc<Worker>,
    /// Its number among the worker's.
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
    /// Sends it. `done` is called once, now or from within [`Worker::progress`] or [`Worker::abandon`]; until then header
    /// and payload stay.
    pub(crate) fn send<F>(&self, message: Outgoing, memory: Option<&Memory>, done: F)
    where
        F: FnOnce(Result<(), Status>) + 'static,
    {
        let library = self.worker.library();
        if self.worker.is_gone() {
            return done(Err(Status::new(library, UCS_ERR_CANCELED)));
        }
        let worker = Rc::clone(&self.worker);
        let sending = Box::into_raw(Box::new(Sending { message, worker, operation: 0, done }));
        let operation = self.worker.began(sending);
        // SAFETY: just boxed, and UCX has not seen it.
        unsafe { (*sending).operation = operation };
        // SAFETY: just boxed; UCX only reads through it, and it is taken back by exactly one of the branches below or by
        // the callback.
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
        // SAFETY: a live endpoint. Header and payload lie in the box (the payload behind `Bytes`, which does not move
        // it) until UCX is done: pitfall of `ucp_am_send_nbx`, which reads the header again when it has to queue.
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
        // SAFETY: the callback is not called when there is no request, so the box is still ours.
        let sending = unsafe { Box::from_raw(sending) };
        self.worker.ended(operation);
        (sending.done)(result);
    }
}

unsafe extern "C" fn on_sent<F>(request: *mut c_void, status: ucs_status_t, sending: *mut c_void)
where
    F: FnOnce(Result<(), Status>) + 'static,
{
    // SAFETY: the box given in `send`, for which this is called exactly once.
    let sending = unsafe { Box::from_raw(sending.cast::<Sending<F>>()) };
    let library = sending.worker.library();
    // SAFETY: the request that has just ended, freed once; allowed from its own callback.
    unsafe { (library.api.ucp_request_free)(request) };
    let Sending { done, message, worker, operation } = *sending;
    worker.ended(operation);
    drop(message);
    done(Status::check(library, status));
    drop(worker);
}

/// A payload that the peer holds ready. Dropping it refuses it: the peer's send ends.
pub(crate) struct Announcement {
    worker: Rc<Worker>,
    descriptor: *mut c_void,
    length: usize,
}

struct Receiving<F> {
    buffer: Buffer,
    worker: Rc<Worker>,
    /// Its number among the worker's.
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
    /// What the peer says how long it is.
    pub(crate) fn length(&self) -> usize {
        self.length
    }

    /// Fetches it into a buffer that is exactly as long. `done` is called once, now or from within
    /// [`Worker::progress`] or [`Worker::abandon`]; until then the buffer stays.
    pub(crate) fn fetch<F>(self, buffer: Buffer, memory: Option<&Memory>, done: F)
    where
        F: FnOnce(Result<Buffer, Status>) + 'static,
    {
        let library = self.worker.library();
        if buffer.len() != self.length {
            return done(Err(Status::new(library, UCS_ERR_MESSAGE_TRUNCATED)));
        }
        if self.worker.is_gone() {
            return done(Err(Status::new(library, UCS_ERR_CANCELED)));
        }
        let worker = Rc::clone(&self.worker);
        let receiving = Box::into_raw(Box::new(Receiving { buffer, worker, operation: 0, received: 0, done }));
        let operation = self.worker.began(receiving);
        // SAFETY: just boxed, and UCX has not seen it.
        unsafe { (*receiving).operation = operation };
        // SAFETY: all zeros is a valid value, with an empty mask.
        let mut params: ucp_request_param_t = unsafe { std::mem::zeroed() };
        params.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_RECV_INFO;
        params.cb = ucp_request_param_t__bindgen_ty_1 { recv_am: Some(on_received::<F>) };
        params.user_data = receiving.cast();
        // SAFETY: just boxed; taken back by exactly one of the branches below or by the callback.
        let (place, received) = unsafe { ((*receiving).buffer.as_mut_ptr(), &raw mut (*receiving).received) };
        params.recv_info = ucp_request_param_t__bindgen_ty_2 { length: received };
        // SAFETY: only compared as an address.
        if let Some(memory) = memory.filter(|memory| memory.covers(unsafe { &(*receiving).buffer })) {
            params.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;
            params.memh = memory.raw;
        }
        let this = std::mem::ManuallyDrop::new(self);
        // SAFETY: a descriptor that was announced and is used once (dropping is prevented above); the buffer has
        // `length` bytes and stays in its box until UCX is done.
        let started = Started::from(unsafe {
            (library.api.ucp_am_recv_data_nbx)(
                this.worker.raw(),
                this.descriptor,
                place.cast(),
                this.length,
                &raw const params,
            )
        });
        // SAFETY: `this` is not dropped, so the `Rc` is given back exactly once, here.
        drop(unsafe { std::ptr::read(&raw const this.worker) });
        let code = match started {
            Started::Request(_) => return,
            Started::Done => UCS_OK,
            Started::Failed(code) => code,
        };
        // SAFETY: the callback is not called when there is no request, so the box is still ours.
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
            // A peer that sends less than it announced would leave what was in the buffer before.
            if received == buffer.len() { Ok(buffer) } else { Err(Status::new(library, UCS_ERR_MESSAGE_TRUNCATED)) }
        });
        done(result);
    }
}

unsafe extern "C" fn on_received<F>(request: *mut c_void, status: ucs_status_t, length: usize, receiving: *mut c_void)
where
    F: FnOnce(Result<Buffer, Status>) + 'static,
{
    // SAFETY: the box given in `fetch`, for which this is called exactly once.
    let mut receiving = *unsafe { Box::from_raw(receiving.cast::<Receiving<F>>()) };
    // SAFETY: the request that has just ended, freed once; allowed from its own callback.
    unsafe { (receiving.worker.library().api.ucp_request_free)(request) };
    receiving.received = length;
    receiving.end(status);
}

impl Drop for Announcement {
    fn drop(&mut self) {
        // The descriptor is gone with its worker.
        if self.worker.is_gone() {
            return;
        }
        self.worker.disarm();
        // SAFETY: a descriptor that was announced and neither fetched nor released, of a live worker.
        unsafe { (self.worker.library().api.ucp_am_data_release)(self.worker.raw(), self.descriptor) }
    }
}

/// Which ids get a receiver that does nothing. UCX 1.13 calls what happens to lie in memory when a peer sends a message of an
/// id without one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Others {
    /// All that there are, against strangers from a network: a table of 1.5 MB.
    All,
    /// Those up to the one that is used: where peers share memory with us, and could do worse by writing into it.
    Lower,
}

/// Sets the receivers from the highest on, so that the table grows once.
pub(super) fn set_receivers(worker: &Rc<Worker>, id: u16, others: Others) -> Result<(), Status> {
    let highest = match others {
        Others::All => u16::MAX,
        // The table has an even number of places.
        Others::Lower => id | 1,
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
    // SAFETY: a live worker and parameters with their mask. The argument is the worker, which its `Rc` keeps in place
    // until it is destroyed, after which UCX does not call.
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
    // SAFETY: the argument given in `set_receiver`: a worker in an `Rc` that lives, because it is just progressing (or
    // sending to itself).
    let worker = unsafe {
        Rc::increment_strong_count(worker.cast_const().cast::<Worker>());
        Rc::from_raw(worker.cast_const().cast::<Worker>())
    };
    // SAFETY: UCX gives valid parameters during the call.
    let params = unsafe { &*params };
    // SAFETY: UCX gives `header_bytes` bytes during the call; it may give null for none.
    let header = unsafe { slice(header.cast(), header_bytes) };
    let from = (params.recv_attr & u64::from(UCP_AM_RECV_ATTR_FIELD_REPLY_EP) != 0)
        .then(|| EndpointKey(params.reply_ep.addr()));
    let Some(receiver) = worker.receiver() else { return UCS_OK };
    if params.recv_attr & u64::from(UCP_AM_RECV_ATTR_FLAG_RNDV) == 0 {
        // SAFETY: UCX gives `length` bytes during the call; it may give null for none.
        let payload = unsafe { slice(data.cast(), length) };
        receiver.receive(header, Arrival::Eager(payload), from);
        return UCS_OK;
    }
    let announced = Announcement { worker: Rc::clone(&worker), descriptor: data, length };
    // UCX may not be told within this call that the message is not wanted, so a refusal waits until it has returned.
    receiver.receive(header, Arrival::Announced(announced), from);
    UCS_INPROGRESS
}

/// # Safety
/// As `std::slice::from_raw_parts`, but null is allowed when there are no bytes.
unsafe fn slice<'a>(start: *const u8, length: usize) -> &'a [u8] {
    if length == 0 {
        return &[];
    }
    // SAFETY: the caller's.
    unsafe { std::slice::from_raw_parts(start, length) }
}

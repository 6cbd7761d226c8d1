//! Endpoints: ways to peers.

use std::ffi::c_void;
use std::net::SocketAddr;
use std::rc::Rc;

use super::listener::{CAddress, Request};
use super::print::printed;
use super::status::{Started, Status};
use super::worker::Worker;
use crate::sys::Library;
use crate::sys::ucp::*;

/// Addresses have some hundred bytes on a machine with many devices.
const ADDRESS_BYTES_MAX: usize = 16 << 10;
/// Lengths in an address are single bytes mostly.
const ADDRESS_PADDING: usize = 64 << 10;

/// Whether UCX tells when the peer is lost.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ErrorMode {
    /// It does. Such an endpoint never has shared-memory lanes.
    Peer,
    /// It does not.
    Silent,
}

/// Names an endpoint within its worker, while it lives.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct EndpointKey(pub(super) usize);

/// A way to a peer. Dropping it without [`Endpoint::close`] leaves it to the worker's end, and
/// [`Endpoint::give_back`] says that this has come.
pub(crate) struct Endpoint {
    pub(super) worker: Rc<Worker>,
    pub(super) raw: ucp_ep_h,
    mode: ErrorMode,
    /// What UCX's error callback is given; given back when the endpoint is closed.
    failed: *mut Failed,
}

/// Called from within [`Worker::progress`].
struct Failed {
    library: &'static Library,
    tell: Box<dyn Fn(Status)>,
}

impl Endpoint {
    pub(crate) fn to_socket(
        worker: &Rc<Worker>,
        to: SocketAddr,
        failed: impl Fn(Status) + 'static,
    ) -> Result<Self, Status> {
        let address = CAddress::from(to);
        Self::create(worker, ErrorMode::Peer, Box::new(failed), |params| {
            params.field_mask |= u64::from(UCP_EP_PARAM_FIELD_FLAGS | UCP_EP_PARAM_FIELD_SOCK_ADDR);
            params.flags = UCP_EP_PARAMS_FLAGS_CLIENT_SERVER;
            params.sockaddr = address.as_ucs();
        })
    }

    pub(crate) fn to_request(
        worker: &Rc<Worker>,
        request: Request,
        failed: impl Fn(Status) + 'static,
    ) -> Result<Self, Status> {
        Self::create(worker, ErrorMode::Peer, Box::new(failed), |params| {
            params.field_mask |= u64::from(UCP_EP_PARAM_FIELD_CONN_REQUEST);
            params.conn_request = request.take();
        })
    }

    /// To another worker. UCX believes what an address says about its own lengths, so one that was cut short or made up
    /// must not lead it beyond our memory: it reads from a copy with zeros behind. (It may still give up on nonsense.)
    pub(crate) fn to_worker(
        worker: &Rc<Worker>,
        address: &[u8],
        failed: impl Fn(Status) + 'static,
    ) -> Result<Self, Status> {
        if address.len() > ADDRESS_BYTES_MAX {
            return Err(Status::new(worker.library(), UCS_ERR_INVALID_ADDR));
        }
        let mut padded = vec![0; ADDRESS_BYTES_MAX + ADDRESS_PADDING];
        padded[..address.len()].copy_from_slice(address);
        let address = padded;
        Self::create(worker, ErrorMode::Silent, Box::new(failed), |params| {
            params.field_mask |= u64::from(UCP_EP_PARAM_FIELD_REMOTE_ADDRESS);
            params.address = address.as_ptr().cast();
        })
    }

    fn create(
        worker: &Rc<Worker>,
        mode: ErrorMode,
        failed: Box<dyn Fn(Status)>,
        address: impl FnOnce(&mut ucp_ep_params_t),
    ) -> Result<Self, Status> {
        let library = worker.library();
        let failed = Box::into_raw(Box::new(Failed { library, tell: failed }));
        // SAFETY: all zeros is a valid value: null pointers, no callback, an empty mask.
        let mut params: ucp_ep_params_t = unsafe { std::mem::zeroed() };
        params.field_mask = u64::from(UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER);
        params.err_mode = match mode {
            ErrorMode::Peer => UCP_ERR_HANDLING_MODE_PEER,
            ErrorMode::Silent => UCP_ERR_HANDLING_MODE_NONE,
        };
        params.err_handler = ucp_err_handler_t { cb: Some(on_error), arg: failed.cast() };
        address(&mut params);
        worker.disarm();
        let mut raw = std::ptr::null_mut();
        // SAFETY: parameters with their mask; addresses outlive the call; the callback's argument lives until the
        // endpoint is closed.
        let code = unsafe { (library.api.ucp_ep_create)(worker.raw(), &raw const params, &raw mut raw) };
        if let Err(status) = Status::check(library, code) {
            // SAFETY: from into_raw above; there is no endpoint that could call it.
            drop(unsafe { Box::from_raw(failed) });
            return Err(status);
        }
        Ok(Self { worker: Rc::clone(worker), raw, mode, failed })
    }

    pub(crate) fn key(&self) -> EndpointKey {
        EndpointKey(self.raw.addr())
    }

    pub(crate) fn mode(&self) -> ErrorMode {
        self.mode
    }

    /// Begins to close one with [`ErrorMode::Peer`], at once. Another cannot be forced, because the peer may be writing
    /// into our memory, and may never end otherwise: it goes with its worker.
    pub(crate) fn close(self) -> Closing {
        debug_assert!(self.mode == ErrorMode::Peer, "it goes with its worker");
        let library = self.worker.library();
        // SAFETY: all zeros is a valid value, with an empty mask.
        let mut params: ucp_request_param_t = unsafe { std::mem::zeroed() };
        params.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
        params.flags = UCP_EP_CLOSE_FLAG_FORCE;
        // SAFETY: an endpoint of a live worker, closed once: `self` is consumed.
        let started = Started::from(unsafe { (library.api.ucp_ep_close_nbx)(self.raw, &raw const params) });
        let request = match started {
            Started::Request(request) => request,
            Started::Done | Started::Failed(_) => std::ptr::null_mut(),
        };
        Closing { worker: self.worker, request, failed: self.failed }
    }

    /// Gives back what it kept for UCX's callback, when its worker was [abandoned](Worker::abandon).
    pub(crate) fn give_back(self) {
        if self.worker.is_gone() {
            // SAFETY: from into_raw in `create`, given back once; the endpoint went with its worker, so nobody calls it.
            drop(unsafe { Box::from_raw(self.failed) });
        }
    }

    /// What UCX prints about it: its lanes among others.
    pub(crate) fn describe(&self) -> String {
        // SAFETY: an endpoint of a live worker, and a stream that is open.
        printed(|stream| unsafe { (self.worker.library().api.ucp_ep_print_info)(self.raw, stream) }).unwrap_or_default()
    }
}

/// An endpoint that is being closed; to be asked after each progress. Dropping it before it has ended leaks it.
pub(crate) struct Closing {
    worker: Rc<Worker>,
    request: ucs_status_ptr_t,
    failed: *mut Failed,
}

impl Closing {
    /// Whether it has ended; if so, everything is given back.
    pub(crate) fn ended(&mut self) -> bool {
        let api = &self.worker.library().api;
        if !self.request.is_null() {
            // SAFETY: a request that has not been freed yet (it is set to null with that).
            if unsafe { (api.ucp_request_check_status)(self.request) } == UCS_INPROGRESS {
                return false;
            }
            // SAFETY: as above, and it has ended.
            unsafe { (api.ucp_request_free)(self.request) };
            self.request = std::ptr::null_mut();
        }
        if !self.failed.is_null() {
            // SAFETY: from into_raw in `create`; the endpoint is gone, so nobody calls it any more.
            drop(unsafe { Box::from_raw(self.failed) });
            self.failed = std::ptr::null_mut();
        }
        true
    }
}

unsafe extern "C" fn on_error(failed: *mut c_void, _: ucp_ep_h, status: ucs_status_t) {
    // SAFETY: the argument given in `create`, which lives until the endpoint is closed.
    let failed = unsafe { &*failed.cast::<Failed>() };
    (failed.tell)(Status::new(failed.library, status));
}

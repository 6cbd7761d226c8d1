//! Endpoints: connections to peers.

use std::ffi::c_void;
use std::net::SocketAddr;
use std::rc::Rc;

use super::listener::{CAddress, Request};
use super::print::printed;
use super::status::{Started, Status};
use super::worker::Worker;
use crate::sys::Library;
use crate::sys::ucp::*;

/// Maximum length of an address. An address has some hundred bytes, even on a machine with many devices.
const ADDRESS_BYTES_MAX: usize = 16 << 10;
/// Zeros behind an address. Most of the lengths in an address are single bytes.
const ADDRESS_PADDING: usize = 64 << 10;

/// Whether UCX reports the loss of the peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ErrorMode {
    /// UCX reports it. Such an endpoint never has shared-memory lanes.
    Peer,
    /// UCX does not report it.
    Silent,
}

/// Identifies an endpoint within its worker while the endpoint exists.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct EndpointKey(pub(super) usize);

/// A connection to a peer.
///
/// Dropping it without [`Endpoint::close`] leaves it open until its worker is destroyed; after that, call
/// [`Endpoint::free_callback`].
pub(crate) struct Endpoint {
    pub(super) worker: Rc<Worker>,
    pub(super) raw: ucp_ep_h,
    mode: ErrorMode,
    /// Argument of UCX's error callback, freed when the endpoint is closed.
    failed: *mut Failed,
}

/// Error callback of an endpoint. Called from within [`Worker::progress`].
struct Failed {
    library: &'static Library,
    report: Box<dyn Fn(Status)>,
}

impl Endpoint {
    /// Connects to a listener. Calls `failed` if the peer is lost.
    ///
    /// # Errors
    /// UCX's status.
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

    /// Accepts the connection request of a peer. Calls `failed` if the peer is lost.
    ///
    /// # Errors
    /// UCX's status.
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

    /// Connects to another worker.
    ///
    /// UCX trusts the lengths within an address. A truncated or forged address must not make UCX read beyond our
    /// memory, so UCX reads from a copy that ends with zeros. UCX may still abort on a malformed address.
    ///
    /// # Errors
    /// `UCS_ERR_INVALID_ADDR` if the address is too long, or UCX's status.
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
        let failed = Box::into_raw(Box::new(Failed { library, report: failed }));
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
        // SAFETY: parameters with their mask. Addresses outlive the call, and the callback's argument lives until the
        // endpoint is closed.
        let code = unsafe { (library.api.ucp_ep_create)(worker.raw(), &raw const params, &raw mut raw) };
        if let Err(status) = Status::check(library, code) {
            // SAFETY: from `into_raw` above; no endpoint exists that could call it.
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

    /// Starts to close an endpoint with [`ErrorMode::Peer`] at once.
    ///
    /// An endpoint with [`ErrorMode::Silent`] cannot be closed by force, because the peer may be writing into our
    /// memory and may never stop otherwise. It is destroyed with its worker.
    pub(crate) fn close(self) -> Closing {
        debug_assert!(self.mode == ErrorMode::Peer, "a silent endpoint is destroyed with its worker");
        let library = self.worker.library();
        // SAFETY: all zeros is a valid value, with an empty mask.
        let mut params: ucp_request_param_t = unsafe { std::mem::zeroed() };
        params.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
        params.flags = UCP_EP_CLOSE_FLAG_FORCE;
        // SAFETY: an endpoint of a live worker, closed once, because `self` is consumed.
        let started = Started::from(unsafe { (library.api.ucp_ep_close_nbx)(self.raw, &raw const params) });
        let request = match started {
            Started::Request(request) => request,
            Started::Done | Started::Failed(_) => std::ptr::null_mut(),
        };
        Closing { worker: self.worker, request, failed: self.failed }
    }

    /// Frees the callback of an endpoint whose worker was [abandoned](Worker::abandon).
    pub(crate) fn free_callback(self) {
        if self.worker.is_destroyed() {
            // SAFETY: from `into_raw` in `create`, freed once. The endpoint was destroyed with its worker and calls it
            // no more.
            drop(unsafe { Box::from_raw(self.failed) });
        }
    }

    /// Returns UCX's description of the endpoint, which lists its lanes.
    pub(crate) fn describe(&self) -> String {
        // SAFETY: an endpoint of a live worker and an open stream.
        printed(|stream| unsafe { (self.worker.library().api.ucp_ep_print_info)(self.raw, stream) }).unwrap_or_default()
    }
}

/// An endpoint that is being closed. Poll [`Closing::ended`] after each progress. Dropping it earlier leaks the
/// endpoint.
pub(crate) struct Closing {
    worker: Rc<Worker>,
    request: ucs_status_ptr_t,
    failed: *mut Failed,
}

impl Closing {
    /// Returns whether the endpoint is closed. If so, everything is freed.
    pub(crate) fn ended(&mut self) -> bool {
        let api = &self.worker.library().api;
        if !self.request.is_null() {
            // SAFETY: the request has not been freed yet: it is set to null when it is freed.
            if unsafe { (api.ucp_request_check_status)(self.request) } == UCS_INPROGRESS {
                return false;
            }
            // SAFETY: as above, and the request has completed.
            unsafe { (api.ucp_request_free)(self.request) };
            self.request = std::ptr::null_mut();
        }
        if !self.failed.is_null() {
            // SAFETY: from `into_raw` in `create`. The endpoint is closed and calls it no more.
            drop(unsafe { Box::from_raw(self.failed) });
            self.failed = std::ptr::null_mut();
        }
        true
    }
}

unsafe extern "C" fn on_error(failed: *mut c_void, _: ucp_ep_h, status: ucs_status_t) {
    // SAFETY: the argument passed in `create`, which lives until the endpoint is closed.
    let failed = unsafe { &*failed.cast::<Failed>() };
    (failed.report)(Status::new(failed.library, status));
}

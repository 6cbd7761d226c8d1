//! Listener for peers that connect over a network.

use std::ffi::c_void;
use std::net::SocketAddr;
use std::rc::Rc;

use super::status::Status;
use super::worker::Worker;
use crate::sys::ucp::*;

/// Connection request of a peer. Becomes an endpoint; dropping it rejects the peer.
pub(crate) struct Request {
    listener: Rc<Listener>,
    raw: ucp_conn_request_h,
}

/// Listens on an address. Calls `arrived` from within [`Worker::progress`].
pub(crate) struct Listener {
    worker: Rc<Worker>,
    raw: std::cell::Cell<ucp_listener_h>,
    arrived: Box<dyn Fn(RawRequest)>,
}

/// UCX's handle of a connection request. [`Listener::request`] turns it into a [`Request`], once.
pub(crate) struct RawRequest(ucp_conn_request_h);

impl Listener {
    /// Listens on `address`.
    ///
    /// # Errors
    /// UCX's status.
    pub(crate) fn open(
        worker: &Rc<Worker>,
        address: SocketAddr,
        arrived: impl Fn(RawRequest) + 'static,
    ) -> Result<Rc<Self>, Status> {
        let library = worker.library();
        let listener = Rc::new(Self {
            worker: Rc::clone(worker),
            raw: std::cell::Cell::new(std::ptr::null_mut()),
            arrived: Box::new(arrived),
        });
        let address = CAddress::from(address);
        let params = ucp_listener_params_t {
            field_mask: u64::from(UCP_LISTENER_PARAM_FIELD_SOCK_ADDR | UCP_LISTENER_PARAM_FIELD_CONN_HANDLER),
            sockaddr: address.as_ucs(),
            accept_handler: ucp_listener_accept_handler_t { cb: None, arg: std::ptr::null_mut() },
            conn_handler: ucp_listener_conn_handler_t {
                cb: Some(on_request),
                arg: Rc::as_ptr(&listener).cast_mut().cast(),
            },
        };
        let mut raw = std::ptr::null_mut();
        // SAFETY: valid parameters. The address outlives the call. The callback's argument lives in an `Rc` that is not
        // released before `ucp_listener_destroy` (see Drop); afterwards, UCX does not call any more.
        let code = unsafe { (library.api.ucp_listener_create)(worker.raw(), &raw const params, &raw mut raw) };
        Status::check(library, code)?;
        listener.raw.set(raw);
        Ok(listener)
    }

    /// Returns the actual listen address.
    ///
    /// # Errors
    /// UCX's status.
    pub(crate) fn address(&self) -> Result<SocketAddr, Status> {
        let library = self.worker.library();
        // SAFETY: all zeros is a valid value of both C structures.
        let mut attributes: ucp_listener_attr_t = unsafe { std::mem::zeroed() };
        attributes.field_mask = u64::from(UCP_LISTENER_ATTR_FIELD_SOCKADDR);
        // SAFETY: an open listener and a valid place with its mask.
        let code = unsafe { (library.api.ucp_listener_query)(self.raw.get(), &raw mut attributes) };
        Status::check(library, code)?;
        from_storage(&attributes.sockaddr).ok_or_else(|| Status::new(library, UCS_ERR_INVALID_ADDR))
    }

    pub(crate) fn request(self: &Rc<Self>, RawRequest(raw): RawRequest) -> Request {
        Request { listener: Rc::clone(self), raw }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if !self.raw.get().is_null() {
            // SAFETY: created by `ucp_listener_create` and destroyed once; `self` keeps its worker alive.
            unsafe { (self.worker.library().api.ucp_listener_destroy)(self.raw.get()) }
        }
    }
}

impl Request {
    /// Releases the handle for `ucp_ep_create`, which consumes it.
    pub(super) fn take(self) -> ucp_conn_request_h {
        let raw = self.raw;
        let mut this = std::mem::ManuallyDrop::new(self);
        // SAFETY: `this` is never dropped, so the `Rc` is released exactly once, here.
        unsafe { std::ptr::drop_in_place(&raw mut this.listener) };
        raw
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        let library = self.listener.worker.library();
        // SAFETY: a request of this listener, which is alive; neither rejected nor taken before.
        unsafe { (library.api.ucp_listener_reject)(self.listener.raw.get(), self.raw) };
    }
}

unsafe extern "C" fn on_request(request: ucp_conn_request_h, listener: *mut c_void) {
    // SAFETY: the argument passed in `open`. It lives until the listener is destroyed, which stops these calls.
    let listener = unsafe { &*listener.cast::<Listener>() };
    (listener.arrived)(RawRequest(request));
}

/// A socket address of either family in C's representation.
pub(super) struct CAddress {
    storage: libc::sockaddr_storage,
    length: usize,
}

impl From<SocketAddr> for CAddress {
    fn from(address: SocketAddr) -> Self {
        // SAFETY: all zeros is a valid `sockaddr_storage`.
        let mut storage: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
        let length = match address {
            SocketAddr::V4(address) => {
                let place = (&raw mut storage).cast::<libc::sockaddr_in>();
                // SAFETY: `sockaddr_storage` has at least the size and alignment of every socket address.
                let place = unsafe { &mut *place };
                place.sin_family = libc::AF_INET as libc::sa_family_t;
                place.sin_port = address.port().to_be();
                place.sin_addr.s_addr = u32::from_ne_bytes(address.ip().octets());
                size_of::<libc::sockaddr_in>()
            }
            SocketAddr::V6(address) => {
                let place = (&raw mut storage).cast::<libc::sockaddr_in6>();
                // SAFETY: `sockaddr_storage` has at least the size and alignment of every socket address.
                let place = unsafe { &mut *place };
                place.sin6_family = libc::AF_INET6 as libc::sa_family_t;
                place.sin6_port = address.port().to_be();
                place.sin6_addr.s6_addr = address.ip().octets();
                place.sin6_scope_id = address.scope_id();
                size_of::<libc::sockaddr_in6>()
            }
        };
        Self { storage, length }
    }
}

impl CAddress {
    /// Returns a view of the address that is valid as long as `self`.
    pub(super) fn as_ucs(&self) -> ucs_sock_addr_t {
        ucs_sock_addr_t { addr: (&raw const self.storage).cast(), addrlen: self.length as libc::socklen_t }
    }
}

fn from_storage(storage: &libc::sockaddr_storage) -> Option<SocketAddr> {
    match i32::from(storage.ss_family) {
        libc::AF_INET => {
            // SAFETY: the family identifies the type, and the storage has its size and alignment.
            let address = unsafe { &*(&raw const *storage).cast::<libc::sockaddr_in>() };
            let ip = address.sin_addr.s_addr.to_ne_bytes();
            Some(SocketAddr::from((ip, u16::from_be(address.sin_port))))
        }
        libc::AF_INET6 => {
            // SAFETY: the family identifies the type, and the storage has its size and alignment.
            let address = unsafe { &*(&raw const *storage).cast::<libc::sockaddr_in6>() };
            Some(SocketAddr::from((address.sin6_addr.s6_addr, u16::from_be(address.sin6_port))))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_survives_the_way_to_c_and_back() {
        for text in ["127.0.0.1:7011", "0.0.0.0:0", "[::1]:65535", "[fe80::1:2]:80"] {
            let address: SocketAddr = text.parse().unwrap();
            assert_eq!(from_storage(&CAddress::from(address).storage), Some(address));
        }
    }
}

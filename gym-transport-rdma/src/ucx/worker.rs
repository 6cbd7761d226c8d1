//! UCP worker: performs the communication of its endpoints.

use std::cell::{Cell, OnceCell, RefCell};
use std::os::fd::{BorrowedFd, RawFd};
use std::rc::Rc;

use super::am::{self, Receiver, UnhandledIds};
use super::context::{Context, Refused};
use super::operations::{Operation, Operations};
use super::status::Status;
use crate::sys::Library;
use crate::sys::ucp::*;

/// A UCP worker, used by one thread.
///
/// Destroyed when the last object that uses it is dropped. A pending operation keeps it alive, so memory that UCX may
/// still use is leaked rather than freed, unless the worker is [abandoned](Worker::abandon).
pub(crate) struct Worker {
    context: Rc<Context>,
    /// Null after the worker was abandoned.
    raw: Cell<ucp_worker_h>,
    /// The worker was armed and not used since.
    armed: Cell<bool>,
    operations: RefCell<Operations>,
    wakeup: RawFd,
    address: Vec<u8>,
    header_bytes_max: usize,
    receiver: OnceCell<Box<dyn Receiver>>,
}

/// Result of arming a worker before a sleep.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Armed {
    /// [`Worker::wakeup`] becomes readable when there is work.
    Yes,
    /// Busy: call [`Worker::progress`] again.
    Busy,
}

impl Worker {
    /// Creates a worker.
    ///
    /// # Errors
    /// The rejected operation, and UCX's status.
    pub(crate) fn open(context: &Rc<Context>) -> Result<Rc<Self>, Refused> {
        let (library, api) = (context.library, &context.library.api);
        let check = |what: &str, code| Status::check(library, code).map_err(|status| (what.to_owned(), status));
        // SAFETY: all zeros is a valid value, with an empty mask.
        let mut params: ucp_worker_params_t = unsafe { std::mem::zeroed() };
        params.field_mask = u64::from(UCP_WORKER_PARAM_FIELD_THREAD_MODE | UCP_WORKER_PARAM_FIELD_FLAGS);
        params.thread_mode = UCS_THREAD_MODE_SINGLE;
        // An abandoned worker has pending operations, about which UCX would warn.
        params.flags = u64::from(UCP_WORKER_FLAG_IGNORE_REQUEST_LEAK);
        let mut raw = std::ptr::null_mut();
        // SAFETY: a live context, parameters with their mask, and a place for the result.
        check("open a worker", unsafe { (api.ucp_worker_create)(context.raw, &raw const params, &raw mut raw) })?;
        let mut worker = Self {
            context: Rc::clone(context),
            raw: Cell::new(raw),
            armed: Cell::new(false),
            operations: RefCell::default(),
            wakeup: -1,
            address: Vec::new(),
            header_bytes_max: 0,
            receiver: OnceCell::new(),
        };
        // SAFETY: a live worker and a place for the result. UCX keeps the ownership of the descriptor.
        check("wake a worker up", unsafe { (api.ucp_worker_get_efd)(raw, &raw mut worker.wakeup) })?;
        let (mut address, mut length) = (std::ptr::null_mut(), 0);
        // SAFETY: a live worker and two places for the result.
        check("ask for the address", unsafe { (api.ucp_worker_get_address)(raw, &raw mut address, &raw mut length) })?;
        // SAFETY: UCX guarantees `length` bytes at this address until they are released.
        worker.address = unsafe { std::slice::from_raw_parts(address.cast::<u8>(), length) }.to_vec();
        // SAFETY: from `ucp_worker_get_address`, released once.
        unsafe { (api.ucp_worker_release_address)(raw, address) };
        // SAFETY: all zeros is a valid value.
        let mut attributes: ucp_worker_attr_t = unsafe { std::mem::zeroed() };
        attributes.field_mask = u64::from(UCP_WORKER_ATTR_FIELD_MAX_AM_HEADER);
        // SAFETY: a live worker and a valid place with its mask.
        check("ask for the longest header", unsafe { (api.ucp_worker_query)(raw, &raw mut attributes) })?;
        worker.header_bytes_max = attributes.max_am_header;
        Ok(Rc::new(worker))
    }

    /// Sets the receiver of active messages with this id, once. Messages with the other ids are discarded, as
    /// `unhandled` specifies.
    ///
    /// # Errors
    /// UCX's status.
    pub(crate) fn receive(
        self: &Rc<Self>,
        id: u16,
        receiver: Box<dyn Receiver>,
        unhandled: UnhandledIds,
    ) -> Result<(), Status> {
        self.receiver.get_or_init(|| receiver);
        am::set_receivers(self, id, unhandled)
    }

    pub(super) fn receiver(&self) -> Option<&dyn Receiver> {
        self.receiver.get().map(AsRef::as_ref)
    }

    /// Makes progress, which calls receivers and callbacks. Returns whether there was any work.
    pub(crate) fn progress(&self) -> bool {
        let raw = self.raw.get();
        if raw.is_null() {
            return false;
        }
        // SAFETY: a live worker, on the only thread that has it.
        let worked = unsafe { (self.library().api.ucp_worker_progress)(raw) != 0 };
        if worked {
            self.disarm();
        }
        worked
    }

    /// Whether the worker was armed and not used since, so that it need not be armed again.
    pub(crate) fn is_armed(&self) -> bool {
        self.armed.get()
    }

    /// Records that the worker must be armed again, because it was used or its descriptor became readable.
    pub(crate) fn disarm(&self) {
        self.armed.set(false);
    }

    /// Arms the worker for a sleep. Call it after [`Worker::progress`] found no work, and not on an abandoned worker.
    ///
    /// # Errors
    /// UCX's status.
    pub(crate) fn arm(&self) -> Result<Armed, Status> {
        // SAFETY: a live worker, as the caller guarantees. UCX checks the handle before it uses it.
        match unsafe { (self.library().api.ucp_worker_arm)(self.raw.get()) } {
            UCS_OK => {
                self.armed.set(true);
                Ok(Armed::Yes)
            }
            UCS_ERR_BUSY => Ok(Armed::Busy),
            code => Err(Status::new(self.library(), code)),
        }
    }

    /// Descriptor that becomes readable when an armed worker has work. Owned by UCX.
    pub(crate) fn wakeup(&self) -> BorrowedFd<'_> {
        // SAFETY: the borrowed worker keeps its descriptor open.
        unsafe { BorrowedFd::borrow_raw(self.wakeup) }
    }

    fn pop_operation(&self) -> Option<*mut dyn Operation> {
        self.operations.borrow_mut().pop()
    }

    /// Returns the address that peers connect to.
    pub(crate) fn address(&self) -> &[u8] {
        &self.address
    }

    /// Returns the maximum length of an active message's header.
    pub(crate) fn header_bytes_max(&self) -> usize {
        self.header_bytes_max
    }

    pub(super) fn raw(&self) -> ucp_worker_h {
        self.raw.get()
    }

    /// Whether [`Worker::abandon`] was called. If so, no object of this worker may be used any more.
    pub(super) fn is_destroyed(&self) -> bool {
        self.raw.get().is_null()
    }

    /// Stores an operation until [`Worker::ended`]. Returns its number.
    pub(super) fn began(&self, operation: *mut dyn Operation) -> usize {
        self.disarm();
        self.operations.borrow_mut().add(operation)
    }

    /// Removes an operation that UCX has completed.
    pub(super) fn ended(&self, operation: usize) {
        self.operations.borrow_mut().remove(operation);
    }

    /// Destroys the worker with its pending operations. Each of them completes with `UCS_ERR_CANCELED` and frees its
    /// memory.
    ///
    /// # Safety
    /// No process but this one, through UCX, may still read or write the memory of the operations. One of these must
    /// hold: the peer has ended, the peer was never given any of that memory, or it takes part in no operation.
    pub(crate) unsafe fn abandon(&self) {
        let raw = self.raw.replace(std::ptr::null_mut());
        if raw.is_null() {
            return;
        }
        // SAFETY: a live worker, destroyed once, outside its progress, on its thread. Endpoints and descriptors are
        // destroyed with it; their owners check `is_destroyed` before they use them.
        unsafe { (self.library().api.ucp_worker_destroy)(raw) };
        // UCX may have called back meanwhile for some operations, which has removed them.
        while let Some(operation) = self.pop_operation() {
            // SAFETY: a box that was passed to `began`. Its callback was not called and will not be called any more.
            let operation = unsafe { Box::from_raw(operation) };
            operation.cancel();
        }
    }

    pub(crate) fn library(&self) -> &'static Library {
        self.context.library
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let raw = self.raw.get();
        if !raw.is_null() {
            // SAFETY: every object that uses the worker and every pending operation holds an `Rc` of it, so none is
            // left. This runs on the thread that created the worker, because the worker cannot leave it. The receiver
            // is dropped afterwards.
            unsafe { (self.library().api.ucp_worker_destroy)(raw) }
        }
    }
}

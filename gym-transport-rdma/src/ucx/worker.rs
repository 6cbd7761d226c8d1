//! The worker: what makes everything go on.

use std::cell::{Cell, OnceCell, RefCell};
use std::os::fd::{BorrowedFd, RawFd};
use std::rc::Rc;

use super::am::{self, Others, Receiver};
use super::context::{Context, Refused};
use super::operations::{Operation, Operations};
use super::status::Status;
use crate::sys::Library;
use crate::sys::ucp::*;

/// One UCP worker of one thread. Given back when the last of what stands on it is gone; an operation that never ends
/// keeps it, so that what UCX still knows is leaked rather than freed, unless it is [abandoned](Worker::abandon).
pub(crate) struct Worker {
    context: Rc<Context>,
    /// Null when it was abandoned.
    raw: Cell<ucp_worker_h>,
    /// It was armed, and nothing has been done with it since.
    armed: Cell<bool>,
    operations: RefCell<Operations>,
    wakeup: RawFd,
    address: Vec<u8>,
    header_bytes_max: usize,
    receiver: OnceCell<Box<dyn Receiver>>,
}

/// Whether it is safe to sleep.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Armed {
    /// [`Worker::wakeup`] becomes readable when there is something to do.
    Yes,
    /// Something has happened meanwhile: progress again.
    Busy,
}

impl Worker {
    pub(crate) fn open(context: &Rc<Context>) -> Result<Rc<Self>, Refused> {
        let (library, api) = (context.library, &context.library.api);
        let check = |what: &str, code| Status::check(library, code).map_err(|status| (what.to_owned(), status));
        // SAFETY: all zeros is a valid value, with an empty mask.
        let mut params: ucp_worker_params_t = unsafe { std::mem::zeroed() };
        params.field_mask = u64::from(UCP_WORKER_PARAM_FIELD_THREAD_MODE | UCP_WORKER_PARAM_FIELD_FLAGS);
        params.thread_mode = UCS_THREAD_MODE_SINGLE;
        // One that is abandoned has operations that did not end.
        params.flags = u64::from(UCP_WORKER_FLAG_IGNORE_REQUEST_LEAK);
        let mut raw = std::ptr::null_mut();
        // SAFETY: a live context, parameters with their mask, a place for the result.
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
        // SAFETY: a live worker and a place for the result. The descriptor stays UCX's.
        check("wake a worker up", unsafe { (api.ucp_worker_get_efd)(raw, &raw mut worker.wakeup) })?;
        let (mut address, mut length) = (std::ptr::null_mut(), 0);
        // SAFETY: a live worker and two places for the result.
        check("ask for the address", unsafe { (api.ucp_worker_get_address)(raw, &raw mut address, &raw mut length) })?;
        // SAFETY: UCX says that `length` bytes lie there until they are released.
        worker.address = unsafe { std::slice::from_raw_parts(address.cast::<u8>(), length) }.to_vec();
        // SAFETY: from get_address, released once.
        unsafe { (api.ucp_worker_release_address)(raw, address) };
        // SAFETY: all zeros is a valid value.
        let mut attributes: ucp_worker_attr_t = unsafe { std::mem::zeroed() };
        attributes.field_mask = u64::from(UCP_WORKER_ATTR_FIELD_MAX_AM_HEADER);
        // SAFETY: a live worker and a valid place with its mask.
        check("ask for the longest header", unsafe { (api.ucp_worker_query)(raw, &raw mut attributes) })?;
        worker.header_bytes_max = attributes.max_am_header;
        Ok(Rc::new(worker))
    }

    /// Sets what active messages of this id are given to; once. `others` of the other ids are taken and dropped, from 0 on.
    pub(crate) fn receive(self: &Rc<Self>, id: u16, receiver: Box<dyn Receiver>, others: Others) -> Result<(), Status> {
        self.receiver.get_or_init(|| receiver);
        am::set_receivers(self, id, others)
    }

    pub(super) fn receiver(&self) -> Option<&dyn Receiver> {
        self.receiver.get().map(AsRef::as_ref)
    }

    /// Does what there is to do, calling receivers and callbacks, and says whether there was anything.
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

    /// Whether it was armed and nothing has come or been sent since, so that it need not be armed again.
    pub(crate) fn is_armed(&self) -> bool {
        self.armed.get()
    }

    /// It is to be armed anew: something was done with it, or its descriptor became readable.
    pub(crate) fn disarm(&self) {
        self.armed.set(false);
    }

    /// To be called when [`Worker::progress`] found nothing, and not on one that was abandoned.
    pub(crate) fn arm(&self) -> Result<Armed, Status> {
        // SAFETY: a live worker, as the caller promises; UCX looks at the handle before it uses it.
        match unsafe { (self.library().api.ucp_worker_arm)(self.raw.get()) } {
            UCS_OK => {
                self.armed.set(true);
                Ok(Armed::Yes)
            }
            UCS_ERR_BUSY => Ok(Armed::Busy),
            code => Err(Status::new(self.library(), code)),
        }
    }

    /// Readable when an armed worker has something to do. Belongs to UCX.
    pub(crate) fn wakeup(&self) -> BorrowedFd<'_> {
        // SAFETY: the worker, which is borrowed, keeps its descriptor open.
        unsafe { BorrowedFd::borrow_raw(self.wakeup) }
    }

    fn any_operation(&self) -> Option<*mut dyn Operation> {
        self.operations.borrow_mut().pop()
    }

    /// What peers connect to.
    pub(crate) fn address(&self) -> &[u8] {
        &self.address
    }

    /// The longest header of an active message.
    pub(crate) fn header_bytes_max(&self) -> usize {
        self.header_bytes_max
    }

    pub(super) fn raw(&self) -> ucp_worker_h {
        self.raw.get()
    }

    /// Whether [`Worker::abandon`] was called: nothing that stands on it may be used any more.
    pub(super) fn is_gone(&self) -> bool {
        self.raw.get().is_null()
    }

    /// Keeps what an operation needs until [`Worker::ended`], and tells under which number.
    pub(super) fn began(&self, operation: *mut dyn Operation) -> usize {
        self.disarm();
        self.operations.borrow_mut().add(operation)
    }

    /// UCX has ended an operation.
    pub(super) fn ended(&self, operation: usize) {
        self.operations.borrow_mut().remove(operation);
    }

    /// Destroys it although operations have not ended. Each of them is told `UCS_ERR_CANCELED`, and what it kept is given
    /// back.
    ///
    /// # Safety
    /// Nobody but UCX in this process still reads or writes what the operations keep: the peer has ended, or was never
    /// told of any of it, or there is no operation that it takes part in.
    pub(crate) unsafe fn abandon(&self) {
        let raw = self.raw.replace(std::ptr::null_mut());
        if raw.is_null() {
            return;
        }
        // SAFETY: a live worker, destroyed once, outside of its progress, on its thread. Endpoints and descriptors go with
        // it; whoever holds one asks `is_gone` before using it.
        unsafe { (self.library().api.ucp_worker_destroy)(raw) };
        // UCX has called back for some of them meanwhile, which has taken them out.
        while let Some(operation) = self.any_operation() {
            // SAFETY: a box that was given to `began` and whose callback was not called, and will not be any more.
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
            // SAFETY: everything that stands on it and every operation that has not ended holds an `Rc` of it, so there is
            // none left; called on the thread that made it, because it cannot leave it. The receiver is dropped after it.
            unsafe { (self.library().api.ucp_worker_destroy)(raw) }
        }
    }
}

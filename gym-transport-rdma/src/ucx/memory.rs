//! Registered memory.

use std::ops::Range;
use std::rc::Rc;

use super::context::Context;
use super::status::Status;
use crate::sys::ucp::*;

/// A range of memory that is registered with the devices of a context. Dropping it removes the registration, not the
/// memory.
pub(crate) struct Memory {
    context: Rc<Context>,
    pub(super) raw: ucp_mem_h,
    range: Range<usize>,
}

impl Memory {
    /// Registers a range.
    ///
    /// # Errors
    /// UCX's status.
    ///
    /// # Safety
    /// The range must stay mapped until the result is dropped.
    pub(crate) unsafe fn register(context: &Rc<Context>, range: Range<usize>) -> Result<Self, Status> {
        let params = ucp_mem_map_params_t {
            field_mask: u64::from(UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH),
            address: std::ptr::with_exposed_provenance_mut(range.start),
            length: range.len(),
            flags: 0,
            prot: 0,
            memory_type: 0,
        };
        let mut raw = std::ptr::null_mut();
        // SAFETY: the caller guarantees that the range is mapped. The parameters and the place for the result are
        // valid.
        let code = unsafe { (context.library.api.ucp_mem_map)(context.raw, &raw const params, &raw mut raw) };
        Status::check(context.library, code)?;
        Ok(Self { context: Rc::clone(context), raw, range })
    }

    /// Whether all of these bytes lie in the range.
    pub(crate) fn covers(&self, bytes: &[u8]) -> bool {
        let start = bytes.as_ptr().addr();
        self.range.start <= start && start + bytes.len() <= self.range.end
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: from `ucp_mem_map` of this context, unmapped once. UCX returns an error only for a null handle.
        unsafe { (self.context.library.api.ucp_mem_unmap)(self.context.raw, self.raw) };
    }
}

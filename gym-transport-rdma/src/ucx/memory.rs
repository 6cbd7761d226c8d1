//! Registered memory.

use std::ops::Range;
use std::rc::Rc;

use super::context::Context;
use super::status::Status;
use crate::sys::ucp::*;

/// A range of memory that the devices of a context know. Dropping it makes them forget it; the memory stays.
pub(crate) struct Memory {
    context: Rc<Context>,
    pub(super) raw: ucp_mem_h,
    range: Range<usize>,
}

impl Memory {
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
        // SAFETY: the range is mapped, by the caller's promise; valid parameters and a place for the result.
        let code = unsafe { (context.library.api.ucp_mem_map)(context.raw, &raw const params, &raw mut raw) };
        Status::check(context.library, code)?;
        Ok(Self { context: Rc::clone(context), raw, range })
    }

    /// Whether all of these bytes lie in it.
    pub(crate) fn covers(&self, bytes: &[u8]) -> bool {
        let start = bytes.as_ptr().addr();
        self.range.start <= start && start + bytes.len() <= self.range.end
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: from ucp_mem_map of this context, unmapped once. UCX answers with an error only for a null handle.
        unsafe { (self.context.library.api.ucp_mem_unmap)(self.context.raw, self.raw) };
    }
}

//! Status codes of UCX.

use std::ffi::CStr;
use std::fmt;

use crate::sys::Library;
use crate::sys::ucp::{UCS_ERR_LAST, UCS_INPROGRESS, UCS_OK, ucs_status_ptr_t, ucs_status_t};

/// An error status of UCX, with UCX's description.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Status {
    code: ucs_status_t,
    description: &'static CStr,
}

impl Status {
    pub(crate) fn new(library: &'static Library, code: ucs_status_t) -> Self {
        // SAFETY: accepts any status and returns a constant of the library, which is never unloaded. For an unknown
        // status it returns a static buffer that it may overwrite, which is still a C string.
        let description = unsafe { CStr::from_ptr((library.api.ucs_status_string)(code)) };
        Self { code, description }
    }

    /// Returns `Ok` for success or an operation in progress.
    ///
    /// # Errors
    /// All other statuses.
    pub(crate) fn check(library: &'static Library, code: ucs_status_t) -> Result<(), Self> {
        if code == UCS_OK || code == UCS_INPROGRESS { Ok(()) } else { Err(Self::new(library, code)) }
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (UCX status {})", self.description.to_string_lossy(), self.code)
    }
}

impl fmt::Debug for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Result of starting an operation. In the header, `UCS_PTR_IS_ERR` and related macros decode it.
pub(super) enum Started {
    /// The operation has completed. Its callback will not be called.
    Done,
    /// The operation failed. Its callback will not be called.
    Failed(ucs_status_t),
    /// The operation is in progress. Its callback will be called.
    Request(ucs_status_ptr_t),
}

impl Started {
    pub(super) fn from(pointer: ucs_status_ptr_t) -> Self {
        let value = pointer as usize;
        if pointer.is_null() {
            Self::Done
        } else if value >= UCS_ERR_LAST as isize as usize {
            // An error pointer is a sign-extended negative number whose lowest byte is the status.
            Self::Failed(value as u8 as ucs_status_t)
        } else {
            Self::Request(pointer)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::ucp::{UCS_ERR_CANCELED, UCS_ERR_NO_MESSAGE};

    fn pointer(value: isize) -> ucs_status_ptr_t {
        std::ptr::without_provenance_mut(value as usize)
    }

    #[test]
    fn a_null_request_is_done_and_small_negative_ones_are_errors() {
        assert!(matches!(Started::from(pointer(0)), Started::Done));
        for code in [UCS_ERR_NO_MESSAGE, UCS_ERR_CANCELED, UCS_ERR_LAST] {
            assert!(matches!(Started::from(pointer(code as isize)), Started::Failed(found) if found == code));
        }
        assert!(matches!(Started::from(pointer(UCS_ERR_LAST as isize - 1)), Started::Request(_)));
        assert!(matches!(Started::from(pointer(0x7f00_0000_1000)), Started::Request(_)));
    }
}

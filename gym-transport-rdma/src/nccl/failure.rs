//! Errors of NCCL as those of a meeting.

use gym_core::{Code, Error};

use crate::nccl::NcclError;

pub(super) fn failed(error: &NcclError) -> Error {
    Error::unknown(Code::Unavailable, format!("NCCL: {error}"))
}

/// Returns the same error once more, for the next rank or operation that ends with it.
pub(super) fn again(error: &Error) -> Error {
    Error::new(error.code(), error.execution(), error.message().to_owned()).about(error.subject().to_owned())
}

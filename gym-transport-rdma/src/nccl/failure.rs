//! Errors of NCCL as those of a meeting.

use gym_core::{Code, Error};

use crate::nccl::NcclError;
use crate::nccl::cuda::CudaError;

pub(super) fn failed(error: &NcclError) -> Error {
    Error::unknown(Code::Unavailable, format!("NCCL: {error}"))
}

/// Returns the error of a GPU that cannot be opened.
pub(super) fn no_gpu(number: u32, error: &CudaError) -> Error {
    let why = format!("no GPU {number}: {error}; `rgym doctor` says what is missing");
    Error::not_started(Code::FailedPrecondition, why)
}

/// Returns the same error once more, for the next rank or operation that ends with it.
pub(super) fn again(error: &Error) -> Error {
    Error::new(error.code(), error.execution(), error.message().to_owned()).about(error.subject().to_owned())
}

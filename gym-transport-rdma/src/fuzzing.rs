//! Entry points for fuzzers: readers of peer messages, without UCX. Requires the feature `testing`.

use gym_core::Result;

pub use crate::fabric::protocol::fuzzing::read_prefix;
pub use crate::messaging::fuzzing::{take_requests, take_responses};
use crate::transport::bootstrap::{BootstrapRequest, BootstrapResponse};

/// Reads a bootstrap request and writes it again.
///
/// # Errors
/// The error that a peer would receive: the request is malformed.
pub fn read_bootstrap_request(bytes: &[u8]) -> Result<String> {
    BootstrapRequest::read(bytes).map(|request| request.write())
}

/// Reads a bootstrap response and writes it again.
///
/// # Errors
/// The error that ends the connection attempt: the response is malformed.
pub fn read_bootstrap_response(bytes: &[u8]) -> Result<String> {
    BootstrapResponse::read(bytes).map(|response| response.write())
}

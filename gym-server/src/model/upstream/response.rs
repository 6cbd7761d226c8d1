//! The response of an endpoint.

use std::time::Duration;

use bytes::Bytes;

/// A complete response with any status.
#[derive(Debug)]
pub(in crate::model) struct EndpointResponse {
    pub(in crate::model) status: u16,
    pub(in crate::model) body: Bytes,
    pub(super) retry_after: Option<Duration>,
    /// The target of a redirect that is not followed.
    pub(super) location: Option<String>,
}

impl EndpointResponse {
    /// Creates a response. `retry_after` and `location` are header values.
    pub(super) fn new(status: u16, retry_after: Option<String>, location: Option<String>, body: Bytes) -> Self {
        let retry_after = retry_after.and_then(|seconds| seconds.trim().parse().ok()).map(Duration::from_secs);
        Self { status, body, retry_after, location: location.filter(|_| (300..400).contains(&status)) }
    }
}

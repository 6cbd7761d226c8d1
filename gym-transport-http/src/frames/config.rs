//! Limits and timeouts of framed connections.

use std::time::Duration;

use gym_core::transport::mux::ConnectionLimits;

/// Limits and timeouts of framed connections.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FramesConfig {
    /// How long connecting may take, the greeting included.
    pub connect_timeout: Duration,
    /// Limits of each connection; each end has its own, and both keep to the smaller.
    pub limits: ConnectionLimits,
    /// Bytes of receive buffers kept for the next large segments, per connector or listener. 1.25 GiB: one for a gibibyte,
    /// rounded up as buffers are; touched memory takes a tenth of the time of fresh. Buffers unused for a `silence_max` are freed, all of them when a connection ends.
    pub pool_bytes_max: usize,
}

impl Default for FramesConfig {
    fn default() -> Self {
        Self { connect_timeout: Duration::from_secs(10), limits: ConnectionLimits::default(), pool_bytes_max: 5 << 28 }
    }
}

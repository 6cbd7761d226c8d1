//! The bounds of one framed connection, each with its why.

use std::time::Duration;

use gym_core::frame::Limits;

/// Limits and timeouts of a framed connection; each end has its own, and both keep to the smaller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FramesConfig {
    /// How long connecting may take, the greeting included.
    pub connect_timeout: Duration,
    /// Calls under way on one connection; further ones wait for room under their deadline. 16,384: the same as in a process,
    /// so that moving a worker out of it does not change how much it takes.
    pub calls_max: usize,
    /// Bytes of the requests under way on one connection: what the peer may have to hold. 4 GiB: a few batches of the largest
    /// kind. A larger message goes alone.
    pub request_bytes_in_flight_max: usize,
    /// Sum of `reply_bytes_max` over the calls under way on one connection: what this end may have to hold. Each call takes
    /// its part before its request leaves, so that replies never wait for room that requests hold. It bounds promises, not
    /// memory in use: 4 TiB is `calls_max` replies of the default limit; lower both on a machine where they are to bind.
    pub reply_bytes_in_flight_max: usize,
    /// Bytes of one message, head and segments. 4 GiB, the same as in flight.
    pub message_bytes_max: usize,
    /// Bytes of the head of one message. 256 MiB, as over HTTP.
    pub head_bytes_max: usize,
    /// The most binary segments of one message, either way: one per column and rank of a large batch.
    pub segments_max: usize,
    /// A peer from which nothing comes for this long is gone: stopped, hung, or cut off. Each end sends at least a heartbeat
    /// every third of it. 15 s: a machine that swaps is slower than one expects; a crash is seen at once anyway.
    pub silence_max: Duration,
    /// Bytes of receive buffers kept for the next large segments, per connector or listener. 1 GiB: touched memory takes a
    /// tenth of the time of fresh. Buffers unused for a `silence_max` are freed, all of them when a connection ends.
    pub pool_bytes_max: usize,
}

impl FramesConfig {
    pub(super) fn limits(&self) -> Limits {
        Limits {
            head_bytes_max: self.head_bytes_max,
            segments_max: self.segments_max,
            message_bytes_max: self.message_bytes_max,
        }
    }
}

impl Default for FramesConfig {
    fn default() -> Self {
        Self {
            connect_timeout: Duration::from_secs(10),
            calls_max: 16_384,
            request_bytes_in_flight_max: 4 << 30,
            reply_bytes_in_flight_max: 16_384 * gym_core::DEFAULT_REPLY_BYTES_MAX,
            message_bytes_max: 4 << 30,
            head_bytes_max: 256 << 20,
            segments_max: 1 << 16,
            silence_max: Duration::from_secs(15),
            pool_bytes_max: 1 << 30,
        }
    }
}

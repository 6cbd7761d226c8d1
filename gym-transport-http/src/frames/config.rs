//! Limits and timeouts of framed connections.

use std::time::Duration;

use gym_core::transport::mux::ConnectionLimits;

/// Limits and timeouts of framed connections.
///
/// ```
/// use std::time::Duration;
///
/// use gym_core::transport::Connector;
/// use gym_transport_http::FramesConfig;
/// use gym_transport_http::frames::FramesConnector;
///
/// let mut config = FramesConfig::default();
/// config.limits.silence_max = Duration::from_secs(600); // while a debugger stops the peer
/// let connector = FramesConnector::tcp(config);
/// assert_eq!(connector.scheme(), "http+frames");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FramesConfig {
    /// Limit for connecting, including the handshake. Default: 10 s.
    pub connect_timeout: Duration,
    /// Limits of each connection; the smaller value of both ends applies. Default: [`ConnectionLimits::default`].
    pub limits: ConnectionLimits,
    /// Bytes of free receive buffers that a connector or listener keeps for the next large segments. Reused memory takes a tenth
    /// of the time of fresh memory. Buffers that were unused for `silence_max` are freed, and all of them when a connection ends.
    /// Default: 1.25 GiB, one buffer for a gibibyte, rounded up as buffers are.
    pub pool_bytes_max: usize,
}

impl Default for FramesConfig {
    fn default() -> Self {
        Self { connect_timeout: Duration::from_secs(10), limits: ConnectionLimits::default(), pool_bytes_max: 5 << 28 }
    }
}

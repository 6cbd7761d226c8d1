//! Limits and timeouts of both ends, each with its reason.

use std::time::Duration;

use crate::frames::config::FramesConfig;

/// Limits and timeouts of a connector or a listener. `HttpConfig::default()` fits both ends of a NeMo Gym deployment.
///
/// ```
/// use gym_core::transport::Listener;
/// use gym_transport_http::HttpConfig;
/// use gym_transport_http::http1::HttpListener;
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> gym_core::Result<()> {
/// let mut config = HttpConfig::default();
/// config.request_bytes_max = 1 << 30; // for tasks with many images
/// let listener = HttpListener::bind(([127, 0, 0, 1], 0).into(), config)?;
/// println!("listens at {}", listener.endpoints()[0]);
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct HttpConfig {
    /// Maximum number of connections that one channel opens to its peer; further calls wait for one until their deadline.
    /// Default: 1,024. Some systems have a fixed limit of 20,000 file descriptors, and 16,000 calls over 1,024 connections finish
    /// sooner than over 16,000.
    pub connections_max: usize,
    /// Limit for one connection attempt. A peer on the same network answers in milliseconds. Default: 10 s, which covers one or
    /// two lost SYNs.
    pub connect_timeout: Duration,
    /// The `Host` of outgoing requests, if it differs from the endpoint's, because a proxy may select by it. Default: none.
    pub host: Option<String>,
    /// Sends any request once more, over a new connection, if a connection that had carried requests before breaks before the first byte of the
    /// response: balancers end kept connections without notice. Only for peers whose requests have no side effects, because the peer may have
    /// received the first one. Default: `false`: only `GET`, `HEAD` and requests that are [`repeatable`](gym_core::CallContext::repeatable).
    pub repeats_on_new_connection: bool,
    /// Time for which an unused outgoing connection is kept. Default: 15 s, as in NeMo Gym's client. NeMo Gym's servers close an
    /// idle connection after 30 s, so requests are rarely written into a closing connection.
    pub idle_timeout: Duration,

    /// Maximum number of connections that the kernel holds until they are accepted; the kernel caps it at `net.core.somaxconn`.
    /// Default: 4,096. With tokio's 128, a burst of 16,000 connects overflows, and each lost SYN costs a second.
    pub backlog: u32,
    /// Maximum number of accepted connections at the same time; further ones wait in the backlog. Default: `None`, which means the
    /// file-descriptor limit, less an eighth of it (at most 4,096) for files and outgoing connections, and at most 65,536.
    pub accepted_max: Option<usize>,
    /// Maximum number of calls in flight in one listener; further ones wait, because Python clients never retry a status. Default:
    /// 16,384, the largest known burst of NeMo Gym's users, and a bound on memory.
    pub requests_max: usize,
    /// Time for which an accepted connection may be unused. Default: 75 s, longer than the limit of any client (15 s for aiohttp in
    /// NeMo Gym). So the client closes first and never writes into a closing connection.
    pub keep_alive_timeout: Duration,
    /// Limit for the header section of a request, from its first byte on; closes slow and silent connections. Default: 30 s.
    pub head_timeout: Duration,
    /// Time for which the sender of a request body may be silent. Default: 60 s.
    pub body_timeout: Duration,
    /// Maximum size of a request body in bytes; a larger one is rejected with 413. Default: 256 MiB. A rollout of 128k training
    /// tokens takes about 2.5 MB. The rest is for images, and a runaway client cannot fill the memory.
    pub request_bytes_max: usize,
    /// Maximum number of binary segments in one message, in either direction: one per column and rank of a large batch. Default:
    /// 65,536.
    pub segments_max: usize,
    /// Deadline of calls that carry none, such as those of Python clients. Default: 24 hours.
    pub default_deadline: Duration,
    /// Limits and timeouts of connections that are upgraded to frames. Default: [`FramesConfig::default`].
    pub frames: FramesConfig,
}

impl Default for HttpConfig {
    fn default() -> Self {
        Self {
            connections_max: 1_024,
            connect_timeout: Duration::from_secs(10),
            host: None,
            repeats_on_new_connection: false,
            idle_timeout: Duration::from_secs(15),
            backlog: 4_096,
            accepted_max: None,
            requests_max: 16_384,
            keep_alive_timeout: Duration::from_secs(75),
            head_timeout: Duration::from_secs(30),
            body_timeout: Duration::from_secs(60),
            request_bytes_max: 256 << 20,
            segments_max: 1 << 16,
            // Python callers send no deadline and wait permanently. An episode of theirs may take hours; after a day, it counts
            // as lost.
            default_deadline: Duration::from_secs(24 * 3_600),
            frames: FramesConfig::default(),
        }
    }
}

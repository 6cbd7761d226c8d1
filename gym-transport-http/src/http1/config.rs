//! Limits and timeouts of both ends, each with its reason.

use std::time::Duration;

use crate::frames::config::FramesConfig;

/// Limits and timeouts of a connector or a listener. `HttpConfig::default()` fits both ends of a NeMo Gym deployment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpConfig {
    /// Connections that one channel opens to its peer; further calls wait for one under their deadline. 1,024: file-descriptor
    /// limits of 20,000 that cannot be raised exist, and 16,000 calls over 1,024 connections finish sooner than over 16,000.
    pub connections_max: usize,
    /// How long a connect may take. A peer on the same network answers in milliseconds; this covers one lost SYN or two.
    pub connect_timeout: Duration,
    /// The `Host` of outgoing requests, where it is another than the endpoint's: a proxy may choose by it.
    pub host: Option<String>,
    /// How long an unused outgoing connection is kept. 15 s, as NeMo Gym's client has it: half of the 30 s after which its
    /// servers close an idle connection, so that we rarely write into a closing one.
    pub idle_timeout: Duration,

    /// Connects that the kernel holds until they are accepted. 4,096: with tokio's 128 a burst of 16,000 connects overflows,
    /// and each lost SYN costs a second. The kernel caps it at `net.core.somaxconn`.
    pub backlog: u32,
    /// Connections accepted at the same time; further ones wait in the backlog. `None`: the file-descriptor limit less an
    /// eighth of it (at most 4,096) for files and outgoing connections, and at most 65,536.
    pub accepted_max: Option<usize>,
    /// Calls under way in one listener; further ones wait, because Python clients never retry a status. 16,384: the largest
    /// burst that NeMo Gym's users are known to send, and a bound on memory.
    pub requests_max: usize,
    /// How long an accepted connection may be unused. Longer than any client's own limit (aiohttp's in NeMo Gym: 15 s), so
    /// that the client closes first and never writes into a closing connection.
    pub keep_alive_timeout: Duration,
    /// How long the head of a request may take from its first byte on: ends slow and silent clients.
    pub head_timeout: Duration,
    /// How long the sender of a request body may be silent.
    pub body_timeout: Duration,
    /// The largest request body, in bytes; a larger one gets 413. 256 MiB: a rollout of 128k training tokens is about 2.5 MB,
    /// the rest is for images, and a runaway client cannot fill the memory.
    pub request_bytes_max: usize,
    /// The most binary segments of one message, either way: one per column and rank of a large batch.
    pub segments_max: usize,
    /// The deadline of a call whose caller names none, as Python clients do not.
    pub default_deadline: Duration,
    /// What holds for connections that are upgraded to frames.
    pub frames: FramesConfig,
}

impl Default for HttpConfig {
    fn default() -> Self {
        Self {
            connections_max: 1_024,
            connect_timeout: Duration::from_secs(10),
            host: None,
            idle_timeout: Duration::from_secs(15),
            backlog: 4_096,
            accepted_max: None,
            requests_max: 16_384,
            keep_alive_timeout: Duration::from_secs(75),
            head_timeout: Duration::from_secs(30),
            body_timeout: Duration::from_secs(60),
            request_bytes_max: 256 << 20,
            segments_max: 1 << 16,
            // Python callers say none and wait for ever; an episode of theirs may take hours, a day means that it is lost.
            default_deadline: Duration::from_secs(24 * 3_600),
            frames: FramesConfig::default(),
        }
    }
}

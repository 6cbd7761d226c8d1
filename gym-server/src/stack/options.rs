//! The options of a stack.

use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use gym_client::Transports;
use gym_client::launch::LineSink;
use gym_client::transport::http::HttpConfig;
use gym_core::Endpoint;
use gym_core::registry::DEFAULT_MEMBER_TIMEOUT;

use crate::stack::join::JoinOptions;

/// The options of a [`Stack`](crate::stack::Stack).
///
/// ```
/// use gym_server::StackOptions;
///
/// let mut options = StackOptions::default();
/// options.only = vec!["math".to_owned()];
/// ```
#[derive(Clone)]
#[non_exhaustive]
pub struct StackOptions {
    /// Serves only these instances; `head_server` is the head server. Empty by default, which serves all of them.
    pub only: Vec<String>,
    /// Serves only callers of this process: no head server runs and no port is bound. Off by default.
    pub in_process: bool,
    /// The head server to register with if this stack does not serve it. By default `head_server` of the configuration.
    pub head: Option<Endpoint>,
    /// Joins the cluster of `head` with all servers of this stack, instead of serving a head server. None by default.
    pub join: Option<JoinOptions>,
    /// The members that must serve before the head server is ready. 0 by default.
    pub expected_workers: usize,
    /// Time for which a head server that has just started waits for the members of an earlier head server: their servers stay known meanwhile.
    /// [`DEFAULT_MEMBER_TIMEOUT`] by default, after which a silent member is gone.
    pub recovery: Duration,
    /// The interpreter of Python entrypoints. Required by a configuration that has one.
    pub python: Option<PathBuf>,
    /// Directories that contain the directories of Python servers, in search order. Empty by default.
    pub python_roots: Vec<PathBuf>,
    /// Environment variables of Python servers, in addition to those that NeMo Gym sets. Empty by default.
    pub python_env: Vec<(String, OsString)>,
    /// Receives the output lines of Python servers. None by default.
    pub lines: Option<LineSink>,
    /// Time until a Python server must answer. 300 s by default.
    pub start_timeout: Duration,
    /// Time allowed for calls in flight to finish after a stop. 10 s by default.
    pub stop_grace: Duration,
    /// Maximum calls in flight on one in-process channel. 16,384 by default.
    pub in_process_calls_max: usize,
    /// The transports that the servers listen on and call with. By default those of [`Servers`](crate::Servers), with
    /// `in_process_calls_max` and `http` of these options.
    pub transports: Option<Transports>,
    /// Limits of the HTTP servers.
    pub http: HttpConfig,
}

impl Default for StackOptions {
    fn default() -> Self {
        Self {
            only: Vec::new(),
            in_process: false,
            head: None,
            join: None,
            expected_workers: 0,
            recovery: DEFAULT_MEMBER_TIMEOUT,
            python: None,
            python_roots: Vec::new(),
            python_env: Vec::new(),
            lines: None,
            // A Python server imports for seconds, on a busy machine for a minute.
            start_timeout: Duration::from_secs(300),
            stop_grace: Duration::from_secs(10),
            in_process_calls_max: 16_384,
            transports: None,
            http: HttpConfig::default(),
        }
    }
}

impl fmt::Debug for StackOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StackOptions").field("only", &self.only).field("python", &self.python).finish_non_exhaustive()
    }
}

/// The name of the head server in [`StackOptions::only`].
pub const HEAD_NAME: &str = "head_server";

//! The assignment that a worker process receives, and its reply.
//!
//! The controller runs the user's own program again with [`WORKER_ROLE`] as its first argument and the [`WorkerAssignment`] in
//! the variable [`ASSIGNMENT_VARIABLE`]. The process creates the worker, binds its listener, and writes one line to standard
//! output: a mark, the token of the assignment, and a [`HandshakeReply`]. Standard output is used instead of a connection to the
//! controller. The pipe identifies the process, needs no port and no route, and closes when the process exits. All other output
//! of the program passes through to the log. The token distinguishes the line from similar output, and is valid for one reply.

use gym_core::Endpoint;
use gym_core::group::Rank;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::collective::CollectiveOptions;
use crate::provision::local::address::ListenAddress;

/// First argument that makes a process a worker.
pub(crate) const WORKER_ROLE: &str = "--gym-worker";
/// Environment variable that holds the assignment.
pub(crate) const ASSIGNMENT_VARIABLE: &str = "GYM_WORKER";
/// Prefix of the line.
const MARK: &str = "gym-worker ";

/// The task of a worker process.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct WorkerAssignment {
    /// The name under which the program registered the worker type.
    pub(crate) worker: String,
    pub(crate) group: String,
    pub(crate) rank: Rank,
    pub(crate) world_size: u32,
    pub(crate) local_rank: u32,
    pub(crate) node_rank: u32,
    pub(crate) incarnation: u64,
    /// Valid for one reply.
    pub(crate) token: String,
    #[serde(rename = "door")]
    pub(crate) address: ListenAddress,
    #[serde(default)]
    pub(crate) collectives: CollectiveOptions,
    /// Value from which the worker is created, as JSON.
    pub(crate) init: Box<RawValue>,
}

/// Result of the start.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum HandshakeReply {
    /// The worker serves at these endpoints, in order of preference.
    Serves(Vec<Endpoint>),
    /// The worker could not be created; the process exits.
    Failed(String),
}

impl HandshakeReply {
    /// Returns the line for standard output. It begins with a newline, because the worker may have printed an incomplete line.
    pub(crate) fn line(&self, token: &str) -> String {
        let text = serde_json::to_string(self).expect("endpoints and texts can be written as JSON");
        format!("\n{MARK}{token} {text}\n")
    }

    /// Parses a line of standard output; returns `None` if it is not a reply with this token.
    pub(crate) fn read(line: &str, token: &str) -> Option<Self> {
        let rest = line.strip_prefix(MARK)?.strip_prefix(token)?.strip_prefix(' ')?;
        serde_json::from_str(rest).ok()
    }
}

/// Returns a new token. It protects against mistakes, such as similar output or a grandchild that repeats its parent's line. It
/// does not protect against attackers: a process that can write to the pipes of our children can do worse.
pub(crate) fn token() -> String {
    format!("{:032x}", fastrand::u128(..))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_comes_back_from_its_line_under_its_token_only() {
        let token = token();
        let serves = HandshakeReply::Serves(vec![Endpoint::parse("http://127.0.0.1:7011").expect("an endpoint")]);
        for answer in [serves, HandshakeReply::Failed("no weights at /models:\n\"x\"".to_owned())] {
            let text = answer.line(&token);
            let line = text.trim_matches('\n');
            assert!(!line.contains('\n'), "one line: {line}");
            assert_eq!(HandshakeReply::read(line, &token).as_ref(), Some(&answer));
            assert_eq!(HandshakeReply::read(line, &super::token()), None, "another token");
        }
    }

    #[test]
    fn rubbish_is_no_answer() {
        for line in ["", "gym-worker", "gym-worker t", "gym-worker t {", "gym-worker t []", "ready", "gym-worker  t {}"]
        {
            assert_eq!(HandshakeReply::read(line, "t"), None, "{line:?}");
        }
    }
}

//! What a worker process is told, and what it answers.
//!
//! The controller runs the user's own program again with [`WORKER_ROLE`] as its first argument and the [`WorkerAssignment`] in the
//! variable [`ASSIGNMENT_VARIABLE`]. The worker is made, its listener bound, and then one line goes to standard output: a
//! mark, the token of the assignment, and an [`HandshakeReply`]. Standard output rather than a connection back, because the pipe
//! already says which process speaks, needs no port of the controller's and no route to it, and closes when the process
//! ends. Whatever else the program prints passes through to the log; the token tells the line from a print that looks alike, and
//! counts once.

use gym_core::Endpoint;
use gym_core::group::Rank;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::group::provision::local::address::ListenAddress;

/// First argument that makes a process a worker.
pub(crate) const WORKER_ROLE: &str = "--gym-worker";
/// Environment variable that holds the assignment.
pub(crate) const ASSIGNMENT_VARIABLE: &str = "GYM_WORKER";
/// How the one line begins.
const MARK: &str = "gym-worker ";

/// What a process is to become.
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
    /// Counts for one answer.
    pub(crate) token: String,
    #[serde(rename = "door")]
    pub(crate) address: ListenAddress,
    /// What the worker is made from, as JSON.
    pub(crate) init: Box<RawValue>,
}

/// How the start went.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum HandshakeReply {
    /// It serves here, best first.
    Serves(Vec<Endpoint>),
    /// It could not be made; it ends now.
    Failed(String),
}

impl HandshakeReply {
    /// The line for standard output. It begins with a line end, since the worker may have printed half a line.
    pub(crate) fn line(&self, token: &str) -> String {
        let text = serde_json::to_string(self).expect("endpoints and texts can be written as JSON");
        format!("\n{MARK}{token} {text}\n")
    }

    /// The answer in a line of standard output, if it is one under this token.
    pub(crate) fn read(line: &str, token: &str) -> Option<Self> {
        let rest = line.strip_prefix(MARK)?.strip_prefix(token)?.strip_prefix(' ')?;
        serde_json::from_str(rest).ok()
    }
}

/// A fresh token. It guards against mistakes (a print that looks alike, a grandchild that repeats its parent), not against
/// an enemy: whoever can write to our children's pipes can do worse.
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

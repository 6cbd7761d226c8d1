//! References to values, and the messages between a process that fetches one and the process that holds it.
//!
//! | route | request → response | |
//! |---|---|---|
//! | `POST /values/read` | [`ReadBody`] → [`ReadReply`] and one segment | a part of a value; without bytes, only its lease |
//! | `GET /values/ID` | → the bytes, as `application/octet-stream` | a value of up to 256 MiB, for programs without this SDK |

use std::time::Duration;

use gym_core::{Code, Endpoint, Error, Result};
use serde::{Deserialize, Serialize};

pub(super) use crate::transport::body::{read, write};

pub(super) const READ_ROUTE: &str = "/values/read";
pub(super) const WHOLE_ROUTE: &str = "/values/";
/// The longest lease, a day: a copy whose holder was lost stays no longer.
pub(super) const LEASE_MAX: Duration = Duration::from_secs(86_400);

/// A reference to a value: its name, its size, and where it is held.
///
/// A reference is small and serializes to a JSON object, so a row, the arguments of a group call and the settings of a worker can contain
/// it. [`Values::fetch`](super::Values::fetch) returns the value.
///
/// ```json
/// {"value": "corpus", "id": "6f0c…", "bytes": 40015891, "endpoints": ["http://10.0.0.1:4100"]}
/// ```
///
/// A program without this SDK requests `GET /values/ID` at an endpoint that begins with `http://`, for values of up to 256 MiB.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ValueRef {
    /// The name under which it was put. Several values can have one name.
    #[serde(rename = "value")]
    pub name: String,
    /// The identity of the value: 32 hexadecimal digits. Whoever knows them can fetch the value.
    pub id: String,
    /// The number of bytes.
    pub bytes: u64,
    /// The endpoints of the process that holds the value, in order of preference.
    pub endpoints: Vec<Endpoint>,
}

impl ValueRef {
    /// Checks a reference that may come from anywhere: its id becomes the name of a file.
    pub(super) fn check(&self) -> Result<()> {
        if is_id(&self.id) && !self.endpoints.is_empty() {
            return Ok(());
        }
        let message =
            "it is not a reference that `put` returned: its id has 32 hexadecimal digits, and it has an endpoint";
        Err(Error::invalid(message).about(self.subject()))
    }

    pub(super) fn subject(&self) -> String {
        format!("value `{}`", self.name)
    }
}

/// Compares the size that a reference says, which may come from anywhere, with that of the value.
pub(super) fn check_size(name: &str, said: u64, bytes: u64) -> Result<()> {
    if said == bytes {
        return Ok(());
    }
    let message = format!("its reference says {said} bytes, and it has {bytes}");
    Err(Error::finished(Code::InvalidArgument, message).about(format!("value `{name}`")))
}

/// Returns `true` for 32 hexadecimal digits.
pub(super) fn is_id(text: &str) -> bool {
    text.len() == 32 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct ReadBody {
    pub(super) id: String,
    /// For errors of a holder that never had the value.
    pub(super) name: String,
    /// The size of the value by its reference.
    pub(super) size: u64,
    pub(super) offset: u64,
    pub(super) bytes: u64,
    /// Whether the request is for somebody who needs the value: it then extends the lease.
    pub(super) used: bool,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct ReadReply {
    /// The time for which the value can be used without another request.
    pub(super) lease_ms: u64,
}

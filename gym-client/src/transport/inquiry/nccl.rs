//! Where the ranks of NCCL would meet: the interface that NCCL chooses.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use gym_transport_rdma::nccl::{LoadOptions, Nccl};
use serde::{Deserialize, Serialize};

/// First argument that makes a process load NCCL and ask it for a unique id.
pub(super) const ROLE: &str = "--gym-nccl-meeting";

/// The report of NCCL when it makes a unique id, which needs no GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NcclMeeting {
    /// The version that the library tells, such as `2.27.3`.
    pub version: String,
    /// Where rank 0 would wait for the others: an address of the interface that NCCL has chosen. `None` if the unique id tells none.
    pub address: Option<SocketAddr>,
}

/// Loads the NCCL at this path in a child process, and asks it for a unique id: NCCL then chooses an interface by `NCCL_SOCKET_IFNAME` and its other settings,
/// which it reads once in a process. [`enter`](crate::launch::enter) must have been called in this program.
///
/// # Errors
/// The reason why the library cannot be loaded or makes no unique id, with NCCL's own warning; it crashed, or took longer than `within`.
pub async fn nccl_meeting(library: &Path, within: Duration) -> Result<NcclMeeting, String> {
    let mut command = super::child(ROLE)?;
    command.arg(library);
    // Its reason is only in its log.
    if std::env::var_os("NCCL_DEBUG").is_none() {
        command.env("NCCL_DEBUG", "WARN");
    }
    command.env_remove("NCCL_DEBUG_FILE");
    let output = super::run(command, "asks NCCL for a unique id", within).await?;
    super::read(&output, "asks NCCL for a unique id").map_err(|error| {
        let text = String::from_utf8_lossy(&output.stdout);
        let warned = text.lines().find_map(|line| line.split_once("NCCL WARN ").map(|(_, warning)| warning));
        warned.map_or_else(|| error.clone(), |warning| format!("{error}: {warning}"))
    })
}

pub(super) fn meeting(library: &str) -> Result<NcclMeeting, String> {
    let nccl = Nccl::load(&LoadOptions::at(library)).map_err(|error| error.to_string())?;
    let version = nccl.version().map_err(|error| error.to_string())?;
    let id = nccl.unique_id().map_err(|error| error.to_string())?;
    Ok(NcclMeeting { version: version.to_string(), address: id.address() })
}

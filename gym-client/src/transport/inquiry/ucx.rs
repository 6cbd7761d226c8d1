//! UCX's report on itself.

use std::time::Duration;

use gym_transport_rdma::UCX_VARIABLES;
use gym_transport_rdma::fabric::LoadOptions;
use gym_transport_rdma::transport::UcxReport;

/// First argument that makes a process load UCX and print the report.
pub(super) const ROLE: &str = "--gym-ucx-report";

/// Returns UCX's report on itself. A child process loads UCX, because loading it changes a process permanently. [`enter`] must have
/// been called in this program.
///
/// [`enter`]: crate::launch::enter
///
/// # Errors
/// The reason why UCX cannot be used. It was not found (with all searched paths and how to install it), it crashed, or it took
/// longer than `within`.
pub async fn ucx_report(within: Duration) -> Result<UcxReport, String> {
    let mut command = super::child(ROLE)?;
    command.envs(missing_variables());
    super::ask(command, "loads UCX", within).await
}

/// Returns the variables that UCX needs and that the environment does not have.
pub(super) fn missing_variables() -> impl Iterator<Item = (&'static str, &'static str)> {
    UCX_VARIABLES.into_iter().filter(|(name, _)| std::env::var_os(name).is_none())
}

pub(super) fn report() -> Result<UcxReport, String> {
    UcxReport::take(&LoadOptions::default()).map_err(|error| error.to_string())
}

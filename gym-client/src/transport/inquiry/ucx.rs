//! UCX's report on itself.

use std::time::Duration;

use gym_transport_rdma::UCX_VARIABLES;
use gym_transport_rdma::transport::{LoadOptions, UcxReport};

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
    let output = super::run(command, "loads UCX", within).await?;
    let mut report: UcxReport = super::read(&output, "loads UCX")?;
    let [text, errors] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    report.warnings = text.lines().chain(errors.lines()).filter_map(warning).collect();
    Ok(report)
}

/// Returns the text of a line with a warning of UCX: `[1.2] [host:1:0] ucp_context.c:1014 UCX  WARN  transport …`.
fn warning(line: &str) -> Option<String> {
    let (before, text) = line.split_once(" WARN ")?;
    // UCX 1.22 says in a line of its own how to silence the one before.
    let text = Some(text.trim()).filter(|text| !text.starts_with('('))?;
    before.trim_end().ends_with("UCX").then(|| text.to_owned())
}

/// Returns the variables that UCX needs and that the environment does not have.
pub(super) fn missing_variables() -> impl Iterator<Item = (&'static str, &'static str)> {
    UCX_VARIABLES.into_iter().filter(|(name, _)| std::env::var_os(name).is_none())
}

pub(super) fn report() -> Result<UcxReport, String> {
    UcxReport::take(&LoadOptions::default()).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_warning_of_ucx_is_told_without_its_place() {
        let line = "[17.4] [vm:1:0]  parser.c:1908 UCX  WARN  unused env variable: UCX_FOO";
        assert_eq!(warning(line).as_deref(), Some("unused env variable: UCX_FOO"));
        let hint =
            "[17.4] [vm:1:0]  parser.c:2332 UCX  WARN  (set UCX_WARN_UNUSED_ENV_VARS=n to suppress this warning)";
        assert_eq!(warning(hint), None);
        assert_eq!(warning("host:1:1 [0] bootstrap.cc:1 NCCL WARN Bootstrap : no socket interface found"), None);
    }
}

//! Conformance suites: one for each trait, run by every implementation. A case that fails panics with its name.

#[cfg(feature = "groups")]
mod collective;
mod files;
mod ledger;
mod members;
mod transport;

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::time::Duration;

use futures_util::FutureExt;

#[cfg(feature = "groups")]
pub use collective::{CollectiveFixture, Ranks, collectives};
pub use files::files;
pub use ledger::{LedgerFixture, ledger};
pub use members::{MemberFixture, members};
pub use transport::{TransportPair, TransportSetup, ordered_transport, transport};

/// The deadline of one case. Only a case that hangs reaches it.
const CASE_TIMEOUT: Duration = Duration::from_secs(90);

/// Runs a case of a suite.
///
/// # Panics
/// If the case panics, or does not end within 90 s; the message names the suite and the case.
pub async fn run_case(suite: &str, name: &str, case: impl Future<Output = ()>) {
    tracing::debug!(suite, name, "conformance case");
    match tokio::time::timeout(CASE_TIMEOUT, AssertUnwindSafe(case).catch_unwind()).await {
        Ok(Ok(())) => {}
        Ok(Err(panic)) => {
            let text = panic
                .downcast_ref::<String>()
                .map(String::as_str)
                .or_else(|| panic.downcast_ref::<&'static str>().copied())
                .unwrap_or("not a text");
            panic!("{suite} conformance, case `{name}`: {text}");
        }
        Err(_) => panic!("{suite} conformance, case `{name}`: hung for {CASE_TIMEOUT:?}"),
    }
}

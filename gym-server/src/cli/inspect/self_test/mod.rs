//! The self-test of `rgym doctor`: two processes of this machine call each other over each transport that it supports, and two ranks sum an array.
//!
//! A transport that is there may still fail or crawl, and a report of devices does not show it.

#[cfg(feature = "groups")]
mod ranks;

use std::time::Duration;

use gym_client::Transports;
use gym_client::launch::{SelfTest, self_test};
use gym_core::transport::{Transport, TransportReport};
use serde::Serialize;

use crate::cli::console;
use crate::cli::inspect::finding::Finding;

#[cfg(feature = "groups")]
pub(in crate::cli) use ranks::workers;

/// Limit for one test: two processes start, connect, and call for less than a second.
const TEST_TIMEOUT: Duration = Duration::from_secs(20);
const TOPIC: &str = "self_test";

/// The measurements over one way between two processes.
#[derive(Debug, Serialize)]
pub(super) struct Tested {
    /// A transport, or `all_reduce`.
    over: String,
    /// Null if the test has failed.
    #[serde(flatten)]
    measured: Option<SelfTest>,
    /// Why the test has failed.
    error: Option<String>,
}

impl Tested {
    fn new(over: impl Into<String>, measured: Result<SelfTest, String>) -> Self {
        let over = over.into();
        match measured {
            Ok(measured) => Self { over, measured: Some(measured), error: None },
            Err(error) => Self { over, measured: None, error: Some(error) },
        }
    }

    /// Returns the finding about a test that has failed.
    pub(super) fn finding(&self) -> Option<Finding> {
        let error = self.error.as_ref()?;
        let found = format!("two processes of this machine cannot use {}: {error}", self.over);
        let fix = match self.over.as_str() {
            "http" => "look at the firewall's rules for the interface lo".to_owned(),
            "all_reduce" => {
                "look at /dev/shm and the limit on descriptors; if the program's main calls launch::enter() or Workers::enter() before \
                 cli::main, remove that call"
                    .to_owned()
            }
            over => format!("look at the findings on ucx; until then, leave {over} out of `transport`"),
        };
        Some(Finding::warning(TOPIC, found, fix))
    }
}

/// Tests one way after the other, so that none takes the processor of another.
pub(super) async fn run(reports: &[TransportReport]) -> Vec<Tested> {
    let mut tested = Vec::new();
    // The processes have the transports of the SDK, and `mem` connects within one process.
    let known = Transports::standard().known();
    let usable = reports.iter().filter(|report| report.usable).map(|report| report.transport);
    for transport in usable.filter(|transport| *transport != Transport::MEM && known.contains(transport)) {
        tested.push(Tested::new(transport.as_str(), self_test(transport, TEST_TIMEOUT).await));
    }
    #[cfg(feature = "groups")]
    tested.push(Tested::new("all_reduce", ranks::all_reduce(TEST_TIMEOUT).await));
    tested
}

/// Returns the table of what was measured.
pub(super) fn table(tested: &[Tested]) -> String {
    let rows = tested.iter().map(|tested| match &tested.measured {
        Some(SelfTest { round_trip_us, gb_per_s, lanes }) => {
            [tested.over.clone(), format!("{round_trip_us:.0} µs"), format!("{gb_per_s:.1}"), lanes.clone()]
        }
        None => [tested.over.clone(), "failed".to_owned(), String::new(), String::new()],
    });
    let mut text = console::table(["between two processes here", "64 bytes", "GB/s of 16 MiB", "lanes"], rows);
    if cfg!(debug_assertions) {
        text.push_str("\nThis program was built without optimization: a release build has other figures.");
    }
    text
}

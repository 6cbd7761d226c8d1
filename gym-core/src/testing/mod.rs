//! Shared code of tests and benchmarks: conformance suites of the traits, measurements of a transport, calls that are dropped at arbitrary
//! points, tables of bad input, a simulated disk and a simulated network.

pub mod bad_input;
pub mod conformance;
pub mod figures;
mod files;
#[cfg(feature = "groups")]
mod group;
pub mod net;
mod storm;

pub use files::{FileCounts, FileFault, SimFiles};
pub use net::{Faults, SimHost, SimNet};
pub use storm::{Storm, with_segment};

//! What tests of this and other crates share: conformance suites of the seams, a simulated disk and a simulated network.

pub mod conformance;
mod files;
pub mod net;

pub use files::{FileCounts, FileFault, SimFiles};
pub use net::{Faults, SimHost, SimNet};

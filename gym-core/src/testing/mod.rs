//! What tests and benchmarks of this and other crates share: conformance suites of the seams, figures of a transport, a storm
//! of dropped calls, tables of bad input, a simulated disk and a simulated network.

pub mod bad_input;
pub mod conformance;
pub mod figures;
mod files;
pub mod net;
mod storm;

pub use files::{FileCounts, FileFault, SimFiles};
pub use net::{Faults, SimHost, SimNet};
pub use storm::{Storm, with_segment};

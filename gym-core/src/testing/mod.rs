//! What tests of this and other crates share: conformance suites of the seams, and a simulated disk.

pub mod conformance;
mod files;

pub use files::{FileCounts, FileFault, SimFiles};

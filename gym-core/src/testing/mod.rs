//! Tools for tests and benchmarks (feature `testing`).
//!
//! | item | purpose |
//! |---|---|
//! | [`conformance`] | the suites that every transport, ledger, file system and backend of collectives passes |
//! | [`net`], [`SimNet`], [`SimHost`], [`Faults`] | a simulated network with faults |
//! | [`SimFiles`] | a simulated disk with faults and crashes |
//! | [`figures`] | measurements of a transport |
//! | [`bad_input`] | tables of bad inputs and the errors that they cause |
//! | [`Storm`] | calls that are dropped at arbitrary points |
//! | [`free_port`] | ports that are known before anybody listens there |

pub mod bad_input;
pub mod conformance;
pub mod figures;
mod files;
pub mod net;
mod ports;
mod storm;

pub use files::{FileCounts, FileEnd, FileFault, SimFiles};
pub use net::{Faults, SimHost, SimNet};
pub use ports::free_port;
pub use storm::{Storm, with_segment};

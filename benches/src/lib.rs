//! Shared parts of the benchmarks: a mock model endpoint, a cheap load generator, child processes and their costs, and the Python
//! peer for comparison.
//!
//! ```text
//!   bench ── load (raw sockets, one thread) ──► server under test, its own process ──► mock endpoint, its own process
//!     └── the same load ──► NeMo Gym's servers (`--peer PYTHON`) ──► the same mock
//! ```
//!
//! Every server runs in its own process, which is this program started again ([`role::main`]). Its CPU time can therefore be read
//! separately from the load's.
#![forbid(unsafe_code)]

pub mod bodies;
pub mod count;
pub mod load;
pub mod measure;
pub mod mock;
pub mod options;
pub mod peer;
pub mod raw;
pub mod ray;
pub mod report;
pub mod role;
pub mod stack;
pub mod worker;

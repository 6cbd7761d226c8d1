//! What the benchmarks share: a mock model endpoint, a cheap load generator, child processes and their costs, and the Python
//! peer beside which figures are taken.
//!
//! ```text
//!   bench ── load (raw sockets, one thread) ──► server under test, its own process ──► mock endpoint, its own process
//!     └── the same load ──► NeMo Gym's servers (`--peer PYTHON`) ──► the same mock
//! ```
//!
//! Every server runs in a process of its own, which is this program started again ([`role::main`]), so that its CPU time
//! can be read apart from the load's.
#![forbid(unsafe_code)]

pub mod bodies;
pub mod count;
pub mod load;
pub mod measure;
pub mod mock;
pub mod options;
pub mod peer;
pub mod ray;
pub mod report;
pub mod role;
pub mod stack;
pub mod worker;

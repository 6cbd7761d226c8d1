//! What UCX, RDMA and NCCL this machine has, said in a sentence, and what to do about what it has not.
//!
//! ```text
//!   /sys/class/infiniband  /dev/infiniband  /proc/self/{limits,status}  library folders
//!               └────────────────┴────────────┬─────────────┴──────────────┘
//!                                          probe() ──▶ Probe: sentence, findings, fixes
//! ```
//!
//! ```
//! let probe = gym_transport_rdma::probe();
//! println!("{}", probe.summary);
//! for finding in probe.findings.iter().filter(|finding| finding.fix.is_some()) {
//!     println!("{finding}");
//! }
//! ```
//!
//! This crate moves no data yet: it carries no transport, and says so by having none.
//!
//! # What probing does to the process
//!
//! Only NVIDIA's two libraries are loaded, for their version functions, and never unloaded. **UCX is not loaded**: its
//! constructors replace the handlers of SIGSEGV, SIGBUS, SIGILL and SIGFPE (so Rust's message about a stack overflow is
//! lost) and patch libc's `mmap` in memory, and the variables that prevent it have to be in the environment before, where
//! a library must not put them. Restoring the handlers afterwards would not undo the patches. So UCX's version is read
//! from its file. libibverbs has no version function, and says its version in its file name.
#![deny(unsafe_code)]

mod elf;
mod files;
mod probe;
mod sys;

pub use probe::{Finding, Probe, ProbeOptions, Status, Topic, probe};

//! Fuzzes the code that parses data from peers. It may reject arbitrary bytes, but must not panic. It must not allocate more than
//! the received bytes or its limits justify.
//!
//! ```text
//!   bytes ──► Target::check ── prepare ── read ── allocated ≤ allowed?
//!     ▲                                     │
//!     ├── .ci/fuzz: libFuzzer, guided by coverage
//!     └── tests/corpus.rs: what it found worth keeping, on every test run
//! ```
//!
//! The program's allocator counts every allocated byte, not only the bytes held at a time. A check therefore needs a process with a
//! single thread.
#![forbid(unsafe_code)]

use std::alloc::System;

use bytes::Bytes;
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

mod targets;

pub use targets::TARGETS;

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// A parser of bytes from peers.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// The name on the command line, and of the corpus.
    pub name: &'static str,
    read: fn(&Bytes),
    /// Returns the total bytes that it may allocate for an input of this length.
    allowed: fn(usize) -> usize,
}

impl Target {
    /// Parses an input, and checks the result.
    ///
    /// # Panics
    /// If the parser panics, if serializing the result does not reproduce the input, or if it allocated more than allowed.
    pub fn check(&self, input: &[u8]) {
        let bytes = Bytes::copy_from_slice(input);
        let region = Region::new(ALLOCATOR);
        (self.read)(&bytes);
        let allocated = region.change().bytes_allocated;
        let allowed = (self.allowed)(input.len());
        assert!(
            allocated <= allowed,
            "{}: {allocated} bytes allocated for an input of {}, {allowed} are allowed",
            self.name,
            input.len()
        );
    }
}

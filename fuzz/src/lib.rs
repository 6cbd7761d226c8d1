//! What the SDK reads from peers, against arbitrary bytes: it may refuse them, it may not panic, and it may not allocate more
//! than what came, or than its limits say.
//!
//! ```text
//!   bytes ──► Target::check ── prepare ── read ── allocated ≤ allowed?
//!     ▲                                     │
//!     ├── .ci/fuzz: libFuzzer, guided by coverage
//!     └── tests/corpus.rs: what it found worth keeping, on every test run
//! ```
//!
//! Allocations are counted by the program's allocator, every byte of them and not only what is held at a time. So a check is for
//! one thread.
#![forbid(unsafe_code)]

use std::alloc::System;

use bytes::Bytes;
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

mod targets;

pub use targets::TARGETS;

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// A reader of foreign bytes.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Its name on the command line, and of its corpus.
    pub name: &'static str,
    read: fn(&Bytes),
    /// Bytes that it may allocate for an input of so many, in all.
    allowed: fn(usize) -> usize,
}

impl Target {
    /// Reads an input.
    ///
    /// # Panics
    /// When the reader does, when what was read is not what was written, or when it allocated more than allowed.
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

//! Benchmarks of the gym SDK, each beside its peer or its physical limit
#![forbid(unsafe_code)]

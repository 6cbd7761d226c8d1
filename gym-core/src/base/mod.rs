//! The base of all other modules: errors, cancellation, time, files and randomness.

pub(crate) mod cancel;
pub(crate) mod descriptors;
pub(crate) mod error;
pub(crate) mod hex;
pub(crate) mod progress;
pub(crate) mod world;

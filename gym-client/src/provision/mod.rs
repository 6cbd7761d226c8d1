//! Where workers run: ports held for them, the environment of a rank, and the processes themselves.

pub mod ports;
mod usage;

pub use usage::Usage;

//! The current state of a process: its work in flight, the wait of each call, and the handlers that block a thread.

mod in_flight;
pub mod stall;
pub mod waits;

pub use in_flight::{InFlight, WorkKey};

//! What a process does now, for the people who look: its work in flight, what each call waits for, and handlers that block a thread.

mod in_flight;
pub mod stall;
pub mod waits;

pub use in_flight::{InFlight, WorkKey};

//! The registry of live server instances by name, and the choice among several instances.

mod lease;
mod pick;

pub use lease::{DEFAULT_TTL, Instance, Lease, MemoryRegistry, Registration, Registry, RegistryState};
pub use pick::{Balance, Load, Picker};

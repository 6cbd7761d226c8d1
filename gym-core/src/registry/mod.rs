//! The registry of live servers by name, and the choice among several replicas.
//!
//! ```text
//!   server ── register, renew ──► Registry ◄── resolve, watch ── client ── Picker ──► one replica
//!               (Lease)          a lease that is not renewed expires
//! ```

mod lease;
mod pick;

pub use lease::{DEFAULT_TTL, Instance, Lease, MemoryRegistry, Registration, Registry};
pub use pick::{Affinity, AffinityCounts, AffinityKey, AffinityOptions, Balance, Load, Picker};

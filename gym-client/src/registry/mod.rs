//! The registries that a client looks names up in, and the tasks that keep a server or a member registered.

mod address;
mod fixed;
mod lease;
mod machine;
mod member;
pub(crate) mod nearest;
mod remote;
mod roster;

pub use address::{MemberAddress, address_towards, is_loopback, is_unspecified, own_address};
pub use fixed::StaticRegistry;
pub use lease::LeaseKeeper;
pub use machine::{LocalProgram, WaitsListener, local_programs};
pub use member::{HealthCheck, MemberKeeper, MemberOptions};
pub use remote::{DrainRequest, RemoteRegistry, RosterRequest, SharedConfiguration, WatchRequest};
pub(crate) use roster::{RosterNews, follow_roster};

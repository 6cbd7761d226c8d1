//! The registries that a client looks names up in, and the task that renews a server's lease.

mod fixed;
mod lease;
mod remote;

pub use fixed::StaticRegistry;
pub use lease::LeaseKeeper;
pub use remote::{RemoteRegistry, WatchRequest};

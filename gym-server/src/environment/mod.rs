//! Environment servers: what a collector calls to run an episode.

mod deduplication;
mod pool;
mod relay;

pub use pool::{POOL_IMPLEMENTATION, PoolConfig, PoolServer, VerifierPoolConfig};
pub use relay::{Relay, RelayConfig};

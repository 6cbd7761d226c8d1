//! Environment servers: what a collector calls to run an episode.

mod deduplication;
mod relay;

pub use relay::{Relay, RelayConfig};

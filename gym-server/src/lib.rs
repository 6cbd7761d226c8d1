//! The answering side of the gym SDK: head server, role servers, the rgym command line.
#![forbid(unsafe_code)]

pub mod agent;
mod aggregate;
#[cfg(feature = "cli")]
pub mod cli;
pub mod head;
pub mod metrics;
pub mod model;
mod once;
mod params;
mod relay;
mod reply;
mod role;

#[cfg(feature = "http")]
pub mod stack;
#[cfg(test)]
mod testing;

pub use agent::{SimpleAgent, SimpleAgentConfig};
pub use gym_client::serve;
pub use head::{HEAD_PORT, HeadServer};
pub use metrics::Metrics;
pub use model::{ScriptedItem, ScriptedModel, ScriptedModelConfig};
pub use relay::{Relay, RelayConfig};
pub use reply::{Detail, unprocessable};
pub use role::{Agent, Environment, Model, Resources, Site};
#[cfg(feature = "http")]
pub use stack::{Build, Servers, Stack, StackOptions};

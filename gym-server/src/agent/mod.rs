//! Agents: `simple_agent`, `gymnasium_agent`, and the episode type for agents of your own.

mod config;
mod episode;
mod gymnasium;
mod observation;
mod prefix;
mod reports;
mod simple;
mod tool_arguments;
mod turn;

pub use config::{GymnasiumAgentConfig, OutputLimits, SimpleAgentConfig};
pub use episode::Episode;
pub use gymnasium::GymnasiumAgent;
pub use simple::SimpleAgent;

#[cfg(test)]
mod tests;

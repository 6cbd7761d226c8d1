//! Agents: `simple_agent`, `gymnasium_agent`, and the episode that an agent of your own is written with.

mod config;
mod episode;
mod gymnasium;
mod simple;
mod tool_arguments;
mod turn;

pub use config::{GymnasiumAgentConfig, SimpleAgentConfig};
pub use episode::Episode;
pub use gymnasium::GymnasiumAgent;
pub use simple::SimpleAgent;

#[cfg(test)]
mod tests;

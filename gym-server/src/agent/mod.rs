//! Agent servers, and what an agent of your own is written with.

mod config;
mod episode;
mod simple;
mod tool_arguments;
mod turn;

pub use config::SimpleAgentConfig;
pub use episode::Episode;
pub use simple::SimpleAgent;

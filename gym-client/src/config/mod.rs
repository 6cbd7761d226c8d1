//! NeMo Gym's YAML as typed configuration.
//!
//! ```text
//! files (config_paths, lowest first) < env.yaml < initial < command line      files, yaml, overrides, merge
//!   -> _inherit_from, _copy, _delete_key                                      directives
//!   -> standalone agent, renamed agents, relays for agents without a server   compose
//!   -> servers, references, ports, hosts, defaults                            check, load
//!   -> ${…} resolved                                                          interpolate
//! GymConfig: typed (settings_as), YAML for Python servers (to_global_yaml), JSON to look at (masked)
//! ```
//!
//! The rules are those of NeMo Gym 0.7.0, which are those of OmegaConf and Hydra: the same files give the same mapping,
//! and what they refuse is refused here, with file, line, key and fix. Where a mistake would pass there in silence (a
//! misspelt server kind), it is refused or listed in [`GymConfig::warnings`].

#[cfg(feature = "groups")]
mod blocks;
mod check;
mod compose;
mod directives;
mod emit;
mod files;
mod grammar;
mod interpolate;
mod lax;
mod load;
mod merge;
mod node;
mod overrides;
mod problem;
mod slip;
mod transport;
mod typed;
mod yaml;

#[cfg(feature = "groups")]
pub(crate) use blocks::Blocks;
pub use gym_core::ServerKind;
pub use load::ConfigLoader;
pub use overrides::Overrides;
pub(crate) use problem::nearest as nearest_name;
pub use problem::{ConfigError, Mistake, Origin, Problem};
pub use typed::{
    DatasetConfig, GymConfig, HeadConfig, InstanceConfig, LiveServer, PortRange, PortWish, Relay, ServerReference,
    free_port,
};

/// A YAML text as OmegaConf reads it, as JSON; `source` is its name for errors.
pub(crate) fn parse_yaml(text: &str, source: &str) -> Result<serde_json::Value, ConfigError> {
    yaml::parse(text, source).map(|node| node.to_json()).map_err(ConfigError::from)
}

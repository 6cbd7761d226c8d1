//! NeMo Gym's YAML as typed configuration.
//!
//! ```text
//! files (config_paths, lowest first) < env.yaml < initial < command line      yaml, compose, resolve
//!   -> _inherit_from, _copy, _delete_key                                      compose
//!   -> standalone agent, renamed agents, relays for agents without a server   compose
//!   -> servers, references, ports, hosts, defaults                            check, loader
//!   -> ${…} resolved                                                          resolve
//! GymConfig: typed (settings_as), YAML for Python servers (to_global_yaml), JSON to look at (masked)    schema
//! ```
//!
//! The rules are those of NeMo Gym 0.7.0, which follow OmegaConf and Hydra: the same files give the same mapping.
//! Mistakes that they reject are rejected here with file, line, key and fix. Mistakes that they ignore, such as a
//! misspelled server kind, are rejected or listed in [`GymConfig::warnings`].

mod check;
mod compose;
mod loader;
pub(crate) mod problem;
pub mod reference;
mod resolve;
mod schema;
pub(crate) mod yaml;

pub use gym_core::server::ServerKind;
pub use loader::ConfigLoader;
pub use problem::nearest as nearest_name;
pub use problem::{ConfigError, Mistake, Origin, Problem};
pub use resolve::overrides::Overrides;
pub use schema::{
    DatasetConfig, GeneratedRelay, GymConfig, HeadConfig, InstanceConfig, LiveServer, MissingServer, PortRange,
    PortRequest, RayCluster, ServerReference, free_port,
};

/// Parses YAML as OmegaConf does and returns it as JSON; `source` is its name in error messages.
pub(crate) fn parse_yaml(text: &str, source: &str) -> Result<serde_json::Value, ConfigError> {
    yaml::parser::parse(text, source).map(|node| node.to_json()).map_err(ConfigError::from)
}

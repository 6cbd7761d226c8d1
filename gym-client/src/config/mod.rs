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

mod address;
mod blocks;
mod check;
mod compose;
mod loader;
pub(crate) mod params;
pub(crate) mod problem;
pub mod reference;
mod resolve;
mod schema;
mod strict;
pub(crate) mod yaml;

pub use blocks::BlockFile;
pub use gym_core::server::ServerKind;
pub use loader::ConfigLoader;
pub(crate) use problem::LET_READ;
pub use problem::nearest as nearest_name;
pub use problem::{ConfigError, Mistake, Origin, Problem};
pub use resolve::overrides::Overrides;
pub use schema::{
    DatasetConfig, GeneratedRelay, GymConfig, HeadConfig, InstanceConfig, LiveServer, MissingServer, PortRange,
    PortRequest, RayCluster, ServerReference, free_port,
};
pub use yaml::writer::{MASK, is_secret_key, mask as mask_secrets};

/// The text of a value that depends on the environment of another process.
pub(crate) const UNTOLD: &str = "\u{fffd}untold";

/// Parses the merged configuration of another process, and resolves its interpolations. A text that depends on that process's environment
/// contains [`UNTOLD`], and so does a value that cannot be resolved.
pub(crate) fn parse_resolved(text: &str, source: &str) -> Result<serde_json::Value, ConfigError> {
    let root = yaml::parser::parse(text, source).map_err(ConfigError::from)?;
    let untold = |_: &str| Some(UNTOLD.to_owned());
    let (resolved, failures) = resolve::interpolation::Resolver::new(&root, &untold).all();
    let mut resolved = resolved.to_json();
    for failure in failures {
        let value = failure.path.iter().try_fold(&mut resolved, |at, step| match at {
            serde_json::Value::Array(items) => items.get_mut(step.parse::<usize>().ok()?),
            other => other.get_mut(step),
        });
        if let Some(value) = value {
            *value = UNTOLD.into();
        }
    }
    Ok(resolved)
}

/// Parses YAML as OmegaConf does and returns it as JSON; `source` is its name in error messages.
pub(crate) fn parse_yaml(text: &str, source: &str) -> Result<serde_json::Value, ConfigError> {
    yaml::parser::parse(text, source).map(|node| node.to_json()).map_err(ConfigError::from)
}

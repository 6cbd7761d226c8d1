//! How a worker group is run, with the key names of NeMo RL's documentation.

use serde::de::{self, Deserializer};
use serde::{Deserialize, Serialize};

use super::memory::parse_memory;
use crate::error::{Code, Error, Result};

/// What a worker group may be given. Read from a configuration by these names; a key that is none of them is an error that lists
/// them.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[non_exhaustive]
pub struct WorkerGroupConfig {
    /// The most memory of one worker with all that it starts, in bytes; written as `8GB` or a number.
    #[serde(deserialize_with = "memory")]
    pub memory_limit: Option<u64>,
    /// Whether a worker that ended is started again by itself.
    pub restart_on_failure: bool,
    /// Restarts of each worker in the life of the group; not given: three.
    pub max_restarts: Option<u32>,
    /// Whether gradients are compressed on the wire.
    pub enable_gradient_compression: bool,
    /// Whether a call returns when it is handed over rather than answered.
    pub async_communication: bool,
    /// Whether calls that may choose their worker are balanced.
    pub enable_load_balancing: bool,
    /// How; balances by itself, without `enable_load_balancing`.
    pub load_balancing_strategy: Option<LoadBalancing>,
}

/// How a worker is chosen for a call that may choose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LoadBalancing {
    /// One after the other.
    RoundRobin,
    /// The one with the fewest calls under way.
    #[default]
    #[serde(alias = "least_outstanding")]
    LeastPending,
    /// In proportion to their weights.
    Weighted,
    /// The less busy of two drawn at random.
    PowerOfTwoChoices,
}

impl WorkerGroupConfig {
    /// How calls that may choose are balanced; `None`: they are not.
    #[must_use]
    pub fn balancing(&self) -> Option<LoadBalancing> {
        self.load_balancing_strategy.or_else(|| self.enable_load_balancing.then(LoadBalancing::default))
    }

    /// Checks what can be told without a worker.
    ///
    /// # Errors
    /// `Unimplemented` for gradient compression, which needs collectives.
    pub fn validate(&self) -> Result<()> {
        if self.enable_gradient_compression {
            let text = "enable_gradient_compression needs collectives, which are not there yet; leave it out";
            return Err(Error::not_started(Code::Unimplemented, text).about("worker group"));
        }
        Ok(())
    }
}

fn memory<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Written {
        Bytes(u64),
        Text(String),
    }
    let text = match Option::<Written>::deserialize(deserializer)? {
        None => return Ok(None),
        Some(Written::Bytes(bytes)) => bytes.to_string(),
        Some(Written::Text(text)) => text,
    };
    parse_memory(&text).map(Some).map_err(|error| de::Error::custom(error.message()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_documented_configuration_parses_and_compression_is_typed_as_not_there() {
        let config: WorkerGroupConfig = serde_json::from_str(
            r#"{"memory_limit": "8GB", "restart_on_failure": true, "max_restarts": 3, "enable_gradient_compression": true,
                "async_communication": true}"#,
        )
        .unwrap();
        assert_eq!((config.memory_limit, config.max_restarts), (Some(8_000_000_000), Some(3)));
        assert_eq!(config.validate().unwrap_err().code(), Code::Unimplemented);
        assert!(WorkerGroupConfig { enable_gradient_compression: false, ..config }.validate().is_ok());
    }

    #[test]
    fn unknown_keys_and_amounts_are_refused_with_what_there_is() {
        let error = |text: &str| serde_json::from_str::<WorkerGroupConfig>(text).unwrap_err().to_string();
        assert!(error(r#"{"max_restart": 3}"#).contains("max_restarts"));
        assert!(error(r#"{"memory_limit": "8 bananas"}"#).contains("KiB"));
        assert!(error(r#"{"memory_limit": 0}"#).contains("out of range"));
        assert!(error(r#"{"load_balancing_strategy": "random"}"#).contains("power_of_two_choices"));
    }

    #[test]
    fn a_strategy_balances_by_itself_and_balancing_alone_takes_the_least_busy() {
        let balancing = |text: &str| serde_json::from_str::<WorkerGroupConfig>(text).unwrap().balancing();
        assert_eq!(balancing("{}"), None);
        assert_eq!(balancing(r#"{"enable_load_balancing": true}"#), Some(LoadBalancing::LeastPending));
        assert_eq!(balancing(r#"{"load_balancing_strategy": "round_robin"}"#), Some(LoadBalancing::RoundRobin));
        assert_eq!(balancing(r#"{"load_balancing_strategy": "least_outstanding"}"#), Some(LoadBalancing::LeastPending));
    }
}

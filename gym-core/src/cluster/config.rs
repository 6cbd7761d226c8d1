//! How a worker group is run, with the key names of NeMo RL's documentation.

use serde::Deserialize;
use serde::de::{self, Deserializer};

use super::memory::parse_memory;
use crate::error::{Code, Error, Result};
use crate::ladder::{Ladder, Level};
use crate::pick::Balance;

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
    /// Whether a call returns when it is handed over rather than answered. Read, so that documented configurations are, and of no
    /// effect: in Rust each call says so itself, by [`GroupCall::start`](crate::GroupCall::start) instead of `await`.
    pub async_communication: bool,
    /// Whether calls that may choose their worker are balanced.
    pub enable_load_balancing: bool,
    /// How; balances by itself, without `enable_load_balancing`.
    pub load_balancing_strategy: Option<Balance>,
    /// How the workers are reached: `auto`, a rung of the ladder, or a list of them. Not given: without UCX.
    pub transport: Option<Ladder>,
    /// The least rung that will do; a group that cannot be reached so does not start.
    pub require_transport: Option<Level>,
}

impl WorkerGroupConfig {
    /// How calls that may choose are balanced; `None`: they are not.
    #[must_use]
    pub fn balancing(&self) -> Option<Balance> {
        self.load_balancing_strategy.clone().or_else(|| self.enable_load_balancing.then(Balance::default))
    }

    /// How the workers are reached; `None` when the configuration does not say.
    ///
    /// # Errors
    /// `InvalidArgument` when the required rung is better than all that are named.
    pub fn ladder(&self) -> Result<Option<Ladder>> {
        Ladder::configured(self.transport.clone(), self.require_transport)
    }

    /// Checks what can be told without a worker.
    ///
    /// # Errors
    /// `Unimplemented` for gradient compression, which needs collectives; what [`WorkerGroupConfig::ladder`] refuses.
    pub fn validate(&self) -> Result<()> {
        self.ladder().map_err(|error| error.about("worker group"))?;
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
    fn the_transport_is_named_and_what_cannot_be_met_is_refused() {
        let read = |text: &str| serde_json::from_str::<WorkerGroupConfig>(text).unwrap();
        assert_eq!(read("{}").ladder().unwrap(), None);
        let config = read(r#"{"transport": ["shm", "http"], "require_transport": "shm"}"#);
        assert!(!config.ladder().unwrap().unwrap().allows(Level::Http));
        let error = read(r#"{"transport": "http", "require_transport": "rdma"}"#).validate().unwrap_err();
        assert!(error.to_string().contains("add rdma"), "{error}");
    }

    #[test]
    fn a_strategy_balances_by_itself_and_balancing_alone_takes_the_least_busy() {
        let balancing = |text: &str| serde_json::from_str::<WorkerGroupConfig>(text).unwrap().balancing();
        assert_eq!(balancing("{}"), None);
        assert_eq!(balancing(r#"{"enable_load_balancing": true}"#), Some(Balance::LeastPending));
        assert_eq!(balancing(r#"{"load_balancing_strategy": "round_robin"}"#), Some(Balance::RoundRobin));
        assert_eq!(balancing(r#"{"load_balancing_strategy": "least_outstanding"}"#), Some(Balance::LeastPending));
    }
}

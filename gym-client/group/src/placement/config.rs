//! Configuration of a worker group, with the key names of NeMo RL's documentation.

use gym_core::registry::Balance;
use gym_core::transport::{Transport, TransportPolicy};
use gym_core::{Error, Result};
use serde::Deserialize;
use serde::de::{self, Deserializer};

/// Configuration of a worker group. The fields are the keys; an unknown key is an error that lists the known ones. All are
/// optional: a key that is left out changes nothing of what the program chose.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
#[non_exhaustive]
pub struct WorkerGroupConfig {
    /// Maximum memory of one worker with all processes that it started, in bytes; written as `8GB` or a number. Pages that they share count once. The default is no limit.
    #[serde(deserialize_with = "memory")]
    #[cfg_attr(feature = "schemars", schemars(with = "Option<WrittenMemory>"))]
    pub memory_limit: Option<u64>,
    /// Restarts a worker automatically after it ends. The default is the program's choice, otherwise `false`.
    pub restart_on_failure: Option<bool>,
    /// Maximum restarts of each worker over the lifetime of the group. The default is the program's choice, otherwise 3.
    pub max_restarts: Option<u32>,
    /// Lets `peers.gradients(cx, axis)` send sums of 32-bit floats as bf16: half the bytes, with an error of at most 2⁻⁷ of the sum of the magnitudes. The default is `false`.
    pub enable_gradient_compression: bool,
    /// Starts calls when they are submitted, instead of when they are awaited, so that the program can work meanwhile, as
    /// `GroupCall::submit` does. The default is the program's choice, otherwise `false`.
    pub async_communication: Option<bool>,
    /// Balances calls that can run on any worker. The default is `false`.
    pub enable_load_balancing: bool,
    /// The balancing strategy; `least_outstanding` is another name of `least_pending`, and `affinity` is rejected, because calls of a group
    /// have no session. If it is given, calls are balanced even without `enable_load_balancing`.
    pub load_balancing_strategy: Option<Balance>,
    /// The allowed transports to the workers: `auto`, one transport, or a list. The default excludes UCX.
    #[cfg_attr(feature = "schemars", schemars(with = "Option<gym_core::transport::WrittenTransports>"))]
    pub transport: Option<TransportPolicy>,
    /// The minimum transport: a group that cannot be reached over it, or a preferred one, does not start. The default is no
    /// minimum.
    pub require_transport: Option<String>,
}

impl WorkerGroupConfig {
    /// Returns the strategy that balances calls which can run on any worker; `None` if they are not balanced.
    #[must_use]
    pub fn balancing(&self) -> Option<Balance> {
        self.load_balancing_strategy.clone().or_else(|| self.enable_load_balancing.then(Balance::default))
    }

    /// Checks the values that are no group's.
    ///
    /// # Errors
    /// `InvalidArgument`, with the key first and the fix last.
    pub(crate) fn validate(&self) -> Result<()> {
        match self.load_balancing_strategy {
            Some(Balance::Affinity) => Err(Error::invalid(
                "load_balancing_strategy `affinity` balances the replicas of a model, and calls of a worker group have no session; use \
                 least_pending, power_of_two_choices or round_robin",
            )),
            _ => Ok(()),
        }
    }

    /// Checks the names of transports, as [`WorkerGroupConfig::validate`] does the other values.
    pub(crate) fn check_transports(&self, known: &[Transport]) -> Result<()> {
        let at = |key: &str, error: Error| match error.message().starts_with(key) {
            true => error,
            false => Error::invalid(format!("{key} {}", error.message())),
        };
        if let Some(transport) = &self.transport {
            transport.check(known).map_err(|error| at("transport", error))?;
        }
        let policy = self.transport_policy().map_or(Ok(()), |policy| policy.check(known));
        policy.map_err(|error| at("require_transport", error))
    }

    /// Returns the transport policy of the group; `None` if the configuration sets none. The group checks the names when it starts.
    #[must_use]
    pub fn transport_policy(&self) -> Option<TransportPolicy> {
        TransportPolicy::configured(self.transport.clone(), self.require_transport.clone())
    }
}

/// The forms of a number of bytes in a configuration.
#[derive(Deserialize)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
#[serde(untagged)]
enum WrittenMemory {
    /// A number of bytes.
    Bytes(u64),
    /// A number with a unit: `8GB`.
    Text(String),
}

fn memory<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    let text = match Option::<WrittenMemory>::deserialize(deserializer)? {
        None => return Ok(None),
        Some(WrittenMemory::Bytes(bytes)) => bytes.to_string(),
        Some(WrittenMemory::Text(text)) => text,
    };
    parse_memory(&text).map(Some).map_err(|error| de::Error::custom(error.message()))
}

/// Parses a number of bytes: `8GB`, `8 GiB`, `1.5gb` or a plain number. KB, MB, GB, TB are powers of 1000, KiB … TiB of 1024;
/// case is ignored.
///
/// # Errors
/// `InvalidArgument` for an unknown unit, and for an amount that is not positive or beyond 2⁶³ bytes.
pub fn parse_memory(text: &str) -> Result<u64> {
    let refuse = |why: &str| {
        Err(Error::invalid(format!(
            "memory size '{text}' {why}; write a number of bytes, or one with KB, MB, GB, TB, KiB, MiB, GiB or TiB"
        )))
    };
    let text = text.trim();
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = (&text[..split], text[split..].trim().to_ascii_lowercase());
    let unit: u64 = match unit.as_str() {
        "" | "b" => 1,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        "kib" => 1 << 10,
        "mib" => 1 << 20,
        "gib" => 1 << 30,
        "tib" => 1 << 40,
        _ => return refuse("has an unknown unit"),
    };
    let Ok(number) = number.parse::<f64>() else { return refuse("has no number") };
    let bytes = number * unit as f64;
    if !(1.0..9.2e18).contains(&bytes) {
        return refuse("is out of range");
    }
    Ok(bytes as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_documented_configuration_parses() {
        let config: WorkerGroupConfig = serde_json::from_str(
            r#"{"memory_limit": "8GB", "restart_on_failure": true, "max_restarts": 3, "enable_gradient_compression": true,
                "async_communication": true}"#,
        )
        .unwrap();
        assert_eq!((config.memory_limit, config.max_restarts), (Some(8_000_000_000), Some(3)));
        assert_eq!((config.enable_gradient_compression, config.async_communication), (true, Some(true)));
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
        const KNOWN: [Transport; 3] =
            [Transport::new("shm", 100), Transport::new("rdma", 200), Transport::new("http", 400)];
        let read = |text: &str| serde_json::from_str::<WorkerGroupConfig>(text).unwrap();
        assert_eq!(read("{}").transport_policy(), None);
        let config = read(r#"{"transport": ["shm", "http"], "require_transport": "shm"}"#);
        assert!(!config.transport_policy().unwrap().resolved(&KNOWN).allows(KNOWN[2]));
        let policy = read(r#"{"transport": "http", "require_transport": "rdma"}"#).transport_policy().unwrap();
        let error = policy.check(&KNOWN).unwrap_err();
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

    #[test]
    fn decimal_and_binary_units_are_told_apart() {
        for (text, bytes) in [
            ("8GB", 8_000_000_000),
            ("8GiB", 8 << 30),
            ("8 gib", 8 << 30),
            ("1.5kb", 1_500),
            (" 512 ", 512),
            ("2TiB", 2 << 40),
        ] {
            assert_eq!(parse_memory(text).unwrap(), bytes, "{text}");
        }
    }

    #[test]
    fn what_is_no_amount_is_refused_with_the_units_there_are() {
        for text in ["", "GB", "8 XB", "0GB", "-1GB", "1e3", "1.2.3GB", "99999999TB"] {
            let error = parse_memory(text).unwrap_err();
            assert!(error.to_string().contains("KiB"), "{text}: {error}");
        }
    }
}

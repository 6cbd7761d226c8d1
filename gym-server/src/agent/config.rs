//! The keys that the stock agents read from their blocks of the configuration.

use std::collections::BTreeMap;
use std::fmt;
use std::num::{NonZeroU32, NonZeroUsize};

use gym_core::server::ToolErrors;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use crate::role::settings::{Seconds, ServerRef};

/// The keys of a `simple_agent` block.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct SimpleAgentConfig {
    /// The resources server: holds the state and the tools of the episode, and scores it. Required by `/run`.
    #[serde(default)]
    pub resources_server: Option<ServerRef>,
    /// The model server.
    pub model_server: ServerRef,
    /// Maximum model calls per episode; the episode then ends, and is scored. If absent or 0, the loop ends when the model calls no more tools, and
    /// an episode with 1,000 turns fails as `agent_run_error`, without a score.
    #[serde(default)]
    pub max_steps: Option<u32>,
    /// Maximum seconds per episode, in addition to the caller's deadline.
    #[serde(default)]
    pub max_seconds: Option<Seconds>,
    /// Skips `/verify` and gives every episode `skip_verification_reward`. Off by default.
    #[serde(default)]
    pub skip_verification: bool,
    /// The reward of an unverified episode. 0 by default.
    #[serde(default)]
    pub skip_verification_reward: f64,
    /// Handling of the errors of tools that the model did not cause: `auto` (default), `fail` or `to_model`.
    #[serde(default)]
    #[cfg_attr(feature = "schemars", schemars(extend("default" = "auto")))]
    pub tool_errors: ToolErrors,
    /// Maximum bytes of a tool's output that the model sees. Unlimited if absent.
    #[serde(default)]
    pub tool_output_bytes_max: Option<OutputLimits>,
}

impl SimpleAgentConfig {
    /// Creates the default configuration between a model and a resources server.
    #[must_use]
    pub fn new(model_server: impl Into<String>, resources_server: impl Into<String>) -> Self {
        Self {
            resources_server: Some(ServerRef::new(resources_server)),
            model_server: ServerRef::new(model_server),
            max_steps: None,
            max_seconds: None,
            skip_verification: false,
            skip_verification_reward: 0.0,
            tool_errors: ToolErrors::Auto,
            tool_output_bytes_max: None,
        }
    }
}

/// The keys of a `gymnasium_agent` block.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct GymnasiumAgentConfig {
    /// The resources server: plays the other side of the conversation, and scores it.
    pub resources_server: ServerRef,
    /// The model server.
    pub model_server: ServerRef,
    /// Maximum model calls per episode, at least 1. 10 by default.
    #[serde(default = "default_max_steps")]
    pub max_steps: NonZeroU32,
    /// Maximum bytes of each of the environment's `tool_outputs` that the model sees. Unlimited if absent.
    #[serde(default)]
    pub tool_output_bytes_max: Option<OutputLimits>,
}

fn default_max_steps() -> NonZeroU32 {
    const { NonZeroU32::new(10).expect("10 is not 0") }
}

impl GymnasiumAgentConfig {
    /// Creates the default configuration between a model and a resources server.
    #[must_use]
    pub fn new(model_server: impl Into<String>, resources_server: impl Into<String>) -> Self {
        Self {
            resources_server: ServerRef::new(resources_server),
            model_server: ServerRef::new(model_server),
            max_steps: default_max_steps(),
            tool_output_bytes_max: None,
        }
    }
}

/// Maximum bytes of the output of a tool: one number for all tools, or a number for each tool by name, with `_default` for all others.
///
/// A longer output is cut at the start of a character, followed by the line `[output cut: the first 1000 of 5000 bytes]`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema), schemars(from = "WrittenLimits"))]
pub struct OutputLimits {
    default: Option<NonZeroUsize>,
    tools: BTreeMap<String, NonZeroUsize>,
}

/// The forms of a limit in a configuration.
#[cfg(feature = "schemars")]
#[derive(schemars::JsonSchema)]
#[schemars(untagged)]
#[allow(dead_code, reason = "only its schema is read")]
enum WrittenLimits {
    /// The number of bytes of all tools.
    All(NonZeroUsize),
    /// A number of bytes for each tool by name, with `_default` for all others.
    Tools(BTreeMap<String, NonZeroUsize>),
}

impl OutputLimits {
    /// Creates the limit of all tools.
    #[must_use]
    pub fn all(bytes_max: NonZeroUsize) -> Self {
        Self { default: Some(bytes_max), tools: BTreeMap::new() }
    }

    /// Returns the limit of a tool, if it has one.
    #[must_use]
    pub fn of(&self, tool: &str) -> Option<usize> {
        self.tools.get(tool).copied().or(self.default).map(NonZeroUsize::get)
    }
}

impl<'de> Deserialize<'de> for OutputLimits {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(OutputLimitsVisitor)
    }
}

struct OutputLimitsVisitor;

impl<'de> Visitor<'de> for OutputLimitsVisitor {
    type Value = OutputLimits;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a number of bytes of at least 1, or such a number for each tool with `_default` for all others")
    }

    fn visit_u64<E: serde::de::Error>(self, bytes: u64) -> Result<OutputLimits, E> {
        let limit = usize::try_from(bytes).ok().and_then(NonZeroUsize::new);
        limit.map(OutputLimits::all).ok_or_else(|| E::invalid_value(serde::de::Unexpected::Unsigned(bytes), &self))
    }

    fn visit_i64<E: serde::de::Error>(self, bytes: i64) -> Result<OutputLimits, E> {
        match u64::try_from(bytes) {
            Ok(bytes) => self.visit_u64(bytes),
            Err(_) => Err(E::invalid_value(serde::de::Unexpected::Signed(bytes), &self)),
        }
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<OutputLimits, A::Error> {
        let mut limits = OutputLimits::default();
        while let Some((tool, limit)) = entries.next_entry::<String, NonZeroUsize>()? {
            match tool.as_str() {
                "_default" => limits.default = Some(limit),
                _ => drop(limits.tools.insert(tool, limit)),
            }
        }
        Ok(limits)
    }
}

#[cfg(test)]
mod tests {
    use gym_client::config::{ConfigLoader, Overrides};

    use super::*;

    #[test]
    fn the_limit_of_outputs_is_a_number_or_a_number_for_each_tool() {
        let folder = tempfile::tempdir().unwrap();
        let limit_of = |value: &str, tool: &str| {
            let yaml = format!(
                "m: {{responses_api_models: {{scripted_model: {{entrypoint: app.py}}}}}}\na:\n  responses_api_agents:\n    \
                 simple_agent:\n      entrypoint: app.py\n      model_server: {{type: responses_api_models, name: m}}\n      \
                 tool_errors: fail\n      tool_output_bytes_max: {value}\n"
            );
            std::fs::write(folder.path().join("a.yaml"), yaml).unwrap();
            let config = ConfigLoader::new(folder.path()).load(&["a.yaml"], &Overrides::default()).unwrap();
            let settings: SimpleAgentConfig = config.require("a").unwrap().settings_as().unwrap();
            assert_eq!(settings.tool_errors, ToolErrors::Fail);
            settings.tool_output_bytes_max.and_then(|limits| limits.of(tool))
        };
        assert_eq!(limit_of("null", "search"), None);
        assert_eq!(limit_of("4000", "search"), Some(4_000));
        assert_eq!(limit_of("{search: 100}", "search"), Some(100));
        assert_eq!(limit_of("{search: 100}", "read"), None);
        assert_eq!(limit_of("{search: 100, _default: 7}", "read"), Some(7));
    }
}

//! The four server kinds that NeMo Gym's YAML knows: the key below an instance's name.

use std::fmt;
use std::str::FromStr;

/// What an instance is: the one key below its name in the YAML.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
pub enum ServerKind {
    /// A model behind the Responses API: `responses_api_models`.
    #[serde(rename = "responses_api_models")]
    Model,
    /// An environment's tools, seeds and verifier: `resources_servers`.
    #[serde(rename = "resources_servers")]
    Resources,
    /// An agent loop: `responses_api_agents`.
    #[serde(rename = "responses_api_agents")]
    Agent,
    /// What rollout collection calls to run a task: `environment_servers`.
    #[serde(rename = "environment_servers")]
    Environment,
}

impl ServerKind {
    /// All four, in the order in which NeMo Gym tries them.
    pub const ALL: [Self; 4] = [Self::Model, Self::Resources, Self::Agent, Self::Environment];

    /// The YAML key.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Model => "responses_api_models",
            Self::Resources => "resources_servers",
            Self::Agent => "responses_api_agents",
            Self::Environment => "environment_servers",
        }
    }

    /// The kind of a YAML key.
    #[must_use]
    pub fn from_key(key: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.as_str() == key)
    }
}

impl fmt::Display for ServerKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for ServerKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::from_key(text)
            .ok_or_else(|| format!("{text} is no server kind; use one of {}", Self::ALL.map(Self::as_str).join(", ")))
    }
}

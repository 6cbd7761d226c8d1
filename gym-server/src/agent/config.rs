//! What `simple_agent` reads of its block in the configuration.

use std::time::Duration;

use serde::{Deserialize, Deserializer};

/// Names another server of the configuration: `{type: resources_servers, name: my_env}`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct ServerRef {
    /// The instance's name.
    pub name: String,
}

impl ServerRef {
    /// The server of that name.
    #[must_use]
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into() }
    }
}

/// The keys of a `simple_agent` block; other keys of the block are not this agent's.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct SimpleAgentConfig {
    /// Who holds the episode's state and tools, and scores it. `/run` needs it.
    #[serde(default)]
    pub resources_server: Option<ServerRef>,
    /// Who answers.
    pub model_server: ServerRef,
    /// Model calls per episode; without it (or 0) the loop ends when the model stops asking for tools.
    #[serde(default)]
    pub max_steps: Option<u32>,
    /// Time for one episode, in seconds; the caller's deadline holds as well.
    #[serde(default)]
    pub max_seconds: Option<Seconds>,
    /// Score nothing: give every episode [`SimpleAgentConfig::skip_verification_reward`].
    #[serde(default)]
    pub skip_verification: bool,
    /// The reward of an unverified episode.
    #[serde(default)]
    pub skip_verification_reward: f64,
}

impl SimpleAgentConfig {
    /// The defaults, between a model and an environment.
    #[must_use]
    pub fn new(model_server: impl Into<String>, resources_server: impl Into<String>) -> Self {
        Self {
            resources_server: Some(ServerRef::new(resources_server)),
            model_server: ServerRef::new(model_server),
            max_steps: None,
            max_seconds: None,
            skip_verification: false,
            skip_verification_reward: 0.0,
        }
    }
}

/// A positive time, written as a number of seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seconds(pub Duration);

impl<'de> Deserialize<'de> for Seconds {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let seconds = f64::deserialize(deserializer)?;
        match Duration::try_from_secs_f64(seconds) {
            Ok(duration) if !duration.is_zero() => Ok(Self(duration)),
            _ => Err(serde::de::Error::custom(format!("{seconds} is not a positive number of seconds"))),
        }
    }
}

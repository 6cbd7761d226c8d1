//! The keys that the stock agents read from their blocks of the configuration.

use std::num::NonZeroU32;

use serde::Deserialize;

use crate::role::settings::{Seconds, ServerRef};

/// The keys of a `simple_agent` block.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct SimpleAgentConfig {
    /// The resources server: holds the state and the tools of the episode, and scores it. Required by `/run`.
    #[serde(default)]
    pub resources_server: Option<ServerRef>,
    /// The model server.
    pub model_server: ServerRef,
    /// Maximum model calls per episode. Unlimited if absent or 0: the loop then ends when the model calls no more tools.
    #[serde(default)]
    pub max_steps: Option<u32>,
    /// Maximum seconds per episode, in addition to the caller's deadline.
    #[serde(default)]
    pub max_seconds: Option<Seconds>,
    /// Skips `/verify` and gives every episode [`SimpleAgentConfig::skip_verification_reward`]. Off by default.
    #[serde(default)]
    pub skip_verification: bool,
    /// The reward of an unverified episode. 0 by default.
    #[serde(default)]
    pub skip_verification_reward: f64,
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
        }
    }
}

/// The keys of a `gymnasium_agent` block.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct GymnasiumAgentConfig {
    /// The resources server: plays the other side of the conversation, and scores it.
    pub resources_server: ServerRef,
    /// The model server.
    pub model_server: ServerRef,
    /// Maximum model calls per episode, at least 1. 10 by default.
    #[serde(default = "default_max_steps")]
    pub max_steps: NonZeroU32,
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
        }
    }
}

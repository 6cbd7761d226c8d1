//! Model servers: proxies of OpenAI-compatible endpoints, and a scripted model that needs no endpoint.

mod extra;
mod limits;
#[cfg(test)]
mod mock;
mod openai;
mod overflow;
mod scripted;
mod secret;
mod upstream;
mod vllm;

/// The random numbers of a [`ScriptedPolicy`].
pub use fastrand::Rng;
pub use openai::{OpenAiModel, OpenAiModelConfig};
pub use scripted::{Latency, ScriptedItem, ScriptedModel, ScriptedModelConfig, ScriptedPolicy};
pub use secret::Secret;
pub use vllm::{OneOrMany, ReasoningField, VllmModel, VllmModelConfig};

//! Model servers: fronts of OpenAI-compatible engines, and one that needs none.

#[cfg(feature = "http")]
mod direct;
#[cfg(test)]
mod mock;
mod openai;
mod place;
mod scripted;
mod secret;
#[cfg(feature = "tls")]
mod secured;
mod upstream;
pub(crate) use upstream::Refused;
mod vllm;

pub use openai::{OpenAiModel, OpenAiModelConfig};
pub use scripted::{Latency, Policy, ScriptedItem, ScriptedModel, ScriptedModelConfig};
pub use secret::Secret;
pub use vllm::{OneOrMany, ReasoningField, VllmModel, VllmModelConfig};

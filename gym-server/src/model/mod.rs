//! Model servers: fronts of OpenAI-compatible engines, and one that needs none.

mod scripted;

pub use scripted::{Latency, Policy, ScriptedItem, ScriptedModel, ScriptedModelConfig};

//! Ledgers record the outcomes of rollouts: in JSONL files, in memory, or as a stream.

pub(crate) mod jsonl;
mod memory;
mod states;
pub(crate) mod stream;
#[cfg(test)]
mod tests;

use serde_json::Value;

pub(in crate::collect) use jsonl::lock_output;
pub use jsonl::{JsonlLedger, OpenMode, RecoveryReport, failures_path, index_path};
pub use memory::MemoryLedger;
pub(in crate::collect) use stream::StreamLedger;

/// Returns the truth value that Python gives a JSON value.
pub(in crate::collect) fn truth(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Bool(value) => *value,
        Value::Number(number) => number.as_f64() != Some(0.0),
        Value::String(text) => !text.is_empty(),
        Value::Array(items) => !items.is_empty(),
        Value::Object(fields) => !fields.is_empty(),
    }
}

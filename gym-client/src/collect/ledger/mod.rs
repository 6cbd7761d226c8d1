//! Where outcomes are recorded: in the JSONL files that the user wants, in memory, or handed on as they come.

pub(crate) mod jsonl;
mod memory;
mod states;
pub(crate) mod stream;
#[cfg(test)]
mod tests;

use serde_json::Value;

pub use jsonl::{JsonlLedger, OpenMode, RecoveryReport, failures_path, index_path};
pub use memory::MemoryLedger;
pub(in crate::collect) use stream::StreamLedger;

/// What Python takes for true.
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

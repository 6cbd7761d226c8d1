//! Ports of five of NeMo Gym's example environments, for comparison and migration.
//!
//! Each port behaves as the Python server of the same name: rewards, added fields, tool outputs and error bodies are equal as text.
//! `tests/nemo_ports.rs` compares four of them with recorded responses, and `tests/python/suite.py` compares all of them with the
//! originals.

mod multi_step;
mod multi_turn;
mod session_state_mgmt;
mod single_tool_call;
mod tool_call_multireward;

pub use multi_step::MultiStep;
pub use multi_turn::MultiTurn;
pub use session_state_mgmt::SessionState;
pub use single_tool_call::SingleToolCall;
pub use tool_call_multireward::ToolCallMultiReward;

use serde_json::Value;

/// Returns `true` if the original's response has this key of the row. The originals read the task's keys and do not return them.
fn declared(key: &str) -> bool {
    matches!(key, "responses_create_params" | "response")
}

/// Compares values as Python's `==` does: `1`, `1.0` and `True` are equal.
fn python_equal(left: &Value, right: &Value) -> bool {
    fn number(value: &Value) -> Option<f64> {
        value.as_bool().map(f64::from).or_else(|| value.as_f64())
    }
    match (left, right) {
        (Value::Array(left), Value::Array(right)) => {
            left.len() == right.len() && left.iter().zip(right).all(|(left, right)| python_equal(left, right))
        }
        (Value::Object(left), Value::Object(right)) => {
            left.len() == right.len()
                && left.iter().all(|(key, left)| right.get(key).is_some_and(|right| python_equal(left, right)))
        }
        // Integers beyond 2^53 are compared as integers, even if their nearest floats are equal.
        _ => match (left.as_i64(), right.as_i64(), number(left), number(right)) {
            (Some(left), Some(right), ..) => left == right,
            (_, _, Some(left), Some(right)) => left == right,
            _ => left == right,
        },
    }
}

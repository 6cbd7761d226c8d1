//! Deserializes values and reports mismatches with their line and key.
//!
//! The deserializer keeps the path itself. With `serde_path_to_error` around it, the compiler would build the deserialization of
//! every type twice.

mod value;

use crate::config::problem::{Mistake, Origin, Problem, suggest};
use crate::config::yaml::node::Node;
use serde_json::Value;
use value::{KeyTrace, Misfit, Spelling, TypedValue};

pub(crate) use value::UnknownKey;

/// A value that does not have the expected type, and its location.
pub(crate) struct TypeMismatch {
    path: Vec<String>,
    origin: Option<Origin>,
    message: String,
}

/// Deserializes `value`, which belongs to `node`.
pub(crate) fn read<T: serde::de::DeserializeOwned>(node: &Node, value: Value) -> Result<T, TypeMismatch> {
    T::deserialize(TypedValue::new(value, Spelling::Strict, &KeyTrace::default()))
        .map_err(|misfit| mismatch(node, misfit))
}

/// Deserializes `value` as leniently as NeMo Gym's servers do: where a number or boolean is expected, a string that spells one is
/// accepted. Configurations depend on this, because `${oc.env:NAME,false}` is always a string. Also returns the keys that the type
/// does not have, as far as they were found.
pub(crate) fn read_leniently<T: serde::de::DeserializeOwned>(
    node: &Node,
    value: Value,
) -> (Result<T, TypeMismatch>, Vec<UnknownKey>) {
    let trace = KeyTrace::default();
    let read = T::deserialize(TypedValue::new(value, Spelling::Lenient, &trace));
    (read.map_err(|misfit| mismatch(node, misfit)), trace.into_unknown())
}

fn mismatch(node: &Node, misfit: Misfit) -> TypeMismatch {
    let (path, message) = misfit.into_parts();
    let mut near = path.as_slice();
    while node.at(near).is_none() && !near.is_empty() {
        near = &near[..near.len() - 1];
    }
    let origin = node.at(near).map(|node| node.origin.clone());
    TypeMismatch { path, origin, message }
}

impl TypeMismatch {
    /// Returns the name of the missing field of the outermost type, if that is the mismatch.
    pub(crate) fn missing_field(&self) -> Option<&str> {
        let missing = self.message.strip_prefix("missing field `")?;
        self.path.is_empty().then(|| missing.trim_end_matches('`'))
    }

    /// Converts the mismatch to a problem whose key starts with `before`; `correct` is the fix for a wrong value.
    pub(crate) fn at(self, otherwise: &Origin, before: &[&str], correct: &str) -> Problem {
        let Self { path, origin, message } = self;
        let key = before.iter().copied().chain(path.iter().map(String::as_str)).collect::<Vec<_>>().join(".");
        let mut quoted = message.split('`').skip(1).step_by(2);
        let fix = if message.starts_with("missing field") {
            format!("add '{}: …' to the block", quoted.next().unwrap_or_default())
        } else if message.starts_with("unknown field") {
            let wrong = quoted.next().unwrap_or_default();
            suggest(wrong, &quoted.collect::<Vec<_>>(), "keys")
        } else {
            correct.to_owned()
        };
        Problem::new(Mistake::Value, &origin.unwrap_or_else(|| otherwise.clone()), key, message).fix(fix)
    }
}

//! Deserializes values and reports mismatches with their line and key.

use serde::de::Deserializer;
use serde_path_to_error::Segment;

use crate::config::problem::{Mistake, Origin, Problem, suggest};
use crate::config::yaml::node::Node;

/// A value that does not have the expected type, and its location.
pub(crate) struct TypeMismatch {
    path: Vec<String>,
    origin: Option<Origin>,
    message: String,
}

/// Deserializes `values`, which belong to `node`.
pub(crate) fn read<'de, T: serde::Deserialize<'de>, D: Deserializer<'de>>(
    node: &Node,
    values: D,
) -> Result<T, TypeMismatch> {
    serde_path_to_error::deserialize(values).map_err(|error| {
        let step = |segment: &Segment| match segment {
            Segment::Seq { index } => Some(index.to_string()),
            Segment::Map { key } => Some(key.clone()),
            Segment::Enum { variant } => Some(variant.clone()),
            Segment::Unknown => None,
        };
        let path: Vec<String> = error.path().iter().filter_map(step).collect();
        let mut near = path.as_slice();
        while node.at(near).is_none() && !near.is_empty() {
            near = &near[..near.len() - 1];
        }
        let origin = node.at(near).map(|node| node.origin.clone());
        TypeMismatch { path, origin, message: error.inner().to_string() }
    })
}

impl TypeMismatch {
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

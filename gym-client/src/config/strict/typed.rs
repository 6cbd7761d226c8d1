//! The types of top-level keys. NeMo Gym reads some of them leniently, or not at all.

use crate::config::problem::{Mistake, Problem, suggest};
use crate::config::reference::{ConfigKey, KeyType};
use crate::config::yaml::node::{Node, Tree};

/// Returns the mistake of a value of another type than its key has. Counts have a check of their own.
pub(super) fn mistyped(known: &ConfigKey, node: &Node) -> Option<Problem> {
    if node.is_interpolation() || node.is_missing() || matches!(node.value, Tree::Null) {
        return None;
    }
    let is_flag = || node.as_text().is_some_and(|text| gym_core::server::bool_in_string(text).is_some());
    let is_number = || node.as_text().is_some_and(|text| text.trim().parse::<f64>().is_ok());
    let (fits, expected) = match known.value {
        KeyType::Text => (matches!(node.value, Tree::Text(_)), "a string"),
        KeyType::Flag => (matches!(node.value, Tree::Bool(_)) || is_flag(), "true or false"),
        KeyType::Number => (matches!(node.value, Tree::Int(_) | Tree::Float(_)) || is_number(), "a number"),
        KeyType::Texts => (matches!(node.value, Tree::Text(_) | Tree::List(_)), "a string or a list"),
        KeyType::TextList | KeyType::Integers => (matches!(node.value, Tree::List(_)), "a list"),
        KeyType::Map | KeyType::TextMap | KeyType::TextsMap => (matches!(node.value, Tree::Map(_)), "a mapping"),
        KeyType::Choice(names) => {
            let text = node.python_str();
            let wrong = !names.contains(&text.as_str());
            return wrong.then(|| {
                Problem::new(Mistake::Value, &node.origin, known.name, format!("unknown value '{text}'"))
                    .fix(suggest(&text, names, "values"))
            });
        }
        _ => return None,
    };
    (!fits).then(|| {
        let what = format!("expected {expected}, found {}", node.kind());
        Problem::new(Mistake::Value, &node.origin, known.name, what).fix(format!("write {expected}, or remove the key"))
    })
}

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

    /// Converts the mismatch to a problem whose key starts with `before`; `correct` returns the fix for a wrong value of a key.
    pub(crate) fn at(self, otherwise: &Origin, before: &[&str], correct: impl Fn(&str) -> String) -> Problem {
        let Self { path, origin, message } = self;
        let key = before.iter().copied().chain(path.iter().map(String::as_str)).collect::<Vec<_>>().join(".");
        let mut quoted = message.split('`').skip(1).step_by(2);
        if message.starts_with("unknown variant") {
            let wrong = quoted.next().unwrap_or_default();
            let fix = suggest(wrong, &quoted.collect::<Vec<_>>(), "values");
            let origin = origin.unwrap_or_else(|| otherwise.clone());
            return Problem::new(Mistake::Value, &origin, key, format!("unknown value '{wrong}'")).fix(fix);
        }
        let fix = if message.starts_with("missing field") {
            format!("add '{}: …' to the block", quoted.next().unwrap_or_default())
        } else if message.starts_with("unknown field") {
            let wrong = quoted.next().unwrap_or_default();
            suggest(wrong, &quoted.collect::<Vec<_>>(), "keys")
        } else if let Some(variable) = environment_variable(&message) {
            format!("write ${{oc.env:{variable}}} for the value of an environment variable")
        } else {
            correct(&key)
        };
        Problem::new(Mistake::Value, &origin.unwrap_or_else(|| otherwise.clone()), key, plain(&message)).fix(fix)
    }
}

/// Returns the name of a text such as `$NAME`.
fn environment_variable(message: &str) -> Option<&str> {
    let (name, _) = message.strip_prefix("invalid type: string \"$")?.split_once('"')?;
    let name = name.trim_start_matches('{').trim_end_matches('}');
    name.chars().all(|one| one.is_ascii_alphanumeric() || one == '_').then_some(name)
}

/// Replaces Rust's names of types in a message of serde.
fn plain(message: &str) -> String {
    let Some((found, expected)) = message
        .strip_prefix("invalid type: ")
        .or_else(|| message.strip_prefix("invalid value: "))
        .and_then(|rest| rest.rsplit_once(", expected "))
    else {
        return message.to_owned();
    };
    if let Some(highest) = exceeded(found, expected) {
        return format!("expected a whole number of at most {highest}, found {}", number_of(found));
    }
    let expected = match expected {
        "u8" | "u16" | "u32" | "u64" | "usize" => "a whole number of at least 0",
        "i8" | "i16" | "i32" | "i64" | "isize" => "a whole number",
        "f32" | "f64" => "a number",
        "a boolean" => "true or false",
        "a sequence" => "a list",
        "a map" => "a mapping",
        "string or map" => "a string or a mapping",
        nonzero if nonzero.starts_with("a nonzero ") => "a whole number of at least 1",
        structure if structure.starts_with("struct ") => "a mapping",
        expected => expected,
    };
    let found = match found.split_once(' ') {
        _ if found == "sequence" => "a list".to_owned(),
        _ if found == "map" => "a mapping".to_owned(),
        _ if found.starts_with("string ") => format!("the {found}"),
        _ if found.starts_with("floating point ") => found["floating point ".len()..].trim_matches('`').to_owned(),
        Some(("integer" | "boolean", value)) => value.trim_matches('`').to_owned(),
        _ => found.to_owned(),
    };
    format!("expected {expected}, found {found}")
}

/// Returns the highest number of the expected type, if the one that was found is higher.
fn exceeded(found: &str, expected: &str) -> Option<u64> {
    let highest = match expected.strip_prefix("a nonzero ").unwrap_or(expected) {
        "u8" => u8::MAX.into(),
        "u16" => u16::MAX.into(),
        "u32" => u32::MAX.into(),
        _ => return None,
    };
    number_of(found).parse::<u64>().is_ok_and(|number| number > highest).then_some(highest)
}

fn number_of(found: &str) -> &str {
    found.trim_start_matches("integer ").trim_matches('`')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mismatch_is_said_without_types_of_rust() {
        for (message, said) in [
            (
                "invalid type: string \"ten\", expected u32",
                "expected a whole number of at least 0, found the string \"ten\"",
            ),
            ("invalid value: integer `-1`, expected usize", "expected a whole number of at least 0, found -1"),
            (
                "invalid value: integer `99999999999`, expected u32",
                "expected a whole number of at most 4294967295, found 99999999999",
            ),
            (
                "invalid value: integer `70000`, expected a nonzero u16",
                "expected a whole number of at most 65535, found 70000",
            ),
            ("invalid value: integer `0`, expected a nonzero u32", "expected a whole number of at least 1, found 0"),
            ("invalid type: floating point `2.5`, expected i64", "expected a whole number, found 2.5"),
            ("invalid type: sequence, expected f64", "expected a number, found a list"),
            ("invalid type: map, expected a string", "expected a string, found a mapping"),
            ("invalid type: null, expected a boolean", "expected true or false, found null"),
            ("invalid type: boolean `true`, expected a sequence", "expected a list, found true"),
            (
                "invalid type: string \"a, expected b\", expected struct Job",
                "expected a mapping, found the string \"a, expected b\"",
            ),
            ("0 is not a positive number of seconds", "0 is not a positive number of seconds"),
        ] {
            assert_eq!(plain(message), said);
        }
        assert_eq!(environment_variable("invalid type: string \"$STEPS\", expected u32"), Some("STEPS"));
        assert_eq!(environment_variable("invalid type: string \"$5 each\", expected u32"), None);
    }
}

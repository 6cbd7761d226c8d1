//! The keys and values of a request for a model (`responses_create_params`), in a row or in a configuration: each agent rejects what
//! this finds.

mod keys;
mod tools;
mod values;

use gym_core::server::RESPONSES_KEYS;

/// The mistake of a key of a request.
pub(crate) enum ParamMistake {
    /// The Responses API does not have the key; its fix.
    UnknownKey(String),
    /// The path below the key of a wrong value, and the problem with its fix.
    Value(String, String),
}

/// Checks a key of a request and its value, which is JSON. `input` is checked in rows only.
///
/// # Errors
/// The mistake, which each caller writes in its own form.
pub(crate) fn check(key: &str, value: &str) -> Result<(), ParamMistake> {
    let checked = match key {
        _ if RESPONSES_KEYS.binary_search(&key).is_err() => {
            return Err(ParamMistake::UnknownKey(keys::fix_of_key(key)));
        }
        "tools" => tools::check(value),
        "tool_choice" => tools::check_choice(value),
        _ => values::check(key, value),
    };
    checked.map_err(|(path, problem)| ParamMistake::Value(path, problem))
}

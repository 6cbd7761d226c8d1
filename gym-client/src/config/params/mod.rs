//! The keys and values of a request for a model (`responses_create_params`), in a row or in a configuration: each agent rejects what
//! this finds.

mod keys;
mod tools;
mod values;

use gym_core::server::RESPONSES_KEYS;

/// Checks a key of a request and its value, which is JSON. `input` is checked in rows only.
///
/// # Errors
/// The path below the key, and the problem with its fix.
pub(crate) fn check(key: &str, value: &str) -> Result<(), (String, String)> {
    match key {
        _ if RESPONSES_KEYS.binary_search(&key).is_err() => {
            Err((":".to_owned(), format!("unknown key; {}", keys::fix_of_key(key))))
        }
        "tools" => tools::check(value),
        "tool_choice" => tools::check_choice(value),
        _ => values::check(key, value),
    }
}

//! What became of a start or a call, in the words of the table.

use gym_core::testing::bad_input::Got;
use gym_group::GroupError;
use gym_group::{Group, StartError};

/// What became of a start.
pub(crate) fn started(outcome: Result<Group, StartError>) -> Got {
    match outcome {
        Ok(_) => Got::new("starts", ""),
        Err(error) => match error.failed().find_map(|(_, _, exit)| exit) {
            Some(exit) => Got::new(format!("does not start: {}", snake(exit.cause)), error.to_string()),
            None => Got::new(format!("does not start: {}", error.cause().code().as_str()), error.to_string()),
        },
    }
}

/// What became of a call.
pub(crate) fn called<T>(outcome: Result<T, GroupError>) -> Got {
    match outcome {
        Ok(_) => Got::new("answered", ""),
        Err(error) => match error.outcomes().iter().find_map(gym_group::RankOutcome::kind) {
            Some(_) => {
                let first = error.first().or(error.outcomes().first()).and_then(gym_group::RankOutcome::kind);
                Got::new(format!("fails: {}", first.map(snake).unwrap_or_default()), error.to_string())
            }
            None => Got::new(format!("refused: {}", error.cause().code().as_str()), error.to_string()),
        },
    }
}

/// A variant's name as a configuration would write it.
fn snake(variant: impl std::fmt::Debug) -> String {
    let mut text = String::new();
    for letter in format!("{variant:?}").chars() {
        if letter.is_uppercase() && !text.is_empty() {
            text.push('_');
        }
        text.extend(letter.to_lowercase());
    }
    text
}

//! One bad input, and what it must get.

use std::future::Future;
use std::pin::Pin;

use gym_client::group::{Group, StartError};
use gym_core::{Error, GroupError};

use super::ground::Ground;

type Run = Box<dyn for<'a> Fn(&'a Ground) -> Pin<Box<dyn Future<Output = Got> + 'a>>>;

/// One row of the table.
pub(crate) struct Case {
    pub(crate) kind: &'static str,
    pub(crate) name: &'static str,
    /// What it must get, in a word or two.
    pub(crate) outcome: &'static str,
    /// What the error must say; the place is among it.
    pub(crate) says: &'static [&'static str],
    pub(crate) run: Run,
}

impl Case {
    pub(crate) fn new(
        kind: &'static str,
        name: &'static str,
        outcome: &'static str,
        says: &'static [&'static str],
        run: impl for<'a> Fn(&'a Ground) -> Pin<Box<dyn Future<Output = Got> + 'a>> + 'static,
    ) -> Self {
        Self { kind, name, outcome, says, run: Box::new(run) }
    }
}

/// What it got.
#[derive(Debug)]
pub(crate) struct Got {
    pub(crate) outcome: String,
    pub(crate) text: String,
}

impl Got {
    pub(crate) fn new(outcome: impl Into<String>, text: impl Into<String>) -> Self {
        Self { outcome: outcome.into(), text: text.into() }
    }

    /// Refused before anything was done.
    pub(crate) fn refused<T>(outcome: Result<T, Error>) -> Self {
        match outcome {
            Ok(_) => Self::new("accepted", ""),
            Err(error) => Self::new(format!("refused: {}", error.code().as_str()), error.to_string()),
        }
    }

    /// What became of a start.
    pub(crate) fn started(outcome: Result<Group, StartError>) -> Self {
        match outcome {
            Ok(_) => Self::new("starts", ""),
            Err(error) => match error.failed().find_map(|(_, _, exit)| exit) {
                Some(exit) => Self::new(format!("does not start: {}", snake(exit.cause)), error.to_string()),
                None => Self::new(format!("does not start: {}", error.cause().code().as_str()), error.to_string()),
            },
        }
    }

    /// What became of a call.
    pub(crate) fn called<T>(outcome: Result<T, GroupError>) -> Self {
        match outcome {
            Ok(_) => Self::new("answered", ""),
            Err(error) => match error.outcomes().iter().find_map(gym_core::RankOutcome::kind) {
                Some(_) => {
                    let first = error.first().or(error.outcomes().first()).and_then(gym_core::RankOutcome::kind);
                    Self::new(format!("fails: {}", first.map(snake).unwrap_or_default()), error.to_string())
                }
                None => Self::new(format!("refused: {}", error.cause().code().as_str()), error.to_string()),
            },
        }
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

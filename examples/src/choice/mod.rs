//! Questions with one right option.
//!
//! The letter is found in free text (`Answer: (C)`, `C.`, `\boxed{C}`, `**C**`, the option's own words). An answer that names two
//! letters is wrong, so that a policy does not learn to name all of them.

mod letter;

use std::collections::BTreeMap;

use gym_core::{CallContext, Error, ModelResponse, ResourcesServer, Result, SessionId, Verdict};
use serde::Deserialize;

pub use letter::{Chosen, chosen};

/// The environment. It has neither state nor tools.
#[derive(Debug, Default)]
pub struct Choice;

/// The keys that a row must have.
#[derive(Debug, Deserialize)]
pub struct Task {
    /// The text of each option by its letter.
    pub options: BTreeMap<char, String>,
    /// The right letter.
    pub answer: char,
}

impl ResourcesServer for Choice {
    type Task = Task;

    async fn verify(&self, _: &CallContext, _: &SessionId, task: Task, response: &ModelResponse) -> Result<Verdict> {
        if !task.options.contains_key(&task.answer) {
            let letters: String = task.options.keys().collect();
            return Err(Error::invalid(format!(
                "`answer` of the row is `{}`, which is none of its `options` ({letters})",
                task.answer
            )));
        }
        let chosen = chosen(&response.last_text()?, &task.options);
        let letter = match chosen {
            Chosen::One(letter) => Some(letter),
            Chosen::Several | Chosen::None => None,
        };
        Ok(Verdict::correct(letter == Some(task.answer))
            .with("extracted_answer", letter.map(String::from))
            .with("ambiguous", chosen == Chosen::Several))
    }
}

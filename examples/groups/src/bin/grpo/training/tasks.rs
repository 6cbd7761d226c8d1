//! The tasks of the stand-in policy, and the scripted model that returns its answers.

use gym_core::{RawObject, Result};
use gym_group::{Batch, JsonRows, Tensor};
use gym_server::model::ScriptedItem;
use serde::Deserialize;
use serde_json::json;

use super::model::Operator;

/// Creates `count` prompts with the columns `operator` int64 \[rows\] and `task` JSON, which are rows of the `math` environment.
///
/// # Errors
/// None that depend on the caller.
pub(crate) fn prompts(count: usize, random: &mut fastrand::Rng) -> Result<Batch> {
    let (mut operators, mut tasks) = (Vec::with_capacity(count), Vec::with_capacity(count));
    for _ in 0..count {
        let index = random.usize(..Operator::ALL.len());
        let (operator, left, right) = (Operator::ALL[index], random.i64(2..100), random.i64(2..100));
        let question = format!("What is {left} {} {right}? Finish with \\boxed{{answer}}.", operator.symbol());
        operators.push(index as i64);
        tasks.push(json!({
            "responses_create_params": { "input": [{ "role": "user", "content": question }] },
            "expected_answer": operator.apply(left, right).to_string(),
            "left": left,
            "right": right,
        }));
    }
    Batch::empty().with("operator", Tensor::from_vec([count], operators)?)?.with("task", JsonRows::from_values(tasks)?)
}

/// Returns the turn of a model whose answer was generated before, for [`gym_server::Servers::scripted_policy`].
#[must_use]
pub(crate) fn played(request: &RawObject, _: &mut fastrand::Rng) -> Vec<ScriptedItem> {
    #[derive(Default, Deserialize)]
    struct Metadata {
        #[serde(default)]
        generation: String,
    }
    let metadata: Metadata = request.get_as("metadata").ok().flatten().unwrap_or_default();
    vec![ScriptedItem::message(metadata.generation)]
}

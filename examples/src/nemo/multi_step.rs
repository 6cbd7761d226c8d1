//! `example_multi_step`: looks up the value of each synonym, then submits all values in order.

use std::collections::BTreeSet;

use gym_core::{CallContext, Error, ModelResponse, RawObject, ResourcesServer, Response, Result, SessionId, Verdict};
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::python_equal;
use gym_core::server::{Argument, ArgumentErrors, Arguments};

/// Returns values of synonyms. The reward is 1 if the last submitted list is the expected one.
#[derive(Debug, Default)]
pub struct MultiStep;

/// The expected values, and the values that show that the model looked up the term instead of its synonyms.
#[derive(Debug, Deserialize)]
pub struct Task {
    expected_synonym_values: Box<RawValue>,
    minefield_label: String,
    minefield_label_value: Box<RawValue>,
}

/// The values of the last call, of any type.
#[derive(Deserialize)]
struct HandedIn {
    synonym_values: Vec<Value>,
}

impl ResourcesServer for MultiStep {
    type Task = Task;

    async fn call_tool(&self, _: &CallContext, _: &SessionId, tool: &str, arguments: &RawObject) -> Result<Response> {
        let mut arguments = Arguments::of(arguments);
        match tool {
            "get_synonym_value" => {
                let Some(synonym) = arguments.take::<String>("synonym") else { return Ok(arguments.refusal()) };
                let value: u64 = synonym.chars().map(|letter| u64::from(u32::from(letter))).sum();
                Ok(Response::json(json!({"synonym_value": value}).to_string()))
            }
            "extract_synonym_values" => match arguments.take::<Vec<i128>>("synonym_values") {
                Some(_) => Ok(Response::json(json!({"success": true}).to_string())),
                None => Ok(arguments.refusal()),
            },
            _ => Err(gym_core::server::unknown_tool(tool)),
        }
    }

    fn returns(&self, key: &str) -> bool {
        super::declared(key)
    }

    async fn verify(&self, _: &CallContext, _: &SessionId, task: Task, response: &ModelResponse) -> Result<Verdict> {
        let expected: Vec<i128> = integer("expected_synonym_values", task.expected_synonym_values.get())?;
        let minefield: i128 = integer("minefield_label_value", task.minefield_label_value.get())?;
        if expected.is_empty() {
            return Err(Error::internal("the row expects no synonym values, so no share of them can be found"));
        }
        let outline = response.outline()?;
        let last = outline.function_calls().filter(|call| call.name == "extract_synonym_values").last();
        let actual = match last {
            Some(call) => {
                serde_json::from_str::<HandedIn>(&call.arguments)
                    .map_err(|error| {
                        Error::internal("extract_synonym_values was called without values").caused_by(error)
                    })?
                    .synonym_values
            }
            None => Vec::new(),
        };
        let parsed: Vec<i128> = integer("synonym_values", &Value::from(actual.clone()).to_string())?;

        let is = |value: &Value, number: i128| python_equal(value, &json!(number));
        let accuracy = actual.len() == expected.len() && actual.iter().zip(&expected).all(|(value, n)| is(value, *n));
        let distinct: BTreeSet<i128> = expected.iter().copied().collect();
        let found = distinct.iter().filter(|number| actual.iter().any(|value| is(value, **number))).count();
        let set_overlap = found as f64 / expected.len() as f64;
        let hit = actual.iter().any(|value| *value == task.minefield_label || is(value, minefield));
        Ok(Verdict::correct(accuracy)
            .with("parsed_synonym_values", json!(parsed))
            .with("accuracy", accuracy)
            .with("set_overlap", set_overlap)
            .with("original_term_minefield_hit", hit)
            .with("order_instruction_following_failure", !accuracy && set_overlap == 1.0))
    }
}

/// Parses integers as leniently as the original's models.
fn integer<T: Argument>(what: &str, text: &str) -> Result<T> {
    T::read(text, &mut ArgumentErrors::default())
        .ok_or_else(|| Error::invalid(format!("`{what}` has something that is not an integer: {text:.200}")))
}

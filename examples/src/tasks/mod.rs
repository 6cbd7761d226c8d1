//! Writes the tasks under `data`. The output is deterministic, so a test compares it with the committed files.
//!
//! A row has NeMo Gym's format: `responses_create_params`, the keys that the environment's verifier reads, and in `agent_ref` the
//! agent that runs it. One collection can therefore read all three files.

mod choice;
mod math;
mod warehouse;

use std::collections::BTreeSet;

use gym_core::{Error, RawObject, Result};
use serde_json::{Map, Value, json};

/// Tasks in each file.
pub const TASKS: usize = 240;

/// The environments that have a file, by file name.
pub const ENVIRONMENTS: [&str; 3] = ["math", "warehouse", "choice"];

/// Returns the lines of an environment's file, or `None` if there is no such environment.
#[must_use]
pub fn jsonl(environment: &str) -> Option<String> {
    // Any seed would work. Each file has its own seed, so that adding tasks to one file leaves the others unchanged.
    let (draw, seed): (fn(&mut fastrand::Rng, usize) -> Draft, u64) = match environment {
        "math" => (math::draw, 1),
        "warehouse" => (warehouse::draw, 2),
        "choice" => (choice::draw, 3),
        _ => return None,
    };
    let mut random = fastrand::Rng::with_seed(seed);
    let (mut lines, mut seen) = (String::new(), BTreeSet::new());
    while seen.len() < TASKS {
        // The kinds of tasks alternate. A task that was drawn before is drawn again.
        let draft = draw(&mut random, seen.len());
        if seen.insert(draft.question.clone()) {
            lines.push_str(&draft.into_row(environment).to_string());
            lines.push('\n');
        }
    }
    Some(lines)
}

/// Returns the rows of an environment's file.
///
/// # Errors
/// `InvalidArgument` if there is no such environment.
pub fn rows(environment: &str) -> Result<Vec<RawObject>> {
    let unknown = || Error::invalid(format!("no tasks for `{environment}`; use one of {}", ENVIRONMENTS.join(", ")));
    let lines = jsonl(environment).ok_or_else(unknown)?;
    lines.lines().map(|line| Ok(RawObject::parse(line.to_owned())?)).collect()
}

/// A task that is not yet a row.
struct Draft {
    system: &'static str,
    question: String,
    tools: Vec<Value>,
    keys: Vec<(&'static str, Value)>,
}

impl Draft {
    fn into_row(self, environment: &str) -> Value {
        let mut params = json!({"input": [
            {"role": "system", "content": self.system},
            {"role": "user", "content": self.question},
        ]});
        if !self.tools.is_empty() {
            params["tools"] = Value::from(self.tools);
        }
        let mut row = Map::from_iter([("responses_create_params".to_owned(), params)]);
        row.extend(self.keys.into_iter().map(|(key, value)| (key.to_owned(), value)));
        let agent = format!("{environment}_simple_agent");
        row.insert("agent_ref".into(), json!({"type": "responses_api_agents", "name": agent}));
        Value::from(row)
    }
}

/// Returns a function tool with required parameters, each with its type and description.
fn tool(name: &str, description: &str, parameters: &[(&str, &str, &str)]) -> Value {
    let properties: Map<String, Value> = parameters
        .iter()
        .map(|(name, kind, meaning)| ((*name).to_owned(), json!({"type": kind, "description": meaning})))
        .collect();
    let required: Vec<&str> = parameters.iter().map(|(name, ..)| *name).collect();
    json!({
        "type": "function",
        "name": name,
        "description": description,
        "parameters": {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": false,
        },
        "strict": true,
    })
}

/// Returns a random item.
fn pick<T: Copy>(random: &mut fastrand::Rng, from: &[T]) -> T {
    from[random.usize(..from.len())]
}

//! The coverage of a report: what was requested, by the collector's own count. A server computes its statistics from the recorded rollouts
//! alone, so it cannot know which are missing.

use std::collections::BTreeMap;

use gym_core::rollout::metrics::{JsonFields, TASK_INDEX, TaskCompletion};
use serde::Serialize;
use serde_json::value::RawValue;

use crate::collect::run::{AgentSummary, TaskCoverage};

/// The key of the coverage in an entry of `<output>_aggregate_metrics.json`.
pub(super) const COVERAGE_KEY: &str = "_gym_coverage";

/// The requested and the recorded rollouts of one environment server.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(in crate::collect) struct ServerCoverage {
    /// The agent, if a row names one.
    #[serde(skip)]
    pub(in crate::collect) agent: Option<String>,
    expected: u64,
    recorded: u64,
    missing: u64,
    tasks: u64,
    tasks_incomplete: u64,
    tasks_without_rollout: u64,
    incomplete_tasks: Vec<TaskCoverage>,
}

impl ServerCoverage {
    /// Adds the tasks of an agent of the server.
    pub(in crate::collect) fn add(&mut self, agent: &AgentSummary, incomplete: &[TaskCoverage]) {
        self.expected += agent.expected;
        self.recorded += agent.rollouts;
        self.missing += agent.missing;
        self.tasks += agent.tasks;
        self.tasks_incomplete += agent.tasks_incomplete;
        self.tasks_without_rollout += agent.tasks_without_rollout;
        self.incomplete_tasks.extend(incomplete);
        self.incomplete_tasks.sort_by_key(|task| task.task_index);
    }

    /// Returns the incomplete tasks by index.
    pub(super) fn incomplete(&self) -> BTreeMap<i64, TaskCompletion> {
        let completion =
            |task: &TaskCoverage| TaskCompletion { expected: task.expected.into(), recorded: task.recorded.into() };
        self.incomplete_tasks.iter().map(|task| (task.task_index.into(), completion(task))).collect()
    }

    /// Returns the statistics of the tasks, `group_level_metrics` of a reply, with the counts that are true. `None` if they need no
    /// correction, or are no list of objects.
    pub(super) fn corrected(&self, tasks: &str) -> Option<String> {
        if self.incomplete_tasks.is_empty() {
            return None;
        }
        let incomplete = self.incomplete();
        let tasks: Vec<&RawValue> = serde_json::from_str(tasks).ok()?;
        let tasks: Option<Vec<String>> =
            tasks.into_iter().map(|task| corrected_task(task.get(), &incomplete)).collect();
        Some(format!("[{}]", tasks?.join(",")))
    }
}

/// Replaces the counts that an entry has, and adds none.
fn corrected_task(text: &str, incomplete: &BTreeMap<i64, TaskCompletion>) -> Option<String> {
    let fields = JsonFields::parse(text).ok()?;
    let index = fields.get(TASK_INDEX).and_then(|index| index.parse().ok());
    let Some(completion) = index.and_then(|index: i64| incomplete.get(&index)) else { return Some(text.to_owned()) };
    let metrics = completion.metrics().map(|(key, value)| (key, value.to_string()));
    let mut edit = fields.edit();
    for (key, value) in metrics.iter().filter(|(key, _)| fields.get(key).is_some()) {
        edit.set(key, value);
    }
    Some(edit.to_text())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn the_counts_of_incomplete_tasks_are_corrected_and_everything_else_stays() {
        let mut coverage = ServerCoverage::default();
        let task = TaskCoverage { task_index: 3, expected: 4, recorded: 1, missing: 3 };
        assert_eq!(coverage.corrected("[]"), None, "nothing is missing");
        coverage.add(&AgentSummary::default(), &[task]);
        let counts = |expected: u32, missing: u32, share: f64| json!({"expected_num_rollouts": expected, "missing_num_rollouts": missing, "reward_profile_completion_pct": share});
        for (entry, expected) in [
            (counts(1, 0, 100.0), counts(4, 3, 25.0)),
            // An agent of another kind reports what it wants.
            (json!({"mean/reward": 1.5}), json!({"mean/reward": 1.5})),
            (json!({"missing_num_rollouts": null}), json!({"missing_num_rollouts": 3})),
        ] {
            let at = |index: Value, mut entry: Value| {
                entry["_ng_task_index"] = index;
                entry
            };
            let reply = json!([at(3.into(), entry.clone()), at(2.into(), entry.clone()), at("3".into(), entry)]);
            let corrected: Value = serde_json::from_str(&coverage.corrected(&reply.to_string()).unwrap()).unwrap();
            assert_eq!(corrected, json!([at(3.into(), expected), reply[1], reply[2]]));
        }
        for odd in ["{}", "null", "7", "[3]", "[null]", "\"\""] {
            assert_eq!(coverage.corrected(odd), None, "{odd}");
        }
    }
}

//! Reads the rollouts of earlier runs again, so that the figures of a resumed collection are about the whole file.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use gym_core::rollout::metrics::{JsonFields, MetricsError, row_key};
use gym_core::rollout::{EPISODE_KEY, TaskKey};
use gym_core::{Error, Result};
use serde::Deserialize;
use serde_json::Value;

use crate::collect::files::OutputFiles;
use crate::collect::input::MaterializedRows;
use crate::collect::input::rows::{ENVIRONMENT_SERVER, agent_name, parse_row, text_member};
use crate::collect::report::index::each_line;
use crate::collect::run::outcome::reward_of_fields;
use crate::collect::run::progress::{EpisodeFigures, INCOMPLETE_TASKS_MAX, RequestedTasks, RolloutFigures};
use crate::collect::run::{AgentSummary, CollectProgress, TaskCoverage};

/// Bytes that one read transfers.
const BUFFER_BYTES: usize = 128 << 10;

/// The agents of a collection, by its files.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct RecordedSummary {
    /// The figures of each agent.
    pub agents: BTreeMap<Arc<str>, AgentSummary>,
    /// The tasks with missing rollouts, by agent: first those without a single recorded rollout, and at most 1,000 of each agent.
    pub incomplete_tasks: BTreeMap<Arc<str>, Vec<TaskCoverage>>,
}

impl RecordedSummary {
    /// Reads the materialized inputs and the rollouts of a collection; `None` without materialized inputs, which say what was requested.
    ///
    /// # Errors
    /// `InvalidArgument`, with file and line, if a row cannot be read.
    pub fn read(files: &OutputFiles) -> Result<Option<Self>> {
        let open = |path: &Path| File::open(path).map(|file| BufReader::with_capacity(BUFFER_BYTES, file));
        let Ok(materialized) = open(&files.materialized) else { return Ok(None) };
        let progress = CollectProgress::default();
        let mut requested = RequestedTasks::default();
        for row in MaterializedRows::new(materialized, files.materialized.display().to_string()) {
            let row = row.map_err(|error| Error::invalid(error.to_string()))?;
            requested.add(row.key.task_index, row.agent.or(row.environment_server).as_deref().unwrap_or_default());
        }
        progress.expect(requested);
        let name = files.rollouts.display().to_string();
        // A collection whose rollouts all failed may have no rollouts file.
        if let Ok(rollouts) = open(&files.rollouts) {
            read_recorded(rollouts, &name, |agent, key, rollout| progress.add_recorded(agent, key, rollout))
                .map_err(|error| Error::invalid(error.to_string()))?;
        }
        let incomplete_tasks = progress.incomplete_tasks(INCOMPLETE_TASKS_MAX);
        Ok(Some(Self { agents: progress.agent_summaries(), incomplete_tasks }))
    }
}

/// The part of a row's `_gym_episode` that is counted. Rows of other collectors do not have it, and a value of the wrong type is
/// not counted.
#[derive(Deserialize)]
struct RecordedEpisode {
    #[serde(default)]
    turns: Value,
    #[serde(default)]
    tool_errors: Value,
    #[serde(default)]
    tool_failures: Value,
    #[serde(default)]
    input_tokens: Value,
    #[serde(default)]
    output_tokens: Value,
    #[serde(default)]
    truncated: Value,
    #[serde(default)]
    prefix_breaks: Value,
    #[serde(default)]
    completion_unverified: Value,
    #[serde(default)]
    seconds: Value,
}

/// Calls `each` with the agent, the key and the figures of each row. The agent is empty for a row that names neither an agent nor a server.
///
/// # Errors
/// The errors of [`RolloutsIndex::scan`](super::RolloutsIndex::scan).
pub(in crate::collect) fn read_recorded(
    reader: impl BufRead,
    name: &str,
    mut each: impl FnMut(&Arc<str>, TaskKey, &RolloutFigures),
) -> std::result::Result<(), MetricsError> {
    let mut agents: BTreeMap<String, Arc<str>> = BTreeMap::new();
    each_line(reader, name, |text, line, _| {
        let place = || format!("{name}, line {line}");
        let fail = |problem: String| MetricsError::Row { place: place(), problem };
        let row = parse_row(text).map_err(fail)?;
        let (task, rollout) = row_key(&row, &place)?;
        let index = |index: i64| u32::try_from(index).map_err(|_| fail(format!("index {index} is out of range")));
        let key = TaskKey::new(index(task)?, index(rollout)?);
        // As the collector names it: a row that is bound to an environment server alone has that server's name.
        let agent = agent_name(&row).ok().flatten().or_else(|| text_member(&row, ENVIRONMENT_SERVER).ok().flatten());
        let agent = agent.unwrap_or_default();
        let agent = agents.entry(agent).or_insert_with_key(|agent| agent.as_str().into());
        each(agent, key, &figures(&row));
        Ok(())
    })
}

fn figures(row: &JsonFields<'_>) -> RolloutFigures {
    let episode = row.get(EPISODE_KEY).and_then(|text| serde_json::from_str::<RecordedEpisode>(text).ok());
    let count = |count: &Value| count.as_u64().and_then(|count| u32::try_from(count).ok());
    let course = |episode: &RecordedEpisode| {
        Some(EpisodeFigures {
            turns: count(&episode.turns)?,
            tool_errors: count(&episode.tool_errors)?,
            tool_failures: count(&episode.tool_failures)?,
            truncated: episode.truncated.is_string(),
            tokens: count(&episode.input_tokens).zip(count(&episode.output_tokens)),
            prefix_breaks: count(&episode.prefix_breaks),
            completion_unverified: episode.completion_unverified == true,
        })
    };
    let seconds = episode.as_ref().and_then(|episode| episode.seconds.as_f64());
    RolloutFigures {
        reward: reward_of_fields(row),
        took: seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok()),
        episode: episode.as_ref().and_then(course),
    }
}

//! What a collection is asked to do with its input rows, what can be wrong with them, and the materialized rows read back.

use std::collections::BTreeMap;
use std::io::{self, BufRead};

use bytes::Bytes;
use gym_core::metrics::{Members, ROLLOUT_INDEX, TASK_INDEX};
use gym_core::{JsonError, RawObject};
use serde_json::{Map, Value};
use thiserror::Error;

use super::prompt::{PromptError, PromptTemplate};

pub(crate) const AGENT_REF: &str = "agent_ref";
pub(crate) const ENVIRONMENT_SERVER: &str = "_ng_environment_server";
/// The key of `agent_map` and of per-agent repeats that stands for every other name.
pub const DEFAULT_KEY: &str = "_default";

/// How often each row is rolled out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Repeats {
    /// Every row alike.
    Each(u32),
    /// By agent name, or by the name that the row itself routes by; `_default` stands for the others.
    PerAgent(BTreeMap<String, u32>),
}

/// Which environment server a flat row goes to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Routing {
    /// The one in front of the row's agent.
    #[default]
    Agent,
    /// This one, for every flat row.
    Legacy(String),
    /// None: only rows with `task_id.taskset` and `task_input` are taken.
    Taskset,
}

/// What to make of the input rows.
#[derive(Clone, Debug)]
pub struct MaterializeOptions {
    /// The input's name, for errors.
    pub input_name: String,
    /// At most so many rows are read; 0 is no limit, as in NeMo Gym.
    pub limit: Option<u64>,
    /// Where rows go instead, by their agent or task source; `_default` takes all others.
    pub agent_map: BTreeMap<String, String>,
    /// Rows of this agent or task source run once on each of these agents.
    pub fan_out: BTreeMap<String, Vec<String>>,
    /// How often each row is rolled out.
    pub repeats: Repeats,
    /// Whether each rollout gets its index as the seed, in `metadata.extra_body`.
    pub add_seed: bool,
    /// Whether repeats are dispatched round by round (abcabc) instead of back to back (aabbcc).
    pub interleave: bool,
    /// Members that replace those of each row's `responses_create_params`.
    pub overrides: Map<String, Value>,
    /// Template that builds `responses_create_params.input`.
    pub prompt: Option<PromptTemplate>,
    /// Put on each row as `skills_ref`.
    pub skills_ref: Option<Value>,
    /// Where flat rows go.
    pub routing: Routing,
    /// Environment servers of materialized tasks, by taskset.
    pub environment_server_routes: BTreeMap<String, String>,
}

impl MaterializeOptions {
    /// One rollout for each row of the input called `input_name`, rows as they are.
    #[must_use]
    pub fn new(input_name: impl Into<String>) -> Self {
        Self {
            input_name: input_name.into(),
            limit: None,
            agent_map: BTreeMap::new(),
            fan_out: BTreeMap::new(),
            repeats: Repeats::Each(1),
            add_seed: false,
            interleave: false,
            overrides: Map::new(),
            prompt: None,
            skills_ref: None,
            routing: Routing::Agent,
            environment_server_routes: BTreeMap::new(),
        }
    }

    /// Sends every row to `agent`: the `_default` of the agent map.
    pub fn with_agent(mut self, agent: &str) -> Result<Self, SourceError> {
        match self.agent_map.get(DEFAULT_KEY) {
            Some(other) if other != agent => Err(SourceError::option(
                "agent_name",
                format!("{agent:?} conflicts with agent_map._default {other:?}; set only one of them"),
            )),
            _ => {
                self.agent_map.insert(DEFAULT_KEY.to_owned(), agent.to_owned());
                Ok(self)
            }
        }
    }

    pub(crate) fn check(&self) -> Result<(), SourceError> {
        match &self.repeats {
            Repeats::Each(0) => return Err(SourceError::option("num_repeats", "must be at least 1, got 0")),
            Repeats::PerAgent(map) => {
                if let Some((agent, _)) = map.iter().find(|(_, repeats)| **repeats == 0) {
                    return Err(SourceError::option(
                        format!("num_repeats.{agent}"),
                        "must be at least 1, got 0; to leave an agent's rows out, remove them from the input",
                    ));
                }
            }
            Repeats::Each(_) => {}
        }
        for (key, agents) in &self.fan_out {
            let repeated = agents.iter().enumerate().find(|(place, agent)| agents[..*place].contains(agent));
            if agents.is_empty() {
                return Err(SourceError::option(
                    format!("fan_out.{key}"),
                    "lists no agent, which would drop its rows; list at least one, or remove the key",
                ));
            }
            if let Some((_, agent)) = repeated {
                return Err(SourceError::option(
                    format!("fan_out.{key}"),
                    format!("lists {agent:?} more than once; use num_repeats for repetition"),
                ));
            }
        }
        if self.routing == Routing::Taskset && self.environment_server_routes.is_empty() {
            return Err(SourceError::option(
                "environment_server_routes",
                "must name a server for each taskset when environment_routing_mode is taskset",
            ));
        }
        Ok(())
    }
}

/// What is wrong with the input or with what is asked of it. Every message names the place and the fix.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SourceError {
    /// One line of the input cannot be used.
    #[error("{file}, line {line}: {problem}")]
    Line {
        /// The input's name.
        file: String,
        /// Counted from 1.
        line: u64,
        /// What is wrong, and the fix.
        problem: String,
    },
    /// Rows that no rule sends to an agent.
    #[error(
        "{file}, line {}: no agent for {count} row(s); name one with --agent or agent_map._default, or give the rows agent_ref or task_source",
        .lines.iter().map(u64::to_string).collect::<Vec<_>>().join(", ")
    )]
    NoAgent {
        /// The input's name.
        file: String,
        /// The first of their lines.
        lines: Vec<u64>,
        /// How many there are.
        count: u64,
    },
    /// Rows whose names the per-agent repeats do not mention.
    #[error("{file}, line {line}: num_repeats has no entry for {} and no `_default`; it has {}", .names.join(", "), .known.join(", "))]
    NoRepeats {
        /// The input's name.
        file: String,
        /// The first such row.
        line: u64,
        /// The names that rows route by.
        names: Vec<String>,
        /// The names that have an entry.
        known: Vec<String>,
    },
    /// An option that contradicts itself or another.
    #[error("{key}: {problem}")]
    Option {
        /// The option's key.
        key: String,
        /// What is wrong, and the fix.
        problem: String,
    },
    /// Reading or writing failed.
    #[error("{doing}: {source}")]
    Io {
        /// What was being done, and to what.
        doing: String,
        /// The cause.
        #[source]
        source: io::Error,
    },
}

impl SourceError {
    pub(crate) fn option(key: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Option { key: key.into(), problem: problem.into() }
    }

    pub(crate) fn line(file: &str, line: u64, problem: impl Into<String>) -> Self {
        Self::Line { file: file.to_owned(), line, problem: problem.into() }
    }

    pub(crate) fn io(doing: impl Into<String>, source: io::Error) -> Self {
        Self::Io { doing: doing.into(), source }
    }
}

impl From<PromptError> for SourceError {
    fn from(error: PromptError) -> Self {
        Self::option("prompt_config", error.to_string())
    }
}

/// Which rollout a row is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RowKey {
    /// `_ng_task_index`.
    pub task_index: i64,
    /// `_ng_rollout_index`.
    pub rollout_index: i64,
}

/// One row of a materialized inputs file.
#[derive(Clone, Debug, PartialEq)]
pub struct MaterializedRow {
    /// Its rollout.
    pub key: RowKey,
    /// The agent it goes to; materialized tasks name none.
    pub agent: Option<String>,
    /// The environment server it is bound to, if one is stamped on it.
    pub environment_server: Option<String>,
    /// The row's line, bit for bit, without the line end.
    pub row: RawObject,
    /// Its line in the file, counted from 1.
    pub line: u64,
}

/// Streams the rows of a materialized inputs file; one row is held at a time.
#[derive(Debug)]
pub struct MaterializedRows<R> {
    reader: R,
    name: String,
    line: u64,
}

impl<R: BufRead> MaterializedRows<R> {
    /// Rows of `reader`; `name` is the file's name for errors.
    pub fn new(reader: R, name: impl Into<String>) -> Self {
        Self { reader, name: name.into(), line: 0 }
    }

    fn read(&mut self) -> Result<Option<MaterializedRow>, SourceError> {
        let mut raw = Vec::new();
        let read = self
            .reader
            .read_until(b'\n', &mut raw)
            .map_err(|error| SourceError::io(format!("read {}", self.name), error))?;
        if read == 0 {
            return Ok(None);
        }
        self.line += 1;
        raw.truncate(raw.trim_ascii_end().len());
        let fail = |problem: String| SourceError::line(&self.name, self.line, problem);
        let raw = Bytes::from(raw);
        let row = RawObject::parse(raw.clone()).and_then(|row| row.check().map(|()| row));
        let row = row.map_err(|error| fail(wrong_row(&raw, &error)))?;
        let index = |key: &str| {
            row.get_as(key).ok().flatten().ok_or_else(|| {
                fail(format!("{key} is not a whole number; collect again without --resume to rewrite the file"))
            })
        };
        let key = RowKey { task_index: index(TASK_INDEX)?, rollout_index: index(ROLLOUT_INDEX)? };
        let reference = row.get(AGENT_REF);
        let agent = name_of(reference.as_deref().and_then(|raw| std::str::from_utf8(raw).ok())).map_err(&fail)?;
        let environment_server = row.get_as(ENVIRONMENT_SERVER).ok().flatten();
        Ok(Some(MaterializedRow { key, agent, environment_server, row, line: self.line }))
    }
}

impl<R: BufRead> Iterator for MaterializedRows<R> {
    type Item = Result<MaterializedRow, SourceError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.read().transpose()
    }
}

/// A line's members, or what is wrong with it.
pub(crate) fn parse_row(text: &str) -> Result<Members<'_>, String> {
    if text.trim().is_empty() {
        return Err("the line is blank; remove it".to_owned());
    }
    Members::parse(text).map_err(|error| {
        // The line is one of a file: its own line number would mislead.
        let error = error.to_string().replace(" at line 1 column", " at column");
        format!("malformed JSON: {error}; each line must be one complete JSON object")
    })
}

/// What is wrong with a line that is no row.
fn wrong_row(raw: &[u8], error: &JsonError) -> String {
    match std::str::from_utf8(raw) {
        Ok(text) => parse_row(text).err().unwrap_or_else(|| error.to_string()),
        Err(error) => format!("not UTF-8: {error}"),
    }
}

/// `agent_ref.name`, if the row has one.
pub(crate) fn agent_name(row: &Members<'_>) -> Result<Option<String>, String> {
    name_of(row.get(AGENT_REF))
}

/// The name in an `agent_ref`.
fn name_of(reference: Option<&str>) -> Result<Option<String>, String> {
    let Some(reference) = reference.filter(|raw| gym_core::metrics::is_truthy(raw)) else { return Ok(None) };
    let reference = Members::parse(reference)
        .map_err(|_| "agent_ref is not an object; expected {\"name\": \"<agent>\"}".to_owned())?;
    text_member(&reference, "name").map_err(|()| "agent_ref.name is not a text; name the agent".to_owned())
}

/// A member that is a text or absent (or null).
pub(crate) fn text_member(members: &Members<'_>, key: &str) -> Result<Option<String>, ()> {
    members.get(key).map_or(Ok(None), |raw| serde_json::from_str::<Option<String>>(raw).map_err(|_| ()))
}

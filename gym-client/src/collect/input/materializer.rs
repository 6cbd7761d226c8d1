//! Turns input rows into rows to dispatch: assigns the agent, the number of repeats, the task index and the rollout
//! index.
//!
//! Follows the rules of NeMo Gym 0.7.0. Rows are streamed. Memory holds a digest of each distinct line, because equal
//! lines are one task, and 24 bytes per output row if repeats are interleaved.

use std::collections::hash_map::{DefaultHasher, HashMap};
use std::collections::{BTreeMap, BTreeSet};
use std::hash::Hasher;
use std::io::{BufRead, Seek, SeekFrom, Write};

use gym_core::message::json_string;
use gym_core::rollout::metrics::{JsonFields, ROLLOUT_INDEX, TASK_INDEX, is_truthy};

use crate::collect::input::error::InputError;
use crate::collect::input::options::{DEFAULT_KEY, MaterializeOptions, Repeats, Routing};
use crate::collect::input::prompt::PromptTemplate;
use crate::collect::input::python::{PythonValue, dumps};
use crate::collect::input::rows::{AGENT_REF, ENVIRONMENT_SERVER, RowKey, agent_name, parse_row, text_member};
use crate::config::nearest_name;

const PARAMS: &str = "responses_create_params";
const TASK_SOURCE: &str = "task_source";
/// Line numbers listed in an error about many rows.
const LINES_NAMED_MAX: usize = 10;

/// Resolves names that only the merged configuration defines.
pub trait AgentNames {
    /// Returns the agent that serves the rows of a task source; the error gives the reason if there is none.
    fn agent_of_task_source(&self, task_source: &str) -> Result<String, String>;
    /// Returns the agent behind an environment server, if it has one.
    fn agent_of_environment_server(&self, server: &str) -> Option<String>;
    /// Checks a row that is sent to this agent or environment server; the error gives the reason why it does not fit. The default
    /// accepts all rows.
    fn check_row(&self, target: &str, row: &str) -> Result<(), String> {
        let _ = (target, row);
        Ok(())
    }
}

/// Resolves no names; sufficient if every row names its agent.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoAgentNames;

impl AgentNames for NoAgentNames {
    fn agent_of_task_source(&self, _: &str) -> Result<String, String> {
        Err("no configuration is loaded to look up its agent; set the agent with agent_map".to_owned())
    }

    fn agent_of_environment_server(&self, _: &str) -> Option<String> {
        None
    }
}

/// The result of a materialization.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MaterializeSummary {
    /// Number of input rows read.
    pub rows_read: u64,
    /// Number of rows written, which is the number of rollouts to dispatch.
    pub rows_written: u64,
    /// Rows written and first input line, by agent, or by environment server for rows that are bound to one.
    pub targets: BTreeMap<String, TargetUse>,
    /// Warnings for the user.
    pub warnings: Vec<String>,
}

/// The rows of one agent or environment server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TargetUse {
    /// Number of rows.
    pub rows: u64,
    /// First input line that uses the target, so that an unknown name can be reported with its line.
    pub first_line: u64,
}

/// Turns input rows into rows to dispatch.
#[derive(Debug)]
pub struct Materializer<N = NoAgentNames> {
    options: MaterializeOptions,
    names: N,
    overrides: Vec<(String, String)>,
    skills_ref: Option<String>,
}

impl<N: AgentNames> Materializer<N> {
    /// Creates a materializer.
    ///
    /// # Errors
    /// [`InputError::Option`] if an option is invalid or contradicts another option.
    pub fn new(options: MaterializeOptions, names: N) -> Result<Self, InputError> {
        options.check()?;
        let overrides = options.overrides.iter().map(|(key, value)| (key.clone(), value.to_string())).collect();
        let skills_ref = options.skills_ref.as_ref().map(ToString::to_string);
        Ok(Self { options, names, overrides, skills_ref })
    }

    /// Reads rows from the reader's start and writes the rows to dispatch, one per line.
    ///
    /// # Errors
    /// The first invalid row or option, or an I/O error. Rows may already have been written: write to a temporary file
    /// and rename it.
    pub fn write<R: BufRead + Seek, W: Write>(
        &self,
        reader: R,
        mut writer: W,
    ) -> Result<MaterializeSummary, InputError> {
        let failed = |error| InputError::io("write materialized inputs", error);
        let summary = self.each_row(reader, |_, _, _, line| writer.write_all(line.as_bytes()).map_err(failed))?;
        writer.flush().map_err(failed)?;
        Ok(summary)
    }

    /// Calls `each` with the key of each row to dispatch, the name that its figures have, the number of its input row, from 1, and its line
    /// with the newline, until it returns an error. The name is that of the agent, or of the environment server for a row without an agent.
    ///
    /// # Errors
    /// As [`Materializer::write`], and the error of `each`.
    pub(in crate::collect) fn each_row<R: BufRead + Seek>(
        &self,
        mut reader: R,
        mut each: impl FnMut(RowKey, &str, u64, &str) -> Result<(), InputError>,
    ) -> Result<MaterializeSummary, InputError> {
        let mut each = |task, rollout: u32, target: &RowTarget, line, out: &mut String| {
            out.push('\n');
            let passed = each(RowKey { task_index: task, rollout_index: rollout.into() }, target.shown(), line, out);
            out.clear();
            passed
        };
        let mut run = MaterializeRun::new(self);
        let mut lines = InputLines::new(&self.options.input_name);
        let mut deferred: Vec<DeferredRow> = Vec::new();
        let limit = self.options.limit.filter(|limit| *limit > 0).unwrap_or(u64::MAX);
        let mut out = String::new();
        while lines.count < limit && lines.next(&mut reader)? {
            let row = self.prepare(&lines)?;
            let Some(row) = row else {
                run.without_agent(lines.count);
                continue;
            };
            let task = match row.task_index {
                Some(task) => task,
                None => run.task_of(&lines.text),
            };
            for (place, target) in row.targets.iter().enumerate() {
                let repeats = run.repeats_of(target.as_deref(), row.basis.as_deref(), lines.count);
                for repeat in 0..repeats {
                    let rollout = run.next_rollout(task);
                    let emitted = self.emit(&lines, &row, target.as_deref(), task, rollout, &mut out)?;
                    if repeat == 0 {
                        self.names.check_row(emitted.called(), &out).map_err(|problem| lines.fail(problem))?;
                    }
                    if self.options.interleave {
                        // Also built above, so that an invalid row is found before any row is written.
                        let (offset, line, target) = (lines.offset, lines.count, place as u32);
                        deferred.push(DeferredRow { offset, line, task, rollout, target });
                    } else {
                        each(task, rollout, &emitted, lines.count, &mut out)?;
                    }
                    out.clear();
                    run.wrote(emitted.called(), lines.count);
                }
            }
            if let Some(overridden) = row.overridden {
                run.overridden.insert(overridden);
            }
        }
        let summary = run.finish(lines.count)?;
        // A stable sort keeps the input's order within each round.
        deferred.sort_by_key(|row| row.rollout);
        for row in deferred {
            lines.seek(&mut reader, row.offset)?;
            let prepared = self.prepare(&lines)?.ok_or_else(|| {
                InputError::line(
                    &self.options.input_name,
                    lines.count,
                    "the input changed while it was read; collect again when no program writes to it",
                )
            })?;
            let target = prepared.targets.get(row.target as usize).cloned().flatten();
            let emitted = self.emit(&lines, &prepared, target.as_deref(), row.task, row.rollout, &mut out)?;
            each(row.task, row.rollout, &emitted, row.line, &mut out)?;
        }
        Ok(summary)
    }

    /// Computes the properties that all copies of a row share; `None` if no rule assigns the row to a target.
    fn prepare<'a>(&self, lines: &'a InputLines<'_>) -> Result<Option<PreparedRow<'a>>, InputError> {
        let fail = |problem: String| lines.fail(problem);
        let members = parse_row(lines.row()?).map_err(fail)?;
        let task_source = text_member(&members, TASK_SOURCE)
            .map_err(|()| fail("task_source is not a string; set it to the name of the dataset's server".to_owned()))?;
        let named = agent_name(&members).map_err(fail)?;
        let taskset = taskset(&members);
        let environment_server = self.environment_server(taskset.as_deref()).map_err(fail)?;

        let mut agent = named.clone();
        let mut basis = named.clone().or_else(|| task_source.clone());
        let mut agent_ref = None;
        let mut overridden = None;
        if let Some(server) = &environment_server {
            basis = taskset.clone().or_else(|| task_source.clone()).or_else(|| Some(server.clone()));
        } else {
            let map = &self.options.agent_map;
            let mapped = [&named, &task_source]
                .into_iter()
                .flatten()
                .find_map(|key| map.get(key))
                .or_else(|| map.get(DEFAULT_KEY));
            if let Some(mapped) = mapped {
                overridden = named.clone().filter(|name| name != mapped).map(|name| (name, mapped.clone()));
                agent = Some(mapped.clone());
                agent_ref = Some(agent_reference(mapped));
            }
        }
        let fanned =
            basis.as_ref().filter(|_| environment_server.is_none()).and_then(|basis| self.options.fan_out.get(basis));
        let targets = match (fanned, &agent) {
            _ if environment_server.is_some() => vec![None],
            (Some(agents), _) => agents.iter().cloned().map(Some).collect(),
            (None, Some(agent)) => vec![Some(agent.clone())],
            (None, None) if task_source.is_some() => vec![None],
            (None, None) => return Ok(None),
        };
        let params = self.params(&members, taskset.is_some()).map_err(fail)?;
        let task_index = members.get(TASK_INDEX).map(|raw| {
            // The ledger imposes this bound. It is checked here, before any file of an earlier run is removed.
            let index = raw.parse::<u32>().map(i64::from);
            let bounds = format!("a whole number from 0 to {}", u32::MAX);
            index.map_err(|_| fail(format!("{TASK_INDEX} is {raw}; expected {bounds}, or leave it out")))
        });
        Ok(Some(PreparedRow {
            task_index: task_index.transpose()?,
            members,
            taskset,
            task_source,
            environment_server,
            agent,
            agent_ref,
            basis,
            targets,
            params,
            overridden,
        }))
    }

    fn environment_server(&self, taskset: Option<&str>) -> Result<Option<String>, String> {
        match (taskset, &self.options.routing) {
            (Some(taskset), _) => match self.options.environment_server_routes.get(taskset) {
                Some(server) => Ok(Some(server.clone())),
                None => {
                    Err(format!("no environment server for taskset {taskset:?}; add it to environment_server_routes"))
                }
            },
            (None, Routing::Agent) => Ok(None),
            (None, Routing::Legacy(server)) => Ok(Some(server.clone())),
            (None, Routing::Taskset) => {
                Err("the row has no task_id.taskset and task_input, which environment_routing_mode \
                 taskset requires; use environment_routing_mode agent to mix both kinds"
                    .to_owned())
            }
        }
    }

    /// Returns the row's `responses_create_params` with prompt and overrides, or `None` if they are unchanged.
    fn params(&self, row: &JsonFields<'_>, materialized_task: bool) -> Result<Option<String>, String> {
        let filled = match &self.options.prompt {
            Some(prompt) => Some(prompted(prompt, row)?),
            None => None,
        };
        if materialized_task {
            let refused = if !self.overrides.is_empty() {
                "responses_create_params overrides"
            } else if self.skills_ref.is_some() {
                "run-level skills"
            } else if self.options.add_seed {
                "num_repeats_add_seed"
            } else {
                return Ok(filled);
            };
            return Err(format!("{refused} cannot be applied to a row with task_id and task_input; remove the option"));
        }
        let text = filled.as_deref().or_else(|| row.get(PARAMS)).ok_or_else(|| without_params(row))?;
        let params = object(text, PARAMS)?;
        if self.overrides.is_empty() {
            return Ok(filled);
        }
        let mut edit = params.edit();
        for (key, value) in &self.overrides {
            edit.set(key, value);
        }
        Ok(Some(edit.to_text()))
    }

    /// Appends the line of one copy to `out` and returns its target.
    fn emit(
        &self,
        lines: &InputLines<'_>,
        row: &PreparedRow<'_>,
        target: Option<&str>,
        task: i64,
        rollout: u32,
        out: &mut String,
    ) -> Result<RowTarget, InputError> {
        let fail = |problem: String| lines.fail(problem);
        let (task, rollout_text) = (task.to_string(), rollout.to_string());
        let server = row.environment_server.as_deref().map(json_string);
        let mut agent = row.agent.clone();
        let mut edit = row.members.edit();
        // In the order in which NeMo Gym sets the keys, because the order decides where new keys are inserted.
        if let (Some(_), Some(params)) = (&self.options.prompt, &row.params) {
            edit.set(PARAMS, params);
        }
        if let Some(agent_ref) = &row.agent_ref {
            edit.set(AGENT_REF, agent_ref);
        }
        if let Some(params) = &row.params {
            edit.set(PARAMS, params);
        }
        if let (Some(skills), None) = (&self.skills_ref, &row.taskset) {
            edit.set("skills_ref", skills);
        }
        if row.task_index.is_none() {
            edit.set(TASK_INDEX, &task);
        }
        if let Some(server) = &server {
            edit.set(ENVIRONMENT_SERVER, server);
        }
        let restamped = target.filter(|target| agent.as_deref() != Some(target)).map(agent_reference);
        if let (Some(target), Some(restamped)) = (target, &restamped) {
            agent = Some(target.to_owned());
            edit.set(AGENT_REF, restamped);
        }
        edit.set(ROLLOUT_INDEX, &rollout_text);
        let seeded;
        if self.options.add_seed {
            let params = row.params.as_deref().or_else(|| row.members.get(PARAMS)).unwrap_or("{}");
            seeded = with_seed(params, rollout).map_err(fail)?;
            edit.set(PARAMS, &seeded);
        }
        let resolved;
        if agent.is_none() && row.taskset.is_none() {
            agent = match (&row.environment_server, &row.task_source) {
                (Some(server), _) => self.names.agent_of_environment_server(server),
                (None, Some(source)) => Some(
                    self.names
                        .agent_of_task_source(source)
                        .map_err(|problem| fail(format!("no agent for task_source {source:?}: {problem}")))?,
                ),
                (None, None) => None,
            };
            if let Some(agent) = &agent {
                resolved = agent_reference(agent);
                edit.set(AGENT_REF, &resolved);
            }
        }
        edit.push_to(out);
        Ok(RowTarget { agent, environment_server: row.environment_server.clone() })
    }
}

/// The agent and the environment server that an output row names.
struct RowTarget {
    agent: Option<String>,
    environment_server: Option<String>,
}

impl RowTarget {
    /// Returns the server that the row is sent to; its agent's name stands for the server in front of it.
    fn called(&self) -> &str {
        self.environment_server.as_deref().or(self.agent.as_deref()).unwrap_or_default()
    }

    /// Returns the name that the figures of the row have.
    fn shown(&self) -> &str {
        self.agent.as_deref().or(self.environment_server.as_deref()).unwrap_or_default()
    }
}

/// An input row with all properties except the indices.
struct PreparedRow<'a> {
    members: JsonFields<'a>,
    task_index: Option<i64>,
    taskset: Option<String>,
    task_source: Option<String>,
    environment_server: Option<String>,
    agent: Option<String>,
    /// Set if the agent map replaces the row's agent.
    agent_ref: Option<String>,
    /// The agent or task source that the row names, before the agent map is applied.
    basis: Option<String>,
    targets: Vec<Option<String>>,
    params: Option<String>,
    overridden: Option<(String, String)>,
}

/// An output row that waits for its round: where its input is, and its indices.
struct DeferredRow {
    offset: u64,
    line: u64,
    task: i64,
    rollout: u32,
    target: u32,
}

/// The current line of the input.
struct InputLines<'a> {
    name: &'a str,
    text: Vec<u8>,
    count: u64,
    offset: u64,
    next_offset: u64,
}

impl<'a> InputLines<'a> {
    fn new(name: &'a str) -> Self {
        Self { name, text: Vec::new(), count: 0, offset: 0, next_offset: 0 }
    }

    fn next(&mut self, reader: &mut impl BufRead) -> Result<bool, InputError> {
        self.text.clear();
        let read = reader
            .read_until(b'\n', &mut self.text)
            .map_err(|error| InputError::io(format!("read {}", self.name), error))?;
        self.offset = self.next_offset;
        self.next_offset += read as u64;
        self.count += u64::from(read > 0);
        Ok(read > 0)
    }

    fn seek(&mut self, reader: &mut (impl BufRead + Seek), offset: u64) -> Result<(), InputError> {
        if offset == self.offset && !self.text.is_empty() {
            return Ok(());
        }
        reader
            .seek(SeekFrom::Start(offset))
            .map_err(|error| InputError::io(format!("read {} at byte {offset}", self.name), error))?;
        self.next_offset = offset;
        self.next(reader).map(|_| ())
    }

    fn row(&self) -> Result<&str, InputError> {
        std::str::from_utf8(self.text.trim_ascii())
            .map_err(|error| self.fail(format!("not UTF-8 ({error}); save the file as UTF-8")))
    }

    fn fail(&self, problem: String) -> InputError {
        InputError::line(self.name, self.count, problem)
    }
}

/// State that is accumulated over the rows.
struct MaterializeRun<'a> {
    repeats: &'a Repeats,
    file: &'a str,
    tasks: TaskIndices,
    rollouts: RolloutCounters,
    summary: MaterializeSummary,
    names_seen: BTreeSet<String>,
    overridden: BTreeSet<(String, String)>,
    lines_without_agent: Vec<u64>,
    rows_without_agent: u64,
    names_without_repeats: BTreeSet<String>,
    first_without_repeats: u64,
}

impl<'a> MaterializeRun<'a> {
    fn new<N>(materializer: &'a Materializer<N>) -> Self {
        Self {
            repeats: &materializer.options.repeats,
            file: &materializer.options.input_name,
            tasks: TaskIndices::default(),
            rollouts: RolloutCounters::default(),
            summary: MaterializeSummary::default(),
            names_seen: BTreeSet::new(),
            overridden: BTreeSet::new(),
            lines_without_agent: Vec::new(),
            rows_without_agent: 0,
            names_without_repeats: BTreeSet::new(),
            first_without_repeats: 0,
        }
    }

    fn without_agent(&mut self, line: u64) {
        self.rows_without_agent += 1;
        if self.lines_without_agent.len() < LINES_NAMED_MAX {
            self.lines_without_agent.push(line);
        }
    }

    fn task_of(&mut self, line: &[u8]) -> i64 {
        i64::from(self.tasks.index_of(line))
    }

    fn next_rollout(&mut self, task: i64) -> u32 {
        self.rollouts.next(task)
    }

    /// Returns the number of repeats of a row on a target. The entry of the target takes precedence over the entry of
    /// the row's agent or task source.
    fn repeats_of(&mut self, target: Option<&str>, basis: Option<&str>, line: u64) -> u32 {
        let keys: Vec<&str> = target.into_iter().chain(basis.filter(|basis| Some(*basis) != target)).collect();
        let map = match self.repeats {
            Repeats::Each(repeats) => return *repeats,
            Repeats::PerAgent(map) => map,
        };
        for key in &keys {
            if !self.names_seen.contains(*key) {
                self.names_seen.insert((*key).to_owned());
            }
        }
        let named = keys.iter().filter(|key| **key != DEFAULT_KEY).find_map(|key| map.get(*key));
        if let Some(repeats) = named.or_else(|| map.get(DEFAULT_KEY)) {
            return *repeats;
        }
        if self.names_without_repeats.is_empty() {
            self.first_without_repeats = line;
        }
        self.names_without_repeats.insert(keys.join(" / "));
        0
    }

    fn wrote(&mut self, target: &str, line: u64) {
        self.summary.rows_written += 1;
        match self.summary.targets.get_mut(target) {
            Some(used) => used.rows += 1,
            None => {
                self.summary.targets.insert(target.to_owned(), TargetUse { rows: 1, first_line: line });
            }
        }
    }

    fn finish(mut self, rows_read: u64) -> Result<MaterializeSummary, InputError> {
        let file = self.file.to_owned();
        let known = match self.repeats {
            Repeats::Each(_) => Vec::new(),
            Repeats::PerAgent(map) => map.keys().filter(|key| *key != DEFAULT_KEY).cloned().collect(),
        };
        if self.rows_without_agent > 0 {
            return Err(InputError::NoAgent { file, lines: self.lines_without_agent, count: self.rows_without_agent });
        }
        if !self.names_without_repeats.is_empty() {
            let names = self.names_without_repeats.into_iter().collect();
            return Err(InputError::NoRepeats { file, line: self.first_without_repeats, names, known });
        }
        for (from, to) in self.overridden {
            self.summary
                .warnings
                .push(format!("rows of agent {from:?} go to {to:?}: agent_map overrides their agent_ref"));
        }
        for name in known.into_iter().filter(|name| !self.names_seen.contains(name)) {
            self.summary
                .warnings
                .push(format!("num_repeats has an entry for {name:?}, but no row names it; check the spelling"));
        }
        self.summary.rows_read = rows_read;
        Ok(self.summary)
    }
}

/// Task indices by line: equal lines share one index, numbered by first appearance. Lines are compared by 128-bit
/// digests.
#[derive(Default)]
struct TaskIndices {
    // Sharded, so that a growing table copies one sixteenth of the digests: 24 bytes per digest, at most 59 including
    // free slots.
    shards: [HashMap<[u64; 2], u32>; 16],
    count: u32,
}

impl TaskIndices {
    fn index_of(&mut self, line: &[u8]) -> u32 {
        let digest = line_digest(line);
        let count = &mut self.count;
        *self.shards[(digest[0] & 15) as usize].entry(digest).or_insert_with(|| {
            *count += 1;
            *count - 1
        })
    }
}

/// Returns the digest of a line as Python reads it: `\r\n` equals `\n`, and a last line without a newline differs from the same
/// line with a newline.
fn line_digest(line: &[u8]) -> [u64; 2] {
    let (text, ended) = match line.strip_suffix(b"\n") {
        Some(text) => (text.strip_suffix(b"\r").unwrap_or(text), true),
        None => (line, false),
    };
    [0_u8, 1].map(|half| {
        let mut hasher = DefaultHasher::new();
        hasher.write_u8(half);
        hasher.write_u8(u8::from(ended));
        hasher.write(text);
        hasher.finish()
    })
}

/// The next rollout index of each task: a list for dense task indices, and a map for large indices that rows specify.
#[derive(Default)]
struct RolloutCounters {
    dense: Vec<u32>,
    sparse: HashMap<i64, u32>,
    requests: usize,
}

impl RolloutCounters {
    fn next(&mut self, task: i64) -> u32 {
        self.requests += 1;
        let place = usize::try_from(task).ok().filter(|_| !self.sparse.contains_key(&task));
        let counter = match place {
            // Proportional to the number of requests, so the list takes only a few bytes per row.
            Some(place) if place < self.dense.len() || place <= self.requests * 2 + 1_024 => {
                if place >= self.dense.len() {
                    self.dense.resize(place + 1, 0);
                }
                &mut self.dense[place]
            }
            _ => self.sparse.entry(task).or_insert(0),
        };
        *counter += 1;
        *counter - 1
    }
}

fn agent_reference(agent: &str) -> String {
    format!(r#"{{"name":{}}}"#, json_string(agent))
}

/// Returns `task_id.taskset` of a row that is a materialized task: `task_id` is an object and `task_input` is present.
fn taskset(row: &JsonFields<'_>) -> Option<String> {
    let task_id = JsonFields::parse(row.get("task_id")?).ok()?;
    row.get("task_input")?;
    text_member(&task_id, "taskset").ok().flatten().filter(|taskset| !taskset.is_empty())
}

/// Returns the problem of a row without `responses_create_params`.
fn without_params(row: &JsonFields<'_>) -> String {
    let keys = || row.iter().map(|(key, _)| key);
    if let Some(near) = nearest_name(PARAMS, keys()) {
        return format!("{PARAMS} is missing; rename `{near}`, which is misspelled");
    }
    let input = ["input", "messages", "prompt", "question"].into_iter().find(|usual| keys().any(|key| key == *usual));
    match input {
        Some(key) => format!("{PARAMS} is missing; move the value of `{key}` into {{\"{PARAMS}\": {{\"input\": …}}}}"),
        None => format!("{PARAMS} is missing; give the row at least {{\"{PARAMS}\": {{\"input\": …}}}}"),
    }
}

fn object<'a>(text: &'a str, key: &str) -> Result<JsonFields<'a>, String> {
    JsonFields::parse(text).map_err(|_| format!("{key} is not an object; write it as {{…}}"))
}

/// Returns `responses_create_params` with the template's messages as `input`.
fn prompted(prompt: &PromptTemplate, row: &JsonFields<'_>) -> Result<String, String> {
    let params = object(row.get(PARAMS).unwrap_or("{}"), PARAMS)?;
    if params.get("input").is_some_and(is_truthy) {
        return Err("the row has responses_create_params.input although a prompt template is set; remove one of them"
            .to_owned());
    }
    let input = prompt.fill(row).map_err(|error| error.to_string())?;
    Ok(params.with("input", &input))
}

/// Returns `responses_create_params` with the seed in `metadata.extra_body`, a string that holds JSON, which vLLM
/// servers read.
fn with_seed(params: &str, seed: u32) -> Result<String, String> {
    let params = object(params, PARAMS)?;
    let metadata = params.get("metadata").filter(|raw| is_truthy(raw)).unwrap_or("{}");
    let metadata = object(metadata, "responses_create_params.metadata")?;
    let not_text = "responses_create_params.metadata.extra_body must be a string that holds a JSON object";
    let body = match metadata.get("extra_body") {
        None => "{}".to_owned(),
        Some(raw) => serde_json::from_str::<String>(raw).map_err(|_| not_text)?,
    };
    let Ok(PythonValue::Dict(extra)) = PythonValue::parse(&body) else { return Err(not_text.to_owned()) };
    let seed = seed.to_string();
    let kept = extra.iter().map(|(key, value)| (key, if key == "seed" { &seed } else { value }));
    let added = extra.get("seed").is_none().then_some(("seed", &*seed));
    let dumped = dumps(kept.chain(added)).map_err(|_| not_text)?;
    let metadata = metadata.with("extra_body", &json_string(&dumped));
    Ok(params.with("metadata", &metadata))
}

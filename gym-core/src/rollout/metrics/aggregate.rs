//! The aggregation behind `/aggregate_metrics`: per agent, per task, per repeat, as NeMo Gym 0.7.0 computes it.
//!
//! Rows are read in passes and not kept. The first pass finds the columns. Each further pass fills as many columns as
//! the memory bound allows. The last pass computes the statistics of one task after another.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::Write;

use serde::ser::{Error as _, SerializeMap, SerializeSeq, Serializer};
use serde_json::{Map, Value};

use super::MetricsError;
use super::perf::PerfCounts;
use super::rows::{BodyRows, ROLLOUT_INDEX, Rows, TASK_INDEX, for_each_metric, is_masked, rollout_info};
use super::series::{Series, confidence_interval_95, number};
use crate::message::Response;

/// Metadata key of the response to `/aggregate_metrics` of a server that computes the standard statistics. A collector can then compute
/// them itself, from rollouts of any number. Collectors in other languages ignore it. A server that changes the reply of another one does
/// not forward it.
pub const STATISTICS_METADATA: &str = "x-gym-statistics";

/// The value of [`STATISTICS_METADATA`]: the version of [`Aggregation`]. It changes with the statistics.
pub const STANDARD_STATISTICS: &str = "standard-1";

/// The memory bound of the aggregation. Default: 64 MiB of column values.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct AggregateOptions {
    /// Maximum bytes of column values in memory; at least one column is always held. A smaller bound causes more
    /// passes.
    pub column_bytes_max: usize,
}

impl Default for AggregateOptions {
    /// 64 MiB: eight columns of a million rollouts in one pass.
    fn default() -> Self {
        Self { column_bytes_max: 64 << 20 }
    }
}

/// All statistics except those of each task, which [`Aggregation::for_each_task`] computes one by one.
#[derive(Clone, Debug, Default)]
pub struct Aggregation {
    /// Statistics over all rollouts, with those across repeats.
    pub agent_metrics: Map<String, Value>,
    /// The headline metrics: all means, and the coverage if some samples were masked.
    pub key_metrics: Map<String, Value>,
    /// Statistics of each repeat over the tasks.
    pub repeat_level_metrics: Vec<Map<String, Value>>,
    /// Tokens, turns and latency; absent when no rollout carried `ng_perf`.
    pub perf_summary: Option<Map<String, Value>>,
    columns: Columns,
    scored: usize,
    coverage: Map<String, Value>,
    per_task: BTreeMap<i64, Map<String, Value>>,
    incomplete: BTreeMap<i64, TaskCompletion>,
}

/// How many rollouts of a task were requested, and how many are recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TaskCompletion {
    /// Requested rollouts.
    pub expected: u64,
    /// Recorded rollouts, at most `expected`.
    pub recorded: u64,
}

impl TaskCompletion {
    /// Returns the keys of NeMo Gym for the completion of a task, with their values.
    #[must_use]
    pub fn metrics(self) -> [(&'static str, Value); 3] {
        let Self { expected, recorded } = self;
        let share = if expected == 0 { 1.0 } else { recorded as f64 / expected as f64 };
        [
            ("expected_num_rollouts", expected.into()),
            ("missing_num_rollouts", expected.saturating_sub(recorded).into()),
            ("reward_profile_completion_pct", (100.0 * share).into()),
        ]
    }
}

/// The metric columns, in the order of their first appearance in the rows.
#[derive(Clone, Debug, Default)]
struct Columns {
    names: Vec<String>,
    by_name: HashMap<String, usize>,
    /// Whether every scored row has an integer in every column; then minimum and maximum are written as integers.
    whole: bool,
}

/// Mean, max, min, median and std, in the order of the output.
type Description = [Option<f64>; 5];
const DESCRIPTION: [&str; 5] = ["mean", "max", "min", "median", "std"];

fn describe(series: &Series) -> Description {
    [series.mean(), series.max(), series.min(), series.median(), series.sample_std()]
}

impl Columns {
    /// Writes the descriptions of all columns, statistic by statistic. `rows` is the number of rows. If no column has a
    /// standard deviation, a column without missing values gets 0.
    fn write(&self, into: &mut Map<String, Value>, described: &[(Description, usize)], rows: usize) {
        let no_deviation = described.iter().all(|(description, _)| description[4].is_none());
        for (stat, stat_name) in DESCRIPTION.into_iter().enumerate() {
            for (name, (description, count)) in self.names.iter().zip(described) {
                let value = match description[stat] {
                    None if stat == 4 && no_deviation && *count == rows => Some(0.0),
                    value => value,
                };
                if let Some(value) = value {
                    let whole = self.whole && (stat == 1 || stat == 2);
                    into.insert(format!("{stat_name}/{name}"), number(value, whole));
                }
            }
        }
    }
}

impl Aggregation {
    /// Computes everything but the per-task statistics.
    pub fn compute(rows: &mut dyn Rows, options: AggregateOptions) -> Result<Self, MetricsError> {
        if rows.count() == 0 {
            return Ok(Self::default());
        }
        let first = FirstPass::over(rows)?;
        let perf_summary = first.perf.summary(rows)?;
        let coverage = first.coverage();
        let scored = first.keys.len();
        if scored == 0 {
            return Ok(Self {
                agent_metrics: coverage.clone(),
                key_metrics: coverage,
                perf_summary,
                ..Self::default()
            });
        }

        let repeats = Repeats::of(&first.keys);
        let mut described = vec![([None; 5], 0); first.columns.names.len()];
        let mut by_repeat: BTreeMap<&str, Vec<RepeatDescription>> = BTreeMap::new();
        let per_pass = (options.column_bytes_max / (scored * size_of::<f64>())).max(1);
        for start in (0..first.columns.names.len()).step_by(per_pass) {
            let end = (start + per_pass).min(first.columns.names.len());
            let batch = fill(rows, &first.columns, start..end, scored)?;
            for (offset, values) in batch.into_iter().enumerate() {
                let name = first.columns.names[start + offset].as_str();
                if repeats.rollouts.len() > 1 {
                    by_repeat.insert(name, repeats.describe(&values));
                }
                let series = Series::new(values);
                described[start + offset] = (describe(&series), series.count());
            }
        }

        let mut agent_metrics = Map::new();
        first.columns.write(&mut agent_metrics, &described, scored);
        let repeat_level_metrics = repeats.write(&by_repeat);
        across_repeats(&repeat_level_metrics, &mut agent_metrics);
        extend(&mut agent_metrics, &coverage);
        agent_metrics.insert("num_repeats".into(), first.repeats.into());
        let key_metrics = headline(&agent_metrics, &coverage);
        Ok(Self {
            agent_metrics,
            key_metrics,
            repeat_level_metrics,
            perf_summary,
            columns: first.columns,
            scored,
            coverage,
            per_task: BTreeMap::new(),
            incomplete: BTreeMap::new(),
        })
    }

    /// Sets the tasks, by index, of which requested rollouts are missing: the rows do not tell. By default, all tasks are complete.
    pub fn set_incomplete(&mut self, tasks: BTreeMap<i64, TaskCompletion>) {
        self.incomplete = tasks;
    }

    /// Adds a benchmark's own metrics: `overall` to the agent's, `per_task` to those of the tasks with these indices.
    ///
    /// Replaces metrics of the same name, and resets the headline metrics to all means; set
    /// [`Aggregation::key_metrics`] afterwards to choose others. Adds nothing if no rollout was scored.
    pub fn add_metrics(&mut self, overall: &Map<String, Value>, per_task: BTreeMap<i64, Map<String, Value>>) {
        if self.scored == 0 {
            return;
        }
        let repeats = self.agent_metrics.shift_remove("num_repeats");
        extend(&mut self.agent_metrics, overall);
        if let Some(repeats) = repeats {
            self.agent_metrics.insert("num_repeats".into(), repeats);
        }
        self.key_metrics = headline(&self.agent_metrics, &self.coverage);
        self.per_task = per_task;
    }

    /// Calls `each` with the statistics of one task after another, in the order of the task index. `rows` must be the
    /// rows that [`Aggregation::compute`] read.
    pub fn for_each_task(
        &self,
        rows: &mut dyn Rows,
        mut each: impl FnMut(Map<String, Value>) -> Result<(), MetricsError>,
    ) -> Result<(), MetricsError> {
        if self.scored == 0 {
            return Ok(());
        }
        let mut task: Option<TaskRows> = None;
        for index in 0..rows.count() {
            let key = rows.key(index);
            if task.as_ref().is_some_and(|task| task.index != key.0)
                && let Some(done) = task.take()
            {
                each(done.finish(self))?;
            }
            rows.visit(index, &mut |row| {
                if !is_masked(row) {
                    let task = task.get_or_insert_with(|| TaskRows::new(key.0, self.columns.names.len()));
                    for_each_metric(row, |name, number| {
                        if let Some(column) = self.columns.by_name.get(name) {
                            task.values[*column].push(number.value);
                        }
                    });
                    task.infos.push(rollout_info(row, key).into());
                }
                Ok(())
            })?;
        }
        match task {
            Some(done) => each(done.finish(self)),
            None => Ok(()),
        }
    }

    /// Writes the reply of `/aggregate_metrics`.
    pub fn write_reply(&self, rows: &mut dyn Rows, writer: impl Write) -> Result<(), MetricsError> {
        let mut serializer = serde_json::Serializer::new(writer);
        let mut failure = None;
        let written = (|| {
            let mut reply = serializer.serialize_map(Some(5))?;
            reply.serialize_entry("group_level_metrics", &Tasks::new(self, rows, &mut failure))?;
            reply.serialize_entry("agent_metrics", &self.agent_metrics)?;
            reply.serialize_entry("key_metrics", &self.key_metrics)?;
            reply.serialize_entry("perf_summary", &self.perf_summary)?;
            reply.serialize_entry("repeat_level_metrics", &self.repeat_level_metrics)?;
            SerializeMap::end(reply)
        })();
        finish(written, failure)
    }

    /// Writes the members of one entry of an aggregate metrics file, in the file's order, into an open map.
    ///
    /// `failure` receives the reason if reading the rows fails underneath the serializer.
    pub fn write_entry<S: SerializeMap>(
        &self,
        rows: &mut dyn Rows,
        map: &mut S,
        failure: &mut Option<MetricsError>,
    ) -> Result<(), S::Error> {
        map.serialize_entry("agent_metrics", &self.agent_metrics)?;
        map.serialize_entry("key_metrics", &self.key_metrics)?;
        map.serialize_entry("group_level_metrics", &Tasks::new(self, rows, failure))?;
        map.serialize_entry("repeat_level_metrics", &self.repeat_level_metrics)?;
        if let Some(perf) = &self.perf_summary {
            map.serialize_entry("perf_summary", perf)?;
        }
        Ok(())
    }
}

/// Computes the reply to a `POST /aggregate_metrics` body, of at most this many bytes. The bound on the body is not
/// enough, because the statistics of a task can be longer than its rows.
pub fn aggregate_metrics(body: &[u8], reply_bytes_max: usize) -> Result<Vec<u8>, MetricsError> {
    let mut rows = BodyRows::parse(body)?;
    let aggregation = Aggregation::compute(&mut rows, AggregateOptions::default())?;
    let mut reply = Bounded { bytes: Vec::new(), bytes_max: reply_bytes_max, full: false };
    match aggregation.write_reply(&mut rows, &mut reply) {
        Err(_) if reply.full => Err(MetricsError::ReplyTooLarge { bytes_max: reply_bytes_max }),
        written => written.map(|()| reply.bytes),
    }
}

/// Returns the response with a reply of [`aggregate_metrics`].
#[must_use]
pub fn standard_response(reply: Vec<u8>) -> Response {
    let mut response = Response::json(reply);
    response.metadata.push(STATISTICS_METADATA, STANDARD_STATISTICS);
    response
}

/// A buffer in memory with a bound.
struct Bounded {
    bytes: Vec<u8>,
    bytes_max: usize,
    /// Whether a write exceeded the bound.
    full: bool,
}

impl Write for Bounded {
    fn write(&mut self, part: &[u8]) -> std::io::Result<usize> {
        self.full |= part.len() > self.bytes_max - self.bytes.len();
        if self.full {
            return Err(std::io::ErrorKind::FileTooLarge.into());
        }
        self.bytes.extend_from_slice(part);
        Ok(part.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn finish(written: Result<(), serde_json::Error>, failure: Option<MetricsError>) -> Result<(), MetricsError> {
    match (failure, written) {
        (Some(failure), _) => Err(failure),
        (None, Ok(())) => Ok(()),
        (None, Err(error)) => {
            Err(MetricsError::Io { doing: "write aggregate metrics".to_owned(), source: error.into() })
        }
    }
}

/// The tasks as a sequence that is computed while it is written. serde passes a shared reference and reads the sequence
/// once.
struct Tasks<'a> {
    aggregation: &'a Aggregation,
    source: std::cell::RefCell<(&'a mut dyn Rows, &'a mut Option<MetricsError>)>,
}

impl<'a> Tasks<'a> {
    fn new(aggregation: &'a Aggregation, rows: &'a mut dyn Rows, failure: &'a mut Option<MetricsError>) -> Self {
        Self { aggregation, source: std::cell::RefCell::new((rows, failure)) }
    }
}

impl serde::Serialize for Tasks<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut source = self.source.borrow_mut();
        let (rows, failure) = &mut *source;
        let mut sequence = serializer.serialize_seq(None)?;
        let mut broken = None;
        let read = self.aggregation.for_each_task(*rows, |task| {
            sequence.serialize_element(&task).map_err(|error| {
                broken = Some(error);
                MetricsError::Request { problem: "the writer failed".to_owned() }
            })
        });
        match (broken, read) {
            (Some(error), _) => Err(error),
            (None, Ok(())) => sequence.end(),
            (None, Err(error)) => {
                let message = error.to_string();
                **failure = Some(error);
                Err(S::Error::custom(message))
            }
        }
    }
}

/// The result of the first pass: the columns, the masked rows and the repeats.
struct FirstPass {
    columns: Columns,
    /// (task, rollout) of the scored rows.
    keys: Vec<(i64, i64)>,
    masked: usize,
    tasks: usize,
    repeats: usize,
    perf: PerfCounts,
}

impl FirstPass {
    fn over(rows: &mut dyn Rows) -> Result<Self, MetricsError> {
        let mut columns = Columns { whole: true, ..Columns::default() };
        let mut present: Vec<usize> = Vec::new();
        // With the exact capacity, so that growing does not double it.
        let mut keys: Vec<(i64, i64)> = Vec::with_capacity(rows.count());
        let mut perf = PerfCounts::default();
        let (mut masked, mut tasks) = (0, 0);
        let mut repeats = BTreeSet::new();
        let mut previous: Option<((i64, i64), bool)> = None;
        for index in 0..rows.count() {
            let key = rows.key(index);
            if previous.is_none_or(|(previous, _)| previous.0 != key.0) {
                tasks += 1;
            }
            repeats.insert(key.1);
            let mut hidden = false;
            rows.visit(index, &mut |row| {
                perf.add(row);
                hidden = is_masked(row);
                if !hidden {
                    for_each_metric(row, |name, number| {
                        columns.whole &= number.integer;
                        match columns.by_name.get(name) {
                            Some(column) => present[*column] += 1,
                            None => {
                                columns.by_name.insert(name.to_owned(), columns.names.len());
                                columns.names.push(name.to_owned());
                                present.push(1);
                            }
                        }
                    });
                }
                Ok(())
            })?;
            if previous.is_some_and(|(previous, other_hidden)| previous == key && !(hidden && other_hidden)) {
                return Err(MetricsError::Duplicate { task: key.0, rollout: key.1 });
            }
            previous = Some((key, hidden));
            if hidden {
                masked += 1;
            } else {
                keys.push(key);
            }
        }
        columns.whole &= present.iter().all(|count| *count == keys.len());
        Ok(Self { columns, keys, masked, tasks, repeats: repeats.len(), perf })
    }

    /// The share of the rollouts that the statistics cover; empty if no row was masked.
    fn coverage(&self) -> Map<String, Value> {
        let mut coverage = Map::new();
        if self.masked > 0 {
            let measured_tasks = tasks_in(&self.keys);
            coverage.insert("coverage/measured_rollouts".into(), self.keys.len().into());
            coverage.insert("coverage/masked_rollouts".into(), self.masked.into());
            coverage.insert("coverage/measured_tasks".into(), measured_tasks.into());
            coverage.insert("coverage/fully_masked_tasks".into(), (self.tasks - measured_tasks).into());
        }
        coverage
    }
}

/// The headline metrics by default: all means.
fn headline(agent_metrics: &Map<String, Value>, coverage: &Map<String, Value>) -> Map<String, Value> {
    let mut headline: Map<String, Value> = agent_metrics
        .iter()
        .filter(|(key, _)| key.starts_with("mean/"))
        .map(|(key, value)| (key.clone(), value.clone()))
        .collect();
    extend(&mut headline, coverage);
    headline
}

fn tasks_in(sorted_keys: &[(i64, i64)]) -> usize {
    sorted_keys.chunk_by(|left, right| left.0 == right.0).count()
}

fn extend(into: &mut Map<String, Value>, from: &Map<String, Value>) {
    into.extend(from.iter().map(|(key, value)| (key.clone(), value.clone())));
}

/// Reads the columns in `range`: one value for each scored row, NaN if the row has none.
fn fill(
    rows: &mut dyn Rows,
    columns: &Columns,
    range: std::ops::Range<usize>,
    scored: usize,
) -> Result<Vec<Vec<f64>>, MetricsError> {
    let mut batch = vec![vec![f64::NAN; scored]; range.len()];
    let mut place = 0;
    for index in 0..rows.count() {
        rows.visit(index, &mut |row| {
            if !is_masked(row) {
                for_each_metric(row, |name, number| {
                    if let Some(column) = columns.by_name.get(name).filter(|column| range.contains(column)) {
                        batch[column - range.start][place] = number.value;
                    }
                });
                place += 1;
            }
            Ok(())
        })?;
    }
    Ok(batch)
}

/// The rows of one task, kept until the next task begins.
struct TaskRows {
    index: i64,
    values: Vec<Vec<f64>>,
    infos: Vec<Value>,
}

impl TaskRows {
    fn new(index: i64, columns: usize) -> Self {
        Self { index, values: vec![Vec::new(); columns], infos: Vec::new() }
    }

    fn finish(self, aggregation: &Aggregation) -> Map<String, Value> {
        let rollouts = self.infos.len();
        let described: Vec<_> = self
            .values
            .into_iter()
            .map(|values| {
                let series = Series::new(values);
                (describe(&series), series.count())
            })
            .collect();
        let mut metrics = Map::new();
        metrics.insert(TASK_INDEX.into(), self.index.into());
        aggregation.columns.write(&mut metrics, &described, rollouts);
        // NeMo Gym's aggregation shows a synthetic row here.
        metrics.insert("sample".into(), serde_json::json!({"agent_ref": {"name": "agent"}}));
        metrics.insert("num_rollouts".into(), rollouts.into());
        let complete = TaskCompletion { expected: rollouts as u64, recorded: rollouts as u64 };
        let completion = aggregation.incomplete.get(&self.index).copied().unwrap_or(complete);
        metrics.extend(completion.metrics().map(|(key, value)| (key.to_owned(), value)));
        metrics.insert("rollout_infos".into(), self.infos.into());
        if let Some(own) = aggregation.per_task.get(&self.index) {
            extend(&mut metrics, own);
        }
        metrics
    }
}

/// The repeat of each scored row.
struct Repeats {
    /// The rollout indices, sorted.
    rollouts: Vec<i64>,
    /// For each scored row, its index in `rollouts`.
    of_row: Vec<u32>,
    tasks: usize,
}

/// The statistics of one column in one repeat, in the order of the output.
type RepeatDescription = Vec<(&'static str, f64)>;

fn describe_repeat(series: &Series) -> RepeatDescription {
    let Some(mean) = series.mean() else { return Vec::new() };
    let std = series.sample_std().unwrap_or(0.0);
    let sem = std / (series.count() as f64).sqrt();
    let interval = confidence_interval_95(mean, sem, series.count());
    [
        ("mean", Some(mean)),
        ("median", series.median()),
        ("std", Some(std)),
        ("sem", Some(sem)),
        ("min", series.min()),
        ("max", series.max()),
        ("p25", series.quantile(0.25)),
        ("p75", series.quantile(0.75)),
        ("ci_low_95", interval.map(|(low, _)| low)),
        ("ci_high_95", interval.map(|(_, high)| high)),
    ]
    .into_iter()
    .filter_map(|(stat, value)| value.map(|value| (stat, value)))
    .collect()
}

impl Repeats {
    fn of(keys: &[(i64, i64)]) -> Self {
        let rollouts: Vec<i64> =
            keys.iter().map(|(_, rollout)| *rollout).collect::<BTreeSet<_>>().into_iter().collect();
        let of_row = keys
            .iter()
            .map(|(_, rollout)| rollouts.binary_search(rollout).expect("rollouts holds each key's rollout") as u32)
            .collect();
        Self { rollouts, of_row, tasks: tasks_in(keys) }
    }

    /// One column's statistics in each repeat.
    fn describe(&self, values: &[f64]) -> Vec<RepeatDescription> {
        let mut split: Vec<Vec<f64>> = vec![Vec::new(); self.rollouts.len()];
        for (value, repeat) in values.iter().zip(&self.of_row) {
            if !value.is_nan() {
                split[*repeat as usize].push(*value);
            }
        }
        split.into_iter().map(|values| describe_repeat(&Series::new(values))).collect()
    }

    /// The statistics of the repeats, with the columns sorted by name; empty for a single repeat.
    fn write(&self, columns: &BTreeMap<&str, Vec<RepeatDescription>>) -> Vec<Map<String, Value>> {
        if self.rollouts.len() < 2 {
            return Vec::new();
        }
        let mut samples = vec![0_usize; self.rollouts.len()];
        for repeat in &self.of_row {
            samples[*repeat as usize] += 1;
        }
        let entry = |(repeat, rollout): (usize, &i64)| {
            let mut entry = Map::new();
            entry.insert(ROLLOUT_INDEX.into(), (*rollout).into());
            entry.insert("sample_count".into(), samples[repeat].into());
            entry.insert("missing_count".into(), (self.tasks - samples[repeat]).into());
            for (name, by_repeat) in columns {
                for (stat, value) in &by_repeat[repeat] {
                    entry.insert(format!("{stat}/{name}"), (*value).into());
                }
            }
            entry
        };
        self.rollouts.iter().enumerate().map(entry).collect()
    }
}

/// Adds a summary of each repeat's estimates across the repeats to the agent's metrics.
fn across_repeats(repeats: &[Map<String, Value>], into: &mut Map<String, Value>) {
    let mut columns: Vec<(&str, Vec<f64>)> = Vec::new();
    let mut by_name: HashMap<&str, usize> = HashMap::new();
    for (name, value) in repeats.iter().flatten() {
        if !is_primary_metric(name) {
            continue;
        }
        if let Some(value) = value.as_f64() {
            let place = *by_name.entry(name).or_insert_with(|| {
                columns.push((name, Vec::new()));
                columns.len() - 1
            });
            columns[place].1.push(value);
        }
    }
    for (name, values) in columns {
        let series = Series::new(values);
        let Some(mean) = series.mean() else { continue };
        let std = series.sample_std().unwrap_or(0.0);
        let error = std / (series.count() as f64).sqrt();
        for (stat, value) in [
            ("mean", Some(mean)),
            ("median", series.median()),
            ("std", Some(std)),
            ("min", series.min()),
            ("max", series.max()),
            ("se", Some(error)),
        ] {
            into.insert(format!("{stat}_across_repeats/{name}"), value.into());
        }
        if let Some((low, high)) = confidence_interval_95(mean, error, series.count()) {
            into.insert(format!("ci_low_95_across_repeats/{name}"), low.into());
            into.insert(format!("ci_high_95_across_repeats/{name}"), high.into());
        }
    }
}

/// Returns `true` if a metric is a point estimate, and not a summary, an uncertainty or a count.
fn is_primary_metric(name: &str) -> bool {
    const NAMES: [&str; 7] = [
        "_ng_task_index",
        "_ng_rollout_index",
        "_ng_attempt_index",
        "sample_count",
        "missing_count",
        "num_repeats",
        "token_usage_version",
    ];
    const PREFIXES: [&str; 11] =
        ["max/", "min/", "median/", "std/", "sem/", "se/", "p25/", "p75/", "ci_low_95/", "ci_high_95/", "histogram/"];
    const SUFFIXES: [&str; 19] = [
        "/max",
        "/min",
        "/median",
        "/p5",
        "/p25",
        "/p75",
        "/p95",
        "/ci_low_95",
        "/ci_high_95",
        "/ci_lower",
        "/ci_upper",
        "_ci_lower",
        "_ci_upper",
        "_ci95_lower",
        "_ci95_upper",
        "/_ng_attempt_index",
        "/std_dev_across_runs",
        "/std_err_across_runs",
        "/avg_sample_std_dev",
    ];
    !NAMES.contains(&name)
        && !PREFIXES.iter().any(|prefix| name.starts_with(prefix))
        && !SUFFIXES.iter().any(|suffix| name.ends_with(suffix))
        && !name.contains("_across_repeats/")
}

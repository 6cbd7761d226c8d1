//! Compares the rows that a resumed collection requests with the rows that were recorded.
//!
//! The materialized inputs file identifies a collection: its rows contain all that the input, the agents, the overrides, the prompt
//! and the seeds decide. A resumed collection materializes its rows again. New rows are added; a row that differs or is
//! missing is an error, because the results of both would be mixed in one file.

pub(super) mod offsets;
pub(super) mod settings;

use std::fmt::Write as _;
use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::path::Path;

use bytes::Bytes;
use gym_core::message::JsonFields;
use gym_core::rollout::metrics::{ROLLOUT_INDEX, TASK_INDEX};
use gym_core::{Error, Result};
use serde_json::value::RawValue;

use crate::collect::input::InputError;
use crate::collect::input::rows::{RowKey, materialized_row, parse_row};

/// Bytes that one read transfers.
const BUFFER_BYTES: usize = 128 << 10;
/// Differing fields that are described; the rest is counted.
const FIELDS_MAX: usize = 5;
/// Depth of nested values up to which a difference is located.
const DEPTH_MAX: usize = 32;
/// Characters of a value that an error shows.
const SHOWN_CHARS: usize = 60;
/// Numbers up to this length are compared by value, because a double represents them exactly enough.
const NUMBER_CHARS_MAX: usize = 16;

/// Returns `true` if the requested rows extend or reorder the recorded ones, and `false` if both files have the same text.
///
/// # Errors
/// `InvalidArgument`, with the first row of each difference, if a recorded row is not requested or differs. The errors of reading.
pub(super) fn compare(recorded: &Path, requested: &Path) -> Result<bool> {
    let (mut was, mut is) = (Lines::open(recorded)?, Lines::open(requested)?);
    loop {
        match (was.next()?, is.next()?) {
            // Added rows usually follow the recorded ones.
            (false, more) => return Ok(more),
            (true, true) if was.text() == is.text() => {}
            (true, _) => break,
        }
    }
    let index = RequestedRows::read(&mut is)?;
    let mut differences = Differences::default();
    loop {
        let row = materialized_row(&Bytes::copy_from_slice(was.text()), &was.name, was.line);
        let row = row.map_err(|error| invalid(&error))?;
        match index.offset(row.key) {
            None if index.has_task(row.key) => differences.repeats.add(row.key, was.line),
            None => differences.tasks.add(row.key, was.line),
            Some(offset) => {
                is.seek(offset)?;
                is.next()?;
                if was.text() != is.text() {
                    let text = |text| std::str::from_utf8(text).unwrap_or_default();
                    let mut path = String::new();
                    let at = (row.key, was.line);
                    differing(&mut path, 0, Some(text(was.text())), Some(text(is.text())), &mut |path, was, is| {
                        differences.field(path, was, is, at);
                    });
                }
            }
        }
        if !was.next()? {
            break;
        }
    }
    differences.into_result(recorded).map(|()| true)
}

/// The lines of a file, with their offsets.
struct Lines {
    reader: BufReader<File>,
    name: String,
    text: Vec<u8>,
    line: u64,
    offset: u64,
    next_offset: u64,
}

impl Lines {
    fn open(path: &Path) -> Result<Self> {
        let name = path.display().to_string();
        let file = File::open(path).map_err(|error| {
            Error::invalid("the file cannot be opened").about(format!("read {name}")).caused_by(error)
        })?;
        let reader = BufReader::with_capacity(BUFFER_BYTES, file);
        Ok(Self { reader, name, text: Vec::new(), line: 0, offset: 0, next_offset: 0 })
    }

    fn next(&mut self) -> Result<bool> {
        self.text.clear();
        let read = self.reader.read_until(b'\n', &mut self.text).map_err(|error| self.failed(error))?;
        self.offset = self.next_offset;
        self.next_offset += read as u64;
        self.line += u64::from(read > 0);
        Ok(read > 0)
    }

    /// Moves to a line; [`Lines::next`] then reads it. The line numbers are no longer valid.
    fn seek(&mut self, offset: u64) -> Result<()> {
        // Relative, so that a short way keeps the buffer.
        let way = offset.wrapping_sub(self.next_offset).cast_signed();
        self.reader.seek_relative(way).map_err(|error| self.failed(error))?;
        self.next_offset = offset;
        Ok(())
    }

    fn text(&self) -> &[u8] {
        self.text.trim_ascii_end()
    }

    fn failed(&self, error: std::io::Error) -> Error {
        Error::internal("the read failed").about(format!("read {}", self.name)).caused_by(error)
    }
}

/// The offsets of the requested rows by task and repeat: 16 bytes for each row.
struct RequestedRows(Vec<(u32, u32, u64)>);

impl RequestedRows {
    fn read(lines: &mut Lines) -> Result<Self> {
        lines.seek(0)?;
        let mut rows = Vec::new();
        while lines.next()? {
            let fail = |problem: String| Error::internal(format!("{}: {problem}", lines.name));
            let row = std::str::from_utf8(lines.text()).map_err(|error| fail(error.to_string()))?;
            let row = parse_row(row).map_err(fail)?;
            let index = |key: &str| row.get(key).and_then(|raw| raw.parse().ok());
            let (Some(task), Some(rollout)) = (index(TASK_INDEX), index(ROLLOUT_INDEX)) else {
                return Err(fail("a row without its index".to_owned()));
            };
            rows.push((task, rollout, lines.offset));
        }
        rows.sort_unstable();
        Ok(Self(rows))
    }

    fn offset(&self, key: RowKey) -> Option<u64> {
        let (task, rollout) = (u32::try_from(key.task_index).ok()?, u32::try_from(key.rollout_index).ok()?);
        let at = self.0.binary_search_by_key(&(task, rollout), |row| (row.0, row.1)).ok()?;
        Some(self.0[at].2)
    }

    fn has_task(&self, key: RowKey) -> bool {
        u32::try_from(key.task_index).is_ok_and(|task| self.0.binary_search_by_key(&task, |row| row.0).is_ok())
    }
}

/// Receives the path of a value that differs, and both values.
type EachDifference<'a> = dyn FnMut(&str, Option<&str>, Option<&str>) + 'a;

/// Calls `each` with the path of each value that differs, and with both values.
fn differing(path: &mut String, depth: usize, was: Option<&str>, is: Option<&str>, each: &mut EachDifference<'_>) {
    let (Some(old), Some(new)) = (was, is) else {
        if was != is {
            each(path, was, is);
        }
        return;
    };
    if old == new {
        return;
    }
    let below = path.len();
    if depth < DEPTH_MAX
        && let (Ok(old), Ok(new)) = (JsonFields::parse(old), JsonFields::parse(new))
    {
        let added = new.iter().filter(|(key, _)| old.get(key).is_none()).map(|(key, _)| key);
        for key in old.iter().map(|(key, _)| key).chain(added) {
            if below > 0 {
                path.push('.');
            }
            path.push_str(key);
            differing(path, depth + 1, old.get(key), new.get(key), each);
            path.truncate(below);
        }
        return;
    }
    let items = |raw| serde_json::from_str::<Vec<&RawValue>>(raw);
    if depth < DEPTH_MAX
        && let (Ok(old), Ok(new)) = (items(old), items(new))
        && old.len() == new.len()
    {
        for (at, (old, new)) in old.into_iter().zip(new).enumerate() {
            // Writing to a string cannot fail.
            let _ = write!(path, "[{at}]");
            differing(path, depth + 1, Some(old.get()), Some(new.get()), each);
            path.truncate(below);
        }
        return;
    }
    if !same_scalar(old, new) {
        each(path, was, is);
    }
}

/// Returns `true` if two texts are the same string or number. NeMo Gym writes some of them differently.
fn same_scalar(old: &str, new: &str) -> bool {
    if let (Ok(old), Ok(new)) = (serde_json::from_str::<String>(old), serde_json::from_str::<String>(new)) {
        return old == new;
    }
    let short = old.len().max(new.len()) <= NUMBER_CHARS_MAX;
    let number = |raw| serde_json::from_str::<f64>(raw);
    matches!((number(old), number(new)), (Ok(old), Ok(new)) if short && old == new)
}

/// The differences between the recorded and the requested rows.
#[derive(Default)]
struct Differences {
    fields: Vec<FieldChange>,
    other_fields: u64,
    /// Recorded rows whose task is not requested.
    tasks: AffectedRows,
    /// Recorded rows whose task is requested, but with fewer repeats.
    repeats: AffectedRows,
}

struct FieldChange {
    path: String,
    was: Option<String>,
    is: Option<String>,
    rows: AffectedRows,
}

#[derive(Clone, Copy, Default)]
struct AffectedRows {
    count: u64,
    first: Option<(RowKey, u64)>,
}

impl AffectedRows {
    fn add(&mut self, key: RowKey, line: u64) {
        self.count += 1;
        self.first.get_or_insert((key, line));
    }

    fn describe(&self) -> String {
        let rows = if self.count == 1 { "1 row" } else { &format!("{} rows", self.count) };
        match self.first {
            Some((key, line)) => {
                format!("{rows}, first in line {line}: task {}, repeat {}", key.task_index, key.rollout_index)
            }
            None => rows.to_owned(),
        }
    }
}

impl Differences {
    fn field(&mut self, path: &str, was: Option<&str>, is: Option<&str>, (key, line): (RowKey, u64)) {
        if let Some(known) = self.fields.iter_mut().find(|known| known.path == path) {
            return known.rows.add(key, line);
        }
        if self.fields.len() == FIELDS_MAX {
            self.other_fields += 1;
            return;
        }
        let mut rows = AffectedRows::default();
        rows.add(key, line);
        let (was, is) = (was.map(shortened), is.map(shortened));
        self.fields.push(FieldChange { path: path.to_owned(), was, is, rows });
    }

    fn into_result(self, recorded: &Path) -> Result<()> {
        if self.fields.is_empty() && self.tasks.count + self.repeats.count == 0 {
            return Ok(());
        }
        let mut text = format!("the requested rows are not those of {}:", recorded.display());
        // Writing to a string cannot fail.
        for FieldChange { path, was, is, rows } in &self.fields {
            let value = |value: &Option<String>| value.clone().unwrap_or_else(|| "absent".to_owned());
            let _ = write!(text, "\n  {path}: was {}, is {} ({})", value(was), value(is), rows.describe());
        }
        if self.other_fields > 0 {
            let _ = write!(text, "\n  {} differences in other fields", self.other_fields);
        }
        for (rows, why) in [(self.tasks, "there are fewer tasks"), (self.repeats, "there are fewer repeats")] {
            if rows.count > 0 {
                let _ = write!(text, "\n  {why}: not requested any more are {}", rows.describe());
            }
        }
        text.push_str(
            "\n  fix: resume with the input, agents, prompt and overrides of the recorded run (new rows belong at the end of the \
             input, and --num-repeats may grow), or name another output, or replace the results with --overwrite",
        );
        Err(Error::invalid(text))
    }
}

fn shortened(raw: &str) -> String {
    let mut short: String = raw.chars().take(SHOWN_CHARS).collect();
    if short.len() < raw.len() {
        short.push('…');
    }
    short
}

fn invalid(error: &InputError) -> Error {
    Error::invalid(error.to_string())
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;
    use std::path::PathBuf;

    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::collect::input::{MaterializeOptions, Materializer, NoAgentNames, Repeats};

    /// The request of a user.
    #[derive(Clone, Debug)]
    struct Requested {
        tasks: usize,
        repeats: u32,
        interleave: bool,
        add_seed: bool,
        temperature: Option<f64>,
        agent: &'static str,
        /// The task whose text differs from that of the others' collection.
        changed: Option<usize>,
    }

    impl Requested {
        fn write(&self, path: &Path) {
            let row = |task: usize| {
                let text = format!("question {task}{}", if self.changed == Some(task) { "?" } else { "" });
                format!(
                    "{}\n",
                    json!({"responses_create_params": {"input": [{"role": "user", "content": text}]}, "n": 1})
                )
            };
            // Every third task is asked twice, so that its repeats continue in another place.
            let asked = (0..self.tasks).flat_map(|task| std::iter::repeat_n(task, 1 + usize::from(task % 3 == 2)));
            let input: String = asked.map(row).collect();
            let mut options = MaterializeOptions::new("tasks.jsonl").with_agent(self.agent).unwrap();
            options.repeats = Repeats::Each(self.repeats);
            (options.interleave, options.add_seed) = (self.interleave, self.add_seed);
            options.overrides.extend(self.temperature.map(|value| ("temperature".to_owned(), json!(value))));
            let materializer = Materializer::new(options, NoAgentNames).unwrap();
            let mut rows = Vec::new();
            materializer.write(Cursor::new(input), &mut rows).unwrap();
            std::fs::write(path, rows).unwrap();
        }
    }

    fn requested() -> impl Strategy<Value = Requested> {
        (1..8_usize, 1..4_u32, any::<bool>(), any::<bool>()).prop_map(|(tasks, repeats, interleave, add_seed)| {
            Requested { tasks, repeats, interleave, add_seed, temperature: None, agent: "math", changed: None }
        })
    }

    struct Folder(tempfile::TempDir);

    impl Folder {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn paths(&self) -> (PathBuf, PathBuf) {
            (self.0.path().join("was.jsonl"), self.0.path().join("is.jsonl"))
        }

        fn compare(&self, was: &Requested, is: &Requested) -> Result<bool, String> {
            let (recorded, requested) = self.paths();
            was.write(&recorded);
            is.write(&requested);
            compare(&recorded, &requested).map_err(|error| error.to_string())
        }
    }

    proptest! {
        // Each case writes two files.
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn more_tasks_and_repeats_in_any_order_extend_a_collection_and_fewer_do_not(
            was in requested(), tasks in 1..8_usize, repeats in 1..4_u32, interleave in any::<bool>()
        ) {
            let is = Requested { tasks, repeats, interleave, ..was.clone() };
            let folder = Folder::new();
            let compared = folder.compare(&was, &is);
            if tasks >= was.tasks && repeats >= was.repeats {
                let (recorded, requested) = folder.paths();
                prop_assert_eq!(compared, Ok(std::fs::read(recorded).unwrap() != std::fs::read(requested).unwrap()));
            } else {
                let text = compared.expect_err("rows are missing");
                prop_assert_eq!(text.contains("fewer tasks"), tasks < was.tasks, "{}", text);
                // Of a task that is gone, all repeats are gone.
                prop_assert_eq!(text.contains("fewer repeats"), repeats < was.repeats, "{}", text);
            }
        }

        #[test]
        fn a_changed_row_is_named_with_what_was_and_what_is(was in requested(), task in 0..8_usize, grown in 0..3_u32) {
            let changed = task % was.tasks;
            let is = Requested { changed: Some(changed), repeats: was.repeats + grown, ..was.clone() };
            let text = Folder::new().compare(&was, &is).expect_err("the task differs");
            let expected = format!(
                "responses_create_params.input[0].content: was \"question {changed}\", is \"question {changed}?\" "
            );
            prop_assert!(text.contains(&expected), "{}", text);
            prop_assert!(text.contains(&format!("task {changed}, repeat 0")), "{}", text);
        }
    }

    #[test]
    fn agent_overrides_and_seeds_are_part_of_a_row() {
        let was = Requested {
            tasks: 2,
            repeats: 2,
            interleave: false,
            add_seed: false,
            temperature: Some(0.5),
            agent: "math",
            changed: None,
        };
        for (is, expected) in [
            (
                Requested { agent: "poet", ..was.clone() },
                "agent_ref.name: was \"math\", is \"poet\" (4 rows, first in line 1",
            ),
            (
                Requested { temperature: None, ..was.clone() },
                "responses_create_params.temperature: was 0.5, is absent (4 rows",
            ),
            (
                Requested { add_seed: true, ..was.clone() },
                "responses_create_params.metadata: was absent, is {\"extra_body\"",
            ),
        ] {
            let text = Folder::new().compare(&was, &is).expect_err("the rows differ");
            assert!(text.contains(expected), "{text}");
        }
    }

    #[test]
    fn rows_that_another_program_spelled_differently_are_the_same() {
        let (was, is) =
            (r#"{"a": 1e5, "b": "\u00e9", "c": [1.0, {"d": null}]}"#, r#"{"b":"é","a":100000.0,"c":[1,{"d":null}]}"#);
        let seen = |was: &str, is: &str| {
            let mut seen = Vec::new();
            differing(&mut String::new(), 0, Some(was), Some(is), &mut |path, _, _| seen.push(path.to_owned()));
            seen
        };
        assert_eq!(seen(was, is), [] as [&str; 0]);
        // A double cannot tell these apart.
        assert_eq!(seen(r#"{"id":12345678901234567890123}"#, r#"{"id":12345678901234567890124}"#), ["id"]);
        assert_eq!(seen(r#"{"a":[1,2],"b":1}"#, r#"{"a":[1],"b":"1"}"#), ["a", "b"]);
        let deep = |end: &str| format!("{}{end}{}", "[".repeat(10_000), "]".repeat(10_000));
        assert_eq!(seen(&deep("1"), &deep("2")).len(), 1);
    }
}

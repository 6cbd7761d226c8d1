//! The rows of an input: the fields that name the agent, and the reader of materialized rows.

use std::io::BufRead;

use bytes::Bytes;
use gym_core::RawObject;
use gym_core::message::JsonError;
use gym_core::rollout::metrics::{JsonFields, ROLLOUT_INDEX, TASK_INDEX};

use crate::collect::input::error::InputError;

pub(crate) const AGENT_REF: &str = "agent_ref";
pub(crate) const ENVIRONMENT_SERVER: &str = "_ng_environment_server";

/// Identifies the rollout of a row.
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
    /// The rollout's indices.
    pub key: RowKey,
    /// The row's agent; `None` for materialized tasks.
    pub agent: Option<String>,
    /// The environment server in `_ng_environment_server`, if the row is bound to one.
    pub environment_server: Option<String>,
    /// The row's line, byte for byte, without the newline.
    pub row: RawObject,
    /// Line number in the file, counted from 1.
    pub line: u64,
}

/// Streams the rows of a materialized inputs file; only one row is in memory at a time.
#[derive(Debug)]
pub struct MaterializedRows<R> {
    reader: R,
    name: String,
    line: u64,
}

impl<R: BufRead> MaterializedRows<R> {
    /// Creates a reader of the rows in `reader`; `name` is the file's name in error messages.
    pub fn new(reader: R, name: impl Into<String>) -> Self {
        Self { reader, name: name.into(), line: 0 }
    }

    fn read(&mut self) -> Result<Option<MaterializedRow>, InputError> {
        let mut raw = Vec::new();
        let read = self
            .reader
            .read_until(b'\n', &mut raw)
            .map_err(|error| InputError::io(format!("read {}", self.name), error))?;
        if read == 0 {
            return Ok(None);
        }
        self.line += 1;
        raw.truncate(raw.trim_ascii_end().len());
        materialized_row(&Bytes::from(raw), &self.name, self.line).map(Some)
    }
}

impl<R: BufRead> Iterator for MaterializedRows<R> {
    type Item = Result<MaterializedRow, InputError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.read().transpose()
    }
}

/// Parses one line of the materialized inputs file `name`, without its newline.
pub(in crate::collect) fn materialized_row(raw: &Bytes, name: &str, line: u64) -> Result<MaterializedRow, InputError> {
    let fail = |problem: String| InputError::line(name, line, problem);
    let row = RawObject::parse(raw.clone()).and_then(|row| row.check().map(|()| row));
    let row = row.map_err(|error| fail(wrong_row(raw, &error)))?;
    let index = |key: &str| {
        let index = row.get_as(key).ok().flatten();
        index
            .ok_or_else(|| fail(format!("{key} is not an integer; collect again with --overwrite to rewrite the file")))
    };
    let key = RowKey { task_index: index(TASK_INDEX)?, rollout_index: index(ROLLOUT_INDEX)? };
    let reference = row.get(AGENT_REF);
    let agent = name_of(reference.as_deref().and_then(|raw| std::str::from_utf8(raw).ok())).map_err(&fail)?;
    let environment_server = row.get_as(ENVIRONMENT_SERVER).ok().flatten();
    Ok(MaterializedRow { key, agent, environment_server, row, line })
}

/// Returns the fields of a line, or the reason why it is invalid.
pub(crate) fn parse_row(text: &str) -> Result<JsonFields<'_>, String> {
    if text.trim().is_empty() {
        return Err("the line is blank; remove it".to_owned());
    }
    if text.starts_with('[') {
        return Err(
            "the line is a JSON array; write one JSON object on each line, as `jq -c '.[]' FILE` does".to_owned()
        );
    }
    if text.trim() == "{" {
        return Err(
            "the object goes on in the next line; write each object on one line, as `jq -c . FILE` does".to_owned()
        );
    }
    JsonFields::parse(text).map_err(|error| {
        // Each line is parsed alone, so the parser's line number is always 1.
        let error = error.to_string().replace(" at line 1 column", " at column");
        format!("malformed JSON: {error}; each line must be one complete JSON object")
    })
}

/// Returns the reason why a line is not a row.
fn wrong_row(raw: &[u8], error: &JsonError) -> String {
    match std::str::from_utf8(raw) {
        Ok(text) => parse_row(text).err().unwrap_or_else(|| error.to_string()),
        Err(error) => format!("not UTF-8: {error}"),
    }
}

/// Returns `agent_ref.name`, if the row has it.
pub(crate) fn agent_name(row: &JsonFields<'_>) -> Result<Option<String>, String> {
    name_of(row.get(AGENT_REF))
}

/// Returns the name in an `agent_ref`.
fn name_of(reference: Option<&str>) -> Result<Option<String>, String> {
    let Some(reference) = reference.filter(|raw| gym_core::rollout::metrics::is_truthy(raw)) else { return Ok(None) };
    let reference = JsonFields::parse(reference)
        .map_err(|_| "agent_ref is not an object; expected {\"name\": \"<agent>\"}".to_owned())?;
    text_member(&reference, "name")
        .map_err(|()| "agent_ref.name is not a string; set it to the agent's name".to_owned())
}

/// Returns a string field, or `None` if it is absent or null.
pub(crate) fn text_member(members: &JsonFields<'_>, key: &str) -> Result<Option<String>, ()> {
    members.get(key).map_or(Ok(None), |raw| serde_json::from_str::<Option<String>>(raw).map_err(|_| ()))
}

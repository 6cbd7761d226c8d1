//! Produces the body of `POST /aggregate_metrics` in pieces from the rollouts file.

use std::io::{Read, Seek, Write};

use gym_core::message::push_json_string;
use gym_core::rollout::metrics::{JsonFields, MetricsError, Rows};

use crate::collect::report::index::FileRows;

/// Fields of a result that are not sent: they are large, and no statistic uses them.
const LEFT_OUT: [&str; 5] =
    ["response", "responses_create_params", "ng_agent_observations", "ng_model_call_capture", "ng_trajectory"];
/// Fields of `response` that are sent.
const KEPT_OF_RESPONSE: [&str; 2] = ["usage", "incomplete_details"];

/// The body `{"verify_responses":[…]}` with the rollouts of one group; each piece holds one row.
#[derive(Debug)]
pub struct AggregateRequest<'a, R> {
    rows: FileRows<'a, R>,
    next: usize,
    ended: bool,
}

impl<'a, R: Read + Seek> AggregateRequest<'a, R> {
    /// Creates the body from `rows`.
    #[must_use]
    pub fn new(rows: FileRows<'a, R>) -> Self {
        Self { rows, next: 0, ended: false }
    }

    /// Appends the next piece to `into`; returns `false` at the end, when nothing was appended.
    ///
    /// # Errors
    /// An error of reading the rollouts file, or of a row that has changed since it was indexed.
    pub fn next_piece(&mut self, into: &mut String) -> Result<bool, MetricsError> {
        if self.ended {
            return Ok(false);
        }
        into.push_str(if self.next == 0 { r#"{"verify_responses":["# } else { "" });
        if self.next == self.rows.count() {
            into.push_str("]}");
            self.ended = true;
            return Ok(true);
        }
        if self.next > 0 {
            into.push(',');
        }
        self.rows.visit(self.next, &mut |row| {
            push_stripped(row, into);
            Ok(())
        })?;
        self.next += 1;
        Ok(true)
    }

    /// Returns the length of the whole body in bytes, for a `content-length` header; reads all rows once.
    ///
    /// # Errors
    /// As [`AggregateRequest::next_piece`].
    pub fn length(&mut self) -> Result<u64, MetricsError> {
        let (next, ended) = (self.next, self.ended);
        (self.next, self.ended) = (0, false);
        let mut length = 0;
        let mut piece = String::new();
        while self.next_piece(&mut piece)? {
            length += piece.len() as u64;
            piece.clear();
        }
        (self.next, self.ended) = (next, ended);
        Ok(length)
    }

    /// Writes the rest of the body.
    ///
    /// # Errors
    /// As [`AggregateRequest::next_piece`], and `MetricsError::Io` if the write fails.
    pub fn write_to(mut self, mut writer: impl Write) -> Result<(), MetricsError> {
        let mut piece = String::new();
        while self.next_piece(&mut piece)? {
            writer.write_all(piece.as_bytes()).map_err(|source| MetricsError::Io {
                doing: "write the aggregate metrics request".to_owned(),
                source,
            })?;
            piece.clear();
        }
        Ok(())
    }
}

/// Appends a result without the excluded fields; the other fields keep their original text.
fn push_stripped(row: &JsonFields<'_>, into: &mut String) {
    into.push('{');
    let mut first = true;
    let mut push = |into: &mut String, key: &str, value: &str| {
        if !std::mem::take(&mut first) {
            into.push(',');
        }
        push_json_string(into, key);
        into.push(':');
        into.push_str(value);
    };
    for (key, value) in row.iter().filter(|(key, _)| !LEFT_OUT.contains(key)) {
        push(into, key, value);
    }
    let response = row.get("response").and_then(|raw| JsonFields::parse(raw).ok()).unwrap_or_default();
    let mut kept = String::new();
    for key in KEPT_OF_RESPONSE {
        if let Some(value) = response.get(key).filter(|value| *value != "null") {
            kept.push(if kept.is_empty() { '{' } else { ',' });
            push_json_string(&mut kept, key);
            kept.push(':');
            kept.push_str(value);
        }
    }
    if !kept.is_empty() {
        kept.push('}');
        push(into, "response", &kept);
    }
    into.push('}');
}

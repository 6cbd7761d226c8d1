//! The rows that statistics read: in order, more than once, one at a time.

use serde::Deserialize;
use serde_json::value::RawValue;

use super::MetricsError;
use super::number::{Number, is_truthy};
use crate::message::JsonFields;

/// The key of a row's task index.
pub const TASK_INDEX: &str = "_ng_task_index";
/// The key of a row's rollout index within its task.
pub const ROLLOUT_INDEX: &str = "_ng_rollout_index";

/// The callback for each row.
pub type Visit<'a> = dyn FnMut(&JsonFields<'_>) -> Result<(), MetricsError> + 'a;

/// Rollouts in the order of (task, rollout), read again for each pass.
///
/// The aggregation makes several passes and calls `visit` with increasing indices in each. The rows must not change
/// meanwhile. An error ends the aggregation.
pub trait Rows {
    /// Returns the number of rollouts.
    fn count(&self) -> usize;
    /// Returns the (task, rollout) key of row `index`. Keys never decrease.
    fn key(&self, index: usize) -> (i64, i64);
    /// Reads row `index` and passes it to `visit`.
    fn visit(&mut self, index: usize, visit: &mut Visit<'_>) -> Result<(), MetricsError>;
}

/// Returns the (task, rollout) key of a row. A missing index counts as 0.
pub fn row_key(row: &JsonFields<'_>, place: &dyn Fn() -> String) -> Result<(i64, i64), MetricsError> {
    let index = |key: &str| match row.get(key) {
        None => Ok(0),
        Some(raw) => raw
            .parse::<i64>()
            .map_err(|_| MetricsError::row(place(), format!("{key} is {}; expected a whole number", shorten(raw)))),
    };
    Ok((index(TASK_INDEX)?, index(ROLLOUT_INDEX)?))
}

/// Shortens a value for an error message.
pub(crate) fn shorten(raw: &str) -> String {
    let mut short: String = raw.chars().take(60).collect();
    if short.len() < raw.len() {
        short.push('…');
    }
    short
}

/// The rows of an `/aggregate_metrics` request body, as slices of the body.
#[derive(Debug)]
pub struct BodyRows<'a> {
    rows: Vec<(i64, i64, &'a str)>,
}

#[derive(Deserialize)]
struct Body<'a> {
    #[serde(borrow)]
    verify_responses: Vec<&'a RawValue>,
}

impl<'a> BodyRows<'a> {
    /// Finds the rows in `{"verify_responses": [ … ]}`.
    pub fn parse(body: &'a [u8]) -> Result<Self, MetricsError> {
        let body: Body<'a> =
            serde_json::from_slice(body).map_err(|error| MetricsError::Request { problem: error.to_string() })?;
        Self::new(body.verify_responses.into_iter().map(RawValue::get))
    }

    /// Takes rows one by one; each is a JSON object.
    pub fn new(rows: impl IntoIterator<Item = &'a str>) -> Result<Self, MetricsError> {
        let mut keyed = Vec::new();
        for (index, text) in rows.into_iter().enumerate() {
            let place = || format!("verify_responses[{index}]");
            let row = JsonFields::parse(text).map_err(|error| MetricsError::row(place(), error.to_string()))?;
            let (task, rollout) = row_key(&row, &place)?;
            keyed.push((task, rollout, text));
        }
        keyed.sort_by_key(|(task, rollout, _)| (*task, *rollout));
        Ok(Self { rows: keyed })
    }
}

impl Rows for BodyRows<'_> {
    fn count(&self) -> usize {
        self.rows.len()
    }

    fn key(&self, index: usize) -> (i64, i64) {
        let (task, rollout, _) = self.rows[index];
        (task, rollout)
    }

    fn visit(&mut self, index: usize, visit: &mut Visit<'_>) -> Result<(), MetricsError> {
        let (task, rollout, text) = self.rows[index];
        let row = JsonFields::parse(text)
            .map_err(|error| MetricsError::row(format!("rollout {task}:{rollout}"), error.to_string()))?;
        visit(&row)
    }
}

/// Returns `true` if the row is masked (`mask_sample`): it counts only in the coverage.
pub(crate) fn is_masked(row: &JsonFields<'_>) -> bool {
    row.get("mask_sample").is_some_and(is_truthy)
}

/// The members of `response.usage`, if there are any.
fn usage<'a>(row: &JsonFields<'a>) -> JsonFields<'a> {
    row.get("response")
        .and_then(|response| JsonFields::parse(response).ok())
        .and_then(|response| response.get("usage"))
        .and_then(|usage| JsonFields::parse(usage).ok())
        .unwrap_or_default()
}

/// Calls `each` with the name and value of each metric of a row: the numeric and boolean fields at the top level, then
/// those of `response.usage`, which take precedence over a top-level field of the same name.
pub(crate) fn for_each_metric(row: &JsonFields<'_>, mut each: impl FnMut(&str, Number)) {
    let usage = usage(row);
    let counts = |key: &str| !key.starts_with('_') && key != "mask_sample";
    for (key, raw) in row.iter().filter(|(key, _)| counts(key)) {
        if let Some(number) = Number::parse(usage.get(key).unwrap_or(raw)) {
            each(key, number);
        }
    }
    for (key, raw) in usage.iter().filter(|(key, _)| !key.starts_with('_')) {
        let shadows = row.get(key).is_some() && key != "mask_sample";
        if !shadows && let Some(number) = Number::parse(raw) {
            each(key, number);
        }
    }
}

/// The entry of one rollout in `rollout_infos`.
pub(crate) fn rollout_info(
    row: &JsonFields<'_>,
    (task, rollout): (i64, i64),
) -> serde_json::Map<String, serde_json::Value> {
    let mut info = serde_json::Map::new();
    info.insert("rollout_id".into(), format!("{task}:{rollout}").into());
    info.insert(TASK_INDEX.into(), task.into());
    info.insert(ROLLOUT_INDEX.into(), rollout.into());
    let value = |raw: &str| serde_json::from_str(raw).unwrap_or(serde_json::Value::Null);
    if let Some(reward) = row.get("reward") {
        info.insert("reward".into(), value(reward));
    }
    for (key, raw) in usage(row).iter() {
        if let Some(text) = Number::text(raw) {
            info.insert(key.to_owned(), value(text));
        }
    }
    for (key, raw) in row.iter() {
        if key.starts_with('_') || matches!(key, "reward" | "response" | "mask_sample") {
            continue;
        }
        if let Some(text) = Number::text(raw) {
            info.insert(key.to_owned(), value(text));
        }
    }
    info
}

//! `perf_summary`: tokens, turns and latency from the `ng_perf` records of the rollouts.

use serde_json::{Map, Value};

use super::MetricsError;
use super::number::Number;
use super::rows::Rows;
use super::series::{Series, number};
use crate::message::JsonFields;

const TOKEN_FIELDS: [&str; 4] = ["prompt_tokens", "cached_prompt_tokens", "completion_tokens", "reasoning_tokens"];

/// The number of rollouts with `ng_perf`, and the number of these that observed tokens.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PerfCounts {
    records: usize,
    with_tokens: usize,
}

fn record<'a>(row: &JsonFields<'a>) -> Option<JsonFields<'a>> {
    row.get("ng_perf").and_then(|raw| JsonFields::parse(raw).ok())
}

fn field_of(record: &JsonFields<'_>, field: &str) -> Option<Number> {
    record.get(field).and_then(Number::parse)
}

impl PerfCounts {
    pub(crate) fn add(&mut self, row: &JsonFields<'_>) {
        if let Some(record) = record(row) {
            self.records += 1;
            if field_of(&record, "token_observability_coverage").is_some_and(|coverage| coverage.value > 0.0) {
                self.with_tokens += 1;
            }
        }
    }

    /// Computes the block; `None` if no rollout has `ng_perf`. Reads the rows once for each field, so that only one
    /// column is in memory.
    pub(crate) fn summary(self, rows: &mut dyn Rows) -> Result<Option<Map<String, Value>>, MetricsError> {
        if self.records == 0 {
            return Ok(None);
        }
        let total = rows.count() as f64;
        let mut summary = Map::new();
        summary.insert("overall_observability_coverage".into(), (self.records as f64 / total).into());
        summary.insert("token_observability_coverage".into(), (self.with_tokens as f64 / total).into());
        for field in TOKEN_FIELDS {
            let (values, whole) = series(rows, |record| field_of(record, field))?;
            if values.count() == 0 {
                continue;
            }
            summary.insert(format!("mean_{field}"), float(values.mean()));
            summary.insert(format!("median_{field}"), median(&values, whole));
            summary.insert(format!("total_{field}"), number(values.sum(), whole));
        }
        let (turns, whole) = series(rows, |record| field_of(record, "num_turns"))?;
        if turns.count() > 0 {
            for (stat, value) in [
                ("mean", float(turns.mean())),
                ("median", median(&turns, whole)),
                ("std", float(turns.population_std())),
                ("min", number_or_null(turns.min(), whole)),
                ("p90", float(turns.quantile(0.9))),
                ("max", number_or_null(turns.max(), whole)),
            ] {
                summary.insert(format!("{stat}_num_turns"), value);
            }
        }
        let (per_turn, _) = series(rows, |record| {
            let tokens = field_of(record, "completion_tokens")?;
            let turns = field_of(record, "num_turns").filter(|turns| turns.value > 0.0)?;
            Some(Number { value: tokens.value / turns.value, integer: false })
        })?;
        if per_turn.count() > 0 {
            summary.insert("mean_tokens_per_turn".into(), float(per_turn.mean()));
            summary.insert("median_tokens_per_turn".into(), float(per_turn.median()));
        }
        let (latency, _) = series(rows, |record| field_of(record, "total_latency_ms"))?;
        if latency.count() > 0 {
            for (stat, value) in [
                ("p50", latency.quantile(0.5)),
                ("p90", latency.quantile(0.9)),
                ("p99", latency.quantile(0.99)),
                ("mean", latency.mean()),
            ] {
                summary.insert(format!("total_latency_{stat}_ms"), float(value));
            }
        }
        Ok(Some(summary))
    }
}

fn float(value: Option<f64>) -> Value {
    value.map_or(Value::Null, Value::from)
}

/// A value of a column of integers is written as an integer if Python does so too.
fn number_or_null(value: Option<f64>, whole: bool) -> Value {
    value.map_or(Value::Null, |value| number(value, whole))
}

fn median(values: &Series, whole: bool) -> Value {
    number_or_null(values.median(), whole && values.count() % 2 == 1)
}

/// The values of one field over all `ng_perf` records, and whether all of them are integers.
fn series(
    rows: &mut dyn Rows,
    pick: impl Fn(&JsonFields<'_>) -> Option<Number>,
) -> Result<(Series, bool), MetricsError> {
    let mut values = Vec::new();
    let mut whole = true;
    for index in 0..rows.count() {
        rows.visit(index, &mut |row| {
            if let Some(number) = record(row).and_then(|record| pick(&record)) {
                values.push(number.value);
                whole &= number.integer;
            }
            Ok(())
        })?;
    }
    Ok((Series::new(values), whole))
}

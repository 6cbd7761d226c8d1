//! Exact statistics over rollouts: what `/aggregate_metrics` answers, and the helpers that benchmarks build on.
//!
//! Rows are read through [`Rows`], several passes long, and never held: the same code answers a request body
//! ([`aggregate_metrics`]) and a rollouts file of any size.

mod aggregate;
mod error;
mod number;
mod pass_at_k;
mod perf;
mod rows;
mod series;
mod student_t;

pub use crate::message::JsonFields;
pub use aggregate::{AggregateOptions, Aggregation, aggregate_metrics, is_primary_metric};
pub use error::MetricsError;
pub use number::{Number, is_truthy};
pub use pass_at_k::{PassAtK, Sample, highest_k_metrics, pass_at_k, subset_metrics};
pub use rows::{BodyRows, ROLLOUT_INDEX, Rows, TASK_INDEX, Visit, row_key};
pub use series::{Series, confidence_interval_95, exact_sum};
pub use student_t::t_quantile_95;

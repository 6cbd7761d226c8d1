//! Exact statistics over rollouts: the reply of `/aggregate_metrics`, and functions for the metrics of benchmarks.
//!
//! The statistics read rows through [`Rows`] in several passes and do not keep them. The same code handles a request
//! body ([`aggregate_metrics`]) and a rollouts file of any size.

mod aggregate;
mod error;
mod number;
mod pass_at_k;
mod perf;
mod rows;
mod series;
mod student_t;

pub use crate::message::JsonFields;
pub use aggregate::{
    AggregateOptions, Aggregation, STANDARD_STATISTICS, STATISTICS_METADATA, TaskCompletion, aggregate_metrics,
    standard_response,
};
pub use error::MetricsError;
pub use number::{Number, is_truthy};
pub use pass_at_k::{PassAtK, Sample, highest_k_metrics, pass_at_k, passed_of_counts, subset_metrics};
pub use rows::{BodyRows, ROLLOUT_INDEX, Rows, TASK_INDEX, Visit, row_key};
pub use student_t::t_quantile_95;

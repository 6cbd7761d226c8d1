//! Turns the tasks of a JSONL file, or of Parquet files, into rows to dispatch: options, prompt templates and materialization.

mod error;
mod materializer;
mod options;
pub(in crate::collect) mod places;
mod prompt;
mod python;
pub(in crate::collect) mod rows;
pub(in crate::collect) mod source;

pub use error::InputError;
pub use materializer::{AgentNames, MaterializeSummary, Materializer, NoAgentNames, TargetUse};
pub use options::{DEFAULT_KEY, MaterializeOptions, Repeats, Routing};
pub use prompt::{PromptError, PromptTemplate};
pub use rows::{MaterializedRow, MaterializedRows, RowKey};

//! Encoding of a batch as message segments, and its schema.

mod payload;
mod schema;

pub use payload::Payload;
pub use schema::{BatchSchema, ColumnSchema, SegmentSchema};

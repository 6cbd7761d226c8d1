//! Sharding of a batch over ranks, and splitting into micro-batches.

mod balance;
mod even;
mod micro;

pub use balance::{DynamicBatching, MicrobatchOrder, SequencePacking, Sharded, Sharding};
pub use even::Uneven;
pub use micro::{MicroBatch, MicroBatchChunk, MicroBatches, RowShape};

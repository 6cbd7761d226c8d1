//! Rewards and rates as scalars in an event file of TensorBoard.

mod record;
mod writer;

pub(in crate::collect) use writer::TensorBoardFile;

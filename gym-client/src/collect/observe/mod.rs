//! Shows a running collection to other programs: a stream of events, scalars for TensorBoard, and reports to a monitor.
//!
//! Nothing here is the ledger, and nothing here delays or fails a rollout.

mod event_file;
mod line;
pub mod monitor;
mod target;
mod tensorboard;

pub(super) use event_file::EventFile;
pub(super) use line::{RunEnded, RunStarted};
pub(super) use target::EventTarget;
pub(super) use tensorboard::TensorBoardFile;

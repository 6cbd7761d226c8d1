//! The items that workers and their controllers need: `use gym_core::group::prelude::*`.

pub use crate::base::error::{Error, Result};
pub use crate::group::{
    Batch, Dispatch, GroupError, Handles, HandlesBlocking, HandlesShared, InProcessGroup, JsonRows, Method, Methods,
    Payload, Rank, RankLayout, Tensor, Worker, WorkerEnv, WorkerGroup, WorkerGroupExt,
};
pub use crate::message::CallContext;
pub use crate::worker;

//! The items that workers and their controllers need: `use gym_group::prelude::*`.

pub use crate::call::{GroupError, InProcessGroup, WorkerGroupExt};
pub use gym_core::group::{
    Batch, Dispatch, Handles, HandlesBlocking, HandlesShared, JsonRows, Method, Methods, Payload, Rank, RankLayout,
    Tensor, Worker, WorkerEnv, WorkerGroup,
};
pub use gym_core::message::CallContext;
pub use gym_core::worker;
pub use gym_core::{Error, Result};

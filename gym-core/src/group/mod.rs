//! Worker groups: typed calls to the ranks of a group, with batches that are sharded over them.
//!
//! ```text
//!   group.call(method, args).batch(b).dispatch(d)
//!        │ layout: which ranks get which rows           │ health: which ranks accept calls
//!        ▼                                              ▼
//!   WorkerGroup ──► Channel of each rank ──► WorkerHost (queue) ──► Worker: exclusive, shared or blocking methods
//! ```
//!
//! ```
//! use gym_core::group::prelude::*;
//!
//! struct Scorer;
//! worker! {
//!     impl Worker for Scorer as scorer {
//!         fn start(_: WorkerEnv, _: ()) -> Result<Self> { Ok(Self) }
//!         /// Returns the sum of the rank's rewards.
//!         shared(idempotent) async fn sum(&self, _: &CallContext, call: Payload<()>) -> Result<Payload<f32>> {
//!             Ok(call.batch.column("reward")?.dense()?.view::<f32>()?.iter().sum::<f32>().into())
//!         }
//!     }
//! }
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<()> {
//! let group = InProcessGroup::start::<Scorer>("scorers", RankLayout::new([("data", 2)])?, ()).await?;
//! let batch = Batch::empty().with("reward", Tensor::from_vec([4], vec![1.0_f32, 0.5, 0.0, 1.0])?)?;
//! let sums = group.call(scorer::sum, ()).batch(batch).dispatch(Dispatch::shard("data")).await?;
//! assert_eq!(sums.into_values(), [1.5, 1.0]);
//! # Ok(()) }
//! ```
//!
//! | module | purpose |
//! |---|---|
//! | [`worker`] | workers, their methods, and the host that runs a worker |
//! | [`call`] | groups and calls to them: replies, errors, load balancing, groups in this process |
//! | [`batch`] | columns and tensors: sharding, packing, padding, safetensors |
//! | [`layout`] | named axes over ranks, and the dispatch of a call over them |
//! | [`health`] | the state machine of ranks and replicas, failure classes, retry budgets |
//! | [`cluster`] | placement of bundles and ranks on nodes |
//! | [`train`] | advantages and message logs of a training step |
//! | [`prelude`] | the names that most programs need |
//!
//! `gym_client::group` starts groups in worker processes, supervises them and restarts their ranks.

pub mod batch;
pub mod call;
pub mod cluster;
pub mod health;
pub mod layout;
pub mod prelude;
mod state;
pub mod train;
mod view;
pub mod worker;

pub use batch::tensor::{DType, Element, Scalar, Tensor};
pub use batch::{
    Assembly, Batch, BatchSchema, Column, ColumnSchema, Device, DynamicBatching, JsonRows, MicroBatch, MicroBatchChunk,
    MicroBatches, MicrobatchOrder, Offsets, Packed, Padding, Payload, Ragged, RowShape, Segment, SegmentId,
    SegmentSchema, SequencePacking, Sharded, Sharding, Side, Uneven,
};
pub use call::{
    Backlog, Balancer, BatchOptions, CallSupport, FailureKind, Gate, Gathered, GroupCall, GroupError, InProcessGroup,
    InProcessOptions, ItemError, Pending, Permit, RankMonitor, RankOutcome, RankReply, Submitted, WorkerGroupExt,
};
pub use layout::dispatch::{Assignment, Dispatch, Free, PlanError};
pub use layout::{Axis, LayoutError, Parallelism, RANKS_MAX, REPLICATED_AXES, Rank, RankLayout, SubLayout};
pub use state::RankState;
pub use view::{ExitCause, GroupView, RankExit, RankView, WorkerGroup};
pub use worker::host::{
    CONTROL_ROUTE, HostOptions, REPLY_METADATA, REPLY_NONE, RunningCall, STATUS_ROUTE, WorkerHost, WorkerStatus,
};
pub use worker::{Handles, HandlesBlocking, HandlesShared, Method, Methods, Worker, WorkerEnv};

//! Worker groups: workers and their methods, batches, clusters, health, and calls to groups.

pub mod batch;
pub mod call;
pub mod cluster;
pub mod health;
pub mod layout;
pub mod prelude;
pub mod train;
pub mod worker;

pub use batch::tensor::{DType, Element, Scalar, Tensor};
pub use batch::{
    Assembly, Batch, BatchSchema, Column, ColumnSchema, Device, DynamicBatching, JsonRows, MicroBatch, MicroBatchChunk,
    MicroBatches, MicrobatchOrder, Offsets, Packed, Padding, Payload, Ragged, RowShape, Segment, SegmentId,
    SegmentSchema, SequencePacking, Sharded, Sharding, Side, Uneven,
};
pub use call::{
    Balancer, ExitCause, FailureKind, Gathered, GroupCall, GroupError, GroupView, InProcessGroup, InProcessOptions,
    Member, Pending, RankExit, RankOutcome, RankReply, WorkerGroup, WorkerGroupExt,
};
#[doc(hidden)]
pub use call::{Gate, Permit};
pub use health::RankState;
pub use layout::dispatch::{Assignment, Dispatch, Free, PlanError};
pub use layout::{Axis, LayoutError, Parallelism, RANKS_MAX, REPLICATED_AXES, Rank, RankLayout, SubLayout};
pub use worker::host::{HostOptions, REPLY_METADATA, REPLY_NONE, RunningCall, STATUS_ROUTE, WorkerHost, WorkerStatus};
pub use worker::{Handles, HandlesBlocking, HandlesShared, Method, Methods, Worker, WorkerEnv};

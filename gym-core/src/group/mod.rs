//! The parts of which a worker is written: its methods, its host, batches, the layout of ranks; and the view of a group that hosts and groups share.
//!
//! The crate `gym-group` has the controller side: typed calls to the ranks of a group, clusters, supervision, training.
//!
//! | module | purpose |
//! |---|---|
//! | [`worker`] | workers, their methods, and the host that runs a worker |
//! | [`collective`] | sums, broadcasts and barriers between ranks |
//! | [`batch`] | columns and tensors: sharding, packing, padding, safetensors |
//! | [`device`] | batches in the memory of GPUs |
//! | [`layout`] | named axes over ranks, and the dispatch of a call over them |

pub mod batch;
pub mod collective;
pub mod device;
pub mod layout;
mod state;
mod view;
pub mod worker;

pub use batch::tensor::{DType, Element, Scalar, Tensor};
pub use batch::{
    Assembly, Batch, BatchSchema, Column, ColumnSchema, Device, DynamicBatching, JsonRows, MicroBatch, MicroBatchChunk,
    MicroBatches, MicrobatchOrder, Offsets, Packed, Padding, Payload, Ragged, RowShape, Segment, SegmentId,
    SegmentSchema, SequencePacking, Sharded, Sharding, Side, Uneven,
};
pub use device::{DeviceBatch, DeviceProvider, DeviceTensor, device_provider, register_device_provider};
pub use layout::dispatch::{Assignment, Dispatch, Free, PlanError};
pub use layout::{Axis, LayoutError, Parallelism, RANKS_MAX, REPLICATED_AXES, Rank, RankLayout, SubLayout};
pub use state::RankState;
pub use view::{ExitCause, GroupView, RankExit, RankView, WorkerGroup};
pub use worker::host::{
    COLLECTIVE_ROUTE, CONTROL_ROUTE, HostOptions, REPLY_METADATA, REPLY_NONE, RunningCall, SEATS_ROUTE, STATUS_ROUTE,
    WorkerHost, WorkerStatus,
};
pub use worker::{Handles, HandlesBlocking, HandlesShared, Method, Methods, Worker, WorkerEnv};

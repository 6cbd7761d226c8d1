//! The vocabulary and the seams of the gym SDK.
#![forbid(unsafe_code)]

#[cfg(feature = "groups")]
pub mod advantages;
#[cfg(feature = "groups")]
mod batch;
mod cancel;
mod channel;
#[cfg(feature = "groups")]
pub mod cluster;
mod context;
mod descriptors;
#[cfg(feature = "groups")]
mod dispatch;
mod error;
#[cfg(feature = "groups")]
mod few;
pub mod frame;
#[cfg(feature = "groups")]
mod group;
mod handler;
#[cfg(feature = "groups")]
pub mod health;
mod hex;
#[cfg(feature = "groups")]
mod host;
pub mod in_process;
mod ladder;
#[cfg(feature = "groups")]
mod layout;
mod ledger;
mod message;
#[cfg(feature = "groups")]
pub mod message_log;
pub mod metrics;
pub mod mux;
#[cfg(feature = "groups")]
pub mod packing;
mod pick;
mod progress;
mod raw;
mod registry;
mod responses;
mod retry;
mod rollout;
#[cfg(feature = "groups")]
pub mod safetensors;
mod server;
#[cfg(feature = "groups")]
mod tensor;
#[cfg(feature = "testing")]
pub mod testing;
mod transport;
mod unwritten;
#[cfg(feature = "groups")]
mod worker;
mod world;

#[cfg(feature = "groups")]
pub use batch::{
    Assembly, Batch, BatchSchema, Column, ColumnSchema, Device, DynamicBatching, JsonRows, MicroBatch, MicroBatchChunk,
    MicroBatches, MicrobatchOrder, Offsets, Packed, Padding, Payload, Ragged, RowShape, Segment, SegmentId,
    SegmentSchema, SequencePacking, Sharded, Sharding, Side, Uneven,
};
pub use cancel::{CancelOnDrop, CancelToken, Cancelled};
pub use channel::{Channel, Handing, INCARNATION_METADATA, Link, PathInfo, Reply};
pub use context::{CallContext, DEFAULT_DEADLINE, DEFAULT_REPLY_BYTES_MAX, Incarnation, TraceContext};
pub use descriptors::raise_descriptors;
#[cfg(feature = "groups")]
pub use dispatch::{Assignment, Dispatch, Free, PlanError};
pub use error::{Code, Error, Execution, Result};
#[cfg(feature = "groups")]
pub use group::{
    Balancer, ExitCause, FailureKind, Gate, Gathered, GroupCall, GroupError, GroupView, InProcessGroup,
    InProcessOptions, Leave, Member, Pending, RankExit, RankOutcome, RankReply, RankState, WorkerGroup, WorkerGroupExt,
};
pub use handler::{Fenced, Handler, from_tower, handler_fn};
#[cfg(feature = "groups")]
pub use host::{HostOptions, REPLY_METADATA, REPLY_NONE, RunningCall, STATUS_ROUTE, WorkerHost, WorkerStatus};
pub use in_process::InProcess;
pub use ladder::{Ladder, Level};
#[cfg(feature = "groups")]
pub use layout::{Axis, LayoutError, Parallelism, RANKS_MAX, REPLICATED_AXES, Rank, RankLayout, SubLayout};
pub use ledger::{KeyState, Ledger, Outcome};
pub use message::{
    CODE_METADATA, ContentType, EXECUTION_METADATA, Message, Metadata, Request, Response, Rope, Route, Status, Verb,
};
pub use pick::{Balance, Load, Picker};
pub use progress::Progress;
pub use raw::{Edit, JsonError, RawObject, push_json_string};
pub use registry::{DEFAULT_TTL, Instance, Lease, MemoryRegistry, Registration, Registry, RegistryState};
pub use responses::{
    Content, ContentPart, FunctionCall, FunctionCallOutput, Ignored, IncompleteDetails, ModelResponse, OutputItem,
    OutputMessage, ResponseOutline,
};
pub use retry::{RetryPolicy, retry, retry_after};
pub use rollout::{Attempt, FailureClass, TaskKey};
pub use server::{
    AgentServer, EnvironmentServer, ModelServer, ResourcesServer, ServerKind, SessionId, Verdict, unknown_tool,
};
#[cfg(feature = "groups")]
pub use tensor::{DType, Element, Scalar, Tensor, bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};
pub use transport::{ConnectOptions, Connector, Endpoint, Incoming, Listener, PeerInfo};
#[cfg(feature = "groups")]
pub use worker::{Handles, HandlesBlocking, HandlesShared, Method, Methods, Worker, WorkerEnv};
pub use world::{FileLock, Files, RealFiles, World};

//! The vocabulary and the seams of the gym SDK.
#![forbid(unsafe_code)]

mod channel;
pub mod cluster;
mod context;
mod dispatch;
mod error;
pub mod frame;
mod handler;
pub mod in_process;
mod layout;
mod ledger;
mod message;
pub mod metrics;
pub mod packing;
mod raw;
mod registry;
mod responses;
mod retry;
mod rollout;
mod server;
#[cfg(feature = "testing")]
pub mod testing;
mod transport;
mod world;

pub use channel::{Channel, INCARNATION_METADATA, Link, PathInfo, Reply};
pub use context::{CallContext, DEFAULT_DEADLINE, DEFAULT_REPLY_BYTES_MAX, Incarnation, TraceContext};
pub use dispatch::{Assignment, Dispatch, Free, PlanError};
pub use error::{Code, Error, Execution, Result};
pub use handler::{Fenced, Handler, from_tower, handler_fn};
pub use in_process::InProcess;
pub use layout::{Axis, LayoutError, Parallelism, RANKS_MAX, REPLICATED_AXES, Rank, RankLayout, SubLayout};
pub use ledger::{KeyState, Ledger, Outcome};
pub use message::{
    CODE_METADATA, ContentType, EXECUTION_METADATA, Message, Metadata, Request, Response, Rope, Route, Status, Verb,
};
pub use raw::{Edit, JsonError, RawObject};
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
pub use transport::{ConnectOptions, Connector, Endpoint, Incoming, Listener, PeerInfo};
pub use world::{FileLock, Files, RealFiles, World};

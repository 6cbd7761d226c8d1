//! Core types of the gym SDK, and the traits that transports, servers and workers implement.
#![forbid(unsafe_code)]

mod base;
#[cfg(feature = "groups")]
pub mod group;
mod message;
pub mod prelude;
mod registry;
mod rollout;
pub mod server;
#[cfg(feature = "testing")]
pub mod testing;
pub mod transport;

pub use message::frame;
pub use rollout::metrics;
pub use transport::{mem as in_process, mux};

pub use base::cancel::{CancelOnDrop, CancelToken, Cancelled};
pub use base::descriptors::raise_descriptors;
pub use base::error::{Code, Error, Execution, Result};
pub use base::progress::CallProgress;
pub use base::world::{FileLock, Files, RealFiles, World};
pub use message::*;
pub use registry::*;
pub use rollout::{Attempt, FailureClass, KeyState, Ledger, Outcome, TaskKey};
pub use server::{
    AgentServer, Content, ContentPart, EnvironmentServer, FunctionCall, FunctionCallOutput, Ignored, IncompleteDetails,
    ModelResponse, ModelServer, OutputItem, OutputMessage, ResourcesServer, ResponseOutline, ServerKind, SessionId,
    Verdict, unknown_tool,
};
pub use transport::{
    Backend, BoundListener, Channel, ConnectOptions, Connector, Endpoint, Fenced, Handler, INCARNATION_METADATA,
    InProcess, Incoming, Link, ListenOptions, Listener, MergedListener, PathInfo, Reply, RetryPolicy, Transport,
    TransportPolicy, TrySendOutcome, from_tower, handler_fn, retry, retry_after,
};

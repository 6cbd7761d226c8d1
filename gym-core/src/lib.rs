//! Core types of the gym SDK, and the traits that transports, servers and workers implement.
#![forbid(unsafe_code)]

pub mod base;
#[cfg(feature = "groups")]
pub mod group;
pub mod message;
pub mod prelude;
pub mod registry;
pub mod rollout;
pub mod server;
#[cfg(feature = "testing")]
pub mod testing;
pub mod transport;

pub use base::{CancelToken, Code, Error, Execution, Result, World};
pub use message::{
    CallContext, Incarnation, Message, Metadata, RawObject, Request, Response, Rope, Route, Status, Verb,
};
pub use server::{AgentServer, EnvironmentServer, ModelResponse, ModelServer, ResourcesServer, SessionId, Verdict};
pub use transport::{Channel, Endpoint, Handler};

//! The vocabulary and the seams of the gym SDK.
#![forbid(unsafe_code)]

mod channel;
mod context;
mod error;
pub mod frame;
mod handler;
pub mod in_process;
mod message;
mod raw;
mod transport;

pub use channel::{Channel, INCARNATION_METADATA, Link, PathInfo, Reply};
pub use context::{CallContext, DEFAULT_DEADLINE, DEFAULT_REPLY_BYTES_MAX, Incarnation, TraceContext};
pub use error::{Code, Error, Execution, Result};
pub use handler::{Fenced, Handler, from_tower, handler_fn};
pub use in_process::InProcess;
pub use message::{
    CODE_METADATA, ContentType, EXECUTION_METADATA, Message, Metadata, Request, Response, Rope, Route, Status, Verb,
};
pub use raw::{Edit, JsonError, RawObject};
pub use transport::{ConnectOptions, Connector, Endpoint, Incoming, Listener, PeerInfo};

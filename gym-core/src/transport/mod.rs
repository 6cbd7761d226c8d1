//! Transport interfaces between callers and peers, and the transports that need no socket.

pub mod backend;
pub(crate) mod channel;
mod endpoint;
mod handler;
pub mod mem;
pub mod mux;
mod policy;
mod retry;
mod serve;

pub use async_trait::async_trait;
pub use backend::{Backend, BoundListener, ListenOptions, MergedListener, TransportReport};
pub use channel::{Channel, INCARNATION_METADATA, Link, PathInfo, Reply, check_incarnation};
pub use endpoint::{ConnectOptions, Connector, Endpoint, Incoming, Listener, bare_host, host_port};
pub use handler::{Fence, Fenced, Handler, from_tower, handler_fn};
pub use mem::{InProcess, InProcessListener};
pub use policy::{Transport, TransportPolicy, WrittenTransports};
pub use retry::{RetryPolicy, retry, retry_after};
pub use serve::serve;

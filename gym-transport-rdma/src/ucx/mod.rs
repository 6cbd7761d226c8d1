//! Safe wrappers of UCX for one thread: the types hold raw pointers and `Rc`s, so none of them can leave the thread.
//!
//! ```text
//!   Context ◀── Worker ◀── Endpoint, Listener, Announcement        (each keeps its owner alive)
//!      ▲── Memory
//! ```
//!
//! An operation owns everything that UCX may still read or write: header, payload, buffer and callback. It keeps them
//! until UCX's own callback, even if all other handles are dropped. If UCX never calls back, the memory is leaked,
//! never freed. The exception is a worker that is [abandoned](Worker::abandon) by a caller that can guarantee that no
//! process uses the memory any more.
#![allow(unsafe_code)]

mod am;
mod context;
mod endpoint;
mod listener;
mod memory;
mod operations;
mod print;
mod status;
mod worker;

pub(crate) use am::{Announcement, Arrival, HEADER_ROOM, Outgoing, Protocol, Receiver, UnhandledIds};
pub(crate) use context::Context;
pub(crate) use endpoint::{Closing, Endpoint, EndpointKey, ErrorMode};
pub(crate) use listener::{Listener, RawRequest};
pub(crate) use memory::Memory;
pub(crate) use status::Status;
pub(crate) use worker::{Armed, Worker};

//! UCX in safe Rust, for one thread: the types hold raw pointers and `Rc`s, so none of them can leave it.
//!
//! ```text
//!   Context ◀── Worker ◀── Endpoint, Listener, Announcement        (each keeps what it stands on alive)
//!      ▲── Memory
//! ```
//!
//! What UCX may still read or write belongs to the operation (header, payload, buffer, callback) until UCX's own callback
//! gives it back, whatever becomes of everything else. When UCX never calls back it is leaked, never freed, unless somebody
//! who knows that nobody uses it any more abandons the worker.
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

pub(crate) use am::{Announcement, Arrival, HEADER_ROOM, Others, Outgoing, Protocol, Receiver};
pub(crate) use context::Context;
pub(crate) use endpoint::{Closing, Endpoint, EndpointKey, ErrorMode};
pub(crate) use listener::{Listener, RawRequest};
pub(crate) use memory::Memory;
pub(crate) use status::Status;
pub(crate) use worker::{Armed, Worker};

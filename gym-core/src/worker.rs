//! Typed methods of a rank: what the controller names, what the worker implements, and nothing else between them.
//!
//! A method is a unit type with a name and two types. The controller needs only that; the worker implements one of three traits
//! for it, which say who else may touch the worker meanwhile. The compiler checks that a worker handles what it registers.
//!
//! ```
//! use gym_core::{CallContext, Handles, Method, Methods, Payload, Result, Worker, WorkerEnv};
//!
//! #[derive(Clone, Copy, Debug)]
//! struct Add;
//! impl Method for Add {
//!     const NAME: &'static str = "counter.add";
//!     type Args = u64;
//!     type Reply = u64;
//! }
//!
//! struct Counter(u64);
//! impl Worker for Counter {
//!     type Init = u64;
//!     fn start(_: WorkerEnv, from: u64) -> Result<Self> { Ok(Self(from)) }
//!     fn methods(methods: &mut Methods<Self>) { methods.exclusive(Add); }
//! }
//! impl Handles<Add> for Counter {
//!     async fn handle(&mut self, _: &CallContext, call: Payload<u64>) -> Result<Payload<u64>> {
//!         self.0 += call.value;
//!         Ok(self.0.into())
//!     }
//! }
//! ```

use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::sync::Arc;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::batch::Payload;
use crate::context::{CallContext, Incarnation};
use crate::error::Result;
use crate::layout::Rank;

mod methods;
mod route;

pub use methods::Methods;
pub(crate) use methods::{Entry, Lane, read, write};
pub(crate) use route::{PREFIX, route};

/// A worker method's name and types. A unit struct implements it; controller and worker share only this.
///
/// Within one process arguments and replies cross as the values they are; over a wire they are JSON. So a field that serde
/// skips arrives in the one case and not in the other.
pub trait Method: Copy + fmt::Debug + Send + Sync + 'static {
    /// `policy.train`: letters, digits, `.`, `_` and `-`, at most 100 of them (checked when the program is compiled). Stable on
    /// the wire.
    const NAME: &'static str;
    /// Whether running it twice does the same as running it once.
    const IDEMPOTENT: bool = false;
    /// Replicated to every rank that is called.
    type Args: Serialize + DeserializeOwned + Clone + Send + Sync + 'static;
    /// What each rank answers.
    type Reply: Serialize + DeserializeOwned + Send + Sync + 'static;
}

/// Code that runs on one rank. Need not be `Send` if its methods are blocking.
pub trait Worker: Sized + 'static {
    /// What it is made from: the same for every rank.
    type Init: DeserializeOwned + Send + 'static;

    /// Makes the worker of one rank. Runs on a thread where blocking is allowed; with blocking methods, on the rank's own.
    ///
    /// # Errors
    /// Whatever keeps it from starting; the rank is then not started.
    fn start(env: WorkerEnv, init: Self::Init) -> Result<Self>;

    /// Names what it handles: `methods.exclusive(Train).shared(Generate)`, or `methods.blocking(Train)`.
    fn methods(methods: &mut Methods<Self>);
}

/// With the worker to itself, in order of arrival. Never dropped half way: a caller that leaves or whose deadline passes fires
/// `cx.cancel` and is answered at once, and the handler finishes, because a rank that vanishes inside a collective hangs its
/// peers.
pub trait Handles<M: Method>: Worker + Send + Sync {
    /// Runs one call.
    fn handle(
        &mut self,
        cx: &CallContext,
        call: Payload<M::Args>,
    ) -> impl Future<Output = Result<Payload<M::Reply>>> + Send;
}

/// Beside other shared calls, never beside an exclusive one. Dropped at an await point when the caller leaves or the deadline
/// passes.
pub trait HandlesShared<M: Method>: Worker + Send + Sync {
    /// Runs one call.
    fn handle(
        &self,
        cx: &CallContext,
        call: Payload<M::Args>,
    ) -> impl Future<Output = Result<Payload<M::Reply>>> + Send;
}

/// On the rank's own thread, where `start` ran too: CUDA contexts, interpreters, FFI. In order of arrival; told by `cx.cancel`,
/// not torn.
pub trait HandlesBlocking<M: Method>: Worker {
    /// Runs one call.
    ///
    /// # Errors
    /// Whatever the method fails with.
    fn handle(&mut self, cx: &CallContext, call: Payload<M::Args>) -> Result<Payload<M::Reply>>;
}

/// Who and where a worker is.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct WorkerEnv {
    /// The group's name.
    pub group: Arc<str>,
    /// Its number in the group, from 0.
    pub rank: Rank,
    /// How many ranks the group has.
    pub world_size: u32,
    /// Its number on its node.
    pub local_rank: u32,
    /// The number of its node.
    pub node_rank: u32,
    /// Which life of the rank this is; a restarted one has a higher number.
    pub incarnation: Incarnation,
    /// The environment variables of the rank (`MASTER_ADDR`, …), set in its process if it has one of its own.
    pub variables: BTreeMap<String, String>,
}

impl WorkerEnv {
    /// Rank `rank` of `world_size` on one node, in its first life.
    #[must_use]
    pub fn new(group: impl Into<Arc<str>>, rank: Rank, world_size: u32) -> Self {
        Self {
            group: group.into(),
            rank,
            world_size,
            local_rank: rank,
            node_rank: 0,
            incarnation: Incarnation(1),
            variables: BTreeMap::new(),
        }
    }
}

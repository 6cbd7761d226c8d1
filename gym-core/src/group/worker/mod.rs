//! Workers and their typed methods.
//!
//! A method is a unit type with a name, an argument type and a reply type, which the controller and the worker share. The worker
//! implements one of three traits for each method, which differ in the calls that may run concurrently. The compiler checks that a
//! worker implements the methods that it registers.
//!
//! ```
//! use gym_core::group::{Handles, Method, Methods, Payload, Worker, WorkerEnv};
//! use gym_core::{CallContext, Result};
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

use crate::base::error::Result;
use crate::group::batch::Payload;
use crate::group::collective::Peers;
use crate::group::layout::Rank;
use crate::message::{CallContext, Incarnation};

pub mod host;
mod macros;
mod methods;
mod route;

pub(crate) use methods::Entry;
pub use methods::{Methods, read, write};
pub(crate) use route::PREFIX;
pub use route::route;

/// The name and types of a worker method, implemented by a unit struct that the controller and the worker share.
///
/// Within one process, arguments and replies are passed as values. Over a wire, they are JSON. A field that serde skips therefore
/// arrives only within one process.
///
/// ```
/// # use gym_core::group::{Handles, HandlesBlocking, HandlesShared, Method, Methods, Payload, Worker, WorkerEnv};
/// # use gym_core::{CallContext, Result};
/// #[derive(Clone, Copy, Debug)]
/// struct Add;
/// impl Method for Add {
///     const NAME: &'static str = "counter.add";
///     type Args = u64;
///     type Reply = u64;
/// }
/// ```
pub trait Method: Copy + fmt::Debug + Send + Sync + 'static {
    /// The name, such as `policy.train`: at most 100 letters, digits, `.`, `_` and `-` (checked at compile time). Stable on the
    /// wire.
    const NAME: &'static str;
    /// `true` if running the method twice has the same effect as running it once. The default is `false`.
    const IDEMPOTENT: bool = false;
    /// The arguments, replicated to every rank that is called.
    type Args: Serialize + DeserializeOwned + Clone + Send + Sync + 'static;
    /// The reply of each rank.
    type Reply: Serialize + DeserializeOwned + Send + Sync + 'static;
}

/// Code that runs on one rank. A worker with blocking methods need not be `Send`.
///
/// ```
/// # use gym_core::group::{Handles, HandlesBlocking, HandlesShared, Method, Methods, Payload, Worker, WorkerEnv};
/// # use gym_core::{CallContext, Result};
/// # #[derive(Clone, Copy, Debug)]
/// # struct Add;
/// # impl Method for Add {
/// #     const NAME: &'static str = "counter.add";
/// #     type Args = u64;
/// #     type Reply = u64;
/// # }
/// struct Counter(u64);
/// impl Worker for Counter {
///     type Init = u64;
///     fn start(_: WorkerEnv, init: u64) -> Result<Self> { Ok(Self(init)) }
///     fn methods(methods: &mut Methods<Self>) {
///         methods.exclusive(Add);
///     }
/// }
/// # impl Handles<Add> for Counter {
/// #     async fn handle(&mut self, _: &CallContext, call: Payload<u64>) -> Result<Payload<u64>> {
/// #         self.0 += call.value;
/// #         Ok(self.0.into())
/// #     }
/// # }
/// ```
pub trait Worker: Sized + 'static {
    /// The value from which the workers of all ranks are created.
    type Init: DeserializeOwned + Send + 'static;

    /// Creates the worker of one rank. Runs on a thread that may block; with blocking methods, on the rank's own thread.
    ///
    /// # Errors
    /// Any error; the rank then fails to start.
    fn start(env: WorkerEnv, init: Self::Init) -> Result<Self>;

    /// Registers the worker's methods: `methods.exclusive(Train).shared(Generate)`, or `methods.blocking(Train)`.
    fn methods(methods: &mut Methods<Self>);
}

/// Handles exclusive calls: one at a time, in order of arrival, with no other call running on the worker.
///
/// - **Cancellation.** The handler is never dropped half way. A call that is cancelled or whose deadline passes is answered at
///   once and fires `cx.cancel`. The handler runs to completion, because a rank that disappears inside a collective hangs its
///   peers.
///
/// ```
/// # use gym_core::group::{Handles, HandlesBlocking, HandlesShared, Method, Methods, Payload, Worker, WorkerEnv};
/// # use gym_core::{CallContext, Result};
/// # #[derive(Clone, Copy, Debug)]
/// # struct Add;
/// # impl Method for Add {
/// #     const NAME: &'static str = "counter.add";
/// #     type Args = u64;
/// #     type Reply = u64;
/// # }
/// # struct Counter(u64);
/// # impl Worker for Counter {
/// #     type Init = u64;
/// #     fn start(_: WorkerEnv, init: u64) -> Result<Self> { Ok(Self(init)) }
/// #     fn methods(methods: &mut Methods<Self>) {
/// #         methods.exclusive(Add);
/// #     }
/// # }
/// impl Handles<Add> for Counter {
///     async fn handle(&mut self, _: &CallContext, call: Payload<u64>) -> Result<Payload<u64>> {
///         self.0 += call.value;
///         Ok(self.0.into())
///     }
/// }
/// ```
pub trait Handles<M: Method>: Worker + Send + Sync {
    /// Runs one call.
    ///
    /// # Errors
    /// Any error of the method.
    fn handle(
        &mut self,
        cx: &CallContext,
        call: Payload<M::Args>,
    ) -> impl Future<Output = Result<Payload<M::Reply>>> + Send;
}

/// Handles shared calls: concurrently with other shared calls, but not with an exclusive call.
///
/// - **Cancellation.** The handler is dropped at an await point when the call is cancelled or its deadline passes.
///
/// ```
/// # use gym_core::group::{Handles, HandlesBlocking, HandlesShared, Method, Methods, Payload, Worker, WorkerEnv};
/// # use gym_core::{CallContext, Result};
/// # #[derive(Clone, Copy, Debug)]
/// # struct Add;
/// # impl Method for Add {
/// #     const NAME: &'static str = "counter.add";
/// #     type Args = u64;
/// #     type Reply = u64;
/// # }
/// # struct Counter(u64);
/// # impl Worker for Counter {
/// #     type Init = u64;
/// #     fn start(_: WorkerEnv, init: u64) -> Result<Self> { Ok(Self(init)) }
/// #     fn methods(methods: &mut Methods<Self>) {
/// #         methods.shared(Add);
/// #     }
/// # }
/// impl HandlesShared<Add> for Counter {
///     async fn handle(&self, _: &CallContext, call: Payload<u64>) -> Result<Payload<u64>> {
///         Ok((self.0 + call.value).into())
///     }
/// }
/// ```
pub trait HandlesShared<M: Method>: Worker + Send + Sync {
    /// Runs one call.
    ///
    /// # Errors
    /// Any error of the method.
    fn handle(
        &self,
        cx: &CallContext,
        call: Payload<M::Args>,
    ) -> impl Future<Output = Result<Payload<M::Reply>>> + Send;
}

/// Handles blocking calls: one at a time, in order of arrival, on the rank's own thread, on which [`Worker::start`] ran too. For
/// CUDA contexts, interpreters and FFI.
///
/// - **Cancellation.** The handler receives a cancellation signal (`cx.cancel`) and runs to completion.
///
/// ```
/// # use gym_core::group::{Handles, HandlesBlocking, HandlesShared, Method, Methods, Payload, Worker, WorkerEnv};
/// # use gym_core::{CallContext, Result};
/// # #[derive(Clone, Copy, Debug)]
/// # struct Add;
/// # impl Method for Add {
/// #     const NAME: &'static str = "counter.add";
/// #     type Args = u64;
/// #     type Reply = u64;
/// # }
/// # struct Counter(u64);
/// # impl Worker for Counter {
/// #     type Init = u64;
/// #     fn start(_: WorkerEnv, init: u64) -> Result<Self> { Ok(Self(init)) }
/// #     fn methods(methods: &mut Methods<Self>) {
/// #         methods.blocking(Add);
/// #     }
/// # }
/// impl HandlesBlocking<Add> for Counter {
///     fn handle(&mut self, _: &CallContext, call: Payload<u64>) -> Result<Payload<u64>> {
///         self.0 += call.value;
///         Ok(self.0.into())
///     }
/// }
/// ```
pub trait HandlesBlocking<M: Method>: Worker {
    /// Runs one call.
    ///
    /// # Errors
    /// Any error of the method.
    fn handle(&mut self, cx: &CallContext, call: Payload<M::Args>) -> Result<Payload<M::Reply>>;
}

/// The value of a call or a reply, without its batch. Only for [`worker!`](crate::worker).
#[doc(hidden)]
#[diagnostic::on_unimplemented(
    message = "`{Self}` is neither the call nor the reply of a worker method",
    label = "expected `Payload<ARGS>` as the call, `Result<Payload<REPLY>>` as the reply"
)]
pub trait Carried {
    /// The value.
    type Value;
}

impl<T> Carried for Payload<T> {
    type Value = T;
}

impl<T> Carried for Result<Payload<T>> {
    type Value = T;
}

/// The identity and the environment of a worker.
///
/// ```
/// use gym_core::group::WorkerEnv;
///
/// let env = WorkerEnv::new("policy", 3, 8);
/// assert_eq!((env.rank, env.local_rank, env.world_size), (3, 3, 8));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct WorkerEnv {
    /// Name of the group.
    pub group: Arc<str>,
    /// Number of the rank in the group, from 0.
    pub rank: Rank,
    /// Number of ranks in the group.
    pub world_size: u32,
    /// Number of the rank on its node.
    pub local_rank: u32,
    /// Number of the node.
    pub node_rank: u32,
    /// Incarnation of the rank; each restart increases it.
    pub incarnation: Incarnation,
    /// Environment variables of the rank (`MASTER_ADDR`, …), set in its process if the rank has its own.
    pub variables: BTreeMap<String, String>,
    /// The way to the other ranks of the group, for collective operations. Empty if the host of the worker does not connect ranks.
    pub peers: Peers,
}

impl WorkerEnv {
    /// Creates the environment of rank `rank` of `world_size` on one node, in its first incarnation.
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
            peers: Peers::default(),
        }
    }
}

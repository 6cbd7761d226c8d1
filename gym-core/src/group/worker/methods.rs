//! Methods of a worker, registered by name with erased types.

use std::any::type_name;
use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::base::error::{Error, Execution, Result};
use crate::group::batch::Payload;
use crate::group::worker::host::{ExecutorKind, Launcher, launch_async, launch_blocking};
use crate::group::worker::{Handles, HandlesBlocking, HandlesShared, Method, Worker};
use crate::message::CallContext;
use crate::message::{ContentType, Message, Rope};

/// The methods of a worker. Filled by [`Worker::methods`].
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
/// impl Worker for Counter {
/// #     type Init = u64;
/// #     fn start(_: WorkerEnv, init: u64) -> Result<Self> { Ok(Self(init)) }
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
pub struct Methods<W: Worker> {
    entries: Vec<Named<W>>,
    launcher: Option<Launcher<W>>,
    mistake: Option<String>,
}

/// Runs one method; the types are erased.
pub(crate) enum Entry<W> {
    Exclusive(for<'a> fn(&'a mut W, &'a CallContext, Message) -> BoxFuture<'a, Result<Message>>),
    Shared(fn(Arc<W>, CallContext, Message) -> BoxFuture<'static, Result<Message>>),
    Blocking(fn(&mut W, &CallContext, Message) -> Result<Message>),
}

impl<W> Clone for Entry<W> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<W> Copy for Entry<W> {}

/// The name of a method and its entry.
pub(crate) type Named<W> = (&'static str, Entry<W>);

impl<W: Worker> Methods<W> {
    /// Returns the methods that the worker declares.
    #[must_use]
    pub fn of() -> Self {
        let mut methods = Self { entries: Vec::new(), launcher: None, mistake: None };
        W::methods(&mut methods);
        methods
    }

    /// Registers a method whose calls run exclusively, in order of arrival.
    pub fn exclusive<M: Method>(&mut self, _: M) -> &mut Self
    where
        W: Handles<M>,
    {
        self.add::<M>(
            Launcher { kind: ExecutorKind::Async, start: launch_async::<W> },
            Entry::Exclusive(exclusive::<W, M>),
        )
    }

    /// Registers a method whose calls run concurrently with other shared calls.
    pub fn shared<M: Method>(&mut self, _: M) -> &mut Self
    where
        W: HandlesShared<M>,
    {
        self.add::<M>(Launcher { kind: ExecutorKind::Async, start: launch_async::<W> }, Entry::Shared(shared::<W, M>))
    }

    /// Registers a method whose calls run on the rank's own thread, in order of arrival.
    pub fn blocking<M: Method>(&mut self, _: M) -> &mut Self
    where
        W: HandlesBlocking<M>,
    {
        self.add::<M>(
            Launcher { kind: ExecutorKind::Blocking, start: launch_blocking::<W> },
            Entry::Blocking(blocking::<W, M>),
        )
    }

    fn add<M: Method>(&mut self, launcher: Launcher<W>, entry: Entry<W>) -> &mut Self {
        let mut mistake = None;
        if self.entries.iter().any(|(known, _)| *known == M::NAME) {
            mistake = Some(format!("method {} is registered twice", M::NAME));
        }
        if self.launcher.as_ref().is_some_and(|first| first.kind != launcher.kind) {
            mistake = Some(format!("{} is blocking or async, not both: see method {}", type_name::<W>(), M::NAME));
        }
        self.mistake = self.mistake.take().or(mistake);
        self.launcher = Some(launcher);
        self.entries.push((M::NAME, entry));
        self
    }

    /// Returns the launcher of the worker, and its methods.
    pub(crate) fn checked(self) -> Result<(Launcher<W>, Vec<Named<W>>)> {
        if let Some(mistake) = self.mistake {
            return Err(Error::invalid(mistake));
        }
        let launcher = self.launcher.ok_or_else(|| Error::invalid(format!("{} has no methods", type_name::<W>())))?;
        Ok((launcher, self.entries))
    }
}

impl<W: Worker> fmt::Debug for Methods<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.entries.iter().map(|(name, _)| name)).finish()
    }
}

fn exclusive<'a, W: Handles<M>, M: Method>(
    worker: &'a mut W,
    cx: &'a CallContext,
    message: Message,
) -> BoxFuture<'a, Result<Message>> {
    Box::pin(async move {
        let in_memory = message.head.is_lazy();
        let call = read(message)?;
        write(worker.handle(cx, call).await.map_err(ran)?, in_memory).map_err(ran)
    })
}

fn shared<W: HandlesShared<M>, M: Method>(
    worker: Arc<W>,
    cx: CallContext,
    message: Message,
) -> BoxFuture<'static, Result<Message>> {
    Box::pin(async move {
        let in_memory = message.head.is_lazy();
        let call = read(message)?;
        write(worker.handle(&cx, call).await.map_err(ran)?, in_memory).map_err(ran)
    })
}

fn blocking<W: HandlesBlocking<M>, M: Method>(worker: &mut W, cx: &CallContext, message: Message) -> Result<Message> {
    let in_memory = message.head.is_lazy();
    let call = read(message)?;
    write(worker.handle(cx, call).map_err(ran)?, in_memory).map_err(ran)
}

/// Marks an error as that of a handler that ran, whatever the error reports about calls that the handler made.
fn ran(error: Error) -> Error {
    error.with_execution(Execution::Finished)
}

/// Returns the message of a payload, for the caller of a worker: in memory the value itself, otherwise its JSON text.
///
/// # Errors
/// `InvalidArgument` if the value or its batch cannot be written as a message.
pub fn write<T>(payload: Payload<T>, in_memory: bool) -> Result<Message>
where
    T: Serialize + Send + Sync + 'static,
{
    if !in_memory {
        return payload.to_message();
    }
    let segments = if payload.batch.is_empty() { Vec::new() } else { payload.batch.encode().1 };
    Ok(Message { content_type: ContentType::Json, head: Rope::lazy(payload, write_head), segments })
}

/// Serializes the head. A value that cannot be serialized has no text, which the reader rejects.
fn write_head<T: Serialize>(payload: &Payload<T>) -> Bytes {
    payload.to_message().map(|message| message.head.to_bytes()).unwrap_or_default()
}

/// Returns the payload of a message, for the caller of a worker: the value itself, or the parsed text.
///
/// # Errors
/// `InvalidArgument` if the message is no such payload.
pub fn read<T>(message: Message) -> Result<Payload<T>>
where
    T: DeserializeOwned + Send + Sync + 'static,
{
    let Message { content_type, head, segments } = message;
    match head.try_into_value() {
        Ok(payload) => Ok(payload),
        Err(head) => Payload::from_message(Message { content_type, head, segments }),
    }
}

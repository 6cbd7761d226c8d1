//! What a worker handles: its methods by name, each with its types erased once.

use std::any::type_name;
use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::batch::Payload;
use crate::context::CallContext;
use crate::error::{Error, Execution, Result};
use crate::host::{Launch, launch_async, launch_blocking};
use crate::message::{ContentType, Message, Rope};
use crate::worker::{Handles, HandlesBlocking, HandlesShared, Method, Worker};

/// The methods of a worker. Filled by [`Worker::methods`].
pub struct Methods<W: Worker> {
    entries: Vec<Named<W>>,
    launch: Option<Launch<W>>,
    mistake: Option<String>,
}

/// How one method is run, with its types erased.
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

/// A method's name and how it is run.
pub(crate) type Named<W> = (&'static str, Entry<W>);

/// Who else may touch the worker during a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lane {
    Async,
    Blocking,
}

impl<W: Worker> Methods<W> {
    pub(crate) fn of() -> Self {
        let mut methods = Self { entries: Vec::new(), launch: None, mistake: None };
        W::methods(&mut methods);
        methods
    }

    /// Runs with the worker to itself, in order of arrival.
    pub fn exclusive<M: Method>(&mut self, _: M) -> &mut Self
    where
        W: Handles<M>,
    {
        self.add::<M>(Launch { lane: Lane::Async, start: launch_async::<W> }, Entry::Exclusive(exclusive::<W, M>))
    }

    /// Runs beside other shared calls.
    pub fn shared<M: Method>(&mut self, _: M) -> &mut Self
    where
        W: HandlesShared<M>,
    {
        self.add::<M>(Launch { lane: Lane::Async, start: launch_async::<W> }, Entry::Shared(shared::<W, M>))
    }

    /// Runs on the rank's own thread, in order of arrival.
    pub fn blocking<M: Method>(&mut self, _: M) -> &mut Self
    where
        W: HandlesBlocking<M>,
    {
        self.add::<M>(Launch { lane: Lane::Blocking, start: launch_blocking::<W> }, Entry::Blocking(blocking::<W, M>))
    }

    fn add<M: Method>(&mut self, launch: Launch<W>, entry: Entry<W>) -> &mut Self {
        let mut mistake = None;
        if self.entries.iter().any(|(known, _)| *known == M::NAME) {
            mistake = Some(format!("method {} is registered twice", M::NAME));
        }
        if self.launch.as_ref().is_some_and(|first| first.lane != launch.lane) {
            mistake = Some(format!("{} is blocking or async, not both: see method {}", type_name::<W>(), M::NAME));
        }
        self.mistake = self.mistake.take().or(mistake);
        self.launch = Some(launch);
        self.entries.push((M::NAME, entry));
        self
    }

    /// How to start the worker, and its methods.
    pub(crate) fn checked(self) -> Result<(Launch<W>, Vec<Named<W>>)> {
        if let Some(mistake) = self.mistake {
            return Err(Error::invalid(mistake));
        }
        let launch = self.launch.ok_or_else(|| Error::invalid(format!("{} has no methods", type_name::<W>())))?;
        Ok((launch, self.entries))
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
        let in_memory = message.head.is_unwritten();
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
        let in_memory = message.head.is_unwritten();
        let call = read(message)?;
        write(worker.handle(&cx, call).await.map_err(ran)?, in_memory).map_err(ran)
    })
}

fn blocking<W: HandlesBlocking<M>, M: Method>(worker: &mut W, cx: &CallContext, message: Message) -> Result<Message> {
    let in_memory = message.head.is_unwritten();
    let call = read(message)?;
    write(worker.handle(cx, call).map_err(ran)?, in_memory).map_err(ran)
}

/// Whatever a handler says of the calls that it made itself: this one ran.
fn ran(error: Error) -> Error {
    error.with_execution(Execution::Finished)
}

/// As it crosses: in memory as the value it is, else written.
pub(crate) fn write<T>(payload: Payload<T>, in_memory: bool) -> Result<Message>
where
    T: Serialize + Send + Sync + 'static,
{
    if !in_memory {
        return payload.to_message();
    }
    let segments = if payload.batch.is_empty() { Vec::new() } else { payload.batch.encode().1 };
    Ok(Message { content_type: ContentType::Json, head: Rope::unwritten(payload, write_head), segments })
}

/// A value that cannot be written leaves nothing, which the reader refuses.
fn write_head<T: Serialize>(payload: &Payload<T>) -> Bytes {
    payload.to_message().map(|message| message.head.to_bytes()).unwrap_or_default()
}

/// The payload of a message: the value it still is, or what its text says.
pub(crate) fn read<T>(message: Message) -> Result<Payload<T>>
where
    T: DeserializeOwned + Send + Sync + 'static,
{
    let Message { content_type, head, segments } = message;
    match head.try_into_value() {
        Ok(payload) => Ok(payload),
        Err(head) => Payload::from_message(Message { content_type, head, segments }),
    }
}

//! Fetches values: each node once, whatever number of processes and calls need the value.

use std::collections::HashMap;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::{self, StreamExt as _, TryStreamExt as _};
use gym_core::transport::{ConnectOptions, RetryPolicy, retry};
use gym_core::{CallContext, Code, Error, Execution, Request, Result};
use serde::de::DeserializeOwned;
use tokio::sync::OnceCell;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep};

use crate::client::values::copy::{Copy, Found, NodeCopies, Part};
use crate::client::values::held::{PART_BYTES, Source};
use crate::client::values::message::{READ_ROUTE, ReadBody, ReadReply, ValueRef, read, write};
use crate::transport::Transports;
use crate::transport::peer::ReconnectingPeer;

/// Parts that are requested at the same time.
const PARTS_AHEAD: usize = 4;
/// Pause between two looks at a value that another process fetches.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// A value that was fetched. Cheap to clone. While a clone exists, the copy of this node stays.
#[derive(Clone, Debug)]
pub struct Value(Arc<Fetched>);

#[derive(Debug)]
struct Fetched {
    reference: ValueRef,
    place: Place,
    /// Read on request.
    bytes: OnceCell<Bytes>,
}

#[derive(Debug)]
enum Place {
    /// This process put the value.
    Held(Source),
    Copy(Copy),
}

impl Value {
    fn new(reference: ValueRef, place: Place) -> Self {
        Self(Arc::new(Fetched { reference, place, bytes: OnceCell::new() }))
    }

    pub(super) fn held(reference: ValueRef, source: Source) -> Self {
        Self::new(reference, Place::Held(source))
    }

    /// Returns the reference.
    #[must_use]
    pub fn reference(&self) -> &ValueRef {
        &self.0.reference
    }

    /// Returns the file with the bytes, for programs that map it or read parts of it; `None` in the process that put the value. The file
    /// must not be changed.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        match &self.0.place {
            Place::Held(_) => None,
            Place::Copy(copy) => Some(&copy.path),
        }
    }

    /// Returns the bytes. They are read into this process once, for all its calls.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub async fn bytes(&self) -> Result<Bytes> {
        let value = &self.0;
        let length = usize::try_from(value.reference.bytes).unwrap_or(usize::MAX);
        let read = value.bytes.get_or_try_init(|| async {
            match &value.place {
                Place::Held(source) => source.read(0, length).await,
                Place::Copy(copy) => {
                    let file = copy.file.try_clone().map_err(|error| broken(&value.reference, error))?;
                    Source::File(Arc::new(file)).read(0, length).await
                }
            }
        });
        read.await.cloned()
    }

    /// Deserializes a value that is JSON.
    ///
    /// # Errors
    /// `InvalidArgument` if it is not, and the errors of [`bytes`](Self::bytes).
    pub async fn json<T: DeserializeOwned>(&self) -> Result<T> {
        let bytes = self.bytes().await?;
        let read = serde_json::from_slice(&bytes);
        read.map_err(|error| {
            Error::invalid(format!("it is not as expected: {error}")).about(self.0.reference.subject())
        })
    }
}

fn broken(value: &ValueRef, error: io::Error) -> Error {
    let code = match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Code::ResourceExhausted,
        _ => Code::Internal,
    };
    Error::not_started(code, "the copy of this node cannot be used").caused_by(error).about(value.subject())
}

async fn blocking<T: Send + 'static>(
    value: &ValueRef,
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Result<T> {
    let done = spawn_blocking(work).await;
    done.map_err(|error| Error::internal("the work was interrupted").caused_by(error))?
        .map_err(|error| broken(value, error))
}

/// Makes room for a value, and reserves it.
async fn make_room(copies: &Arc<NodeCopies>, value: &ValueRef, part: &Arc<Part>) -> Result<()> {
    let (copies, wanted, part) = (Arc::clone(copies), value.clone(), Arc::clone(part));
    let room = move || {
        let room = copies.make_room(&wanted);
        Ok(room.and_then(|()| part.file.set_len(wanted.bytes).map_err(|error| broken(&wanted, error))))
    };
    blocking(value, room).await?
}

/// A value that this process has, and the time until which it need not ask.
#[derive(Debug)]
struct Loaded {
    value: Value,
    until: Instant,
}

type Slot = Arc<tokio::sync::Mutex<Option<Loaded>>>;

/// The values that this process has fetched.
#[derive(Debug)]
pub(super) struct Fetcher {
    transports: Transports,
    copies: OnceCell<Arc<NodeCopies>>,
    slots: Mutex<HashMap<String, Slot>>,
}

impl Fetcher {
    pub(super) fn new(transports: Transports) -> Self {
        Self { transports, copies: OnceCell::new(), slots: Mutex::default() }
    }

    fn slot(&self, id: &str) -> Slot {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(slots.entry(id.to_owned()).or_default())
    }

    /// Drops fetched values that nobody uses: all of them, or those that may not be used without a question at `now`.
    pub(super) fn expire(&self, now: Option<Instant>) {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        slots.retain(|_, slot| {
            // A call is at it.
            if Arc::strong_count(slot) > 1 {
                return true;
            }
            let Ok(loaded) = slot.try_lock() else { return true };
            let keeps =
                |loaded: &Loaded| now.is_some_and(|now| loaded.until > now) || Arc::strong_count(&loaded.value.0) > 1;
            loaded.as_ref().is_some_and(keeps)
        });
    }

    pub(super) async fn fetch(
        &self,
        cx: &CallContext,
        value: &ValueRef,
        open: impl FnOnce() -> Result<NodeCopies> + Send + 'static,
    ) -> Result<Value> {
        value.check()?;
        let slot = self.slot(&value.id);
        let fetching = async {
            let mut slot = slot.lock().await;
            if let Some(loaded) = &mut *slot {
                if loaded.until > Instant::now() {
                    return Ok(loaded.value.clone());
                }
                let asked = self.ask(cx, value).await;
                match asked {
                    Ok(lease) => {
                        loaded.until = Instant::now() + lease;
                        if let Place::Copy(copy) = &loaded.value.0.place {
                            copy.extend(lease).map_err(|error| broken(value, error))?;
                        }
                        return Ok(loaded.value.clone());
                    }
                    Err(error) => {
                        *slot = None;
                        return Err(error);
                    }
                }
            }
            let copies = self.copies.get_or_try_init(|| async {
                let opened = spawn_blocking(open).await;
                opened.map_err(|error| Error::internal("the work was interrupted").caused_by(error))?.map(Arc::new)
            });
            let (copy, left) = self.copy(cx, value, copies.await?).await?;
            let loaded = Value::new(value.clone(), Place::Copy(copy));
            *slot = Some(Loaded { value: loaded.clone(), until: Instant::now() + left });
            Ok(loaded)
        };
        cx.bound(Execution::NotStarted, fetching).await.map_err(|error| match error.subject() {
            "" => error.about(value.subject()),
            _ => error,
        })
    }

    /// Returns the copy of this node, and the time for which it can be used. Fetches the value if nobody else does.
    async fn copy(&self, cx: &CallContext, value: &ValueRef, copies: &Arc<NodeCopies>) -> Result<(Copy, Duration)> {
        loop {
            let (shared, wanted) = (Arc::clone(copies), value.clone());
            match blocking(value, move || shared.find(&wanted)).await? {
                Found::Complete(copy, left) if !left.is_zero() => return Ok((copy, left)),
                Found::Complete(copy, _) => {
                    let lease = self.ask(cx, value).await?;
                    copy.extend(lease).map_err(|error| broken(value, error))?;
                    return Ok((copy, lease));
                }
                Found::Busy => sleep(LOOK_EVERY).await,
                Found::Mine(part) => {
                    let part = Arc::new(part);
                    if let Err(error) = make_room(copies, value, &part).await {
                        if error.code() != Code::ResourceExhausted {
                            return Err(error);
                        }
                        // What this process keeps for a later call can go as well.
                        self.expire(None);
                        make_room(copies, value, &part).await?;
                    }
                    let lease = self.parts(cx, value, &part).await?;
                    let part = Arc::into_inner(part).ok_or_else(|| Error::internal("a part is still being written"))?;
                    let copy = blocking(value, move || part.complete(lease)).await?;
                    return Ok((copy, lease));
                }
            }
        }
    }

    /// Writes all parts of a value, and returns the lease of the last one.
    async fn parts(&self, cx: &CallContext, value: &ValueRef, part: &Arc<Part>) -> Result<Duration> {
        let peer = self.peer(value);
        let offsets = (0..value.bytes).step_by(usize::try_from(PART_BYTES).unwrap_or(usize::MAX));
        let written = offsets.map(|offset| {
            let peer = &peer;
            async move {
                let bytes = PART_BYTES.min(value.bytes - offset);
                let (lease, data) = self.read(cx, peer, value, offset, bytes).await?;
                if data.len() as u64 != bytes {
                    let message = format!("{} bytes arrived from byte {offset}, not {bytes}", data.len());
                    return Err(Error::finished(Code::DataLoss, message).about(value.subject()));
                }
                let part = Arc::clone(part);
                blocking(value, move || part.file.write_all_at(&data, offset)).await?;
                Ok(lease)
            }
        });
        let leases: Vec<Duration> = stream::iter(written).buffered(PARTS_AHEAD).try_collect().await?;
        match leases.last() {
            Some(lease) => Ok(*lease),
            // A value without bytes has no part.
            None => self.ask(cx, value).await,
        }
    }

    fn peer(&self, value: &ValueRef) -> ReconnectingPeer {
        ReconnectingPeer::new(value.endpoints.clone(), ConnectOptions::default())
    }

    /// Asks the holder whether the value is still there, and returns its lease.
    async fn ask(&self, cx: &CallContext, value: &ValueRef) -> Result<Duration> {
        self.read(cx, &self.peer(value), value, 0, 0).await.map(|(lease, _)| lease)
    }

    async fn read(
        &self,
        cx: &CallContext,
        peer: &ReconnectingPeer,
        value: &ValueRef,
        offset: u64,
        bytes: u64,
    ) -> Result<(Duration, Bytes)> {
        let body = ReadBody { id: value.id.clone(), name: value.name.clone(), offset, bytes };
        let body = write(&body)?;
        let (policy, mut rng) = (RetryPolicy::default(), fastrand::Rng::new());
        let send = async |_| {
            let request = Request::post(cx.child(), READ_ROUTE, body.clone());
            peer.call(&self.transports, &request).await?.into_result()
        };
        let response = retry(cx, &policy, &mut rng, true, send).await.map_err(|error| {
            if error.code() != Code::Unavailable {
                return error;
            }
            let message = format!(
                "it cannot be fetched: the process that holds it does not respond at {}; if it has ended, the value is gone",
                value.endpoints.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
            );
            Error::new(Code::Unavailable, Execution::NotStarted, message).about(value.subject()).caused_by(error)
        })?;
        let reply: ReadReply = read(&response.message.head.to_bytes())?;
        let data = response.message.segments.into_iter().next().unwrap_or_default();
        Ok((Duration::from_millis(reply.lease_ms), data))
    }
}

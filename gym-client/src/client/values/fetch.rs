//! Fetches values: each node once, whatever number of processes and calls need the value.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::{self, StreamExt as _, TryStreamExt as _};
use gym_core::Endpoint;
use gym_core::transport::{ConnectOptions, RetryPolicy, retry};
use gym_core::{CallContext, Code, Error, Execution, Request, Result, World};
use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use tokio::sync::OnceCell;
use tokio::time::{Instant, sleep};

use crate::client::values::copy::{Copy, Found, NodeCopies, Part};
use crate::client::values::held::{PART_BYTES, Source, read_part};
use crate::client::values::message::{LEASE_MAX, READ_ROUTE, ReadBody, ReadReply, ValueRef, check_size, read, write};
use crate::transport::ReconnectingPeer;
use crate::transport::Transports;

/// Parts that are requested at the same time.
const PARTS_AHEAD: usize = 4;
/// Pause between two looks at a value that another process fetches.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Leases that are extended at the same time.
const ASKS_AHEAD: usize = 8;
/// Limit of a request that extends a lease in the background.
const ASK_TIMEOUT: Duration = Duration::from_secs(10);
/// Holders whose connections are kept.
const PEERS_MAX: usize = 64;

/// A value that was fetched. Cheap to clone. While a clone exists, the copy of this node stays.
#[derive(Clone, Debug)]
pub struct Value(Arc<Fetched>);

#[derive(Debug)]
struct Fetched {
    reference: ValueRef,
    place: Place,
    world: World,
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
    fn new(reference: ValueRef, place: Place, world: World) -> Self {
        Self(Arc::new(Fetched { reference, place, world, bytes: OnceCell::new() }))
    }

    pub(super) fn held(reference: ValueRef, source: Source, world: World) -> Self {
        Self::new(reference, Place::Held(source), world)
    }

    /// Returns the reference.
    #[must_use]
    pub fn reference(&self) -> &ValueRef {
        &self.0.reference
    }

    /// Returns the file with the bytes, for programs that map it or read parts of it; `None` in the process that put the value. The file
    /// stays while the value is not dropped, and must not be changed.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        match &self.0.place {
            Place::Held(_) => None,
            Place::Copy(copy) => Some(&copy.path),
        }
    }

    /// Returns the bytes. They are read into this process once, for all its calls. Has no deadline: the fetch has brought them to this node, and
    /// reads of its disk cannot be interrupted.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub async fn bytes(&self) -> Result<Bytes> {
        let value = &self.0;
        let length = usize::try_from(value.reference.bytes).unwrap_or(usize::MAX);
        let read = value.bytes.get_or_try_init(|| async {
            match &value.place {
                Place::Held(source) => source.read(&value.world, 0, length).await,
                Place::Copy(copy) => {
                    let file = copy.file.try_clone().map_err(|error| broken(&value.reference, error))?;
                    let read = move || read_part(&file, 0, length);
                    blocking(&value.world, &value.reference, read).await.map(Bytes::from)
                }
            }
        });
        read.await.cloned().map_err(|error| error.within(Execution::Finished, value.reference.subject()))
    }

    /// Deserializes a value that is JSON. Has no deadline, as [`bytes`](Self::bytes).
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
    Error::internal("the copy of this node cannot be used").caused_by(error).about(value.subject())
}

async fn blocking<T: Send + 'static>(
    world: &World,
    value: &ValueRef,
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Result<T> {
    world.blocking(work).await?.map_err(|error| broken(value, error))
}

/// A value that this process has, and the time until which it need not ask.
#[derive(Debug)]
struct Loaded {
    value: Value,
    until: Instant,
}

impl Loaded {
    fn extend(&mut self, lease: Duration) -> Result<()> {
        self.until = Instant::now() + lease;
        match &self.value.0.place {
            Place::Copy(copy) => copy.extend(lease).map_err(|error| broken(&self.value.0.reference, error)),
            Place::Held(_) => Ok(()),
        }
    }

    fn gone(&self) {
        if let Place::Copy(copy) = &self.value.0.place {
            copy.gone();
        }
    }
}

/// This process's knowledge of a value.
#[derive(Debug, Default)]
struct SlotState {
    loaded: Option<Loaded>,
    /// The last failure: calls that waited for the fetch that failed fail alike, and not one after another.
    failed: Option<(Instant, Code, String)>,
}

/// Locked by the call that fetches the value, or asks for it; the others wait within their deadlines.
type Slot = Arc<tokio::sync::Mutex<SlotState>>;

/// The values that this process has fetched.
#[derive(Debug)]
pub(super) struct Fetcher {
    transports: Transports,
    world: World,
    directory: Option<PathBuf>,
    copies_max: Option<u64>,
    copies: OnceCell<Arc<NodeCopies>>,
    slots: Mutex<BTreeMap<String, Slot>>,
    peers: Mutex<HashMap<Vec<Endpoint>, Arc<ReconnectingPeer>>>,
}

impl Fetcher {
    pub(super) fn new(
        transports: Transports,
        world: World,
        directory: Option<PathBuf>,
        copies_max: Option<u64>,
    ) -> Self {
        let (copies, slots, peers) = (OnceCell::new(), Mutex::default(), Mutex::default());
        Self { transports, world, directory, copies_max, copies, slots, peers }
    }

    pub(super) async fn fetch(&self, cx: &CallContext, value: &ValueRef) -> Result<Value> {
        value.check()?;
        let began = Instant::now();
        let slot = Arc::clone(self.slots.lock().entry(value.id.clone()).or_default());
        let fetching = async {
            let mut state = slot.lock().await;
            if let Some((at, code, message)) = &state.failed
                && *at > began
            {
                return Err(Error::finished(*code, message.clone()));
            }
            let loaded = self.load(cx, value, &mut state).await;
            if let Err(error) = &loaded
                && !matches!(error.code(), Code::DeadlineExceeded | Code::Cancelled)
            {
                let text = error.to_string();
                let message = text.strip_prefix(&format!("{}: ", value.subject())).unwrap_or(&text).to_owned();
                state.failed = Some((Instant::now(), error.code(), message));
            }
            loaded
        };
        cx.bound(Execution::Finished, fetching).await.map_err(|error| match error.subject() {
            "" => error.about(value.subject()),
            _ => error.within(Execution::Finished, value.subject()),
        })
    }

    async fn load(&self, cx: &CallContext, value: &ValueRef, state: &mut SlotState) -> Result<Value> {
        loop {
            let Some(loaded) = &mut state.loaded else {
                let (copy, left) = self.copy(cx, value).await?;
                let fetched = Value::new(value.clone(), Place::Copy(copy), self.world.clone());
                state.loaded = Some(Loaded { value: fetched, until: Instant::now() + left });
                continue;
            };
            check_size(&value.name, value.bytes, loaded.value.0.reference.bytes)?;
            if loaded.until > Instant::now() {
                return Ok(loaded.value.clone());
            }
            match self.ask(cx, value, true).await {
                Ok(lease) => {
                    loaded.extend(lease)?;
                    return Ok(loaded.value.clone());
                }
                Err(error) => {
                    if error.code() == Code::NotFound {
                        loaded.gone();
                        self.discard(state.loaded.take());
                    }
                    return Err(error);
                }
            }
        }
    }

    /// Extends the leases that end before the next call of this, in `next`. Forgets values that are gone, and frees the memory of those that nobody
    /// uses.
    pub(super) async fn keep_up(&self, next: Duration) {
        let slots: Vec<(String, Slot)> =
            self.slots.lock().iter().map(|(id, slot)| (id.clone(), Arc::clone(slot))).collect();
        let kept = stream::iter(slots).map(|(id, slot)| async move {
            // A call that has it keeps it up.
            let keeps = match slot.try_lock() {
                Ok(mut state) => self.keep(&mut state, next).await,
                Err(_) => true,
            };
            (!keeps).then_some((id, slot))
        });
        let ended: Vec<(String, Slot)> =
            kept.buffer_unordered(ASKS_AHEAD).filter_map(std::future::ready).collect().await;
        for (id, slot) in ended {
            let mut slots = self.slots.lock();
            // Two: this one and that of the map. A call that began meanwhile has a third.
            if Arc::strong_count(&slot) == 2 {
                self.discard(slots.remove(&id));
            }
            drop(slots);
            self.discard(slot);
        }
        if let Some(copies) = self.copies.get().cloned() {
            let swept = self.world.blocking(move || copies.sweep()).await;
            if let Ok(Err(error)) = swept {
                tracing::warn!(%error, "copies of values could not be removed");
            }
        }
    }

    /// Returns `false` if nothing of a value is worth keeping.
    async fn keep(&self, state: &mut SlotState, next: Duration) -> bool {
        let Some(loaded) = &mut state.loaded else { return false };
        if let Some(unused) = Arc::get_mut(&mut loaded.value.0) {
            self.discard(unused.bytes.take());
        }
        let now = Instant::now();
        if loaded.until > now + next {
            return true;
        }
        let value = loaded.value.0.reference.clone();
        match self.ask(&CallContext::within(ASK_TIMEOUT), &value, false).await {
            Ok(lease) => {
                if let Err(error) = loaded.extend(lease) {
                    tracing::warn!(%error, "the lease of a copy could not be extended");
                }
                true
            }
            Err(error) if error.code() == Code::NotFound => {
                loaded.gone();
                self.discard(state.loaded.take());
                false
            }
            // The holder may respond again.
            Err(_) if loaded.until + next > now => true,
            Err(_) => {
                self.discard(state.loaded.take());
                false
            }
        }
    }

    /// Returns the copy of this node, and the time for which it can be used without a request. Fetches the value if nobody else does.
    async fn copy(&self, cx: &CallContext, value: &ValueRef) -> Result<(Copy, Duration)> {
        let (directory, copies_max, world) = (self.directory.clone(), self.copies_max, self.world.clone());
        let open = || async {
            let open = move || NodeCopies::open(directory.as_deref(), copies_max, world);
            self.world.blocking(open).await?.map(Arc::new)
        };
        let copies = self.copies.get_or_try_init(open).await?;
        loop {
            let (shared, wanted) = (Arc::clone(copies), value.clone());
            match blocking(&self.world, value, move || shared.find(&wanted)).await? {
                Found::Complete(copy, left) => {
                    let bytes = copy.file.metadata().map_err(|error| broken(value, error))?.len();
                    return check_size(&value.name, value.bytes, bytes).map(|()| (copy, left));
                }
                Found::Busy => sleep(POLL_INTERVAL).await,
                Found::Mine(part) => {
                    let part = Arc::new(part);
                    self.room(copies, value, &part).await?;
                    let lease = self.parts(cx, value, &part).await?;
                    let part = Arc::into_inner(part).ok_or_else(|| Error::internal("a part is still being written"))?;
                    if let Some(copy) = blocking(&self.world, value, move || part.complete(lease)).await? {
                        return Ok((copy, lease));
                    }
                }
            }
        }
    }

    /// Makes room for a value, at the cost of what nobody uses.
    async fn room(&self, copies: &Arc<NodeCopies>, value: &ValueRef, part: &Arc<Part>) -> Result<()> {
        let mut freed = false;
        loop {
            let (copies, wanted, part) = (Arc::clone(copies), value.clone(), Arc::clone(part));
            match blocking(&self.world, value, move || Ok(copies.make_room(&wanted, &part))).await? {
                Ok(true) => return Ok(()),
                Ok(false) => sleep(POLL_INTERVAL).await,
                Err(error) if error.code() == Code::ResourceExhausted && !freed => {
                    freed = true;
                    self.forget_unused().await;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Forgets the values that this process keeps for later calls, so that their copies can be removed.
    async fn forget_unused(&self) {
        let mut unused = Vec::new();
        self.slots.lock().retain(|_, slot| {
            let used = Arc::strong_count(slot) > 1
                || slot.try_lock().is_ok_and(|state| {
                    state.loaded.as_ref().is_some_and(|loaded| Arc::strong_count(&loaded.value.0) > 1)
                });
            if !used {
                unused.push(Arc::clone(slot));
            }
            used
        });
        let _ = self.world.blocking(move || drop(unused)).await;
    }

    /// Writes all parts of a value, and returns the lease of the last one.
    async fn parts(&self, cx: &CallContext, value: &ValueRef, part: &Arc<Part>) -> Result<Duration> {
        let offsets = (0..value.bytes).step_by(usize::try_from(PART_BYTES).unwrap_or(usize::MAX));
        let written = offsets.map(|offset| async move {
            let bytes = PART_BYTES.min(value.bytes - offset);
            let (lease, data) = self.read(cx, value, offset, bytes, true).await?;
            if data.len() as u64 != bytes {
                let message = format!("{} bytes arrived from byte {offset}, not {bytes}", data.len());
                return Err(Error::finished(Code::DataLoss, message).about(value.subject()));
            }
            let part = Arc::clone(part);
            blocking(&self.world, value, move || part.file.write_all_at(&data, offset)).await?;
            Ok(lease)
        });
        let leases: Vec<Duration> = stream::iter(written).buffered(PARTS_AHEAD).try_collect().await?;
        match leases.last() {
            Some(lease) => Ok(*lease),
            // A value without bytes has no part.
            None => self.ask(cx, value, true).await,
        }
    }

    /// Drops something that may remove a large file, away from the calls.
    fn discard(&self, dropped: impl Send + 'static) {
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) if !self.world.is_simulated() => drop(runtime.spawn_blocking(move || drop(dropped))),
            _ => drop(dropped),
        }
    }

    fn peer(&self, value: &ValueRef) -> Arc<ReconnectingPeer> {
        let mut peers = self.peers.lock();
        if peers.len() >= PEERS_MAX && !peers.contains_key(&value.endpoints) {
            peers.clear();
        }
        let new = || Arc::new(ReconnectingPeer::new(value.endpoints.clone(), ConnectOptions::default()));
        Arc::clone(peers.entry(value.endpoints.clone()).or_insert_with(new))
    }

    /// Asks the holder whether the value is still there, and returns its lease.
    async fn ask(&self, cx: &CallContext, value: &ValueRef, used: bool) -> Result<Duration> {
        self.read(cx, value, 0, 0, used).await.map(|(lease, _)| lease)
    }

    async fn read(
        &self,
        cx: &CallContext,
        value: &ValueRef,
        offset: u64,
        bytes: u64,
        used: bool,
    ) -> Result<(Duration, Bytes)> {
        let (id, name, size) = (value.id.clone(), value.name.clone(), value.bytes);
        let body = write(&ReadBody { id, name, size, offset, bytes, used })?;
        let (policy, mut rng) = (RetryPolicy::default(), fastrand::Rng::new());
        let peer = self.peer(value);
        let send = async |_| {
            let request = Request::post(cx.child(), READ_ROUTE, body.clone());
            let response = peer.call(&self.transports, &request).await?.into_result()?;
            let reply: ReadReply = read(&response.message.head.to_bytes())?;
            Ok((reply, response.message.segments.into_iter().next().unwrap_or_default()))
        };
        let (reply, data) =
            retry(cx, &policy, &mut rng, true, send).await.map_err(|error| not_from_holder(value, error))?;
        Ok((Duration::from_millis(reply.lease_ms).min(LEASE_MAX), data))
    }
}

/// Names the holder in an error of anything but the holder itself, whose errors name the value.
fn not_from_holder(value: &ValueRef, error: Error) -> Error {
    if error.subject() == value.subject() {
        return error.with_execution(Execution::Finished);
    }
    let endpoints = value.endpoints.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    let here = |endpoint: &Endpoint| {
        let host = endpoint.address().rsplit_once(':').map_or(endpoint.address(), |(host, _)| host);
        host == "localhost" || host.starts_with("127.") || host == "[::1]"
    };
    let mut message = format!("it cannot be fetched from {endpoints}");
    let code = match error.code() {
        Code::Unavailable => {
            message.push_str(": if the process that held it has ended, the value is gone");
            if value.endpoints.iter().all(here) {
                message.push_str(
                    "\n  fix: if that process is on another machine, set ValuesOptions::host there; it listens on loopback",
                );
            }
            Code::Unavailable
        }
        code @ (Code::DeadlineExceeded | Code::Cancelled) => code,
        // Somebody else listens there now.
        _ => Code::DataLoss,
    };
    Error::finished(code, message).about(value.subject()).caused_by(error)
}

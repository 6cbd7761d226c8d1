//! Large values by reference: one process puts a value once, and each node that needs it fetches it once.
//!
//! ```text
//!   put ──► HeldValue ──► ValueRef ── in a row, in the arguments of a group call ──► fetch ──► Value
//!             │ held while the handle exists, then for a lease                          │ one copy for each node,
//!             └◄──────────────── point to point, by the best transport ─────────────────┘ for all its processes
//! ```
//!
//! ```
//! use std::time::Duration;
//!
//! use gym_client::Transports;
//! use gym_client::values::{ValueRef, Values, ValuesOptions};
//! use gym_core::{CallContext, Result};
//!
//! # #[tokio::main] async fn main() -> Result<()> {
//! // The process that has the value:
//! let values = Values::new(Transports::standard(), ValuesOptions::default());
//! let corpus = values.put("corpus", "many documents").await?;
//! let row = serde_json::json!({"question": "…", "corpus": corpus.reference()});
//!
//! // A server that gets the row, or a worker that gets the call:
//! let reference: ValueRef = serde_json::from_value(row["corpus"].clone()).unwrap();
//! let value = values.fetch(&CallContext::within(Duration::from_secs(60)), &reference).await?;
//! assert_eq!(value.bytes().await?, "many documents");
//! # Ok(()) }
//! ```
//!
//! - **Leases.** A value is held while its [`HeldValue`] exists, and then for the lease. A copy is used without a request to the holder for the
//!   lease; then its node asks. If the value is gone, or the holder is, [`Values::fetch`] returns an error with the value's name.
//! - **Nodes.** All processes of one user on one machine share the copies in a directory in memory (`GYM_VALUES_DIR`, or one in
//!   `/dev/shm`), which must be on a local file system. Processes with different directories are different nodes. A copy stays while a process uses it,
//!   and for its lease; processes with values remove what others have left.
//! - **Trust.** Whoever knows the id of a value can fetch it. The listener uses loopback unless [`ValuesOptions::host`] names another
//!   address, and then it warns.

mod copy;
mod fetch;
mod held;
mod message;

use std::fs::File;
use std::io::Read as _;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use gym_core::transport::{ListenOptions, serve};
use gym_core::{CallContext, CancelToken, Code, Endpoint, Error, Execution, Handler, Result, World};
use parking_lot::Mutex;
use tokio::sync::OnceCell;
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::transport::{HTTP, Transports};
use fetch::Fetcher;
pub use fetch::Value;
pub use held::HeldValue;
use held::{HeldFile, HeldHandler, HeldValues, Source};
use message::LEASE_MAX;
pub use message::ValueRef;

/// The longest name of a value, in bytes.
const NAME_MAX: usize = 256;
const LEASE_MIN: Duration = Duration::from_millis(100);
/// The shortest time between two looks for what has expired.
const EXPIRE_INTERVAL_MIN: Duration = Duration::from_millis(50);

/// Options of [`Values`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ValuesOptions {
    /// The host to bind when the first value is put. Default: `127.0.0.1`, which only this machine reaches.
    pub host: String,
    /// The port to bind. Default: 0, any free port.
    pub port: u16,
    /// The host at which other machines reach this one. Default: `host`; required if that is `0.0.0.0`.
    pub advertise: Option<String>,
    /// The time for which a value stays after its handle was dropped and after each request, and for which a copy is used without a request to the holder.
    /// From 100 ms to a day. Default: 60 s.
    pub lease: Duration,
    /// The most bytes that values in memory may have together; files do not count. Default: 8 GiB.
    pub memory_max: u64,
    /// The directory for the copies of this node. Default: `GYM_VALUES_DIR`, or one of this user in `/dev/shm`.
    pub copies: Option<PathBuf>,
    /// The most bytes that the copies of this node may have together. Default: half of the directory's file system.
    pub copies_max: Option<u64>,
}

impl Default for ValuesOptions {
    fn default() -> Self {
        Self {
            host: "127.0.0.1".to_owned(),
            port: 0,
            advertise: None,
            lease: Duration::from_secs(60),
            memory_max: 8 << 30,
            copies: None,
            copies_max: None,
        }
    }
}

impl Drop for ValuesState {
    /// The values are gone, and so are the copies that other processes of this node made and no longer use.
    fn drop(&mut self) {
        self.held.end();
    }
}

/// Puts values and fetches them. Cheap to clone; clones share everything. When the last clone is dropped, the values that it holds are
/// gone.
#[derive(Clone, Debug)]
pub struct Values(Arc<ValuesState>);

#[derive(Debug)]
struct ValuesState {
    options: ValuesOptions,
    transports: Transports,
    world: World,
    held: Arc<HeldValues>,
    fetcher: Fetcher,
    endpoints: OnceCell<Vec<Endpoint>>,
    expires: AtomicBool,
    /// Set when the listener has failed.
    listener_failed: Arc<AtomicBool>,
    /// The listener, and the task that removes what has expired. They end with the last clone.
    tasks: Mutex<JoinSet<()>>,
}

impl Values {
    /// Creates a set of values. It listens when the first value is put, and opens its directory when the first one is fetched.
    #[must_use]
    pub fn new(transports: Transports, options: ValuesOptions) -> Self {
        Self::in_world(transports, options, &World::real())
    }

    /// As [`new`](Self::new), in a world: its wall clock has the times of the leases, and a simulated one runs everything on one thread.
    #[must_use]
    pub fn in_world(transports: Transports, options: ValuesOptions, world: &World) -> Self {
        let (copies, of_fetcher) = (options.copies.clone(), world.clone());
        Self(Arc::new(ValuesState {
            held: Arc::new(HeldValues::new(options.lease, options.memory_max, copies.clone(), world.clone())),
            fetcher: Fetcher::new(transports.clone(), of_fetcher, copies, options.copies_max),
            world: world.clone(),
            endpoints: OnceCell::new(),
            expires: AtomicBool::new(false),
            listener_failed: Arc::default(),
            tasks: Mutex::default(),
            options,
            transports,
        }))
    }

    /// Holds bytes for others. Copies nothing. Has no deadline, because it waits for no other process: the first call binds a port of this machine.
    ///
    /// # Errors
    /// `InvalidArgument` for an invalid name or option. `ResourceExhausted` if all values would have more than
    /// [`ValuesOptions::memory_max`] bytes. The errors of the listener.
    pub async fn put(&self, name: &str, bytes: impl Into<Bytes>) -> Result<HeldValue> {
        let bytes = bytes.into();
        self.hold(name, bytes.len() as u64, Source::Memory(bytes)).await
    }

    /// Holds a file for others, without reading it into memory. The file must not change. Has no deadline: it waits only for the file system, whose
    /// calls cannot be interrupted.
    ///
    /// # Errors
    /// `NotFound` or another error of the disk if the file cannot be opened; otherwise as [`put`](Self::put).
    pub async fn put_file(&self, name: &str, path: impl AsRef<Path>) -> Result<HeldValue> {
        let path = path.as_ref().to_owned();
        let shown = path.display().to_string();
        let opened = self.0.world.blocking(move || HeldFile::new(File::open(path)?)).await?;
        let file = opened.map_err(|error| {
            let code = match error.kind() {
                std::io::ErrorKind::NotFound => Code::NotFound,
                _ => Code::InvalidArgument,
            };
            let message = format!("the file {shown} cannot be read: {error}");
            Error::not_started(code, message).about(format!("value `{name}`"))
        })?;
        self.hold(name, file.bytes(), Source::File(Arc::new(file))).await
    }

    async fn hold(&self, name: &str, bytes: u64, source: Source) -> Result<HeldValue> {
        if name.is_empty() || name.len() > NAME_MAX || name.chars().any(char::is_control) {
            let message = format!("the name of a value has 1 to {NAME_MAX} bytes and no control characters");
            return Err(Error::invalid(message).about(format!("value {name:?}")));
        }
        let endpoints = self.0.endpoints.get_or_try_init(|| self.0.listen()).await;
        let endpoints = endpoints.map_err(|error| error.about(format!("value `{name}`")))?.clone();
        if self.0.listener_failed.load(Ordering::Relaxed) {
            let message = "the listener of this process has failed, so nobody could fetch it; its error was logged";
            return Err(Error::not_started(Code::Unavailable, message).about(format!("value `{name}`")));
        }
        self.expire_in_time();
        let id = unguessable(&self.0.world).await?;
        self.0.held.hold(ValueRef { name: name.to_owned(), id, bytes, endpoints }, source)
    }

    /// Returns the value of a reference: from this process, from the copy of this node, or from the process that holds it. While this process
    /// or another one of this node fetches the value, waits for that.
    ///
    /// The deadline of `cx` must leave time for the transfer: a fetch whose deadline passes begins again with the next call.
    ///
    /// # Errors
    /// All have the value's name, and are `Finished`. `NotFound` if the value is gone; `Unavailable` if the process that holds it cannot be reached.
    /// `InvalidArgument` if the reference is none, or says another size. `ResourceExhausted` if this node has no room for a copy.
    /// `DataLoss` if what arrives is not the value. `Internal` if the directory cannot be used. `DeadlineExceeded` and `Cancelled` as `cx`
    /// says.
    pub async fn fetch(&self, cx: &CallContext, value: &ValueRef) -> Result<Value> {
        let own = self.0.held.own(value).map_err(|error| error.with_execution(Execution::Finished));
        if let Some(source) = own? {
            return Ok(Value::held(value.clone(), source, self.0.world.clone()));
        }
        self.expire_in_time();
        self.0.fetcher.fetch(cx, value).await
    }

    /// Begins to remove what has expired, if that has not begun.
    fn expire_in_time(&self) {
        if self.0.expires.swap(true, Ordering::Relaxed) {
            return;
        }
        let state = Arc::downgrade(&self.0);
        let every = (self.0.options.lease / 2).max(EXPIRE_INTERVAL_MIN);
        self.0.spawn(async move {
            loop {
                sleep(every).await;
                let Some(state) = state.upgrade() else { return };
                let held = Arc::clone(&state.held);
                let _ = state.world.blocking(move || held.expire()).await;
                state.fetcher.keep_up(every).await;
            }
        });
    }
}

/// Returns 32 hexadecimal digits from the kernel's source of random numbers; in a simulated world, from its seed.
async fn unguessable(world: &World) -> Result<String> {
    if world.is_simulated() {
        return Ok(world.unique_id());
    }
    let read = world.blocking(|| {
        let mut bytes = [0; 16];
        File::open("/dev/urandom")?.read_exact(&mut bytes).map(|()| bytes)
    });
    let bytes = read.await?.map_err(|error| Error::internal("the kernel gives no random numbers").caused_by(error))?;
    Ok(format!("{:032x}", u128::from_be_bytes(bytes)))
}

impl ValuesState {
    async fn listen(&self) -> Result<Vec<Endpoint>> {
        let ValuesOptions { host, port, advertise, lease, .. } = &self.options;
        if !(LEASE_MIN..=LEASE_MAX).contains(lease) {
            let message = format!("the lease of values is {lease:?}; it must be from {LEASE_MIN:?} to {LEASE_MAX:?}");
            return Err(Error::invalid(message));
        }
        let is = |test: fn(&IpAddr) -> bool| host.parse().is_ok_and(|ip| test(&ip));
        if is(IpAddr::is_unspecified) && advertise.is_none() {
            let message =
                "it binds all addresses, and which one others reach is unknown\n  fix: set ValuesOptions::advertise";
            return Err(Error::invalid(message));
        }
        if !is(IpAddr::is_loopback) && host != "localhost" {
            tracing::warn!(
                host,
                "values are sent to whoever knows their ids, which travel unencrypted; use a network that you trust"
            );
        }
        let mut place = ListenOptions::default().at(host.clone(), *port);
        if let Some(advertise) = advertise {
            place = place.advertised_as(advertise.clone());
        }
        let handler: Arc<dyn Handler> = Arc::new(HeldHandler(Arc::clone(&self.held)));
        let (listener, handler) = self.transports.listen(place, handler, &[HTTP]).await?;
        let endpoints = listener.endpoints().to_vec();
        let (served, listener_failed) =
            (serve(listener, handler, CancelToken::new(), Duration::ZERO), Arc::clone(&self.listener_failed));
        self.spawn(async move {
            if let Err(error) = served.await {
                tracing::error!(%error, "the values of this process can no longer be fetched");
                listener_failed.store(true, Ordering::Relaxed);
            }
        });
        Ok(endpoints)
    }

    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.tasks.lock().spawn(task);
    }
}

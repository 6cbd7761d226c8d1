//! The values that this process holds for others.

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use futures_util::future::BoxFuture;
use gym_core::message::{ContentType, Status};
use gym_core::{CallContext, Code, Error, Execution, Handler, Message, Request, Response, Result, Verb, World};
use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use crate::client::values::copy::forget;
use crate::client::values::message::{READ_ROUTE, ReadBody, ReadReply, ValueRef, WHOLE_ROUTE, check_size, read, write};

/// The largest part that one response has.
pub(super) const PART_BYTES: u64 = 8 << 20;
/// The largest value that one response of `GET /values/ID` has, because it is read into memory.
const WHOLE_BYTES_MAX: u64 = 256 << 20;
/// Values that are read for `GET /values/ID` at the same time.
const WHOLE_READS: usize = 2;
/// The last values that are gone, of which errors tell the reason.
const GONE_MAX: usize = 1_024;

/// Where the bytes of a value are.
#[derive(Clone, Debug)]
pub(super) enum Source {
    Memory(Bytes),
    File(Arc<HeldFile>),
}

/// A file, and what it was when it was put.
#[derive(Debug)]
pub(super) struct HeldFile {
    file: File,
    bytes: u64,
    changed: SystemTime,
}

impl HeldFile {
    pub(super) fn new(file: File) -> io::Result<Self> {
        let found = file.metadata()?;
        if !found.is_file() {
            return Err(io::Error::other("it is not a regular file"));
        }
        Ok(Self { bytes: found.len(), changed: found.modified()?, file })
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    fn read(&self, offset: u64, bytes: usize) -> io::Result<Vec<u8>> {
        let part = read_part(&self.file, offset, bytes)?;
        // After the read, so that what was read is what was put.
        let found = self.file.metadata()?;
        if (found.len(), found.modified()?) != (self.bytes, self.changed) {
            return Err(io::Error::other("it has changed"));
        }
        Ok(part)
    }
}

/// Reads a part of a file.
pub(super) fn read_part(file: &File, offset: u64, bytes: usize) -> io::Result<Vec<u8>> {
    let mut part = vec![0; bytes];
    file.read_exact_at(&mut part, offset).map(|()| part)
}

impl Source {
    /// Reads a part. The caller has checked that it is within the value.
    pub(super) async fn read(&self, world: &World, offset: u64, bytes: usize) -> Result<Bytes> {
        match self {
            Self::Memory(whole) => {
                let start = usize::try_from(offset).unwrap_or(usize::MAX);
                let part = start..start.saturating_add(bytes);
                if part.end > whole.len() {
                    return Err(Error::invalid("the value has no such part"));
                }
                Ok(whole.slice(part))
            }
            Self::File(file) => {
                let file = Arc::clone(file);
                let part = world.blocking(move || file.read(offset, bytes)).await?;
                let broken = |error| {
                    let message = "the file that was put cannot be read; it must not change while it is held";
                    Error::finished(Code::DataLoss, message).caused_by(error)
                };
                part.map(Bytes::from).map_err(broken)
            }
        }
    }
}

#[derive(Debug)]
struct Entry {
    name: String,
    source: Source,
    bytes: u64,
    /// `None` while a [`HeldValue`] exists.
    until: Option<Instant>,
    fetches: u64,
}

/// All values of this process.
#[derive(Debug)]
pub(super) struct HeldValues {
    lease: Duration,
    memory_max: u64,
    /// The directory with the copies of this node.
    copies: Option<PathBuf>,
    world: World,
    /// Held by responses that read a whole file.
    whole: Semaphore,
    state: Mutex<HeldState>,
}

#[derive(Debug, Default)]
struct HeldState {
    values: BTreeMap<String, Entry>,
    memory: u64,
    gone: VecDeque<(String, &'static str)>,
    /// Values whose copies on this node nobody needs.
    forgotten: Vec<String>,
}

impl HeldState {
    fn remove(&mut self, id: &str, why: &'static str) {
        let Some(entry) = self.values.remove(id) else { return };
        if let Source::Memory(_) = entry.source {
            self.memory -= entry.bytes;
        }
        if self.gone.len() == GONE_MAX {
            self.gone.pop_front();
        }
        self.gone.push_back((id.to_owned(), why));
        self.forgotten.push(id.to_owned());
    }

    fn expire(&mut self, now: Instant) {
        let expired = self.values.iter().filter(|(_, entry)| entry.until.is_some_and(|until| until <= now));
        let expired: Vec<String> = expired.map(|(id, _)| id.clone()).collect();
        expired.iter().for_each(|id| self.remove(id, "its lease has ended"));
    }

    fn entry(&mut self, id: &str, name: &str) -> Result<&mut Entry> {
        self.expire(Instant::now());
        let Self { values, gone, .. } = self;
        values.get_mut(id).ok_or_else(|| {
            let why = reason(gone, id).unwrap_or("the process that put it has ended, or never had it");
            Error::not_started(Code::NotFound, format!("it is gone: {why}")).about(format!("value `{name}`"))
        })
    }
}

/// Returns why a value of this process is gone.
fn reason(gone: &VecDeque<(String, &'static str)>, id: &str) -> Option<&'static str> {
    gone.iter().rev().find(|(gone, _)| gone == id).map(|(_, why)| *why)
}

impl HeldValues {
    pub(super) fn new(lease: Duration, memory_max: u64, copies: Option<PathBuf>, world: World) -> Self {
        Self { lease, memory_max, copies, world, whole: Semaphore::new(WHOLE_READS), state: Mutex::default() }
    }

    pub(super) fn hold(self: &Arc<Self>, reference: ValueRef, source: Source) -> Result<HeldValue> {
        let mut state = self.state.lock();
        state.expire(Instant::now());
        if let Source::Memory(_) = source {
            if state.memory.saturating_add(reference.bytes) > self.memory_max {
                let message = format!(
                    "{} bytes do not fit beside the {} bytes of other values; {} bytes may be held in memory\n  fix: release values, \
                     put a file, or raise ValuesOptions::memory_max",
                    reference.bytes, state.memory, self.memory_max
                );
                return Err(Error::not_started(Code::ResourceExhausted, message).about(reference.subject()));
            }
            state.memory += reference.bytes;
        }
        let entry = Entry { name: reference.name.clone(), source, bytes: reference.bytes, until: None, fetches: 0 };
        state.values.insert(reference.id.clone(), entry);
        drop(state);
        Ok(HeldValue { values: Arc::clone(self), reference })
    }

    /// Returns the source of a value that this process put; `None` if another process did.
    ///
    /// # Errors
    /// `NotFound` if the value is gone.
    pub(super) fn own(&self, value: &ValueRef) -> Result<Option<Source>> {
        let mut state = self.state.lock();
        if !state.values.contains_key(&value.id) && reason(&state.gone, &value.id).is_none() {
            return Ok(None);
        }
        let entry = state.entry(&value.id, &value.name)?;
        check_size(&entry.name, value.bytes, entry.bytes)?;
        Ok(Some(entry.source.clone()))
    }

    /// Ends all values, because the process or the set of values ends.
    pub(super) fn end(&self) {
        if self.world.is_killed() {
            return;
        }
        let mut state = self.state.lock();
        let all: Vec<String> = state.values.keys().cloned().collect();
        all.iter().for_each(|id| state.remove(id, "the process that put it has ended"));
        drop(state);
        self.forget();
    }

    /// Removes values whose leases have ended.
    pub(super) fn expire(&self) {
        self.state.lock().expire(Instant::now());
        self.forget();
    }

    /// Removes the copies that this node has of values that are gone.
    fn forget(&self) {
        let forgotten = std::mem::take(&mut self.state.lock().forgotten);
        forget(self.copies.as_deref(), forgotten.iter().map(String::as_str));
    }

    fn extended(&self, entry: &mut Entry) {
        if let Some(until) = &mut entry.until {
            *until = Instant::now() + self.lease;
        }
    }

    async fn part(&self, body: ReadBody) -> Result<Response> {
        let (source, subject) = {
            let mut state = self.state.lock();
            let entry = state.entry(&body.id, &body.name)?;
            check_size(&entry.name, body.size, entry.bytes)?;
            let subject = format!("value `{}`", entry.name);
            let end = body.offset.checked_add(body.bytes).filter(|end| *end <= entry.bytes && body.bytes <= PART_BYTES);
            if end.is_none() {
                let message = format!("it has no part of {} bytes from byte {}", body.bytes, body.offset);
                return Err(Error::invalid(message).about(subject));
            }
            if body.used {
                self.extended(entry);
            }
            entry.fetches += u64::from(body.offset == 0 && body.bytes > 0);
            (entry.source.clone(), subject)
        };
        let part = source.read(&self.world, body.offset, usize::try_from(body.bytes).unwrap_or(usize::MAX)).await;
        let part = part.map_err(|error| error.about(subject))?;
        let lease_ms = u64::try_from(self.lease.as_millis()).unwrap_or(u64::MAX);
        let mut message = Message::json(write(&ReadReply { lease_ms })?);
        message.segments.push(part);
        Ok(Response::new(Status::OK, message))
    }

    async fn whole(&self, cx: &CallContext, id: &str) -> Result<Response> {
        let (source, bytes, subject) = {
            let mut state = self.state.lock();
            let entry = state.entry(id, id)?;
            let subject = format!("value `{}`", entry.name);
            if entry.bytes > WHOLE_BYTES_MAX {
                let message = format!(
                    "it has {} bytes, and one response has at most {WHOLE_BYTES_MAX}\n  fix: fetch it with Values::fetch, or put smaller \
                     values",
                    entry.bytes
                );
                return Err(Error::invalid(message).about(subject));
            }
            self.extended(entry);
            entry.fetches += 1;
            (entry.source.clone(), entry.bytes, subject)
        };
        let read = async {
            let _turn = self.whole.acquire().await.map_err(|error| Error::internal("no turn").caused_by(error))?;
            source.read(&self.world, 0, usize::try_from(bytes).unwrap_or(usize::MAX)).await
        };
        let whole = cx.bound(Execution::Finished, read).await.map_err(|error| error.about(subject))?;
        let content_type = ContentType::Other("application/octet-stream".into());
        Ok(Response::new(Status::OK, Message { content_type, head: whole.into(), segments: Vec::new() }))
    }
}

/// Answers those who fetch.
#[derive(Debug)]
pub(super) struct HeldHandler(pub(super) Arc<HeldValues>);

impl Handler for HeldHandler {
    fn handle(&self, request: Request) -> BoxFuture<'static, Result<Response>> {
        let values = Arc::clone(&self.0);
        Box::pin(async move {
            match (request.verb, request.route.path()) {
                (Verb::Post, READ_ROUTE) => values.part(read(&request.message.head.to_bytes())?).await,
                (Verb::Get, path) if path.starts_with(WHOLE_ROUTE) => {
                    values.whole(&request.context, &path[WHOLE_ROUTE.len()..]).await
                }
                (verb, path) => {
                    Err(Error::not_started(Code::NotFound, format!("a holder of values has no route {verb} {path}")))
                }
            }
        })
    }
}

/// A value that this process holds.
///
/// The value can be fetched while this handle exists. When the handle is dropped, the value stays for the lease
/// ([`ValuesOptions::lease`](super::ValuesOptions::lease)), and for the lease after each later request; then it is gone. A process that ends
/// takes its values with it.
#[derive(Debug)]
#[must_use = "a value whose handle is dropped is gone when its lease ends"]
pub struct HeldValue {
    values: Arc<HeldValues>,
    reference: ValueRef,
}

impl HeldValue {
    /// Returns a reference to the value, for rows, arguments and settings.
    #[must_use]
    pub fn reference(&self) -> &ValueRef {
        &self.reference
    }

    /// Returns how often a transfer of the value began: once for each node that needed it, and again after a failure.
    #[must_use]
    pub fn fetches(&self) -> u64 {
        self.values.state.lock().values.get(&self.reference.id).map_or(0, |entry| entry.fetches)
    }

    /// Releases the value at once. Nodes that have fetched it use their copy until its lease ends.
    pub fn release(self) {
        self.values.state.lock().remove(&self.reference.id, "it was released");
        self.values.forget();
    }
}

impl Drop for HeldValue {
    fn drop(&mut self) {
        let mut state = self.values.state.lock();
        if let Some(entry) = state.values.get_mut(&self.reference.id) {
            entry.until = Some(Instant::now() + self.values.lease);
        }
    }
}

//! The thread of a device: it makes all calls of NCCL and of the device's streams, looks at what is in flight, and ends what has failed.
//!
//! ```text
//!   Command ──► thread ──► NCCL, in the order of the ranks' calls ──► stream ──► event past: the transfer ends
//!                  └─► asynchronous error, deadline of a join, abort: a thread of its own calls ncclCommAbort ──► transfers end with the cause
//! ```

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::time::Duration;

use gym_core::group::DType;
use gym_core::group::collective::{Buffer, Completion, FirstCause, Memory, Moving};
use gym_core::{Code, Error, Result};
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::nccl::UniqueId;
use crate::nccl::cuda::{CudaDevice, CudaError, CudaMemory, Event, Stream};
use crate::nccl::failure::{again, failed};
use crate::nccl::raw::{Comm, Communication, Operation, Progress};

/// Commands that wait for the thread at most. Beyond, a call is refused.
const COMMANDS_MAX: usize = 4096;
/// How often the thread looks at what is in flight.
const POLL_INTERVAL: Duration = Duration::from_micros(100);
/// The time after which an abort is given up. NCCL's may hang (NVIDIA/nccl#549), and what a rank has on its device cannot be taken back without it.
const ABORT_TIMEOUT: Duration = Duration::from_secs(5);
/// Exit code of a process whose abort hangs: `EX_SOFTWARE` of sysexits.h.
const ABORT_HANGS: i32 = 70;

/// An operation whose ranks have agreed on it.
#[derive(Debug)]
pub(super) struct Run {
    pub(super) operation: Operation,
    pub(super) count: usize,
    pub(super) dtype: DType,
    pub(super) memory: Box<CudaMemory>,
    /// The bytes of the result, if it has memory of its own, which the thread allocates.
    pub(super) result_bytes: Option<usize>,
    pub(super) result: Option<Box<CudaMemory>>,
    pub(super) completion: Completion,
    pub(super) began: Instant,
}

impl Run {
    pub(super) fn end(self, ended: Result<()>) {
        let bytes = |memory: &CudaMemory| gym_core::group::collective::DeviceMemory::bytes(memory) as u64;
        let moved = bytes(&self.memory).max(self.result.as_deref().map_or(0, bytes));
        let memory = match (&ended, self.result) {
            (Ok(()), Some(result)) => result,
            _ => self.memory,
        };
        let buffer = Buffer::new(self.dtype, Memory::Device(memory));
        self.completion.finish(buffer, ended.map(|()| Moving::new(moved, self.began.elapsed())));
    }
}

/// The function that is called when a communicator fails by itself.
pub(super) type OnFailure = Box<dyn Fn(Error) + Send>;

pub(super) enum Command {
    Join {
        comm: u64,
        id: Box<UniqueId>,
        world_size: usize,
        position: usize,
        /// When it is set, everything of the communicator ends with it.
        cause: Arc<FirstCause>,
        on_failure: OnFailure,
        joined: oneshot::Sender<Result<()>>,
    },
    Run(u64, Box<Run>),
    /// Copies the memory of a send of this rank to itself to that of its receive.
    Copy(Box<Run>, Box<Run>),
    /// A cause was set.
    Look,
    /// No further operation comes; what is in flight goes on.
    Release(u64),
    Aborted(u64),
}

/// The thread of a device. Cheap to clone. The thread stays with the process, as the device's context does.
#[derive(Clone)]
pub(super) struct Engine(SyncSender<Command>);

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Engine")
    }
}

impl Engine {
    pub(super) fn start(device: CudaDevice, communication: Communication) -> Result<Self> {
        let (sender, commands) = sync_channel(COMMANDS_MAX);
        let name = format!("nccl {device:?}");
        let thread = std::thread::Builder::new().name(name);
        let own = sender.clone();
        let state = State { device, communication, own, comms: BTreeMap::new() };
        let started = thread.spawn(move || state.run(&commands));
        started.map_err(|error| Error::internal("cannot start the thread of a device").caused_by(error))?;
        Ok(Self(sender))
    }

    /// Gives the thread a command, without waiting.
    pub(super) fn tell(&self, command: Command) -> Result<(), (Command, Error)> {
        self.0.try_send(command).map_err(|refused| {
            let full = matches!(refused, TrySendError::Full(_));
            let (TrySendError::Full(command) | TrySendError::Disconnected(command)) = refused;
            let why = if full {
                Error::not_started(
                    Code::ResourceExhausted,
                    format!("the device has {COMMANDS_MAX} operations to begin"),
                )
            } else {
                Error::not_started(Code::Unavailable, "the thread of the device has ended")
            };
            (command, why)
        })
    }
}

struct State {
    device: CudaDevice,
    communication: Communication,
    /// For the threads that abort.
    own: SyncSender<Command>,
    comms: BTreeMap<u64, Member>,
}

/// A communicator of this device.
struct Member {
    stage: Stage,
    stream: Option<Stream>,
    cause: Arc<FirstCause>,
    on_failure: OnFailure,
    failed: bool,
    /// Operations that wait for those before them.
    waiting: VecDeque<Box<Run>>,
    /// The operation whose call NCCL has not finished.
    launching: Option<Box<Run>>,
    running: VecDeque<(Box<Run>, Event)>,
    released: bool,
}

enum Stage {
    Joining(Comm, Option<oneshot::Sender<Result<()>>>),
    Ready(Comm),
    /// The call of ncclCommAbort is under way, until this time; then the stream must run dry.
    Aborting {
        until: Instant,
        returned: bool,
        last: Option<Event>,
    },
}

impl State {
    fn run(mut self, commands: &Receiver<Command>) {
        if let Err(error) = self.device.enter() {
            tracing::error!(%error, device = ?self.device, "the thread of the device cannot use it");
        }
        loop {
            let busy = self.comms.values().any(Member::is_busy);
            let command = if busy {
                commands.recv_timeout(POLL_INTERVAL)
            } else {
                commands.recv().map_err(|_| RecvTimeoutError::Disconnected)
            };
            match command {
                Ok(command) => {
                    self.take(command);
                    while let Ok(command) = commands.try_recv() {
                        self.take(command);
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            self.comms.retain(|number, member| member.look(*number, &self.own));
        }
    }

    fn take(&mut self, command: Command) {
        match command {
            Command::Join { comm, id, world_size, position, cause, on_failure, joined } => {
                let begun = self.device.stream().map_err(|error| Error::internal(error.to_string()));
                let begun = begun.and_then(|stream| {
                    let begun = self.communication.join(&id, world_size, position);
                    begun.map(|comm| (stream, comm)).map_err(|error| failed(&error))
                });
                match begun {
                    Ok((stream, raw)) => {
                        let member = Member {
                            stage: Stage::Joining(raw, Some(joined)),
                            stream: Some(stream),
                            cause,
                            on_failure,
                            failed: false,
                            waiting: VecDeque::new(),
                            launching: None,
                            running: VecDeque::new(),
                            released: false,
                        };
                        self.comms.insert(comm, member);
                    }
                    Err(error) => {
                        // Operations of a pair wait for a communicator for whose join nobody waits.
                        on_failure(again(&error));
                        drop(joined.send(Err(error)));
                    }
                }
            }
            Command::Run(comm, run) => match self.comms.get_mut(&comm) {
                Some(member) => member.waiting.push_back(run),
                None => run.end(Err(Error::not_started(Code::Unavailable, "the communicator has ended"))),
            },
            Command::Copy(from, to) => {
                let copied = to.memory.copy_from(&from.memory);
                let failed = |error: &CudaError| Error::unknown(Code::Unavailable, error.to_string());
                from.end(copied.as_ref().map(drop).map_err(failed));
                to.end(copied.as_ref().map(drop).map_err(failed));
            }
            Command::Look => {}
            Command::Release(comm) => {
                if let Some(member) = self.comms.get_mut(&comm) {
                    member.released = true;
                }
            }
            Command::Aborted(comm) => {
                if let Some(Member { stage: Stage::Aborting { returned, .. }, .. }) = self.comms.get_mut(&comm) {
                    *returned = true;
                }
            }
        }
    }
}

impl Member {
    fn is_busy(&self) -> bool {
        let in_flight = self.launching.is_some() || !self.running.is_empty() || !self.waiting.is_empty();
        in_flight || self.released || !matches!(self.stage, Stage::Ready(_))
    }

    /// Looks at what is in flight. Returns `false` once the communicator has ended.
    fn look(&mut self, number: u64, own: &SyncSender<Command>) -> bool {
        let idle = self.running.is_empty() && self.waiting.is_empty() && self.launching.is_none();
        let ends = self.cause.get().is_some() || self.released && (idle || self.failed);
        if ends && !matches!(self.stage, Stage::Aborting { .. }) {
            self.abort(number, own);
        }
        match &mut self.stage {
            Stage::Joining(comm, joined) => match comm.progress() {
                Ok(Progress::Pending) => true,
                Ok(Progress::Done) => {
                    let joined = joined.take();
                    let stage = std::mem::replace(&mut self.stage, Stage::ended());
                    if let Stage::Joining(comm, _) = stage {
                        self.stage = Stage::Ready(comm);
                    }
                    drop(joined.map(|joined| joined.send(Ok(()))));
                    true
                }
                Err(error) => {
                    let error = failed(&error);
                    (self.on_failure)(again(&error));
                    if let Some(joined) = joined.take() {
                        let _ = joined.send(Err(error));
                    }
                    self.abort(number, own);
                    true
                }
            },
            Stage::Ready(_) => {
                // After a failure nothing goes on: what NCCL has refused would look like an operation that has ended.
                if !self.failed
                    && let Err(error) = self.go_on()
                {
                    self.failed = true;
                    // All ranks hear of it, and this one aborts with the first cause.
                    (self.on_failure)(error);
                }
                true
            }
            Stage::Aborting { until, returned, last } => {
                let dry = *returned && last.as_ref().is_none_or(|event| event.is_past().unwrap_or(true));
                if dry {
                    let runs = std::mem::take(&mut self.running).into_iter().map(|(run, _)| run);
                    let runs = runs.chain(self.launching.take()).chain(std::mem::take(&mut self.waiting));
                    runs.for_each(|run| run.end(Err(ended_by(&self.cause))));
                    return false;
                }
                if Instant::now() > *until {
                    eprintln!(
                        "NCCL did not abort a communicator within {ABORT_TIMEOUT:?} ({}): this process ends, so that its rank can be started again",
                        ended_by(&self.cause)
                    );
                    std::process::exit(ABORT_HANGS);
                }
                true
            }
        }
    }

    /// Ends what is done, and enqueues what comes next.
    fn go_on(&mut self) -> Result<()> {
        let (Stage::Ready(comm), Some(stream)) = (&self.stage, &self.stream) else { return Ok(()) };
        // An asynchronous error shows here, also while nothing is launching.
        let progress = comm.progress().map_err(|error| failed(&error))?;
        let device = |error: CudaError| Error::unknown(Code::Unavailable, error.to_string());
        if progress == Progress::Done && self.launching.is_some() {
            // First, because an operation that is in no list would give its memory back while the GPU uses it.
            let event = stream.mark().map_err(device)?;
            self.running.extend(self.launching.take().map(|run| (run, event)));
        }
        while self.launching.is_none()
            && let Some(mut run) = self.waiting.pop_front()
        {
            match run.result_bytes.map(|bytes| stream.device().allocate(bytes)).transpose() {
                Ok(result) => run.result = result.map(Box::new),
                Err(error) => {
                    run.end(Err(Error::not_started(Code::ResourceExhausted, error.to_string())));
                    // The error of the transfer ends the meeting.
                    self.failed = true;
                    return Ok(());
                }
            }
            let begun = comm.start(&run.operation, run.count, run.dtype, &run.memory, run.result.as_deref(), stream);
            // It stays here until it has ended, whatever NCCL says of it.
            self.launching = Some(run);
            match begun {
                Ok(Progress::Pending) => {}
                Ok(Progress::Done) => {
                    let event = stream.mark().map_err(device)?;
                    self.running.extend(self.launching.take().map(|run| (run, event)));
                }
                Err(error) => return Err(failed(&error)),
            }
        }
        while let Some((_, event)) = self.running.front()
            && event.is_past().map_err(device)?
        {
            if let Some((run, _)) = self.running.pop_front() {
                run.end(Ok(()));
            }
        }
        Ok(())
    }

    fn abort(&mut self, number: u64, own: &SyncSender<Command>) {
        let last = self.stream.as_ref().and_then(|stream| stream.mark().ok());
        let (comm, joined) = match std::mem::replace(&mut self.stage, Stage::ended()) {
            Stage::Joining(comm, joined) => (comm, joined),
            Stage::Ready(comm) => (comm, None),
            aborting @ Stage::Aborting { .. } => {
                self.stage = aborting;
                return;
            }
        };
        if let Some(joined) = joined {
            let _ = joined.send(Err(ended_by(&self.cause)));
        }
        self.stage = Stage::Aborting { until: Instant::now() + ABORT_TIMEOUT, returned: false, last };
        let own = own.clone();
        let aborting = std::thread::Builder::new().name("nccl abort".to_owned()).spawn(move || {
            comm.abort();
            // The thread of the device takes commands for as long as one of its communicators is there.
            let _ = own.send(Command::Aborted(number));
        });
        if let Err(error) = aborting {
            tracing::error!(%error, "no thread can be started to abort a communicator of NCCL");
        }
    }
}

impl Stage {
    fn ended() -> Self {
        Self::Aborting { until: Instant::now() + ABORT_TIMEOUT, returned: true, last: None }
    }
}

/// Returns why the operations of a communicator end.
fn ended_by(cause: &FirstCause) -> Error {
    cause.get().unwrap_or_else(|| Error::not_started(Code::Unavailable, "the communicator was left"))
}

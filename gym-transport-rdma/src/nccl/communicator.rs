//! One rank of a meeting whose device memory NCCL moves.

use std::any::Any;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::BytesMut;
use gym_core::group::collective::{
    Buffer, Call, Collective, Communicator, DeviceMemory as _, Meeting, Memory, Transfer, different_calls,
};
use gym_core::group::{DType, Rank};
use gym_core::{CallContext, Code, Error, Execution, Result};
use tokio::runtime::Handle;
use tokio::time::Instant;

use crate::nccl::cuda::{CudaDevice, CudaMemory};
use crate::nccl::engine::{Cause, Command, Engine, Run};
use crate::nccl::raw::{Operation, nccl_type};

/// Bytes in which a rank tells the others what it calls.
const CALL_BYTES: usize = 192;
/// Time for the other ranks to say that they live, when an operation did not end by its deadline.
const ANSWER_WITHIN: Duration = Duration::from_millis(100);

/// One rank of a meeting. Host memory goes the way of the host communicator; device memory goes over NCCL, once all ranks have agreed on the call.
#[derive(Debug)]
pub(super) struct NcclCommunicator {
    pub(super) inner: Arc<Inner>,
    /// The number of the next operation on device memory. Locked while an operation takes its place.
    pub(super) next: Mutex<u64>,
}

#[derive(Debug)]
pub(super) struct Inner {
    pub(super) host: Arc<dyn Communicator>,
    pub(super) engine: Engine,
    pub(super) device: CudaDevice,
    /// The number of the communicator at the engine.
    pub(super) number: u64,
    pub(super) runtime: Handle,
    /// Whether the engine was told to abort.
    pub(super) aborted: AtomicBool,
}

#[async_trait]
impl Communicator for NcclCommunicator {
    fn meeting(&self) -> &Meeting {
        self.inner.host.meeting()
    }

    fn start(&self, cx: &CallContext, operation: Collective, buffer: Buffer) -> Transfer {
        if !matches!(buffer.memory, Memory::Device(_)) {
            return self.inner.host.start(cx, operation, buffer);
        }
        let began = Instant::now();
        let (completion, transfer) = Transfer::new();
        let (call, memory) = match self.accept(operation, buffer) {
            Ok(accepted) => accepted,
            Err((buffer, error)) => {
                completion.finish(buffer, Err(error));
                return transfer;
            }
        };
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        let number = *next;
        *next += 1;
        // It takes the place of the operation among those of the meeting.
        let told = self.inner.host.start(cx, Collective::AllGather, Buffer::host(DType::U8, written(&call)));
        drop(next);
        let (inner, cx) = (Arc::clone(&self.inner), cx.clone());
        self.inner.runtime.spawn(async move {
            let subject = inner.host.meeting().subject(operation, number);
            let agreed = inner.agree(&call, told).await;
            let (buffer, result) = match agreed {
                Ok(()) => inner.run(&cx, &call, number, memory, began, &subject).await,
                Err(error) => (Buffer::new(call.dtype, Memory::Device(memory)), Err(error)),
            };
            completion.finish(buffer, result.map_err(|error| error.about(subject)));
        });
        transfer
    }

    fn abort(&self, why: Error) {
        self.inner.host.abort(why);
    }

    async fn closed(&self) -> Error {
        self.inner.host.closed().await
    }
}

impl NcclCommunicator {
    /// Takes a call on device memory that NCCL can make.
    fn accept(&self, operation: Collective, buffer: Buffer) -> Result<(Call, Box<CudaMemory>), (Buffer, Error)> {
        let world_size = self.meeting().world_size();
        let check = || {
            let call = self.meeting().check(operation, &buffer)?;
            let unable = |why: String| Err(Error::not_started(Code::Unimplemented, why));
            match operation {
                Collective::Send { .. } | Collective::Receive { .. } => {
                    return unable("send and receive move host memory; copy it there first".to_owned());
                }
                Collective::ReduceScatter(_) if call.elements % world_size != 0 => {
                    return unable(format!(
                        "NCCL scatters equal parts: {} elements are not divisible by {world_size} ranks",
                        call.elements
                    ));
                }
                _ => {}
            }
            if nccl_type(call.dtype).is_none() {
                return unable(format!("NCCL has no {}", call.dtype));
            }
            Ok(call)
        };
        let call = match check() {
            Ok(call) => call,
            Err(error) => return Err((buffer, error)),
        };
        let dtype = buffer.dtype;
        let Memory::Device(memory) = buffer.memory else {
            return Err((buffer, Error::internal("host memory")));
        };
        let of_here = (&*memory as &dyn Any).downcast_ref::<CudaMemory>();
        if of_here.is_none_or(|memory| memory.device().number() != self.inner.device.number()) {
            let why = format!("the rank moves memory of {:?}, not {memory:?}; copy it there first", self.inner.device);
            return Err((Buffer::new(dtype, Memory::Device(memory)), Error::not_started(Code::Unimplemented, why)));
        }
        match (memory as Box<dyn Any>).downcast() {
            Ok(memory) => Ok((call, memory)),
            Err(_) => Err((Buffer::empty(), Error::internal("the memory is of another type"))),
        }
    }
}

impl Drop for NcclCommunicator {
    fn drop(&mut self) {
        // Operations go on; the engine ends the communicator after the last one.
        let _ = self.inner.engine.tell(Command::Release(self.inner.number));
    }
}

impl Inner {
    /// Waits until all ranks have told their calls, and compares them.
    async fn agree(&self, own: &Call, told: Transfer) -> Result<()> {
        let moved = told.await;
        moved.result?;
        let meeting = self.host.meeting();
        let bytes = moved.buffer.host_bytes().unwrap_or_default();
        let calls = bytes.chunks(CALL_BYTES).map(serde_json::from_slice::<Call>);
        let calls = calls.collect::<std::result::Result<Vec<_>, _>>();
        let calls = calls.map_err(|error| Error::internal("a rank tells its call in another form").caused_by(error))?;
        for (seat, call) in meeting.seats.iter().zip(&calls) {
            if !own.agrees_with(call) {
                let error = different_calls((meeting.rank, *own), (seat.rank, *call));
                self.host.abort(different_calls((meeting.rank, *own), (seat.rank, *call)));
                return Err(error);
            }
        }
        if calls.iter().any(|call| call.elements != own.elements) {
            let lengths: Vec<usize> = calls.iter().map(|call| call.elements).collect();
            let why = format!("NCCL gathers equal lengths, and the ranks have {lengths:?} elements; pad them");
            // Each rank sees it, so none waits.
            let error = Error::not_started(Code::Unimplemented, why);
            self.host.abort(Error::not_started(Code::Unimplemented, error.message().to_owned()));
            return Err(error);
        }
        Ok(())
    }

    /// Runs an operation on which all ranks have agreed.
    async fn run(
        self: &Arc<Self>,
        cx: &CallContext,
        call: &Call,
        number: u64,
        memory: Box<CudaMemory>,
        began: Instant,
        subject: &str,
    ) -> (Buffer, Result<gym_core::group::collective::Moving>) {
        let meeting = self.host.meeting();
        let world_size = meeting.world_size();
        let of_root = |root: Rank| meeting.position_of(root).unwrap_or_default();
        let (operation, count, result_bytes) = match call.operation {
            Collective::AllReduce(op) => (Operation::AllReduce(op), call.elements, None),
            Collective::Broadcast { root } => (Operation::Broadcast { position: of_root(root) }, call.elements, None),
            Collective::AllGather => (Operation::AllGather, call.elements, Some(memory.bytes() * world_size)),
            Collective::ReduceScatter(op) => {
                (Operation::ReduceScatter(op), call.elements / world_size, Some(memory.bytes() / world_size))
            }
            other => {
                let error = Error::internal(format!("{other} is no operation of NCCL"));
                return (Buffer::new(call.dtype, Memory::Device(memory)), Err(error));
            }
        };
        let result = match result_bytes.map(|bytes| self.device.allocate(bytes)).transpose() {
            Ok(result) => result.map(Box::new),
            Err(error) => {
                let error = || Error::not_started(Code::ResourceExhausted, error.to_string());
                self.host.abort(error().about(subject.to_owned()));
                return (Buffer::new(call.dtype, Memory::Device(memory)), Err(error()));
            }
        };
        let (completion, transfer) = Transfer::new();
        let nccl_type = nccl_type(call.dtype).unwrap_or_default();
        let dtype = call.dtype;
        let run = Run { number, operation, nccl_type, count, dtype, memory, result, completion, began };
        if let Err((command, error)) = self.engine.tell(Command::Run(self.number, Box::new(run))) {
            self.host.abort(Error::new(error.code(), error.execution(), error.message().to_owned()));
            let Command::Run(_, run) = command else { return (Buffer::empty(), Err(error)) };
            return (Buffer::new(dtype, Memory::Device(run.memory)), Err(error));
        }
        let mut transfer = std::pin::pin!(transfer);
        let ended = async {
            tokio::select! {
                biased;
                moved = transfer.as_mut() => Ok(Some(moved)),
                _ = self.host.closed() => Ok(None),
            }
        };
        let moved = match cx.bound(Execution::Unknown, ended).await {
            Ok(Some(moved)) => moved,
            failed => {
                if let Err(late) = failed {
                    self.end(late, subject).await;
                }
                self.abort(self.host.closed().await).await;
                // The engine returns the memory when NCCL no longer uses it.
                transfer.await
            }
        };
        (moved.buffer, moved.result)
    }

    /// Ends the meeting because an operation did not end in time. A rank that lives says so: the first one that does not is the cause.
    async fn end(&self, late: Error, subject: &str) {
        let cx = CallContext::within(ANSWER_WITHIN);
        let answered = self.host.start(&cx, Collective::Barrier, Buffer::empty()).await.result;
        let why = match answered {
            Ok(_) => format!("{}: all ranks answer, and NCCL does not end the operation", late.message()),
            // The failure of the barrier has ended the meeting already.
            Err(error) => error.message().to_owned(),
        };
        self.host.abort(Error::new(late.code(), Execution::Unknown, why).about(subject.to_owned()));
    }

    /// Ends the communicator of NCCL with the first cause of the meeting.
    pub(super) async fn abort(&self, cause: Error) {
        if self.aborted.swap(true, Ordering::AcqRel) {
            return;
        }
        let cause = Arc::new(cause);
        let again: Cause = Arc::new(move || {
            Error::new(cause.code(), cause.execution(), cause.message().to_owned()).about(cause.subject().to_owned())
        });
        // The thread takes commands all the time.
        while let Err((_, error)) = self.engine.tell(Command::Abort(self.number, Arc::clone(&again))) {
            if error.code() != Code::ResourceExhausted {
                return;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}

/// Returns the text of a call, with spaces up to its fixed length.
fn written(call: &Call) -> BytesMut {
    let mut text = serde_json::to_vec(call).unwrap_or_default();
    text.resize(CALL_BYTES.max(text.len()), b' ');
    BytesMut::from(&text[..])
}

//! An operation that all of its ranks have called: the work on their buffers.

use std::num::NonZero;
use std::sync::Arc;
use std::thread::available_parallelism;

use bytes::{Bytes, BytesMut};
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::time::Instant;

use crate::base::error::Error;
use crate::group::batch::tensor::DType;
use crate::group::collective::buffer::Buffer;
use crate::group::collective::cause::FirstCause;
use crate::group::collective::operation::{Call, Collective};
use crate::group::collective::reduction::{Reduction, order_of, slice_of};
use crate::group::collective::report::CollectiveTotals;
use crate::group::collective::transfer::{Completion, Moving, OnDevice};
use crate::message::CallContext;

/// Most bytes of all buffers together that are worked on in place: about 0.2 ms on one core. A larger operation would delay the other tasks of
/// the thread.
const INLINE_BYTES_MAX: usize = 1 << 20;

/// A call with its memory, and the end of its transfer.
#[derive(Debug)]
pub(super) struct Deposit {
    pub(super) call: Call,
    pub(super) memory: Deposited,
    pub(super) completion: Completion,
    pub(super) began: Instant,
    /// Those of the rank that calls.
    pub(super) totals: Arc<CollectiveTotals>,
}

/// The memory of a call; of one on a device also the bounds, which hold until its end.
#[derive(Debug)]
pub(super) enum Deposited {
    Host(BytesMut),
    Device(OnDevice, CallContext),
}

/// The calls of an operation that all of its ranks have called, on host memory.
pub(super) struct Work {
    /// Of every rank of the meeting, by position; or of the two ranks of a send, the sender first.
    pub(super) deposits: Vec<Deposit>,
    /// The index of the deposit that others get a copy of, in a broadcast or a send.
    pub(super) source: usize,
}

/// A call whose memory is being worked on.
struct Caller {
    call: Call,
    bytes: usize,
    totals: Arc<CollectiveTotals>,
    completion: Completion,
    began: Instant,
}

impl Deposit {
    /// Ends the transfer with an error.
    pub(super) fn give_back(self, cause: Error) {
        let buffer = match self.memory {
            Deposited::Host(memory) => Buffer::host(self.call.dtype, memory),
            Deposited::Device(accepted, _) => accepted.into_buffer(),
        };
        self.completion.finish(buffer, Err(cause));
    }
}

impl Work {
    /// Performs the operation and ends its transfers, here or on blocking threads. All ranks get the same result: that of the operation, or
    /// `cause` if the meeting has failed meanwhile.
    pub(super) fn perform(self, runtime: &Handle, cause: Arc<FirstCause>) {
        let Self { deposits, source } = self;
        let Some(Call { operation, dtype, .. }) = deposits.first().map(|first| first.call) else { return };
        let (mut callers, mut memory) = (Vec::with_capacity(deposits.len()), Vec::with_capacity(deposits.len()));
        for Deposit { call, memory: deposited, completion, began, totals } in deposits {
            let Deposited::Host(bytes) = deposited else { continue };
            callers.push(Caller { call, bytes: bytes.len(), completion, began, totals });
            memory.push(bytes);
        }
        let end = move |results: Vec<BytesMut>| end(callers, results, &cause);
        let reduction = |op| Reduction::new(dtype, op).expect("the call was checked when it was started");
        match operation {
            Collective::Barrier => end(memory),
            Collective::AllGather => gather(runtime, memory, end),
            Collective::AllReduce(op) => {
                let reduction = reduction(op);
                let work = move |position, mut parts: Vec<BytesMut>| {
                    reduction.reduce_into_all(&mut in_order(&mut parts, position));
                    parts
                };
                on_slices(runtime, memory, dtype, work, |slices| end(joined(slices)));
            }
            Collective::ReduceScatter(op) => {
                let reduction = reduction(op);
                let work = move |position, mut parts: Vec<BytesMut>| {
                    reduction.reduce(&mut in_order(&mut parts, position));
                    // A copy, because the part would keep the memory of the whole buffer.
                    BytesMut::from(&parts[position][..])
                };
                on_slices(runtime, memory, dtype, work, end);
            }
            Collective::Broadcast { .. } | Collective::Send { .. } | Collective::Receive { .. } => {
                let work = move |_, mut parts: Vec<BytesMut>| {
                    let elements = std::mem::take(&mut parts[source]);
                    for part in parts.iter_mut().enumerate().filter(|(at, _)| *at != source).map(|(_, part)| part) {
                        part.copy_from_slice(&elements);
                    }
                    parts[source] = elements;
                    parts
                };
                on_slices(runtime, memory, dtype, work, |slices| end(joined(slices)));
            }
        }
    }
}

/// Ends the transfers of all callers, each with its result.
fn end(callers: Vec<Caller>, results: Vec<BytesMut>, cause: &FirstCause) {
    // Read once: a failure in the midst of the loop must not divide the ranks.
    let failed = cause.get().is_some();
    for (Caller { call, bytes, completion, began, totals }, memory) in callers.into_iter().zip(results) {
        let bytes = bytes.max(memory.len()) as u64;
        let moving = Moving::new(bytes, began.elapsed());
        let result = cause.get().filter(|_| failed).map_or(Ok(moving), Err);
        if let Ok(moving) = &result {
            totals.count(call.operation.name(), "mem", moving);
        }
        completion.finish(Buffer::host(call.dtype, memory), result);
    }
}

/// Returns the parts of a slice in the order of its sum.
fn in_order(parts: &mut [BytesMut], position: usize) -> Vec<&mut [u8]> {
    let mut parts: Vec<Option<&mut [u8]>> = parts.iter_mut().map(|part| Some(&mut part[..])).collect();
    order_of(parts.len(), position).filter_map(|at| parts[at].take()).collect()
}

/// Gives every rank a buffer of its own with the elements of all.
fn gather(runtime: &Handle, memory: Vec<BytesMut>, end: impl FnOnce(Vec<BytesMut>) + Send + 'static) {
    let parts: Arc<[Bytes]> = memory.into_iter().map(BytesMut::freeze).collect();
    let bytes: usize = parts.iter().map(Bytes::len).sum();
    let work = move |_, parts: Arc<[Bytes]>| {
        let mut gathered = BytesMut::with_capacity(bytes);
        parts.iter().for_each(|part| gathered.extend_from_slice(part));
        gathered
    };
    let tasks = vec![Arc::clone(&parts); parts.len()];
    spread(runtime, bytes * parts.len(), tasks, work, end);
}

/// Divides every buffer into slices, in place, and works on each slice of all buffers.
fn on_slices<R: Send + 'static>(
    runtime: &Handle,
    mut memory: Vec<BytesMut>,
    dtype: DType,
    work: impl Fn(usize, Vec<BytesMut>) -> R + Send + Sync + 'static,
    done: impl FnOnce(Vec<R>) + Send + 'static,
) {
    let bytes = memory.iter().map(BytesMut::len).sum();
    let (world_size, elements) = (memory.len(), memory[0].len() / dtype.size());
    let mut slices: Vec<Vec<BytesMut>> = (0..world_size)
        .rev()
        .map(|position| slice_of(elements, world_size, position).start * dtype.size())
        .map(|start| memory.iter_mut().map(|buffer| buffer.split_off(start)).collect())
        .collect();
    slices.reverse();
    spread(runtime, bytes, slices, work, done);
}

/// Puts the slices of every buffer together again, without a copy.
fn joined(slices: Vec<Vec<BytesMut>>) -> Vec<BytesMut> {
    let mut slices = slices.into_iter();
    let mut buffers = slices.next().unwrap_or_default();
    for slice in slices {
        for (buffer, part) in buffers.iter_mut().zip(slice) {
            buffer.unsplit(part);
        }
    }
    buffers
}

/// Tasks that threads take one by one, and their results.
struct Spread<T, R, D> {
    tasks: Vec<(usize, T)>,
    results: Vec<Option<R>>,
    unfinished: usize,
    done: Option<D>,
}

/// Runs `work` on each task: here if the operation is small, otherwise on blocking threads. Then runs `done` on the results, in order.
fn spread<T: Send + 'static, R: Send + 'static, D: FnOnce(Vec<R>) + Send + 'static>(
    runtime: &Handle,
    bytes: usize,
    tasks: Vec<T>,
    work: impl Fn(usize, T) -> R + Send + Sync + 'static,
    done: D,
) {
    if bytes <= INLINE_BYTES_MAX {
        return done(tasks.into_iter().enumerate().map(|(at, task)| work(at, task)).collect());
    }
    let (unfinished, results) = (tasks.len(), tasks.iter().map(|_| None).collect());
    let tasks = tasks.into_iter().enumerate().collect();
    let shared = Arc::new(Mutex::new(Spread { tasks, results, unfinished, done: Some(done) }));
    let work = Arc::new(work);
    for _ in 0..unfinished.min(available_parallelism().map_or(1, NonZero::get)) {
        let (shared, work) = (Arc::clone(&shared), Arc::clone(&work));
        // Detached: the last one ends the transfers, and a thread that has begun cannot be stopped.
        runtime.spawn_blocking(move || {
            loop {
                let Some((at, task)) = shared.lock().tasks.pop() else { return };
                let result = work(at, task);
                let mut shared = shared.lock();
                shared.results[at] = Some(result);
                shared.unfinished -= 1;
                if shared.unfinished == 0 {
                    let results = std::mem::take(&mut shared.results).into_iter().flatten().collect();
                    let done = shared.done.take();
                    drop(shared);
                    if let Some(done) = done {
                        done(results);
                    }
                    return;
                }
            }
        });
    }
}

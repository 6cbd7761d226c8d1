//! NCCL's communicator, as the thread of a device uses it.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_int};
use std::ptr;

use gym_core::group::DType;
use gym_core::group::collective::ReduceOp;

use crate::machine::LoadOptions;
use crate::nccl::bindings::{CommunicatorFunctions, IN_PROGRESS, RawComm, RawConfig};
use crate::nccl::cuda::{CudaMemory, Stream};
use crate::nccl::library::{Library, NCCL, NcclResult, RawId};
use crate::nccl::{Nccl, NcclError, UniqueId};

/// The library with what communicators need. Cheap to clone.
#[derive(Clone, Debug)]
pub(super) struct Communication {
    nccl: Nccl,
    functions: CommunicatorFunctions,
}

/// How far a call has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    Done,
    Pending,
}

/// An operation as NCCL has it. Positions are those of the communicator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Operation {
    AllReduce(ReduceOp),
    Broadcast {
        position: usize,
    },
    AllGather,
    /// The ranks have these numbers of elements.
    AllGatherParts(Vec<usize>),
    ReduceScatter(ReduceOp),
    /// The ranks get these numbers of elements.
    ReduceScatterParts(ReduceOp, Vec<usize>),
    Send {
        position: usize,
    },
    Receive {
        position: usize,
    },
}

/// `ncclDataType_t` of a type; `None` if NCCL does not have it.
pub(super) fn nccl_type(dtype: DType) -> Option<c_int> {
    Some(match dtype {
        DType::I8 => 0,
        DType::U8 => 1,
        DType::I32 => 2,
        DType::U32 => 3,
        DType::I64 => 4,
        DType::U64 => 5,
        DType::F16 => 6,
        DType::F32 => 7,
        DType::F64 => 8,
        DType::Bf16 => 9,
        _ => return None,
    })
}

/// Returns position, offset in bytes and number of elements of each part that has elements.
fn parts(counts: &[usize], size: usize) -> impl Iterator<Item = (usize, u64, usize)> {
    let mut offset = 0;
    let parts = counts.iter().enumerate().map(move |(position, count)| {
        let at = offset;
        offset += (count * size) as u64;
        (position, at, *count)
    });
    parts.filter(|(.., count)| *count > 0)
}

/// `ncclRedOp_t`.
fn nccl_op(op: ReduceOp) -> c_int {
    match op {
        ReduceOp::Sum => 0,
        ReduceOp::Max => 2,
        ReduceOp::Min => 3,
        ReduceOp::Mean => 4,
    }
}

impl Communication {
    pub(super) fn load(options: &LoadOptions) -> Result<Self, NcclError> {
        let read =
            |library: &Library| Ok(Self { nccl: Nccl::of(library)?, functions: CommunicatorFunctions::of(library)? });
        Library::load(&NCCL, options, read).map_err(|tried| NcclError::NotFound { tried })
    }

    pub(super) fn nccl(&self) -> &Nccl {
        &self.nccl
    }

    /// Begins to join the ranks of an id. The context of the rank's device must be current on this thread.
    pub(super) fn join(&self, id: &UniqueId, world_size: usize, position: usize) -> Result<Comm, NcclError> {
        let mut comm = Comm { raw: ptr::null_mut(), of: self.clone() };
        let id = RawId { internal: id.as_bytes().map(|byte| i8::from_ne_bytes([byte]) as std::ffi::c_char) };
        let mut config = RawConfig::non_blocking();
        let [world_size, position] = [world_size, position].map(|number| c_int::try_from(number).unwrap_or(c_int::MAX));
        // SAFETY: valid places for one communicator and one configuration, which NCCL copies.
        let code = unsafe { (self.functions.init)(&raw mut comm.raw, world_size, id, position, &raw mut config) };
        comm.check("ncclCommInitRankConfig", code)?;
        Ok(comm)
    }
}

/// A communicator. Exactly one thread uses it, and [`Comm::abort`] ends it; a communicator that is dropped otherwise is leaked.
pub(super) struct Comm {
    raw: RawComm,
    of: Communication,
}

// SAFETY: a communicator may be used from any thread on which its device's context is current, from one at a time.
unsafe impl Send for Comm {}

impl Comm {
    /// Returns whether the last call has ended, and asynchronous errors.
    pub(super) fn progress(&self) -> Result<Progress, NcclError> {
        let mut state: NcclResult = 0;
        // SAFETY: a communicator that was created and not ended, and a valid place for one code.
        let code = unsafe { (self.of.functions.async_error)(self.raw, &raw mut state) };
        self.check("ncclCommGetAsyncError", code)?;
        self.check("a collective operation", state)
    }

    /// Enqueues an operation. `count` is the number of elements that this rank gives, or gets from a scatter. Until the returned progress is `Done`, no other
    /// call may be made but [`Comm::progress`].
    ///
    /// The caller keeps both memories until the stream has come past the operation, or the communicator was aborted and the stream is idle. `to` may be `from`
    /// where both have one length. `from` and `to` have the elements that the operation reads and writes, which the caller has checked.
    pub(super) fn start(
        &self,
        operation: &Operation,
        count: usize,
        dtype: DType,
        from: &CudaMemory,
        to: Option<&CudaMemory>,
        stream: &Stream,
    ) -> Result<Progress, NcclError> {
        let (source, target) = (from.address(), to.unwrap_or(from).address());
        let (raw, stream, functions) = (self.raw, stream.handle(), &self.of.functions);
        let (size, dtype) = (dtype.size(), nccl_type(dtype).unwrap_or(-1));
        let place = |position: usize| c_int::try_from(position).unwrap_or(c_int::MAX);
        let (function, code) = match operation {
            // SAFETY: the addresses are those of memory of the device, of the lengths that the caller has checked; it keeps them alive.
            Operation::AllReduce(op) => ("ncclAllReduce", unsafe {
                (functions.all_reduce)(source, target, count, dtype, nccl_op(*op), raw, stream)
            }),
            // SAFETY: as above.
            Operation::Broadcast { position } => ("ncclBroadcast", unsafe {
                (functions.broadcast)(source, target, count, dtype, place(*position), raw, stream)
            }),
            Operation::AllGather => {
                // SAFETY: as above; the target has the elements of all ranks.
                ("ncclAllGather", unsafe { (functions.all_gather)(source, target, count, dtype, raw, stream) })
            }
            Operation::AllGatherParts(counts) => {
                let parts = parts(counts, size);
                return self.grouped(parts.map(|(position, offset, count)| {
                    // SAFETY: as above; the part lies within the target, and the source has this rank's own.
                    let code = unsafe {
                        (functions.broadcast)(source, target + offset, count, dtype, place(position), raw, stream)
                    };
                    ("ncclBroadcast", code)
                }));
            }
            // SAFETY: as above; the source has the elements of all ranks.
            Operation::ReduceScatter(op) => ("ncclReduceScatter", unsafe {
                (functions.reduce_scatter)(source, target, count, dtype, nccl_op(*op), raw, stream)
            }),
            Operation::ReduceScatterParts(op, counts) => {
                let parts = parts(counts, size);
                return self.grouped(parts.map(|(position, offset, count)| {
                    // SAFETY: as above; the part lies within the source, and the target has this rank's own.
                    let code = unsafe {
                        let root = place(position);
                        (functions.reduce)(source + offset, target, count, dtype, nccl_op(*op), root, raw, stream)
                    };
                    ("ncclReduce", code)
                }));
            }
            Operation::Send { position } => {
                // SAFETY: as above.
                ("ncclSend", unsafe { (functions.send)(source, count, dtype, place(*position), raw, stream) })
            }
            Operation::Receive { position } => {
                // SAFETY: as above.
                ("ncclRecv", unsafe { (functions.receive)(target, count, dtype, place(*position), raw, stream) })
            }
        };
        self.check(function, code)
    }

    /// Makes several calls as one.
    fn grouped(&self, calls: impl Iterator<Item = (&'static str, NcclResult)>) -> Result<Progress, NcclError> {
        // SAFETY: the group ends below, on this thread.
        self.check("ncclGroupStart", unsafe { (self.of.functions.group_start)() })?;
        let begun = calls.map(|(function, code)| self.check(function, code)).collect::<Result<Vec<_>, _>>();
        // SAFETY: the group has begun above, also where a call within it has failed.
        let ended = self.check("ncclGroupEnd", unsafe { (self.of.functions.group_end)() });
        begun.and(ended)
    }

    /// Ends the communicator on this rank. It may block for ever, so a thread of its own calls it. Nothing may use the communicator meanwhile.
    pub(super) fn abort(self) {
        // SAFETY: the communicator is given up with this call.
        let _ = unsafe { (self.of.functions.abort)(self.raw) };
    }

    fn check(&self, function: &'static str, code: NcclResult) -> Result<Progress, NcclError> {
        if code == IN_PROGRESS {
            return Ok(Progress::Pending);
        }
        self.of.nccl.functions.check(function, code).map(|()| Progress::Done).map_err(|error| self.with_reason(error))
    }

    /// Adds NCCL's own words to an error.
    fn with_reason(&self, error: NcclError) -> NcclError {
        let NcclError::Failed { function, code, text } = error else { return error };
        // SAFETY: any communicator or null. The result is a C string that the next failure of this thread may overwrite; it is copied at once.
        let reason = unsafe { (self.of.functions.get_last_error)(self.raw) };
        // SAFETY: as above.
        let reason = if reason.is_null() { "".into() } else { unsafe { CStr::from_ptr(reason) }.to_string_lossy() };
        let text = if reason.is_empty() { text } else { format!("{text}: {}", reason.trim()) };
        NcclError::Failed { function, code, text }
    }
}

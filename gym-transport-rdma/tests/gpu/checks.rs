//! The checks of one process.
#![allow(unsafe_code)]

use std::any::Any;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::Arc;
use std::time::Duration;

use gym_core::group::DType;
use gym_core::group::collective::{
    Buffer, Collective, Collectives, Communicator, InProcessCollectives, Meeting, Memory, Moved, ReduceOp, Seat,
};
use gym_core::{CallContext, Code, Error, Incarnation};
use gym_transport_rdma::nccl::cuda::{CudaDevice, CudaMemory};
use gym_transport_rdma::nccl::{LoadOptions, Nccl, NcclCollectives};
use libloading::Library;
use serde_json::json;
use tokio::time::{Instant, sleep};

use crate::{Outcome, by_size, device, options, text};

pub(crate) const LONG: Duration = Duration::from_secs(60);

/// g1: the driver, the GPU, the library.
pub(crate) fn driver_and_versions() -> Outcome {
    let device = device()?;
    let nccl = Nccl::load(&LoadOptions::default()).map_err(text)?;
    let (free, total) = device.memory().map_err(text)?;
    if free == 0 || free > total {
        return Err(format!("{free} of {total} bytes are free").into());
    }
    let memory = device.upload(b"as it was").map_err(text)?;
    if memory.download().map_err(text)? != b"as it was" {
        return Err("bytes come back changed".to_owned().into());
    }
    let uuid: String = device.uuid().map_err(text)?.iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(json!({
        "gpu": device.name().map_err(text)?,
        "uuid": uuid,
        "memory_bytes": total,
        "cuda_of_driver": CudaDevice::driver_version(&LoadOptions::default()).map_err(text)?,
        "nccl": nccl.version().map_err(text)?.to_string(),
        "library": nccl.path().display().to_string(),
    }))
}

/// One rank with a meeting of its own.
async fn alone(backend: &NcclCollectives, epoch: u64) -> Result<Arc<dyn Communicator>, String> {
    let seats: Arc<[Seat]> = [Seat::new(0, Incarnation(1))].into();
    let meeting = Meeting::new("gpu", epoch, 0, seats).map_err(text)?;
    backend.join(&CallContext::within(LONG), meeting).await.map_err(text)
}

fn backend() -> Result<NcclCollectives, String> {
    NcclCollectives::open(Arc::new(InProcessCollectives::new()), &options()).map_err(text)
}

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Id([c_char; 128]);

/// `ncclConfig_t` as of NCCL 2.17.
#[repr(C)]
struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    rest: [c_int; 8],
}

/// g2: one rank joins with the configuration of 48 bytes, without blocking; one whose magic is wrong is refused.
pub(crate) async fn one_rank_and_a_wrong_magic() -> Outcome {
    let device = device()?;
    let nccl = Nccl::load(&LoadOptions::default()).map_err(text)?;
    let (backend, began) = (backend()?, Instant::now());
    let communicator = alone(&backend, 1).await?;
    let joined = began.elapsed();
    sums(&*communicator, &device).await?;
    // The context of the GPU is current on the backend's thread only; NCCL makes it so on this one.
    let refused = wrong_magic(nccl.path().as_os_str())?;
    if refused != 4 {
        return Err(format!("a wrong magic is accepted: code {refused}, not 4 (ncclInvalidArgument)").into());
    }
    let version = nccl.version().map_err(text)?.to_string();
    Ok(json!({ "nccl": version, "join_ms": millis(joined), "code_for_a_wrong_magic": refused }))
}

/// Returns the code of `ncclCommInitRankConfig` for a configuration with a wrong magic.
fn wrong_magic(path: &std::ffi::OsStr) -> Result<c_int, String> {
    let mut config = Config { size: 48, magic: 0xbad, version: 21_703, rest: [c_int::MIN; 8] };
    let (mut id, mut communicator) = (Id([0; 128]), std::ptr::null_mut::<c_void>());
    type Init = unsafe extern "C" fn(*mut *mut c_void, c_int, Id, c_int, *mut Config) -> c_int;
    // SAFETY: the library is loaded already, and stays; the functions have these signatures in `nccl.h` since 2.14. All places are valid and exclusive.
    unsafe {
        let library = std::mem::ManuallyDrop::new(Library::new(path).map_err(text)?);
        let unique_id = library.get::<unsafe extern "C" fn(*mut Id) -> c_int>(b"ncclGetUniqueId").map_err(text)?;
        let init = library.get::<Init>(b"ncclCommInitRankConfig").map_err(text)?;
        match unique_id(&raw mut id) {
            0 => Ok(init(&raw mut communicator, 1, id, 0, &raw mut config)),
            code => Err(format!("ncclGetUniqueId failed with code {code}")),
        }
    }
}

pub(crate) fn millis(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e5).round() / 1e2
}

/// Sums four numbers.
async fn sums(communicator: &dyn Communicator, device: &CudaDevice) -> Result<(), String> {
    let bytes: Vec<u8> = [1_f32, 2.0, 3.0, 4.0].into_iter().flat_map(f32::to_le_bytes).collect();
    let cx = CallContext::within(LONG);
    let buffer = up(device, DType::F32, &bytes)?;
    let moved = communicator.start(&cx, Collective::AllReduce(ReduceOp::Sum), buffer).await;
    if down(moved)? == bytes { Ok(()) } else { Err("the sum of one rank is not its own numbers".to_owned()) }
}

pub(crate) fn up(device: &CudaDevice, dtype: DType, bytes: &[u8]) -> Result<Buffer, String> {
    Ok(Buffer::new(dtype, Memory::Device(Box::new(device.upload(bytes).map_err(text)?))))
}

pub(crate) fn down(moved: Moved) -> Result<Vec<u8>, String> {
    moved.result.map_err(text)?;
    let Memory::Device(memory) = moved.buffer.memory else { return Err("host memory".to_owned()) };
    let memory = (memory as Box<dyn Any>).downcast::<CudaMemory>().map_err(|_| "another memory".to_owned())?;
    memory.download().map_err(text)
}

/// g3: every operation and type of one rank.
pub(crate) async fn every_operation_of_one_rank() -> Outcome {
    let device = device()?;
    let communicator = alone(&backend()?, 1).await?;
    let operations = same_as_host(&*communicator, &device).await?;
    Ok(json!({ "operations": operations }))
}

/// Makes every call with host memory and with memory of the GPU, and compares the bytes. The numbers are small integers, whose sums are exact in every type.
pub(crate) async fn same_as_host(communicator: &dyn Communicator, device: &CudaDevice) -> Result<u32, String> {
    let meeting = communicator.meeting();
    let (world, rank) = (meeting.world_size(), meeting.rank);
    let cx = CallContext::within(LONG);
    let mut operations = 0;
    for dtype in [DType::F32, DType::F64, DType::F16, DType::Bf16, DType::I32, DType::I64, DType::U8] {
        let is_float = matches!(dtype, DType::F32 | DType::F64 | DType::F16 | DType::Bf16);
        let mut calls = vec![Collective::AllGather, Collective::Broadcast { root: 0 }];
        for op in [ReduceOp::Sum, ReduceOp::Min, ReduceOp::Max, ReduceOp::Mean] {
            if is_float || op != ReduceOp::Mean {
                calls.extend([Collective::AllReduce(op), Collective::ReduceScatter(op)]);
            }
        }
        if world > 1 {
            let other = 1 - rank;
            let (send, receive) = (Collective::Send { to: other }, Collective::Receive { from: other });
            calls.extend([Collective::Broadcast { root: 1 }]);
            calls.extend(if rank == 0 { [send, receive] } else { [receive, send] });
        }
        for call in calls {
            for count in [1, 1_000, by_size(1 << 20, 1 << 12) + 3] {
                let numbers = (0..count).map(|at| (at * 7 + rank as i32 * 3) % 23 - 11);
                let bytes: Vec<u8> = numbers.flat_map(|number| element(dtype, number)).collect();
                let host = communicator.start(&cx, call, Buffer::host(dtype, bytes[..].into())).await;
                host.result.map_err(text)?;
                let expected = host.buffer.host_bytes().ok_or("no host memory")?;
                let got = down(communicator.start(&cx, call, up(device, dtype, &bytes)?).await)?;
                if got != expected {
                    return Err(format!("{call} of {count} {dtype}: the bytes differ from the host's"));
                }
                operations += 1;
            }
        }
        let barrier = communicator.start(&cx, Collective::Barrier, Buffer::host(DType::U8, Default::default())).await;
        barrier.result.map_err(text)?;
    }
    Ok(operations)
}

/// Returns a number from -11 to 11 as an element of a type; its magnitude for `U8`.
fn element(dtype: DType, number: i32) -> Vec<u8> {
    match dtype {
        DType::F64 => f64::from(number).to_le_bytes().into(),
        DType::F16 => half(number).to_le_bytes().into(),
        DType::Bf16 => (number as f32).to_le_bytes()[2..].into(),
        DType::I32 => number.to_le_bytes().into(),
        DType::I64 => i64::from(number).to_le_bytes().into(),
        DType::U8 => vec![number.unsigned_abs() as u8],
        _ => (number as f32).to_le_bytes().into(),
    }
}

/// Returns the bits of a small integer as an IEEE 754 half.
fn half(number: i32) -> u16 {
    let magnitude = number.unsigned_abs() as u16;
    let Some(exponent) = magnitude.checked_ilog2() else { return 0 };
    let sign = if number < 0 { 0x8000 } else { 0 };
    sign | (exponent as u16 + 15) << 10 | (magnitude << (10 - exponent)) & 0x3ff
}

/// g6: memory of the GPU comes back after a hundred communicators that were used and aborted.
pub(crate) async fn aborts_give_memory_back() -> Outcome {
    let (device, backend, rounds) = (device()?, backend()?, by_size(100, 10));
    let one = async |epoch: u64| -> Result<(), String> {
        let communicator = alone(&backend, epoch).await?;
        sums(&*communicator, &device).await?;
        communicator.abort(Error::not_started(Code::Cancelled, "the check aborts it"));
        communicator.closed().await;
        Ok(())
    };
    // The first one loads NCCL's kernels, which stay.
    one(1).await?;
    let (before, total) = device.memory().map_err(text)?;
    let began = Instant::now();
    for round in 0..rounds {
        one(round + 2).await?;
    }
    let took = began.elapsed();
    // The last abort may not have ended.
    let limit = began.elapsed() + Duration::from_secs(by_size(30, 2));
    loop {
        let (after, _) = device.memory().map_err(text)?;
        let lost = before.saturating_sub(after);
        if lost * 100 <= total {
            return Ok(
                json!({ "aborts": rounds, "lost_bytes": lost, "memory_bytes": total, "each_ms": millis(took / rounds as u32) }),
            );
        }
        if began.elapsed() > limit {
            return Err(format!("{after} bytes of memory is free after {rounds} aborts, and {before} before").into());
        }
        sleep(Duration::from_millis(100)).await;
    }
}

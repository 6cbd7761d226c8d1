//! g9 of the tier `gpu`: `CudaMemory` over memory of cudarc, without a copy. Prints one line of JSON, like the checks of `gym-transport-rdma/tests/gpu`.

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::{CudaContext, DevicePtr};
use gym_core::group::DType;
use gym_core::group::collective::{
    Buffer, Collective, Collectives, InProcessCollectives, Meeting, Memory, ReduceOp, Seat,
};
use gym_core::{CallContext, Incarnation};
use gym_transport_rdma::nccl::cuda::{CudaDevice, CudaMemory};
use gym_transport_rdma::nccl::{LoadOptions, NcclCollectives, NcclOptions};
use serde_json::{Value, json};

#[tokio::main]
async fn main() {
    let mut line = match CudaDevice::open(&LoadOptions::default(), 0) {
        Ok(device) if is_real(&device) => match check(&device).await {
            Ok(measured) => measured,
            Err(error) => json!({ "result": "failed", "reason": error.to_string() }),
        },
        Ok(_) => json!({ "result": "not run", "reason": "the library of CUDA's driver is that of the tests" }),
        Err(error) => json!({ "result": "not run", "reason": error.to_string() }),
    };
    line["check"] = "g9".into();
    println!("{line}");
}

fn is_real(device: &CudaDevice) -> bool {
    std::env::var_os("GYM_GPU_FAKE").is_some() || device.name().is_ok_and(|name| name != "fake GPU")
}

/// Sums numbers of cudarc in place, and reads them with cudarc.
async fn check(device: &CudaDevice) -> Result<Value, Box<dyn std::error::Error>> {
    let numbers: Vec<f32> = (0..1_000_u16).map(f32::from).collect();
    let bytes = numbers.len() * size_of::<f32>();
    let stream = CudaContext::new(0)?.default_stream();
    let slice = Arc::new(stream.clone_htod(&numbers)?);
    stream.synchronize()?;
    let address = slice.device_ptr(&stream).0;
    // SAFETY: the slice has these bytes on this GPU, and the owner keeps it. Nothing else uses it until the memory is dropped, and its stream is idle.
    let memory = unsafe { CudaMemory::from_raw(device, address, bytes, Box::new(Arc::clone(&slice))) };

    let backend = NcclCollectives::open(Arc::new(InProcessCollectives::new()), &NcclOptions::default())?;
    let cx = CallContext::within(Duration::from_secs(60));
    let seats: Arc<[Seat]> = [Seat::new(0, Incarnation(1))].into();
    let communicator = backend.join(&cx, Meeting::new("gpu", 1, 0, seats)?).await?;
    let buffer = Buffer::new(DType::F32, Memory::Device(Box::new(memory)));
    let moved = communicator.start(&cx, Collective::AllReduce(ReduceOp::Sum), buffer).await;
    moved.result?;
    let Memory::Device(memory) = moved.buffer.memory else { return Err("host memory".into()) };
    let memory = (memory as Box<dyn Any>).downcast::<CudaMemory>().map_err(|_| "another memory")?;
    if memory.address() != address {
        return Err(format!("the sum is at {:#x}, and the slice at {address:#x}", memory.address()).into());
    }
    drop(memory);
    if Arc::strong_count(&slice) != 1 {
        return Err("the memory is dropped, and its owner is not".into());
    }
    if stream.clone_dtoh(&*slice)? != numbers {
        return Err("cudarc reads other numbers than the sum of one rank".into());
    }
    Ok(json!({ "result": "passed", "bytes": bytes }))
}

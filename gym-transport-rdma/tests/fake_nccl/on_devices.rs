//! The suite of collectives on the memory of GPUs, over any backend that meets in the host.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use async_trait::async_trait;
use gym_core::group::collective::{
    Buffer, Collective, Collectives, Communicator, Meeting, Memory, Moved, Seat, Transfer,
};
use gym_core::testing::conformance::CollectiveFixture;
use gym_core::{CallContext, Error};

use super::{CudaDevice, CudaMemory, LoadOptions, NcclCollectives, NcclOptions, fake_nccl};

/// Ranks that put the host memory of each call on their GPU, and its result back.
#[derive(Debug)]
pub(crate) struct OnDevices<F> {
    host: F,
    devices: AtomicU32,
}

impl<F> OnDevices<F> {
    pub(crate) fn new(host: F) -> Self {
        Self { host, devices: AtomicU32::new(0) }
    }
}

#[async_trait]
impl<F: CollectiveFixture> CollectiveFixture for OnDevices<F> {
    async fn rank(&self, rank: u32) -> (Arc<dyn Collectives>, Seat) {
        let (mut options, (nccl, cuda)) = (NcclOptions::default(), fake_nccl::libraries());
        (options.nccl, options.cuda) = (LoadOptions::at(nccl), LoadOptions::at(cuda));
        options.device = self.devices.fetch_add(1, Ordering::Relaxed) % 8;
        let (host, seat) = self.host.rank(rank).await;
        (Arc::new(OnDevice(NcclCollectives::open(host, &options).unwrap())), seat)
    }
}

#[derive(Debug)]
struct OnDevice(NcclCollectives);

#[async_trait]
impl Collectives for OnDevice {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    async fn join(&self, cx: &CallContext, meeting: Meeting) -> gym_core::Result<Arc<dyn Communicator>> {
        Ok(Arc::new(Uploading(self.0.join(cx, meeting).await?, self.0.device().unwrap().clone())))
    }
}

#[derive(Debug)]
struct Uploading(Arc<dyn Communicator>, CudaDevice);

#[async_trait]
impl Communicator for Uploading {
    fn meeting(&self) -> &Meeting {
        self.0.meeting()
    }

    fn start(&self, cx: &CallContext, operation: Collective, buffer: Buffer) -> Transfer {
        let Some(bytes) = buffer.host_bytes().filter(|_| operation != Collective::Barrier) else {
            return self.0.start(cx, operation, buffer);
        };
        let moved = self.0.start(
            cx,
            operation,
            Buffer::new(buffer.dtype, Memory::Device(Box::new(self.1.upload(bytes).unwrap()))),
        );
        let (completion, transfer) = Transfer::new();
        tokio::spawn(async move {
            let Moved { buffer, result } = moved.await;
            let Memory::Device(memory) = buffer.memory else { panic!("host memory") };
            let memory = (memory as Box<dyn Any>).downcast::<CudaMemory>().unwrap();
            completion.finish(Buffer::host(buffer.dtype, memory.download().unwrap()[..].into()), result);
        });
        transfer
    }

    fn abort(&self, why: Error) {
        self.0.abort(why);
    }

    async fn closed(&self) -> Error {
        self.0.closed().await
    }
}

//! The backend `host` passes the conformance suite of collective operations over the transports of every build. Over UCX, `tests/workers/ucx.rs` runs it.

#![allow(clippy::unwrap_used)] // In a test a panic is the message.

#[cfg(feature = "http")]
use gym_client::transport::Transports;
use gym_core::transport::{InProcess, ListenOptions};
#[cfg(feature = "nccl")]
use gym_group::collective::nccl::{CudaDevice, CudaMemory, LoadOptions, NcclCollectives, NcclOptions};

#[cfg(feature = "nccl")]
#[path = "../../../gym-transport-rdma/tests/fake_nccl/mod.rs"]
mod fake_nccl;
#[cfg(feature = "nccl")]
#[path = "../../../gym-transport-rdma/tests/fake_nccl/on_devices.rs"]
mod on_devices;
#[path = "collectives/ranked.rs"]
mod ranked;

use ranked::{Ranked, suite};

fn in_memory() -> Ranked {
    let network = InProcess::new();
    Ranked::new(network.into(), |rank| ListenOptions::named(format!("rank-{rank}")))
}

#[cfg(feature = "http")]
fn over_sockets_in(folder: &std::path::Path) -> Ranked {
    let path = folder.to_owned();
    Ranked::new(Transports::standard(), move |rank| ListenOptions::default().socket(path.join(format!("rank-{rank}"))))
}

#[tokio::test(start_paused = true)]
async fn in_one_thread_under_a_paused_clock() {
    suite(in_memory(), 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_two_threads_by_the_real_clock() {
    suite(in_memory(), 2).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_shared_memory() {
    suite(in_memory().in_shared_memory(), 7).await;
}

#[cfg(feature = "http")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn over_unix_sockets() {
    let folder = tempfile::tempdir().unwrap();
    suite(over_sockets_in(folder.path()), 3).await;
}

#[cfg(feature = "http")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn over_tcp() {
    suite(Ranked::new(Transports::standard(), |_| ListenOptions::default().at("127.0.0.1".to_owned(), 0)), 4).await;
}

#[cfg(feature = "nccl")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_of_gpus_over_unix_sockets_and_in_shared_memory() {
    use gym_core::testing::conformance::collectives;
    let folder = tempfile::tempdir().unwrap();
    collectives(&on_devices::OnDevices::new(over_sockets_in(folder.path())), 5).await;
    collectives(&on_devices::OnDevices::new(in_memory().in_shared_memory()), 6).await;
}

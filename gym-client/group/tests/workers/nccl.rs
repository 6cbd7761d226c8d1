//! Ranks in processes whose memory NCCL moves, over a library without a GPU.

#[path = "../../../../gym-transport-rdma/tests/fake_nccl/mod.rs"]
mod fake_nccl;

use std::any::Any;
use std::collections::BTreeMap;
use std::time::Duration;

use futures_util::future::join_all;
use gym_core::{CallContext, Error, Result};
use gym_group::collective::nccl::{self, CudaDevice, CudaMemory, LoadOptions};
use gym_group::collective::{Buffer, Collective, Communicator, Memory, ReduceOp};
use gym_group::{DType, Group, Rank};
use tokio::time::Instant;

use super::{options, spec, start, stop};

/// Returns the environment of the ranks.
pub(crate) fn variables() -> BTreeMap<String, String> {
    let (nccl, cuda) = fake_nccl::libraries();
    let path = |path: std::path::PathBuf| path.display().to_string();
    [
        (nccl::NCCL_LIBRARY_VARIABLE, path(nccl)),
        (nccl::CUDA_LIBRARY_VARIABLE, path(cuda)),
        ("FAKE_NCCL_OWN_DEVICES", "1".to_owned()),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .into()
}

async fn group(faults: &[(&str, &str)], restarts: u32) -> Group {
    let mut spec = spec("summing", 4);
    spec.collectives = super::collectives::over_nccl();
    spec.variables = variables();
    spec.variables.extend(faults.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())));
    start(spec, options().restarting(restarts)).await.expect("starts")
}

/// Ranks that register their GPUs, as `GPU_RANKS` says: by their digits.
const GPU_RANKS: &str = "FAKE_NCCL_GPU_RANKS";

pub(crate) fn register(rank: Rank) -> Result<()> {
    match std::env::var(GPU_RANKS) {
        Ok(ranks) if ranks.contains(&rank.to_string()) => nccl::register(),
        _ => Ok(()),
    }
}

/// The ranks are 2 × 2, and rank 3 has registered no GPU.
pub(crate) async fn auto_takes_nccl_in_the_meetings_whose_ranks_all_use_gpus() {
    let mut spec = spec("summing", 4);
    spec.variables = variables();
    spec.variables.insert(GPU_RANKS.to_owned(), "012".to_owned());
    let mut with_layout = options();
    with_layout.heartbeat = Duration::from_millis(50);
    with_layout.layout = Some(super::collectives::layout());
    let group = start(spec, with_layout).await.expect("starts");
    // Along `data`, ranks 0 and 2 meet, and ranks 1 and 3.
    let sums = join_all((0..4).map(|rank| super::collectives::sum_at(&group, rank, "data"))).await;
    for rank in [0, 2] {
        assert!(matches!(&sums[rank], Ok(true)), "{sums:#?}");
    }
    let words = "rank 3 does not use NCCL: its program has registered no device provider for cuda; copy it to the host";
    for rank in [1, 3] {
        assert!(sums[rank].as_ref().is_err_and(|error| error.to_string().contains(words)), "{sums:#?}");
    }
    super::until("the path of the sums is told", || {
        super::status(&group, 0).collectives.totals.iter().any(|totals| totals.path == "nccl" && totals.operations == 1)
    })
    .await;
    stop(&group).await;
}

/// Sums once at each rank, and returns the errors.
async fn errors(group: &Group) -> Vec<String> {
    let calls = (0..4).map(async |rank| {
        let error = super::collectives::sum_at(group, rank, "").await.err();
        error.map_or_else(|| "no error".to_owned(), |error| error.to_string())
    });
    join_all(calls).await
}

pub(crate) async fn a_failure_of_nccl_at_one_rank_ends_the_sum_of_all_and_names_it() {
    for (variable, words) in [
        (
            "FAKE_NCCL_FAIL",
            "rank 1 has failed: NCCL: ncclAllReduce failed with code 2 (unhandled system error: injected)",
        ),
        (
            "FAKE_NCCL_ASYNC",
            "rank 1 has failed: NCCL: a collective operation failed with code 2 (unhandled system error",
        ),
    ] {
        let group = group(&[("FAKE_NCCL_RANK", "1"), (variable, "1:2")], 0).await;
        let began = Instant::now();
        let errors = errors(&group).await;
        println!("{variable}: all ranks have ended after {:.0} ms", began.elapsed().as_secs_f64() * 1e3);
        // An asynchronous error comes with the end of the sum, so others may have theirs.
        let failed = errors.iter().filter(|error| error.contains(words)).count();
        assert!(failed == 4 || (variable == "FAKE_NCCL_ASYNC" && failed > 0), "{errors:#?}");
        stop(&group).await;
    }
}

pub(crate) async fn ranks_with_other_versions_or_without_a_gpu_do_not_meet() {
    for (variable, value, words) in [
        ("FAKE_NCCL_VERSION", "21903", ["rank 1 has NCCL 2.19.3", "give all ranks one version"]),
        (
            "FAKE_NCCL_DEVICES",
            "0",
            [
                "rank 1 does not use NCCL: no GPU 0: cuDeviceGet failed with code 101",
                "use communication_backend 'auto'",
            ],
        ),
    ] {
        let group = group(&[("FAKE_NCCL_RANK", "1"), (variable, value)], 0).await;
        // All ranks, and at once.
        for error in errors(&group).await {
            assert!(words.iter().all(|words| error.contains(words)), "{error}");
        }
        stop(&group).await;
    }
}

pub(crate) async fn a_process_whose_abort_hangs_ends_and_is_started_again() {
    let faults = [("FAKE_NCCL_RANK", "1"), ("FAKE_NCCL_FAIL", "1:2"), ("FAKE_NCCL_ABORT_HANGS", "1")];
    let group = group(&faults, 1).await;
    let errors = errors(&group).await;
    assert!(errors[0].contains("rank 1 has failed"), "{errors:#?}");
    assert!(errors[1].contains("70"), "{errors:#?}");
    stop(&group).await;
}

/// Sums values in the memory of the rank's GPU.
pub(crate) async fn summed(peers: &dyn Communicator, cx: &CallContext, values: &[f32]) -> Result<Vec<f32>> {
    let on_device = |error: nccl::CudaError| Error::internal(error.to_string());
    let device = CudaDevice::open(&LoadOptions::default(), 0).map_err(on_device)?;
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let memory = device.upload(&bytes).map_err(on_device)?;
    let buffer = Buffer::new(DType::F32, Memory::Device(Box::new(memory)));
    let moved = peers.start(cx, Collective::AllReduce(ReduceOp::Sum), buffer).await;
    moved.result?;
    let Memory::Device(memory) = moved.buffer.memory else { return Err(Error::internal("host memory")) };
    let memory = (memory as Box<dyn Any>).downcast::<CudaMemory>().map_err(|_| Error::internal("another memory"))?;
    let bytes = memory.download().map_err(on_device)?;
    Ok(bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
}

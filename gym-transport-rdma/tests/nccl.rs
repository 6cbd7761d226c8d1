//! The backend `nccl` over a library without a GPU: values, agreement before NCCL begins, failures.
#![allow(clippy::unwrap_used)]

#[path = "fake_nccl/mod.rs"]
mod fake_nccl;
#[path = "fake_nccl/on_devices.rs"]
mod on_devices;

use std::any::Any;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::join_all;
use gym_core::group::DType;
use gym_core::group::collective::{
    Buffer, Collective, Collectives, Communicator, InProcessCollectives, Meeting, Memory, Moved, ReduceOp, Seat,
};
use gym_core::testing::conformance::{CollectiveFixture, collectives};
use gym_core::{CallContext, Code, Incarnation};
use gym_transport_rdma::nccl::cuda::{CudaDevice, CudaMemory};
use gym_transport_rdma::nccl::{LoadOptions, Nccl, NcclCollectives, NcclError, NcclOptions};
use on_devices::OnDevices;

const LONG: Duration = Duration::from_secs(30);

/// The backends of ranks, each with a GPU of its own, over one that they share.
fn backends(world_size: u32) -> (Arc<InProcessCollectives>, Vec<NcclCollectives>) {
    let (nccl, cuda) = fake_nccl::libraries();
    let host = Arc::new(InProcessCollectives::new());
    let backend = |rank: u32| {
        let mut options = NcclOptions::default();
        (options.nccl, options.cuda, options.device) = (LoadOptions::at(&nccl), LoadOptions::at(&cuda), rank);
        NcclCollectives::open(host.clone(), &options).unwrap()
    };
    let backends = (0..world_size).map(backend).collect();
    (host, backends)
}

async fn joined(backend: &NcclCollectives, rank: usize, world_size: u32) -> (Arc<dyn Communicator>, CudaDevice) {
    let seats: Arc<[Seat]> = (0..world_size).map(|rank| Seat::new(rank, Incarnation(1))).collect();
    let meeting = Meeting::new("data", 1, rank as u32, seats).unwrap();
    (backend.join(&CallContext::within(LONG), meeting).await.unwrap(), backend.device().unwrap().clone())
}

/// The ranks of a meeting, each with a GPU of its own.
async fn ranks(world_size: u32) -> Vec<(Arc<dyn Communicator>, CudaDevice)> {
    let (_, backends) = backends(world_size);
    join_all(backends.iter().enumerate().map(|(rank, backend)| joined(backend, rank, world_size))).await
}

fn up(device: &CudaDevice, dtype: DType, bytes: &[u8]) -> Buffer {
    Buffer::new(dtype, Memory::Device(Box::new(device.upload(bytes).unwrap())))
}

fn down(moved: Moved) -> Vec<u8> {
    moved.result.unwrap();
    let Memory::Device(memory) = moved.buffer.memory else { panic!("host memory") };
    (memory as Box<dyn Any>).downcast::<CudaMemory>().unwrap().download().unwrap()
}

fn floats(values: impl IntoIterator<Item = f32>) -> Vec<u8> {
    values.into_iter().flat_map(f32::to_le_bytes).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_operation_moves_the_memory_of_one_to_eight_gpus() {
    for world_size in [1, 2, 3, 8_u32] {
        let ranks = ranks(world_size).await;
        let (cx, size) = (CallContext::within(LONG), world_size as usize);
        // Divisible by all sizes, and longer than a chunk of the library.
        for elements in [0, 24, if world_size == 2 { 24 * 12_000 } else { 240 }] {
            let own = |rank: usize| floats((0..elements).map(|i| (i % 7 + rank) as f32));
            let call = async |operation: Collective| {
                let moved = ranks.iter().enumerate().map(|(rank, (communicator, device))| {
                    communicator.start(&cx, operation, up(device, DType::F32, &own(rank)))
                });
                join_all(moved).await.into_iter().map(down).collect::<Vec<_>>()
            };
            let summed = |i: usize| (size * (i % 7) + size * (size - 1) / 2) as f32;
            let sum = floats((0..elements).map(summed));
            for result in call(Collective::AllReduce(ReduceOp::Sum)).await {
                assert_eq!(result, sum, "all_reduce of {elements} over {size}");
            }
            let mean = floats((0..elements).map(|i| summed(i) / size as f32));
            assert!(call(Collective::AllReduce(ReduceOp::Mean)).await.iter().all(|result| *result == mean));
            let largest = own(size - 1);
            assert!(call(Collective::AllReduce(ReduceOp::Max)).await.iter().all(|result| *result == largest));
            assert!(call(Collective::AllReduce(ReduceOp::Min)).await.iter().all(|result| *result == own(0)));
            let root = Collective::Broadcast { root: world_size - 1 };
            assert!(call(root).await.iter().all(|result| *result == largest), "broadcast");
            let all: Vec<u8> = (0..size).flat_map(own).collect();
            assert!(call(Collective::AllGather).await.iter().all(|result| *result == all), "all_gather");
            let scattered = call(Collective::ReduceScatter(ReduceOp::Sum)).await;
            assert_eq!(scattered.concat(), sum, "reduce_scatter of {elements} over {size}");
        }
        // Lengths that differ, parts that are not equal, and sends that cross.
        let starts = ranks.iter().enumerate().map(|(rank, (communicator, device))| {
            communicator.start(&cx, Collective::AllGather, up(device, DType::F32, &floats((0..rank).map(|i| i as f32))))
        });
        let all = floats((0..size).flat_map(|rank| (0..rank).map(|i| i as f32)));
        assert!(join_all(starts).await.into_iter().all(|moved| down(moved) == all), "ragged all_gather over {size}");
        let odd = floats((0..size * 2 + 1).map(|i| i as f32));
        let starts = ranks.iter().map(|(communicator, device)| {
            communicator.start(&cx, Collective::ReduceScatter(ReduceOp::Sum), up(device, DType::F32, &odd))
        });
        let parts: Vec<u8> = join_all(starts).await.into_iter().flat_map(down).collect();
        assert_eq!(parts, floats((0..size * 2 + 1).map(|i| (i * size) as f32)), "odd reduce_scatter over {size}");
        for number in 0..3 {
            let starts = ranks.iter().enumerate().flat_map(|(rank, (communicator, device))| {
                let own = |rank: usize| floats([(rank * 10 + number) as f32]);
                let others = (0..size).filter(move |other| *other != rank);
                let send = |other| {
                    communicator.start(&cx, Collective::Send { to: other as u32 }, up(device, DType::F32, &own(rank)))
                };
                let receive = |other| {
                    let from = Collective::Receive { from: other as u32 };
                    let transfer = communicator.start(&cx, from, up(device, DType::F32, &[0; 4]));
                    let expected = own(other);
                    async move { assert_eq!(down(transfer.await), expected, "rank {rank} from rank {other}") }
                };
                let sent: Vec<_> = others.clone().map(send).collect();
                let received: Vec<_> = others.map(receive).collect();
                [async move {
                    join_all(sent).await.into_iter().for_each(|moved| drop(down(moved)));
                    join_all(received).await;
                }]
            });
            join_all(starts.collect::<Vec<_>>()).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_type_that_the_sdk_sums_is_one_of_nccl() {
    let ranks = ranks(2).await;
    let cx = CallContext::within(LONG);
    let (f16, bf16) = ([[0x00, 0x3c], [0x00, 0x40], [0x00, 0x42]], [[0x80, 0x3f], [0x00, 0x40], [0x40, 0x40]]);
    type Case = (DType, Vec<u8>, Vec<u8>, Vec<u8>);
    let cases: [Case; 7] = [
        (DType::F32, floats([1.0]), floats([2.0]), floats([3.0])),
        (DType::F64, 1.0_f64.to_le_bytes().into(), 2.0_f64.to_le_bytes().into(), 3.0_f64.to_le_bytes().into()),
        (DType::F16, f16[0].into(), f16[1].into(), f16[2].into()),
        (DType::Bf16, bf16[0].into(), bf16[1].into(), bf16[2].into()),
        (DType::I32, (-1_i32).to_le_bytes().into(), 3_i32.to_le_bytes().into(), 2_i32.to_le_bytes().into()),
        (DType::I64, i64::MAX.to_le_bytes().into(), 1_i64.to_le_bytes().into(), i64::MIN.to_le_bytes().into()),
        (DType::U8, vec![200], vec![100], vec![44]),
    ];
    for (dtype, one, other, sum) in cases {
        let starts = ranks.iter().zip([one, other]).map(|((communicator, device), bytes)| {
            communicator.start(&cx, Collective::AllReduce(ReduceOp::Sum), up(device, dtype, &bytes))
        });
        for moved in join_all(starts).await {
            assert_eq!(down(moved), sum, "{dtype}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn host_and_device_memory_take_turns_in_one_order() {
    let ranks = ranks(2).await;
    let cx = CallContext::within(LONG);
    let all = ranks.iter().map(async |(communicator, device)| {
        let mut transfers = Vec::new();
        for number in 0..20 {
            let bytes = floats([number as f32]);
            let buffer = match number % 2 {
                0 => up(device, DType::F32, &bytes),
                _ => Buffer::host(DType::F32, bytes[..].into()),
            };
            transfers.push(communicator.start(&cx, Collective::AllReduce(ReduceOp::Sum), buffer));
        }
        for (number, moved) in join_all(transfers).await.into_iter().enumerate() {
            let sum = floats([2.0 * number as f32]);
            if number % 2 == 0 {
                assert_eq!(down(moved), sum);
            } else {
                assert_eq!(moved.buffer.host_bytes().unwrap(), sum);
            }
        }
    });
    join_all(all).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn different_calls_are_found_before_nccl_begins_and_the_memory_comes_back() {
    let ranks = ranks(3).await;
    let cx = CallContext::within(LONG);
    let starts = ranks.iter().enumerate().map(|(rank, (communicator, device))| {
        let bytes = vec![0; if rank == 1 { 8 } else { 16 }];
        communicator.start(&cx, Collective::AllReduce(ReduceOp::Sum), up(device, DType::F32, &bytes))
    });
    for (rank, moved) in join_all(starts).await.into_iter().enumerate() {
        let error = moved.result.unwrap_err();
        assert_eq!(error.code(), Code::FailedPrecondition, "{error}");
        let text = error.to_string();
        assert!(text.contains("rank 1 calls all_reduce(sum) of 2 F32"), "rank {rank}: {text}");
        assert_eq!(moved.buffer.bytes(), if rank == 1 { 8 } else { 16 });
        assert!(matches!(moved.buffer.memory, Memory::Device(_)));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rank_that_never_calls_is_named_at_the_deadline_and_one_that_leaves_at_once() {
    let mut ranks = ranks(3).await;
    let cx = CallContext::within(Duration::from_millis(300));
    let start = |rank: usize, ranks: &[(Arc<dyn Communicator>, CudaDevice)]| {
        let (communicator, device) = &ranks[rank];
        communicator.start(&cx, Collective::AllReduce(ReduceOp::Sum), up(device, DType::F32, &[0; 16]))
    };
    let moved = join_all([start(0, &ranks), start(1, &ranks)]).await;
    for moved in moved {
        let error = moved.result.unwrap_err();
        assert_eq!(error.code(), Code::DeadlineExceeded, "{error}");
        assert!(error.to_string().contains("rank 2 has"), "{error}");
    }
    let late = start(2, &ranks).await.result.unwrap_err();
    assert!(late.to_string().contains("rank 2 has"), "the first cause stays: {late}");
    ranks = self::ranks(2).await;
    drop(ranks.pop());
    let (communicator, device) = &ranks[0];
    let cx = CallContext::within(LONG);
    let moved = communicator.start(&cx, Collective::AllReduce(ReduceOp::Sum), up(device, DType::F32, &[0; 16])).await;
    let error = moved.result.unwrap_err();
    assert!(error.to_string().contains("rank 1 has left"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operation_that_waits_is_reported_as_what_was_called() {
    let (host, backends) = backends(3);
    let ranks = join_all(backends.iter().enumerate().map(|(rank, backend)| joined(backend, rank, 3))).await;
    let cx = CallContext::within(LONG);
    let start = |rank: usize| {
        let (communicator, device) = &ranks[rank];
        communicator.start(&cx, Collective::AllReduce(ReduceOp::Sum), up(device, DType::F32, &[0; 16]))
    };
    let first = [start(0), start(1)];
    let waiting = backends[0].report(0).waiting;
    assert_eq!(waiting.len(), 1, "{waiting:?}");
    assert_eq!(waiting[0].to_string(), "waits in all_reduce 0 of meeting data (epoch 1): rank 2 has not called it");
    let last = start(2);
    join_all(first.into_iter().chain([last])).await.into_iter().for_each(|moved| drop(down(moved)));
    let report = host.report(0);
    assert!(report.waiting.is_empty(), "{report:?}");
    let totals: Vec<_> = report.totals.iter().map(|totals| (&*totals.operation, &*totals.path, totals.bytes)).collect();
    assert_eq!(totals, [("all_reduce", "nccl", 16)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn ranks_with_other_settings_are_refused_before_nccl_waits() {
    let (_, mut backends) = backends(2);
    let host = Arc::new(InProcessCollectives::new());
    let (mut options, (nccl, cuda)) = (NcclOptions::default(), fake_nccl::libraries());
    (options.nccl, options.cuda, options.device) = (LoadOptions::at(nccl), LoadOptions::at(cuda), 1);
    options.settings.insert("NCCL_SOCKET_IFNAME".to_owned(), "eth9".to_owned());
    let mut first = options.clone();
    (first.device, first.settings) = (0, BTreeMap::new());
    backends[0] = NcclCollectives::open(host.clone(), &first).unwrap();
    backends[1] = NcclCollectives::open(host, &options).unwrap();
    let seats: Arc<[Seat]> = (0..2).map(|rank| Seat::new(rank, Incarnation(1))).collect();
    let join = async |rank: u32| {
        let meeting = Meeting::new("data", 1, rank, Arc::clone(&seats)).unwrap();
        backends[rank as usize].join(&CallContext::within(LONG), meeting).await.unwrap_err().to_string()
    };
    for error in join_all((0..2).map(join)).await {
        let words =
            "rank 0 has no NCCL_SOCKET_IFNAME, and rank 1 has NCCL_SOCKET_IFNAME=eth9; set the same on all ranks";
        assert!(error.contains(words), "{error}");
    }
}

/// With `auto`: the ranks of a meeting use NCCL if all of them use GPUs, and tell why they do not.
#[tokio::test(flavor = "multi_thread")]
async fn ranks_use_nccl_where_all_of_them_use_gpus() {
    let (nccl, cuda) = fake_nccl::libraries();
    for used in [true, false] {
        let host = Arc::new(InProcessCollectives::new());
        let seats: Arc<[Seat]> = (0..2).map(|rank| Seat::new(rank, Incarnation(1))).collect();
        let backends: Vec<_> = (0..2)
            .map(|device| {
                let mut options = NcclOptions::default();
                (options.nccl, options.cuda, options.device) = (LoadOptions::at(&nccl), LoadOptions::at(&cuda), device);
                NcclCollectives::if_used(host.clone(), move || (used || device == 0).then(|| options.clone()))
            })
            .collect();
        let cx = CallContext::within(LONG);
        let ranks = join_all(
            backends
                .iter()
                .zip(0..)
                .map(|(backend, rank)| backend.join(&cx, Meeting::new("data", 1, rank, Arc::clone(&seats)).unwrap())),
        );
        let ranks: Vec<_> = ranks.await.into_iter().map(Result::unwrap).collect();
        assert_eq!(backends[1].device().is_some(), used, "nothing is opened that is not used");
        let device = CudaDevice::open(&LoadOptions::at(&cuda), 0).unwrap();
        let sum = Collective::AllReduce(ReduceOp::Sum);
        if used {
            let other = backends[1].device().unwrap();
            let moved = join_all([
                ranks[0].start(&cx, sum, up(&device, DType::F32, &floats([1.0]))),
                ranks[1].start(&cx, sum, up(other, DType::F32, &floats([2.0]))),
            ]);
            assert!(moved.await.into_iter().all(|moved| down(moved) == floats([3.0])));
        } else {
            let error = ranks[0].start(&cx, sum, up(&device, DType::F32, &[0; 4])).await.result.unwrap_err();
            let words =
                "rank 1 does not use NCCL: its program has registered no device provider for cuda; copy it to the host";
            assert!(error.to_string().contains(words), "{error}");
            let host = || Buffer::host(DType::F32, floats([1.0])[..].into());
            let moved = join_all(ranks.iter().map(|rank| rank.start(&cx, sum, host()))).await;
            assert!(moved.iter().all(|moved| moved.buffer.host_bytes() == Some(&floats([2.0])[..])), "{moved:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_transfers_of_a_communicator_that_is_dropped_go_on() {
    for _ in 0..20 {
        let ranks = ranks(2).await;
        let cx = CallContext::within(LONG);
        let transfers: Vec<_> = ranks
            .into_iter()
            .map(|(communicator, device)| {
                let send = communicator.start(
                    &cx,
                    Collective::AllReduce(ReduceOp::Sum),
                    up(&device, DType::F32, &floats([1.0])),
                );
                drop(communicator);
                send
            })
            .collect();
        assert!(join_all(transfers).await.into_iter().all(|moved| down(moved) == floats([2.0])));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_of_another_gpu_is_refused_and_aborts_nothing() {
    let ranks = ranks(2).await;
    let (cx, (communicator, _)) = (CallContext::within(LONG), &ranks[0]);
    let elsewhere = up(&ranks[1].1, DType::F32, &[0; 4]);
    let moved = communicator.start(&cx, Collective::AllReduce(ReduceOp::Sum), elsewhere).await;
    let error = moved.result.unwrap_err();
    assert_eq!((error.code(), moved.buffer.bytes()), (Code::Unimplemented, 4), "{error}");
    assert!(error.to_string().contains("moves memory of cuda:0, not 4 bytes of cuda:1"), "{error}");
    let sums = ranks.iter().map(|(communicator, device)| {
        communicator.start(&cx, Collective::AllReduce(ReduceOp::Sum), up(device, DType::F32, &floats([1.0])))
    });
    assert!(join_all(sums).await.into_iter().all(|moved| down(moved) == floats([2.0])));
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_of_gpus_passes_the_suite_of_collectives() {
    collectives(&OnDevices::new(InProcess(InProcessCollectives::new())), 1).await;
}

#[derive(Debug)]
struct InProcess(InProcessCollectives);

#[async_trait]
impl CollectiveFixture for InProcess {
    async fn rank(&self, rank: u32) -> (Arc<dyn Collectives>, Seat) {
        (Arc::new(self.0.clone()), Seat::new(rank, Incarnation(1)))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn two_ranks_with_one_gpu_are_refused_before_nccl_waits() {
    let (nccl, cuda) = fake_nccl::libraries();
    let host = Arc::new(InProcessCollectives::new());
    let seats: Arc<[Seat]> = (0..2).map(|rank| Seat::new(rank, Incarnation(1))).collect();
    let join = async |rank: u32| {
        let mut options = NcclOptions::default();
        (options.nccl, options.cuda) = (LoadOptions::at(&nccl), LoadOptions::at(&cuda));
        let backend = NcclCollectives::open(host.clone(), &options).unwrap();
        let meeting = Meeting::new("data", 1, rank, Arc::clone(&seats)).unwrap();
        backend.join(&CallContext::within(LONG), meeting).await.unwrap_err()
    };
    for error in join_all((0..2).map(join)).await {
        assert!(error.to_string().contains("ranks 0 and 1 have one GPU"), "{error}");
    }
}

/// Twelve files that are not NCCL, or not whole.
#[tokio::test]
async fn a_missing_or_wrong_library_is_an_error_that_names_it() {
    let (nccl, cuda) = fake_nccl::libraries();
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, contents: &[u8]| {
        let path = folder.path().join(name);
        std::fs::write(&path, contents).unwrap();
        path
    };
    let whole = std::fs::read(&nccl).unwrap();
    let mut other_machine = whole.clone();
    other_machine[18] = 0xb7;
    let mut other_class = whole.clone();
    other_class[4] = 1;
    let dangling = folder.path().join("dangling.so");
    std::os::unix::fs::symlink("nowhere", &dangling).unwrap();
    let wrong = [
        folder.path().join("missing.so"),
        file("empty.so", b""),
        file("text.so", b"no library\n"),
        file("header.so", &whole[..64]),
        file("half.so", &whole[..whole.len() / 2]),
        file("machine.so", &other_machine),
        file("class.so", &other_class),
        folder.path().to_owned(),
        dangling,
        "libc.so.6".into(),
        "libno-such-nccl.so.2".into(),
        "".into(),
    ];
    for path in wrong {
        for (nccl, cuda) in [(path.clone(), cuda.clone()), (nccl.clone(), path.clone())] {
            let mut options = NcclOptions::default();
            (options.nccl, options.cuda) = (LoadOptions::at(nccl), LoadOptions::at(cuda));
            let error = NcclCollectives::open(Arc::new(InProcessCollectives::new()), &options).unwrap_err();
            let text = error.to_string();
            assert_eq!(error.code(), Code::FailedPrecondition, "{text}");
            assert!(text.contains(path.to_str().unwrap()), "{}: {text}", path.display());
        }
    }
}

/// The figure beside those of `the_survivors_of_a_rank_that_is_killed_under_nccl_name_it`: without a host's meeting, the survivors wait for their deadline.
#[test]
fn nccl_alone_tells_no_rank_of_the_end_of_another() {
    let rounds = std::env::var("GYM_COLLECTIVE_KILLS").unwrap_or_else(|_| "2".to_owned());
    let program = fake_nccl::program("alone", include_str!("fake_nccl/alone.c"));
    for signal in ["KILL", "STOP"] {
        let output = std::process::Command::new(&program).args([signal, &rounds, "400"]).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("; 0 had an error of NCCL"), "{output:?}");
        print!("{text}");
    }
}

/// Opens the libraries that the environment names, and prints the outcome. The next test starts it.
#[tokio::test]
#[ignore = "runs in a child process"]
async fn opens_what_the_environment_names() {
    let opened = NcclCollectives::open(Arc::new(InProcessCollectives::new()), &NcclOptions::default());
    let path = Nccl::load(&LoadOptions::default()).map(|nccl| nccl.path().display().to_string());
    println!("outcome: {}", opened.map_or_else(|error| error.to_string(), |_| path.unwrap()));
}

/// Returns the outcome of [`opens_what_the_environment_names`] in a process with these variables.
fn outcome(variables: &[(&str, &Path)]) -> String {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--ignored", "--nocapture", "--exact", "opens_what_the_environment_names"]);
    for name in ["GYM_NCCL_LIBRARY", "GYM_CUDA_LIBRARY", "VIRTUAL_ENV", "CONDA_PREFIX"] {
        child.env_remove(name);
    }
    let output = child.envs(variables.iter().copied()).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let (_, outcome) = text.split_once("outcome: ").unwrap_or_else(|| panic!("{text}"));
    outcome.lines().next().unwrap().to_owned()
}

#[test]
fn the_variables_name_a_file_or_a_directory_and_nothing_else_is_tried_then() {
    let (nccl, cuda) = fake_nccl::libraries();
    let (folder, empty) = (nccl.parent().unwrap(), tempfile::tempdir().unwrap());
    for place in [&*nccl, folder] {
        assert_eq!(outcome(&[("GYM_NCCL_LIBRARY", place), ("GYM_CUDA_LIBRARY", folder)]), nccl.display().to_string());
    }
    // A Python environment with the library does not count.
    let environment = python_environment(&nccl);
    let with = |variables: &[(&str, &Path)]| outcome(&[&[("VIRTUAL_ENV", environment.path())], variables].concat());
    let text = with(&[("GYM_NCCL_LIBRARY", empty.path()), ("GYM_CUDA_LIBRARY", &cuda)]);
    let told = format!("loaded: GYM_NCCL_LIBRARY={}: has no libnccl.so.2. Install it", empty.path().display());
    assert!(text.contains(&told), "{text}");
    let text = with(&[("GYM_NCCL_LIBRARY", &nccl), ("GYM_CUDA_LIBRARY", Path::new("/no/such"))]);
    let told =
        "no GPU 0: CUDA's driver cannot be loaded: GYM_CUDA_LIBRARY=/no/such: no such file or directory. It comes";
    assert!(text.contains(told) && text.contains("docker: --gpus all"), "{text}");
    let text = with(&[("GYM_NCCL_LIBRARY", &nccl), ("FAKE_NCCL_VERSION", Path::new("21805"))]);
    assert!(text.contains("libnccl.so.2: its version is 2.18.5; install 2.19.0 or later"), "{text}");
}

/// Makes a folder like a Python environment with NVIDIA's wheel.
fn python_environment(library: &Path) -> tempfile::TempDir {
    let environment = tempfile::tempdir().unwrap();
    let folder = environment.path().join("lib/python3.13/site-packages/nvidia/nccl/lib");
    std::fs::create_dir_all(&folder).unwrap();
    std::os::unix::fs::symlink(library, folder.join("libnccl.so.2")).unwrap();
    environment
}

#[test]
fn the_wheel_of_the_active_environment_is_found_after_the_loaders_directories() {
    let (nccl, cuda) = fake_nccl::libraries();
    // A file that is no library ends the loader's own search, also where the machine has an NCCL.
    let broken = tempfile::tempdir().unwrap();
    std::fs::write(broken.path().join("libnccl.so.2"), "no library ".repeat(100)).unwrap();
    let text = broken.path().join("libnccl.so.2");
    let variables =
        |environment| [("LD_LIBRARY_PATH", broken.path()), ("GYM_CUDA_LIBRARY", &*cuda), ("VIRTUAL_ENV", environment)];
    let environment = python_environment(&nccl);
    let wheel = environment.path().join("lib/python3.13/site-packages/nvidia/nccl/lib/libnccl.so.2");
    assert_eq!(outcome(&variables(environment.path())), wheel.display().to_string());

    let environment = python_environment(&text);
    let wheel = environment.path().join("lib/python3.13/site-packages/nvidia/nccl/lib/libnccl.so.2");
    let outcome = outcome(&variables(environment.path()));
    let order = ["libnccl.so.2 in the loader's directories: ", ": invalid ELF header; ", wheel.to_str().unwrap()];
    let places = order.map(|words| outcome.find(words).unwrap_or_else(|| panic!("{words}: {outcome}")));
    assert!(places.is_sorted(), "{outcome}");
}

/// NVIDIA's own library, at the paths of `GYM_NCCL_WHEELS`, separated by colons. No GPU is needed.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs the libraries that the tier `nccl-wheel` downloads"]
async fn nvidias_library_tells_its_version_makes_ids_and_fails_without_a_gpu() {
    let wheels = std::env::var("GYM_NCCL_WHEELS").expect("GYM_NCCL_WHEELS has the paths of libraries");
    for path in wheels.split(':') {
        let nccl = Nccl::load(&LoadOptions::at(path)).unwrap();
        let version = nccl.version().unwrap();
        assert!(path.contains(&version.to_string()), "{path} has version {version}");
        // Two ids differ, and tell one address of this machine.
        let ids = [nccl.unique_id().unwrap(), nccl.unique_id().unwrap()];
        assert!(ids[0] != ids[1] && ids[0].address().is_some(), "{ids:?}");
        let mut options = NcclOptions::default();
        (options.nccl, options.cuda) = (LoadOptions::at(path), LoadOptions::at(fake_nccl::libraries().1));
        let backend = NcclCollectives::open(Arc::new(InProcessCollectives::new()), &options).unwrap();
        let seats: Arc<[Seat]> = [Seat::new(0, Incarnation(1))].into();
        let meeting = Meeting::new("data", 1, 0, seats).unwrap();
        let error = backend.join(&CallContext::within(LONG), meeting).await.unwrap_err();
        println!("NCCL {version}: ids at {:?}; {error}", ids[0].address());
        assert!(
            error.to_string().contains("ncclCommInitRankConfig failed with code 1 (unhandled cuda error"),
            "{error}"
        );
    }
    let error = Nccl::load(&LoadOptions::at("libno-such-nccl.so.2")).unwrap_err();
    assert!(matches!(error, NcclError::NotFound { .. }), "{error}");
}

//! Batches in the memory of GPUs, and tensors of other libraries, over a library without a GPU.
#![allow(clippy::unwrap_used, unsafe_code)]

#[path = "fake_nccl/mod.rs"]
mod fake_nccl;

use std::any::Any;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::process::Command;
use std::ptr::NonNull;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use futures_util::future::join_all;
use gym_core::group::collective::{
    Collective, Collectives, Communicator, CommunicatorExt, DeviceMemory, InProcessCollectives, Meeting, ReduceOp, Seat,
};
use gym_core::group::{
    Batch, Column, DType, Device, DeviceBatch, DeviceProvider, DeviceTensor, JsonRows, Ragged, Side, Tensor,
    device_provider, register_device_provider,
};
use gym_core::{CallContext, Code, Incarnation};
use gym_transport_rdma::nccl::cuda::CudaMemory;
use gym_transport_rdma::nccl::devices::CudaDevices;
use gym_transport_rdma::nccl::devices::dlpack::{
    DLDataType, DLDevice, DLManagedTensor, DLManagedTensorVersioned, DLPackVersion, DLTensor, DlpackError, export,
    export_versioned, import, import_versioned,
};
use gym_transport_rdma::nccl::{LoadOptions, NcclCollectives, NcclOptions};
use libloading::Library;
use parking_lot::Mutex;

const LONG: Duration = Duration::from_secs(30);

fn options(device: u32) -> NcclOptions {
    let mut options = NcclOptions::default();
    let (nccl, cuda) = fake_nccl::libraries();
    (options.nccl, options.cuda) = (LoadOptions::at(nccl), LoadOptions::at(cuda));
    options.device = device;
    options
}

/// The provider of this process.
static DEVICES: LazyLock<Arc<CudaDevices>> = LazyLock::new(|| {
    let devices = Arc::new(CudaDevices::new(&options(0)));
    register_device_provider(devices.clone()).unwrap();
    devices
});

/// Returns the backend of each rank, each with a GPU of its own, and joins a meeting with it.
async fn meeting(world_size: u32, backend: impl Fn(u32) -> Arc<dyn Collectives>) -> Vec<Arc<dyn Communicator>> {
    let seats: Arc<[Seat]> = (0..world_size).map(|rank| Seat::new(rank, Incarnation(1))).collect();
    let join = async |rank: u32| {
        let meeting = Meeting::new("data", 1, rank, Arc::clone(&seats)).unwrap();
        backend(rank).join(&CallContext::within(LONG), meeting).await.unwrap()
    };
    join_all((0..world_size).map(join)).await
}

/// Gradients that do not sum to the same in every order, and what else a batch has.
fn batch_of(rank: u32) -> Batch {
    let gradient = (0..600_u32).map(|i| (i + 1) as f32 * 0.1 / (rank + 1) as f32).collect();
    let gradient = Tensor::from_vec([3, 200], gradient).unwrap().padded_on(Side::Left).unwrap();
    let mut batch = Batch::empty()
        .with("tokens", Ragged::from_rows(&[vec![1_i64, 2], vec![], vec![i64::from(rank)]]))
        .unwrap()
        .with("gradient", gradient)
        .unwrap()
        .with("notes", JsonRows::from_values(0..3).unwrap())
        .unwrap()
        .with("mask", Tensor::from_vec([3], vec![true, false, true]).unwrap())
        .unwrap();
    batch.metadata_mut().insert("rank".into(), rank.into());
    batch
}

fn tensor<'a>(batch: &'a Batch, name: &str) -> &'a Tensor {
    batch.column(name).unwrap().dense().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_is_summed_on_gpus_as_on_the_host() {
    LazyLock::force(&DEVICES);
    let cx = CallContext::within(LONG);
    let host = Arc::new(InProcessCollectives::new());
    let on_host = meeting(2, |_| host.clone()).await;
    let sums = on_host
        .iter()
        .zip(0_u32..)
        .map(|(ranks, rank)| ranks.all_reduce(&cx, tensor(&batch_of(rank), "gradient").clone(), ReduceOp::Sum));
    let sums: Vec<Tensor> = join_all(sums).await.into_iter().map(Result::unwrap).collect();

    let host = Arc::new(InProcessCollectives::new());
    let on_gpus = meeting(2, |rank| Arc::new(NcclCollectives::open(host.clone(), &options(rank)).unwrap())).await;
    let summed = on_gpus.iter().zip(0_u32..).map(async |(ranks, rank)| {
        let mut placed: DeviceBatch = batch_of(rank).to_device(format!("cuda:{rank}").as_str()).unwrap();
        let buffer = placed.lend("gradient").unwrap();
        let moved = ranks.start(&cx, Collective::AllReduce(ReduceOp::Sum), buffer).await;
        moved.result.unwrap();
        placed.restore("gradient", moved.buffer).unwrap();
        assert_eq!(placed.tensor("gradient").unwrap().device(), Device::Cuda(rank));
        placed.cpu().unwrap()
    });
    for ((batch, sum), rank) in join_all(summed).await.iter().zip(&sums).zip(0..) {
        let own = batch_of(rank);
        let expected = sum.reshape([3, 200]).unwrap().padded_on(Side::Left).unwrap();
        assert_ne!(&expected, tensor(&own, "gradient"));
        for ((name, found), (known, before)) in batch.columns().zip(own.columns()) {
            assert_eq!(name, known);
            let expected = if name == "gradient" { Column::from(expected.clone()) } else { before.clone() };
            assert_eq!(found, &expected, "{name} of rank {rank}");
        }
        assert_eq!((batch.names().len(), batch.metadata()), (4, own.metadata()));
    }
}

#[test]
fn a_device_or_a_driver_that_is_not_there_is_named() {
    LazyLock::force(&DEVICES);
    let error = batch_of(0).to_device("cuda:99").unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition);
    assert_eq!(
        error.to_string(),
        "move column \"gradient\" to cuda:99: no GPU 99: cuDeviceGet failed with code 101 (invalid device ordinal); `rgym doctor` says what is missing"
    );
    let mut nowhere = NcclOptions::default();
    nowhere.cuda = LoadOptions::at("/no/such/libcuda.so.1");
    let error = CudaDevices::new(&nowhere).upload(0, b"x").unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition);
    let text = error.to_string();
    assert!(text.contains("/no/such/libcuda.so.1") && text.ends_with("`rgym doctor` says what is missing"), "{text}");
}

/// Memory of a library that the provider does not know.
#[derive(Debug)]
struct Foreign;

impl DeviceMemory for Foreign {
    fn device(&self) -> Device {
        Device::Cuda(0)
    }

    fn bytes(&self) -> usize {
        4
    }
}

#[test]
fn memory_that_is_not_of_cuda_is_refused_by_name() {
    LazyLock::force(&DEVICES);
    let foreign = || DeviceTensor::new(DType::F32, [1], Box::new(Foreign)).unwrap();
    let error = foreign().cpu().unwrap_err();
    assert_eq!(
        (error.code(), error.message()),
        (Code::InvalidArgument, "Foreign is no CudaMemory; wrap it with CudaMemory::from_raw")
    );
    assert_eq!(export(foreign()).unwrap_err().to_string(), "Foreign is no CudaMemory");
    assert_eq!(export_versioned(foreign()).unwrap_err(), DlpackError::Foreign("Foreign".into()));
}

/// A library in C that gives and takes tensors, with a deleter that counts.
struct Peer {
    give: unsafe extern "C" fn(*const DLTensor, c_int) -> *mut DLManagedTensor,
    give_versioned: unsafe extern "C" fn(*const DLTensor, c_int, u32, u64) -> *mut DLManagedTensorVersioned,
    take: unsafe extern "C" fn(*mut DLManagedTensor, *mut c_char, usize),
    take_versioned: unsafe extern "C" fn(*mut DLManagedTensorVersioned, *mut c_char, usize),
    deletions: unsafe extern "C" fn() -> c_int,
}

static PEER: LazyLock<Peer> = LazyLock::new(|| {
    let folder = tempfile::tempdir().unwrap();
    let (source, built) = (folder.path().join("dlpack.c"), folder.path().join("libdlpack.so"));
    std::fs::write(&source, include_str!("fake_nccl/dlpack.c")).unwrap();
    let mut cc = Command::new("cc");
    cc.args(["-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o"]).args([&built, &source]);
    let output = cc.output().expect("a C compiler (apt-get install gcc)");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    // SAFETY: the library has no constructors, and its functions have these signatures. It is never unloaded.
    unsafe {
        let library = Box::leak(Box::new(Library::new(built).unwrap()));
        Peer {
            give: *library.get(b"give\0").unwrap(),
            give_versioned: *library.get(b"give_versioned\0").unwrap(),
            take: *library.get(b"take\0").unwrap(),
            take_versioned: *library.get(b"take_versioned\0").unwrap(),
            deletions: *library.get(b"deletions\0").unwrap(),
        }
    }
});

/// The tests share the counter, so each has it alone.
static COUNTER: Mutex<()> = Mutex::new(());

fn deletions() -> c_int {
    // SAFETY: it reads a counter.
    unsafe { (PEER.deletions)() }
}

/// What the library gives.
#[derive(Clone, Debug)]
struct Given {
    data: u64,
    offset: u64,
    device: (i32, i32),
    ndim: Option<i32>,
    dtype: (u8, u8, u16),
    shape: Option<Vec<i64>>,
    strides: Option<Vec<i64>>,
    deletes: bool,
    major: u32,
    flags: u64,
}

const FLOAT: (u8, u8, u16) = (2, 32, 1);

fn given(data: u64, shape: &[i64]) -> Given {
    let shape = Some(shape.to_vec());
    Given {
        data,
        offset: 0,
        device: (2, 1),
        ndim: None,
        dtype: FLOAT,
        shape,
        strides: None,
        deletes: true,
        major: 1,
        flags: 0,
    }
}

impl Given {
    /// Imports the tensor at GPU 1.
    fn import(&self, versioned: bool) -> Result<DeviceTensor, DlpackError> {
        let device = DEVICES.device(1).unwrap();
        let (mut shape, mut strides) = (self.shape.clone(), self.strides.clone());
        let at = |numbers: &mut Option<Vec<i64>>| {
            numbers.as_mut().map_or(std::ptr::null_mut(), |numbers| numbers.as_mut_ptr())
        };
        let (code, bits, lanes) = self.dtype;
        let tensor = DLTensor {
            data: self.data as *mut c_void,
            device: DLDevice { device_type: self.device.0, device_id: self.device.1 },
            ndim: self.ndim.unwrap_or_else(|| self.shape.as_ref().unwrap().len() as i32),
            dtype: DLDataType { code, bits, lanes },
            shape: at(&mut shape),
            strides: at(&mut strides),
            byte_offset: self.offset,
        };
        let deletes = c_int::from(self.deletes);
        // SAFETY: sizes and strides are copied. The memory outlives the tensor in each test, and nothing else uses it.
        unsafe {
            if versioned {
                let given = (PEER.give_versioned)(&raw const tensor, deletes, self.major, self.flags);
                import_versioned(&device, NonNull::new(given).unwrap())
            } else {
                import(&device, NonNull::new((PEER.give)(&raw const tensor, deletes)).unwrap())
            }
        }
    }
}

/// Memory of GPU 1 with the numbers 0, 1, 2, ….
fn numbers(count: usize) -> CudaMemory {
    let bytes: Vec<u8> = (0..count).flat_map(|number| (number as f32).to_le_bytes()).collect();
    DEVICES.device(1).unwrap().upload(&bytes).unwrap()
}

fn address(tensor: &DeviceTensor) -> u64 {
    (tensor.memory() as &dyn Any).downcast_ref::<CudaMemory>().unwrap().address()
}

#[test]
fn a_tensor_of_another_library_is_used_in_place_and_deleted_once() {
    let _alone = COUNTER.lock();
    let memory = numbers(8);
    let data = memory.address();
    let strided = |shape: &[i64], strides: &[i64]| Given { strides: Some(strides.to_vec()), ..given(data, shape) };
    let cases: [(Given, &[usize], u64, &[f32]); 8] = [
        (given(data, &[2, 3]), &[2, 3], data, &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]),
        (strided(&[2, 3], &[3, 1]), &[2, 3], data, &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]),
        (strided(&[2, 1, 3], &[3, 99, 1]), &[2, 1, 3], data, &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]),
        (Given { offset: 20, ..given(data, &[2]) }, &[2], data + 20, &[5.0, 6.0]),
        // Memory that all GPUs reach.
        (Given { device: (13, 0), ..given(data, &[1]) }, &[1], data, &[0.0]),
        // A scalar needs neither sizes nor strides.
        (Given { shape: None, ndim: Some(0), ..given(data, &[]) }, &[], data, &[0.0]),
        // Nothing is at the address of no elements.
        (given(0, &[0, 3]), &[0, 3], 0, &[]),
        (strided(&[2, 0], &[9, 9]), &[2, 0], 0, &[]),
    ];
    for (given, shape, place, elements) in cases {
        for versioned in [false, true] {
            let before = deletions();
            let tensor = given.import(versioned).unwrap_or_else(|error| panic!("{given:?}: {error}"));
            assert_eq!((tensor.dtype(), tensor.shape(), tensor.device()), (DType::F32, shape, Device::Cuda(1)));
            assert_eq!((address(&tensor), tensor.memory().bytes()), (place, 4 * elements.len()));
            let clone = tensor.clone();
            drop(tensor);
            assert_eq!(clone.cpu().unwrap().view::<f32>().unwrap().as_ref(), elements);
            let buffer = clone.into_buffer().unwrap();
            assert_eq!(deletions(), before, "in use");
            drop(buffer);
            assert_eq!(deletions(), before + 1, "deleted once");
        }
    }
    let forever = Given { deletes: false, ..given(data, &[2]) };
    let before = deletions();
    drop(forever.import(true).unwrap());
    drop(forever.import(false).unwrap());
    assert_eq!(deletions(), before, "there is no deleter");
    assert_eq!(memory.download().unwrap(), numbers(8).download().unwrap(), "nobody has freed or written it");
}

#[test]
fn each_type_is_read_by_its_code() {
    let _alone = COUNTER.lock();
    let memory = numbers(2);
    for (dtype, code, bits) in [
        (DType::I8, 0, 8),
        (DType::I16, 0, 16),
        (DType::I32, 0, 32),
        (DType::I64, 0, 64),
        (DType::U8, 1, 8),
        (DType::U16, 1, 16),
        (DType::U32, 1, 32),
        (DType::U64, 1, 64),
        (DType::F16, 2, 16),
        (DType::F32, 2, 32),
        (DType::F64, 2, 64),
        (DType::Bf16, 4, 16),
        (DType::Bool, 6, 8),
    ] {
        let tensor = Given { dtype: (code, bits, 1), ..given(memory.address(), &[1]) }.import(true).unwrap();
        assert_eq!((tensor.dtype(), tensor.memory().bytes()), (dtype, dtype.size()));
    }
}

#[test]
fn what_cannot_be_used_is_refused_with_the_reason_and_deleted() {
    let _alone = COUNTER.lock();
    let memory = numbers(6);
    let good = given(memory.address(), &[2, 3]);
    let strided = |strides: &[i64]| Given { strides: Some(strides.to_vec()), ..good.clone() };
    let on = |kind, id| Given { device: (kind, id), ..good.clone() };
    let typed = |code, bits, lanes| Given { dtype: (code, bits, lanes), ..good.clone() };
    let shaped = |shape: &[i64]| Given { shape: Some(shape.to_vec()), ..good.clone() };
    let cases = [
        (on(1, 0), "the tensor is on cpu, not on cuda:1; move it there first"),
        (on(2, 0), "the tensor is on cuda:0, not on cuda:1; move it there first"),
        (on(2, -1), "the tensor is on cuda:-1, not on cuda:1; move it there first"),
        (on(3, 0), "the tensor is on the host, in pinned memory, not on cuda:1; move it there first"),
        (on(10, 1), "the tensor is on device 1 of DLPack's type 10, not on cuda:1; move it there first"),
        (
            typed(2, 32, 4),
            "elements of DLPack's type code 2, 32 bits and 4 lanes have no type here; convert them first",
        ),
        (
            typed(2, 32, 0),
            "elements of DLPack's type code 2, 32 bits and 0 lanes have no type here; convert them first",
        ),
        (
            typed(5, 64, 1),
            "elements of DLPack's type code 5, 64 bits and 1 lanes have no type here; convert them first",
        ),
        (
            typed(10, 8, 1),
            "elements of DLPack's type code 10, 8 bits and 1 lanes have no type here; convert them first",
        ),
        (typed(6, 1, 1), "elements of DLPack's type code 6, 1 bits and 1 lanes have no type here; convert them first"),
        (Given { ndim: Some(-1), ..good.clone() }, "the tensor has -1 dimensions"),
        (shaped(&[2, -3]), "[2, -3] is no shape"),
        (shaped(&[i64::MAX, 8]), "[9223372036854775807, 8] is no shape"),
        (
            strided(&[1, 2]),
            "a tensor of shape [2, 3] and strides [1, 2] is not row-major and compact; call contiguous() first",
        ),
        (
            strided(&[6, 2]),
            "a tensor of shape [2, 3] and strides [6, 2] is not row-major and compact; call contiguous() first",
        ),
        (
            strided(&[0, 1]),
            "a tensor of shape [2, 3] and strides [0, 1] is not row-major and compact; call contiguous() first",
        ),
        (Given { shape: None, ndim: Some(2), ..good.clone() }, "the pointer to the shape of the tensor is null"),
        (Given { data: 0, ..good.clone() }, "the pointer to the data of the tensor is null"),
        (
            Given { offset: u64::MAX, ..good.clone() },
            "the tensor begins 18446744073709551615 bytes after its address, which is beyond all addresses",
        ),
    ];
    for (given, why) in cases {
        for versioned in [false, true] {
            let before = deletions();
            assert_eq!(given.import(versioned).unwrap_err().to_string(), why);
            assert_eq!(deletions(), before + 1, "{why}");
        }
    }
    let before = deletions();
    let other = Given { major: 2, ..good.clone() }.import(true).unwrap_err();
    assert_eq!(other, DlpackError::Version(DLPackVersion { major: 2, minor: 0 }));
    assert_eq!(other.to_string(), "the tensor is of DLPack 2.0; version 1 is read");
    assert_eq!(Given { flags: 1, ..good.clone() }.import(true).unwrap_err(), DlpackError::ReadOnly);
    assert!(Given { flags: 2, ..good }.import(true).is_ok(), "a copy that the producer has made");
    assert_eq!(deletions(), before + 3);
}

#[test]
fn a_tensor_of_ours_goes_to_another_library_and_is_freed_there() {
    let _alone = COUNTER.lock();
    let mut text = [0; 512];
    let mut taken = |tensor: DeviceTensor, versioned: bool| {
        let into = text.as_mut_ptr().cast::<c_char>();
        // SAFETY: the library reads the tensor, calls its deleter once, and writes a text of at most this length.
        unsafe {
            if versioned {
                (PEER.take_versioned)(export_versioned(tensor).unwrap().as_ptr(), into, text.len());
            } else {
                (PEER.take)(export(tensor).unwrap().as_ptr(), into, text.len());
            }
            CStr::from_ptr(into).to_str().unwrap().to_owned()
        }
    };
    for versioned in [false, true] {
        let owner = Arc::new(());
        let memory = numbers(24);
        let device = DEVICES.device(1).unwrap();
        let mut owned = |dtype: DType, shape: &[usize]| {
            let bytes = dtype.size() * shape.iter().product::<usize>();
            // SAFETY: the memory has at least 96 bytes and outlives the tensor, and nothing else uses it.
            let part = unsafe { CudaMemory::from_raw(&device, memory.address(), bytes, Box::new(Arc::clone(&owner))) };
            let told = taken(DeviceTensor::new(dtype, shape, Box::new(part)).unwrap(), versioned);
            assert_eq!(Arc::strong_count(&owner), 1, "the deleter has dropped the memory");
            told
        };
        let version = if versioned { "version 1.0, flags 0, " } else { "" };
        let at = memory.address();
        assert_eq!(
            owned(DType::F32, &[2, 3, 4]),
            format!("{version}device 2:1, dtype 2/32/1, offset 0, data {at}, 2*12 3*4 4*1")
        );
        assert_eq!(owned(DType::Bf16, &[7]), format!("{version}device 2:1, dtype 4/16/1, offset 0, data {at}, 7*1"));
        assert_eq!(owned(DType::I64, &[]), format!("{version}device 2:1, dtype 0/64/1, offset 0, data {at},"));
    }
    // Memory that a batch shares stays when the receiver is done with it.
    LazyLock::force(&DEVICES);
    let placed = batch_of(0).to_device("cuda:1").unwrap();
    let told = taken(placed.tensor("gradient").unwrap().clone(), true);
    let at = address(placed.tensor("gradient").unwrap());
    assert!(told.ends_with(&format!("data {at}, 3*200 200*1")), "{told}");
    assert_eq!(placed.cpu().unwrap(), batch_of(0));
}

#[test]
fn a_tensor_that_left_and_came_back_is_the_same() {
    LazyLock::force(&DEVICES);
    let mut placed = batch_of(0).to_device(Device::Cuda(1)).unwrap();
    let gradient = placed.remove("gradient").unwrap();
    let at = address(&gradient);
    let device = DEVICES.device(1).unwrap();
    // SAFETY: the tensor was exported here, and nobody else uses it.
    let back = unsafe { import_versioned(&device, export_versioned(gradient).unwrap()) }.unwrap();
    assert_eq!(address(&back), at);
    placed.insert("gradient", back).unwrap();
    let (there, before) = (placed.cpu().unwrap(), batch_of(0));
    assert_eq!(tensor(&there, "gradient").bytes(), tensor(&before, "gradient").bytes());
    assert_eq!(device_provider("cuda").unwrap().kind(), "cuda");
}

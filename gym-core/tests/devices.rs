//! Batches on a device whose memory is in this process, by the public interface.
#![allow(clippy::unwrap_used)] // In a test a panic is the message.

use std::any::Any;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};

use bytes::Bytes;
use gym_core::group::collective::{Buffer, DeviceMemory, Memory};
use gym_core::group::{
    Batch, Column, DType, Device, DeviceProvider, DeviceTensor, DynamicBatching, JsonRows, Packed, Ragged, Sharding,
    Side, Tensor, device_provider, register_device_provider,
};
use gym_core::{Code, Error, Result};
use parking_lot::Mutex;
use proptest::prelude::*;
use serde_json::json;

/// Memory of a device: each byte is there as its complement, so host bytes that did not move would show.
#[derive(Debug)]
struct Complement {
    index: u32,
    bytes: Vec<u8>,
}

impl DeviceMemory for Complement {
    fn device(&self) -> Device {
        Device::Cuda(self.index)
    }

    fn bytes(&self) -> usize {
        self.bytes.len()
    }
}

/// Devices 0 to 3, of which the copy that `fails_at` counts down to fails.
#[derive(Debug, Default)]
struct Fake {
    copies: AtomicUsize,
    fails_at: Mutex<Option<usize>>,
}

impl Fake {
    fn copy(&self) -> Result<()> {
        self.copies.fetch_add(1, Ordering::SeqCst);
        let mut left = self.fails_at.lock();
        if *left == Some(0) {
            *left = None;
            return Err(Error::internal("the bus is on fire"));
        }
        *left = left.map(|left| left - 1);
        Ok(())
    }

    fn fail_at(&self, copies: usize) {
        *self.fails_at.lock() = Some(copies);
    }
}

impl DeviceProvider for Fake {
    fn kind(&self) -> &'static str {
        "cuda"
    }

    fn upload(&self, index: u32, bytes: &[u8]) -> Result<Box<dyn DeviceMemory>> {
        self.copy()?;
        if index > 3 {
            return Err(Error::not_started(Code::FailedPrecondition, format!("no GPU {index}")));
        }
        Ok(Box::new(Complement { index, bytes: bytes.iter().map(|byte| !byte).collect() }))
    }

    fn download(&self, memory: &dyn DeviceMemory) -> Result<Bytes> {
        self.copy()?;
        let memory = (memory as &dyn Any).downcast_ref::<Complement>();
        let memory = memory.ok_or_else(|| Error::invalid("memory of another library"))?;
        Ok(memory.bytes.iter().map(|byte| !byte).collect())
    }
}

static FAKE: LazyLock<Arc<Fake>> = LazyLock::new(|| {
    let fake = Arc::new(Fake::default());
    register_device_provider(fake.clone()).unwrap();
    fake
});

/// The tests share the provider, so those that make it fail or count its copies have it alone.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> parking_lot::MutexGuard<'static, ()> {
    LazyLock::force(&FAKE);
    ALONE.lock()
}

/// A tensor of any type, of one to three dimensions.
fn tensor(rows: usize) -> impl Strategy<Value = Tensor> {
    let shape = prop::collection::vec(0_usize..4, 0..3);
    let side = prop::option::of(prop_oneof![Just(Side::Left), Just(Side::Right)]);
    (0..DType::ALL.len(), shape, side).prop_flat_map(move |(dtype, inner, side)| {
        let dtype = DType::ALL[dtype];
        let shape = [vec![rows], inner].concat();
        let bytes = dtype.size() * shape.iter().product::<usize>();
        prop::collection::vec(any::<u8>(), bytes).prop_map(move |bytes| {
            let tensor = Tensor::new(dtype, shape.clone(), bytes.into()).unwrap();
            match side.filter(|_| shape.len() > 1) {
                Some(side) => tensor.padded_on(side).unwrap(),
                None => tensor,
            }
        })
    })
}

/// A batch of tensors, with a column of each other kind among them.
fn batch() -> impl Strategy<Value = Batch> {
    (0_usize..5).prop_flat_map(|rows| {
        let tensors = prop::collection::vec(tensor(rows), 0..5);
        (tensors, 0_usize..5, any::<u32>()).prop_map(move |(tensors, at, step)| {
            let tokens: Vec<Vec<i64>> = (0..rows).map(|row| vec![row as i64; row]).collect();
            let image = Tensor::from_vec([2, 2], vec![1_u8, 2, 3, 4]).unwrap();
            let mut columns: Vec<Column> = tensors.into_iter().map(Column::from).collect();
            let others: [Column; 3] = [
                Ragged::from_rows(&tokens).into(),
                JsonRows::from_values(0..rows).unwrap().into(),
                Packed::new((0..rows).map(|_| Some(image.clone())), 0).into(),
            ];
            let at = at.min(columns.len());
            columns.splice(at..at, others);
            let columns = columns.into_iter().enumerate().map(|(at, column)| (format!("column {at}"), column));
            let mut batch = Batch::new(columns).unwrap();
            batch.metadata_mut().insert("step".into(), json!(step));
            batch
        })
    })
}

fn gradient() -> Batch {
    let gradient = Tensor::from_vec([2, 2], vec![1.0_f32, 2.0, 3.0, 4.0]).unwrap().padded_on(Side::Left).unwrap();
    Batch::empty()
        .with("gradient", gradient)
        .unwrap()
        .with("notes", JsonRows::from_values([1, 2]).unwrap())
        .unwrap()
        .with("mask", Tensor::from_vec([2], vec![true, false]).unwrap())
        .unwrap()
}

fn refusal<T: std::fmt::Debug>(result: Result<T>) -> (Code, String) {
    let error = result.unwrap_err();
    (error.code(), error.to_string())
}

/// The elements that an operation has left in a buffer.
fn complement(bytes: &[u8]) -> Box<dyn DeviceMemory> {
    Box::new(Complement { index: 0, bytes: bytes.iter().map(|byte| !byte).collect() })
}

proptest! {
    #[test]
    fn a_batch_comes_back_from_any_devices_bit_for_bit(batch in batch(), path in prop::collection::vec(0_u32..4, 1..4)) {
        let _alone = alone();
        let provider = &*FAKE;
        let mut placed = batch.to_device("cpu").unwrap();
        let tensors = batch.columns().filter(|(_, column)| column.dense().is_ok()).count();
        let mut expected = 0;
        provider.copies.store(0, Ordering::SeqCst);
        for index in path {
            let device = Device::Cuda(index);
            // From the host an upload, from another device a download and an upload, at the same device nothing.
            expected += tensors * match placed.device() { Device::Cpu => 1, here if here == device => 0, Device::Cuda(_) => 2 };
            placed = placed.to_device(device).unwrap();
            prop_assert_eq!((placed.device(), placed.rows()), (device, batch.rows()));
            prop_assert!(placed.names().eq(batch.names()));
            prop_assert_eq!(placed.metadata(), batch.metadata());
        }
        prop_assert_eq!(provider.copies.load(Ordering::SeqCst), expected);
        for (name, column) in batch.columns() {
            match column {
                Column::Dense(tensor) => {
                    let there = placed.tensor(name).unwrap();
                    prop_assert_eq!((there.dtype(), there.shape(), there.padding_side()), (tensor.dtype(), tensor.shape(), tensor.padding_side()));
                    prop_assert_eq!(there.memory().bytes(), tensor.bytes().len());
                }
                other => prop_assert_eq!(placed.column(name).unwrap(), other),
            }
        }
        prop_assert_eq!(&placed.cpu().unwrap(), &batch);
        prop_assert_eq!(&placed.to_device("cpu").unwrap().cpu().unwrap(), &batch);
    }

    #[test]
    fn a_copy_that_fails_leaves_the_batch_as_it_was(batch in batch(), copies in 0_usize..12) {
        let _alone = alone();
        let provider = &*FAKE;
        let moved = |fails: bool| {
            if fails {
                provider.fail_at(copies);
            }
            let there = batch.to_device("cuda")?;
            let placed = there.clone();
            let back = there.to_device("cuda:1").and_then(|next| next.cpu());
            *provider.fails_at.lock() = None;
            assert_eq!(placed.cpu().unwrap(), batch, "a failure changes nothing");
            back
        };
        let tensors = batch.columns().filter(|(_, column)| column.dense().is_ok()).count();
        let result = moved(true);
        prop_assert_eq!(result.is_err(), copies < 4 * tensors);
        if let Err(error) = result {
            prop_assert!(error.to_string().starts_with("move column \"column ") && error.to_string().ends_with("the bus is on fire"), "{}", error);
        }
        prop_assert_eq!(moved(false).unwrap(), batch);
    }
}

#[test]
fn the_second_provider_and_one_of_unknown_devices_are_refused() {
    #[derive(Debug)]
    struct Other(&'static str);
    impl DeviceProvider for Other {
        fn kind(&self) -> &'static str {
            self.0
        }

        fn upload(&self, _: u32, _: &[u8]) -> Result<Box<dyn DeviceMemory>> {
            unreachable!("it is not registered")
        }

        fn download(&self, _: &dyn DeviceMemory) -> Result<Bytes> {
            unreachable!("it is not registered")
        }
    }
    LazyLock::force(&FAKE);
    let (code, text) = refusal(register_device_provider(Arc::new(Other("cuda"))));
    assert!(code == Code::AlreadyExists && text.contains("Fake") && text.contains("Other"), "{text}");
    for kind in ["cpu", "rocm"] {
        let (code, text) = refusal(register_device_provider(Arc::new(Other(kind))));
        assert_eq!((code, text), (Code::InvalidArgument, format!("{kind:?} is no kind of device; there is cuda")));
        assert!(device_provider(kind).is_none());
    }
    assert!(format!("{:?}", device_provider("cuda").unwrap()).starts_with("Fake"));
}

#[test]
fn a_tensor_is_lent_to_an_operation_and_its_result_put_back() {
    let _alone = alone();
    LazyLock::force(&FAKE);
    let batch = gradient();
    for device in ["cpu", "cuda"] {
        let mut placed = batch.to_device(device).unwrap();
        let mut buffer = placed.lend("gradient").unwrap();
        assert_eq!((buffer.dtype, buffer.elements()), (DType::F32, 4));
        let sum: Vec<u8> = [10.0_f32, 20.0, 30.0, 40.0].iter().flat_map(|element| element.to_le_bytes()).collect();
        match &mut buffer.memory {
            Memory::Device(memory) => *memory = complement(&sum),
            _ => buffer.host_bytes_mut().unwrap().copy_from_slice(&sum),
        }
        // Until it is back, what needs it says so.
        let errors = [
            refusal(placed.cpu()),
            refusal(placed.to_device("cuda:1")),
            refusal(placed.tensor("gradient")),
            refusal(placed.column("gradient")),
            refusal(placed.lend("gradient")),
            refusal(placed.remove("gradient")),
        ];
        for (code, text) in errors {
            let lent = "its memory is lent to an operation; give it back with restore()";
            assert!(code == Code::FailedPrecondition && text.ends_with(lent), "{text}");
        }
        placed.restore("gradient", buffer).unwrap();
        let back = placed.cpu().unwrap();
        let result = back.column("gradient").unwrap().dense().unwrap();
        assert_eq!(result.view::<f32>().unwrap().as_ref(), [10.0, 20.0, 30.0, 40.0]);
        assert_eq!((result.shape(), result.padding_side()), ([2, 2].as_slice(), Some(Side::Left)));
        assert!(back.names().eq(batch.names()), "in its place");
        assert_eq!(batch, gradient(), "the batch on the host has its own memory");
    }
}

#[test]
fn memory_that_another_batch_shares_is_copied_when_it_is_lent() {
    let _alone = alone();
    let mut placed = gradient().to_device("cuda").unwrap();
    let other = placed.clone();
    FAKE.fail_at(0);
    let (_, text) = refusal(placed.lend("gradient"));
    assert_eq!(text, "lend column \"gradient\": the bus is on fire");
    let Memory::Device(memory) = placed.lend("gradient").unwrap().memory else { panic!("host memory") };
    assert!(!std::ptr::addr_eq(&raw const *memory, other.tensor("gradient").unwrap().memory()));
    assert_eq!(other.cpu().unwrap(), gradient());
    // The memory of a batch alone is lent as it is.
    let mut alone = other;
    let address = &raw const *alone.tensor("gradient").unwrap().memory();
    let Memory::Device(memory) = alone.lend("gradient").unwrap().memory else { panic!("host memory") };
    assert!(std::ptr::addr_eq(&raw const *memory, address));
}

#[test]
fn what_does_not_fit_is_refused_and_returned() {
    let _alone = alone();
    LazyLock::force(&FAKE);
    let mut placed = gradient().to_device("cuda").unwrap();
    let mut refused = |name: &str, buffer: Buffer| {
        let bytes = buffer.bytes();
        let (buffer, error) = placed.restore(name, buffer).unwrap_err();
        assert_eq!(buffer.bytes(), bytes, "the memory comes back");
        error.to_string()
    };
    let on = |index, bytes| Memory::Device(Box::new(Complement { index, bytes: vec![0; bytes] }));
    assert!(refused("gradient", Buffer::new(DType::F32, on(0, 16))).ends_with("the column is not lent"));
    assert!(
        refused("loss", Buffer::new(DType::F32, on(0, 16))).contains("there are [\"gradient\", \"notes\", \"mask\"]")
    );
    let lent = placed.lend("gradient").unwrap();
    let mut refused = |buffer: Buffer| placed.restore("gradient", buffer).unwrap_err().1.to_string();
    assert_eq!(
        refused(Buffer::new(DType::F32, on(0, 32))),
        "restore column \"gradient\": F32 of shape [2, 2] takes 16 bytes, got 32"
    );
    assert!(refused(Buffer::new(DType::I32, on(0, 16))).ends_with("the buffer has I32, and the column F32"));
    assert!(refused(Buffer::new(DType::F32, on(2, 16))).ends_with("the buffer is on cuda:2, and the batch on cuda:0"));
    assert!(
        refused(Buffer::host(DType::F32, [0; 16][..].into()))
            .ends_with("the buffer is on cpu, and the batch on cuda:0")
    );
    placed.restore("gradient", lent).unwrap();
    assert_eq!(placed.cpu().unwrap(), gradient());
    let (code, text) = refusal(placed.lend("notes"));
    assert_eq!(
        (code, text.as_str()),
        (Code::InvalidArgument, "lend column \"notes\": a json column is in host memory")
    );
    let (code, text) = refusal(placed.column("gradient"));
    let opaque = "read column \"gradient\": it is on cuda:0, and the host cannot read it; take the batch to the host first with cpu()";
    assert_eq!((code, text.as_str()), (Code::InvalidArgument, opaque));
    assert_eq!(refusal(gradient().to_device("gpu")).0, Code::InvalidArgument);
    let (code, text) = refusal(gradient().to_device("cuda:9"));
    assert_eq!((code, text.as_str()), (Code::FailedPrecondition, "move column \"gradient\" to cuda:9: no GPU 9"));
}

#[test]
fn a_tensor_of_another_library_joins_a_batch_and_leaves_it() {
    let _alone = alone();
    LazyLock::force(&FAKE);
    let mut placed = gradient().to_device("cuda").unwrap();
    let weights = |index, shape: &[usize]| {
        let bytes = vec![!7; 4 * shape.iter().product::<usize>()];
        DeviceTensor::new(DType::I32, shape, Box::new(Complement { index, bytes })).unwrap()
    };
    for (wrong, why) in [
        (weights(0, &[3]), "the tensor has 3 rows, and the batch 2"),
        (weights(1, &[2]), "the tensor is on cuda:1, and the batch on cuda:0"),
        (weights(0, &[]), "the tensor is a scalar; dimension 0 must count the rows"),
        (weights(0, &[1 << 40, 0]), "rows of no bytes"),
    ] {
        let (code, text) = refusal(placed.insert("weights", wrong));
        assert!(code == Code::InvalidArgument && text.contains(why), "{text}");
    }
    let short = Box::new(Complement { index: 0, bytes: vec![0; 7] });
    assert!(DeviceTensor::new(DType::I32, [2], short).unwrap_err().message().ends_with("takes 8 bytes, got 7"));
    placed.insert("weights", weights(0, &[2, 1])).unwrap();
    placed.insert("mask", weights(0, &[2])).unwrap();
    let there = placed.cpu().unwrap();
    assert!(there.names().eq(["gradient", "notes", "mask", "weights"]));
    let bytes = there.column("weights").unwrap().dense().unwrap().bytes().clone();
    assert!(bytes.iter().all(|byte| *byte == 7), "{bytes:?}");
    let taken = placed.remove("weights").unwrap();
    assert_eq!(taken.into_buffer().unwrap().bytes(), 8);
    assert!(placed.names().eq(["gradient", "notes", "mask"]));
    assert_eq!(format!("{:?}", placed.tensor("gradient").unwrap()), "DeviceTensor(F32 [2, 2] on cuda:0)");
}

#[test]
fn micro_batches_go_with_the_batch() {
    let _alone = alone();
    LazyLock::force(&FAKE);
    let batch = Batch::empty()
        .with("input_ids", Tensor::from_vec([4, 8], vec![0_i64; 32]).unwrap())
        .unwrap()
        .with("input_lengths", Tensor::from_vec([4], vec![3_i32, 8, 2, 5]).unwrap())
        .unwrap();
    let sharding = Sharding::into_shards(2).dynamic(DynamicBatching {
        max_tokens_per_microbatch: 8,
        sequence_length_round: NonZeroUsize::MIN,
        input_key: "input_ids".into(),
        input_lengths_key: "input_lengths".into(),
    });
    let shard = batch.shard_by_batch_size(&sharding).unwrap().shards.remove(0);
    assert!(shard.micro_batches().is_some());
    let back = shard.to_device("cuda").unwrap().cpu().unwrap();
    assert_eq!(back.micro_batches(), shard.micro_batches());
    assert_eq!(back, shard);
}

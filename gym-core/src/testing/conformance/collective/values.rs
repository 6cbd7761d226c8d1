//! Cases about what operations return.

use bytes::{Bytes, BytesMut};

use super::reference::{DTYPES, buffer, expected, operations, periodic};
use super::{CollectiveFixture, Ranks, all, cx, meeting, ranks};
use crate::group::batch::tensor::{DType, Side, Tensor};
use crate::group::collective::{Buffer, Collective, CommunicatorExt, Moved, ReduceOp};

/// Elements after which large buffers repeat, so that a test build computes the reference in time. A prime, so that no block of a backend fits it.
pub(super) const PERIOD: usize = 251;
/// Ranks of the largest meetings.
const WORLD_SIZE_MAX: usize = 8;

/// Calls an operation on all ranks, and checks the bits on each. The inputs repeat after `period` elements.
async fn check(ranks: &Ranks, operation: Collective, dtype: DType, inputs: &[Vec<u8>], period: usize) {
    let buffers = inputs.iter().map(|bytes| buffer(dtype, bytes)).collect();
    check_buffers(ranks, operation, inputs, buffers, period).await;
}

/// Does the same with these buffers, which have the inputs.
async fn check_buffers(ranks: &Ranks, operation: Collective, inputs: &[Vec<u8>], buffers: Vec<Buffer>, period: usize) {
    let (cx, dtype) = (cx(), buffers[0].dtype);
    let transfers = ranks.iter().zip(buffers).map(|(rank, buffer)| rank.start(&cx, operation, buffer));
    let transfers: Vec<_> = transfers.collect();
    let numbers: Vec<u32> = ranks.iter().map(|rank| rank.meeting().rank).collect();
    let expected = expected(operation, dtype, &numbers, inputs, period);
    for (at, (moved, expected)) in all(transfers).await.into_iter().zip(&expected).enumerate() {
        let what = format!(
            "{operation} of {} {dtype} on rank {} of {numbers:?}",
            inputs[at].len() / dtype.size(),
            numbers[at]
        );
        check_result(&what, moved, dtype, expected, inputs[at].len());
    }
}

/// Checks the bits of one rank, whose buffer had `given` bytes.
pub(super) fn check_result(what: &str, moved: Moved, dtype: DType, expected: &[u8], given: usize) {
    let Moved { buffer, result } = moved;
    let moving = result.unwrap_or_else(|error| panic!("{what}: {error}"));
    assert_eq!(buffer.dtype, dtype, "{what}");
    let bytes = buffer.host_bytes().unwrap_or_else(|| panic!("{what}: not in host memory"));
    assert_eq!(bytes.len(), expected.len(), "{what}: the length");
    if bytes != expected {
        let (size, differ) = (dtype.size(), (0..bytes.len()).find(|at| bytes[*at] != expected[*at]));
        let element = differ.unwrap_or_default() / size;
        let range = element * size..(element + 1) * size;
        panic!("{what}: element {element} is {:?}, not {:?}", &bytes[range.clone()], &expected[range]);
    }
    assert_eq!(moving.bytes, given.max(expected.len()) as u64, "{what}: the bytes that were moved");
}

/// Returns the inputs of all ranks, which repeat after [`PERIOD`] elements. Those of an all-gather differ in length.
pub(super) fn inputs(
    generator: &mut fastrand::Rng,
    operation: Collective,
    dtype: DType,
    elements: usize,
    world_size: usize,
) -> Vec<Vec<u8>> {
    let ragged = |position: usize| if operation == Collective::AllGather { elements * position / 2 } else { elements };
    (0..world_size).map(|position| periodic(generator, dtype, ragged(position), PERIOD)).collect()
}

pub(super) async fn every_operation_gives_the_bits_of_the_reference(fixture: &dyn CollectiveFixture, seed: u64) {
    let mut generator = fastrand::Rng::with_seed(seed);
    for world_size in 1..=WORLD_SIZE_MAX {
        // One meeting for all: what one operation leaves behind must not disturb the next.
        let communicators = meeting(fixture, world_size).await;
        for dtype in DTYPES {
            for elements in [0, 1, world_size - 1, world_size + 1, 97, 2_053 + world_size] {
                let root = generator.usize(..world_size);
                for operation in operations(dtype, &ranks(world_size), root) {
                    let inputs = inputs(&mut generator, operation, dtype, elements, world_size);
                    check(&communicators, operation, dtype, &inputs, PERIOD).await;
                }
            }
        }
        let ended = all(communicators.iter().map(|rank| rank.barrier(&cx()))).await;
        assert!(ended.iter().all(Result::is_ok), "{ended:?}");
    }
}

/// Sizes beyond a mebibyte, where backends divide their work. Each type meets each operation, at some number of ranks.
pub(super) async fn large_buffers_give_the_bits_of_the_reference(fixture: &dyn CollectiveFixture, seed: u64) {
    let mut generator = fastrand::Rng::with_seed(seed);
    for (index, dtype) in DTYPES.into_iter().enumerate() {
        let sizes = [2, 3, 2, 5];
        let operations = |world_size: usize| operations(dtype, &ranks(world_size), world_size - 1);
        for at in 0..operations(2).len() {
            let world_size = sizes[(at + index) % sizes.len()];
            let operation = operations(world_size)[at];
            let elements = (1 << 20) / dtype.size() + 13;
            let inputs = inputs(&mut generator, Collective::Barrier, dtype, elements, world_size);
            check(&meeting(fixture, world_size).await, operation, dtype, &inputs, PERIOD).await;
        }
    }
}

/// Memory that the meeting has allocated, and some that is private, at every rank or at some; and memory of another meeting.
pub(super) async fn allocated_memory_gives_the_bits_of_the_reference(fixture: &dyn CollectiveFixture, seed: u64) {
    let mut generator = fastrand::Rng::with_seed(seed);
    let other = meeting(fixture, 1).await;
    for world_size in [1, 2, 4] {
        let communicators = meeting(fixture, world_size).await;
        for dtype in DTYPES {
            for elements in [1, 97, 100_003] {
                for operation in operations(dtype, &ranks(world_size), world_size - 1) {
                    let inputs = inputs(&mut generator, operation, dtype, elements, world_size);
                    let buffers = communicators.iter().zip(&inputs).map(|(rank, bytes)| {
                        let elements = bytes.len() / dtype.size();
                        let mut allocated = match generator.u8(0..4) {
                            0 => buffer(dtype, bytes),
                            1 => other[0].allocate(dtype, elements),
                            _ => rank.allocate(dtype, elements),
                        };
                        allocated.host_bytes_mut().expect("host memory").copy_from_slice(bytes);
                        allocated
                    });
                    let buffers = buffers.collect();
                    check_buffers(&communicators, operation, &inputs, buffers, PERIOD).await;
                }
            }
        }
    }
    let allocated = other[0].allocate(DType::F32, 6);
    assert_eq!((allocated.elements(), allocated.host_bytes()), (6, Some(&[0; 24][..])));
    let tensor = allocated.into_tensor([2, 3]).expect("six elements");
    assert_eq!(tensor.to_f64s().expect("F32"), [0.0; 6]);
}

/// NaN, infinities, zeros of both signs, subnormal and extreme numbers, and sums that overflow.
pub(super) async fn special_values_are_the_same_on_every_rank(fixture: &dyn CollectiveFixture, _: u64) {
    const SPECIAL: [f64; 10] =
        [0.0, -0.0, f64::INFINITY, f64::NEG_INFINITY, f64::MAX, f64::MIN, 5e-324, -1.0, 65_504.0, f64::NAN];
    let communicators = meeting(fixture, 3).await;
    for op in [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Min, ReduceOp::Max] {
        // Every triple of special values is some element.
        let inputs: Vec<Vec<f64>> = (0..3_u32)
            .map(|position| (0..1_000).map(|at: usize| SPECIAL[at / 10_usize.pow(position) % 10]).collect())
            .collect();
        let cx = cx();
        let results = all(communicators.iter().zip(&inputs).map(|(rank, values)| {
            rank.all_reduce(&cx, Tensor::from_vec([1_000], values.clone()).expect("a vector"), op)
        }))
        .await;
        let results: Vec<Vec<f64>> =
            results.into_iter().map(|result| result.expect("a result").to_f64s().expect("F64")).collect();
        for at in 0..1_000 {
            let bits: Vec<u64> = results.iter().map(|result| result[at].to_bits()).collect();
            assert!(bits.iter().all(|other| *other == bits[0]), "{op} of element {at}: {bits:x?}");
            let values = [inputs[0][at], inputs[1][at], inputs[2][at]];
            let any_nan = values.iter().any(|value| value.is_nan());
            assert!(!any_nan || results[0][at].is_nan(), "{op} of {values:?} is {}", results[0][at]);
            if op == ReduceOp::Min && !any_nan {
                let least = values.into_iter().fold(f64::INFINITY, f64::min);
                assert!(results[0][at] == least, "{op} of {values:?} is {}", results[0][at]);
            }
        }
    }
}

pub(super) async fn tensors_keep_their_shapes(fixture: &dyn CollectiveFixture, _: u64) {
    let (communicators, cx) = (meeting(fixture, 3).await, cx());
    let numbers = |from: usize, shape: &[usize]| {
        let elements = (0..shape.iter().product::<usize>()).map(|at| (from + at) as i32).collect();
        Tensor::from_vec(shape, elements).expect("a shape")
    };
    let each = |shape: &'static [usize]| (0..3).map(move |rank| numbers(rank * 10, shape)).collect::<Vec<_>>();

    let tensors = each(&[2, 3]).into_iter().map(|tensor| tensor.padded_on(Side::Left).expect("two dimensions"));
    let calls = communicators.iter().zip(tensors).map(|(rank, tensor)| rank.all_reduce(&cx, tensor, ReduceOp::Sum));
    for sum in all(calls.collect::<Vec<_>>()).await {
        let sum = sum.expect("a sum");
        assert_eq!((sum.shape(), sum.padding_side()), (&[2, 3][..], Some(Side::Left)));
        assert_eq!(sum.to_i64s().expect("integers"), [30, 33, 36, 39, 42, 45]);
    }
    // A tensor that others share is copied, and keeps its values.
    let shared = each(&[4]);
    let root = communicators[1].meeting().rank;
    let calls = communicators.iter().zip(&shared).map(|(rank, tensor)| rank.broadcast(&cx, tensor.clone(), root));
    for copy in all(calls.collect::<Vec<_>>()).await {
        assert_eq!(copy.expect("a copy").to_i64s().expect("integers"), [10, 11, 12, 13]);
    }
    assert_eq!(shared, each(&[4]));
    // Rows of different numbers; scalars become rows.
    let rows = [numbers(0, &[1, 2]), numbers(2, &[0, 2]), numbers(2, &[2, 2])];
    let calls = communicators.iter().zip(rows).map(|(rank, tensor)| rank.all_gather(&cx, tensor));
    for gathered in all(calls.collect::<Vec<_>>()).await {
        assert_eq!(gathered.expect("rows"), numbers(0, &[3, 2]));
    }
    let scalars = communicators.iter().enumerate().map(|(at, rank)| rank.all_gather(&cx, numbers(at, &[])));
    for gathered in all(scalars.collect::<Vec<_>>()).await {
        assert_eq!(gathered.expect("scalars"), numbers(0, &[3]));
    }
    // A slice of a sum for each rank, and together the sum.
    let calls = communicators.iter().zip(each(&[2, 4])).map(|(rank, tensor)| async {
        let slice = rank.reduce_scatter(&cx, tensor, ReduceOp::Sum).await.expect("a slice");
        (slice.shape().to_vec(), rank.all_gather(&cx, slice).await.expect("slices").to_i64s().expect("integers"))
    });
    let slices = all(calls).await;
    assert_eq!(slices.iter().map(|(shape, _)| shape[0]).collect::<Vec<_>>(), [2, 3, 3]);
    assert!(slices.iter().all(|(_, sum)| *sum == [30, 33, 36, 39, 42, 45, 48, 51]), "{slices:?}");
    // Memory that nobody shares comes back as the result, wherever the backend allows it; odd alignments are legal.
    let mut odd = BytesMut::from(&[9, 1, 0, 0, 0, 0, 0, 0, 0][..]);
    let odd = Tensor::new(DType::I64, [1], Bytes::from(odd.split_off(1))).expect("eight bytes");
    let calls = communicators.iter().map(|rank| rank.all_reduce(&cx, odd.clone(), ReduceOp::Sum));
    for sum in all(calls.collect::<Vec<_>>()).await {
        assert_eq!(sum.expect("a sum").to_i64s().expect("integers"), [3]);
    }
    let empty = all(communicators.iter().map(|rank| rank.start(&cx, Collective::Barrier, Buffer::empty()))).await;
    assert!(empty.iter().all(|moved| moved.result.is_ok() && moved.buffer.bytes() == 0), "{empty:?}");
}

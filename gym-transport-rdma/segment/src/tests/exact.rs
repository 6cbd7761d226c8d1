//! Results have the bits of the reference: `Reduction` over the tensors of all ranks.

use std::time::Duration;

use gym_core::group::DType;
use gym_core::group::collective::ReduceOp;
use gym_core::group::collective::reduction::{DTYPES, Reduction, order_of, slice_of};
use half::{bf16, f16};

use super::{At, SIZES, far, in_ranks};
use crate::{Segment, SegmentCommunicator};

fn tensor(dtype: DType, elements: usize, seed: u64) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut bytes = Vec::with_capacity(elements * dtype.size());
    for _ in 0..elements {
        // Values of different sizes, so that another order of sums has other bits.
        let value = (random.f32() - 0.5) * f32::from(1_u16 << random.u8(0..12));
        match dtype {
            DType::U8 => bytes.push(random.u8(..)),
            DType::I32 => bytes.extend(random.i32(..).to_le_bytes()),
            DType::I64 => bytes.extend(random.i64(..).to_le_bytes()),
            DType::F16 => bytes.extend(f16::from_f32(value).to_le_bytes()),
            DType::Bf16 => bytes.extend(bf16::from_f32(value).to_le_bytes()),
            DType::F32 => bytes.extend(value.to_le_bytes()),
            _ => bytes.extend((f64::from(value) / 3.0).to_le_bytes()),
        }
    }
    bytes
}

/// Slice by slice, as the backend `mem` does.
fn reduced(dtype: DType, op: ReduceOp, tensors: &[Vec<u8>]) -> Vec<u8> {
    let (reduction, size) = (Reduction::new(dtype, op).unwrap(), dtype.size());
    let (world_size, elements) = (tensors.len(), tensors[0].len() / size);
    let mut result = Vec::new();
    for position in 0..world_size {
        let slice = slice_of(elements, world_size, position);
        let bytes = slice.start * size..slice.end * size;
        let mut parts: Vec<_> = order_of(world_size, position).map(|at| tensors[at][bytes.clone()].to_vec()).collect();
        reduction.reduce(&mut parts.iter_mut().map(|part| &mut part[..]).collect::<Vec<_>>());
        result.extend(parts.pop().unwrap());
    }
    result
}

/// The tensors of all ranks, and what the operations make of them.
struct Case {
    dtype: DType,
    op: ReduceOp,
    tensors: Vec<Vec<u8>>,
    reduced: Vec<u8>,
}

fn cases(world_size: usize, dtype: DType) -> Vec<Case> {
    let size = dtype.size();
    let piece = SIZES.piece_bytes / size;
    let elements = [0, 1, world_size - 1, world_size + 1, 333, piece, piece + 1, 3 * piece + 77];
    let ops = [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Min, ReduceOp::Max];
    let case = |(number, elements): (usize, usize)| {
        // Sums for the large ones, where an order can go wrong.
        let op = if elements > 333 { ops[number % 2] } else { ops[number % 4] };
        let op = if op == ReduceOp::Mean && !dtype.is_float() { ReduceOp::Sum } else { op };
        let seed = |position: usize| (number * 100 + position) as u64;
        let tensors: Vec<_> = (0..world_size).map(|position| tensor(dtype, elements, seed(position))).collect();
        let reduced = reduced(dtype, op, &tensors);
        Case { dtype, op, tensors, reduced }
    };
    elements.into_iter().enumerate().map(case).collect()
}

/// Delays a rank at random, so that ranks meet in every order.
#[expect(clippy::disallowed_methods, reason = "delays, which nothing waits for")]
fn delay_at_random(rank: &mut SegmentCommunicator, seed: u64) {
    let mut random = fastrand::Rng::with_seed(seed);
    rank.probe = Some(Box::new(move |_: At, _| match random.u8(0..20) {
        0 => std::thread::sleep(Duration::from_micros(random.u64(0..300))),
        1..5 => std::thread::yield_now(),
        _ => {}
    }));
}

fn play(rank: &mut SegmentCommunicator, number: usize, case: &Case) {
    let Case { dtype, op, tensors, reduced } = case;
    let (dtype, op, position, world_size) = (*dtype, *op, rank.position(), rank.world_size());
    let context = format!("{op} of {} bytes of {dtype} at {position} of {world_size}", reduced.len());

    let mut memory = tensors[position].clone();
    rank.all_reduce(dtype, op, &mut memory, far()).unwrap();
    assert!(memory == *reduced, "all_reduce, {context}");

    let mut shared = rank.shared_buffer(reduced.len()).unwrap();
    shared.copy_from_slice(&tensors[position]);
    rank.all_reduce_shared(dtype, op, &mut shared, far()).unwrap();
    assert!(shared[..] == *reduced && shared.in_segment(), "all_reduce_shared, {context}");

    // Some ranks share their tensor, and others do not.
    shared.copy_from_slice(&tensors[position]);
    memory.copy_from_slice(&tensors[position]);
    if position % 2 == number % 2 {
        rank.all_reduce_shared(dtype, op, &mut shared, far()).unwrap();
        assert!(shared[..] == *reduced, "mixed all_reduce_shared, {context}");
    } else {
        rank.all_reduce(dtype, op, &mut memory, far()).unwrap();
        assert!(memory == *reduced, "mixed all_reduce, {context}");
    }

    memory.copy_from_slice(&tensors[position]);
    rank.reduce_scatter(dtype, op, &mut memory, far()).unwrap();
    let slice = slice_of(reduced.len() / dtype.size(), world_size, position);
    let slice = slice.start * dtype.size()..slice.end * dtype.size();
    assert!(memory[slice.clone()] == reduced[slice], "reduce_scatter, {context}");

    let root = number % world_size;
    memory.copy_from_slice(&tensors[position]);
    rank.broadcast(dtype, root, &mut memory, far()).unwrap();
    assert!(memory == tensors[root], "broadcast, {context}");

    // Each rank gives another length.
    let of = |position: usize| {
        let elements = tensors[position].len() / dtype.size();
        &tensors[position][..elements * ((position + number) % world_size) / world_size * dtype.size()]
    };
    let lengths: Vec<usize> = (0..world_size).map(|position| of(position).len()).collect();
    let mut gathered = vec![0xaa; lengths.iter().sum()];
    rank.all_gather(dtype, of(position), &lengths, &mut gathered, far()).unwrap();
    assert!(gathered == (0..world_size).flat_map(of).copied().collect::<Vec<_>>(), "all_gather, {context}");

    if number.is_multiple_of(2) {
        rank.barrier(far()).unwrap();
    }
}

fn every_type_and_length(world_size: usize) {
    for dtype in DTYPES {
        let cases = cases(world_size, dtype);
        let segment = Segment::create(world_size, SIZES).unwrap();
        in_ranks(&segment, |mut rank| {
            let seed = rank.position() as u64;
            delay_at_random(&mut rank, seed);
            cases.iter().enumerate().for_each(|(number, case)| play(&mut rank, number, case));
        });
    }
}

#[test]
fn few_ranks_get_the_bits_of_the_reference() {
    (1..=4).for_each(every_type_and_length);
}

#[test]
fn many_ranks_get_the_bits_of_the_reference() {
    (5..=8).for_each(every_type_and_length);
}

#[test]
fn many_small_operations_in_a_row_do_not_mix() {
    let segment = Segment::create(4, SIZES).unwrap();
    in_ranks(&segment, |mut rank| {
        delay_at_random(&mut rank, 7);
        let position = rank.position() as i64;
        for number in 0..2_000_i64 {
            let mut memory = (number * 10 + position).to_le_bytes();
            rank.all_reduce(DType::I64, ReduceOp::Sum, &mut memory, far()).unwrap();
            assert_eq!(i64::from_le_bytes(memory), number * 40 + 6);
        }
    });
}

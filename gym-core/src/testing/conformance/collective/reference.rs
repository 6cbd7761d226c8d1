//! The expected result of each operation, computed element by element from the documented formula. Uses nothing of the code under test.

use bytes::BytesMut;
use half::{bf16, f16};

use crate::group::batch::tensor::DType;
use crate::group::collective::{Buffer, Collective, ReduceOp};

/// The types of the suite.
pub(super) const DTYPES: [DType; 7] =
    [DType::U8, DType::I32, DType::I64, DType::F16, DType::Bf16, DType::F32, DType::F64];

/// All operations of all ranks. Position `root` of a meeting is the root.
pub(super) fn operations(dtype: DType, ranks: &[u32], root: usize) -> Vec<Collective> {
    let mut ops = vec![ReduceOp::Sum, ReduceOp::Min, ReduceOp::Max];
    if dtype.is_float() {
        ops.push(ReduceOp::Mean);
    }
    let reductions = ops.iter().flat_map(|op| [Collective::AllReduce(*op), Collective::ReduceScatter(*op)]);
    reductions.chain([Collective::AllGather, Collective::Broadcast { root: ranks[root] }]).collect()
}

/// Returns random elements, which repeat after `period`.
pub(super) fn periodic(generator: &mut fastrand::Rng, dtype: DType, elements: usize, period: usize) -> Vec<u8> {
    let mut bytes = random(generator, dtype, elements.min(period)).repeat(elements.div_ceil(period).max(1));
    bytes.truncate(elements * dtype.size());
    bytes
}

/// Returns random elements. Floats have magnitudes from 2⁻⁸ to 2⁸, so that another order of sums has other bits.
fn random(random: &mut fastrand::Rng, dtype: DType, elements: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(elements * dtype.size());
    for _ in 0..elements {
        let float = (random.f64() - 0.5) * 2_f64.powi(random.i32(-8..=8));
        match dtype {
            DType::F16 => bytes.extend(f16::from_f64(float).to_le_bytes()),
            DType::Bf16 => bytes.extend(bf16::from_f64(float).to_le_bytes()),
            DType::F32 => bytes.extend((float as f32).to_le_bytes()),
            DType::F64 => bytes.extend(float.to_le_bytes()),
            DType::U8 => bytes.push(random.u8(..)),
            DType::I32 => bytes.extend(random.i32(..).to_le_bytes()),
            _ => bytes.extend(random.i64(..).to_le_bytes()),
        }
    }
    bytes
}

pub(super) fn buffer(dtype: DType, bytes: &[u8]) -> Buffer {
    Buffer::host(dtype, BytesMut::from(bytes))
}

/// Returns the bytes that each rank gets, by position. `inputs` has those of every rank; they repeat after `period` elements.
pub(super) fn expected(
    operation: Collective,
    dtype: DType,
    ranks: &[u32],
    inputs: &[Vec<u8>],
    period: usize,
) -> Vec<Vec<u8>> {
    match operation {
        Collective::AllReduce(op) => vec![reduced(op, dtype, inputs, period); ranks.len()],
        Collective::ReduceScatter(op) => {
            let whole = reduced(op, dtype, inputs, period);
            let elements = whole.len() / dtype.size();
            let at = |position: usize| elements * position / ranks.len() * dtype.size();
            (0..ranks.len()).map(|position| whole[at(position)..at(position + 1)].to_vec()).collect()
        }
        Collective::AllGather => vec![inputs.concat(); ranks.len()],
        Collective::Broadcast { root } => {
            let root = ranks.iter().position(|rank| *rank == root).expect("the root is a rank");
            vec![inputs[root].clone(); ranks.len()]
        }
        other => unreachable!("the reference has no {other}"),
    }
}

fn reduced(op: ReduceOp, dtype: DType, inputs: &[Vec<u8>], period: usize) -> Vec<u8> {
    let (world_size, size) = (inputs.len(), dtype.size());
    let elements = inputs[0].len() / size;
    let mut result = Vec::with_capacity(inputs[0].len());
    for position in 0..world_size {
        let slice = elements * position / world_size..elements * (position + 1) / world_size;
        let (begin, computed) = (result.len(), slice.start..slice.end.min(slice.start.saturating_add(period)));
        for element in computed {
            let values: Vec<&[u8]> = (1..=world_size)
                .map(|step| &inputs[(position + step) % world_size][element * size..(element + 1) * size])
                .collect();
            result.extend(one(op, dtype, &values));
        }
        // Within a slice, the result repeats with the inputs.
        while result.len() < begin + slice.len() * size {
            let more = (period * size).min(begin + slice.len() * size - result.len());
            result.extend_from_within(begin..begin + more);
        }
    }
    result
}

/// Reduces the values of one element, in order.
fn one(op: ReduceOp, dtype: DType, values: &[&[u8]]) -> Vec<u8> {
    macro_rules! float {
        ($sum:ty, $read:expr, $write:expr) => {{
            let mut numbers = values.iter().map(|bytes| $read(*bytes));
            let first = numbers.next().expect("a rank");
            let joined = numbers.fold(first, |sum, value| match op {
                ReduceOp::Sum | ReduceOp::Mean => sum + value,
                _ if sum.is_nan() || value.is_nan() => sum + value,
                ReduceOp::Min if value < sum => value,
                ReduceOp::Max if value > sum => value,
                _ => sum,
            });
            let mean = if op == ReduceOp::Mean { joined / values.len() as $sum } else { joined };
            $write(mean).to_le_bytes().to_vec()
        }};
    }
    macro_rules! integer {
        ($integer:ty) => {{
            let mut numbers = values.iter().map(|bytes| <$integer>::from_le_bytes((*bytes).try_into().expect("one")));
            let first = numbers.next().expect("a rank");
            let joined = numbers.fold(first, |sum, value| match op {
                ReduceOp::Min => sum.min(value),
                ReduceOp::Max => sum.max(value),
                _ => sum.wrapping_add(value),
            });
            joined.to_le_bytes().to_vec()
        }};
    }
    match dtype {
        DType::F16 => float!(f32, |b: &[u8]| f16::from_le_bytes(b.try_into().expect("one")).to_f32(), f16::from_f32),
        DType::Bf16 => float!(f32, |b: &[u8]| bf16::from_le_bytes(b.try_into().expect("one")).to_f32(), bf16::from_f32),
        DType::F32 => float!(f32, |b: &[u8]| f32::from_le_bytes(b.try_into().expect("one")), |x: f32| x),
        DType::F64 => float!(f64, |b: &[u8]| f64::from_le_bytes(b.try_into().expect("one")), |x: f64| x),
        DType::U8 => integer!(u8),
        DType::I32 => integer!(i32),
        _ => integer!(i64),
    }
}

//! What the ranks of a meeting call, and what each must get.

use std::sync::OnceLock;

use gym_core::group::DType;
use gym_group::collective::reduction::{DTYPES, Reduction, slice_of};
use gym_group::collective::{Collective, ReduceOp};

/// Elements after which the inputs repeat. A prime, so that no block of the backend fits it.
const PERIOD: usize = 251;

/// The calls of one meeting, in the order in which every rank makes its own.
pub(crate) type Script = Vec<Operation>;

/// One collective operation, or a send and its receive. Ranks are given by position.
#[derive(Debug)]
pub(crate) struct Operation {
    pub(crate) kind: Kind,
    dtype: DType,
    elements: usize,
    world_size: usize,
    seed: u64,
    values: OnceLock<Values>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    AllReduce(ReduceOp),
    ReduceScatter(ReduceOp),
    AllGather,
    Broadcast { root: usize },
    Barrier,
    Message { from: usize, to: usize },
}

#[derive(Debug)]
struct Values {
    inputs: Vec<Vec<u8>>,
    expected: Vec<Vec<u8>>,
}

/// What one rank calls.
#[derive(Debug)]
pub(crate) struct Part<'s> {
    pub(crate) operation: Collective,
    pub(crate) dtype: DType,
    pub(crate) input: &'s [u8],
    pub(crate) expected: &'s [u8],
}

impl Operation {
    pub(crate) fn drawn(rng: &mut fastrand::Rng, world_size: usize) -> Self {
        let dtype = DTYPES[rng.usize(..DTYPES.len())];
        let ops = [ReduceOp::Sum, ReduceOp::Min, ReduceOp::Max, ReduceOp::Mean];
        let op = ops[rng.usize(..if dtype.is_float() { 4 } else { 3 })];
        let kind = match rng.u8(..10) {
            0..=2 => Kind::AllReduce(op),
            3 => Kind::ReduceScatter(op),
            4 | 5 => Kind::AllGather,
            6 => Kind::Broadcast { root: rng.usize(..world_size) },
            7 => Kind::Barrier,
            _ => Kind::Message { from: rng.usize(..world_size), to: rng.usize(..world_size) },
        };
        // Above 64 KiB, elements go round the ring; a slice above 512 KiB goes round it twice.
        let bytes = match rng.u8(..40) {
            0 if world_size == 2 => rng.usize(1_060 << 10..1_200 << 10),
            0..=2 => rng.usize(200 << 10..600 << 10),
            3..=8 => rng.usize(66 << 10..150 << 10),
            9 => 64 << 10,
            10 => 0,
            _ => rng.usize(..3_000),
        };
        let elements = if kind == Kind::Barrier { 0 } else { bytes / dtype.size() };
        let dtype = if kind == Kind::Barrier { DType::U8 } else { dtype };
        Self { kind, dtype, elements, world_size, seed: rng.u64(..), values: OnceLock::new() }
    }

    /// Returns what the rank at a position calls; nothing if it takes no part, and two calls if it sends to itself.
    pub(crate) fn parts(&self, position: usize, rank_at: impl Fn(usize) -> u32) -> Vec<Part<'_>> {
        let Values { inputs, expected } = self.values.get_or_init(|| self.computed());
        let part = |operation, expected| Part { operation, dtype: self.dtype, input: &inputs[position], expected };
        let of_all = |operation| vec![part(operation, &*expected[position])];
        match self.kind {
            Kind::AllReduce(op) => of_all(Collective::AllReduce(op)),
            Kind::ReduceScatter(op) => of_all(Collective::ReduceScatter(op)),
            Kind::AllGather => of_all(Collective::AllGather),
            Kind::Broadcast { root } => of_all(Collective::Broadcast { root: rank_at(root) }),
            Kind::Barrier => of_all(Collective::Barrier),
            Kind::Message { from, to } => {
                let mut parts = Vec::new();
                if position == from {
                    parts.push(part(Collective::Send { to: rank_at(to) }, &*inputs[from]));
                }
                if position == to {
                    parts.push(part(Collective::Receive { from: rank_at(from) }, &*inputs[from]));
                }
                parts
            }
        }
    }

    /// Returns `true` if all ranks must call it with the same number of elements.
    pub(crate) fn is_even(&self) -> bool {
        matches!(self.kind, Kind::AllReduce(_) | Kind::ReduceScatter(_) | Kind::Broadcast { .. })
    }

    fn computed(&self) -> Values {
        let mut rng = fastrand::Rng::with_seed(self.seed);
        let ragged = |position: usize| match self.kind {
            Kind::AllGather => self.elements * (position + 1) / self.world_size,
            _ => self.elements,
        };
        let inputs: Vec<Vec<u8>> =
            (0..self.world_size).map(|position| random(&mut rng, self.dtype, ragged(position))).collect();
        let expected = match self.kind {
            Kind::AllReduce(op) => vec![self.reduced(op, &inputs).concat(); self.world_size],
            Kind::ReduceScatter(op) => self.reduced(op, &inputs),
            Kind::AllGather => vec![inputs.concat(); self.world_size],
            Kind::Broadcast { root } => vec![inputs[root].clone(); self.world_size],
            Kind::Barrier | Kind::Message { .. } => inputs.clone(),
        };
        Values { inputs, expected }
    }

    /// Returns the reduction of each slice.
    fn reduced(&self, op: ReduceOp, inputs: &[Vec<u8>]) -> Vec<Vec<u8>> {
        let reduction = Reduction::new(self.dtype, op).expect("a type of reductions");
        let size = self.dtype.size();
        let slice = |position: usize| {
            let slice = slice_of(self.elements, self.world_size, position);
            let order = (1..=self.world_size).map(|step| (position + step) % self.world_size);
            let mut parts: Vec<Vec<u8>> =
                order.map(|position| inputs[position][slice.start * size..slice.end * size].to_vec()).collect();
            let mut places: Vec<&mut [u8]> = parts.iter_mut().map(Vec::as_mut_slice).collect();
            reduction.reduce(&mut places);
            parts.pop().expect("a rank")
        };
        (0..self.world_size).map(slice).collect()
    }
}

/// Returns random elements, which repeat. The exponents of floats differ, so that another order of sums has other bits.
fn random(rng: &mut fastrand::Rng, dtype: DType, elements: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(PERIOD * dtype.size());
    for _ in 0..elements.min(PERIOD) {
        let float = (rng.f64() - 0.5) * 2_f64.powi(rng.i32(-6..=6));
        match dtype {
            // Finite numbers of either sign.
            DType::F16 | DType::Bf16 => bytes.extend((rng.u16(..) & 0xbbff).to_le_bytes()),
            DType::F32 => bytes.extend((float as f32).to_le_bytes()),
            DType::F64 => bytes.extend(float.to_le_bytes()),
            _ => bytes.extend(std::iter::repeat_with(|| rng.u8(..)).take(dtype.size())),
        }
    }
    let mut all = bytes.repeat(elements.div_ceil(PERIOD));
    all.truncate(elements * dtype.size());
    all
}

//! Elements as numbers that are added: block by block, without a choice for each element, so that the compiler vectorizes the loops.

use bytemuck::Pod;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::group::collective::operation::ReduceOp;

/// Elements of a block. One of sums and one of a part are at most 16 KiB, which fits the first-level cache of every processor.
pub(super) const BLOCK: usize = 1_024;

/// An element type, and the type in which it is added.
pub(super) trait Number {
    /// Bytes of an element.
    const SIZE: usize;
    /// The type of the sum.
    type Sum: Pod + Default;

    /// Reads elements, of any alignment, as numbers to add. Both have the same number of elements, at most [`BLOCK`].
    fn widen(bytes: &[u8], sums: &mut [Self::Sum]);
    /// Writes numbers as elements, rounded.
    fn narrow(sums: &[Self::Sum], bytes: &mut [u8]);
    /// Joins the sums with the elements of the next part.
    fn join(sums: &mut [Self::Sum], bytes: &[u8], join: impl Fn(Self::Sum, Self::Sum) -> Self::Sum);
    fn sum(sum: Self::Sum, value: Self::Sum) -> Self::Sum;
    fn min(earlier: Self::Sum, value: Self::Sum) -> Self::Sum;
    fn max(earlier: Self::Sum, value: Self::Sum) -> Self::Sum;
    /// Divides by the number of ranks; only for floats.
    fn divide(sum: Self::Sum, world_size: usize) -> Self::Sum;
}

/// Joins the sums with the elements of the next part of the order.
pub(super) fn fold<N: Number>(op: ReduceOp, sums: &mut [N::Sum], bytes: &[u8]) {
    match op {
        ReduceOp::Sum | ReduceOp::Mean => N::join(sums, bytes, N::sum),
        ReduceOp::Min => N::join(sums, bytes, N::min),
        ReduceOp::Max => N::join(sums, bytes, N::max),
    }
}

/// Makes means of sums, if the operation is the mean.
pub(super) fn divide<N: Number>(op: ReduceOp, sums: &mut [N::Sum], world_size: usize) {
    if op == ReduceOp::Mean {
        for sum in sums {
            *sum = N::divide(*sum, world_size);
        }
    }
}

macro_rules! added_as_they_are {
    ($($integer:ty),*; $($float:ty),*) => {
        $(impl Number for $integer {
            added_as_they_are!(@ $integer);
            fn sum(sum: Self, value: Self) -> Self {
                sum.wrapping_add(value)
            }
            fn min(earlier: Self, value: Self) -> Self {
                Ord::min(earlier, value)
            }
            fn max(earlier: Self, value: Self) -> Self {
                Ord::max(earlier, value)
            }
            fn divide(_: Self, _: usize) -> Self {
                unreachable!("the mean of integers was rejected when the reduction was created")
            }
        })*
        $(impl Number for $float {
            added_as_they_are!(@ $float);
            added_as_they_are!(float $float);
        })*
    };
    (@ $type:ty) => {
        const SIZE: usize = size_of::<$type>();
        type Sum = $type;
        fn widen(bytes: &[u8], sums: &mut [$type]) {
            bytemuck::cast_slice_mut::<$type, u8>(sums).copy_from_slice(bytes);
        }
        fn narrow(sums: &[$type], bytes: &mut [u8]) {
            bytes.copy_from_slice(bytemuck::cast_slice(sums));
        }
        fn join(sums: &mut [$type], bytes: &[u8], join: impl Fn($type, $type) -> $type) {
            for (sum, bytes) in sums.iter_mut().zip(bytes.as_chunks().0) {
                *sum = join(*sum, <$type>::from_le_bytes(*bytes));
            }
        }
    };
    // Not `min` and `max` of the standard library: they drop a NaN, and may return either of two zeros.
    (float $type:ty) => {
        fn sum(sum: $type, value: $type) -> $type {
            sum + value
        }
        fn min(earlier: $type, value: $type) -> $type {
            if value < earlier || value.is_nan() { value } else { earlier }
        }
        fn max(earlier: $type, value: $type) -> $type {
            if value > earlier || value.is_nan() { value } else { earlier }
        }
        fn divide(sum: $type, world_size: usize) -> $type {
            sum / world_size as $type
        }
    };
}

added_as_they_are!(u8, i32, i64; f32, f64);

impl Number for f16 {
    const SIZE: usize = size_of::<Self>();
    type Sum = f32;
    // Whole slices, because `half` chooses the instructions of the processor once for each call.
    fn widen(bytes: &[u8], sums: &mut [f32]) {
        let mut halves = [Self::ZERO; BLOCK];
        let halves = &mut halves[..sums.len()];
        bytemuck::cast_slice_mut::<u16, u8>(halves.reinterpret_cast_mut()).copy_from_slice(bytes);
        halves.convert_to_f32_slice(sums);
    }
    fn narrow(sums: &[f32], bytes: &mut [u8]) {
        let mut halves = [Self::ZERO; BLOCK];
        let halves = &mut halves[..sums.len()];
        halves.convert_from_f32_slice(sums);
        bytes.copy_from_slice(bytemuck::cast_slice(halves.reinterpret_cast()));
    }
    fn join(sums: &mut [f32], bytes: &[u8], join: impl Fn(f32, f32) -> f32) {
        let mut values = [0.0; BLOCK];
        let values = &mut values[..sums.len()];
        Self::widen(bytes, values);
        for (sum, value) in sums.iter_mut().zip(values) {
            *sum = join(*sum, *value);
        }
    }
    added_as_they_are!(float f32);
}

impl Number for bf16 {
    const SIZE: usize = size_of::<Self>();
    type Sum = f32;
    fn widen(bytes: &[u8], sums: &mut [f32]) {
        for (bytes, sum) in bytes.as_chunks::<2>().0.iter().zip(sums) {
            *sum = f32::from_bits(u32::from(u16::from_le_bytes(*bytes)) << 16);
        }
    }
    fn join(sums: &mut [f32], bytes: &[u8], join: impl Fn(f32, f32) -> f32) {
        for (sum, bytes) in sums.iter_mut().zip(bytes.as_chunks::<2>().0) {
            *sum = join(*sum, f32::from_bits(u32::from(u16::from_le_bytes(*bytes)) << 16));
        }
    }
    // As `bf16::from_f32`, without its branch: that one takes seven times as long.
    fn narrow(sums: &[f32], bytes: &mut [u8]) {
        for (sum, bytes) in sums.iter().zip(bytes.as_chunks_mut::<2>().0) {
            let bits = sum.to_bits();
            let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
            let quiet_nan = bits >> 16 | 0x40;
            *bytes = (if sum.is_nan() { quiet_nan } else { rounded } as u16).to_le_bytes();
        }
    }
    added_as_they_are!(float f32);
}

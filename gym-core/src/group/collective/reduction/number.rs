//! Elements as numbers that are added: block by block, without a choice for each element, so that the compiler vectorizes the loops.

use bytemuck::Pod;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::group::collective::operation::ReduceOp;

/// Elements of a block. Two blocks of the widest type are 16 KiB, which fits the first-level cache of every processor.
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
    fn sum(sum: Self::Sum, value: Self::Sum) -> Self::Sum;
    fn min(earlier: Self::Sum, value: Self::Sum) -> Self::Sum;
    fn max(earlier: Self::Sum, value: Self::Sum) -> Self::Sum;
    /// Divides by the number of ranks; only for floats.
    fn divide(sum: Self::Sum, world_size: usize) -> Self::Sum;
}

/// Joins the sums with the values of the next part of the order.
pub(super) fn fold<N: Number>(op: ReduceOp, sums: &mut [N::Sum], values: &[N::Sum]) {
    fn each<S: Copy>(sums: &mut [S], values: &[S], join: impl Fn(S, S) -> S) {
        for (sum, value) in sums.iter_mut().zip(values) {
            *sum = join(*sum, *value);
        }
    }
    match op {
        ReduceOp::Sum | ReduceOp::Mean => each(sums, values, N::sum),
        ReduceOp::Min => each(sums, values, N::min),
        ReduceOp::Max => each(sums, values, N::max),
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

macro_rules! added_as_f32 {
    ($($half:ty),*) => {$(
        impl Number for $half {
            const SIZE: usize = size_of::<$half>();
            type Sum = f32;
            // Whole slices, because `half` chooses the instructions of the processor once for each call.
            fn widen(bytes: &[u8], sums: &mut [f32]) {
                let mut halves = [<$half>::ZERO; BLOCK];
                let halves = &mut halves[..sums.len()];
                bytemuck::cast_slice_mut::<u16, u8>(halves.reinterpret_cast_mut()).copy_from_slice(bytes);
                halves.convert_to_f32_slice(sums);
            }
            fn narrow(sums: &[f32], bytes: &mut [u8]) {
                let mut halves = [<$half>::ZERO; BLOCK];
                let halves = &mut halves[..sums.len()];
                halves.convert_from_f32_slice(sums);
                bytes.copy_from_slice(bytemuck::cast_slice(halves.reinterpret_cast()));
            }
            added_as_they_are!(float f32);
        }
    )*};
}

added_as_f32!(f16, bf16);

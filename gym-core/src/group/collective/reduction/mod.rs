//! The arithmetic of reductions: one order of sums for every backend, so that all give the same bits.
//!
//! The n elements of a buffer are divided into one slice for each of the W ranks; slice i is the elements [i·n/W, (i+1)·n/W). With x(p) the value of
//! the rank at position p, each element of slice i is
//!
//! ```text
//!     narrow( mean( ( … ((x(i+1) + x(i+2)) + x(i+3)) + … ) + x(i) ) )          positions modulo W
//! ```
//!
//! That is the order in which a ring adds: the slice begins at the rank after its owner, and ends at its owner. It does not depend on the size.
//!
//! - `F16` and `BF16` are added as `F32`, and rounded once, at the end. The other types are added as they are; integers wrap around.
//! - The mean is the sum divided by W, in the type of the sum.
//! - Minimum and maximum keep the earlier of two equal values, and a NaN. The payload of a NaN is unspecified.

mod number;

use std::fmt;
use std::ops::Range;

use half::{bf16, f16};

use crate::base::error::{Code, Error, Result};
use crate::group::batch::tensor::DType;
use crate::group::collective::operation::ReduceOp;
use number::{BLOCK, Number, divide, fold};

/// The types that collective operations take.
pub const DTYPES: [DType; 7] = [DType::U8, DType::I32, DType::I64, DType::F16, DType::Bf16, DType::F32, DType::F64];

/// Returns the elements of slice `position` of `world_size`, of a buffer of `elements`.
///
/// # Panics
/// If `world_size` is 0.
#[must_use]
pub fn slice_of(elements: usize, world_size: usize, position: usize) -> Range<usize> {
    // 128 bits hold the product of any two sizes; the quotient is at most `elements`.
    let at = |position: usize| (elements as u128 * position as u128 / world_size as u128) as usize;
    at(position)..at(position + 1)
}

/// Returns the positions whose values are added to slice `position`, in the order of the sum.
///
/// # Panics
/// If `world_size` is 0.
pub fn order_of(world_size: usize, position: usize) -> impl Iterator<Item = usize> {
    (1..=world_size).map(move |step| (position + step) % world_size)
}

/// Rejects a type that collective operations do not take.
pub(super) fn check_dtype(dtype: DType) -> Result<()> {
    if DTYPES.contains(&dtype) {
        return Ok(());
    }
    let known = DTYPES.map(DType::as_str).join(", ");
    Err(Error::not_started(
        Code::Unimplemented,
        format!("{dtype} is no type of collective operations; they take {known}"),
    ))
}

/// The reduction of one type by one operation.
///
/// A backend that has the parts of all ranks at hand calls [`reduce`](Self::reduce) or [`reduce_into_all`](Self::reduce_into_all). One that passes
/// partial results from rank to rank calls [`begin`](Self::begin) at the first rank of the order, [`fold`](Self::fold) at each further one, and
/// [`finish`](Self::finish) at the last; or [`fold_into`](Self::fold_into), which needs no memory of its own. The bits are the same. Bytes may have any alignment.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Reduction {
    dtype: DType,
    op: ReduceOp,
}

/// Runs an expression with the Rust type of a `DType` of [`DTYPES`].
macro_rules! with_number {
    ($dtype:expr, $number:ident => $body:expr) => {
        match $dtype {
            DType::U8 => with_number!(@ u8, $number => $body),
            DType::I32 => with_number!(@ i32, $number => $body),
            DType::I64 => with_number!(@ i64, $number => $body),
            DType::F16 => with_number!(@ f16, $number => $body),
            DType::Bf16 => with_number!(@ bf16, $number => $body),
            DType::F32 => with_number!(@ f32, $number => $body),
            DType::F64 => with_number!(@ f64, $number => $body),
            other => unreachable!("{other} was rejected when the reduction was created"),
        }
    };
    (@ $type:ty, $number:ident => $body:expr) => {{
        type $number = $type;
        $body
    }};
}

impl Reduction {
    /// Creates the reduction of elements of `dtype` by `op`.
    ///
    /// # Errors
    /// `Unimplemented` if the type is none of [`DTYPES`]; `InvalidArgument` for the mean of integers.
    pub fn new(dtype: DType, op: ReduceOp) -> Result<Self> {
        check_dtype(dtype)?;
        if op == ReduceOp::Mean && !dtype.is_float() {
            let why = format!("the mean of {dtype} is no {dtype}; use the sum, and divide it by the number of ranks");
            return Err(Error::invalid(why));
        }
        Ok(Self { dtype, op })
    }

    /// Returns the type of partial results: `F32` for 16-bit floats, otherwise the type of the elements.
    #[must_use]
    pub fn partial_dtype(&self) -> DType {
        if matches!(self.dtype, DType::F16 | DType::Bf16) { DType::F32 } else { self.dtype }
    }

    /// Reduces one slice. `parts` has the bytes of the slice of every rank, in the order of [`order_of`]; the last one, that of the owner, is
    /// replaced by the result.
    ///
    /// # Panics
    /// If the parts differ in length.
    pub fn reduce(&self, parts: &mut [&mut [u8]]) {
        with_number!(self.dtype, N => reduce::<N>(self.op, parts, parts.len().saturating_sub(1)));
    }

    /// Like [`reduce`](Self::reduce), but replaces every part by the result.
    ///
    /// # Panics
    /// If the parts differ in length.
    pub fn reduce_into_all(&self, parts: &mut [&mut [u8]]) {
        with_number!(self.dtype, N => reduce::<N>(self.op, parts, 0));
    }

    /// Writes the first part of the order to a partial result of the same number of elements.
    ///
    /// # Panics
    /// If the number of elements differs.
    pub fn begin(&self, part: &[u8], partial: &mut [u8]) {
        with_number!(self.dtype, N => partial_blocks::<N>(part, partial, N::widen));
    }

    /// Adds the next part of the order to a partial result.
    ///
    /// # Panics
    /// If the number of elements differs.
    pub fn fold(&self, partial: &mut [u8], part: &[u8]) {
        with_number!(self.dtype, N => partial_blocks::<N>(part, partial, |part, sums| fold::<N>(self.op, sums, part)));
    }

    /// Adds the next part of the order to a partial result of its own type, and replaces the part by the sum. The last rank of the order gives the number of
    /// `ranks`, and gets the result.
    ///
    /// # Panics
    /// If the number of elements differs, or if the partial result has another [type](Self::partial_dtype) than the part.
    pub fn fold_into(&self, partial: &[u8], part: &mut [u8], ranks: Option<usize>) {
        assert_eq!(partial.len(), part.len(), "a partial result has the bytes of its parts");
        with_number!(self.dtype, N => {
            let mut sums = [<N as Number>::Sum::default(); BLOCK];
            assert_eq!(size_of::<<N as Number>::Sum>(), N::SIZE, "partial results of {} are no elements", self.dtype);
            for (partial, part) in partial.chunks(BLOCK * N::SIZE).zip(part.chunks_mut(BLOCK * N::SIZE)) {
                let sums = &mut sums[..part.len() / N::SIZE];
                bytemuck::cast_slice_mut::<_, u8>(sums).copy_from_slice(partial);
                fold::<N>(self.op, sums, part);
                if let Some(ranks) = ranks {
                    divide::<N>(self.op, sums, ranks);
                }
                part.copy_from_slice(bytemuck::cast_slice(sums));
            }
        });
    }

    /// Writes the result of the last partial result of `world_size` ranks to `result`.
    ///
    /// # Panics
    /// If the number of elements differs.
    pub fn finish(&self, partial: &[u8], world_size: usize, result: &mut [u8]) {
        with_number!(self.dtype, N => {
            let (wide, narrow) = (size_of::<<N as Number>::Sum>(), N::SIZE);
            assert_eq!(partial.len() / wide, result.len() / narrow, "a partial result has the elements of its result");
            let mut sums = [<N as Number>::Sum::default(); BLOCK];
            for (partial, result) in partial.chunks(BLOCK * wide).zip(result.chunks_mut(BLOCK * narrow)) {
                let sums = &mut sums[..result.len() / narrow];
                bytemuck::cast_slice_mut::<_, u8>(sums).copy_from_slice(partial);
                divide::<N>(self.op, sums, world_size);
                N::narrow(sums, result);
            }
        });
    }
}

/// Reduces a slice block by block, so that the sums stay in the first-level cache and each part is read once. Writes the parts from `first_result` on.
fn reduce<N: Number>(op: ReduceOp, parts: &mut [&mut [u8]], first_result: usize) {
    let Some(bytes) = parts.first().map(|part| part.len()) else { return };
    assert!(parts.iter().all(|part| part.len() == bytes), "the parts of a slice have one length");
    let mut sums = [N::Sum::default(); BLOCK];
    for start in (0..bytes).step_by(BLOCK * N::SIZE) {
        let block = start..bytes.min(start + BLOCK * N::SIZE);
        let sums = &mut sums[..block.len() / N::SIZE];
        N::widen(&parts[0][block.clone()], sums);
        for part in &parts[1..] {
            fold::<N>(op, sums, &part[block.clone()]);
        }
        divide::<N>(op, sums, parts.len());
        let (result, copies) = parts[first_result..].split_first_mut().expect("there is a part");
        N::narrow(sums, &mut result[block.clone()]);
        for copy in copies {
            copy[block.clone()].copy_from_slice(&result[block.clone()]);
        }
    }
}

/// Updates the blocks of a partial result with those of a part. The bytes may have any alignment, so that the sums are a copy.
fn partial_blocks<N: Number>(part: &[u8], partial: &mut [u8], update: impl Fn(&[u8], &mut [N::Sum])) {
    let wide = size_of::<N::Sum>();
    assert_eq!(part.len() / N::SIZE, partial.len() / wide, "a partial result has the elements of its parts");
    let mut sums = [N::Sum::default(); BLOCK];
    for (part, partial) in part.chunks(BLOCK * N::SIZE).zip(partial.chunks_mut(BLOCK * wide)) {
        let sums = &mut sums[..part.len() / N::SIZE];
        bytemuck::cast_slice_mut::<_, u8>(sums).copy_from_slice(partial);
        update(part, sums);
        partial.copy_from_slice(bytemuck::cast_slice(sums));
    }
}

impl fmt::Debug for Reduction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Reduction({} of {})", self.op, self.dtype)
    }
}

#[cfg(test)]
mod tests;

//! A block of numbers in host memory: element type, shape, and shared bytes.
//!
//! The layout is that of safetensors: row-major, little-endian. A slice along the first dimension shares the memory. A function
//! copies only if its documentation says so. Tensors are in host memory; [`DeviceTensor`](crate::group::DeviceTensor)s are in that of devices.

mod block;
mod convert;
mod device;
mod dtype;
mod element;
mod scalar;
mod side;

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;

use bytes::Bytes;

pub(crate) use block::copy_into_block;
pub use device::Device;
pub use dtype::DType;
pub use element::Element;
pub use scalar::Scalar;
pub use side::Side;

use crate::base::error::{Code, Error, Result};

#[cfg(target_endian = "big")]
compile_error!("tensors lie in memory as they travel, little-endian; this host is big-endian");

/// Element type, shape, shared row-major bytes, and the side of the padding if it is known. Cheap to clone.
///
/// ```
/// use gym_core::group::Tensor;
///
/// let tokens = Tensor::from_vec([2, 2], vec![1_i64, 2, 3, 4])?;
/// assert_eq!(tokens.slice(1..2)?.view::<i64>()?, [3, 4].as_slice());
/// # Ok::<(), gym_core::Error>(())
/// ```
#[derive(Clone, PartialEq)]
pub struct Tensor {
    dtype: DType,
    shape: Vec<usize>,
    bytes: Bytes,
    side: Option<Side>,
}

impl Tensor {
    /// Creates a tensor over existing bytes.
    ///
    /// # Errors
    /// `InvalidArgument` if the size of the shape is not exactly that of the bytes.
    pub fn new(dtype: DType, shape: impl Into<Vec<usize>>, bytes: Bytes) -> Result<Self> {
        let shape = shape.into();
        let expected = bytes_of_shape(dtype, &shape)?;
        if expected != bytes.len() {
            let found = bytes.len();
            return Err(Error::invalid(format!("{dtype} of shape {shape:?} takes {expected} bytes, got {found}")));
        }
        Ok(Self { dtype, shape, bytes, side: None })
    }

    /// Creates a tensor from a vector, without a copy.
    ///
    /// # Errors
    /// `InvalidArgument` if the shape does not have exactly this many elements.
    pub fn from_vec<T: Element>(shape: impl Into<Vec<usize>>, elements: Vec<T>) -> Result<Self> {
        Self::new(T::DTYPE, shape, Bytes::from_owner(Elements(elements)))
    }

    /// Creates a tensor of zeros.
    ///
    /// # Errors
    /// `InvalidArgument` if the number of bytes of the shape overflows.
    pub fn zeros(dtype: DType, shape: impl Into<Vec<usize>>) -> Result<Self> {
        let shape = shape.into();
        let bytes = Bytes::from(vec![0; bytes_of_shape(dtype, &shape)?]);
        Ok(Self { dtype, shape, bytes, side: None })
    }

    /// Returns the type of the elements.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the sizes of the dimensions, outermost first; empty for a scalar.
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Returns the size of the first dimension; 1 for a scalar.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.shape.first().copied().unwrap_or(1)
    }

    /// Returns the number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes.len() / self.dtype.size()
    }

    /// Returns `true` if there are no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Returns the number of bytes of one row, that is, of one step along the first dimension.
    #[must_use]
    pub fn row_bytes(&self) -> usize {
        self.dtype.size() * self.shape.iter().skip(1).product::<usize>()
    }

    /// Returns the bytes, row-major and little-endian. A clone shares them.
    #[must_use]
    pub fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    /// Returns the bytes, and gives the tensor up. They are unique if no clone or slice of the tensor is left.
    #[must_use]
    pub fn into_bytes(self) -> Bytes {
        self.bytes
    }

    /// Returns the elements in row-major order: in place if the memory is aligned for `T`, otherwise a copy.
    ///
    /// # Errors
    /// `InvalidArgument` if the tensor's type cannot be read as `T`; `DataLoss` if a `BOOL` byte is neither 0 nor 1.
    pub fn view<T: Element>(&self) -> Result<Cow<'_, [T]>> {
        if !T::reads(self.dtype) {
            return Err(Error::invalid(format!("a {} tensor cannot be viewed as {}", self.dtype, T::DTYPE)));
        }
        T::cast(&self.bytes).ok_or_else(|| {
            Error::not_started(Code::DataLoss, format!("a {} tensor holds bytes that are no such element", self.dtype))
        })
    }

    /// Returns a range of rows of the first dimension, sharing the memory.
    ///
    /// # Errors
    /// `InvalidArgument` for a scalar, or if the range is reversed or ends beyond the rows.
    pub fn slice(&self, rows: Range<usize>) -> Result<Self> {
        if self.shape.is_empty() {
            return Err(Error::invalid("a scalar has no rows to slice"));
        }
        check_range(&rows, self.rows())?;
        Ok(self.slice_rows(rows))
    }

    /// Like [`Self::slice`], for a range that the caller has checked and a tensor that is not a scalar.
    pub(crate) fn slice_rows(&self, rows: Range<usize>) -> Self {
        let row = self.row_bytes();
        let mut shape = self.shape.clone();
        shape[0] = rows.len();
        Self { shape, bytes: self.bytes.slice(rows.start * row..rows.end * row), ..*self }
    }

    /// Returns a tensor with the same bytes and another shape. The side of the padding stays known if the first two dimensions
    /// stay.
    ///
    /// # Errors
    /// `InvalidArgument` if the shape has another number of elements.
    pub fn reshape(&self, shape: impl Into<Vec<usize>>) -> Result<Self> {
        let reshaped = Self::new(self.dtype, shape, self.bytes.clone())?;
        let padded = reshaped.shape.get(..2).is_some_and(|first| self.shape.get(..2) == Some(first));
        Ok(reshaped.with_side(self.side.filter(|_| padded)))
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.side {
            Some(Side::Left) => write!(f, "Tensor({} {:?}, padded on the left)", self.dtype, self.shape),
            _ => write!(f, "Tensor({} {:?})", self.dtype, self.shape),
        }
    }
}

/// Owner of a vector of elements, whose memory a tensor shares.
struct Elements<T>(Vec<T>);

impl<T: Element> AsRef<[u8]> for Elements<T> {
    fn as_ref(&self) -> &[u8] {
        T::bytes_of(&self.0)
    }
}

/// Returns the number of bytes of a shape. A shape from a peer may be larger than can be counted.
pub(crate) fn bytes_of_shape(dtype: DType, shape: &[usize]) -> Result<usize> {
    // Zeros are applied last: [huge, huge, 0] has no bytes, but the bytes of its rows could not be counted.
    shape
        .iter()
        .filter(|size| **size > 0)
        .try_fold(dtype.size(), |bytes, size| bytes.checked_mul(*size))
        .map(|bytes| if shape.contains(&0) { 0 } else { bytes })
        .ok_or_else(|| Error::invalid(format!("{dtype} of shape {shape:?} has more bytes than can be counted")))
}

/// Rejects a range that is reversed or ends beyond the rows.
pub(crate) fn check_range(range: &Range<usize>, rows: usize) -> Result<()> {
    if range.start > range.end || range.end > rows {
        return Err(Error::invalid(format!("rows {}..{} of {rows}", range.start, range.end)));
    }
    Ok(())
}

#[cfg(test)]
mod tests;

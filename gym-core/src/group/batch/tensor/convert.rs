//! Conversions that copy a tensor: elements as wide numbers, other float types, narrowed inner dimensions.

use half::{bf16, f16};

use crate::base::error::{Error, Result};
use crate::group::batch::tensor::scalar::round;
use crate::group::batch::tensor::{DType, Side, Tensor};

impl Tensor {
    /// Returns the elements of an integer or `BOOL` tensor.
    ///
    /// # Errors
    /// `InvalidArgument` for a float tensor, and for a `U64` beyond `i64`.
    pub fn to_i64s(&self) -> Result<Vec<i64>> {
        Ok(match self.dtype() {
            DType::Bool | DType::U8 => self.view::<u8>()?.iter().map(|x| i64::from(*x)).collect(),
            DType::I8 => self.view::<i8>()?.iter().map(|x| i64::from(*x)).collect(),
            DType::U16 => self.view::<u16>()?.iter().map(|x| i64::from(*x)).collect(),
            DType::I16 => self.view::<i16>()?.iter().map(|x| i64::from(*x)).collect(),
            DType::U32 => self.view::<u32>()?.iter().map(|x| i64::from(*x)).collect(),
            DType::I32 => self.view::<i32>()?.iter().map(|x| i64::from(*x)).collect(),
            DType::I64 => self.view::<i64>()?.into_owned(),
            DType::U64 => {
                let wide = |x: &u64| i64::try_from(*x).map_err(|_| Error::invalid(format!("{x} is beyond 2^63 - 1")));
                self.view::<u64>()?.iter().map(wide).collect::<Result<_>>()?
            }
            float => return Err(Error::invalid(format!("a {float} tensor holds no integers"))),
        })
    }

    /// Returns the elements of a tensor of any type.
    ///
    /// # Errors
    /// `InvalidArgument` for an integer that a double cannot represent, such as 2⁵³ + 1; `DataLoss` if the bytes are not valid
    /// elements of the type.
    pub fn to_f64s(&self) -> Result<Vec<f64>> {
        Ok(match self.dtype() {
            DType::F16 => self.view::<u16>()?.iter().map(|bits| f16::from_bits(*bits).to_f64()).collect(),
            DType::Bf16 => self.view::<u16>()?.iter().map(|bits| bf16::from_bits(*bits).to_f64()).collect(),
            DType::F32 => self.view::<f32>()?.iter().map(|x| f64::from(*x)).collect(),
            DType::F64 => self.view::<f64>()?.into_owned(),
            DType::U64 => self.view::<u64>()?.iter().map(|x| exact(i128::from(*x))).collect::<Result<_>>()?,
            _ => self.to_i64s()?.into_iter().map(|x| exact(i128::from(x))).collect::<Result<_>>()?,
        })
    }

    /// Converts the elements to another float type, rounded to nearest. Returns the tensor itself, shared, if it has that type.
    /// NaN and infinities stay what they are.
    ///
    /// # Errors
    /// `InvalidArgument` if either type is not a float type, and for a finite number beyond the largest one of the type, which
    /// would become an infinity.
    pub fn to_float(&self, dtype: DType) -> Result<Self> {
        if !self.dtype().is_float() || !dtype.is_float() {
            return Err(Error::invalid(format!("{} as {dtype}: only float types are converted", self.dtype())));
        }
        if self.dtype() == dtype {
            return Ok(self.clone());
        }
        // From F64 to a 16-bit type, the value is rounded twice, as in numpy and torch.
        let wide = self.to_f64s()?;
        if let Some((at, x)) = wide.iter().enumerate().find(|(_, x)| round(**x, dtype).is_none()) {
            return Err(Error::invalid(format!("element {at}, {x:e}, is beyond the largest {dtype}")));
        }
        #[allow(clippy::cast_possible_truncation)] // Rounding to the type is what is asked for.
        let narrow = wide.iter().map(|x| *x as f32);
        let (shape, bits) = (self.shape().to_vec(), |of: fn(f32) -> u16| narrow.clone().map(of).collect::<Vec<_>>());
        let converted = match dtype {
            DType::F16 => {
                Self::from_vec(shape, bits(|x| f16::from_f32(x).to_bits())).map(|tensor| tensor.relabelled(dtype))
            }
            DType::Bf16 => {
                Self::from_vec(shape, bits(|x| bf16::from_f32(x).to_bits())).map(|tensor| tensor.relabelled(dtype))
            }
            DType::F32 => Self::from_vec(shape, narrow.collect()),
            _ => Self::from_vec(shape, wide),
        };
        Ok(converted?.with_side(self.padding_side()))
    }

    /// Changes the type to another one of the same size, without changing the bytes.
    fn relabelled(self, dtype: DType) -> Self {
        Self { dtype, ..self }
    }

    /// Returns the first or, for `Left`, the last `length` steps of a dimension after the first. Copies them, unless the dimension
    /// has exactly `length` steps.
    ///
    /// # Errors
    /// `InvalidArgument` if the dimension does not exist, or has less than `length` steps.
    pub(crate) fn narrow(&self, dimension: usize, length: usize, padding: Side) -> Result<Self> {
        let size = *self
            .shape()
            .get(dimension)
            .ok_or_else(|| Error::invalid(format!("no dimension {dimension} in {self:?}")))?;
        if length > size {
            return Err(Error::invalid(format!("dimension {dimension} of {self:?} has {size} steps, not {length}")));
        }
        if length == size {
            return Ok(self.clone());
        }
        let step = self.dtype().size() * self.shape()[dimension + 1..].iter().product::<usize>();
        let mut shape = self.shape().to_vec();
        shape[dimension] = length;
        let mut kept = Vec::with_capacity(crate::group::batch::tensor::bytes_of_shape(self.dtype(), &shape)?);
        // An empty step has no bytes to copy, and chunks of no bytes cannot be counted.
        for run in self.bytes().chunks(step.saturating_mul(size).max(1)) {
            let begin = if padding == Side::Left { run.len() - step * length } else { 0 };
            kept.extend_from_slice(&run[begin..begin + step * length]);
        }
        Ok(Self::new(self.dtype(), shape, kept.into())?.with_side(self.padding_side()))
    }
}

/// Returns an integer as a double, unless that would be another number.
fn exact(integer: i128) -> Result<f64> {
    let double = integer as f64;
    (double as i128 == integer)
        .then_some(double)
        .ok_or_else(|| Error::invalid(format!("{integer} is no double; read it with to_i64s or view")))
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    #[test]
    fn every_type_reads_as_wide_numbers() {
        for dtype in DType::ALL {
            let ones = crate::group::batch::tensor::Scalar::Int(1).to_bytes(dtype).unwrap().repeat(2);
            let tensor = Tensor::new(dtype, [2], Bytes::from(ones)).unwrap();
            assert_eq!(tensor.to_f64s().unwrap(), [1.0, 1.0], "{dtype}");
            assert_eq!(tensor.to_i64s().ok(), (!dtype.is_float()).then(|| vec![1, 1]), "{dtype}");
        }
        assert!(Tensor::from_vec([1], vec![u64::MAX]).unwrap().to_i64s().is_err());
        assert_eq!(Tensor::from_vec([1], vec![-3_i8]).unwrap().to_i64s().unwrap(), [-3]);
    }

    #[test]
    fn floats_become_other_floats_and_back() {
        let exact = Tensor::from_vec([4], vec![1.0_f32, -0.5, 0.0, 96.0]).unwrap();
        for dtype in [DType::F16, DType::Bf16, DType::F32, DType::F64] {
            let there = exact.to_float(dtype).unwrap();
            assert_eq!(there.dtype(), dtype);
            assert_eq!(there.to_float(DType::F32).unwrap(), exact);
        }
        assert_eq!(exact.to_float(DType::F32).unwrap().bytes().as_ptr(), exact.bytes().as_ptr());
        assert!(exact.to_float(DType::I32).is_err());
    }

    #[test]
    fn a_number_that_the_type_cannot_represent_is_refused_and_never_an_infinity() {
        let one = |x: f64| Tensor::from_vec([2], vec![1.0, x]).unwrap();
        for (x, dtype, fits) in [
            (1e300, DType::F32, false),
            (-1e300, DType::F32, false),
            (f64::from(f32::MAX), DType::F32, true),
            (3.403e38, DType::F32, false),
            (70_000.0, DType::F16, false),
            (-65_520.0, DType::F16, false),
            (65_519.0, DType::F16, true),
            (70_000.0, DType::Bf16, true),
            (f64::from(f32::MAX), DType::Bf16, false),
            (1e300, DType::Bf16, false),
            (f64::INFINITY, DType::F16, true),
            (f64::NEG_INFINITY, DType::Bf16, true),
            (f64::NAN, DType::F32, true),
            (1e-300, DType::F32, true),
        ] {
            let converted = one(x).to_float(dtype);
            let text = converted.as_ref().map_or_else(ToString::to_string, |_| String::new());
            assert_eq!(converted.is_ok(), fits, "{x} as {dtype}");
            assert!(fits || (text.contains("element 1") && text.contains(dtype.as_str())), "{text}");
            if let Ok(converted) = converted {
                let back = converted.to_f64s().unwrap()[1];
                assert_eq!((back.is_nan(), back.is_infinite()), (x.is_nan(), x.is_infinite()), "{x} as {dtype}");
            }
        }
    }

    #[test]
    fn an_integer_that_is_no_double_is_refused() {
        let signed = |x: i64| Tensor::from_vec([1], vec![x]).unwrap().to_f64s().ok();
        let unsigned = |x: u64| Tensor::from_vec([1], vec![x]).unwrap().to_f64s().ok();
        assert_eq!(signed(1 << 53), Some(vec![9_007_199_254_740_992.0]));
        assert_eq!([signed((1 << 53) + 1), signed(i64::MAX), signed(-(1 << 53) - 1)], [const { None }; 3]);
        assert_eq!((signed(i64::MIN), unsigned(1 << 63)), (Some(vec![-(2_f64.powi(63))]), Some(vec![2_f64.powi(63)])));
        assert_eq!([unsigned(u64::MAX), unsigned((1 << 53) + 1)], [const { None }; 2]);
    }
}

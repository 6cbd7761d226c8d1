//! One element of any type, such as a padding value.

use half::{bf16, f16};

use crate::base::error::{Error, Result};
use crate::group::batch::tensor::DType;

/// A number or a bool that is converted to the element type of a tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scalar {
    /// Converts to every type that can represent exactly this number.
    Int(i64),
    /// Converts to float types, rounded to nearest.
    Float(f64),
    /// Converts to `BOOL`.
    Bool(bool),
}

impl Scalar {
    /// Returns the bytes of an element of this type.
    ///
    /// # Errors
    /// `InvalidArgument` if the type cannot represent the value, such as -1 in `U8`, 0.5 in `I64`, 257 in `BF16`, or 1e300 in
    /// `F32`.
    pub fn to_bytes(self, dtype: DType) -> Result<Vec<u8>> {
        let bytes = match (self, dtype) {
            (Self::Bool(value), DType::Bool) => Some(vec![u8::from(value)]),
            (Self::Int(value @ (0 | 1)), DType::Bool) => u8::try_from(value).ok().map(|byte| vec![byte]),
            (Self::Int(value), _) if dtype.is_float() => {
                let float = round(value as f64, dtype).filter(|float| *float as i128 == i128::from(value));
                float.and_then(|float| float_bytes(float, dtype))
            }
            (Self::Int(value), _) => int_bytes(value, dtype),
            (Self::Float(value), _) => float_bytes(value, dtype),
            (Self::Bool(_), _) => None,
        };
        bytes.ok_or_else(|| Error::invalid(format!("{self:?} is no element of a {dtype} tensor")))
    }
}

fn int_bytes(value: i64, dtype: DType) -> Option<Vec<u8>> {
    fn fit<T: TryFrom<i64>, const N: usize>(value: i64, bytes: fn(T) -> [u8; N]) -> Option<Vec<u8>> {
        T::try_from(value).ok().map(|value| bytes(value).to_vec())
    }
    match dtype {
        DType::U8 => fit(value, u8::to_le_bytes),
        DType::I8 => fit(value, i8::to_le_bytes),
        DType::U16 => fit(value, u16::to_le_bytes),
        DType::I16 => fit(value, i16::to_le_bytes),
        DType::U32 => fit(value, u32::to_le_bytes),
        DType::I32 => fit(value, i32::to_le_bytes),
        DType::U64 => fit(value, u64::to_le_bytes),
        DType::I64 => Some(value.to_le_bytes().to_vec()),
        DType::Bool | DType::F16 | DType::Bf16 | DType::F32 | DType::F64 => None,
    }
}

/// Rounds a number to the nearest one of a float type. Returns `None` for a finite number that would become an infinity.
#[allow(clippy::cast_possible_truncation)] // Rounding to the type is what is asked for.
pub(super) fn round(value: f64, dtype: DType) -> Option<f64> {
    let rounded = match dtype {
        DType::F16 => f16::from_f32(value as f32).to_f64(),
        DType::Bf16 => bf16::from_f32(value as f32).to_f64(),
        DType::F32 => f64::from(value as f32),
        _ => value,
    };
    (rounded.is_finite() || !value.is_finite()).then_some(rounded)
}

#[allow(clippy::cast_possible_truncation)] // Rounding to the type is what is asked for.
fn float_bytes(value: f64, dtype: DType) -> Option<Vec<u8>> {
    round(value, dtype)?;
    match dtype {
        DType::F16 => Some(f16::from_f32(value as f32).to_le_bytes().to_vec()),
        DType::Bf16 => Some(bf16::from_f32(value as f32).to_le_bytes().to_vec()),
        DType::F32 => Some((value as f32).to_le_bytes().to_vec()),
        DType::F64 => Some(value.to_le_bytes().to_vec()),
        _ => None,
    }
}

impl From<i64> for Scalar {
    fn from(value: i64) -> Self {
        Self::Int(value)
    }
}

impl From<i32> for Scalar {
    fn from(value: i32) -> Self {
        Self::Int(value.into())
    }
}

impl From<f64> for Scalar {
    fn from(value: f64) -> Self {
        Self::Float(value)
    }
}

impl From<bool> for Scalar {
    fn from(value: bool) -> Self {
        Self::Bool(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scalar_becomes_an_element_of_the_tensors_type_or_is_refused() {
        assert_eq!(Scalar::from(-1).to_bytes(DType::I16).unwrap(), [0xff, 0xff]);
        assert_eq!(Scalar::from(1).to_bytes(DType::Bf16).unwrap(), [0x80, 0x3f]);
        assert_eq!(Scalar::from(0.5).to_bytes(DType::F16).unwrap(), [0x00, 0x38]);
        assert_eq!(Scalar::from(true).to_bytes(DType::Bool).unwrap(), [1]);
        for (float, dtype) in
            [(f64::INFINITY, DType::F16), (f64::NEG_INFINITY, DType::Bf16), (f64::INFINITY, DType::F32)]
        {
            let bytes = Scalar::from(float).to_bytes(dtype).unwrap();
            let back = crate::group::batch::tensor::Tensor::new(dtype, [1], bytes.into()).unwrap().to_f64s().unwrap();
            assert_eq!(back, [float], "{dtype}");
        }
        assert!(Scalar::from(f64::NAN).to_bytes(DType::F16).is_ok());
        for dtype in DType::ALL {
            assert_eq!(Scalar::Int(0).to_bytes(dtype).unwrap(), vec![0; dtype.size()], "{dtype}");
        }
        for (scalar, dtype) in [
            (Scalar::from(-1), DType::U8),
            (Scalar::from(300), DType::U8),
            (Scalar::from(0.5), DType::I64),
            (Scalar::from(2), DType::Bool),
            (Scalar::from(true), DType::U8),
            (Scalar::from(-1), DType::U32),
            (Scalar::from(1_i64 << 40), DType::I32),
            (Scalar::from(1.0), DType::I64),
            (Scalar::from(70_000), DType::F16),
            (Scalar::from(2_049), DType::F16),
            (Scalar::from(257), DType::Bf16),
            (Scalar::from((1 << 24) + 1), DType::F32),
            (Scalar::from((1_i64 << 53) + 1), DType::F64),
            (Scalar::from(i64::MAX), DType::F64),
            (Scalar::from(1e300), DType::F32),
            (Scalar::from(-70_000.0), DType::F16),
            (Scalar::from(3.4e38), DType::F16),
        ] {
            assert!(scalar.to_bytes(dtype).is_err(), "{scalar:?} as {dtype}");
        }
    }
}

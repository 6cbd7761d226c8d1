//! Rust types for reading and creating tensors, without `unsafe`: casts check the alignment, and copy if it is wrong.

use std::borrow::Cow;

use crate::group::batch::tensor::DType;

/// A Rust type in which elements of a tensor can be viewed. `u16` also reads the bits of `F16` and `BF16`. `u8` also reads those
/// of `BOOL`.
pub trait Element: sealed::Cast {
    /// The type of a tensor created from these elements.
    const DTYPE: DType;
    /// Returns `true` if a tensor of that type can be viewed as these elements.
    #[must_use]
    fn reads(dtype: DType) -> bool {
        dtype == Self::DTYPE
    }
}

pub(crate) mod sealed {
    use super::Cow;

    /// Casts between bytes and elements. Sealed: a foreign type could not guarantee that every cast is checked.
    pub trait Cast: Copy + PartialEq + std::fmt::Debug + Default + Send + Sync + 'static {
        /// Returns the elements, in place if aligned, otherwise copied; `None` if the bytes are not valid elements.
        fn cast(bytes: &[u8]) -> Option<Cow<'_, [Self]>>;
        /// Returns the bytes of elements.
        fn bytes_of(elements: &[Self]) -> &[u8];
    }
}

macro_rules! elements {
    ($($rust:ty => $dtype:ident $(| $also:ident)*),*) => {$(
        impl Element for $rust {
            const DTYPE: DType = DType::$dtype;
            fn reads(dtype: DType) -> bool {
                matches!(dtype, DType::$dtype $(| DType::$also)*)
            }
        }
        impl sealed::Cast for $rust {
            fn cast(bytes: &[u8]) -> Option<Cow<'_, [Self]>> {
                match bytemuck::try_cast_slice(bytes) {
                    Ok(elements) => Some(Cow::Borrowed(elements)),
                    Err(bytemuck::PodCastError::TargetAlignmentGreaterAndInputNotAligned) => {
                        let mut elements = vec![Self::default(); bytes.len() / size_of::<Self>()];
                        bytemuck::cast_slice_mut::<Self, u8>(&mut elements).copy_from_slice(bytes);
                        Some(Cow::Owned(elements))
                    }
                    Err(_) => None,
                }
            }
            fn bytes_of(elements: &[Self]) -> &[u8] {
                bytemuck::cast_slice(elements)
            }
        }
    )*};
}

elements!(
    u8 => U8 | Bool, i8 => I8, u16 => U16 | F16 | Bf16, i16 => I16, u32 => U32, i32 => I32, u64 => U64, i64 => I64,
    f32 => F32, f64 => F64
);

impl Element for bool {
    const DTYPE: DType = DType::Bool;
}

impl sealed::Cast for bool {
    fn cast(bytes: &[u8]) -> Option<Cow<'_, [Self]>> {
        // A byte that is neither 0 nor 1 is not a bool: such a byte from a peer is an error of the peer.
        bytemuck::checked::try_cast_slice(bytes).ok().map(Cow::Borrowed)
    }
    fn bytes_of(elements: &[Self]) -> &[u8] {
        bytemuck::cast_slice(elements)
    }
}

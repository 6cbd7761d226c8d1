//! The two 16-bit float formats, which Rust has no type for: IEEE 754 binary16 and bfloat16, to and from `f32`.

/// The value of a bfloat16: the upper half of an `f32`.
#[must_use]
pub fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// The nearest bfloat16, ties to even; a NaN stays one.
#[must_use]
#[allow(clippy::cast_possible_truncation)] // The upper half is what is kept.
pub fn f32_to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    if value.is_nan() {
        // Rounding could carry a NaN's payload into infinity; the quiet bit keeps it a NaN.
        return (bits >> 16) as u16 | 0x40;
    }
    let tie_to_even = 0x7fff + ((bits >> 16) & 1);
    ((bits + tie_to_even) >> 16) as u16
}

/// The value of a binary16: sign, five bits of exponent with bias 15, ten bits of fraction.
#[must_use]
pub fn f16_to_f32(bits: u16) -> f32 {
    let (exponent, fraction) = ((bits >> 10) & 0x1f, u32::from(bits & 0x3ff));
    let magnitude = match exponent {
        // Subnormal: units of 2^-24.
        0 => fraction as f32 * (1.0 / 16_777_216.0),
        0x1f => f32::from_bits(0x7f80_0000 | fraction << 13),
        _ => f32::from_bits((u32::from(exponent) + 112) << 23 | fraction << 13),
    };
    f32::from_bits(magnitude.to_bits() | u32::from(bits >> 15) << 31)
}

/// The nearest binary16, ties to even; beyond its range infinity; a NaN stays one.
#[must_use]
#[allow(clippy::cast_possible_truncation)] // What is shifted fits by then.
pub fn f32_to_f16(value: f32) -> u16 {
    let bits = value.to_bits();
    let (sign, exponent, fraction) = ((bits >> 16) as u16 & 0x8000, (bits >> 23) & 0xff, bits & 0x7f_ffff);
    if exponent == 0xff {
        let nan = if fraction == 0 { 0 } else { 0x200 | (fraction >> 13) as u16 };
        return sign | 0x7c00 | nan;
    }
    // Below 2^-14 the fraction, with its leading one, is shifted into units of 2^-24; everything is rounded as one integer, so
    // that a carry moves into the exponent by itself.
    let (base, shift) = if exponent > 112 { (exponent - 112, 13) } else { (0, 126 - exponent) };
    if base > 30 {
        return sign | 0x7c00;
    }
    if shift > 24 {
        return sign;
    }
    let significand = if base == 0 { fraction | 0x80_0000 } else { fraction };
    let (kept, lost, half) = (significand >> shift, significand & ((1 << shift) - 1), 1 << (shift - 1));
    let up = u32::from(lost > half || (lost == half && kept & 1 == 1));
    sign | ((base << 10) + kept + up) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bit_pattern_comes_back_and_a_nan_stays_one() {
        for bits in 0..=u16::MAX {
            let (half, brain) = (f16_to_f32(bits), bf16_to_f32(bits));
            if half.is_nan() {
                assert!(f16_to_f32(f32_to_f16(half)).is_nan(), "{bits:#06x}");
            } else {
                assert_eq!(f32_to_f16(half), bits, "{half}");
            }
            if brain.is_nan() {
                assert!(bf16_to_f32(f32_to_bf16(brain)).is_nan(), "{bits:#06x}");
            } else {
                assert_eq!(f32_to_bf16(brain), bits, "{brain}");
            }
        }
    }

    #[test]
    fn what_lies_between_goes_to_the_nearer_and_a_tie_to_the_even_one() {
        for (low, to, back) in [
            (0x3c00_u16, f32_to_f16 as fn(f32) -> u16, f16_to_f32 as fn(u16) -> f32),
            (0x3f80, f32_to_bf16, bf16_to_f32),
        ] {
            // Around 1, and for binary16 also in the subnormal range and at the step into the normal one.
            for low in [low, low + 1, 0x0001, 0x0002, 0x03ff, 0x7bfe] {
                let (below, above) = (back(low), back(low + 1));
                let middle = below + (above - below) / 2.0;
                assert_eq!(to(middle), low + (low & 1), "{middle}");
                assert_eq!(to(middle.next_down()), low, "{middle}");
                assert_eq!(to(middle.next_up()), low + 1, "{middle}");
                assert_eq!(to(-middle), 0x8000 | (low + (low & 1)), "{middle}");
            }
        }
    }

    #[test]
    fn the_ends_of_the_range_are_ieees() {
        assert_eq!((f32_to_f16(65_504.0), f32_to_f16(65_519.9), f32_to_f16(65_520.0)), (0x7bff, 0x7bff, 0x7c00));
        assert_eq!((f32_to_f16(f32::MAX), f32_to_f16(f32::NEG_INFINITY)), (0x7c00, 0xfc00));
        assert_eq!((f32_to_f16(2.0_f32.powi(-25)), f32_to_f16(2.0_f32.powi(-25).next_up())), (0, 1));
        assert_eq!((f32_to_f16(f32::MIN_POSITIVE), f32_to_f16(-0.0)), (0, 0x8000));
        assert_eq!((f32_to_bf16(f32::MAX), f32_to_bf16(-0.0)), (0x7f80, 0x8000));
    }
}

//! Hexadecimal digits of numbers, for the ids of sessions and traces. Each rollout needs several.

/// Appends the lowest `N` digits in lower case. `write!` would append each leading zero with a call of its own.
pub(crate) fn push<const N: usize>(text: &mut String, number: u128) {
    let bytes = number.to_be_bytes();
    let digits: [u8; N] = std::array::from_fn(|at| {
        let byte = bytes[bytes.len() - N.div_ceil(2) + at / 2];
        b"0123456789abcdef"[usize::from(if at % 2 == 0 { byte >> 4 } else { byte & 0xf })]
    });
    text.push_str(std::str::from_utf8(&digits).expect("digits are ASCII"));
}

#[cfg(test)]
mod tests {
    #[test]
    fn digits_are_those_of_the_formatter() {
        let mut rng = fastrand::Rng::with_seed(7);
        for number in [0, 1, u128::MAX].into_iter().chain(std::iter::repeat_with(|| rng.u128(..) >> 40).take(50)) {
            let mut text = String::new();
            super::push::<32>(&mut text, number);
            super::push::<2>(&mut text, number);
            assert_eq!(text, format!("{number:032x}{:02x}", number & 0xff));
        }
    }
}

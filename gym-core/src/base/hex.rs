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

/// Returns the number of up to 16 digits; `None` if there is any other character. Unlike `from_str_radix`, it accepts no sign.
pub(crate) fn parse(digits: &[u8]) -> Option<u64> {
    digits.iter().try_fold(0, |number, digit| {
        let digit = match digit {
            b'0'..=b'9' => digit - b'0',
            b'a'..=b'f' => digit - b'a' + 10,
            b'A'..=b'F' => digit - b'A' + 10,
            _ => return None,
        };
        Some(number << 4 | u64::from(digit))
    })
}

#[cfg(test)]
mod tests {
    #[test]
    fn digits_of_both_cases_are_read_and_nothing_else() {
        assert_eq!(super::parse(b"00fFa9"), Some(0xffa9));
        assert_eq!(super::parse(&[b'f'; 16]), Some(u64::MAX));
        for text in ["+1", "-1", "1 ", "g", "\u{e9}"] {
            assert_eq!(super::parse(text.as_bytes()), None, "{text}");
        }
    }

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

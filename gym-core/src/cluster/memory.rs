//! Amounts of memory as people write them.

use crate::error::{Error, Result};

/// Bytes from `8GB`, `8 GiB`, `1.5gb` or a plain number: KB, MB, GB, TB are powers of 1000, KiB … TiB of 1024; case does not count.
///
/// # Errors
/// `InvalidArgument` for an unknown unit, and for an amount that is not positive or beyond 2⁶³ bytes.
pub fn parse_memory(text: &str) -> Result<u64> {
    let refuse = |why: &str| {
        Err(Error::invalid(format!(
            "memory size '{text}' {why}; write a number of bytes, or one with KB, MB, GB, TB, KiB, MiB, GiB or TiB"
        )))
    };
    let text = text.trim();
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = (&text[..split], text[split..].trim().to_ascii_lowercase());
    let unit: u64 = match unit.as_str() {
        "" | "b" => 1,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        "kib" => 1 << 10,
        "mib" => 1 << 20,
        "gib" => 1 << 30,
        "tib" => 1 << 40,
        _ => return refuse("has an unknown unit"),
    };
    let Ok(number) = number.parse::<f64>() else { return refuse("has no number") };
    let bytes = number * unit as f64;
    if !(1.0..9.2e18).contains(&bytes) {
        return refuse("is out of range");
    }
    Ok(bytes as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decimal_and_binary_units_are_told_apart() {
        for (text, bytes) in [
            ("8GB", 8_000_000_000),
            ("8GiB", 8 << 30),
            ("8 gib", 8 << 30),
            ("1.5kb", 1_500),
            (" 512 ", 512),
            ("2TiB", 2 << 40),
        ] {
            assert_eq!(parse_memory(text).unwrap(), bytes, "{text}");
        }
    }

    #[test]
    fn what_is_no_amount_is_refused_with_the_units_there_are() {
        for text in ["", "GB", "8 XB", "0GB", "-1GB", "1e3", "1.2.3GB", "99999999TB"] {
            let error = parse_memory(text).unwrap_err();
            assert!(error.to_string().contains("KiB"), "{text}: {error}");
        }
    }
}

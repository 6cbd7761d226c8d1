//! Values as JSON text that keeps numbers which are not finite.
//!
//! JSON has no NaN and no infinity, and `serde_json` writes both as `null`. Here they are strings that begin with the character
//! U+0000: `"\u0000NaN"`, `"\u0000inf"` and `"\u0000-inf"`. A text that has one of these forms itself gets another U+0000 in front.
//! All other values are written as `serde_json` writes them, bit for bit.
//!
//! ```
//! use gym_core::group::batch::json;
//! # fn main() -> serde_json::Result<()> {
//! let text = json::to_raw(&(1.5, f32::NAN, Some(f64::NEG_INFINITY)))?;
//! assert_eq!(text.get(), r#"[1.5,"\u0000NaN","\u0000-inf"]"#);
//! let (_, nan, infinity): (f64, f32, Option<f64>) = json::read(text.get().as_bytes())?;
//! assert!(nan.is_nan() && infinity == Some(f64::NEG_INFINITY));
//! # Ok(()) }
//! ```
//!
//! The sign and the payload of a NaN are lost. Three conversions are the caller's own, and no text can restore what they drop:
//!
//! - A `serde_json::Value` holds no such number. It is `null` from the moment in which the value is built.
//! - Text in a `RawValue` is passed on as it is. [`to_raw`] writes one that [`read`] understands.
//! - The key of a map must be finite; other keys are an error.

mod read;
mod write;

#[cfg(test)]
mod tests;

pub use read::read;
pub(in crate::group) use write::Marking;
pub use write::to_raw;

/// The first character of a marked number. JSON text must escape it, and has one way to do so.
const MARK: char = '\0';

/// The text after the mark, as Rust prints the numbers.
const NOT_FINITE: [(&str, f64); 3] = [("NaN", f64::NAN), ("inf", f64::INFINITY), ("-inf", f64::NEG_INFINITY)];

/// The meaning of a string in a text.
#[derive(Debug, PartialEq)]
enum Meaning<'a> {
    Number(f64),
    Text(&'a str),
}

impl<'a> Meaning<'a> {
    #[inline]
    fn of(text: &'a str) -> Self {
        if text.starts_with(MARK) { Self::of_marked(text) } else { Self::Text(text) }
    }

    #[cold]
    fn of_marked(text: &'a str) -> Self {
        let rest = text.trim_start_matches(MARK);
        match NOT_FINITE.into_iter().find(|(word, _)| *word == rest) {
            Some((word, number)) if text.len() == MARK.len_utf8() + word.len() => Self::Number(number),
            Some(_) => Self::Text(&text[MARK.len_utf8()..]),
            None => Self::Text(text),
        }
    }
}

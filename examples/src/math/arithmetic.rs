//! Exact arithmetic that a hostile expression cannot make expensive.
//!
//! Each operation first estimates the size of its result, so `9^9^9^9` is rejected without being computed.

use std::fmt;

use num_bigint::BigInt;
use num_rational::BigRational;
use num_traits::{One, Pow, Signed, ToPrimitive, Zero};

/// Maximum length of an expression, in bytes.
pub const EXPRESSION_BYTES_MAX: usize = 1_024;
/// Maximum nesting, far below the limit of a thread's stack.
pub const DEPTH_MAX: usize = 64;
/// Maximum size of a numerator or denominator, in bits: about 1,200 decimal digits.
pub const NUMBER_BITS_MAX: u64 = 4_096;

/// The reason why an expression has no value. The model reads the text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ArithmeticError {
    /// The expression is too long.
    #[error("the expression is longer than {EXPRESSION_BYTES_MAX} bytes")]
    TooLong,
    /// Brackets, signs or powers are nested too deeply.
    #[error("the expression is nested deeper than {DEPTH_MAX}")]
    TooDeep,
    /// An intermediate value is too large.
    #[error("the result has more than {NUMBER_BITS_MAX} bits")]
    TooLarge,
    /// A division by zero.
    #[error("division by zero")]
    DivisionByZero,
    /// A power whose exponent is not an integer.
    #[error("the exponent {0} is not an integer")]
    Exponent(String),
    /// A character other than the expected number, bracket or sign.
    #[error("expected {expected} at position {at}, found {found}")]
    Unexpected {
        /// The expected text.
        expected: &'static str,
        /// The byte offset from the start.
        at: usize,
        /// The text found.
        found: String,
    },
}

type Result<T> = std::result::Result<T, ArithmeticError>;

/// Evaluates an expression of numbers, `+ - * / ^ ( )` and whitespace. `^` binds more tightly than a preceding sign, and associates
/// to the right: `-2^2` is -4 and `2^3^2` is 512.
///
/// # Errors
/// An error if the text is not such an expression, or if a value is too large.
pub fn evaluate(expression: &str) -> Result<BigRational> {
    if expression.len() > EXPRESSION_BYTES_MAX {
        return Err(ArithmeticError::TooLong);
    }
    let mut reader = Reader { text: expression, at: 0, depth: 0 };
    let value = reader.sum()?;
    match reader.peek() {
        None => Ok(value),
        Some(_) => Err(reader.unexpected("an operator or the end")),
    }
}

struct Reader<'a> {
    text: &'a str,
    at: usize,
    depth: usize,
}

impl Reader<'_> {
    /// Returns the next character that is not whitespace.
    fn peek(&mut self) -> Option<char> {
        let rest = self.text[self.at..].trim_start();
        self.at = self.text.len() - rest.len();
        rest.chars().next()
    }

    fn take(&mut self, wanted: &[char]) -> Option<char> {
        let next = self.peek().filter(|next| wanted.contains(next))?;
        self.at += next.len_utf8();
        Some(next)
    }

    fn unexpected(&mut self, expected: &'static str) -> ArithmeticError {
        let found = self.peek().map_or_else(|| "the end".to_owned(), |next| format!("`{next}`"));
        ArithmeticError::Unexpected { expected, at: self.at, found }
    }

    fn deeper<T>(&mut self, read: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        if self.depth == DEPTH_MAX {
            return Err(ArithmeticError::TooDeep);
        }
        self.depth += 1;
        let value = read(self);
        self.depth -= 1;
        value
    }

    fn sum(&mut self) -> Result<BigRational> {
        let mut value = self.product()?;
        while let Some(sign) = self.take(&['+', '-', '−', '–']) {
            let right = self.product()?;
            value = if sign == '+' { add(&value, &right)? } else { add(&value, &-right)? };
        }
        Ok(value)
    }

    fn product(&mut self) -> Result<BigRational> {
        let mut value = self.signed()?;
        while let Some(operator) = self.take(&['*', '/', '×', '·', '÷']) {
            let right = self.signed()?;
            value = if matches!(operator, '/' | '÷') { divide(&value, &right)? } else { multiply(&value, &right)? };
        }
        Ok(value)
    }

    fn signed(&mut self) -> Result<BigRational> {
        match self.take(&['+', '-', '−', '–']) {
            Some('+') => self.deeper(Self::signed),
            Some(_) => Ok(-self.deeper(Self::signed)?),
            None => self.power(),
        }
    }

    fn power(&mut self) -> Result<BigRational> {
        let base = self.atom()?;
        if self.take(&['^']).is_none() {
            return Ok(base);
        }
        let exponent = self.deeper(Self::signed)?;
        power(&base, &exponent)
    }

    fn atom(&mut self) -> Result<BigRational> {
        if self.take(&['(']).is_some() {
            let value = self.deeper(Self::sum)?;
            return match self.take(&[')']) {
                Some(_) => Ok(value),
                None => Err(self.unexpected("`)`")),
            };
        }
        self.peek();
        let rest = &self.text[self.at..];
        let Some((value, length)) = decimal(rest) else { return Err(self.unexpected("a number or `(`")) };
        self.at += length;
        value
    }
}

/// Parses a number at the start of a text: digits (with commas between thousands), a decimal part and an exponent. Returns the
/// number and its length, or `None` if there is no number.
pub(super) fn decimal(text: &str) -> Option<(Result<BigRational>, usize)> {
    let bytes = text.as_bytes();
    let run = |from: usize| bytes[from..].iter().take_while(|byte| byte.is_ascii_digit()).count();
    let mut at = run(0);
    let mut digits = text[..at].to_owned();
    // Commas are allowed only between thousands: `1,234`, but neither `1,23` nor `12,3456`.
    if (1..=3).contains(&at) {
        while bytes.get(at) == Some(&b',') && run(at + 1) == 3 {
            digits.push_str(&text[at + 1..at + 4]);
            at += 4;
        }
    }
    let mut places = 0;
    if bytes.get(at) == Some(&b'.') && (run(at + 1) > 0 || at > 0) {
        places = run(at + 1);
        digits.push_str(&text[at + 1..at + 1 + places]);
        at += 1 + places;
    }
    if digits.is_empty() {
        return None;
    }
    let mut exponent = 0_i64;
    if matches!(bytes.get(at), Some(b'e' | b'E')) {
        let sign = usize::from(matches!(bytes.get(at + 1), Some(b'+' | b'-')));
        let length = run(at + 1 + sign);
        if length > 0 {
            // An exponent longer than this is too large regardless of its digits.
            exponent = text[at + 1..at + 1 + sign + length].parse().unwrap_or(i64::MAX / 2);
            at += 1 + sign + length;
        }
    }
    Some((scale(&digits, exponent - places as i64), at))
}

/// Returns `digits` times ten to the power of `exponent`.
fn scale(digits: &str, exponent: i64) -> Result<BigRational> {
    // 3.32 bits per digit; checked before any computation.
    if digits.len() as u64 * 10 / 3 > NUMBER_BITS_MAX || exponent.unsigned_abs() > NUMBER_BITS_MAX * 3 / 10 {
        return Err(ArithmeticError::TooLarge);
    }
    let mantissa: BigInt = digits.parse().map_err(|_| ArithmeticError::TooLarge)?;
    let ten = BigRational::from_integer(10.into());
    multiply(&BigRational::from_integer(mantissa), &power(&ten, &BigRational::from_integer(exponent.into()))?)
}

fn bits(value: &BigRational) -> u64 {
    value.numer().bits().max(value.denom().bits())
}

fn bounded(bits: u64) -> Result<()> {
    if bits > NUMBER_BITS_MAX { Err(ArithmeticError::TooLarge) } else { Ok(()) }
}

fn checked(value: BigRational) -> Result<BigRational> {
    bounded(bits(&value)).map(|()| value)
}

/// Adds two numbers. Operands are bounded, so the product of their denominators is at most twice as long.
pub(super) fn add(left: &BigRational, right: &BigRational) -> Result<BigRational> {
    checked(left + right)
}

pub(super) fn multiply(left: &BigRational, right: &BigRational) -> Result<BigRational> {
    checked(left * right)
}

pub(super) fn divide(left: &BigRational, right: &BigRational) -> Result<BigRational> {
    if right.is_zero() { Err(ArithmeticError::DivisionByZero) } else { checked(left / right) }
}

pub(super) fn power(base: &BigRational, exponent: &BigRational) -> Result<BigRational> {
    if !exponent.is_integer() {
        return Err(ArithmeticError::Exponent(show(exponent)));
    }
    if base.is_zero() && exponent.is_negative() {
        return Err(ArithmeticError::DivisionByZero);
    }
    // The three bases whose powers do not grow.
    if base.is_zero() || base.abs().is_one() {
        let odd =
            (exponent.numer() % BigInt::from(2)).is_one() || (exponent.numer() % BigInt::from(2)) == -BigInt::one();
        return Ok(if exponent.is_zero() || !odd && !base.is_zero() { BigRational::one() } else { base.clone() });
    }
    let exponent = exponent.numer().to_i32().ok_or(ArithmeticError::TooLarge)?;
    bounded((bits(base) - 1).saturating_mul(u64::from(exponent.unsigned_abs())))?;
    checked(Pow::pow(base, exponent))
}

/// Formats a number as an integer, or as a fraction in lowest terms.
#[must_use]
pub fn show(value: &BigRational) -> String {
    value.to_string()
}

/// Formats a number as a decimal number if it has at most `places` places.
#[must_use]
pub fn show_decimal(value: &BigRational, places: u32) -> Option<String> {
    let scaled = value * BigRational::from_integer(Pow::pow(BigInt::from(10), places));
    if !scaled.is_integer() {
        return None;
    }
    let digits = format!("{:0>width$}", scaled.numer().abs(), width = places as usize + 1);
    let (whole, part) = digits.split_at(digits.len() - places as usize);
    let part = part.trim_end_matches('0');
    let sign = if value.is_negative() { "-" } else { "" };
    Some(if part.is_empty() { format!("{sign}{whole}") } else { format!("{sign}{whole}.{part}") })
}

/// Formats a number as a decimal number if its decimals end, and otherwise as a fraction.
#[derive(Debug)]
pub struct Shown<'a>(pub &'a BigRational);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&show_decimal(self.0, 12).unwrap_or_else(|| show(self.0)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_have_the_value_they_have_on_paper() {
        for (expression, value) in [
            ("1 + 2 * 3", "7"),
            ("(1 + 2) * 3", "9"),
            ("3/4 + 5/6", "19/12"),
            ("-2^2", "-4"),
            ("(-2)^3", "-8"),
            ("2^3^2", "512"),
            ("2^-2", "1/4"),
            ("1.5e3 / 3", "500"),
            ("1,234,567 - 67", "1234500"),
            (".5 + 5.", "11/2"),
            ("12 ÷ 4 × 2 − 1", "5"),
            ("0.1 + 0.2", "3/10"),
            ("1^(10^300) + 0^5 + (-1)^(10^20 + 1)", "0"),
            ("0^0", "1"),
            ("- - 3", "3"),
        ] {
            assert_eq!(evaluate(expression).map(|value| show(&value)), Ok(value.to_owned()), "{expression}");
        }
    }

    #[test]
    fn what_is_not_an_expression_is_refused_with_its_place() {
        for (expression, error) in [
            ("", "expected a number or `(` at position 0, found the end"),
            ("2 +", "expected a number or `(` at position 3, found the end"),
            ("(2", "expected `)` at position 2, found the end"),
            ("2 3", "expected an operator or the end at position 2, found `3`"),
            ("import os", "expected a number or `(` at position 0, found `i`"),
            ("1,23", "expected an operator or the end at position 1, found `,`"),
            ("1/0", "division by zero"),
            ("0^-1", "division by zero"),
            ("2^0.5", "the exponent 1/2 is not an integer"),
        ] {
            assert_eq!(evaluate(expression).unwrap_err().to_string(), error, "{expression}");
        }
    }

    #[test]
    fn hostile_expressions_are_refused_before_they_cost_anything() {
        for expression in
            ["9^9^9^9", "1e1000000000", "1e-99999999999999999999", "2^(2^40)", "(10^1000)^1000", "1e1000*1e1000"]
        {
            assert_eq!(evaluate(expression), Err(ArithmeticError::TooLarge), "{expression}");
        }
        assert_eq!(evaluate(&"(".repeat(1_000)), Err(ArithmeticError::TooDeep));
        assert_eq!(evaluate(&"-".repeat(1_000)), Err(ArithmeticError::TooDeep));
        assert_eq!(evaluate(&"2^".repeat(500)), Err(ArithmeticError::TooDeep));
        assert_eq!(evaluate(&"1+".repeat(1_000_000)), Err(ArithmeticError::TooLong));
        assert_eq!(evaluate(&"9".repeat(1_024)).map(|value| value.is_integer()), Ok(true));
    }

    #[test]
    fn decimals_end_or_are_not_shown() {
        for (expression, decimal) in
            [("1/8", Some("0.125")), ("-3/2", Some("-1.5")), ("10", Some("10")), ("1/3", None), ("0", Some("0"))]
        {
            assert_eq!(show_decimal(&evaluate(expression).unwrap(), 12).as_deref(), decimal);
        }
    }
}

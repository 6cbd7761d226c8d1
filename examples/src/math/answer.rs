//! Finds the final answer in the text of a model, and compares it with the expected quantity.
//!
//! Equality is exact: `0.75`, `3/4`, `75%` and `\frac{3}{4}` are equal, `0.3333` and `1/3` are not. Lengths, masses,
//! times, volumes, areas, speeds and money compare across their units.

use gym_core::{Error, Result};
use num_bigint::BigInt;
use num_rational::BigRational;
use num_traits::One;

use super::arithmetic::{add, decimal, divide, multiply, power};

/// Bytes at the end of a text that are searched. An answer is at the end, so a long text before it costs nothing.
const TAIL_BYTES: usize = 8 << 10;
/// Maximum length of the text of a quantity.
const QUANTITY_BYTES_MAX: usize = 256;

/// An exact number, with or without a unit.
#[derive(Clone, Debug, PartialEq)]
pub struct Quantity {
    value: BigRational,
    unit: Option<Unit>,
}

#[derive(Clone, Debug, PartialEq)]
struct Unit {
    dimension: &'static str,
    /// The factor to the dimension's first unit.
    factor: BigRational,
}

/// Dimension, names, and the factor to the dimension's first unit.
const UNITS: &[(&str, &[&str], (i64, i64))] = &[
    ("length", &["m", "meter", "meters", "metre", "metres"], (1, 1)),
    ("length", &["km", "kilometer", "kilometers", "kilometre", "kilometres"], (1_000, 1)),
    ("length", &["cm", "centimeter", "centimeters", "centimetre", "centimetres"], (1, 100)),
    ("length", &["mm", "millimeter", "millimeters", "millimetre", "millimetres"], (1, 1_000)),
    ("length", &["in", "inch", "inches"], (254, 10_000)),
    ("length", &["ft", "foot", "feet"], (3_048, 10_000)),
    ("length", &["mi", "mile", "miles"], (1_609_344, 1_000)),
    ("area", &["m^2", "m²", "square meters", "square metres"], (1, 1)),
    ("area", &["cm^2", "cm²", "square centimeters", "square centimetres"], (1, 10_000)),
    ("area", &["km^2", "km²", "square kilometers", "square kilometres"], (1_000_000, 1)),
    ("mass", &["g", "gram", "grams"], (1, 1)),
    ("mass", &["kg", "kilogram", "kilograms"], (1_000, 1)),
    ("mass", &["mg", "milligram", "milligrams"], (1, 1_000)),
    ("mass", &["t", "tonne", "tonnes"], (1_000_000, 1)),
    ("time", &["s", "sec", "second", "seconds"], (1, 1)),
    ("time", &["ms", "millisecond", "milliseconds"], (1, 1_000)),
    ("time", &["min", "minute", "minutes"], (60, 1)),
    ("time", &["h", "hr", "hour", "hours"], (3_600, 1)),
    ("time", &["d", "day", "days"], (86_400, 1)),
    ("volume", &["l", "L", "liter", "liters", "litre", "litres"], (1, 1)),
    ("volume", &["ml", "mL", "milliliter", "milliliters", "millilitre", "millilitres"], (1, 1_000)),
    ("speed", &["m/s", "meters per second", "metres per second"], (1, 1)),
    ("speed", &["km/h", "kmh", "km per hour", "kilometers per hour", "kilometres per hour"], (5, 18)),
    ("money", &["$", "USD", "dollar", "dollars"], (1, 1)),
    ("money", &["¢", "cent", "cents"], (1, 100)),
];

impl Quantity {
    /// Parses a text as a quantity. Returns `None` if it is not a quantity, or too large to compare.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let plain = without_markup(text.get(..QUANTITY_BYTES_MAX).map_or(text, |_| ""));
        // `x = 5` is 5, and `2 = 3 = 5` is also 5: the last part counts.
        let text = plain.rsplit('=').next()?.trim().trim_end_matches('.').trim();
        let text = text.strip_prefix('(').and_then(|inner| inner.strip_suffix(')')).unwrap_or(text).trim();

        let mut reader = Reader { rest: text };
        let negative = reader.sign();
        let money = reader.take("$");
        let value = reader.magnitude()?;
        let value = if negative { -value } else { value };
        let name = reader.rest.trim();
        if money {
            return name.is_empty().then(|| Self { value, unit: Unit::named("$") });
        }
        match name {
            "" => Some(Self { value, unit: None }),
            "%" | "percent" | "per cent" => {
                Some(Self { value: divide(&value, &BigRational::from_integer(100.into())).ok()?, unit: None })
            }
            name => Some(Self { value, unit: Some(Unit::named(name)?) }),
        }
    }

    /// Returns `true` if `given` equals this quantity. A number without a unit is taken in the expected unit. A unit is wrong if
    /// none was expected.
    #[must_use]
    pub fn equals(&self, given: &Self) -> bool {
        match (&self.unit, &given.unit) {
            (Some(expected), Some(unit)) => {
                expected.dimension == unit.dimension && &self.value * &expected.factor == &given.value * &unit.factor
            }
            (None, Some(_)) => false,
            (_, None) => self.value == given.value,
        }
    }
}

impl Unit {
    fn named(name: &str) -> Option<Self> {
        let lower = name.to_lowercase();
        let exact = UNITS.iter().find(|(_, names, _)| names.contains(&name));
        // Words may be capitalized; symbols may not: `M` is not a meter.
        let known = exact.or_else(|| {
            UNITS.iter().find(|(_, names, _)| names.iter().any(|known| known.len() > 2 && *known == lower))
        });
        known.map(|(dimension, _, (over, under))| Self {
            dimension,
            factor: BigRational::new(BigInt::from(*over), BigInt::from(*under)),
        })
    }
}

/// Parses from the start of a text.
struct Reader<'a> {
    rest: &'a str,
}

impl Reader<'_> {
    fn take(&mut self, prefix: &str) -> bool {
        let rest = self.rest.trim_start();
        let found = rest.strip_prefix(prefix);
        self.rest = found.unwrap_or(self.rest);
        found.is_some()
    }

    fn sign(&mut self) -> bool {
        if self.take("-") {
            return true;
        }
        self.take("+");
        false
    }

    fn decimal(&mut self) -> Option<BigRational> {
        let rest = self.rest.trim_start();
        let (value, length) = decimal(rest)?;
        self.rest = &rest[length..];
        value.ok()
    }

    fn signed(&mut self) -> Option<BigRational> {
        let negative = self.sign();
        self.decimal().map(|value| if negative { -value } else { value })
    }

    /// Parses a number, a fraction, a mixed number, or one of them times a power of ten.
    fn magnitude(&mut self) -> Option<BigRational> {
        if self.rest.trim_start().starts_with("\\frac") {
            return self.latex_fraction();
        }
        let whole = self.decimal()?;
        if self.take("^") {
            return if whole == ten() { power(&ten(), &self.exponent()?).ok() } else { None };
        }
        if self.take("/") {
            return divide(&whole, &self.signed()?).ok();
        }
        if self.take("*") || self.take("×") || self.take("x ") {
            let base = self.decimal()?;
            if base != ten() || !self.take("^") {
                return None;
            }
            return multiply(&whole, &power(&ten(), &self.exponent()?).ok()?).ok();
        }
        // `1 1/2` and `1\frac{1}{2}`. Without a fraction, the rest is a unit or empty.
        let before = self.rest;
        if whole.is_integer() && before.trim_start().starts_with("\\frac") {
            return add(&whole, &self.latex_fraction()?).ok();
        }
        if whole.is_integer()
            && before.starts_with(' ')
            && before.trim_start().starts_with(|c: char| c.is_ascii_digit())
        {
            let over = self.decimal()?;
            return if self.take("/") { add(&whole, &divide(&over, &self.decimal()?).ok()?).ok() } else { None };
        }
        Some(whole)
    }

    fn exponent(&mut self) -> Option<BigRational> {
        let close = if self.take("{") {
            "}"
        } else if self.take("(") {
            ")"
        } else {
            ""
        };
        let exponent = self.signed()?;
        (close.is_empty() || self.take(close)).then_some(exponent)
    }

    fn latex_fraction(&mut self) -> Option<BigRational> {
        self.take("\\frac");
        let over = self.group()?;
        let under = self.group()?;
        divide(&over, &under).ok()
    }

    /// Parses `{12}`, or a single digit as in `\frac12`.
    fn group(&mut self) -> Option<BigRational> {
        if self.take("{") {
            let value = self.signed()?;
            return self.take("}").then_some(value);
        }
        let rest = self.rest.trim_start();
        let digit = rest.chars().next()?.to_digit(10)?;
        self.rest = &rest[1..];
        Some(BigRational::from_integer(digit.into()))
    }
}

fn ten() -> BigRational {
    BigRational::one() * BigInt::from(10)
}

/// Strips the markup of LaTeX and Markdown around a number.
fn without_markup(text: &str) -> String {
    // A longer spelling precedes any spelling that is its prefix.
    const REPLACED: &[(&str, &str)] = &[
        ("\u{2212}", "-"),
        ("\u{a0}", " "),
        ("\u{202f}", " "),
        ("\u{2009}", " "),
        ("{,}", ","),
        ("\\dfrac", "\\frac"),
        ("\\tfrac", "\\frac"),
        ("\\left", ""),
        ("\\right", ""),
        ("\\times", "*"),
        ("\\cdot", "*"),
        ("\\text{", " {"),
        ("\\mathrm{", " {"),
        ("\\textbf{", " {"),
        ("\\mathbf{", " {"),
        ("\\(", ""),
        ("\\)", ""),
        ("\\[", ""),
        ("\\]", ""),
        ("\\,", " "),
        ("\\;", " "),
        ("\\:", " "),
        ("\\!", ""),
        ("\\ ", " "),
        ("~", " "),
        ("\\%", "%"),
        ("**", ""),
        ("`", ""),
    ];
    let mut plain = text.trim().to_owned();
    for (from, to) in REPLACED {
        if plain.contains(from) {
            plain = plain.replace(from, to);
        }
    }
    // `$…$` marks mathematics; `\$` and a single `$` mean money.
    let inner = plain.strip_prefix("$$").and_then(|inner| inner.strip_suffix("$$"));
    let inner = inner.or_else(|| plain.strip_prefix('$').and_then(|inner| inner.strip_suffix('$')));
    let plain = inner.unwrap_or(&plain).replace("\\$", "$");
    unwrap_words(plain.trim())
}

/// Strips the braces of `5 {km}`. Braces around numbers are kept, because they belong to fractions and exponents.
fn unwrap_words(text: &str) -> String {
    let mut out = text.to_owned();
    while let Some(open) = out.find(" {") {
        let inner = &out[open + 2..];
        let Some(close) = inner.find('}') else { break };
        let word = inner[..close].trim().to_owned();
        out = format!("{} {word}{}", &out[..open], &inner[close + 1..]);
    }
    out
}

/// Returns the part of a text that states the final answer: the last `\boxed{…}`, or the text after the last `answer is`, `answer:`
/// or `####`, or the last line if it is a quantity. Returns `None` if there is no such part.
#[must_use]
pub fn final_answer(text: &str) -> Option<&str> {
    let from = text.len().saturating_sub(TAIL_BYTES);
    let from = (from..=text.len()).find(|at| text.is_char_boundary(*at))?;
    let tail = text[from..].trim();
    if let Some(at) = tail.rfind("\\boxed{") {
        return balanced(&tail[at + "\\boxed{".len()..]);
    }
    let lower = tail.to_ascii_lowercase();
    let stated = ["answer is", "answer:", "answer =", "####"]
        .into_iter()
        .filter_map(|words| lower.rfind(words).map(|at| at + words.len()))
        .max();
    if let Some(at) = stated {
        let line = tail[at..].trim_start_matches([':', '*', ' ']).lines().next()?;
        let end = [". ", ", ", "; "].into_iter().filter_map(|stop| line.find(stop)).min().unwrap_or(line.len());
        return Some(line[..end].trim().trim_end_matches(['.', '!']).trim()).filter(|answer| !answer.is_empty());
    }
    tail.lines().next_back().map(str::trim).filter(|line| Quantity::parse(line).is_some())
}

/// Returns the text before the closing brace.
fn balanced(text: &str) -> Option<&str> {
    let mut depth = 0_usize;
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            b'{' => depth += 1,
            b'}' if depth == 0 => return Some(&text[..at]),
            b'}' => depth -= 1,
            _ => {}
        }
    }
    None
}

/// Returns the expected answer of a row.
///
/// # Errors
/// `InvalidArgument` if it is not a quantity, because then no response could be correct.
pub fn expected(text: &str) -> Result<Quantity> {
    Quantity::parse(text).ok_or_else(|| {
        let shown: String = text.chars().take(80).collect();
        Error::invalid(format!(
            "`expected_answer` of the row is not a quantity: `{shown}`; write `3/4`, `12 km` or `5%`"
        ))
    })
}

//! Eight kinds of calculations with exact results.

use num_rational::BigRational;
use serde_json::Value;

use super::{Draft, pick, tool};
use crate::math::arithmetic::{Shown, evaluate, show};

const SYSTEM: &str = "Solve the problem exactly; do not round. You may use the calculator. \
    Finish with the answer, with its unit if it has one, as \\boxed{answer}.";

pub(super) fn draw(random: &mut fastrand::Rng, kind: usize) -> Draft {
    let (question, expected) = match kind % 8 {
        0 => fractions(random),
        1 => nested(random),
        2 => share_of(random),
        3 => percentage(random),
        4 => conversion(random),
        5 => price(random),
        6 => speed(random),
        _ => scientific(random),
    };
    let parameter = ("expression", "string", "Numbers with + - * / ^ and brackets, such as (3/4 + 2) * 5.");
    let calculator = tool("calculator", "Evaluates an arithmetic expression exactly.", &[parameter]);
    Draft { system: SYSTEM, question, tools: vec![calculator], keys: vec![("expected_answer", Value::from(expected))] }
}

fn value(expression: &str) -> BigRational {
    evaluate(expression).expect("the generator writes expressions that have a value")
}

/// Draws a positive number with up to `places` decimal places.
fn decimal(random: &mut fastrand::Rng, most: u32, places: u32) -> String {
    let scale = 10_u32.pow(random.u32(0..=places));
    Shown(&value(&format!("{}/{scale}", random.u32(1..=most * scale)))).to_string()
}

fn fractions(random: &mut fastrand::Rng) -> (String, String) {
    let (a, b, c, d) = (random.u32(1..20), random.u32(2..13), random.u32(1..20), random.u32(2..13));
    let operator = pick(random, &['+', '-', '*', '/']);
    // `a/b / c/d` would be evaluated from left to right; brackets make the order explicit.
    let expression = format!("({a}/{b}) {operator} ({c}/{d})");
    (format!("Compute {expression}. Give a fraction in lowest terms or an exact decimal."), show(&value(&expression)))
}

fn nested(random: &mut fastrand::Rng) -> (String, String) {
    let mut n = || random.u32(2..60);
    let expression = format!("({} + {}) * {} - {} / {}", n(), n(), n(), n(), n());
    (format!("Compute {expression}. Give a fraction in lowest terms or an exact decimal."), show(&value(&expression)))
}

fn share_of(random: &mut fastrand::Rng) -> (String, String) {
    let (share, whole) = (decimal(random, 120, 1), random.u32(2..900) * 5);
    (format!("What is {share}% of {whole}?"), Shown(&value(&format!("{share} / 100 * {whole}"))).to_string())
}

fn percentage(random: &mut fastrand::Rng) -> (String, String) {
    let whole = pick(random, &[8, 16, 20, 25, 40, 50, 64, 80, 125, 200, 250, 400, 500, 640, 800]);
    let part = random.u32(1..=whole);
    let expected = Shown(&value(&format!("{part} / {whole} * 100"))).to_string();
    (format!("What percentage of {whole} is {part}? Answer with the % sign."), format!("{expected}%"))
}

fn conversion(random: &mut fastrand::Rng) -> (String, String) {
    let (from, to, factor) = pick(
        random,
        &[
            ("km", "m", "1000"),
            ("m", "cm", "100"),
            ("cm", "m", "1/100"),
            ("m", "km", "1/1000"),
            ("kg", "g", "1000"),
            ("g", "kg", "1/1000"),
            ("h", "min", "60"),
            ("min", "s", "60"),
            ("L", "mL", "1000"),
            ("mL", "L", "1/1000"),
        ],
    );
    let amount = decimal(random, 400, 2);
    let expected = Shown(&value(&format!("{amount} * ({factor})"))).to_string();
    (format!("Convert {amount} {from} to {to}."), format!("{expected} {to}"))
}

fn price(random: &mut fastrand::Rng) -> (String, String) {
    let item = pick(random, &["pens", "apples", "notebooks", "candles", "tickets", "batteries"]);
    let (cents, count) = (random.u32(15..900), random.u32(2..60));
    let question =
        format!("A shop sells {item} at ${}.{:02} each. How much do {count} {item} cost?", cents / 100, cents % 100);
    let total = cents * count;
    (question, format!("${}.{:02}", total / 100, total % 100))
}

fn speed(random: &mut fastrand::Rng) -> (String, String) {
    let vehicle = pick(random, &["train", "cyclist", "bus", "ferry", "drone"]);
    let (distance, hours) = (random.u32(5..600), pick(random, &["0.5", "1.25", "1.5", "2", "2.5", "3", "4", "7"]));
    let expected = show(&value(&format!("{distance} / {hours}")));
    let question = format!("A {vehicle} covers {distance} km in {hours} hours. What is its average speed in km/h?");
    (question, format!("{expected} km/h"))
}

fn scientific(random: &mut fastrand::Rng) -> (String, String) {
    let mut number = || format!("{}e{}", decimal(random, 9, 1), random.i32(-6..=9));
    let expression = format!("{} * {}", number(), number());
    let expected = show(&value(&expression));
    (format!("Compute {expression}. You may answer in scientific notation."), expected)
}

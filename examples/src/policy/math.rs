//! The script for word problems: converts the question to an expression, calls the calculator, and states the result.

use serde_json::json;

use super::conversation::Conversation;
use super::{Behaviour, Turn};

pub(super) fn play(conversation: &Conversation, behaviour: Behaviour, random: &mut fastrand::Rng) -> Turn {
    let Some(plan) = plan(conversation.question()) else { return Turn::say("I do not know how to solve this.") };
    let style = random.u32(0..4);
    if conversation.outputs().is_empty() {
        return match (behaviour, style) {
            (Behaviour::Right, _) => Turn::call("calculator", &json!({"expression": plan.expression})),
            (Behaviour::Wrong, 0) => Turn::say(format!("This needs no calculation. \\boxed{{42{}}}", plan.unit)),
            (Behaviour::Wrong, _) => {
                Turn::call("calculator", &json!({"expression": format!("{} + 1", plan.expression)}))
            }
            (Behaviour::Malformed, 0) => Turn::call("calculator", &json!({"expr": plan.expression})),
            (Behaviour::Malformed, 1) => Turn::Call { tool: "calculator", arguments: "{\"expression\": ".into() },
            (Behaviour::Malformed, 2) => Turn::call("compute", &json!({"expression": plan.expression})),
            (Behaviour::Malformed, _) => Turn::say("It is about what one would expect."),
        };
    }
    let reply = conversation.output(0);
    let Some(result) = reply["result"].as_str() else {
        return Turn::say("The calculator does not work, so I cannot tell.");
    };
    let shown = match (style, reply["decimal"].as_str(), result.split_once('/')) {
        (0 | 1, Some(decimal), _) => decimal.to_owned(),
        (2, _, Some((over, under))) => format!("\\frac{{{over}}}{{{under}}}"),
        _ => result.to_owned(),
    };
    let stated = match plan.unit {
        "$" => format!("\\${shown}"),
        "%" => format!("{shown}\\%"),
        "" => shown,
        unit => format!("{shown}\\text{{ {unit}}}"),
    };
    Turn::say(format!("The calculator says {result}. So the answer is \\boxed{{{stated}}}"))
}

struct Plan {
    expression: String,
    unit: &'static str,
}

/// Returns the expression of a question.
fn plan(question: &str) -> Option<Plan> {
    let plan = |expression: String, unit| Some(Plan { expression, unit });
    if let Some(rest) = question.strip_prefix("Compute ") {
        // A digit follows a decimal point, but not the end of the sentence.
        return plan(rest.split(". ").next()?.to_owned(), "");
    }
    if let Some(rest) = question.strip_prefix("What percentage of ") {
        let (whole, rest) = rest.split_once(" is ")?;
        return plan(format!("{} / {whole} * 100", rest.split('?').next()?), "%");
    }
    if let Some(rest) = question.strip_prefix("What is ") {
        let (share, whole) = rest.split_once("% of ")?;
        return plan(format!("{share} / 100 * {}", whole.strip_suffix('?')?), "");
    }
    if let Some(rest) = question.strip_prefix("Convert ") {
        let mut words = rest.strip_suffix('.')?.split(' ');
        let (amount, from, to) = (words.next()?, words.next()?, words.nth(1)?);
        let (unit, factor) =
            CONVERSIONS.iter().find(|(units, _)| *units == (from, to)).map(|(units, by)| (units.1, by))?;
        return plan(format!("{amount} {factor}"), unit);
    }
    if let Some((_, rest)) = question.split_once(" at $") {
        let (price, rest) = rest.split_once(" each. How much do ")?;
        return plan(format!("{price} * {}", rest.split(' ').next()?), "$");
    }
    let (_, rest) = question.split_once(" covers ")?;
    let (distance, rest) = rest.split_once(" km in ")?;
    plan(format!("{distance} / {}", rest.split(' ').next()?), "km/h")
}

const CONVERSIONS: [((&str, &str), &str); 10] = [
    (("km", "m"), "* 1000"),
    (("m", "km"), "/ 1000"),
    (("m", "cm"), "* 100"),
    (("cm", "m"), "/ 100"),
    (("kg", "g"), "* 1000"),
    (("g", "kg"), "/ 1000"),
    (("h", "min"), "* 60"),
    (("min", "s"), "* 60"),
    (("L", "mL"), "* 1000"),
    (("mL", "L"), "/ 1000"),
];

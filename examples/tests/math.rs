//! Tests the math environment: right, wrong, malformed and hostile answers.
#![allow(clippy::unwrap_used)] // Also in what the tests share, which the lint does not know for tests.

use gym_core::{CallContext, Code, ModelResponse, RawObject, ResourcesServer, SessionId, Verdict};
use gym_examples::math::answer::{Quantity, final_answer};
use gym_examples::math::{Math, Task};
use num_bigint::BigInt;
use num_rational::BigRational;
use proptest::prelude::*;
use serde_json::{Value, json};

async fn verify(expected: &str, text: &str) -> Verdict {
    let output = json!([{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}]);
    let response = ModelResponse(RawObject::from_value(&json!({"output": output})).unwrap());
    let task = Task { expected_answer: expected.into() };
    Math.verify(&CallContext::default(), &SessionId::new("s"), task, &response).await.unwrap()
}

async fn calculator(arguments: Value) -> (u16, Value) {
    let arguments = RawObject::from_value(&arguments).unwrap();
    let reply = Math.call_tool(&CallContext::default(), &SessionId::new("s"), "calculator", &arguments).await.unwrap();
    (reply.status.0, serde_json::from_slice(&reply.message.head.to_bytes()).unwrap())
}

#[tokio::test]
async fn right_answers_count_however_they_are_spelled() {
    for (expected, text) in [
        ("3/4", "\\boxed{0.75}"),
        ("3/4", "so \\boxed{\\frac{3}{4}}."),
        ("3/4", "$\\boxed{\\dfrac{6}{8}}$"),
        ("3/4", "The answer is 75%."),
        ("3/4", "\\boxed{75\\%}"),
        ("3/4", "\\boxed{\\frac34}"),
        ("3/2", "Answer: 1 1/2"),
        ("3/2", "\\boxed{1\\frac{1}{2}}"),
        ("-3/4", "\\boxed{-\\frac{3}{4}}"),
        ("-3/4", "\\boxed{\\frac{-3}{4}}"),
        ("1234567", "The final answer is 1,234,567."),
        ("1234567", "\\boxed{1{,}234{,}567}"),
        ("120000", "\\boxed{1.2 \\times 10^{5}}"),
        ("120000", "Answer: 1.2e5"),
        ("0.00012", "Answer: 1.2×10^-4"),
        ("1000", "10^3"),
        ("2.5 km", "\\boxed{2.5\\text{ km}}"),
        ("2.5 km", "\\boxed{2500\\,\\mathrm{m}}"),
        ("2.5 km", "The answer is 2500 meters, because 1 km is 1000 m."),
        ("2.5 km", "\\boxed{2.5}"),
        ("90 km/h", "**Answer:** 25 m/s"),
        ("$17.50", "The answer is $17.50."),
        ("$17.50", "\\boxed{\\$17.5}"),
        ("$17.50", "\\boxed{1750 cents}"),
        ("12 m^2", "\\boxed{12\\ \\text{m}^2}"),
        ("5", "2 + 3 = 5"),
        ("5", "x = 4\n\nx = 5"),
        ("5", "Wait, \\boxed{4} is wrong. \\boxed{5}"),
        ("5", "#### 5"),
        ("5", "$5$"),
        ("−5", "\\boxed{-5}"),
    ] {
        let verdict = verify(expected, text).await;
        assert_eq!(verdict.reward, 1.0, "{expected} against {text}: {:?}", verdict.fields);
    }
}

#[tokio::test]
async fn wrong_and_malformed_answers_get_nothing() {
    for (expected, text) in [
        ("3/4", "\\boxed{0.7500001}"),
        ("1/3", "\\boxed{0.333333}"),
        ("50%", "\\boxed{50}"),
        ("5", "\\boxed{5 km}"),
        ("2.5 km", "\\boxed{2.5 kg}"),
        ("2.5 km", "\\boxed{2.5 m}"),
        ("5", "\\boxed{5"),
        ("5", "\\boxed{}"),
        ("5", "\\boxed{2+3}"),
        ("5", "\\boxed{5 or 6}"),
        ("5", "\\boxed{five}"),
        ("5", "\\boxed{5/0}"),
        ("15", "\\boxed{1,5}"),
        ("5", "I am not sure, perhaps 5 or 6"),
        ("5", "5 is what I thought at first"),
        ("5", ""),
        ("5", "answer:"),
        ("5", "The answer is 4. Or 5."),
    ] {
        assert_eq!(verify(expected, text).await.reward, 0.0, "{expected} against {text}");
    }
    let empty = ModelResponse(RawObject::parse(r#"{"output":[]}"#).unwrap());
    let task = Task { expected_answer: "5".into() };
    let verdict = Math.verify(&CallContext::default(), &SessionId::new("s"), task, &empty).await.unwrap();
    assert_eq!((verdict.reward, &verdict.fields[0].1), (0.0, &Value::Null));
}

#[tokio::test]
async fn hostile_answers_cost_nothing_and_get_nothing() {
    for text in [
        "\\boxed{9^9^9^9}".to_owned(),
        "\\boxed{1e1000000000}".to_owned(),
        "\\boxed{10^{1000000000}}".to_owned(),
        "\\boxed{1e-99999999999999999999}".to_owned(),
        format!("\\boxed{{{}}}", "9".repeat(1 << 20)),
        "\\boxed{".repeat(150_000),
        "{".repeat(1 << 20),
        "answer is ".repeat(100_000),
        "é".repeat(1 << 19),
        " {".repeat(1 << 19),
        "\u{0}\u{7f}\u{202e}\\boxed{\u{0}5}".to_owned(),
    ] {
        assert_eq!(verify("5", &text).await.reward, 0.0, "{:.40}", text);
    }
    let padded = format!("{}\\boxed{{5}}", "blah é ".repeat(150_000));
    assert_eq!(verify("5", &padded).await.reward, 1.0);
}

#[tokio::test]
async fn a_row_that_expects_nonsense_is_an_error_that_names_the_key() {
    let response = ModelResponse(RawObject::parse(r#"{"output":[]}"#).unwrap());
    let task = Task { expected_answer: "soon".into() };
    let error = Math.verify(&CallContext::default(), &SessionId::new("s"), task, &response).await.unwrap_err();
    assert!(error.code() == Code::InvalidArgument && error.message().contains("`expected_answer`"), "{error}");
}

#[tokio::test]
async fn the_calculator_answers_refuses_and_explains() {
    assert_eq!(calculator(json!({"expression": "3/4+5/6"})).await, (200, json!({"result": "19/12", "decimal": null})));
    assert_eq!(calculator(json!({"expression": "0.1+0.2"})).await, (200, json!({"result": "3/10", "decimal": "0.3"})));
    assert_eq!(calculator(json!({"expression": "1/0"})).await, (200, json!({"error": "division by zero"})));
    assert!(calculator(json!({"expression": "9^9^9^9"})).await.1["error"].is_string());
    assert!(calculator(json!({"expression": "x".repeat(1 << 20)})).await.1["error"].is_string());
    assert_eq!(calculator(json!({"expression": 5})).await.0, 422);
    assert_eq!(calculator(json!({})).await.0, 422);
    let error = Math
        .call_tool(&CallContext::default(), &SessionId::new("s"), "calculater", &RawObject::empty())
        .await
        .unwrap_err();
    assert_eq!(error.code(), Code::NotFound);
}

/// Returns spellings of a/b.
fn spellings(over: i64, under: i64) -> Vec<String> {
    let scaled = BigInt::from(over) * 7;
    let mut all = vec![
        format!("{over}/{under}"),
        format!("({over}/{under})"),
        format!("{scaled} / {}", under * 7),
        format!("\\frac{{{over}}}{{{under}}}"),
        format!("$\\dfrac{{{}}}{{{}}}$", -over, -under),
        format!("x = {over}/{under}."),
        format!("**{over}/{under}**"),
        format!("\\frac{{{}}}{{{under}}}\\%", over * 100),
    ];
    all.extend((over >= 0).then(|| format!("{} {}/{under}", over / under, over % under)));
    // A fraction is a finite decimal if its denominator has only the factors 2 and 5.
    let value = BigRational::new(over.into(), under.into());
    all.extend(gym_examples::math::arithmetic::show_decimal(&value, 12).into_iter().flat_map(|decimal| {
        let percent = gym_examples::math::arithmetic::show_decimal(&(&value * BigInt::from(100)), 12);
        let shifted = gym_examples::math::arithmetic::show_decimal(&(&value / BigInt::from(1_000)), 15);
        [
            Some(format!("{decimal}e0")),
            percent.map(|percent| format!("{percent}%")),
            shifted.clone().map(|shifted| format!("{shifted}e3")),
            shifted.map(|shifted| format!("{shifted} \\times 10^{{3}}")),
            Some(decimal),
        ]
        .into_iter()
        .flatten()
        .collect::<Vec<_>>()
    }));
    all
}

fn with_commas(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

proptest! {
    #[test]
    fn every_spelling_of_a_fraction_is_that_fraction(over in -100_000_i64..100_000, under in prop_oneof![1_i64..2_000, Just(8), Just(625)]) {
        let expected = Quantity::parse(&format!("{over}/{under}")).unwrap();
        for spelling in spellings(over, under) {
            let given = Quantity::parse(&spelling);
            prop_assert!(given.as_ref().is_some_and(|given| expected.equals(given)), "{spelling}: {given:?}");
            let boxed = format!("thus \\boxed{{{spelling}}}");
            prop_assert_eq!(final_answer(&boxed), Some(spelling.as_str()));
        }
    }

    #[test]
    fn different_numbers_are_different_in_every_spelling(
        (a, b) in (-500_i64..500, 1_i64..500), (c, d) in (-500_i64..500, 1_i64..500),
    ) {
        prop_assume!(a * d != c * b);
        let expected = Quantity::parse(&format!("{a}/{b}")).unwrap();
        for spelling in spellings(c, d) {
            let given = Quantity::parse(&spelling).unwrap();
            prop_assert!(!expected.equals(&given), "{a}/{b} against {spelling}");
        }
    }

    #[test]
    fn commas_and_units_do_not_change_a_number(number in 0_u64..u64::MAX / 2_000) {
        let expected = Quantity::parse(&format!("{number} km")).unwrap();
        for spelling in [
            format!("{} km", with_commas(number)),
            format!("{}\\text{{ m}}", with_commas(number * 1_000)),
            format!("{number}000 Meters"),
            with_commas(number),
        ] {
            let given = Quantity::parse(&spelling);
            prop_assert!(given.is_some_and(|given| expected.equals(&given)), "{}", spelling);
        }
        let next = format!("{} km", number + 1);
        prop_assert!(!expected.equals(&Quantity::parse(&next).unwrap()));
    }

    #[test]
    fn no_text_makes_the_reader_panic(text in any::<String>(), latex in "[\\\\a-z0-9{}^$%.,/ +-]{0,80}") {
        for text in [text, latex] {
            if let Some(answer) = final_answer(&text) {
                let _ = Quantity::parse(answer);
            }
            let _ = (Quantity::parse(&text), gym_examples::math::arithmetic::evaluate(&text));
        }
    }
}

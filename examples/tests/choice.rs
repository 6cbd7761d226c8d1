//! Tests multiple choice: right, wrong, ambiguous, malformed and hostile answers.
#![allow(clippy::unwrap_used)] // Also in what the tests share, which the lint does not know for tests.

use std::collections::BTreeMap;

use gym_core::{CallContext, Code, ModelResponse, RawObject, ResourcesServer, SessionId, Verdict};
use gym_examples::choice::{Choice, Chosen, Task, chosen};
use proptest::prelude::*;
use serde_json::{Value, json};

fn options() -> BTreeMap<char, String> {
    [('A', "Monday"), ('B', "Tuesday"), ('C', "a Friday"), ('D', "13")]
        .map(|(letter, text)| (letter, text.into()))
        .into()
}

async fn verify(answer: char, text: &str) -> Verdict {
    let output = json!([{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}]);
    let response = ModelResponse(RawObject::from_value(&json!({"output": output})).unwrap());
    let task = Task { options: options(), answer };
    Choice.verify(&CallContext::default(), &SessionId::new("s"), task, &response).await.unwrap()
}

#[tokio::test]
async fn the_letter_is_found_however_it_is_stated() {
    for text in [
        "C",
        "(C)",
        "C.",
        "C)",
        "**C**",
        "**C.**",
        "C) a Friday",
        "**(C)** a Friday.",
        "Answer: (C)",
        "Answer: C",
        "answer: c",
        "**Answer:** C",
        "**Answer**: **C**",
        "The answer is C.",
        "The answer is **C**, because A and B are too early.",
        "The correct answer is option C because it is last.",
        "The answer is (c).",
        "Final answer: $\\boxed{C}$",
        "\\boxed{C}",
        "\\boxed{\\text{C}}",
        "\\boxed{\\mathrm{(C)}}",
        "\\boxed{C. a Friday}",
        "A is wrong and B is wrong.\n\nC",
        "It cannot be A. Hence \\boxed{C}. Yes, \\boxed{C}!",
        "The answer is a Friday.",
        "After some thought:\na Friday",
        "The answer is: `C`",
        "The answer is C. A and B are too early.",
    ] {
        let verdict = verify('C', text).await;
        assert_eq!(verdict.reward, 1.0, "{text}: {:?}", verdict.fields);
        assert_eq!(verify('B', text).await.reward, 0.0, "{text}");
    }
    assert_eq!(verify('A', "Answer: A").await.reward, 1.0);
    assert_eq!(verify('D', "The answer is 13.").await.reward, 1.0);
}

#[tokio::test]
async fn naming_several_letters_is_refused() {
    for text in [
        "Answer: C or D",
        "Answer: C, D",
        "Answer: (C) and (D)",
        "Answer: C/D",
        "Answer: C, or D",
        "Answer: C. D.",
        "Answer: C. Or D.",
        "C) D)",
        "\\boxed{C} or \\boxed{D}",
        "\\boxed{C, D}",
        "Answer: A\nAnswer: B\nAnswer: C\nAnswer: D",
        "The answer is B. No, the answer is C.",
    ] {
        let verdict = verify('C', text).await;
        assert_eq!((verdict.reward, &verdict.fields[1]), (0.0, &("ambiguous", Value::Bool(true))), "{text}");
    }
}

#[tokio::test]
async fn what_chooses_nothing_gets_nothing() {
    for text in [
        "",
        "A prime number has two divisors",
        "The answer is a word.",
        "Answer: A prime number has two divisors",
        "Answer: E",
        "Answer:",
        "answer is",
        "\\boxed{}",
        "\\boxed{A",
        "\\boxed{E}",
        "\\boxed{Apple}",
        "I choose the first",
        "A: that would be too early, but who knows",
        "ABCD",
    ] {
        let verdict = verify('A', text).await;
        assert_eq!((verdict.reward, &verdict.fields[0].1), (0.0, &Value::Null), "{text}");
    }
}

#[tokio::test]
async fn hostile_answers_cost_nothing() {
    for text in [
        "\\boxed{".repeat(150_000),
        "answer is ".repeat(100_000),
        "A ".repeat(1 << 19),
        "é".repeat(1 << 19),
        "{".repeat(1 << 20),
        "\\boxed{A}\\boxed{B}".repeat(50_000),
        "\u{0}\u{202e}A".to_owned(),
    ] {
        assert_eq!(verify('A', &text).await.reward, 0.0, "{text:.40}");
    }
    let padded = format!("{}\nAnswer: (A)", "blah é ".repeat(150_000));
    assert_eq!(verify('A', &padded).await.reward, 1.0);
}

#[tokio::test]
async fn a_row_whose_answer_is_no_option_is_an_error_that_names_the_key() {
    let response = ModelResponse(RawObject::parse(r#"{"output":[]}"#).unwrap());
    let task = Task { options: options(), answer: 'E' };
    let error = Choice.verify(&CallContext::default(), &SessionId::new("s"), task, &response).await.unwrap_err();
    assert!(error.code() == Code::InvalidArgument && error.message().contains("`answer` of the row is `E`"), "{error}");
}

proptest! {
    #[test]
    fn any_form_around_any_letter_chooses_that_letter(
        index in 0_usize..4,
        form in prop::sample::select(vec!["{}", "({})", "**{}**", "Answer: {}", "Answer: ({})", "the answer is {}.", "\\boxed{{}}", "Answer: \\boxed{\\text{{}}}"]),
        before in prop::sample::select(vec!["", "Let me see.\n", "A, B, C and D are days.\n", "{\n"]),
    ) {
        let letter = ['A', 'B', 'C', 'D'][index];
        let text = format!("{before}{}", form.replace("{}", &letter.to_string()));
        // The replacement removes the inner braces of `\boxed{{}}`.
        prop_assert_eq!(chosen(&text, &options()), Chosen::One(letter), "{}", text);
    }

    #[test]
    fn no_text_makes_the_reader_panic(text in any::<String>(), marked in "[A-Ea-e(){}*\\\\.:, $]{0,40}", lead in "(answer|\\\\boxed\\{|answer is)?") {
        let _ = (chosen(&text, &options()), chosen(&format!("{lead}{marked}"), &options()));
    }
}

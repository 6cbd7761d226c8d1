//! Groups failed attempts by their cause, in bounded memory.

use gym_core::base::ErrorLink;
use gym_core::message::shorten;
use gym_core::rollout::{Attempt, FailureClass};

use crate::collect::run::failure::AttemptFailure;

/// Causes that are kept apart; a person reads no more. Attempts with further causes are only counted.
const CAUSES_MAX: usize = 32;
/// Characters of a cause that distinguish it from others.
const SIGNATURE_CHARS_MAX: usize = 1_000;
/// Characters of a word that distinguish it from others.
const WORD_CHARS_MAX: usize = 64;
/// Characters of each text of an example, and the number of its texts: enough for a traceback and for all calls of an episode.
const EXAMPLE_CHARS_MAX: usize = 4_000;
const LINKS_MAX: usize = 16;
/// A quoted text that is longer is data, such as an answer of a model, not the name of something.
const QUOTED_CHARS_MAX: usize = 24;

/// Failed attempts with the same cause.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FailureCause {
    /// The class of the failures.
    pub class: FailureClass,
    /// The innermost server whose call failed.
    pub server: String,
    /// The route of that call.
    pub route: String,
    /// Number of attempts.
    pub count: u64,
    /// The first attempt that failed in this way.
    pub example: Attempt,
    /// The place of its row in the input, such as `tasks.jsonl, line 2`; `None` if the rows come from no file.
    pub input: Option<String>,
    /// The causes of the example, outermost first.
    pub causes: Vec<ErrorLink>,
}

/// The causes of the failed attempts, in the order in which they first occurred.
#[derive(Debug, Default)]
pub(super) struct FailureCauses {
    causes: Vec<(String, FailureCause)>,
    other: u64,
}

impl FailureCauses {
    /// `input` is the place of the attempt's row.
    pub(super) fn add(&mut self, attempt: Attempt, failure: &AttemptFailure, input: Option<String>) {
        let signature = signature(failure);
        let same = |(known, cause): &&mut (String, FailureCause)| {
            cause.class == failure.class
                && cause.server == failure.server
                && cause.route == failure.route
                && *known == signature
        };
        if let Some((_, cause)) = self.causes.iter_mut().find(same) {
            cause.count += 1;
        } else if self.causes.len() < CAUSES_MAX {
            let AttemptFailure { class, server, route, causes } = failure;
            let mut causes: Vec<ErrorLink> = causes.iter().take(LINKS_MAX).cloned().collect();
            for ErrorLink { subject, message } in &mut causes {
                shorten(subject, EXAMPLE_CHARS_MAX);
                shorten(message, EXAMPLE_CHARS_MAX);
            }
            let (class, server, route) = (*class, server.clone(), route.clone());
            let cause = FailureCause { class, server, route, count: 1, example: attempt, input, causes };
            self.causes.push((signature, cause));
        } else {
            self.other += 1;
        }
    }

    pub(super) fn list(&self) -> Vec<FailureCause> {
        self.causes.iter().map(|(_, cause)| cause.clone()).collect()
    }

    /// Returns the number of attempts whose cause is not listed.
    pub(super) fn other(&self) -> u64 {
        self.other
    }

    /// Returns `true` if all failures have one cause.
    pub(super) fn alike(&self) -> bool {
        self.causes.len() == 1 && self.other == 0
    }
}

fn signature(failure: &AttemptFailure) -> String {
    let mut text = String::new();
    for (at, ErrorLink { subject, message }) in failure.own_causes().enumerate() {
        // The first one begins with the call, whose server and route are compared apart.
        normalize(if at == 0 { "" } else { subject }, &mut text);
        normalize(message, &mut text);
    }
    text
}

/// Appends a text in which numbers, identifiers and long quotations are replaced, so that the same error about another row is equal.
fn normalize(text: &str, into: &mut String) {
    let mut rest = text;
    into.push(' ');
    while let Some(first) = rest.chars().next().filter(|_| into.len() < SIGNATURE_CHARS_MAX) {
        let quoted = matches!(first, '"' | '`').then(|| rest[1..].find(first)).flatten();
        if let Some(length) = quoted.filter(|length| *length > QUOTED_CHARS_MAX) {
            into.push('…');
            rest = &rest[length + 2..];
        } else if in_word(first) {
            let (head, tail) = rest.split_at(word_end(rest));
            if head.contains(|c: char| c.is_numeric()) {
                into.push('#');
            } else {
                into.extend(head.chars().take(WORD_CHARS_MAX));
            }
            rest = tail;
        } else {
            into.push(first);
            rest = &rest[first.len_utf8()..];
        }
    }
}

fn in_word(c: char) -> bool {
    c.is_alphanumeric() || matches!(c, '_' | '-')
}

/// Returns the length of the word with which the text begins; `1.5s` is one word, and `input.0` is two.
fn word_end(text: &str) -> usize {
    let mut chars = text.char_indices().peekable();
    let mut before = None;
    while let Some((at, c)) = chars.next() {
        let digit = |c: Option<char>| c.is_some_and(char::is_numeric);
        let point = c == '.' && digit(before) && digit(chars.peek().map(|(_, c)| *c));
        if !point && !in_word(c) {
            return at;
        }
        before = Some(c);
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use gym_core::rollout::TaskKey;
    use proptest::prelude::*;

    use super::*;

    fn normalized(text: &str) -> String {
        let mut normalized = String::new();
        normalize(text, &mut normalized);
        normalized
    }

    fn failure(message: &str) -> AttemptFailure {
        let link =
            |subject: &str, message: &str| ErrorLink { subject: subject.to_owned(), message: message.to_owned() };
        AttemptFailure {
            class: FailureClass::ToolError,
            server: "bank".to_owned(),
            route: "/transfer".to_owned(),
            causes: vec![link("POST bank/transfer", ""), link("query the bank", message)],
        }
    }

    fn attempt(task: u32) -> Attempt {
        Attempt { key: TaskKey::new(task, 0), number: 0 }
    }

    #[test]
    fn the_same_cause_with_other_numbers_and_identifiers_is_one() {
        for (one, other) in [
            ("connect to 10.0.0.7:7011: refused (os error 111)", "connect to 10.0.0.12:80: refused (os error 5)"),
            (
                "session 3f2504e0-4f89-11d3-9a0c-0305e82c3301 is gone",
                "session 9a0c04e0-4f89-41d3-9aab-eeee82c3301f is gone",
            ),
            ("task17 failed after 1.5s", "task4 failed after 30s"),
            (
                r#"not a number: "the answer is probably forty-two""#,
                r#"not a number: "I cannot tell what the answer is""#,
            ),
        ] {
            assert_eq!(normalized(one), normalized(other));
        }
        for (one, other) in [("no key `a`", "no key `b`"), ("refused", "reset"), (r#"key "a" x"#, r#"key "b" x"#)] {
            assert_ne!(normalized(one), normalized(other));
        }
    }

    #[test]
    fn causes_beyond_the_bound_are_counted() {
        let mut causes = FailureCauses::default();
        for task in 0..100 {
            // No digits, so that each is a cause of its own.
            let letters = [task / 10, task % 10].map(|digit| char::from_u32('a' as u32 + digit).unwrap());
            causes.add(attempt(task), &failure(&String::from_iter(letters)), None);
        }
        causes.add(attempt(100), &failure("aa"), None);
        assert_eq!((causes.list().len(), causes.other()), (CAUSES_MAX, 100 - CAUSES_MAX as u64));
        let first = &causes.list()[0];
        assert_eq!((first.count, first.example), (2, attempt(0)));
        assert!(!causes.alike());
    }

    proptest! {
        #[test]
        fn numbers_never_distinguish_causes(parts in proptest::collection::vec("[a-z :,.]{0,12}", 1..8), numbers in any::<[u64; 8]>()) {
            let text = |numbers: &[u64]| {
                parts.iter().zip(numbers).map(|(part, number)| format!("{part} {number} ")).collect::<String>()
            };
            prop_assert_eq!(normalized(&text(&numbers)), normalized(&text(&[0; 8])));
        }

        #[test]
        fn any_text_has_a_bounded_signature(text in "\\PC{0,400}", repeat in 1..20_usize) {
            prop_assert!(normalized(&text.repeat(repeat)).len() <= SIGNATURE_CHARS_MAX + 4 * WORD_CHARS_MAX);
        }
    }
}

//! The script for multiple choice: finds the right option, and states its letter in one of several forms.

use num_rational::BigRational;

use super::conversation::Conversation;
use super::{Behaviour, Turn};
use crate::math::arithmetic::evaluate;

pub(super) fn play(conversation: &Conversation, behaviour: Behaviour, random: &mut fastrand::Rng) -> Turn {
    let question = conversation.question();
    let options: Vec<(char, &str)> = question
        .lines()
        .filter_map(|line| line.split_once(") "))
        .filter_map(|(letter, text)| letter.parse().ok().map(|letter| (letter, text)))
        .collect();
    let right = question.lines().next().and_then(|sentence| solve(sentence, &options));
    let Some(right) = right else { return Turn::say("I do not know what to choose.") };
    let others: Vec<char> = options.iter().map(|(letter, _)| *letter).filter(|letter| *letter != right).collect();
    let style = random.u32(0..4);
    let letter = match behaviour {
        Behaviour::Wrong | Behaviour::Malformed if !others.is_empty() => others[random.usize(..others.len())],
        _ => right,
    };
    Turn::say(match (behaviour, style) {
        (Behaviour::Malformed, 0) => format!("Answer: {right} or {letter}"),
        (Behaviour::Malformed, 1) => "All of them have something to be said for them.".to_owned(),
        (Behaviour::Malformed, 2) => format!("\\boxed{{{right}}} \\boxed{{{letter}}}"),
        (Behaviour::Malformed, _) => String::new(),
        (_, 0) => format!("Answer: {letter}"),
        (_, 1) => format!("I compared the options.\n\n**Answer: ({letter})**"),
        (_, 2) => format!("The right option is \\boxed{{{letter}}}."),
        _ => format!("{letter}."),
    })
}

/// Returns the letter of the right option.
fn solve(sentence: &str, options: &[(char, &str)]) -> Option<char> {
    let letter_where =
        |holds: &dyn Fn(&str) -> bool| options.iter().find(|(_, text)| holds(text)).map(|(letter, _)| *letter);
    if sentence.contains("largest") {
        let values: Option<Vec<(BigRational, char)>> = options
            .iter()
            .map(|(letter, text)| evaluate(&text.replace('%', "/100")).ok().map(|value| (value, *letter)))
            .collect();
        return values?.into_iter().max().map(|(_, letter)| letter);
    }
    if sentence.contains("is prime") {
        let prime = |n: u32| {
            n > 1 && (2..n).take_while(|divisor| divisor * divisor <= n).all(|divisor| !n.is_multiple_of(divisor))
        };
        return letter_where(&|text| text.parse().is_ok_and(prime));
    }
    if sentence.contains("alphabetical order") {
        return options.iter().min_by_key(|(_, text)| *text).map(|(letter, _)| *letter);
    }
    if let Some(rest) = sentence.strip_prefix("Today is ") {
        const DAYS: [&str; 7] = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];
        let (today, rest) = rest.split_once(". Which day is it in ")?;
        let days: usize = rest.split(' ').next()?.parse().ok()?;
        let day = DAYS[(DAYS.iter().position(|day| *day == today)? + days % 7) % 7];
        return letter_where(&|text| text == day);
    }
    let length: usize = sentence.strip_prefix("Which of these words has exactly ")?.split(' ').next()?.parse().ok()?;
    letter_where(&|text| text.len() == length)
}

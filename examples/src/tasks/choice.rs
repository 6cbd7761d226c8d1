//! Five kinds of questions with four options, permuted.

use num_rational::BigRational;
use serde_json::{Map, Value, json};

use super::{Draft, pick};
use crate::math::arithmetic::evaluate;

const SYSTEM: &str = "Choose the one right option. Finish with `Answer: X`, where X is its letter.";
const DAYS: [&str; 7] = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];
const WORDS: [&str; 60] = [
    "acorn", "amber", "anchor", "apricot", "arch", "autumn", "badger", "basil", "beacon", "birch", "blanket", "bridge",
    "candle", "canyon", "carpet", "cedar", "cherry", "cliff", "copper", "cotton", "crane", "dagger", "daisy", "delta",
    "desert", "dolphin", "eagle", "ember", "engine", "falcon", "feather", "fern", "flute", "forest", "galaxy",
    "garden", "glacier", "granite", "hammer", "harbor", "hazel", "helmet", "island", "ivory", "jasmine", "kettle",
    "lantern", "maple", "marble", "meadow", "mountain", "nettle", "oasis", "orchard", "pepper", "pine", "quartz",
    "river", "saddle", "umbrella",
];

pub(super) fn draw(random: &mut fastrand::Rng, kind: usize) -> Draft {
    let (question, right, wrong) = match kind % 5 {
        0 => largest(random),
        1 => prime(random),
        2 => alphabetical(random),
        3 => weekday(random),
        _ => letters(random),
    };
    let mut texts = [right.clone(), wrong[0].clone(), wrong[1].clone(), wrong[2].clone()];
    random.shuffle(&mut texts);
    let options: Map<String, Value> = ('A'..='D').map(String::from).zip(texts.iter().map(|text| json!(text))).collect();
    let lines: String = ('A'..='D').zip(&texts).map(|(letter, text)| format!("\n{letter}) {text}")).collect();
    let answer = ('A'..='D').zip(&texts).find(|(_, text)| **text == right).map(|(letter, _)| letter.to_string());
    Draft {
        system: SYSTEM,
        question: format!("{question}\n{lines}"),
        tools: Vec::new(),
        keys: vec![("options", Value::from(options)), ("answer", json!(answer))],
    }
}

type Question = (String, String, [String; 3]);

fn largest(random: &mut fastrand::Rng) -> Question {
    let mut numbers: Vec<(BigRational, String)> = Vec::new();
    while numbers.len() < 4 {
        let text = match random.u32(0..3) {
            0 => format!("{}/{}", random.u32(1..40), random.u32(2..20)),
            1 => format!("{}.{}", random.u32(0..4), random.u32(1..100)),
            _ => format!("{}%", random.u32(5..400)),
        };
        let value = evaluate(&text.replace('%', "/100")).expect("the generator writes numbers");
        if numbers.iter().all(|(known, _)| *known != value) {
            numbers.push((value, text));
        }
    }
    numbers.sort();
    let mut texts = numbers.into_iter().map(|(_, text)| text);
    let wrong = std::array::from_fn(|_| texts.next().unwrap_or_default());
    ("Which of these numbers is the largest?".into(), texts.next().unwrap_or_default(), wrong)
}

fn is_prime(number: u32) -> bool {
    number > 1
        && (2..number).take_while(|divisor| divisor * divisor <= number).all(|divisor| !number.is_multiple_of(divisor))
}

fn prime(random: &mut fastrand::Rng) -> Question {
    let mut odd = |prime: bool, not: &[String]| loop {
        let number = random.u32(10..150) * 2 + 1;
        if is_prime(number) == prime && !not.contains(&number.to_string()) {
            return number.to_string();
        }
    };
    let right = odd(true, &[]);
    let mut wrong: Vec<String> = Vec::new();
    for _ in 0..3 {
        wrong.push(odd(false, &wrong));
    }
    ("Which of these numbers is prime?".into(), right, std::array::from_fn(|at| wrong[at].clone()))
}

fn alphabetical(random: &mut fastrand::Rng) -> Question {
    let mut words = random.choose_multiple(WORDS, 4);
    words.sort_unstable();
    let wrong = std::array::from_fn(|at| words[at + 1].to_owned());
    ("Which of these words comes first in alphabetical order?".into(), words[0].to_owned(), wrong)
}

fn weekday(random: &mut fastrand::Rng) -> Question {
    let (today, days) = (random.usize(..7), random.usize(2..100));
    let right = (today + days) % 7;
    let mut others: Vec<usize> = (0..7).filter(|day| *day != right).collect();
    random.shuffle(&mut others);
    let question = format!("Today is {}. Which day is it in {days} days?", DAYS[today]);
    (question, DAYS[right].to_owned(), std::array::from_fn(|at| DAYS[others[at]].to_owned()))
}

fn letters(random: &mut fastrand::Rng) -> Question {
    let right = pick(random, &WORDS);
    let mut others: Vec<&str> = WORDS.into_iter().filter(|word| word.len() != right.len()).collect();
    random.shuffle(&mut others);
    let question = format!("Which of these words has exactly {} letters?", right.len());
    (question, right.to_owned(), std::array::from_fn(|at| others[at].to_owned()))
}

//! Finds the option that a text chooses.

use std::collections::{BTreeMap, BTreeSet};

/// Bytes at the end of a text that are searched.
const TAIL_BYTES: usize = 8 << 10;

/// The choice of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chosen {
    /// One option.
    One(char),
    /// More than one option.
    Several,
    /// No option, or none that can be identified.
    None,
}

/// Returns the option that a text chooses. The strongest form in the text counts: all `\boxed{…}`; otherwise all statements
/// (`answer: C`, `the answer is (C)`); otherwise the last line, if it has only a letter or an option's words.
#[must_use]
pub fn chosen(text: &str, options: &BTreeMap<char, String>) -> Chosen {
    let from = text.len().saturating_sub(TAIL_BYTES);
    let from = (from..=text.len()).find(|at| text.is_char_boundary(*at)).unwrap_or(text.len());
    let tail = text[from..].trim();
    for forms in [boxed(tail), stated(tail)] {
        if !forms.is_empty() {
            return forms.iter().map(|form| read(form, options)).reduce(both).unwrap_or(Chosen::None);
        }
    }
    // Without a statement, prose that begins with a letter is not an answer.
    let line = tail.lines().next_back().unwrap_or_default();
    match read(line, options) {
        Chosen::One(_) if !is_bare(line, options) => Chosen::None,
        chosen => chosen,
    }
}

/// Combines two statements, which choose an option only if both choose the same one.
fn both(left: Chosen, right: Chosen) -> Chosen {
    if left == right { left } else { Chosen::Several }
}

/// Returns the contents of the boxes.
fn boxed(text: &str) -> Vec<&str> {
    let starts = text.match_indices("\\boxed{").map(|(at, opening)| at + opening.len());
    starts.map(|at| closed(&text[at..])).collect()
}

/// Returns the text before the closing brace, or `None` if there is none.
fn closed(text: &str) -> &str {
    let mut depth = 0_usize;
    for (at, byte) in text.bytes().enumerate().take(256) {
        match byte {
            b'{' => depth += 1,
            b'}' if depth == 0 => return &text[..at],
            b'}' => depth -= 1,
            _ => {}
        }
    }
    ""
}

/// Returns the rest of the line after each `answer is` or `answer:`.
fn stated(text: &str) -> Vec<&str> {
    let lower = text.to_ascii_lowercase();
    let mut found = Vec::new();
    for words in ["answer is", "answer:", "answer**:", "choice is", "choice:"] {
        for (at, words) in lower.match_indices(words) {
            found.push(text[at + words.len()..].lines().next().unwrap_or_default());
        }
    }
    found
}

/// Returns the choice of a short text: a letter, alone or before its option's words or a reason, or the words alone.
fn read(text: &str, options: &BTreeMap<char, String>) -> Chosen {
    let text = plain(text);
    let by_words: BTreeSet<char> = options
        .iter()
        .filter(|(_, words)| text.trim_end_matches('.').eq_ignore_ascii_case(words.trim()))
        .map(|(letter, _)| *letter)
        .collect();
    match (by_words.len(), by_words.first()) {
        (1, Some(letter)) => return Chosen::One(*letter),
        (0, _) => {}
        _ => return Chosen::Several,
    }
    let Some((letter, after)) = letter_at(&text, options) else { return Chosen::None };
    if further_letter(after, letter, options) {
        return Chosen::Several;
    }
    let lower_case = text.trim_start_matches('(').starts_with(|first: char| first.is_ascii_lowercase());
    let rest = after.trim_start_matches(TRAILING).trim();
    let own_words = rest.trim_end_matches('.').eq_ignore_ascii_case(options[&letter].trim());
    // `A prime number has …` and `the answer is a word` begin with an article, not with an option.
    let punctuated = after.is_empty() || after.starts_with(|next: char| !next.is_alphanumeric() && next != ' ');
    let reasoned = ["because", "since", "as "].iter().any(|word| rest.starts_with(word));
    let ends = rest.is_empty();
    if ends || own_words || (!lower_case && (punctuated || reasoned)) { Chosen::One(letter) } else { Chosen::None }
}

/// Returns `true` for a character that may separate a letter from the text after it.
const TRAILING: [char; 8] = [')', '.', ':', ',', ';', '-', ' ', '!'];

/// Returns `true` if a line has only a letter, with or without its option's words, or the words alone.
fn is_bare(line: &str, options: &BTreeMap<char, String>) -> bool {
    let line = plain(line);
    let is = |text: &str, words: &str| text.trim_end_matches('.').eq_ignore_ascii_case(words.trim());
    options.values().any(|words| is(&line, words))
        || letter_at(&line, options).is_some_and(|(letter, after)| {
            let rest = after.trim_start_matches(TRAILING);
            rest.is_empty() || is(rest, &options[&letter])
        })
}

/// Returns the option whose letter is at the start, and the text after it.
fn letter_at<'a>(text: &'a str, options: &BTreeMap<char, String>) -> Option<(char, &'a str)> {
    let text = text.trim_start_matches(['(', '[', ' ']);
    let first = text.chars().next()?;
    let after = &text[first.len_utf8()..];
    let letter = first.to_ascii_uppercase();
    let stands_alone = !after.starts_with(|next: char| next.is_alphanumeric() || next == '\'');
    (stands_alone && options.contains_key(&letter)).then_some((letter, after))
}

/// Returns `true` if another option is named after the first: `C or D`, `C, D`, `(C) and (D)`, `C/D`, `C. D.`, `C. Or D.`
fn further_letter(after: &str, first: char, options: &BTreeMap<char, String>) -> bool {
    let next = after.trim_start_matches(TRAILING);
    let next = ["or ", "Or ", "and ", "And "].into_iter().find_map(|join| next.strip_prefix(join)).unwrap_or(next);
    // `C. A and B are too early` continues with a sentence. A letter at the end or before punctuation is a further answer.
    let listed = letter_at(next, options).is_some_and(|(second, rest)| {
        second != first && !rest.starts_with(' ') && !next.starts_with(char::is_lowercase)
    });
    if listed {
        return true;
    }
    let after = after.trim_start_matches([')', ']', ' ']);
    let joined =
        ["or ", "and ", "or(", "and(", "/", ",", "&", "+", "|"].into_iter().find_map(|join| after.strip_prefix(join));
    let Some(joined) = joined else { return false };
    let joined = joined.trim_start();
    let joined = joined.strip_prefix("or ").or_else(|| joined.strip_prefix("and ")).unwrap_or(joined);
    // Capitals only: `C, a word of five letters` continues with an article.
    joined.trim_start_matches(['(', '[', ' ']).starts_with(|next: char| next.is_ascii_uppercase())
        && letter_at(joined, options).is_some_and(|(second, _)| second != first)
}

/// Strips the markup of LaTeX and Markdown around a letter, and the words that introduce it.
fn plain(text: &str) -> String {
    let mut plain = text.to_owned();
    for mark in
        ["**", "__", "`", "$", "\\text", "\\mathrm", "\\mathbf", "\\textbf", "\\boxed", "{", "}", "\\(", "\\)", "\\"]
    {
        plain = plain.replace(mark, "");
    }
    let mut rest = plain.trim_start_matches([':', '*', '_', '"', '\'', ' ', '=']);
    for lead in ["option ", "Option ", "choice ", "letter "] {
        rest = rest.strip_prefix(lead).unwrap_or(rest);
    }
    rest.trim_end_matches(['*', '_', '"', '\'', ' ']).to_owned()
}

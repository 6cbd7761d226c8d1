//! Parses the tool arguments that a model wrote, and reports a syntax error with the message of Python's `json.loads`.
//!
//! The message is the output of the tool call for the model. A policy that was trained with NeMo Gym's agent has seen exactly these
//! messages. The rules and messages are those of CPython 3.13's decoder.

use std::borrow::Cow;

use serde::de::IgnoredAny;

/// Deeper nesting than any tool accepts; Python fails at about the same depth.
const DEPTH_MAX: u32 = 900;

/// Returns the body of the request to the tool. `Err` holds the output for the model instead.
pub(super) fn parse(arguments: &str) -> Result<Cow<'_, str>, String> {
    if serde_json::from_str::<IgnoredAny>(arguments).is_ok() {
        return Ok(Cow::Borrowed(arguments.trim_matches(WHITESPACE)));
    }
    let mut scanner = Scanner::new(arguments);
    match scanner.document() {
        // Python reads `NaN` and `Infinity`, and its encoder writes them as null.
        Ok(()) => Ok(Cow::Owned(scanner.text.iter().collect::<String>().trim_matches(WHITESPACE).to_owned())),
        Err(wrong) => Err(scanner.report(&wrong)),
    }
}

const WHITESPACE: [char; 4] = [' ', '\t', '\n', '\r'];

/// A syntax error, and the index of its character.
struct SyntaxError {
    message: &'static str,
    at: usize,
}

fn wrong<T>(message: &'static str, at: usize) -> Result<T, SyntaxError> {
    Err(SyntaxError { message, at })
}

/// Positions are characters, as in Python.
struct Scanner {
    text: Vec<char>,
    at: usize,
    depth: u32,
}

impl Scanner {
    fn new(text: &str) -> Self {
        Self { text: text.chars().collect(), at: 0, depth: 0 }
    }

    fn report(&self, wrong: &SyntaxError) -> String {
        let before = &self.text[..wrong.at.min(self.text.len())];
        let line = before.iter().filter(|c| **c == '\n').count() + 1;
        let column = match before.iter().rposition(|c| *c == '\n') {
            Some(newline) => wrong.at - newline,
            None => wrong.at + 1,
        };
        let text = format!("{}: line {line} column {column} (char {})", wrong.message, wrong.at);
        // As in Python's repr: double quotes only around a string that contains single quotes.
        let quote = if text.contains('\'') { '"' } else { '\'' };
        let text = text.replace('\\', "\\\\");
        let sentence = format!("Invalid tool call arguments: JSONDecodeError({quote}{text}{quote})");
        format!(r#"{{"error": {}}}"#, serde_json::Value::from(sentence))
    }

    fn peek(&self) -> Option<char> {
        self.text.get(self.at).copied()
    }

    fn blank(&mut self) {
        while self.peek().is_some_and(|c| WHITESPACE.contains(&c)) {
            self.at += 1;
        }
    }

    fn document(&mut self) -> Result<(), SyntaxError> {
        if self.peek() == Some('\u{feff}') {
            return wrong("Unexpected UTF-8 BOM (decode using utf-8-sig)", 0);
        }
        self.blank();
        self.value()?;
        self.blank();
        if self.at == self.text.len() { Ok(()) } else { wrong("Extra data", self.at) }
    }

    fn value(&mut self) -> Result<(), SyntaxError> {
        let start = self.at;
        match self.peek() {
            Some('"') => self.string(),
            Some(open @ ('{' | '[')) => {
                self.depth += 1;
                if self.depth > DEPTH_MAX {
                    return wrong("Nested too deeply", start);
                }
                self.at += 1;
                if open == '{' {
                    self.object()?
                } else {
                    self.array()?
                }
                self.depth -= 1;
                Ok(())
            }
            Some('n') if self.word("null") => Ok(()),
            Some('t') if self.word("true") => Ok(()),
            Some('f') if self.word("false") => Ok(()),
            Some('N' | 'I' | '-') if ["NaN", "Infinity", "-Infinity"].iter().any(|word| self.word(word)) => {
                self.text.splice(start..self.at, "null".chars());
                self.at = start + "null".len();
                Ok(())
            }
            _ => self.number(start),
        }
    }

    fn word(&mut self, word: &str) -> bool {
        let found = self.text[self.at..].iter().copied().take(word.len()).eq(word.chars());
        if found {
            self.at += word.len();
        }
        found
    }

    fn digits(&mut self) {
        while self.peek().is_some_and(|c| c.is_ascii_digit()) {
            self.at += 1;
        }
    }

    fn number(&mut self, start: usize) -> Result<(), SyntaxError> {
        if self.peek() == Some('-') {
            self.at += 1;
        }
        match self.peek() {
            Some('0') => self.at += 1,
            Some('1'..='9') => self.digits(),
            _ => return wrong("Expecting value", start),
        }
        if self.peek() == Some('.') && self.text.get(self.at + 1).is_some_and(char::is_ascii_digit) {
            self.at += 1;
            self.digits();
        }
        if matches!(self.peek(), Some('e' | 'E')) {
            let exponent = self.at;
            self.at += 1;
            if matches!(self.peek(), Some('+' | '-')) {
                self.at += 1;
            }
            self.digits();
            if !self.text[self.at - 1].is_ascii_digit() {
                self.at = exponent;
            }
        }
        Ok(())
    }

    fn object(&mut self) -> Result<(), SyntaxError> {
        self.blank();
        if self.peek() == Some('}') {
            self.at += 1;
            return Ok(());
        }
        loop {
            if self.peek() != Some('"') {
                return wrong("Expecting property name enclosed in double quotes", self.at);
            }
            self.string()?;
            self.blank();
            if self.peek() != Some(':') {
                return wrong("Expecting ':' delimiter", self.at);
            }
            self.at += 1;
            self.blank();
            self.value()?;
            if self.closed('}', "Illegal trailing comma before end of object")? {
                return Ok(());
            }
        }
    }

    fn array(&mut self) -> Result<(), SyntaxError> {
        self.blank();
        if self.peek() == Some(']') {
            self.at += 1;
            return Ok(());
        }
        loop {
            self.value()?;
            if self.closed(']', "Illegal trailing comma before end of array")? {
                return Ok(());
            }
        }
    }

    /// Moves past the end of a container, or past the comma before its next member.
    fn closed(&mut self, close: char, trailing_comma: &'static str) -> Result<bool, SyntaxError> {
        self.blank();
        let at = self.at;
        match self.peek() {
            Some(c) if c == close => {
                self.at += 1;
                return Ok(true);
            }
            Some(',') => self.at += 1,
            _ => return wrong("Expecting ',' delimiter", at),
        }
        self.blank();
        if self.peek() == Some(close) {
            return wrong(trailing_comma, at);
        }
        Ok(false)
    }

    fn string(&mut self) -> Result<(), SyntaxError> {
        let begin = self.at;
        self.at += 1;
        loop {
            match self.peek() {
                None => return wrong("Unterminated string starting at", begin),
                Some('"') => {
                    self.at += 1;
                    return Ok(());
                }
                Some('\\') => self.escape(begin)?,
                Some('\0'..='\x1f') => return wrong("Invalid control character at", self.at),
                Some(_) => self.at += 1,
            }
        }
    }

    fn escape(&mut self, begin: usize) -> Result<(), SyntaxError> {
        let backslash = self.at;
        match self.text.get(backslash + 1) {
            None => return wrong("Unterminated string starting at", begin),
            Some('"' | '\\' | '/' | 'b' | 'f' | 'n' | 'r' | 't') => self.at += 2,
            Some('u') => {
                let end = backslash + 6;
                // As in CPython, a closing quote must be able to follow.
                let hex = end < self.text.len() && self.text[backslash + 2..end].iter().all(char::is_ascii_hexdigit);
                if !hex {
                    return wrong("Invalid \\uXXXX escape", backslash + 1);
                }
                self.at = end;
            }
            Some(_) => return wrong("Invalid \\escape", backslash),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The messages of CPython 3.13 with NeMo Gym 0.7.0.
    const WRONG: &[(&str, &str)] = &[
        ("", "'Expecting value: line 1 column 1 (char 0)'"),
        ("{", "'Expecting property name enclosed in double quotes: line 1 column 2 (char 1)'"),
        (r#"{"a""#, r#""Expecting ':' delimiter: line 1 column 5 (char 4)""#),
        (r#"{"a":"#, "'Expecting value: line 1 column 6 (char 5)'"),
        (r#"{"a":1"#, r#""Expecting ',' delimiter: line 1 column 7 (char 6)""#),
        (r#"{"a":1,"#, "'Expecting property name enclosed in double quotes: line 1 column 8 (char 7)'"),
        (r#"{"a":1,}"#, "'Illegal trailing comma before end of object: line 1 column 7 (char 6)'"),
        ("[1,]", "'Illegal trailing comma before end of array: line 1 column 3 (char 2)'"),
        ("[", "'Expecting value: line 1 column 2 (char 1)'"),
        ("[1", r#""Expecting ',' delimiter: line 1 column 3 (char 2)""#),
        ("\"abc", "'Unterminated string starting at: line 1 column 1 (char 0)'"),
        (r#""a\x""#, r"'Invalid \\escape: line 1 column 3 (char 2)'"),
        (r#""\u12zz""#, r"'Invalid \\uXXXX escape: line 1 column 3 (char 2)'"),
        ("\"\\ud800\\u12zz\"", r"'Invalid \\uXXXX escape: line 1 column 9 (char 8)'"),
        ("\"a\nb\"", "'Invalid control character at: line 1 column 3 (char 2)'"),
        ("1 2", "'Extra data: line 1 column 3 (char 2)'"),
        ("-", "'Expecting value: line 1 column 1 (char 0)'"),
        ("01", "'Extra data: line 1 column 2 (char 1)'"),
        ("1e", "'Extra data: line 1 column 2 (char 1)'"),
        ("\n\n {", "'Expecting property name enclosed in double quotes: line 3 column 3 (char 4)'"),
        ("\"é\" x", "'Extra data: line 1 column 5 (char 4)'"),
        (r#"{"a" 1}"#, r#""Expecting ':' delimiter: line 1 column 6 (char 5)""#),
        ("'a'", "'Expecting value: line 1 column 1 (char 0)'"),
        ("\u{feff}{}", "'Unexpected UTF-8 BOM (decode using utf-8-sig): line 1 column 1 (char 0)'"),
        ("\"\\", "'Unterminated string starting at: line 1 column 1 (char 0)'"),
        ("-Infinit", "'Expecting value: line 1 column 1 (char 0)'"),
    ];

    #[test]
    fn the_model_reads_the_same_complaint_as_from_python() {
        for (arguments, expected) in WRONG {
            let told: serde_json::Value = serde_json::from_str(&parse(arguments).unwrap_err()).unwrap();
            let expected = format!("Invalid tool call arguments: JSONDecodeError({expected})");
            assert_eq!(told["error"], expected.as_str(), "{arguments:?}");
        }
        assert_eq!(
            parse("{").unwrap_err(),
            r#"{"error": "Invalid tool call arguments: JSONDecodeError('Expecting property name enclosed in double quotes: line 1 column 2 (char 1)')"}"#
        );
    }

    #[test]
    fn numbers_keep_their_text_and_python_s_extras_become_null() {
        assert_eq!(
            parse(r#" {"n": 1E5, "i": 12345678901234567890123} "#).unwrap(),
            r#"{"n": 1E5, "i": 12345678901234567890123}"#
        );
        assert_eq!(parse(r#"{"a": [NaN, -Infinity, Infinity, -1]}"#).unwrap(), r#"{"a": [null, null, null, -1]}"#);
    }

    #[test]
    fn hostile_nesting_ends_in_a_sentence() {
        assert!(parse(&"[".repeat(100_000)).unwrap_err().contains("Nested too deeply"));
    }
}

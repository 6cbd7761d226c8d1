//! Prompt templates: a `user` and an optional `system` string with `{field}` placeholders. A row fills the placeholders by
//! the rules of Python's `str.format_map`.

use gym_core::message::push_json_string;
use gym_core::rollout::metrics::JsonFields;
use serde::Deserialize;
use thiserror::Error;

use crate::collect::input::python::{PythonValue, float_repr, repr, str_of};
use crate::config::parse_yaml;

/// An error in a template, or in a row that does not fit the template.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PromptError {
    /// The file is not a mapping with the string `user` and optionally `system`.
    #[error("prompt file {file}: {problem}; expected `user: <string>` and optionally `system: <string>`")]
    File {
        /// Name of the file.
        file: String,
        /// The cause.
        problem: String,
    },
    /// A template string is invalid.
    #[error("prompt template `{key}`: {problem}")]
    Template {
        /// `user` or `system`.
        key: &'static str,
        /// The cause and the fix.
        problem: String,
    },
    /// A row lacks the value of a placeholder, or the value cannot be formatted.
    #[error("prompt placeholder {{{place}}}: {problem}")]
    Fill {
        /// The placeholder as written.
        place: String,
        /// The cause.
        problem: String,
    },
}

/// A prompt template, parsed once and filled for each row.
#[derive(Clone, Debug)]
pub struct PromptTemplate {
    system: Option<Vec<TemplatePart>>,
    user: Vec<TemplatePart>,
}

#[derive(Deserialize)]
struct PromptFile {
    user: String,
    #[serde(default)]
    system: Option<String>,
}

#[derive(Clone, Debug, PartialEq)]
enum TemplatePart {
    Literal(String),
    Field { written: String, field: String, path: Vec<PathStep>, conversion: Option<char>, spec: FormatSpec },
}

#[derive(Clone, Debug, PartialEq)]
enum PathStep {
    Index(usize),
    Key(String),
}

/// The supported part of Python's format specification.
#[derive(Clone, Debug, Default, PartialEq)]
struct FormatSpec {
    fill: Option<char>,
    align: Option<char>,
    sign: Option<char>,
    width: usize,
    grouping: bool,
    precision: Option<usize>,
    kind: Option<char>,
}

impl PromptTemplate {
    /// Parses the YAML of a prompt file; `file` is its name in error messages.
    ///
    /// # Errors
    /// [`PromptError::File`] if the YAML has another form; [`PromptError::Template`] if a string is invalid.
    pub fn from_yaml(text: &str, file: &str) -> Result<Self, PromptError> {
        let wrong = |problem: String| PromptError::File { file: file.to_owned(), problem };
        let prompt = parse_yaml(text, file).map_err(|error| match error.problems() {
            [problem, ..] => wrong(format!("line {}: {}", problem.origin.line, problem.what)),
            [] => wrong(error.to_string()),
        })?;
        let prompt = PromptFile::deserialize(prompt).map_err(|error| wrong(error.to_string()))?;
        Self::new(&prompt.user, prompt.system.as_deref())
    }

    /// Creates a template from its strings.
    ///
    /// # Errors
    /// [`PromptError::Template`] if a string is not a valid format string.
    pub fn new(user: &str, system: Option<&str>) -> Result<Self, PromptError> {
        let read = |key, text: &str| parse(text).map_err(|problem| PromptError::Template { key, problem });
        Ok(Self { user: read("user", user)?, system: system.map(|text| read("system", text)).transpose()? })
    }

    /// Returns the messages for `row`, as JSON for `responses_create_params.input`.
    ///
    /// # Errors
    /// [`PromptError::Fill`] if the row lacks a value, or a value cannot be formatted.
    pub fn fill(&self, row: &JsonFields<'_>) -> Result<String, PromptError> {
        let mut messages = String::from("[");
        if let Some(system) = &self.system {
            messages.push_str(r#"{"role":"system","content":"#);
            push_json_string(&mut messages, &render(system, row)?);
            messages.push_str("},");
        }
        messages.push_str(r#"{"role":"user","content":"#);
        push_json_string(&mut messages, &render(&self.user, row)?);
        messages.push_str("}]");
        Ok(messages)
    }
}

fn render(parts: &[TemplatePart], row: &JsonFields<'_>) -> Result<String, PromptError> {
    let mut text = String::new();
    for part in parts {
        match part {
            TemplatePart::Literal(literal) => text.push_str(literal),
            TemplatePart::Field { written, field, path, conversion, spec } => {
                let fail = |problem: String| PromptError::Fill { place: written.clone(), problem };
                let mut value = row.get(field).ok_or_else(|| {
                    let fields: Vec<&str> = row.iter().map(|(key, _)| key).collect();
                    fail(format!("the row has no field {field:?}; its fields are {fields:?}"))
                })?;
                for step in path {
                    value = walk(value, step).map_err(&fail)?;
                }
                let filled = match conversion {
                    None => spec.format(value),
                    Some('s') => str_of(value).map_err(|error| error.to_string()).and_then(|text| spec.text(&text)),
                    Some('a') => {
                        repr(value).map_err(|error| error.to_string()).and_then(|text| spec.text(&ascii(&text)))
                    }
                    Some(_) => repr(value).map_err(|error| error.to_string()).and_then(|text| spec.text(&text)),
                };
                text.push_str(&filled.map_err(&fail)?);
            }
        }
    }
    Ok(text)
}

fn ascii(text: &str) -> String {
    let mut out = String::new();
    for character in text.chars() {
        match character as u32 {
            0..=0x7f => out.push(character),
            code @ 0x80..=0xff => out.push_str(&format!("\\x{code:02x}")),
            code @ 0x100..=0xffff => out.push_str(&format!("\\u{code:04x}")),
            code => out.push_str(&format!("\\U{code:08x}")),
        }
    }
    out
}

fn walk<'a>(value: &'a str, step: &PathStep) -> Result<&'a str, String> {
    match (PythonValue::parse(value).map_err(|error| error.to_string())?, step) {
        (PythonValue::List(items), PathStep::Index(index)) => items
            .get(*index)
            .copied()
            .ok_or_else(|| format!("the list has {} items, so there is no [{index}]", items.len())),
        (PythonValue::Dict(members), PathStep::Key(key)) => {
            members.get(key).ok_or_else(|| format!("the object has no key {key:?}"))
        }
        (_, PathStep::Index(index)) => Err(format!("[{index}] needs a list")),
        (_, PathStep::Key(key)) => Err(format!("[{key}] needs an object")),
    }
}

/// Splits a format string into literals and placeholders.
fn parse(text: &str) -> Result<Vec<TemplatePart>, String> {
    let mut parts = Vec::new();
    let mut literal = String::new();
    let mut characters = text.chars().peekable();
    while let Some(character) = characters.next() {
        match character {
            '{' | '}' if characters.peek() == Some(&character) => {
                characters.next();
                literal.push(character);
            }
            '}' => return Err("single `}`; write `}}` for a literal brace".to_owned()),
            '{' => {
                let mut written = String::new();
                loop {
                    match characters.next() {
                        Some('}') => break,
                        Some('{') => {
                            return Err(format!(
                                "`{{{written}{{`: nested placeholders are not supported; write `{{{{` for a literal brace"
                            ));
                        }
                        Some(other) => written.push(other),
                        None => {
                            return Err(format!(
                                "`{{{written}` is not closed; add `}}`, or write `{{{{` for a literal brace"
                            ));
                        }
                    }
                }
                if !literal.is_empty() {
                    parts.push(TemplatePart::Literal(std::mem::take(&mut literal)));
                }
                parts.push(parse_place(&written)?);
            }
            other => literal.push(other),
        }
    }
    if !literal.is_empty() {
        parts.push(TemplatePart::Literal(literal));
    }
    Ok(parts)
}

fn parse_place(written: &str) -> Result<TemplatePart, String> {
    // A `:` or `!` inside brackets belongs to the key.
    let mut in_brackets = false;
    let end = written.find(|character| {
        in_brackets = (in_brackets || character == '[') && character != ']';
        !in_brackets && matches!(character, ':' | '!')
    });
    let (name, rest) = written.split_at(end.unwrap_or(written.len()));
    let (conversion, spec) = match rest.strip_prefix('!') {
        Some(rest) => {
            let (conversion, spec) = rest.split_once(':').unwrap_or((rest, ""));
            let conversion = match conversion {
                "s" => 's',
                "r" => 'r',
                "a" => 'a',
                _ => return Err(format!("`{{{written}}}`: the conversion must be !s, !r or !a")),
            };
            (Some(conversion), spec)
        }
        None => (None, rest.strip_prefix(':').unwrap_or(rest)),
    };
    let name_end = name.find(['[', '.']).unwrap_or(name.len());
    let (field, mut accessors) = name.split_at(name_end);
    if field.is_empty() || field.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(format!(
            "`{{{written}}}`: put the name of a row field in the braces, or write `{{{{` and `}}}}` for literal braces"
        ));
    }
    let mut path = Vec::new();
    while !accessors.is_empty() {
        let Some((key, rest)) = accessors.strip_prefix('[').and_then(|rest| rest.split_once(']')) else {
            return Err(format!("`{{{written}}}`: JSON values have no attributes; use [index] or [key]"));
        };
        path.push(match key.parse() {
            Ok(index) => PathStep::Index(index),
            Err(_) => PathStep::Key(key.to_owned()),
        });
        accessors = rest;
    }
    Ok(TemplatePart::Field {
        written: written.to_owned(),
        field: field.to_owned(),
        path,
        conversion,
        spec: FormatSpec::parse(spec).ok_or_else(|| {
            format!("`{{{written}}}`: the format {spec:?} is not supported; store the formatted string in the row")
        })?,
    })
}

impl FormatSpec {
    fn parse(text: &str) -> Option<Self> {
        let mut spec = Self::default();
        let mut rest: Vec<char> = text.chars().collect();
        rest.reverse();
        let is_align = |character: Option<&char>| matches!(character, Some('<' | '>' | '^' | '='));
        if rest.len() >= 2 && is_align(rest.get(rest.len() - 2)) {
            spec.fill = rest.pop();
            spec.align = rest.pop();
        } else if is_align(rest.last()) {
            spec.align = rest.pop();
        }
        if matches!(rest.last(), Some('+' | '-' | ' ')) {
            spec.sign = rest.pop();
        }
        if rest.last() == Some(&'0') {
            rest.pop();
            spec.fill = spec.fill.or(Some('0'));
            spec.align = spec.align.or(Some('='));
        }
        while let Some(digit) = rest.last().and_then(|digit| digit.to_digit(10)) {
            rest.pop();
            spec.width = spec.width.checked_mul(10)?.checked_add(digit as usize)?;
        }
        if rest.last() == Some(&',') {
            rest.pop();
            spec.grouping = true;
        }
        if rest.last() == Some(&'.') {
            rest.pop();
            let mut precision: Option<usize> = None;
            while let Some(digit) = rest.last().and_then(|digit| digit.to_digit(10)) {
                rest.pop();
                precision = Some(precision.unwrap_or(0).checked_mul(10)?.checked_add(digit as usize)?);
            }
            spec.precision = Some(precision?);
        }
        spec.kind = rest.pop();
        (rest.is_empty() && matches!(spec.kind, None | Some('s' | 'd' | 'f' | 'F' | '%')) && spec.width <= 10_000)
            .then_some(spec)
    }

    fn is_default(&self) -> bool {
        *self == Self::default()
    }

    fn format(&self, raw: &str) -> Result<String, String> {
        let value = PythonValue::parse(raw).map_err(|error| error.to_string())?;
        if self.is_default() {
            return str_of(raw).map_err(|error| error.to_string());
        }
        match value {
            PythonValue::Text(text) => self.text(&text),
            PythonValue::Bool(value) => self.whole(if value { "1" } else { "0" }),
            PythonValue::Int(text) => self.whole(text),
            PythonValue::Float(value) => self.real(value),
            PythonValue::Null | PythonValue::List(_) | PythonValue::Dict(_) => {
                Err("this value cannot take a format; write !s or !r before the colon".to_owned())
            }
        }
    }

    fn text(&self, text: &str) -> Result<String, String> {
        if !matches!(self.kind, None | Some('s')) || self.sign.is_some() || self.grouping || self.align == Some('=') {
            return Err("the format is not valid for a string".to_owned());
        }
        let cut: String = text.chars().take(self.precision.unwrap_or(usize::MAX)).collect();
        Ok(self.pad("", &cut, '<'))
    }

    fn whole(&self, text: &str) -> Result<String, String> {
        match self.kind {
            None | Some('d') if self.precision.is_none() => Ok(self.signed(text)),
            Some('f' | 'F' | '%') => self.real(text.parse().map_err(|_| "the value is not a number".to_owned())?),
            _ => Err("the format is not valid for an integer".to_owned()),
        }
    }

    fn real(&self, value: f64) -> Result<String, String> {
        match (self.kind, self.precision) {
            (Some('f' | 'F'), precision) => Ok(self.signed(&format!("{value:.*}", precision.unwrap_or(6)))),
            (Some('%'), precision) => Ok(self.signed(&format!("{:.*}%", precision.unwrap_or(6), value * 100.0))),
            (None, None) => Ok(self.signed(&float_repr(value))),
            _ => {
                Err("the format is not valid for a decimal number; give the number of digits, as in {x:.2f}".to_owned())
            }
        }
    }

    /// Formats a number with its sign, thousands separators and padding.
    fn signed(&self, text: &str) -> String {
        let (negative, digits) = text.strip_prefix('-').map_or((false, text), |digits| (true, digits));
        let sign = match (negative, self.sign) {
            (true, _) => "-",
            (false, Some('+')) => "+",
            (false, Some(' ')) => " ",
            (false, _) => "",
        };
        let whole = digits.bytes().take_while(u8::is_ascii_digit).count();
        let mut grouped = String::new();
        for (place, digit) in digits[..whole].chars().enumerate() {
            if self.grouping && place > 0 && (whole - place) % 3 == 0 {
                grouped.push(',');
            }
            grouped.push(digit);
        }
        grouped.push_str(&digits[whole..]);
        self.pad(sign, &grouped, '>')
    }

    fn pad(&self, sign: &str, text: &str, default: char) -> String {
        let missing = self.width.saturating_sub(sign.len() + text.chars().count());
        let fill = |count: usize| self.fill.unwrap_or(' ').to_string().repeat(count);
        match self.align.unwrap_or(default) {
            '<' => format!("{sign}{text}{}", fill(missing)),
            '^' => format!("{}{sign}{text}{}", fill(missing / 2), fill(missing - missing / 2)),
            '=' => format!("{sign}{}{text}", fill(missing)),
            _ => format!("{}{sign}{text}", fill(missing)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_prompt_file_names_the_place() {
        for (text, says) in [
            ("user: \"open\nsystem: x\n", "prompt file p.yaml: line "),
            ("user: 3\n", "p.yaml: invalid type: integer `3`, expected a string"),
            ("system: x\n", "p.yaml: missing field `user`"),
            ("- user\n", "the file contains a list, not a mapping"),
        ] {
            let error = PromptTemplate::from_yaml(text, "p.yaml").unwrap_err().to_string();
            assert!(error.contains(says) && error.ends_with("optionally `system: <string>`"), "{error}");
        }
    }
}

//! The grammar of values that Hydra's overrides and OmegaConf's resolver arguments share: numbers, booleans, `null`,
//! quoted and unquoted strings, `[lists]` and `{mappings}`.

use crate::config::problem::Origin;
use crate::config::yaml::node::{Key, Map, Node, Tree};

/// Maximum nesting of a value, because the parser is recursive.
const DEPTH_MAX: usize = 64;

/// Parses values from one line of text.
pub(crate) struct ValueParser<'a, F> {
    text: &'a str,
    at: usize,
    depth: usize,
    origin: Origin,
    /// Called for each `${…}`, including the braces.
    interpolate: F,
}

/// The replacement of an interpolation inside a value.
pub(crate) enum Inserted {
    /// A value that replaces the whole element if the element contains nothing else.
    Value(Node),
    /// The original text: the grammar of overrides leaves interpolations unresolved.
    Verbatim,
}

impl<'a, F: FnMut(&str) -> Result<Inserted, String>> ValueParser<'a, F> {
    pub(crate) fn new(text: &'a str, origin: &Origin, interpolate: F) -> Self {
        Self { text, at: 0, depth: 0, origin: origin.clone(), interpolate }
    }

    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    fn skip_space(&mut self) {
        self.at = self.text.len() - self.rest().trim_start_matches([' ', '\t']).len();
    }

    fn eat(&mut self, wanted: char) -> bool {
        self.skip_space();
        if self.rest().starts_with(wanted) {
            self.at += wanted.len_utf8();
            self.skip_space();
            return true;
        }
        false
    }

    /// Parses one value that must be followed by the end of the text.
    pub(crate) fn only(mut self) -> Result<Node, String> {
        self.skip_space();
        let node = self.element(&[','])?;
        self.skip_space();
        match self.rest().chars().next() {
            None => Ok(node),
            Some(',') => Err("a list without brackets".to_owned()),
            Some(c) => Err(format!("unexpected '{c}'")),
        }
    }

    /// Parses `a, b, c` up to the end; an empty element is an empty string.
    pub(crate) fn sequence(mut self) -> Result<Vec<Node>, String> {
        let mut items = Vec::new();
        self.skip_space();
        if self.rest().is_empty() {
            return Ok(items);
        }
        loop {
            self.skip_space();
            if self.rest().is_empty() || self.rest().starts_with(',') {
                items.push(Node::text("", &self.origin));
            } else {
                items.push(self.element(&[','])?);
            }
            if !self.eat(',') {
                break;
            }
        }
        match self.rest().chars().next() {
            None => Ok(items),
            Some(c) => Err(format!("unexpected '{c}'")),
        }
    }

    fn element(&mut self, ends: &[char]) -> Result<Node, String> {
        self.depth += 1;
        if self.depth > DEPTH_MAX {
            return Err(format!("nested deeper than {DEPTH_MAX} levels"));
        }
        let node = match self.rest().chars().next() {
            Some('[') => self.list(),
            Some('{') => self.mapping(),
            Some(quote @ ('\'' | '"')) => self.quoted(quote),
            _ => self.primitive(ends),
        };
        self.depth -= 1;
        node
    }

    fn list(&mut self) -> Result<Node, String> {
        self.eat('[');
        let mut items = Vec::new();
        if !self.eat(']') {
            loop {
                items.push(self.element(&[',', ']'])?);
                if self.eat(']') {
                    break;
                }
                if !self.eat(',') {
                    return Err("the list has no closing ']'".to_owned());
                }
            }
        }
        Ok(Node::new(Tree::List(items), self.origin.clone()))
    }

    fn mapping(&mut self) -> Result<Node, String> {
        self.eat('{');
        let mut map = Map::default();
        if !self.eat('}') {
            loop {
                let key = match self.primitive(&[':', ',', '}'])?.value {
                    Tree::Text(text) => Key::Text(text),
                    Tree::Int(int) => Key::Int(int),
                    Tree::Bool(flag) => Key::Bool(flag),
                    Tree::Float(float) => Key::Float(float),
                    _ => return Err("null cannot be a key".to_owned()),
                };
                if !self.eat(':') {
                    return Err(format!("the key {key} of the mapping has no value; write {key}: VALUE"));
                }
                let value = self.element(&[',', '}'])?;
                map.set(key, value);
                if self.eat('}') {
                    break;
                }
                if !self.eat(',') {
                    return Err("the mapping has no closing '}'".to_owned());
                }
            }
        }
        Ok(Node::new(Tree::Map(map), self.origin.clone()))
    }

    fn quoted(&mut self, quote: char) -> Result<Node, String> {
        self.at += 1;
        let mut out = String::new();
        loop {
            let rest = self.rest();
            let backslashes = rest.len() - rest.trim_start_matches('\\').len();
            let after = rest[backslashes..].chars().next();
            match after {
                None => return Err(format!("the quote {quote} is not closed")),
                Some(c) if c == quote => {
                    out.extend(std::iter::repeat_n('\\', backslashes / 2));
                    self.at += backslashes + 1;
                    if backslashes.is_multiple_of(2) {
                        break;
                    }
                    out.push(quote);
                }
                Some('$') if rest[backslashes..].starts_with("${") => {
                    out.extend(std::iter::repeat_n('\\', backslashes));
                    self.at += backslashes;
                    let whole = self.interpolation()?;
                    match (self.interpolate)(whole)? {
                        Inserted::Value(node) => out.push_str(&node.python_str()),
                        Inserted::Verbatim => out.push_str(whole),
                    }
                }
                Some(c) => {
                    out.extend(std::iter::repeat_n('\\', backslashes));
                    out.push(c);
                    self.at += backslashes + c.len_utf8();
                }
            }
        }
        Ok(Node::text(out, &self.origin))
    }

    /// Returns the `${…}` that starts here, including nested braces.
    fn interpolation(&mut self) -> Result<&'a str, String> {
        let rest = self.rest();
        let length = braces(rest).ok_or_else(|| format!("'{rest}' has no closing '}}'"))?;
        self.at += length;
        Ok(&rest[..length])
    }

    fn primitive(&mut self, ends: &[char]) -> Result<Node, String> {
        let start = self.at;
        let mut out = String::new();
        let mut typed = true;
        let mut whole: Option<Node> = None;
        let mut trailing = 0;
        loop {
            let rest = self.rest();
            let Some(c) = rest.chars().next() else { break };
            if rest.starts_with("${") {
                let first = out.is_empty();
                let text = self.interpolation()?;
                match (self.interpolate)(text)? {
                    Inserted::Value(node) => {
                        if let Some(before) = whole.take() {
                            out.push_str(&before.python_str());
                        }
                        if first && out.is_empty() {
                            whole = Some(node);
                        } else {
                            out.push_str(&node.python_str());
                        }
                    }
                    Inserted::Verbatim => out.push_str(text),
                }
                typed = false;
                trailing = 0;
                continue;
            }
            if ends.contains(&c) || matches!(c, ',' | ']' | '}') {
                break;
            }
            if let Some(node) = whole.take() {
                // Spaces after an interpolation that is the whole value are ignored.
                if rest.trim_start_matches([' ', '\t']).is_empty()
                    || rest.trim_start_matches([' ', '\t']).starts_with(ends)
                {
                    self.skip_space();
                    return Ok(node);
                }
                out.push_str(&node.python_str());
            }
            match c {
                '\\' => {
                    let next = rest[1..].chars().next();
                    match next {
                        Some(e @ ('\\' | '(' | ')' | '[' | ']' | '{' | '}' | ':' | '=' | ',' | ' ' | '\t')) => {
                            out.push(e);
                            self.at += 2;
                        }
                        _ => {
                            out.push('\\');
                            self.at += 1;
                        }
                    }
                    typed = false;
                    trailing = 0;
                }
                ' ' | '\t' => {
                    out.push(c);
                    self.at += 1;
                    trailing += 1;
                }
                c if c.is_ascii_alphanumeric() || "_/-+.$%*@?|:".contains(c) => {
                    out.push(c);
                    self.at += 1;
                    trailing = 0;
                }
                '(' => {
                    return Err(format!("the function {}(…) is not supported here", out.trim()));
                }
                c => return Err(format!("'{c}' needs quotes")),
            }
        }
        if let Some(node) = whole {
            return Ok(node);
        }
        out.truncate(out.len() - trailing);
        if self.at == start {
            return Err("there is no value".to_owned());
        }
        let value = if typed { literal(&out) } else { Tree::Text(out) };
        Ok(Node::new(value, self.origin.clone()))
    }
}

/// Returns the length of the `${…}` at the start of `text`.
pub(crate) fn braces(text: &str) -> Option<usize> {
    let mut depth = 0usize;
    let mut quote: Option<char> = None;
    let mut escaped = false;
    for (at, c) in text.char_indices() {
        if escaped {
            escaped = false;
            continue;
        }
        match (c, quote) {
            ('\\', _) => escaped = true,
            (c, Some(open)) if c == open => quote = None,
            ('\'' | '"', None) if depth > 0 => quote = Some(c),
            ('{', None) => depth += 1,
            ('}', None) => {
                depth -= 1;
                if depth == 0 {
                    return Some(at + 1);
                }
            }
            _ => {}
        }
    }
    None
}

/// Parses `12`, `1e3`, `true`, `null`, or a string.
pub(crate) fn literal(text: &str) -> Tree {
    let body = text.strip_prefix(['+', '-']).unwrap_or(text);
    let lower = body.to_ascii_lowercase();
    let signed = body.len() < text.len();
    let negative = text.starts_with('-');
    if !signed {
        match lower.as_str() {
            "null" => return Tree::Null,
            "true" => return Tree::Bool(true),
            "false" => return Tree::Bool(false),
            _ => {}
        }
    }
    let sign = if negative { -1.0 } else { 1.0 };
    match lower.as_str() {
        "inf" => return Tree::Float(sign * f64::INFINITY),
        "nan" => return Tree::Float(f64::NAN),
        _ => {}
    }
    if unsigned_int(body) {
        return match body.replace('_', "").parse::<i128>() {
            Ok(int) => Tree::Int(if negative { -int } else { int }),
            Err(_) => Tree::Text(text.to_owned()),
        };
    }
    let (mantissa, exponent) = match lower.split_once('e') {
        Some((mantissa, exponent)) => (mantissa.to_owned(), Some(exponent.to_owned())),
        None => (lower.clone(), None),
    };
    let exponent_fits = exponent.as_deref().is_none_or(|e| digit_groups(e.strip_prefix(['+', '-']).unwrap_or(e)));
    let mantissa_fits = match mantissa.split_once('.') {
        Some((head, "")) => unsigned_int(head),
        Some((head, tail)) => (head.is_empty() || unsigned_int(head)) && digit_groups(tail),
        None => exponent.is_some() && unsigned_int(&mantissa),
    };
    if exponent_fits
        && mantissa_fits
        && let Ok(float) = lower.replace('_', "").parse::<f64>()
    {
        return Tree::Float(sign * float);
    }
    Tree::Text(text.to_owned())
}

fn unsigned_int(text: &str) -> bool {
    text == "0" || (!text.starts_with('0') && digit_groups(text))
}

/// Returns `true` if the text consists of digits with single underscores between them.
fn digit_groups(text: &str) -> bool {
    !text.is_empty() && text.split('_').all(|group| !group.is_empty() && group.bytes().all(|b| b.is_ascii_digit()))
}

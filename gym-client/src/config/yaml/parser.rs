//! Parses YAML into [`Node`], with the scalar rules of OmegaConf's loader (PyYAML's YAML 1.1 with its own floats).
//!
//! The underlying parser implements YAML 1.2 and does not assign types. This module assigns them, because loaders
//! differ here: `010` is 8, `11:30` is 690, `1_000` is 1000, `yes` is true, `1e-5` is a float, a date is a string, and
//! a duplicate key is an error.

use std::borrow::Cow;

use granit_parser::{Event, Parser, ScalarStyle, Span, StrInput, StructureStyle, Tag};

use crate::config::problem::{Mistake, Origin, Problem};
use crate::config::yaml::node::{Key, Map, Node, Tree};

/// Maximum number of values to which a file may expand, so that nested aliases cannot exhaust memory.
const NODES_MAX: usize = 1_000_000;
/// Maximum nesting of a file, which bounds the recursion.
const DEPTH_MAX: usize = 128;

/// Parses one document; an empty document is an empty mapping, as in OmegaConf.
pub(crate) fn parse(text: &str, source: &str) -> Result<Node, Problem> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let mut reader = NodeReader {
        parser: Parser::new_from_str(text),
        origin: Origin::of(source),
        anchors: Vec::new(),
        nodes: 0,
        depth: 0,
        flow: 0,
        peeked: None,
    };
    let mut root: Option<Node> = None;
    loop {
        let (event, span) = reader.next()?;
        match event {
            Event::StreamEnd => break,
            Event::StreamStart | Event::DocumentEnd | Event::Anchor(..) => {}
            Event::DocumentStart(..) => {
                if root.is_some() {
                    return Err(reader
                        .problem(&span, "a second document starts here")
                        .fix("keep one document per file; move the second document to another file"));
                }
                root = Some(match reader.peek()? {
                    Event::DocumentEnd => Node::map(Vec::new(), &reader.origin),
                    _ => reader.node()?.into_plain(&reader)?,
                });
            }
            _ => return Err(reader.problem(&span, "there is text outside of the document")),
        }
    }
    let root = root.unwrap_or_else(|| Node::map(Vec::new(), &reader.origin));
    match root.value {
        Tree::Map(_) => Ok(root),
        Tree::Null => Ok(Node::map(Vec::new(), &root.origin)),
        _ => Err(Problem::new(
            Mistake::Syntax,
            &root.origin,
            "",
            format!("the file contains {}, not a mapping", root.kind()),
        )
        .fix("write 'key: value' lines at the top level, for example 'config_paths: [a.yaml]'")),
    }
}

struct NodeReader<'a> {
    parser: Parser<'a, StrInput<'a>>,
    origin: Origin,
    anchors: Vec<(usize, NodeOrMergeKey)>,
    nodes: usize,
    depth: usize,
    /// Number of open `[` and `{`.
    flow: usize,
    peeked: Option<(Event<'a>, Span)>,
}

/// The content of a node: `<<` and `=` are not values by themselves.
#[derive(Clone)]
enum NodeOrMergeKey {
    Plain(Node),
    /// The merge key `<<`.
    Merge(Origin),
}

impl NodeOrMergeKey {
    fn into_plain(self, reader: &NodeReader<'_>) -> Result<Node, Problem> {
        match self {
            Self::Plain(node) => Ok(node),
            Self::Merge(origin) => Err(Problem::new(Mistake::Syntax, &origin, "", "'<<' is used as a value")
                .fix("put '<<' in quotes if a string is intended")
                .at(reader)),
        }
    }
}

impl Problem {
    /// Adds the file of the reader if the location has none.
    fn at(mut self, reader: &NodeReader<'_>) -> Self {
        if self.origin.source.is_none() {
            self.origin.source.clone_from(&reader.origin.source);
        }
        self
    }
}

impl<'a> NodeReader<'a> {
    fn place(&self, span: &Span) -> Origin {
        Origin { source: self.origin.source.clone(), line: u32::try_from(span.start.line()).unwrap_or(0) }
    }

    fn problem(&self, span: &Span, what: impl Into<Box<str>>) -> Problem {
        Problem::new(Mistake::Syntax, &self.place(span), "", what)
    }

    fn next(&mut self) -> Result<(Event<'a>, Span), Problem> {
        if let Some(event) = self.peeked.take() {
            return Ok(event);
        }
        match self.parser.next_event() {
            Some(Ok(event)) => Ok(event),
            Some(Err(error)) => {
                let origin = Origin {
                    source: self.origin.source.clone(),
                    line: u32::try_from(error.marker().line()).unwrap_or(0),
                };
                let column = error.marker().col() + 1;
                Err(Problem::new(
                    Mistake::Syntax,
                    &origin,
                    "",
                    format!("malformed YAML at column {column}: {}", error.info()),
                )
                .fix("check indentation, quotes and brackets on this line and the one before"))
            }
            None => Ok((Event::StreamEnd, Span::default())),
        }
    }

    fn peek(&mut self) -> Result<&Event<'a>, Problem> {
        if self.peeked.is_none() {
            self.peeked = Some(self.next()?);
        }
        Ok(&self.peeked.as_ref().expect("filled just above").0)
    }

    fn count(&mut self, nodes: usize, span: &Span) -> Result<(), Problem> {
        self.nodes += nodes;
        if self.nodes > NODES_MAX {
            return Err(self
                .problem(span, format!("the file expands to more than {NODES_MAX} values"))
                .fix("do not use aliases inside anchored values"));
        }
        Ok(())
    }

    fn node(&mut self) -> Result<NodeOrMergeKey, Problem> {
        let (event, span) = self.next()?;
        self.count(1, &span)?;
        let (value, anchor) = match event {
            Event::Alias(id) => {
                let value = self.anchors.iter().rev().find(|(anchor, _)| *anchor == id).map(|(_, v)| v.clone());
                let value = value.ok_or_else(|| {
                    self.problem(&span, "the alias is used inside its own anchored value")
                        .fix("write the value instead of the alias")
                })?;
                if let NodeOrMergeKey::Plain(node) = &value {
                    self.count(node.weight(), &span)?;
                }
                return Ok(value);
            }
            Event::Scalar(text, style, anchor, tag) => (self.scalar(&text, style, tag.as_ref(), &span)?, anchor),
            Event::SequenceStart(style, anchor, tag) => {
                self.container_tag(tag.as_ref(), "seq", &span)?;
                let flow = usize::from(style == StructureStyle::Flow);
                self.flow += flow;
                let node = self.sequence(&span)?;
                self.flow -= flow;
                (NodeOrMergeKey::Plain(node), anchor)
            }
            Event::MappingStart(style, anchor, tag) => {
                self.container_tag(tag.as_ref(), "map", &span)?;
                let flow = usize::from(style == StructureStyle::Flow);
                self.flow += flow;
                let node = self.mapping(&span)?;
                self.flow -= flow;
                (NodeOrMergeKey::Plain(node), anchor)
            }
            _ => return Err(self.problem(&span, "expected a value")),
        };
        if anchor != 0 {
            self.anchors.push((anchor, value.clone()));
        }
        Ok(value)
    }

    fn deeper(&mut self, span: &Span) -> Result<(), Problem> {
        self.depth += 1;
        if self.depth > DEPTH_MAX {
            return Err(self.problem(span, format!("nested deeper than {DEPTH_MAX} levels")).fix("flatten the value"));
        }
        Ok(())
    }

    fn sequence(&mut self, span: &Span) -> Result<Node, Problem> {
        self.deeper(span)?;
        let mut items = Vec::new();
        while !matches!(self.peek()?, Event::SequenceEnd) {
            let value = self.node()?;
            items.push(value.into_plain(self)?);
        }
        self.next()?;
        self.depth -= 1;
        Ok(Node::new(Tree::List(items), self.place(span)))
    }

    fn mapping(&mut self, span: &Span) -> Result<Node, Problem> {
        self.deeper(span)?;
        let mut own: Vec<(Key, Node)> = Vec::new();
        let mut merged: Vec<(Key, Node)> = Vec::new();
        while !matches!(self.peek()?, Event::MappingEnd) {
            let key = self.node()?;
            let value = self.node()?;
            match key {
                NodeOrMergeKey::Merge(origin) => self.merge_key(value.into_plain(self)?, &origin, &mut merged)?,
                NodeOrMergeKey::Plain(node) => {
                    let key = self.key(&node)?;
                    let mut value = value.into_plain(self)?;
                    if !value.is_container() || value.origin.line == 0 {
                        value.origin.line = node.origin.line;
                    }
                    let twice = own.iter().position(|(known, _)| *known == key);
                    match (twice, key.text()) {
                        (Some(index), Some(name)) => {
                            let first = own[index].1.origin.line;
                            return Err(Problem::new(
                                Mistake::Syntax,
                                &node.origin,
                                name,
                                format!("duplicate key (first on line {first})"),
                            )
                            .fix("remove one of them"));
                        }
                        // OmegaConf checks only string keys; for others the last value is used, as in PyYAML.
                        (Some(index), None) => own[index].1 = value,
                        (None, _) => own.push((key, value)),
                    }
                }
            }
        }
        self.next()?;
        self.depth -= 1;
        let mut map = Map(merged);
        for (key, value) in own {
            map.set(key, value);
        }
        Ok(Node::new(Tree::Map(map), self.place(span)))
    }

    /// Handles `<<: *a` and `<<: [*a, *b]`: merged keys come first, and earlier mappings of a list take precedence.
    fn merge_key(&self, value: Node, origin: &Origin, into: &mut Vec<(Key, Node)>) -> Result<(), Problem> {
        let sources = match value.value {
            Tree::Map(map) => vec![map],
            Tree::List(items) => {
                let mut maps = Vec::new();
                for item in items {
                    let kind = item.kind();
                    let Tree::Map(map) = item.value else {
                        return Err(not_mergeable(origin, kind));
                    };
                    maps.push(map);
                }
                maps.reverse();
                maps
            }
            _ => return Err(not_mergeable(origin, value.kind())),
        };
        let mut map = Map(std::mem::take(into));
        for (key, node) in sources.into_iter().flat_map(|map| map.0) {
            map.set(key, node);
        }
        *into = map.0;
        Ok(())
    }

    fn key(&self, node: &Node) -> Result<Key, Problem> {
        match &node.value {
            Tree::Text(text) => Ok(Key::Text(text.clone())),
            Tree::Int(int) => Ok(Key::Int(*int)),
            Tree::Bool(flag) => Ok(Key::Bool(*flag)),
            Tree::Float(float) => Ok(Key::Float(*float)),
            Tree::Null | Tree::List(_) | Tree::Map(_) => {
                Err(Problem::new(Mistake::Syntax, &node.origin, "", format!("{} is used as a key", node.kind()))
                    .fix("use a string as the key; quote it if it contains : or ~")
                    .at(self))
            }
        }
    }

    fn container_tag(&self, tag: Option<&Cow<'_, Tag>>, expected: &str, span: &Span) -> Result<(), Problem> {
        match tag {
            None => Ok(()),
            Some(tag) if tag.core_suffix() == Some(expected) || tag.original() == "!" => Ok(()),
            Some(tag) => Err(self.unknown_tag(tag, span)),
        }
    }

    fn unknown_tag(&self, tag: &Tag, span: &Span) -> Problem {
        self.problem(span, format!("unknown tag {}", tag.original()))
            .fix("remove the tag, or use one of !!str, !!int, !!float, !!bool, !!null")
    }

    fn scalar(
        &self,
        text: &str,
        style: ScalarStyle,
        tag: Option<&Cow<'_, Tag>>,
        span: &Span,
    ) -> Result<NodeOrMergeKey, Problem> {
        let origin = self.place(span);
        let plain = |value| Ok(NodeOrMergeKey::Plain(Node::new(value, origin.clone())));
        if let Some(tag) = tag {
            let bad = |kind: &str| self.problem(span, format!("'{text}' is not {kind}")).fix("remove the tag");
            return match tag.core_suffix() {
                Some("str") => plain(Tree::Text(text.to_owned())),
                Some("null") => plain(Tree::Null),
                Some("int") => plain(integer(text).ok_or_else(|| bad("an integer"))?),
                Some("float") => plain(Tree::Float(float(text).ok_or_else(|| bad("a float"))?)),
                Some("bool") => plain(Tree::Bool(boolean(&text.to_lowercase()).ok_or_else(|| bad("a boolean"))?)),
                _ if tag.original() == "!" => plain(Tree::Text(text.to_owned())),
                _ => Err(self.unknown_tag(tag, span)),
            };
        }
        if !matches!(style, ScalarStyle::Plain) {
            return plain(Tree::Text(text.to_owned()));
        }
        if self.flow > 0 && text.contains('?') {
            let what = format!("'{text}' contains '?' between brackets, which Python's YAML loader rejects");
            return Err(self.problem(span, what).fix(format!("quote it: \"{text}\"")));
        }
        match text {
            "<<" => Ok(NodeOrMergeKey::Merge(origin)),
            "=" => Err(self
                .problem(span, "a plain '=' is YAML's default-value key, which no loader supports")
                .fix("quote it: '='")),
            _ => plain(self.typed(text, span)?),
        }
    }

    fn typed(&self, text: &str, span: &Span) -> Result<Tree, Problem> {
        let tree = resolve(text);
        if let Tree::Int(int) = tree
            && (int > i128::from(u64::MAX) || int < i128::from(i64::MIN))
        {
            let fix = format!("write a number from {} to {}, or quote it if it is a text", i64::MIN, u64::MAX);
            return Err(self.problem(span, format!("the integer {text} exceeds 64 bits")).fix(fix));
        }
        Ok(tree)
    }
}

fn not_mergeable(origin: &Origin, kind: &str) -> Problem {
    Problem::new(Mistake::Syntax, origin, "<<", format!("'<<' merges mappings, but the value is {kind}"))
        .fix("use an anchored mapping, such as '<<: *defaults', or a list of them")
}

/// Returns the value of a plain scalar.
pub(crate) fn resolve(text: &str) -> Tree {
    if matches!(text, "" | "~" | "null" | "Null" | "NULL") {
        return Tree::Null;
    }
    if let Some(flag) = boolean(text) {
        return Tree::Bool(flag);
    }
    if text.starts_with(|c: char| c.is_ascii_digit() || matches!(c, '-' | '+' | '.')) {
        if is_float(text)
            && let Some(float) = float(text)
        {
            return Tree::Float(float);
        }
        if is_int(text)
            && let Some(int) = integer(text)
        {
            return int;
        }
    }
    Tree::Text(text.to_owned())
}

fn boolean(text: &str) -> Option<bool> {
    match text {
        "yes" | "Yes" | "YES" | "true" | "True" | "TRUE" | "on" | "On" | "ON" => Some(true),
        "no" | "No" | "NO" | "false" | "False" | "FALSE" | "off" | "Off" | "OFF" => Some(false),
        _ => None,
    }
}

fn unsigned(text: &str) -> &str {
    text.strip_prefix(['-', '+']).unwrap_or(text)
}

fn all(text: &str, allowed: impl Fn(u8) -> bool) -> bool {
    !text.is_empty() && text.bytes().all(allowed)
}

fn digits(text: &str) -> bool {
    all(text, |b| b.is_ascii_digit() || b == b'_') && text.as_bytes()[0].is_ascii_digit()
}

/// Returns `true` for the rest of `11:30` or `1:2:3`: each part after the first is 0 to 59.
fn sexagesimal_tail(text: &str) -> bool {
    text.split(':').all(|part| {
        matches!(part.len(), 1 | 2)
            && part.bytes().all(|b| b.is_ascii_digit())
            && (part.len() == 1 || part.as_bytes()[0] < b'6')
    })
}

fn is_int(text: &str) -> bool {
    let body = unsigned(text);
    if let Some(binary) = body.strip_prefix("0b") {
        return all(binary, |b| matches!(b, b'0' | b'1' | b'_'));
    }
    if let Some(hex) = body.strip_prefix("0x") {
        return all(hex, |b| b.is_ascii_hexdigit() || b == b'_');
    }
    if body == "0" {
        return true;
    }
    if let Some(octal) = body.strip_prefix('0') {
        return all(octal, |b| matches!(b, b'0'..=b'7' | b'_'));
    }
    match body.split_once(':') {
        Some((head, tail)) => digits(head) && sexagesimal_tail(tail),
        None => digits(body),
    }
}

fn integer(text: &str) -> Option<Tree> {
    let cleaned = text.replace('_', "");
    let negative = cleaned.starts_with('-');
    let body = unsigned(&cleaned);
    let magnitude = if body == "0" {
        0
    } else if let Some(binary) = body.strip_prefix("0b") {
        i128::from_str_radix(binary, 2).ok()?
    } else if let Some(hex) = body.strip_prefix("0x") {
        i128::from_str_radix(hex, 16).ok()?
    } else if let Some(octal) = body.strip_prefix('0') {
        i128::from_str_radix(octal, 8).ok()?
    } else if body.contains(':') {
        let mut total: i128 = 0;
        for part in body.split(':') {
            total = total.checked_mul(60)?.checked_add(part.parse().ok()?)?;
        }
        total
    } else {
        // More digits than 128 bits can hold: `typed()` rejects integers above 64 bits, so saturation is sufficient.
        body.bytes().all(|b| b.is_ascii_digit()).then(|| body.parse().unwrap_or(i128::MAX))?
    };
    Some(Tree::Int(if negative { -magnitude } else { magnitude }))
}

/// Returns `true` for groups of digits joined by single underscores, as OmegaConf's float pattern requires.
fn grouped(text: &str) -> bool {
    text.split('_').all(|group| all(group, |b| b.is_ascii_digit()))
}

fn exponent(text: &str, sign_required: bool) -> bool {
    let body = unsigned(text);
    all(body, |b| b.is_ascii_digit()) && (!sign_required || body.len() < text.len())
}

fn is_float(text: &str) -> bool {
    let body = unsigned(text);
    let signed = body.len() < text.len();
    if matches!(body, ".inf" | ".Inf" | ".INF") || (!signed && matches!(body, ".nan" | ".NaN" | ".NAN")) {
        return true;
    }
    let (mantissa, power) = match body.find(['e', 'E']) {
        Some(at) => (&body[..at], Some(&body[at + 1..])),
        None => (body, None),
    };
    let fraction = |text: &str| text.bytes().all(|b| b.is_ascii_digit() || b == b'_');
    match (mantissa.split_once('.'), power) {
        // [0-9]+.[0-9_]* with any exponent (OmegaConf), or digits with arbitrary underscores and a signed exponent
        // (PyYAML).
        (Some((head, tail)), power) if !head.is_empty() => {
            if let Some((first, rest)) = head.split_once(':') {
                return power.is_none() && digits(first) && sexagesimal_tail(rest) && fraction(tail);
            }
            fraction(tail)
                && ((grouped(head) && power.is_none_or(|p| exponent(p, false)))
                    || (digits(head) && power.is_none_or(|p| exponent(p, true))))
        }
        // .5, unsigned, with a signed exponent.
        (Some((_, tail)), power) => !signed && digits(tail) && power.is_none_or(|p| exponent(p, true)),
        (None, Some(power)) => grouped(mantissa) && exponent(power, false),
        (None, None) => false,
    }
}

fn float(text: &str) -> Option<f64> {
    let cleaned = text.replace('_', "").to_lowercase();
    let sign = if cleaned.starts_with('-') { -1.0 } else { 1.0 };
    let body = unsigned(&cleaned);
    let magnitude = match body {
        ".inf" => f64::INFINITY,
        ".nan" => f64::NAN,
        _ if body.contains(':') => {
            let mut total = 0.0;
            for part in body.split(':') {
                total = total * 60.0 + part.parse::<f64>().ok()?;
            }
            total
        }
        _ => body.parse().ok()?,
    };
    Some(sign * magnitude)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn json(text: &str) -> serde_json::Value {
        parse(text, "test.yaml").expect("parses").to_json()
    }

    #[test]
    fn plain_scalars_are_typed_as_omegaconf_types_them() {
        let got = json("{a: 010, b: 11:30, c: 1_000, d: yes, e: 1e-5, f: 2024-01-02, g: 0x1F, h: '010', i: 08, j: y}");
        let want = serde_json::json!({"a": 8, "b": 690, "c": 1000, "d": true, "e": 1e-5, "f": "2024-01-02", "g": 31,
            "h": "010", "i": "08", "j": "y"});
        assert_eq!(got, want);
    }

    #[test]
    fn a_key_given_twice_names_both_lines() {
        let problem = parse("a: 1\nb: 2\na: 3\n", "test.yaml").unwrap_err().to_string();
        assert!(problem.starts_with("test.yaml:3: a: duplicate key (first on line 1)"), "{problem}");
    }

    #[test]
    fn an_alias_bomb_is_refused() {
        let mut text = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
        for level in 1..9 {
            let below = level - 1;
            let aliases = vec![format!("*a{below}"); 10].join(", ");
            text.push_str(&format!("a{level}: &a{level} [{aliases}]\n"));
        }
        let problem = parse(&text, "bomb.yaml").unwrap_err().to_string();
        assert!(problem.contains("more than 1000000 values"), "{problem}");
    }
}

//! The tree between YAML text and typed configuration: values with their locations.
//!
//! `serde_json::Value` is not sufficient: OmegaConf distinguishes integer and boolean keys from strings, has
//! infinities, and errors must name a line.

use std::fmt;

use crate::config::problem::Origin;
use crate::config::yaml::float::{python_float, yaml_float};

/// One value with its location.
#[derive(Clone, Debug)]
pub(crate) struct Node {
    pub(crate) value: Tree,
    pub(crate) origin: Origin,
}

#[derive(Clone, Debug)]
pub(crate) enum Tree {
    Null,
    Bool(bool),
    Int(i128),
    Float(f64),
    Text(String),
    List(Vec<Node>),
    Map(Map),
}

/// The key of a mapping: OmegaConf distinguishes `1`, `true` and `"1"`.
#[derive(Clone, Debug)]
pub(crate) enum Key {
    Text(String),
    Int(i128),
    Bool(bool),
    Float(f64),
}

impl PartialEq for Key {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Text(a), Self::Text(b)) => a == b,
            (Self::Text(_), _) | (_, Self::Text(_)) => false,
            // Python's dict treats 1, 1.0 and True as the same key.
            _ => self.number() == other.number(),
        }
    }
}

impl Key {
    fn number(&self) -> f64 {
        match self {
            Self::Text(_) => f64::NAN,
            Self::Int(int) => *int as f64,
            Self::Bool(flag) => f64::from(u8::from(*flag)),
            Self::Float(float) => *float,
        }
    }

    pub(crate) fn text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text(text) => f.write_str(text),
            Self::Int(int) => write!(f, "{int}"),
            Self::Bool(flag) => f.write_str(if *flag { "True" } else { "False" }),
            Self::Float(float) => f.write_str(&python_float(*float)),
        }
    }
}

impl From<&str> for Key {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

/// A mapping in the order of the file. Lookup is linear, because configurations are small.
#[derive(Clone, Debug, Default)]
pub(crate) struct Map(pub(crate) Vec<(Key, Node)>);

impl Map {
    pub(crate) fn get_key(&self, key: &Key) -> Option<&Node> {
        self.0.iter().find(|(k, _)| k == key).map(|(_, node)| node)
    }

    pub(crate) fn get(&self, key: &str) -> Option<&Node> {
        self.0.iter().find(|(k, _)| k.text() == Some(key)).map(|(_, node)| node)
    }

    pub(crate) fn get_mut(&mut self, key: &str) -> Option<&mut Node> {
        self.0.iter_mut().find(|(k, _)| k.text() == Some(key)).map(|(_, node)| node)
    }

    pub(crate) fn get_key_mut(&mut self, key: &Key) -> Option<&mut Node> {
        self.0.iter_mut().find(|(k, _)| k == key).map(|(_, node)| node)
    }

    pub(crate) fn contains(&self, key: &str) -> bool {
        self.get(key).is_some()
    }

    /// Replaces the value of a key in place, or appends the key.
    pub(crate) fn set(&mut self, key: Key, node: Node) {
        match self.get_key_mut(&key) {
            Some(place) => *place = node,
            None => self.0.push((key, node)),
        }
    }

    pub(crate) fn remove(&mut self, key: &str) -> Option<Node> {
        let index = self.0.iter().position(|(k, _)| k.text() == Some(key))?;
        Some(self.0.remove(index).1)
    }
}

impl Node {
    pub(crate) fn new(value: Tree, origin: Origin) -> Self {
        Self { value, origin }
    }

    pub(crate) fn text(text: impl Into<String>, origin: &Origin) -> Self {
        Self::new(Tree::Text(text.into()), origin.clone())
    }

    pub(crate) fn map(entries: Vec<(Key, Self)>, origin: &Origin) -> Self {
        Self::new(Tree::Map(Map(entries)), origin.clone())
    }

    pub(crate) fn as_map(&self) -> Option<&Map> {
        match &self.value {
            Tree::Map(map) => Some(map),
            _ => None,
        }
    }

    pub(crate) fn as_map_mut(&mut self) -> Option<&mut Map> {
        match &mut self.value {
            Tree::Map(map) => Some(map),
            _ => None,
        }
    }

    pub(crate) fn as_text(&self) -> Option<&str> {
        match &self.value {
            Tree::Text(text) => Some(text),
            _ => None,
        }
    }

    /// Returns `true` for OmegaConf's `???`, a required value that is not set.
    pub(crate) fn is_missing(&self) -> bool {
        self.as_text() == Some("???")
    }

    /// Returns `true` if the string contains an interpolation; escaped ones count, as in OmegaConf.
    pub(crate) fn is_interpolation(&self) -> bool {
        self.as_text().is_some_and(|text| text.contains("${"))
    }

    pub(crate) fn is_container(&self) -> bool {
        matches!(self.value, Tree::Map(_) | Tree::List(_))
    }

    pub(crate) fn kind(&self) -> &'static str {
        match &self.value {
            Tree::Null => "null",
            Tree::Bool(_) => "a boolean",
            Tree::Int(_) => "an integer",
            Tree::Float(_) => "a number",
            Tree::Text(_) => "a string",
            Tree::List(_) => "a list",
            Tree::Map(_) => "a mapping",
        }
    }

    /// Returns the child at one step of a path: a key, or an index into a list.
    pub(crate) fn step(&self, step: &str) -> Option<&Self> {
        match &self.value {
            Tree::Map(map) => {
                map.get(step).or_else(|| map.0.iter().find(|(k, _)| k.to_string() == step).map(|(_, n)| n))
            }
            Tree::List(items) => step.parse::<usize>().ok().and_then(|index| items.get(index)),
            _ => None,
        }
    }

    /// Returns the descendant at a path.
    pub(crate) fn at(&self, path: &[String]) -> Option<&Self> {
        path.iter().try_fold(self, |node, step| node.step(step))
    }

    /// Returns the number of values in this tree, including this one.
    pub(crate) fn weight(&self) -> usize {
        match &self.value {
            Tree::List(items) => 1 + items.iter().map(Self::weight).sum::<usize>(),
            Tree::Map(map) => 1 + map.0.iter().map(|(_, node)| node.weight()).sum::<usize>(),
            _ => 1,
        }
    }

    /// Converts to JSON: keys become strings; infinities and NaN, which JSON lacks, become the strings that YAML writes
    /// for them.
    pub(crate) fn to_json(&self) -> serde_json::Value {
        self.to_json_with(yaml_float)
    }

    /// Converts to JSON for a server's settings: infinities and NaN become `inf`, `-inf` and `nan`, as an override spells them. A setting
    /// of type float reads them as numbers.
    pub(crate) fn to_settings(&self) -> serde_json::Value {
        self.to_json_with(python_float)
    }

    /// Converts to JSON; `spell` writes the floats that JSON lacks.
    fn to_json_with(&self, spell: fn(f64) -> String) -> serde_json::Value {
        use serde_json::Value;
        match &self.value {
            Tree::Null => Value::Null,
            Tree::Bool(flag) => Value::Bool(*flag),
            Tree::Int(int) => i64::try_from(*int)
                .map(Value::from)
                .or_else(|_| u64::try_from(*int).map(Value::from))
                .unwrap_or_else(|_| Value::from(*int as f64)),
            Tree::Float(float) => {
                serde_json::Number::from_f64(*float).map_or_else(|| Value::String(spell(*float)), Value::Number)
            }
            Tree::Text(text) => Value::String(text.clone()),
            Tree::List(items) => Value::Array(items.iter().map(|item| item.to_json_with(spell)).collect()),
            Tree::Map(map) => {
                let entry = |(key, node): &(Key, Self)| (key.to_string(), node.to_json_with(spell));
                Value::Object(map.0.iter().map(entry).collect())
            }
        }
    }

    pub(crate) fn from_json(value: &serde_json::Value, origin: &Origin) -> Self {
        use serde_json::Value;
        let value = match value {
            Value::Null => Tree::Null,
            Value::Bool(flag) => Tree::Bool(*flag),
            Value::Number(number) => match (number.as_i64(), number.as_u64()) {
                (Some(int), _) => Tree::Int(i128::from(int)),
                (None, Some(int)) => Tree::Int(i128::from(int)),
                (None, None) => Tree::Float(number.as_f64().unwrap_or(f64::NAN)),
            },
            Value::String(text) => Tree::Text(text.clone()),
            Value::Array(items) => Tree::List(items.iter().map(|item| Self::from_json(item, origin)).collect()),
            Value::Object(map) => {
                Tree::Map(Map(map.iter().map(|(k, v)| (Key::Text(k.clone()), Self::from_json(v, origin))).collect()))
            }
        };
        Self::new(value, origin.clone())
    }

    /// Returns Python's `str` of the value, which an interpolation inside a longer string inserts.
    pub(crate) fn python_str(&self) -> String {
        match &self.value {
            Tree::Text(text) => text.clone(),
            _ => self.python_repr(),
        }
    }

    fn python_repr(&self) -> String {
        match &self.value {
            Tree::Null => "None".to_owned(),
            Tree::Bool(flag) => if *flag { "True" } else { "False" }.to_owned(),
            Tree::Int(int) => int.to_string(),
            Tree::Float(float) => python_float(*float),
            Tree::Text(text) => python_quoted(text),
            Tree::List(items) => format!("[{}]", items.iter().map(Self::python_repr).collect::<Vec<_>>().join(", ")),
            Tree::Map(map) => {
                let entry = |(key, node): &(Key, Self)| {
                    let key = key.text().map_or_else(|| key.to_string(), python_quoted);
                    format!("{key}: {}", node.python_repr())
                };
                format!("{{{}}}", map.0.iter().map(entry).collect::<Vec<_>>().join(", "))
            }
        }
    }
}

fn python_quoted(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut out = String::from(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => {
                out.push('\\');
                out.push(c);
            }
            c => out.push(c),
        }
    }
    out.push(quote);
    out
}

//! A file whose top-level keys are blocks of settings: what is wrong in one is told with its line and key.

use std::path::Path;

use serde::de::{DeserializeOwned, Deserializer};
use serde_path_to_error::Segment;

use super::node::Node;
use super::problem::{ConfigError, Mistake, Origin, Problem, suggest};
use super::yaml;

/// A file that has been read, YAML or JSON.
#[derive(Clone, Debug)]
pub(crate) struct Blocks(Node);

impl Blocks {
    pub(crate) fn read(path: &Path) -> Result<Self, ConfigError> {
        let source = path.display().to_string();
        let text = std::fs::read_to_string(path).map_err(|error| {
            Problem::new(Mistake::File, &Origin::of(&source), "", format!("cannot be read: {error}"))
        })?;
        Ok(Self(yaml::parse(&text, &source)?))
    }

    /// The names of the blocks, in their order.
    pub(crate) fn names(&self) -> Vec<String> {
        self.0.as_map().map(|map| map.0.iter().map(|(key, _)| key.to_string()).collect()).unwrap_or_default()
    }

    /// The block of that name, strictly typed.
    pub(crate) fn block<T: DeserializeOwned>(&self, name: &str) -> Result<T, ConfigError> {
        let Some(node) = self.0.step(name) else {
            let names = self.names();
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            let what = format!("there is no block '{name}'");
            return Err(Problem::new(Mistake::Value, &self.0.origin, "", what)
                .fix(suggest(name, &names, "blocks"))
                .into());
        };
        Ok(read(node, node.to_json())
            .map_err(|slip| slip.at(&self.0.origin, &[name], "correct the value in the file"))?)
    }

    /// The place of a key in a block; of the block, where it has no such key.
    pub(crate) fn origin(&self, path: [&str; 2]) -> Origin {
        let block = self.0.step(path[0]);
        let node = block.and_then(|block| block.step(path[1])).or(block).unwrap_or(&self.0);
        node.origin.clone()
    }

    /// What stands there, as JSON.
    pub(crate) fn text(&self, path: [&str; 2]) -> Option<String> {
        Some(self.0.step(path[0])?.step(path[1])?.to_json().to_string())
    }
}

/// What does not fit its type, and where.
pub(crate) struct Slip {
    path: Vec<String>,
    origin: Option<Origin>,
    message: String,
}

/// Reads `values`, which `node` holds, as a type.
pub(crate) fn read<'de, T: serde::Deserialize<'de>, D: Deserializer<'de>>(node: &Node, values: D) -> Result<T, Slip> {
    serde_path_to_error::deserialize(values).map_err(|error| {
        let step = |segment: &Segment| match segment {
            Segment::Seq { index } => Some(index.to_string()),
            Segment::Map { key } => Some(key.clone()),
            Segment::Enum { variant } => Some(variant.clone()),
            Segment::Unknown => None,
        };
        let path: Vec<String> = error.path().iter().filter_map(step).collect();
        let mut near = path.as_slice();
        while node.at(near).is_none() && !near.is_empty() {
            near = &near[..near.len() - 1];
        }
        let origin = node.at(near).map(|node| node.origin.clone());
        Slip { path, origin, message: error.inner().to_string() }
    })
}

impl Slip {
    /// The problem, with these steps before its path; `correct` is what to do about a value.
    pub(crate) fn at(self, otherwise: &Origin, before: &[&str], correct: &str) -> Problem {
        let Self { path, origin, message } = self;
        let key = before.iter().copied().chain(path.iter().map(String::as_str)).collect::<Vec<_>>().join(".");
        let mut quoted = message.split('`').skip(1).step_by(2);
        let fix = if message.starts_with("missing field") {
            format!("add '{}: …' to the block", quoted.next().unwrap_or_default())
        } else if message.starts_with("unknown field") {
            let wrong = quoted.next().unwrap_or_default();
            suggest(wrong, &quoted.collect::<Vec<_>>(), "keys")
        } else {
            correct.to_owned()
        };
        Problem::new(Mistake::Value, &origin.unwrap_or_else(|| otherwise.clone()), key, message).fix(fix)
    }
}

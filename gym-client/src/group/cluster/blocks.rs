//! Reads a file whose top-level keys are blocks of settings, and reports errors in a block with their line and key.

use std::path::Path;

use serde::de::DeserializeOwned;

use crate::config::problem::{ConfigError, Mistake, Origin, Problem, suggest};
use crate::config::yaml::deserialize::read;
use crate::config::yaml::node::Node;
use crate::config::yaml::parser;

/// A parsed file, YAML or JSON.
#[derive(Clone, Debug)]
pub(crate) struct Blocks(Node);

impl Blocks {
    pub(crate) fn read(path: &Path) -> Result<Self, ConfigError> {
        let source = path.display().to_string();
        let text = std::fs::read_to_string(path).map_err(|error| {
            Problem::new(Mistake::File, &Origin::of(&source), "", format!("cannot be read: {error}"))
        })?;
        Ok(Self(parser::parse(&text, &source)?))
    }

    /// Returns the names of the blocks, in their order.
    pub(crate) fn names(&self) -> Vec<String> {
        self.0.as_map().map(|map| map.0.iter().map(|(key, _)| key.to_string()).collect()).unwrap_or_default()
    }

    /// Deserializes the block of that name, strictly typed.
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

    /// Returns the position of a key in a block, or the position of the block if it does not have the key.
    pub(crate) fn origin(&self, path: [&str; 2]) -> Origin {
        let block = self.0.step(path[0]);
        let node = block.and_then(|block| block.step(path[1])).or(block).unwrap_or(&self.0);
        node.origin.clone()
    }

    /// Returns the value at this path, as JSON.
    pub(crate) fn text(&self, path: [&str; 2]) -> Option<String> {
        Some(self.0.step(path[0])?.step(path[1])?.to_json().to_string())
    }
}

//! Reads a file whose top-level keys are blocks of settings, and reports errors in a block with their line and key.

use std::path::Path;

use gym_core::{Code, Error};
use serde::de::DeserializeOwned;

use crate::config::problem::{ConfigError, Mistake, Origin, Problem, suggest};
use crate::config::yaml::deserialize::read;
use crate::config::yaml::node::Node;
use crate::config::yaml::parser;

/// A file of named blocks, YAML or JSON, for settings that are not NeMo Gym's: each block is read into a type of its own.
#[derive(Clone, Debug)]
pub struct BlockFile(Node);

impl BlockFile {
    /// Reads and parses a file.
    ///
    /// # Errors
    /// If the file cannot be read or parsed; the error names the file and the line.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let source = path.display().to_string();
        let text = std::fs::read_to_string(path).map_err(|error| {
            Problem::new(Mistake::File, &Origin::of(&source), "", format!("cannot be read: {error}"))
        })?;
        Self::parse(&text, &source)
    }

    /// Parses a text; `source` is its name in errors.
    ///
    /// # Errors
    /// If the text cannot be parsed; the error names the source and the line.
    pub fn parse(text: &str, source: &str) -> Result<Self, ConfigError> {
        Ok(Self(parser::parse(text, source)?))
    }

    /// Returns the names of the blocks, in their order.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        self.0.as_map().map(|map| map.0.iter().map(|(key, _)| key.to_string()).collect()).unwrap_or_default()
    }

    /// Deserializes the block of that name, strictly typed.
    ///
    /// # Errors
    /// If there is no such block, or if it has an unknown key or a value of the wrong type; the error names file, line and key.
    pub fn block<T: DeserializeOwned>(&self, name: &str) -> Result<T, ConfigError> {
        let Some(node) = self.0.step(name) else {
            let names = self.names();
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            let what = format!("there is no block '{name}'");
            return Err(Problem::new(Mistake::Value, &self.0.origin, "", what)
                .fix(suggest(name, &names, "blocks"))
                .into());
        };
        Ok(read(node, node.to_json())
            .map_err(|slip| slip.at(&self.0.origin, &[name], |_| "correct the value in the file".to_owned()))?)
    }

    /// Adds the position to an error of a block's own check. The message of the error begins with the key, and its fix follows a semicolon.
    /// `Unimplemented` becomes [`ConfigError::Unsupported`].
    #[must_use]
    pub fn placed(&self, block: &str, error: &Error) -> ConfigError {
        let key = error.message().split(' ').next().unwrap_or_default();
        let found = self.0.step(block).and_then(|block| block.step(key));
        let origin = found.or_else(|| self.0.step(block)).unwrap_or(&self.0).origin.clone();
        let (what, fix) = error.message().split_once("; ").unwrap_or((error.message(), ""));
        let path = format!("{block}.{key}");
        if error.code() == Code::Unimplemented {
            let what = format!("the value {}", found.map(|node| node.to_json().to_string()).unwrap_or_default());
            return ConfigError::Unsupported { origin, key: path, what, fix: fix.to_owned() };
        }
        Problem::new(Mistake::Value, &origin, path, what).fix(fix).into()
    }
}

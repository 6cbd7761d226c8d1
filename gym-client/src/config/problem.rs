//! Configuration errors: the location, the mistake and the fix.

use std::fmt;
use std::sync::Arc;

pub use crate::registry::nearest::nearest;

/// The location of a value: a source, such as a file, `command line` or `env.yaml`, and the line if it is known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Origin {
    /// The name of the file, or of another source such as `command line`.
    pub source: Option<Arc<str>>,
    /// Line number, counted from 1; 0 if there is none.
    pub line: u32,
}

impl Origin {
    /// Creates a location without a line.
    #[must_use]
    pub fn of(source: &str) -> Self {
        Self { source: Some(Arc::from(source)), line: 0 }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.source, self.line) {
            (Some(source), 0) => f.write_str(source),
            (Some(source), line) => write!(f, "{source}:{line}"),
            (None, _) => f.write_str("merged configuration"),
        }
    }
}

/// The class of a mistake, for callers that handle classes differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Mistake {
    /// A file does not exist or cannot be read.
    File,
    /// The text is not valid YAML, or NeMo Gym's loader rejects it.
    Syntax,
    /// A command-line override cannot be parsed or applied.
    Override,
    /// A value is `???` after merging.
    Missing,
    /// An interpolation `${…}` cannot be resolved.
    Interpolation,
    /// `_inherit_from`, `_copy` or `_delete_key` names a key that does not exist.
    Inheritance,
    /// Two files give a key values that cannot be merged.
    Merge,
    /// A reference names a server that no file defines.
    Reference,
    /// A value has the wrong type or is out of range, or a required key is absent.
    Value,
    /// Agents and servers do not fit together.
    Composition,
    /// No port is free.
    Port,
}

/// One mistake with its location and fix.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Problem {
    /// The class of the mistake.
    pub mistake: Mistake,
    /// File and line.
    pub origin: Origin,
    /// The affected instance (top-level name), if any.
    pub instance: Option<Box<str>>,
    /// The dotted key, from the top of the file.
    pub key: Option<Box<str>>,
    /// The cause.
    pub what: Box<str>,
    /// The fix; empty if `what` states it.
    pub fix: Box<str>,
}

impl Problem {
    pub(crate) fn new(mistake: Mistake, origin: &Origin, key: impl Into<Box<str>>, what: impl Into<Box<str>>) -> Self {
        let key = key.into();
        Self {
            mistake,
            origin: origin.clone(),
            instance: None,
            key: (!key.is_empty()).then_some(key),
            what: what.into(),
            fix: Box::default(),
        }
    }

    pub(crate) fn fix(mut self, fix: impl AsRef<str>) -> Self {
        self.fix = fix.as_ref().into();
        self
    }

    pub(crate) fn instance(mut self, name: &str) -> Self {
        self.instance = Some(name.into());
        self
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.origin)?;
        match (&self.instance, &self.key) {
            (Some(instance), Some(key)) if key.starts_with(&**instance) => write!(f, "{key}: ")?,
            (Some(instance), Some(key)) => write!(f, "{instance}: {key}: ")?,
            (Some(instance), None) => write!(f, "{instance}: ")?,
            (None, Some(key)) => write!(f, "{key}: ")?,
            (None, None) => {}
        }
        f.write_str(&self.what)?;
        if !self.fix.is_empty() {
            write!(f, "\n  fix: {}", self.fix)?;
        }
        Ok(())
    }
}

/// The error of loading or reading a configuration.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The user's mistakes, all that were found together.
    #[error("{}", list(.0))]
    Invalid(Vec<Problem>),
    /// The configuration uses a feature of NeMo Gym that this SDK does not support yet.
    #[error("{origin}: {key}: {what} is not supported yet\n  fix: {fix}")]
    Unsupported {
        /// Location of the key.
        origin: Origin,
        /// The key that requests the feature.
        key: String,
        /// The unsupported feature.
        what: String,
        /// An alternative.
        fix: String,
    },
}

impl ConfigError {
    /// Returns the mistakes; empty for [`ConfigError::Unsupported`].
    #[must_use]
    pub fn problems(&self) -> &[Problem] {
        match self {
            Self::Invalid(problems) => problems,
            Self::Unsupported { .. } => &[],
        }
    }
}

impl From<Problem> for ConfigError {
    fn from(problem: Problem) -> Self {
        Self::Invalid(vec![problem])
    }
}

fn list(problems: &[Problem]) -> String {
    problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}

/// The fix of a file that exists and is not opened for this user.
pub(crate) const LET_READ: &str = "let this user read the file and its directory";

/// Returns `did you mean X?`, or a list of the available names.
pub(crate) fn suggest(wanted: &str, names: &[&str], what: &str) -> String {
    match nearest(wanted, names.iter().copied()) {
        Some(name) => format!("did you mean '{name}'?"),
        None if names.is_empty() => format!("the configuration defines no {what}; add one"),
        None => format!("available {what}: {}", names.join(", ")),
    }
}

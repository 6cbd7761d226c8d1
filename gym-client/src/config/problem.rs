//! What is wrong with a configuration: the place, the mistake, the fix.

use std::fmt;
use std::sync::Arc;

/// Where a value came from: a file (or `command line`, `env.yaml`, …) and, when it is known, the line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Origin {
    /// The file as it was named, or what stands for it, as in `command line`.
    pub source: Option<Arc<str>>,
    /// 1-based line in that file; 0 when there is none.
    pub line: u32,
}

impl Origin {
    /// A place without a line.
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

/// The class of a mistake, for callers that act on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Mistake {
    /// A file that is not there or cannot be read.
    File,
    /// Text that is not YAML, or YAML that NeMo Gym's loader refuses too.
    Syntax,
    /// A command-line override that cannot be parsed or applied.
    Override,
    /// `???` left after merging.
    Missing,
    /// An interpolation `${…}` that cannot be resolved.
    Interpolation,
    /// `_inherit_from`, `_copy` or `_delete_key` naming something that is not there.
    Inheritance,
    /// Two files that give one key values which cannot be merged.
    Merge,
    /// A reference to a server that no file defines.
    Reference,
    /// A value of the wrong type or out of range, or a required key left out.
    Value,
    /// Agents and servers that do not fit together.
    Composition,
    /// No port was free.
    Port,
}

/// One mistake with its place and its fix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The class.
    pub mistake: Mistake,
    /// File and line.
    pub origin: Origin,
    /// The instance (top-level name) it is about, where it is about one.
    pub instance: Option<Box<str>>,
    /// The dotted key, from the top of the file.
    pub key: Option<Box<str>>,
    /// What is wrong.
    pub what: Box<str>,
    /// What to do about it; empty when `what` says it.
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

/// Why a configuration was refused.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// Mistakes of the user, all that were found together.
    #[error("{}", list(.0))]
    Invalid(Vec<Problem>),
    /// Something that NeMo Gym has and this SDK does not have yet.
    #[error("{origin}: {key}: {what} is not supported yet\n  fix: {fix}")]
    Unsupported {
        /// Where it was asked for.
        origin: Origin,
        /// The key that asks for it.
        key: String,
        /// What is missing.
        what: String,
        /// What to do instead.
        fix: String,
    },
}

impl ConfigError {
    /// The mistakes, empty for [`ConfigError::Unsupported`].
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

/// The nearest of `names` to `wanted`, when it is near enough to be a slip of the keyboard.
pub(crate) fn nearest<'a>(wanted: &str, names: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let wanted = wanted.to_lowercase();
    names
        .into_iter()
        .map(|name| (strsim::normalized_damerau_levenshtein(&wanted, &name.to_lowercase()), name))
        .filter(|(score, _)| *score >= 0.6)
        .max_by(|a, b| a.0.total_cmp(&b.0).then_with(|| b.1.cmp(a.1)))
        .map(|(_, name)| name)
}

/// `did you mean X?`, else what there is to choose from.
pub(crate) fn suggest(wanted: &str, names: &[&str], what: &str) -> String {
    match nearest(wanted, names.iter().copied()) {
        Some(name) => format!("did you mean '{name}'?"),
        None if names.is_empty() => format!("no {what} is defined; add one"),
        None => format!("available {what}: {}", names.join(", ")),
    }
}

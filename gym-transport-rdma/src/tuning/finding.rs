//! The findings of a check of settings.

use std::fmt;

use serde::Serialize;

/// How much a finding matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// Worth a mention.
    Ok,
    /// It works, but slowly, or fails elsewhere.
    Warning,
    /// It fails, hangs, silently uses something slower, or does not mean what is written.
    Error,
}

impl Severity {
    /// Returns `ok`, `warning` or `error`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Error => "error",
        }
    }
}

/// A finding of a check: the fact, and the way to mend it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Finding {
    /// The variable or the fact that it is about, such as `NCCL_IB_HCA`, `memlock` or `/dev/shm`.
    pub about: String,
    /// How much it matters.
    pub severity: Severity,
    /// The fact.
    pub found: String,
    /// The fix. Empty for [`Severity::Ok`].
    pub fix: String,
    /// The source of the decision: where the setting comes from, the file of the machine, or the source of the rule.
    pub because: String,
}

impl Finding {
    pub(crate) fn error(about: impl Into<String>, found: impl Into<String>, fix: impl Into<String>) -> Self {
        Self::new(Severity::Error, about, found, fix)
    }

    pub(crate) fn warning(about: impl Into<String>, found: impl Into<String>, fix: impl Into<String>) -> Self {
        Self::new(Severity::Warning, about, found, fix)
    }

    fn new(severity: Severity, about: impl Into<String>, found: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { about: about.into(), severity, found: found.into(), fix: fix.into(), because: String::new() }
    }

    pub(crate) fn because(mut self, because: impl Into<String>) -> Self {
        self.because = because.into();
        // Nobody looks for a setting in a file, so the fact names the file, and so it does where one source hides another.
        if self.because.contains(" wins over ") && self.because.starts_with("the environment") {
            self.found += &format!(" ({})", self.because);
            return self;
        }
        let source = self.because.strip_prefix("set in ").or_else(|| Some(self.because.split_once(" wins over ")?.0));
        if let Some(source) = source.filter(|source| *source != "the environment")
            && !source.rsplit_once(':').is_some_and(|(path, _)| self.found.contains(path))
        {
            self.found += &format!(" (in {source})");
        }
        self
    }
}

impl Finding {
    /// Returns the fact and what decided, once.
    #[must_use]
    pub fn fact(&self) -> String {
        with_reason(&self.found, &self.because)
    }
}

/// Returns a fact with what decided, unless it says that already.
#[must_use]
pub fn with_reason(found: &str, because: &str) -> String {
    if because.is_empty() || found.contains(because) { found.to_owned() } else { format!("{found} ({because})") }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: {}", self.severity.as_str(), self.about, self.found)?;
        if !self.fix.is_empty() {
            write!(f, "; fix: {}", self.fix)?;
        }
        if !self.because.is_empty() {
            write!(f, " ({})", self.because)?;
        }
        Ok(())
    }
}

//! One finding of `rgym doctor`.

use serde::Serialize;

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Finding {
    pub(super) topic: String,
    /// The status: `ok`, `warning`, `error`, `missing` or `not_needed`.
    pub(super) status: &'static str,
    pub(super) found: String,
    /// The fix; only for an error, a warning and something missing.
    pub(super) fix: Option<String>,
}

impl Finding {
    pub(super) fn ok(topic: &str, found: impl Into<String>) -> Self {
        Self { topic: topic.to_owned(), status: "ok", found: found.into(), fix: None }
    }

    pub(super) fn not_needed(topic: &str, found: impl Into<String>) -> Self {
        Self { status: "not_needed", ..Self::ok(topic, found) }
    }

    pub(super) fn warning(topic: &str, found: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { status: "warning", fix: Some(fix.into()), ..Self::ok(topic, found) }
    }
}

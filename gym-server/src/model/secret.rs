//! A key that no log shows.

use std::fmt;

use serde::{Deserialize, Deserializer};

/// A key or password. Printing it for debugging shows that there is one, never what it is.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Keeps the text secret from here on.
    #[must_use]
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// The text, for the one place that sends it.
    pub(super) fn reveal(&self) -> &str {
        &self.0
    }

    /// The key of the configuration; without one, that of the environment: `OPENAI_API_KEY`, then `policy_api_key`.
    pub(super) fn or_from_environment(configured: Option<Self>) -> Option<Self> {
        configured.or_else(|| {
            ["OPENAI_API_KEY", "policy_api_key"].into_iter().find_map(|name| std::env::var(name).ok()).map(Self)
        })
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_empty() { "Secret(none)" } else { "Secret(****)" })
    }
}

impl<'de> Deserialize<'de> for Secret {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer).map(Self)
    }
}

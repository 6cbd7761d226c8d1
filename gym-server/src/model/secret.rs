//! A key that does not appear in logs.

use std::fmt;

use serde::{Deserialize, Deserializer};

/// A key or password. Its `Debug` output shows that there is a value, but not the value itself.
#[derive(Clone, Default, PartialEq, Eq)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema), schemars(from = "String"))]
pub struct Secret(String);

impl Secret {
    /// Stores the string as a secret.
    #[must_use]
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// Returns the string, for the code that sends it.
    pub(super) fn reveal(&self) -> &str {
        &self.0
    }

    /// Returns the key of the configuration, or by default the environment variable `OPENAI_API_KEY`, then `policy_api_key`.
    pub(super) fn or_from_environment(configured: Option<Self>) -> Option<Self> {
        let of_environment = |name: &str| std::env::var(name).ok().filter(|key| !key.trim().is_empty());
        let key = configured
            .or_else(|| ["OPENAI_API_KEY", "policy_api_key"].into_iter().find_map(of_environment).map(Self))?;
        // A key from a mounted file ends with a newline.
        Some(Self(key.0.trim().to_owned()))
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

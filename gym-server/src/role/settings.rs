//! Values that the configuration blocks of several servers share.

use std::time::Duration;

use serde::{Deserialize, Deserializer};

/// Names another server of the configuration: `{type: resources_servers, name: my_env}`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
#[serde(from = "TypedRef")]
pub struct ServerRef {
    /// The instance's name.
    pub name: String,
}

/// A reference as it is written. The loader has checked that the type is that of the server.
#[derive(Deserialize)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema))]
struct TypedRef {
    /// The kind of the server.
    #[serde(default, rename = "type")]
    #[cfg_attr(feature = "schemars", schemars(with = "String", extend("enum" = gym_core::server::ServerKind::ALL.map(gym_core::server::ServerKind::as_str))))]
    _kind: Option<String>,
    /// The name of its instance.
    name: String,
}

impl From<TypedRef> for ServerRef {
    fn from(typed: TypedRef) -> Self {
        Self { name: typed.name }
    }
}

impl ServerRef {
    /// Refers to the server of this name.
    #[must_use]
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into() }
    }
}

/// A positive time, written as a number of seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "schemars", derive(schemars::JsonSchema), schemars(from = "f64", extend("exclusiveMinimum" = 0)))]
pub struct Seconds(pub Duration);

impl<'de> Deserialize<'de> for Seconds {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let seconds = f64::deserialize(deserializer)?;
        match Duration::try_from_secs_f64(seconds) {
            Ok(duration) if !duration.is_zero() => Ok(Self(duration)),
            _ => Err(serde::de::Error::custom(format!("{seconds} is not a positive number of seconds"))),
        }
    }
}

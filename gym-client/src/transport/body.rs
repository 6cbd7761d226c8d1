//! JSON bodies of the messages between programs of this SDK.

use gym_core::{Error, Result};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Deserializes a body.
///
/// # Errors
/// `InvalidArgument` if the body is not the JSON of such a value.
pub fn read<T: DeserializeOwned>(body: &[u8]) -> Result<T> {
    serde_json::from_slice(body).map_err(|error| Error::invalid(format!("the body cannot be read: {error}")))
}

/// Serializes a body.
///
/// # Errors
/// `Internal` if the value cannot be written as JSON.
pub fn write(value: &impl Serialize) -> Result<Vec<u8>> {
    serde_json::to_vec(value).map_err(|error| Error::internal("the body cannot be written").caused_by(error))
}

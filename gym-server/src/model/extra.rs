//! The keys that a request carries for engines, such as the seed of a repeat: OpenAI's dialects have no place for them, so rows carry them in the
//! metadata, as in NeMo Gym.

use gym_core::{Code, Error, RawObject, Result};
use serde_json::{Map, Value};

/// Returns the keys that are added to a request: those that the configuration has, and those that the request carries in `metadata.extra_body`, which
/// take precedence. The request keeps its own value of a key that it has.
///
/// # Errors
/// `InvalidArgument` if `metadata.extra_body` is no JSON object as text.
pub(super) fn added(configured: Option<&Map<String, Value>>, request: &RawObject) -> Result<Map<String, Value>> {
    let mut added = configured.cloned().unwrap_or_default();
    added.extend(object_in(request, "extra_body")?);
    added.retain(|key, _| !request.contains(key));
    Ok(added)
}

/// Returns the JSON object that a key of the metadata has as text; empty if there is none.
///
/// # Errors
/// `InvalidArgument` if the text is no JSON object.
pub(super) fn object_in(request: &RawObject, key: &str) -> Result<Map<String, Value>> {
    let Some(metadata) = request.get_object("metadata").ok().flatten() else { return Ok(Map::new()) };
    let text = metadata.get_as::<Value>(key).ok().flatten();
    let text = text.as_ref().and_then(Value::as_str).filter(|text| !text.is_empty()).unwrap_or("{}");
    serde_json::from_str(text).map_err(|error| {
        let text = format!("`metadata.{key}` is no JSON object: {error}");
        Error::finished(Code::InvalidArgument, text)
    })
}

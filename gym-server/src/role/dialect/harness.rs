//! Converts requests of streaming harnesses to the plain schema: tools grouped in namespaces, tools inside the input, and several
//! system messages at the beginning.
//!
//! The upstream engines support flat functions and one system message. Names are joined in the request and split in the response,
//! so the harness sees its own names.

use std::collections::BTreeMap;

use bytes::Bytes;
use gym_core::{RawObject, Result};
use serde_json::{Map, Value};

use crate::role::dialect::schema::Dialect;

const SEPARATOR: &str = "__";

/// A request of a harness, converted to the plain schema.
#[derive(Debug)]
pub(crate) struct PlainRequest {
    pub(crate) body: RawObject,
    pub(crate) names: JoinedNames,
}

/// Joined names, each with its namespace and original name.
#[derive(Debug, Default)]
pub(crate) struct JoinedNames(BTreeMap<String, (String, String)>);

impl JoinedNames {
    /// Returns the item with the harness's own namespace and name, or `None` if its name was not joined.
    pub(crate) fn restored(&self, item: &str) -> Option<Bytes> {
        if self.0.is_empty() {
            return None;
        }
        let item = RawObject::parse(item.to_owned()).ok()?;
        let text = |key: &str| item.get_as::<String>(key).ok().flatten();
        let (namespace, name) =
            self.0.get(&text("name")?).filter(|_| text("type").as_deref() == Some("function_call"))?;
        let (namespace, name) = (Value::from(namespace.as_str()), Value::from(name.as_str()));
        Some(item.edit().set("name", name.to_string()).set("namespace", namespace.to_string()).to_rope().to_bytes())
    }

    /// Flattens namespaces into the list of tools.
    fn flatten(&mut self, tools: Vec<Value>) -> Vec<Value> {
        let mut flat = Vec::with_capacity(tools.len());
        for tool in tools {
            if tool["type"] != "namespace" {
                flat.push(tool);
                continue;
            }
            let namespace = tool["name"].as_str().unwrap_or_default();
            for inner in tool["tools"].as_array().into_iter().flatten() {
                let (Value::Object(fields), Some(name)) =
                    (inner, inner["name"].as_str().filter(|name| !name.is_empty()))
                else {
                    continue;
                };
                let joined = format!("{namespace}{SEPARATOR}{name}");
                let mut fields: Map<String, Value> = fields.clone();
                fields.insert("type".into(), "function".into());
                fields.insert("name".into(), joined.as_str().into());
                flat.push(fields.into());
                self.0.insert(joined, (namespace.to_owned(), name.to_owned()));
            }
        }
        flat
    }
}

/// Returns the request in the plain schema, without `stream`. Parts that need no change keep their text.
pub(crate) fn plain(body: &RawObject) -> Result<PlainRequest> {
    let body = Dialect::Responses.without_stream(body)?;
    let mut names = JoinedNames::default();
    let mut edit = body.edit();
    let mut tools = body.get_as::<Value>("tools").ok().flatten().and_then(|tools| match tools {
        Value::Array(tools) => Some(tools),
        _ => None,
    });
    let mut tools_changed = false;
    if let Some(given) = tools.take() {
        let flat = names.flatten(given);
        tools_changed = !names.0.is_empty();
        tools = Some(flat);
    }
    if let Ok(Some(items)) = body.get_as::<Vec<RawObject>>("input") {
        let mut input = FlattenedInput::default();
        for item in &items {
            input.take(item);
        }
        if !input.carried.is_empty() {
            let carried = names.flatten(input.carried);
            let usable = carried.into_iter().filter(|tool| tool["type"] == "function" && tool["name"].is_string());
            tools.get_or_insert_default().extend(usable);
            tools_changed = true;
        }
        if !input.leading.is_empty() {
            let own = body.get_as::<Option<String>>("instructions").ok().flatten().flatten().unwrap_or_default();
            let parts = std::iter::once(own).chain(input.leading).filter(|part| !part.is_empty());
            let instructions = parts.collect::<Vec<_>>().join("\n\n");
            if !instructions.is_empty() {
                edit = edit.set("instructions", Value::from(instructions).to_string());
            }
        }
        if input.changed {
            edit = edit.set("input", list(&input.kept));
        }
    }
    if let Some(tools) = tools.filter(|_| tools_changed) {
        edit = edit.set("tools", Value::from(tools).to_string());
    }
    let body = edit.to_object()?;
    Ok(PlainRequest { body, names })
}

fn list(items: &[Bytes]) -> Vec<u8> {
    let mut text = vec![b'['];
    for (index, item) in items.iter().enumerate() {
        if index > 0 {
            text.push(b',');
        }
        text.extend_from_slice(item);
    }
    text.push(b']');
    text
}

#[derive(Default)]
struct FlattenedInput {
    kept: Vec<Bytes>,
    /// Tools that the request carried as input items.
    carried: Vec<Value>,
    /// The texts of the leading system and developer messages.
    leading: Vec<String>,
    changed: bool,
}

impl FlattenedInput {
    fn take(&mut self, item: &RawObject) {
        let value = |key: &str| item.get_as::<Value>(key).ok().flatten().unwrap_or_default();
        let (kind, role) = (value("type"), value("role"));
        if kind == "additional_tools" {
            self.carried.extend(value("tools").as_array().cloned().unwrap_or_default());
            self.changed = true;
        } else if self.kept.is_empty()
            && (kind.is_null() || kind == "message")
            && (role == "system" || role == "developer")
        {
            self.leading.push(match value("content") {
                Value::String(text) => text,
                Value::Array(parts) => parts
                    .iter()
                    .filter(|part| ["input_text", "output_text", "text"].iter().any(|kind| part["type"] == *kind))
                    .filter_map(|part| part["text"].as_str())
                    .collect(),
                _ => String::new(),
            });
            self.changed = true;
        } else if let (true, Some(namespace)) =
            (kind == "function_call", value("namespace").as_str().filter(|n| !n.is_empty()))
        {
            let joined = format!("{namespace}{SEPARATOR}{}", value("name").as_str().unwrap_or_default());
            let edit = item.edit().remove("namespace").set("name", Value::from(joined).to_string());
            self.kept.push(edit.to_rope().to_bytes());
            self.changed = true;
        } else {
            self.kept.push(item.text().clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(body: &str) -> PlainRequest {
        plain(&RawObject::parse(body.to_owned()).unwrap()).unwrap()
    }

    #[test]
    fn what_needs_no_change_keeps_its_text() {
        let plain = of(
            r#"{"input":[{"role":"user","content":"x", "n":1E5}],"tools":[{"type":"function","name":"f","x":1E5}],"stream":true}"#,
        );
        assert_eq!(
            plain.body.text(),
            r#"{"input":[{"role":"user","content":"x", "n":1E5}],"tools":[{"type":"function","name":"f","x":1E5}]}"#
        );
        assert_eq!(plain.names.restored(r#"{"type":"function_call","name":"a__b"}"#), None);
    }

    #[test]
    fn namespaces_are_joined_on_the_way_in_and_restored_on_the_way_out() {
        let plain = of(
            r#"{"input":[{"type":"function_call","namespace":"fs","name":"read","n":1E5},{"type":"additional_tools","tools":[{"type":"function","name":"g"},{"type":"custom","name":"js"}]}],"tools":[{"type":"namespace","name":"fs","tools":[{"name":"read","parameters":{}}]}],"stream":true,"client_metadata":{}}"#,
        );
        assert_eq!(
            plain.body.text(),
            r#"{"input":[{"type":"function_call","name":"fs__read","n":1E5}],"tools":[{"name":"fs__read","parameters":{},"type":"function"},{"type":"function","name":"g"}]}"#
        );
        let item = plain.names.restored(r#"{"type":"function_call","name":"fs__read","arguments":"{}"}"#).unwrap();
        assert_eq!(item, r#"{"type":"function_call","name":"read","arguments":"{}","namespace":"fs"}"#);
        assert_eq!(plain.names.restored(r#"{"type":"message","name":"fs__read"}"#), None);
    }

    #[test]
    fn the_first_messages_of_the_system_become_instructions() {
        let plain = of(
            r#"{"instructions":"a","input":[{"role":"developer","content":"b"},{"type":"message","role":"system","content":[{"type":"input_text","text":"c"}]},{"role":"user","content":"x"},{"role":"system","content":"late"}]}"#,
        );
        assert_eq!(
            plain.body.text(),
            r#"{"instructions":"a\n\nb\n\nc","input":[{"role":"user","content":"x"},{"role":"system","content":"late"}]}"#
        );
    }
}

//! The JSON schema of a configuration file, from which editors complete and check it.
//!
//! ```text
//!   keys of every configuration (gym_client::config::reference) ──┐
//!   settings of the SDK's implementations (settings.json)  ───────┼─► one schema: instance ► kind ► implementation ► keys
//!   settings of other implementations (Servers::settings_schema) ─┘
//! ```
//!
//! A file may contain less than a configuration: another file may add the rest, and each value may be an interpolation. So the schema
//! requires keys only in a block with an `entrypoint` that inherits from no other block, and accepts an interpolation for each value.

use std::sync::Arc;

use gym_client::config::reference::{
    BLOCK_KEYS, COLLECT_KEYS, ConfigKey, ENDPOINT_FILE_KEYS, IGNORED, TOP_LEVEL_KEYS, composition_keys,
    nemo_keys_of_implementation, nemo_keys_of_kind, unsupported_keys,
};
use gym_core::server::ServerKind;
use serde_json::{Map, Value, json};

/// The schemas of the settings that the SDK's implementations read, by kind and implementation. The test `reference` generates the
/// file from the settings types, so that programs need not be built with `schemars`.
const STOCK: &str = include_str!("settings.json");

/// The settings of an implementation.
#[derive(Clone, Debug)]
pub(super) enum SettingsSchema {
    /// Those of the SDK's implementation of this name.
    Stock,
    /// Those of an implementation of the program.
    Given(Arc<Value>),
}

/// An implementation of a program.
pub(super) struct Implementation<'a> {
    pub(super) kind: ServerKind,
    pub(super) name: &'a str,
    pub(super) settings: Option<&'a SettingsSchema>,
}

/// Returns the schema of the configuration files of a program with these implementations and transports.
pub(super) fn of_configuration(implementations: &[Implementation<'_>], transports: &[&str]) -> Value {
    let stock: Map<String, Value> = serde_json::from_str(STOCK).expect("a test compares the file with its types");
    let mut definitions = scalars();
    let mut instance = Map::new();
    for kind in ServerKind::ALL {
        let mut blocks = Map::new();
        for Implementation { name, settings, .. } in implementations.iter().filter(|made| made.kind == kind) {
            let name = (*name).to_owned();
            let path = format!("{kind}.{name}");
            let settings = match settings {
                None => None,
                Some(SettingsSchema::Stock) => stock.get(&path).cloned(),
                Some(SettingsSchema::Given(schema)) => Some((**schema).clone()),
            };
            let settings = settings.map(|settings| hoisted(settings, &path, &mut definitions));
            definitions.insert(path.clone(), block(kind, &name, settings, transports));
            blocks.insert(name, reference(&path));
        }
        definitions.insert(kind.to_string(), block(kind, "", None, transports));
        let mut implementation = json!({
            "description": format!("The implementation of the server, and its settings. {}", about(kind)),
            "type": "object",
            "properties": blocks,
            "additionalProperties": reference(kind.as_str()),
        });
        at_value(&mut implementation);
        instance.insert(kind.to_string(), implementation);
    }
    definitions.insert("instance".to_owned(), json!({"type": "object", "properties": instance}));
    let kinds: Vec<Value> = ServerKind::ALL.iter().map(|kind| json!({"required": [kind.as_str()]})).collect();
    json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Configuration of gym servers",
        // An empty file is `null`.
        "type": ["object", "null"],
        "properties": keys(TOP_LEVEL_KEYS.iter().chain(&COLLECT_KEYS), transports),
        "additionalProperties": {
            "description": "A server, or a variable for interpolations.",
            "if": {"type": "object", "anyOf": kinds},
            "then": reference("instance"),
        },
        "$defs": definitions,
    })
}

fn about(kind: ServerKind) -> &'static str {
    match kind {
        ServerKind::Resources => {
            "A resources server holds the state and the tools of an environment, and scores episodes."
        }
        ServerKind::Agent => "An agent runs episodes with a model server and a resources server.",
        ServerKind::Model => "A model server generates responses.",
        ServerKind::Environment => "An environment server runs the rows of a collection.",
    }
}

fn reference(name: &str) -> Value {
    json!({"$ref": format!("#/$defs/{name}")})
}

/// The definitions of values that are written as strings.
fn scalars() -> Map<String, Value> {
    let number = r"^\s*[-+]?(\d[\d_]*\.?[\d_]*|\.\d+)([eE][-+]?\d+)?\s*$";
    let flag = "^([01]|[oO][nN]|[oO][fF][fF]|[tTfFyYnN]|[tT][rR][uU][eE]|[fF][aA][lL][sS][eE]|[yY][eE][sS]|[nN][oO])$";
    let definitions = json!({
        "interpolation": {
            "description": "An interpolation such as `${oc.env:NAME}` or `${key}`, or `???` for a value that another file sets.",
            "type": "string",
            "pattern": r"\$\{|^\?\?\?$",
        },
        "number_in_string": {"description": "A number in quotes.", "type": "string", "pattern": number},
        "boolean_in_string": {"description": "A boolean in quotes.", "type": "string", "pattern": flag},
    });
    let Value::Object(definitions) = definitions else { unreachable!("written as an object above") };
    definitions
}

/// Returns the properties of keys.
fn keys<'a>(keys: impl Iterator<Item = &'a ConfigKey>, transports: &[&str]) -> Map<String, Value> {
    let schema = |key: &ConfigKey| {
        let mut schema = key.schema(transports);
        at_value(&mut schema);
        (key.name.to_owned(), schema)
    };
    keys.map(schema).collect()
}

/// Returns the schema of a block. Without `settings`, it accepts any key.
fn block(kind: ServerKind, implementation: &str, settings: Option<Value>, transports: &[&str]) -> Value {
    let mut properties = keys(BLOCK_KEYS.iter().chain(composition_keys(kind)), transports);
    let mut nemo = nemo_keys_of_kind(kind).to_vec();
    nemo.extend(nemo_keys_of_implementation(implementation));
    if settings.is_some() && implementation == "vllm_model" {
        nemo.extend(ENDPOINT_FILE_KEYS);
    }
    for name in nemo {
        properties.insert(name.to_owned(), json!({"description": IGNORED}));
    }
    for name in unsupported_keys(implementation) {
        let unset = json!({"description": "Not supported: remove it.", "enum": [null, false, [], {}]});
        properties.insert((*name).to_owned(), unset);
    }
    let mut required: Vec<Value> = Vec::new();
    if kind == ServerKind::Resources {
        required.push("domain".into());
    }
    let mut description = Value::from(format!("A block of {kind}."));
    let mut open = json!(true);
    if let Some(Value::Object(mut settings)) = settings {
        inside(&mut settings);
        open = settings.remove("additionalProperties").unwrap_or_else(|| json!(!settings.contains_key("properties")));
        if let Some(own) = settings.remove("description") {
            description = own;
        }
        if let Some(Value::Object(own)) = settings.remove("properties") {
            properties.extend(own);
        }
        if let Some(own) = settings.remove("then").and_then(|mut then| Some(then.get_mut("required")?.take())) {
            required.extend(own.as_array().cloned().unwrap_or_default());
        }
    }
    let mut block = json!({
        "description": description,
        "type": "object",
        "properties": properties,
        "patternProperties": directives(),
        "additionalProperties": open,
    });
    if !required.is_empty() {
        block["if"] = json!({"allOf": [{"required": ["entrypoint"]}, inherits_nothing()]});
        block["then"] = json!({ "required": required });
    }
    block
}

/// Moves the definitions of a schema into those of the whole, under names that begin with `path`.
fn hoisted(mut schema: Value, path: &str, definitions: &mut Map<String, Value>) -> Value {
    fn rename(schema: &mut Value, path: &str) {
        match schema {
            Value::Object(map) => {
                if let Some(Value::String(target)) = map.get_mut("$ref")
                    && let Some(name) =
                        target.strip_prefix("#/$defs/").or_else(|| target.strip_prefix("#/definitions/"))
                {
                    *target = format!("#/$defs/{path}.{name}");
                }
                map.values_mut().for_each(|value| rename(value, path));
            }
            Value::Array(items) => items.iter_mut().for_each(|item| rename(item, path)),
            _ => {}
        }
    }
    rename(&mut schema, path);
    for key in ["$defs", "definitions"] {
        if let Some(Value::Object(own)) = schema.as_object_mut().and_then(|schema| schema.remove(key)) {
            for (name, mut definition) in own {
                at_value(&mut definition);
                definitions.insert(format!("{path}.{name}"), definition);
            }
        }
    }
    schema
}

/// The keys by which the loader composes mappings.
fn directives() -> Value {
    let text = "A directive of the loader, which moves, copies or removes keys.";
    json!({"^_(inherit_from|copy|delete_key)$": {"description": text, "type": "string"}})
}

fn inherits_nothing() -> Value {
    json!({"not": {"anyOf": [{"required": ["_inherit_from"]}, {"required": ["_copy"]}]}})
}

/// Adapts the schema of a value to what a file may contain: an interpolation, and a number or boolean in quotes.
fn at_value(schema: &mut Value) {
    let Value::Object(map) = schema else { return };
    inside(map);
    if accepts_any_string(map) {
        return;
    }
    let mut outside = Map::new();
    for key in ["title", "description", "default", "examples", "deprecated"] {
        if let Some(value) = map.shift_remove(key) {
            outside.insert(key.to_owned(), value);
        }
    }
    let mut forms = match map.shift_remove("anyOf") {
        Some(Value::Array(forms)) if map.is_empty() => forms,
        any => {
            map.extend(any.map(|any| ("anyOf".to_owned(), any)));
            vec![Value::Object(std::mem::take(map))]
        }
    };
    let accepted = |wanted: &[&str]| forms.iter().any(|form| has_type(form, wanted));
    let (number, flag) = (accepted(&["integer", "number"]), accepted(&["boolean"]));
    forms.push(reference("interpolation"));
    forms.extend(number.then(|| reference("number_in_string")));
    forms.extend(flag.then(|| reference("boolean_in_string")));
    outside.insert("anyOf".to_owned(), forms.into());
    *map = outside;
}

/// Adapts the values inside of a schema, but not the value itself.
fn inside(map: &mut Map<String, Value>) {
    // Formats of Rust's types, which other tools do not know.
    for key in ["$schema", "title", "format"] {
        map.shift_remove(key);
    }
    for key in ["properties", "patternProperties"] {
        if let Some(Value::Object(values)) = map.get_mut(key) {
            values.values_mut().for_each(at_value);
        }
    }
    for key in ["items", "additionalProperties"] {
        if let Some(value) = map.get_mut(key) {
            at_value(value);
        }
    }
    if let Some(Value::Array(items)) = map.get_mut("prefixItems") {
        items.iter_mut().for_each(at_value);
    }
    for key in ["anyOf", "oneOf", "allOf"] {
        if let Some(Value::Array(forms)) = map.get_mut(key) {
            forms.iter_mut().filter_map(Value::as_object_mut).for_each(inside);
        }
    }
    let named = map.contains_key("properties");
    if named && !map.contains_key("additionalProperties") && !map.contains_key("unevaluatedProperties") {
        map.insert("additionalProperties".to_owned(), json!(false));
    }
    if map.get("additionalProperties").is_some_and(|more| *more != json!(true)) {
        let patterns = map.entry("patternProperties").or_insert_with(|| json!({}));
        if let (Value::Object(patterns), Value::Object(directives)) = (patterns, directives()) {
            patterns.extend(directives);
        }
    }
    if let Some(required) = map.shift_remove("required") {
        map.insert("if".to_owned(), inherits_nothing());
        map.insert("then".to_owned(), json!({ "required": required }));
    }
}

/// Returns `true` if a schema accepts every string.
fn accepts_any_string(map: &Map<String, Value>) -> bool {
    const LIMITS: [&str; 7] = ["enum", "const", "pattern", "minLength", "maxLength", "$ref", "allOf"];
    if LIMITS.iter().any(|key| map.contains_key(*key)) {
        return false;
    }
    let typed = match map.get("type") {
        Some(Value::String(name)) => name == "string",
        Some(Value::Array(names)) => names.iter().any(|name| name == "string"),
        _ => true,
    };
    let form = |forms: &Value| {
        forms.as_array()?.iter().find(|form| form.as_object().is_some_and(accepts_any_string)).map(drop)
    };
    typed && ["anyOf", "oneOf"].iter().all(|key| map.get(*key).is_none_or(|forms| form(forms).is_some()))
}

/// Returns `true` if a schema, or one of its alternatives, has one of these types.
fn has_type(schema: &Value, wanted: &[&str]) -> bool {
    let is_wanted = |name: &Value| name.as_str().is_some_and(|name| wanted.contains(&name));
    let typed = match schema.get("type") {
        Some(Value::Array(names)) => names.iter().any(is_wanted),
        Some(name) => is_wanted(name),
        None => false,
    };
    let forms = ["anyOf", "oneOf", "allOf"].iter().filter_map(|key| schema.get(*key)?.as_array()).flatten();
    typed || forms.into_iter().any(|form| has_type(form, wanted))
}

//! The JSON schema of a program: its keys are those that the program reads.
//!
//! `tests/python/config_schema.py` checks with a reference validator which files the schema accepts.

use std::collections::BTreeSet;
use std::path::Path;

use gym_client::config::reference::TOP_LEVEL_KEYS;
use gym_client::config::{ConfigLoader, GymConfig, Overrides};
use gym_core::server::ServerKind;
use gym_core::{CallContext, ModelResponse, ResourcesServer, Result, SessionId, Verdict, World};
use gym_server::{Servers, Stack, StackOptions};
use schemars::JsonSchema;
use serde_json::{Value, json};

use crate::settings;

struct Shop;

impl ResourcesServer for Shop {
    type Task = Value;

    async fn verify(&self, _: &CallContext, _: &SessionId, _: Value, _: &ModelResponse) -> Result<Verdict> {
        Ok(Verdict::correct(true))
    }
}

fn loaded(text: &str) -> GymConfig {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("a.yaml"), text).unwrap();
    ConfigLoader::new(folder.path()).environment(|_| None).load(&["a.yaml"], &Overrides::default()).unwrap()
}

/// Returns the first keys that an implementation reads, and the number of all, from its error about a key that it does not have.
async fn keys_read(kind: ServerKind, implementation: &str) -> (BTreeSet<String>, usize) {
    let domain = if kind == ServerKind::Resources { "domain: other, " } else { "" };
    let text = format!("x: {{{kind}: {{{implementation}: {{entrypoint: app.py, {domain}qqqqqqqqqqqq: 1}}}}}}\n");
    let mut config = loaded(&text);
    config.head.port = 0;
    let error = Stack::start(config, &Servers::stock(), &World::real(), StackOptions::default()).await;
    let error = error.unwrap_err().to_string();
    let listed = error.split_once(&format!("remove it; {implementation} reads ")).expect(&error).1;
    let line = listed.lines().next().unwrap_or_default();
    let (keys, more) = match line.split_once(", and ") {
        Some((keys, more)) => (keys, more.split(' ').next().and_then(|count| count.parse().ok()).expect(line)),
        None => (line, 0),
    };
    let keys: BTreeSet<String> = keys.split(", ").map(|key| key.trim_end_matches([')', ' ']).to_owned()).collect();
    let all = keys.len() + more;
    (keys, all)
}

#[tokio::test]
async fn the_schema_of_an_implementation_has_the_keys_that_the_implementation_reads() {
    let schema = Servers::stock().config_schema();
    for (kind, name, settings) in settings::stock() {
        let described: BTreeSet<String> = settings["properties"].as_object().unwrap().keys().cloned().collect();
        let (first, all) = keys_read(kind, name).await;
        assert!(
            first.is_subset(&described) && described.len() == all,
            "{kind}.{name}: {described:?}, {first:?}, {all}"
        );
        let block = &schema["$defs"][format!("{kind}.{name}")];
        assert_eq!(block["additionalProperties"], json!(false), "{kind}.{name}");
        let accepted = block["properties"].as_object().unwrap();
        assert!(described.iter().all(|key| accepted.contains_key(key)), "{kind}.{name}");
    }
}

/// Collects the targets of all references below a value.
fn targets<'a>(value: &'a Value, found: &mut Vec<&'a str>) {
    match value {
        Value::Object(map) => {
            found.extend(map.get("$ref").and_then(Value::as_str));
            map.values().for_each(|value| targets(value, found));
        }
        Value::Array(items) => items.iter().for_each(|item| targets(item, found)),
        _ => {}
    }
}

#[test]
fn an_implementation_of_the_program_takes_part_with_its_schema_or_with_any_keys() {
    #[derive(JsonSchema)]
    #[allow(dead_code, reason = "only its schema is read")]
    struct Settings {
        /// Maximum number of carts.
        carts_max: u32,
        shelf: Shelf,
    }
    #[derive(JsonSchema)]
    #[allow(dead_code, reason = "only its schema is read")]
    struct Shelf {
        height_cm: Option<f64>,
    }
    let plain = Servers::stock().resources("shop", |_| Ok(Shop));
    let path = "/$defs/resources_servers.shop";
    let block = plain.config_schema().pointer(path).unwrap().clone();
    assert_eq!(block["additionalProperties"], json!(true));

    let settings = schemars::schema_for!(Settings).to_value();
    let schema = plain.clone().settings_schema(ServerKind::Resources, "shop", settings).config_schema();
    let block = schema.pointer(path).unwrap();
    assert_eq!(block["additionalProperties"], json!(false));
    assert_eq!(block["properties"]["carts_max"]["description"], "Maximum number of carts.");
    assert_eq!(block["then"]["required"], json!(["domain", "carts_max", "shelf"]));
    let mut found = Vec::new();
    targets(&schema, &mut found);
    assert!(found.contains(&"#/$defs/resources_servers.shop.Shelf"), "{found:?}");
    for target in found {
        assert!(schema.pointer(target.trim_start_matches('#')).is_some(), "{target} does not exist");
    }

    // The settings of a replaced implementation are not known any more.
    let replaced = plain.handler(ServerKind::Agent, "simple_agent", |_| unreachable!("never started")).config_schema();
    let open = |schema: &Value, name: &str| schema["$defs"][name]["additionalProperties"].clone();
    assert_eq!(open(&replaced, "responses_api_agents.simple_agent"), json!(true));
    let scripted =
        Servers::stock().scripted_policy(|_: &gym_core::RawObject, _: &mut gym_server::model::Rng| Vec::new());
    assert_eq!(open(&scripted.config_schema(), "responses_api_models.scripted_model"), json!(false));
}

#[test]
fn the_defaults_of_top_level_keys_are_those_of_the_loader() {
    let config = loaded("x: 1\n");
    let mut compared = 0;
    for key in TOP_LEVEL_KEYS.iter().filter(|key| !key.default.is_empty()) {
        let Some(value) = config.merged.get(key.name) else { continue };
        let same = match (value, key.name) {
            // These are made absolute.
            (Value::String(path), "results_dir" | "cache_dir") => Path::new(path).ends_with(key.default),
            // The loader adds the files that it has read.
            (Value::Array(files), "config_paths") => *files == ["a.yaml"],
            _ => serde_json::from_str::<Value>(key.default).is_ok_and(|default| default == *value),
        };
        assert!(same, "{}: {} in the table, {value} in a configuration", key.name, key.default);
        compared += 1;
    }
    assert!(compared >= 6, "{compared} defaults compared");
    let default_of = |name: &str| TOP_LEVEL_KEYS.iter().find(|key| key.name == name).unwrap().default;
    assert_eq!(default_of("default_host"), config.default_host);
    let head = TOP_LEVEL_KEYS.iter().find(|key| key.name == "head_server").unwrap().schema(&[]);
    assert_eq!(head.pointer("/anyOf/0/properties/port/default").and_then(Value::as_u64), Some(config.head.port.into()));
}

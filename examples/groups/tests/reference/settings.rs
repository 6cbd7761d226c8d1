//! The schemas of the settings types.

use gym_core::server::ServerKind;
use gym_group::placement::{ClusterSpec, WorkerGroupConfig};
use gym_server::agent::{GymnasiumAgentConfig, SimpleAgentConfig};
use gym_server::environment::{PoolConfig, RelayConfig, VerifierPoolConfig};
use gym_server::model::{OpenAiModelConfig, ScriptedModelConfig, VllmModelConfig};
use schemars::JsonSchema;
use schemars::generate::SchemaSettings;
use serde_json::{Map, Value};

/// Returns the schema of a type, with its parts inlined.
pub(crate) fn schema_of<T: JsonSchema>() -> Value {
    let mut settings = SchemaSettings::draft2020_12();
    settings.inline_subschemas = true;
    settings.meta_schema = None;
    let mut schema = settings.into_generator().into_root_schema_for::<T>().to_value();
    one_line(&mut schema);
    schema
}

/// Joins the lines of descriptions, because a doc comment is wrapped where its source is. Removes what schemars adds for Rust.
fn one_line(schema: &mut Value) {
    match schema {
        Value::Object(map) => {
            if let Some(Value::String(text)) = map.get_mut("description") {
                let sections: Vec<String> = text.split("\n\n").map(|section| section.replace('\n', " ")).collect();
                *text = sections.join("\n\n");
            }
            map.shift_remove("title");
            // `null` means that the key is absent.
            if map.get("default").is_some_and(Value::is_null) {
                map.shift_remove("default");
            }
            map.values_mut().for_each(one_line);
        }
        Value::Array(items) => items.iter_mut().for_each(one_line),
        _ => {}
    }
}

/// Returns the schemas of the SDK's implementations: kind, name, settings.
pub(crate) fn stock() -> Vec<(ServerKind, &'static str, Value)> {
    vec![
        (ServerKind::Agent, "simple_agent", schema_of::<SimpleAgentConfig>()),
        (ServerKind::Agent, "gymnasium_agent", schema_of::<GymnasiumAgentConfig>()),
        (ServerKind::Environment, "legacy_agent", schema_of::<RelayConfig>()),
        (ServerKind::Environment, "pool", schema_of::<PoolConfig>()),
        (ServerKind::Resources, "pool", schema_of::<VerifierPoolConfig>()),
        (ServerKind::Model, "openai_model", schema_of::<OpenAiModelConfig>()),
        (ServerKind::Model, "vllm_model", schema_of::<VllmModelConfig>()),
        (ServerKind::Model, "scripted_model", schema_of::<ScriptedModelConfig>()),
    ]
}

/// Returns the schemas of the blocks of a cluster file.
pub(crate) fn cluster() -> (Value, Value) {
    (schema_of::<ClusterSpec>(), schema_of::<WorkerGroupConfig>())
}

/// Returns the text of `settings.json`.
pub(crate) fn text() -> String {
    let all: Map<String, Value> =
        stock().into_iter().map(|(kind, name, schema)| (format!("{kind}.{name}"), schema)).collect();
    format!("{:#}\n", Value::Object(all))
}

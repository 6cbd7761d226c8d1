//! The page on configuration files.

use gym_client::config::reference::{
    BLOCK_KEYS, COLLECT_KEYS, COLLECT_SHARED_KEYS, ConfigKey, DATASET_KEYS, ENDPOINT_FILE_KEYS, TOP_LEVEL_KEYS,
    composition_keys, nemo_keys_of_implementation, nemo_keys_of_kind, unsupported_keys,
};
use gym_client::transport::BUILT_IN;
use gym_core::server::ServerKind;
use serde_json::{Value, json};

use crate::page::{Page, code, generated};
use crate::settings;

const HEAD: [&str; 4] = ["key", "type", "default", "meaning"];

#[test]
fn the_page_on_configuration_is_the_generated_one() {
    generated("gym-server/src/stack/settings.json", &settings::text());
    let (cluster, group) = settings::cluster();
    let mut page = Page::new(
        "configuration.md",
        "Configuration files",
        "The keys of a configuration in NeMo Gym's form, and of a cluster file. `rgym config schema` prints the JSON schema of a \
         configuration, which editors read; [cluster.schema.json](cluster.schema.json) is the schema of a cluster file. \
         `rgym config check FILE…` reports an unknown key with the nearest name.\n\n\
         Every value can be an interpolation, such as `${oc.env:NAME,default}` or `${key}`. A number or boolean in the block of a \
         server can be in quotes. `null` means that the key is absent.\n\n\
         `env.yaml` of a search directory or of the working directory, if there is one, is read after all other files and overrides them; the \
         command line overrides it. It is for keys of endpoints and for what differs between machines.",
    );
    page.section(
        "Top level",
        "Each other key at the top level is a server (`NAME: {KIND: {IMPLEMENTATION: {…}}}`), or a variable for interpolations.",
    );
    page.table(HEAD, TOP_LEVEL_KEYS.iter().filter(|key| !key.is_ignored()).map(key_row));
    let ignored = TOP_LEVEL_KEYS.iter().filter(|key| key.is_ignored()).map(|key| code(key.name));
    page.section(
        "Top level, for NeMo Gym only",
        &format!(
            "This SDK passes these keys on to Python servers and does not read them: {}.",
            ignored.collect::<Vec<_>>().join(", ")
        ),
    );
    let shared: Vec<String> = COLLECT_SHARED_KEYS.iter().map(|name| code(name)).collect();
    page.section(
        "Top level, for `rgym collect`",
        &format!(
            "An option of the command takes precedence over its key. The command also reads {}.",
            shared.join(", ")
        ),
    );
    page.table(HEAD, COLLECT_KEYS.iter().map(key_row));
    page.section("Every block of a server", "The block of a server is the mapping under its implementation.");
    page.table(HEAD, BLOCK_KEYS.iter().map(key_row));
    page.section("Data sets", "The items of `datasets`. Other keys are accepted.");
    page.table(HEAD, DATASET_KEYS.iter().map(key_row));
    page.section(
        "Blocks of a kind",
        "Keys by which the loader composes servers, whether or not the implementation reads them.",
    );
    page.table(
        ["kind", "key", "type", "meaning"],
        ServerKind::ALL.into_iter().flat_map(|kind| {
            composition_keys(kind).iter().map(move |key| {
                let [name, value, _, meaning] = key_row(key);
                [code(kind.as_str()), name, value, meaning]
            })
        }),
    );
    for (kind, name, schema) in settings::stock() {
        page.section(&format!("`{kind}`: `{name}`"), "");
        page.table(HEAD, rows(&schema));
    }
    page.section(
        "Blocks, for NeMo Gym only",
        "Keys that NeMo Gym's own servers read. A native implementation that does not read such a key ignores it with a warning.",
    );
    let list = |names: &[&str]| names.iter().map(|name| code(name)).collect::<Vec<_>>().join(", ");
    let kinds = ServerKind::ALL.map(|kind| [code(kind.as_str()), list(nemo_keys_of_kind(kind)), String::new()]);
    let implementations = settings::stock().into_iter().map(|(_, name, _)| {
        let mut ignored = nemo_keys_of_implementation(name).to_vec();
        if name == "vllm_model" {
            ignored.extend(ENDPOINT_FILE_KEYS);
        }
        [code(name), list(&ignored), list(unsupported_keys(name))]
    });
    let some = |row: &[String; 3]| !(row[1].is_empty() && row[2].is_empty());
    page.table(
        ["block", "ignored", "error if it has an effect"],
        kinds.into_iter().chain(implementations).filter(some),
    );
    page.section(
        "Cluster file: `cluster`",
        "A cluster file (`ClusterFile::read`) describes a cluster of worker groups, as YAML or JSON, without interpolations.",
    );
    page.table(HEAD, rows(&cluster));
    page.section("Cluster file: worker groups", "Each other block of a cluster file is a worker group.");
    page.table(HEAD, rows(&group));
    page.finish();
    let schema = json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Cluster of worker groups",
        "type": "object",
        "properties": {"cluster": cluster},
        "additionalProperties": group,
        "required": ["cluster"],
    });
    generated("docs/reference/cluster.schema.json", &format!("{schema:#}\n"));
}

fn key_row(key: &ConfigKey) -> [String; 4] {
    let transports: Vec<&str> = BUILT_IN.iter().map(|transport| transport.as_str()).collect();
    let value = type_of(&key.value.schema(&transports));
    [code(key.name), value, code(key.default), key.meaning.to_owned()]
}

/// Returns the rows of the keys of a settings type.
fn rows(schema: &Value) -> Vec<[String; 4]> {
    let required: Vec<&str> = schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let row = |(name, schema): (&String, &Value)| {
        let meaning = schema["description"].as_str().unwrap_or_default();
        assert!(!meaning.is_empty(), "{name} has no description");
        assert!(!meaning.contains("[`"), "{name}: a link of rustdoc does not work in an editor: {meaning}");
        let default = match &schema["default"] {
            _ if required.contains(&name.as_str()) => "required".to_owned(),
            Value::Null => String::new(),
            Value::String(text) if text.is_empty() => "`''`".to_owned(),
            Value::String(text) => code(text),
            other => code(other.to_string().trim_end_matches(".0")),
        };
        let meaning = meaning.trim_end_matches(" Required.");
        [code(name), type_of(schema), default, meaning.replace("\n\n", " ")]
    };
    schema["properties"].as_object().unwrap().iter().map(row).collect()
}

/// Describes the type of a schema in words.
fn type_of(schema: &Value) -> String {
    if let Some(names) = schema["enum"].as_array() {
        return names.iter().map(|name| code(name.as_str().unwrap())).collect::<Vec<_>>().join(" or ");
    }
    if let Some(name) = schema["const"].as_str() {
        return code(name);
    }
    for key in ["anyOf", "oneOf"] {
        if let Some(forms) = schema[key].as_array() {
            let mut forms: Vec<String> = forms.iter().map(type_of).filter(|form| form != "null").collect();
            // Names come first: "mapping with `a` or `b`" could be read as a mapping with either.
            forms.sort_by_key(|form| form.starts_with("mapping"));
            forms.dedup();
            return forms.join(" or ");
        }
    }
    let named = |name: &str| match name {
        "array" => match (&schema["items"], &schema["prefixItems"]) {
            (_, Value::Array(items)) => format!("[{}]", items.iter().map(type_of).collect::<Vec<_>>().join(", ")),
            (items, _) => format!("list of {}", plural(&type_of(items))),
        },
        "object" => match (&schema["properties"], &schema["additionalProperties"]) {
            (Value::Object(keys), _) if keys.len() > 3 => "mapping".to_owned(),
            (Value::Object(keys), _) => {
                format!("mapping with {}", keys.keys().map(|key| code(key)).collect::<Vec<_>>().join(", "))
            }
            (_, values @ Value::Object(_)) => format!("mapping of names to {}", plural(&type_of(values))),
            _ => "mapping".to_owned(),
        },
        "integer" | "number" => {
            let most = schema["maximum"].as_u64().filter(|most| *most < u64::from(u32::MAX));
            match (schema["minimum"].as_u64(), schema["exclusiveMinimum"].as_u64(), most) {
                (Some(least), _, Some(most)) => format!("{name} from {least} to {most}"),
                (Some(least), _, None) => format!("{name} ≥ {least}"),
                (None, Some(above), _) => format!("{name} > {above}"),
                _ => name.to_owned(),
            }
        }
        other => other.to_owned(),
    };
    match &schema["type"] {
        Value::String(name) => named(name),
        Value::Array(names) => {
            let names = names.iter().filter_map(Value::as_str).filter(|name| *name != "null");
            names.map(named).collect::<Vec<_>>().join(" or ")
        }
        _ => "any".to_owned(),
    }
}

fn plural(of: &str) -> String {
    if of.contains(' ') { format!("({of})") } else { format!("{of}s") }
}

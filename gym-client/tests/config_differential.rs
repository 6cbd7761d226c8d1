//! The loader against what NeMo Gym 0.7.0 made of the same files.
//!
//! `data/config/NAME` holds the files, `args` the overrides, `expected.json` NeMo Gym's answer. To renew the answers:
//! `python tests/python/config_oracle.py expected gym-client/tests/data/config`, and `… overrides …/overrides.json`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use gym_client::config::{ConfigLoader, GymConfig, Overrides};
use serde_json::Value;

/// Where the loader ran, and with which Python, is no property of a case.
const LOCAL: [&str; 6] =
    ["results_dir", "cache_dir", "uv_cache_dir", "uv_venv_dir", "head_server_deps", "python_version"];

fn data() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data")
}

fn lines(path: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.lines().filter(|line| !line.is_empty()).map(str::to_owned).collect()
}

fn load(folder: &Path, args: &[String]) -> Result<GymConfig, String> {
    let environment: BTreeMap<String, String> = lines(&folder.join("environment"))
        .into_iter()
        .filter_map(|line| line.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned())))
        .collect();
    let overrides = Overrides::parse(args).map_err(|error| error.to_string())?;
    let mut loader = ConfigLoader::new(folder).environment(move |name| environment.get(name).cloned());
    loader.load(&[] as &[&str], &overrides).map_err(|error| error.to_string())
}

/// Numbers by value: Python writes 1e5 as 100000.0, and both are one number.
fn same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(a), Value::Number(b)) => {
            a.is_f64() == b.is_f64() && a.as_f64() == b.as_f64() && a.as_i64() == b.as_i64()
        }
        (Value::Array(a), Value::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b)),
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len() && a.iter().all(|(key, a)| b.get(key).is_some_and(|b| same(a, b)))
        }
        (a, b) => a == b,
    }
}

fn difference(ours: &Value, theirs: &Value) -> String {
    let (Some(ours), Some(theirs)) = (ours.as_object(), theirs.as_object()) else { return String::new() };
    let keys: std::collections::BTreeSet<&String> = ours.keys().chain(theirs.keys()).collect();
    keys.into_iter()
        .filter(|key| !matches!((ours.get(*key), theirs.get(*key)), (Some(a), Some(b)) if same(a, b)))
        .map(|key| {
            let shown = |value: Option<&Value>| value.map_or_else(|| "(absent)".to_owned(), Value::to_string);
            format!("\n    {key}: ours {} theirs {}", shown(ours.get(key)), shown(theirs.get(key)))
        })
        .collect()
}

#[test]
fn every_case_is_merged_as_nemo_gym_merges_it() {
    let mut cases = 0;
    let mut wrong = Vec::new();
    let mut folders: Vec<PathBuf> =
        std::fs::read_dir(data().join("config")).unwrap().map(|entry| entry.unwrap().path()).collect();
    folders.sort();
    for folder in folders {
        let name = folder.file_name().unwrap().to_string_lossy().into_owned();
        let expected: Value = serde_json::from_slice(&std::fs::read(folder.join("expected.json")).unwrap()).unwrap();
        let ours = load(&folder, &lines(&folder.join("args")));
        cases += 1;
        match (&ours, expected.get("merged")) {
            (Ok(config), Some(theirs)) => {
                let mut merged = config.merged.clone();
                LOCAL.iter().for_each(|key| drop(merged.as_object_mut().unwrap().remove(*key)));
                if !same(&merged, theirs) {
                    wrong.push(format!("{name}:{}", difference(&merged, theirs)));
                }
            }
            (Err(_), None) => {}
            (Ok(config), None) => {
                wrong.push(format!("{name}: NeMo Gym refuses it ({expected}), we read {}", config.merged))
            }
            (Err(error), Some(_)) => wrong.push(format!("{name}: NeMo Gym reads it, we say {error}")),
        }
    }
    assert!(cases >= 70, "only {cases} cases found");
    assert!(wrong.is_empty(), "{} of {cases} differ:\n{}", wrong.len(), wrong.join("\n"));
}

/// A worker without files reads the text that its head server gives it. What describes one machine is not in it.
#[test]
fn every_case_is_the_same_configuration_on_another_machine() {
    let without_places = |merged: &Value, config: &GymConfig| {
        let mut merged = merged.as_object().unwrap().clone();
        let own = ["config_paths", "head_server", "default_host", "disallowed_ports"];
        own.iter().chain(&LOCAL).for_each(|key| drop(merged.remove(*key)));
        for instance in &config.instances {
            let block = &mut merged[&instance.name][instance.kind.as_str()][&instance.implementation];
            ["host", "port"].iter().for_each(|key| drop(block.as_object_mut().unwrap().remove(*key)));
        }
        Value::Object(merged)
    };
    let elsewhere = tempfile::tempdir().unwrap();
    let mut shared = 0;
    for entry in std::fs::read_dir(data().join("config")).unwrap() {
        let folder = entry.unwrap().path();
        let Ok(given) = load(&folder, &lines(&folder.join("args"))) else { continue };
        let Some(yaml) = given.to_shared_yaml() else { continue };
        let environment = std::fs::read_to_string(folder.join("environment")).unwrap_or_default();
        let lookup = move |name: &str| {
            let pairs = environment.lines().filter_map(|line| line.split_once('='));
            pairs.into_iter().find(|(key, _)| *key == name).map(|(_, value)| value.to_owned())
        };
        let overrides = Overrides::parse([] as [&str; 0]).unwrap();
        let read = ConfigLoader::new(elsewhere.path())
            .environment(lookup)
            .base(&yaml, "configuration of the head server")
            .load(&[] as &[&str], &overrides);
        let read = read.unwrap_or_else(|error| panic!("{}: {error}\n{yaml}", folder.display()));
        let (ours, theirs) = (without_places(&read.merged, &read), without_places(&given.merged, &given));
        // The paths of a data set are relative to the folder of each machine; all else is equal.
        assert!(same(&ours, &theirs), "{}:{}", folder.display(), difference(&ours, &theirs));
        shared += 1;
    }
    assert!(shared >= 10, "only {shared} cases have a server");
}

#[test]
fn every_override_is_read_as_hydra_reads_it() {
    let table: serde_json::Map<String, Value> =
        serde_json::from_slice(&std::fs::read(data().join("overrides.json")).unwrap()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("main.yaml"), "z: 1\n").unwrap();
    let files = "+config_paths=[main.yaml]".to_owned();
    let plain = load(folder.path(), std::slice::from_ref(&files)).unwrap().merged;
    let mut wrong = Vec::new();
    for (argument, theirs) in &table {
        let ours = load(folder.path(), &[files.clone(), argument.clone()]).map(|config| {
            let merged = config.merged.as_object().unwrap().clone();
            Value::Object(merged.into_iter().filter(|(key, _)| plain.get(key).is_none()).collect())
        });
        match (&ours, theirs) {
            (Err(_), Value::Null) => {}
            (Ok(ours), theirs) if same(ours, theirs) => {}
            _ => wrong.push(format!("{argument}: ours {ours:?} theirs {theirs}")),
        }
    }
    assert!(table.len() >= 80);
    assert!(wrong.is_empty(), "{} of {} differ:\n{}", wrong.len(), table.len(), wrong.join("\n"));
}

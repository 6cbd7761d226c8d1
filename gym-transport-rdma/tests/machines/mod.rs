//! Cases of `tests/data/tuning`: machines, settings, and what a checker must find. Each case stands on a public report or on the source of NCCL, UCX or Linux.
#![allow(dead_code, reason = "each test file uses its part")]
#![allow(clippy::unwrap_used, reason = "as in the tests themselves")]

pub(crate) mod judge;
mod tree;

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

/// A case: a machine or several, and what is expected.
pub(crate) struct Case {
    pub(crate) id: String,
    pub(crate) value: Value,
}

/// Returns all cases, sorted by name.
pub(crate) fn cases() -> Vec<Case> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("tests/data/tuning");
    let mut files: Vec<PathBuf> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|file| file.extension().is_some_and(|extension| extension == "json"));
    files.sort();
    files.iter().map(|file| Case::read(file)).collect()
}

/// Returns a folder for the machines of a case, in memory if there is such a file system: a case has 300 files.
pub(crate) fn scratch() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

/// Returns the case with this name.
pub(crate) fn case(id: &str) -> Case {
    cases().into_iter().find(|case| case.id == id).unwrap_or_else(|| panic!("no case {id}"))
}

impl Case {
    fn read(file: &Path) -> Self {
        let value: Value = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
        Self { id: value["id"].as_str().unwrap().to_owned(), value }
    }

    /// Writes its machines below `folder`, as `folder/ID` or, if there are several, as `folder/ID/NODE`, and returns their roots.
    pub(crate) fn write(&self, folder: &Path) -> Vec<PathBuf> {
        let root = folder.join(&self.id);
        let Some(nodes) = self.value.get("nodes").and_then(Value::as_array) else {
            tree::machine(&root, &self.value["host"], &self.environment(&Value::Null));
            return vec![root];
        };
        let write = |node: &Value| {
            let root = root.join(node["name"].as_str().unwrap());
            tree::machine(&root, &node["host"], &self.environment(node));
            root
        };
        nodes.iter().map(write).collect()
    }

    fn environment(&self, node: &Value) -> Map<String, Value> {
        let mut environment = Map::from_iter([("HOME".to_owned(), json!("/root"))]);
        for of in [&self.value, node] {
            for (name, value) in of.get("environment").and_then(Value::as_object).into_iter().flatten() {
                environment.insert(name.clone(), value.clone());
            }
        }
        environment
    }
}

//! The picture of the house in ARCHITECTURE.md, checked: which crate may stand on which, and what the foundation must not know.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use serde_json::Value;

/// The edges that the picture allows.
const ALLOWED: &[(&str, &[&str])] = &[
    ("gym-core", &[]),
    ("gym-transport-http", &["gym-core"]),
    ("gym-transport-rdma", &["gym-core"]),
    ("gym-client", &["gym-core", "gym-transport-http", "gym-transport-rdma"]),
    ("gym-server", &["gym-client", "gym-core"]),
    ("gym-examples", &["gym-client", "gym-core", "gym-server"]),
    (
        "gym-benches",
        &["gym-client", "gym-core", "gym-examples", "gym-server", "gym-transport-http", "gym-transport-rdma"],
    ),
];

fn cargo(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO"))
        .args(arguments)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "cargo {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("cargo writes UTF-8")
}

#[test]
fn every_crate_stands_only_on_the_floors_below_it() {
    let metadata: Value = serde_json::from_str(&cargo(&["metadata", "--no-deps", "--format-version", "1"])).unwrap();
    let allowed: BTreeMap<&str, BTreeSet<&str>> =
        ALLOWED.iter().map(|(name, below)| (*name, below.iter().copied().collect())).collect();
    let packages = metadata["packages"].as_array().unwrap();
    let names: BTreeSet<&str> = packages.iter().map(|package| package["name"].as_str().unwrap()).collect();
    assert_eq!(names, allowed.keys().copied().collect(), "the crates of the picture and of the workspace");
    for package in packages {
        let name = package["name"].as_str().unwrap();
        for dependency in package["dependencies"].as_array().unwrap() {
            let on = dependency["name"].as_str().unwrap();
            // A crate may name itself, for its own test features.
            if names.contains(on) && on != name {
                assert!(allowed[name].contains(on), "{name} must not depend on {on}");
            }
        }
    }
}

#[test]
fn the_foundation_knows_no_socket_library() {
    let tree = cargo(&["tree", "-p", "gym-core", "--edges", "normal", "--prefix", "none"]);
    for line in tree.lines() {
        let name = line.split(' ').next().unwrap_or_default();
        let forbidden = ["hyper", "reqwest", "http", "ucx", "cuda", "nccl"];
        assert!(!forbidden.iter().any(|word| name.starts_with(word)), "gym-core depends on {name}");
    }
}

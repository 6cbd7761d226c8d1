//! Checks the layers of ARCHITECTURE.md: the allowed dependencies between crates, and the forbidden dependencies of gym-core.

#[path = "layers/documents.rs"]
mod documents;
#[path = "layers/examples.rs"]
mod examples;
#[path = "layers/modules.rs"]
mod modules;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

/// The dependencies that the picture in ARCHITECTURE.md allows.
const ALLOWED: &[(&str, &[&str])] = &[
    ("gym-core", &[]),
    ("gym-transport-http", &["gym-core"]),
    ("gym-transport-rdma", &["gym-core"]),
    ("gym-segment", &["gym-core"]),
    ("gym-client", &["gym-core", "gym-transport-http", "gym-transport-rdma"]),
    ("gym-group", &["gym-client", "gym-core", "gym-segment", "gym-transport-http"]),
    ("gym-server", &["gym-client", "gym-core", "gym-group"]),
    ("gym-test-runner", &[]),
    ("gym-fuzz", &["gym-core", "gym-transport-http", "gym-transport-rdma"]),
    ("gym-examples", &["gym-client", "gym-core", "gym-server"]),
    ("gym-group-examples", &["gym-client", "gym-core", "gym-examples", "gym-group", "gym-server"]),
    ("gym-own-transport", &["gym-client", "gym-core", "gym-examples", "gym-group", "gym-server"]),
    (
        "gym-benches",
        &[
            "gym-client",
            "gym-core",
            "gym-examples",
            "gym-group",
            "gym-server",
            "gym-transport-http",
            "gym-transport-rdma",
        ],
    ),
];

/// The top-level modules of each crate, with one line per layer. A module may use only the modules of the lines below its own.
/// `prelude` re-exports from every module.
const MODULES: &[(&str, &[&[&str]])] = &[
    (
        "gym-core",
        &[
            &["prelude"],
            &["testing"],
            &["group"],
            &["registry"],
            &["server"],
            &["rollout", "transport"],
            &["message"],
            &["observe"],
            &["base"],
        ],
    ),
    ("gym-transport-http", &[&["backend", "origin"], &["http1"], &["frames"], &["wire"]]),
    (
        "gym-transport-rdma",
        &[
            &["backend", "fuzzing"],
            &["transport"],
            &["messaging"],
            &["fabric"],
            &["ucx"],
            &["sys", "memory", "probe"],
            &["tuning", "nccl"],
            &["machine"],
        ],
    ),
    (
        "gym-segment",
        &[
            &["communicator"],
            &["offer", "shared"],
            &["segment"],
            &["control"],
            &["failure", "layout", "mapping", "memory", "time"],
        ],
    ),
    (
        "gym-client",
        &[
            &["prelude"],
            &["collect"],
            &["work"],
            &["config", "client", "launch"],
            &["registry"],
            &["transport", "metrics"],
        ],
    ),
    (
        "gym-group",
        &[
            &["prelude"],
            &["testing"],
            &["train"],
            &["cluster", "ray"],
            &["supervise"],
            &["provision"],
            &["usage"],
            &["call", "collective"],
            &["placement"],
            &["health"],
        ],
    ),
    (
        "gym-server",
        &[&["prelude"], &["cli"], &["stack"], &["head", "environment", "agent", "model"], &["role"], &["metrics"]],
    ),
];

/// The names at the root of a crate that need no example, with the reason. Constants need none.
const WITHOUT_EXAMPLE: &[(&str, &str, &[&str])] = &[
    ("gym-segment", "in the example of the crate's page", &["FdOffer", "Sizes", "deadline_in", "fetch"]),
    ("gym-segment", "in the examples of Segment and SharedSpace, which return them", &["Failure", "SharedBuffer"]),
    ("gym-client", "returned by AwaitedServers, with public fields", &["AwaitedServer"]),
    ("gym-client", "hidden: for the other crates", &["url"]),
    (
        "gym-group",
        "in the example of Local, Nodes, NodeAgent or Gate",
        &["LocalOptions", "NodeOptions", "NodesOptions", "Permit"],
    ),
    ("gym-group", "in the examples of Workers and LaunchSpec", &["RankPlace", "WorkerKind"]),
    (
        "gym-group",
        "errors and outcomes of calls and starts",
        &["FailureKind", "ItemError", "RankOutcome", "RankReply", "StartError"],
    ),
    (
        "gym-group",
        "what a program reads of nodes",
        &["NodeEvent", "NodeState", "NodeStatus", "NodeUsage", "GpuMetrics", "GpuUsage"],
    ),
    (
        "gym-group",
        "what a program reads of ranks",
        &["GroupMetrics", "ProcessUsage", "RankEvent", "RankStatus", "RankUsage", "StuckRank", "StuckReason"],
    ),
    (
        "gym-group",
        "what a program reads of environments",
        &["RankEnvironment", "RankVariable", "VariableKind", "VariableSource"],
    ),
    ("gym-group", "parts of the interface between a group and its calls", &["Backlog", "CallSupport", "RankMonitor"]),
    (
        "gym-group",
        "parts of the interface between a group and its provisioner",
        &["BundleId", "Deployment", "Rendezvous", "Reservation"],
    ),
    ("gym-server", "crates, with examples on their pages", &["gym_client", "gym_core", "gym_group"]),
];

/// Maximum entries of one level, so that readers find entries at a glance.
const ENTRIES_MAX: usize = 12;

/// Modules of one parent that refer to each other on purpose: (crate, level).
const CYCLES_ALLOWED: &[(&str, &str)] = &[
    // A trait and the builder that registers its implementations; the host that runs them.
    ("gym-core", "group::worker"),
    // A simulated network: hosts, connections, and the wire between them.
    ("gym-core", "testing::net"),
    // Handles, and the commands that they send to the progress thread, which carry handles.
    ("gym-transport-rdma", "fabric::handle"),
    // A worker passes messages to its receiver. An announced message refers to the worker that received it.
    ("gym-transport-rdma", "ucx"),
];

/// Returns `true` for the test fixtures of gym-server, which are compiled into its unit tests only.
fn is_fixture(name: &str, level: &[String], module: &str) -> bool {
    name == "gym-server" && level.is_empty() && module == "testing"
}

fn folder(name: &str) -> PathBuf {
    let folder = match name {
        "gym-group" => "gym-client/group",
        "gym-segment" => "gym-transport-rdma/segment",
        name => name,
    };
    workspace().join(folder).join("src")
}

fn sources(name: &str) -> modules::Crate {
    modules::Crate::read(&folder(name))
}

#[test]
fn every_module_uses_only_the_modules_below_it() {
    for (name, layers) in MODULES {
        let read = sources(name);
        let layer_of: BTreeMap<&str, usize> = layers
            .iter()
            .enumerate()
            .flat_map(|(at, modules)| modules.iter().map(move |module| (*module, at)))
            .collect();
        let mut modules = read.modules(&[]);
        modules.retain(|module| !is_fixture(name, &[], module));
        let drawn: BTreeSet<String> = layer_of.keys().map(|module| (*module).to_owned()).collect();
        assert_eq!(modules, drawn, "the modules of {name} and of the picture");
        for ((from, to), (module, path)) in read.edges(&[]) {
            let (Some(above), Some(below)) = (layer_of.get(from.as_str()), layer_of.get(to.as_str())) else { continue };
            assert!(above < below, "{name}: {from} must not use {to}: {module} names {path}");
        }
    }
}

#[test]
fn no_two_modules_of_a_level_depend_on_each_other() {
    for (name, _) in MODULES {
        let read = sources(name);
        for level in read.levels() {
            let found = modules::cycles(&read.edges(&level));
            let allowed = CYCLES_ALLOWED.contains(&(name, level.join("::").as_str()));
            assert!(allowed || found.is_empty(), "{name}, {}: a cycle:\n{found}", level.join("::"));
            let entries = read.modules(&level).iter().filter(|module| !is_fixture(name, &level, module)).count();
            assert!(entries <= ENTRIES_MAX, "{name}, {}: {entries} entries", level.join("::"));
        }
    }
}

fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace")
}

/// A path may lack its first folders where the document has named them before.
#[test]
fn every_path_in_the_architecture_and_the_decisions_exists() {
    let entries = documents::entries(workspace());
    let pages = entries.iter().filter(|path| *path == "ARCHITECTURE.md" || path.starts_with("decisions/0"));
    let mut named = 0;
    for page in pages {
        let text = std::fs::read_to_string(workspace().join(page)).unwrap();
        for path in documents::paths(&documents::prose(&text)) {
            let (path, below) = (path.trim_end_matches('/'), format!("/{}", path.trim_end_matches('/')));
            assert!(
                entries.iter().any(|entry| entry == path || entry.ends_with(&below)),
                "{page} names {path}, which does not exist; fix: name the new path"
            );
            named += 1;
        }
    }
    assert!(named > 150, "the documents name {named} paths; was their form changed?");
}

#[test]
fn every_relative_link_of_the_documents_leads_somewhere() {
    let entries = documents::entries(workspace());
    let mut followed = 0;
    for page in entries.iter().filter(|path| path.ends_with(".md")) {
        let text = std::fs::read_to_string(workspace().join(page)).unwrap();
        let folder = workspace().join(page).parent().expect("the folder of a page").to_owned();
        for link in documents::links(&documents::prose(&text)).filter(|link| !link.contains("://")) {
            let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
            let target = if file.is_empty() { workspace().join(page) } else { folder.join(file) };
            assert!(target.exists(), "{page} links to {link}, which does not exist");
            if !anchor.is_empty() {
                let anchors = documents::anchors(&std::fs::read_to_string(&target).unwrap());
                assert!(anchors.contains(anchor), "{page} links to {link}; the page has no such heading");
            }
            followed += 1;
        }
    }
    assert!(followed > 100, "the documents have {followed} links; was their form changed?");
}

/// Each decision is short, has the three headings, and is in the list.
#[test]
fn decisions_are_few_short_and_listed() {
    let entries = documents::entries(workspace());
    let list = std::fs::read_to_string(workspace().join("decisions/README.md")).unwrap();
    let decisions: Vec<&str> = entries.iter().filter_map(|path| path.strip_prefix("decisions/0")).collect();
    assert!(
        (1..=30).contains(&decisions.len()),
        "{} decisions; remove those that no newcomer would undo",
        decisions.len()
    );
    for name in decisions {
        let text = std::fs::read_to_string(workspace().join(format!("decisions/0{name}"))).unwrap();
        let headings: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("## ")).collect();
        assert_eq!(headings, ["Context", "Decision", "Alternatives"], "0{name}");
        assert!(text.lines().count() <= 40, "0{name} has more than 40 lines");
        assert!(list.contains(&format!("(0{name})")), "decisions/README.md does not list 0{name}");
    }
}

/// A reader of a prelude's page finds a small program for each name.
#[test]
fn every_item_of_a_prelude_has_an_example() {
    const FOLDERS: [&str; 4] = ["gym-core/src", "gym-client/src", "gym-client/group/src", "gym-server/src"];
    let mut examples: BTreeMap<String, bool> = BTreeMap::new();
    for folder in FOLDERS {
        for (name, has_one) in examples::definitions(&workspace().join(folder)) {
            *examples.entry(name).or_default() |= has_one;
        }
    }
    let (mut missing, mut checked) = (Vec::new(), 0);
    for folder in FOLDERS {
        let prelude = std::fs::read_to_string(workspace().join(folder).join("prelude.rs")).unwrap();
        for name in examples::names(&prelude) {
            checked += 1;
            match examples.get(&name) {
                Some(true) => {}
                Some(false) => missing.push(format!("{folder}: {name}")),
                None => panic!("{folder}/prelude.rs re-exports {name}, whose definition this test does not find"),
            }
        }
    }
    assert!(checked > 50, "the preludes have {checked} names; was their form changed?");
    assert!(missing.is_empty(), "without an example: {missing:?}; fix: add a block of code to the documentation");
}

/// A reader of a crate's page finds one for each name that a program writes.
#[test]
fn every_item_of_a_crate_root_has_an_example() {
    for (name, _) in MODULES {
        let examples = examples::definitions(&folder(name));
        let root = std::fs::read_to_string(folder(name).join("lib.rs")).unwrap();
        let mut without: BTreeSet<String> = examples::names(&root).into_iter().collect();
        without.retain(|item| examples.get(item) != Some(&true));
        let listed = WITHOUT_EXAMPLE.iter().filter(|(of, ..)| of == name).flat_map(|(.., items)| *items);
        let listed: BTreeSet<String> = listed.map(|item| (*item).to_owned()).collect();
        assert_eq!(
            without, listed,
            "{name}: the names without an example, and those of WITHOUT_EXAMPLE; fix: add a block of code to the documentation"
        );
    }
}

#[test]
fn the_names_of_a_prelude_and_the_examples_of_definitions_are_found() {
    let text =
        "pub use a::*;\npub use b::{\n    Cell, d, E_MAX,\n};\npub use f::Gate;\npub use h::i as j;\npub use {k, l};\n";
    assert_eq!(examples::names(text), ["Cell", "d", "Gate", "i", "k", "l"]);
    let folder = tempfile::tempdir().unwrap();
    let text = "/// One.\n///\n/// ```\n/// ```\n#[derive(Debug)]\npub struct A;\n\n/// Two.\npub enum B {}\n";
    std::fs::write(folder.path().join("room.rs"), text).unwrap();
    let expected = [("A", true), ("B", false), ("room", false)].map(|(name, has_one)| (name.to_owned(), has_one));
    assert_eq!(examples::definitions(folder.path()), BTreeMap::from(expected));
}

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
fn every_crate_depends_only_on_the_layers_below_it() {
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
            // A crate may name itself, to enable its own test features. Tests may run the suites of crates above.
            if names.contains(on) && on != name && dependency["kind"] != "dev" {
                assert!(allowed[name].contains(on), "{name} must not depend on {on}");
            }
        }
    }
}

#[test]
fn gym_core_depends_on_no_socket_library() {
    let tree = cargo(&["tree", "-p", "gym-core", "--edges", "normal", "--prefix", "none"]);
    for line in tree.lines() {
        let name = line.split(' ').next().unwrap_or_default();
        let forbidden = ["hyper", "reqwest", "http", "ucx", "cuda", "nccl"];
        assert!(!forbidden.iter().any(|word| name.starts_with(word)), "gym-core depends on {name}");
    }
}

/// Licenses that allow linking into a program of any license. An exception after `WITH` only adds rights.
const LICENCES: [&str; 12] = [
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "CC0-1.0",
    "CDLA-Permissive-2.0",
    "ISC",
    "MIT",
    "NCSA",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
];

/// Returns `true` if the licenses above satisfy an SPDX expression; `/` is an old form of `OR`.
fn is_permissive(expression: &str) -> bool {
    fn split<'a>(text: &'a str, operator: &str) -> Vec<&'a str> {
        let (mut parts, mut depth, mut from) = (Vec::new(), 0, 0);
        for (at, character) in text.char_indices() {
            match character {
                '(' => depth += 1,
                ')' => depth -= 1,
                _ if depth == 0 && at >= from && text[at..].starts_with(operator) => {
                    parts.push(text[from..at].trim());
                    from = at + operator.len();
                }
                _ => {}
            }
        }
        parts.push(text[from..].trim());
        parts
    }
    fn is_met(text: &str) -> bool {
        let (any, all) = (split(text, " OR "), split(text, " AND "));
        match text.strip_prefix('(').and_then(|inner| inner.strip_suffix(')')) {
            _ if any.len() > 1 => any.into_iter().any(is_met),
            _ if all.len() > 1 => all.into_iter().all(is_met),
            Some(inner) => is_met(inner),
            None => LICENCES.contains(&text),
        }
    }
    is_met(&expression.replace('/', " OR "))
}

#[test]
fn a_licence_is_read_as_the_expression_it_is() {
    for fine in ["MIT", "MIT/Apache-2.0", "GPL-3.0 OR (MIT AND Zlib)", "(MIT OR GPL-3.0) AND Unicode-3.0"] {
        assert!(is_permissive(fine), "{fine}");
    }
    for wrong in ["GPL-3.0", "MIT AND GPL-3.0", "(MIT OR Zlib) AND LGPL-2.1", ""] {
        assert!(!is_permissive(wrong), "{wrong}");
    }
}

/// Performs the checks of cargo-deny without building it: sources of dependencies, their licenses, and duplicates.
#[test]
fn dependencies_are_published_permissive_and_there_once() {
    // The quickstart uses none of them: Windows bindings, and the dependencies of ring and reqwest for TLS. `synstructure` belongs
    // to an optional dependency of rcgen (in the example transport), which is locked but not built. `num-bigint` has an old version in
    // an example and a new one in parquet (a feature); `r-efi` is for UEFI.
    const TWICE: [&str; 6] = ["getrandom", "num-bigint", "r-efi", "syn", "synstructure", "windows-sys"];
    // A second TLS implementation, or a C library that the build would have to find.
    const BANNED: [&str; 4] = ["aws-lc-sys", "native-tls", "openssl-sys", "libz-sys"];
    let metadata: Value =
        serde_json::from_str(&cargo(&["metadata", "--all-features", "--locked", "--format-version", "1"])).unwrap();
    let mut versions: BTreeMap<&str, usize> = BTreeMap::new();
    for package in metadata["packages"].as_array().unwrap() {
        let name = package["name"].as_str().unwrap();
        let licence = package["license"].as_str().unwrap_or_default();
        assert!(is_permissive(licence), "{name} is under `{licence}`");
        let source = package["source"].as_str();
        let own = source.is_none() && name.starts_with("gym-");
        assert!(own || source.is_some_and(|source| source.starts_with("registry+")), "{name} comes from {source:?}");
        assert!(!BANNED.contains(&name), "{name} is not wanted");
        *versions.entry(name).or_default() += 1;
    }
    let twice: BTreeSet<&str> = versions.into_iter().filter(|(_, count)| *count > 1).map(|(name, _)| name).collect();
    assert_eq!(twice, BTreeSet::from(TWICE), "dependencies in more than one version");
}

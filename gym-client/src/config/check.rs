//! Finds the servers among the top-level blocks of the merged tree and checks each of them.

use crate::config::address::host_mistake;
use crate::config::problem::{Mistake, Origin, Problem, nearest, suggest};
use crate::config::reference::{DATASET_TYPES, DOMAINS, LICENSES, TOP_LEVEL_KEYS, composition_keys};
use crate::config::yaml::node::{Map, Node, Tree};
use gym_core::server::ServerKind;

pub(crate) fn is_reserved(key: &str) -> bool {
    TOP_LEVEL_KEYS.iter().any(|known| known.name == key)
}

/// A block that is a server, and its position in the tree.
#[derive(Clone, Debug)]
pub(crate) struct FoundServer {
    pub(crate) name: String,
    pub(crate) kind: ServerKind,
    pub(crate) implementation: String,
}

/// Returns the servers of the top level, whose interpolations are resolved, and the problems of invalid servers.
pub(crate) fn servers(root: &Node) -> (Vec<FoundServer>, Vec<Problem>) {
    let mut found = Vec::new();
    let mut problems = Vec::new();
    for (key, block) in root.as_map().map(|map| map.0.as_slice()).unwrap_or_default() {
        let name = key.to_string();
        let Some(map) = block.as_map() else { continue };
        if is_reserved(&name) {
            continue;
        }
        let kinds: Vec<ServerKind> = ServerKind::ALL.into_iter().filter(|kind| map.contains(kind.as_str())).collect();
        match kinds.as_slice() {
            [] => problems.extend(misspelt_kind(&name, map)),
            [kind] => server(&name, *kind, map, &mut found, &mut problems),
            several => {
                if several.iter().any(|kind| has_entrypoint(map, kind.as_str())) {
                    let names = several.iter().map(|kind| kind.as_str()).collect::<Vec<_>>().join(" and ");
                    problems.push(
                        Problem::new(
                            Mistake::Value,
                            &block.origin,
                            "",
                            format!("the instance has several server kinds: {names}"),
                        )
                        .instance(&name)
                        .fix("give each server its own top-level name"),
                    );
                }
            }
        }
    }
    (found, problems)
}

pub(crate) fn has_entrypoint(block: &Map, kind: &str) -> bool {
    let implementations = block.get(kind).and_then(Node::as_map).map(|map| map.0.as_slice()).unwrap_or_default();
    implementations.iter().any(|(_, node)| node.step("entrypoint").is_some())
}

fn misspelt_kind(name: &str, block: &Map) -> Option<Problem> {
    block.0.iter().find_map(|(key, node)| {
        let key = key.to_string();
        if !has_entrypoint(block, &key) {
            return None;
        }
        let near = nearest(&key, ServerKind::ALL.map(ServerKind::as_str))?;
        Some(
            Problem::new(Mistake::Value, &node.origin, format!("{name}.{key}"), format!("unknown server kind '{key}'"))
                .instance(name)
                .fix(format!("did you mean '{near}'?")),
        )
    })
}

/// Finds a block that is a variable only because its `entrypoint` has a typing mistake.
fn misspelt_entrypoint(name: &str, kind: ServerKind, inner: &Node) -> Option<Problem> {
    let implementations = inner.as_map().map(|map| map.0.as_slice()).unwrap_or_default();
    implementations.iter().find_map(|(implementation, settings)| {
        settings.as_map()?.0.iter().find_map(|(key, node)| {
            let key = key.to_string();
            // At most two mistakes: `endpoint` has three, and is a word of its own.
            (strsim::damerau_levenshtein(&key, "entrypoint") <= 2).then(|| {
                let what = format!("unknown key '{key}', and no 'entrypoint': the block is no server");
                Problem::new(Mistake::Value, &node.origin, format!("{name}.{kind}.{implementation}.{key}"), what)
                    .instance(name)
                    .fix("did you mean 'entrypoint'?")
            })
        })
    })
}

fn server(name: &str, kind: ServerKind, block: &Map, found: &mut Vec<FoundServer>, problems: &mut Vec<Problem>) {
    let inner = block.get(kind.as_str()).expect("the caller checked that the kind exists");
    if !has_entrypoint(block, kind.as_str()) {
        problems.extend(misspelt_entrypoint(name, kind, inner));
        return;
    }
    let implementations = inner.as_map().map(|map| map.0.as_slice()).unwrap_or_default();
    let [(implementation, settings)] = implementations else {
        let each = implementations.iter().map(|(key, node)| format!("{key} ({})", node.origin));
        let names = each.collect::<Vec<_>>().join(", ");
        problems.push(
            Problem::new(
                Mistake::Value,
                &inner.origin,
                format!("{name}.{kind}"),
                format!("expected one implementation, found {}: {names}", implementations.len()),
            )
            .instance(name)
            .fix("keep one of them; files that give a block the same name are merged; _delete_key removes an inherited implementation"),
        );
        return;
    };
    let implementation = implementation.to_string();
    let mut check = Checker { name, prefix: format!("{name}.{kind}.{implementation}"), problems: Vec::new() };
    if let Some(map) = settings.as_map() {
        check.settings(kind, map, &settings.origin);
    }
    if check.problems.is_empty() {
        found.push(FoundServer { name: name.to_owned(), kind, implementation });
    }
    problems.append(&mut check.problems);
}

struct Checker<'a> {
    name: &'a str,
    prefix: String,
    problems: Vec<Problem>,
}

impl Checker<'_> {
    fn wrong(&mut self, origin: &Origin, key: &str, what: impl Into<Box<str>>, fix: impl AsRef<str>) {
        let key = format!("{}.{key}", self.prefix);
        self.problems.push(Problem::new(Mistake::Value, origin, key, what).instance(self.name).fix(fix));
    }

    fn settings(&mut self, kind: ServerKind, map: &Map, origin: &Origin) {
        for key in ["entrypoint", "host"] {
            match map.get(key) {
                Some(node) if node.as_text().is_some() => {
                    if key == "host"
                        && let Some(mistake) = host_mistake(&format!("{}.host", self.prefix), node)
                    {
                        self.problems.push(mistake.instance(self.name));
                    }
                }
                Some(node) if key == "host" && matches!(node.value, Tree::Null) => {}
                Some(node) => {
                    let what = format!("expected a string, found {}", node.kind());
                    self.wrong(&node.origin, key, what, format!("write {key}: '…' in quotes"));
                }
                None => {}
            }
        }
        for (key, least, most) in [("port", 0, 65_535), ("num_workers", 1, 4_096)] {
            if let Some(node) = map.get(key) {
                self.integer(node, key, least, most);
            }
        }
        match map.get("domain") {
            Some(node) if matches!(node.value, Tree::Null) && kind != ServerKind::Resources => {}
            Some(node) if node.is_interpolation() => {}
            Some(node) => {
                let domain = node.python_str();
                if !DOMAINS.contains(&domain.as_str()) {
                    let what = format!("unknown domain '{domain}'");
                    self.wrong(&node.origin, "domain", what, suggest(&domain, &DOMAINS, "domains"));
                }
            }
            None if kind == ServerKind::Resources => {
                let near = |key: &&str| strsim::damerau_levenshtein(key, "domain") <= 2;
                let fix = match map.0.iter().filter_map(|(key, _)| key.text()).find(near) {
                    Some(near) => format!("write domain in the place of '{near}'"),
                    None => format!("add domain: one of {}", DOMAINS.join(", ")),
                };
                self.wrong(origin, "domain", "the resources server has no domain", fix);
            }
            None => {}
        }
        match map.get("datasets") {
            None | Some(Node { value: Tree::Null, .. }) => {}
            Some(Node { value: Tree::List(items), .. }) => {
                for (index, item) in items.iter().enumerate() {
                    self.dataset(item, index);
                }
            }
            Some(node) if node.is_interpolation() => {}
            Some(node) => {
                let what = format!("expected a list, found {}", node.kind());
                self.wrong(
                    &node.origin,
                    "datasets",
                    what,
                    "write each dataset as '- {name: …, type: …, jsonl_fpath: …}'",
                );
            }
        }
    }

    /// As in pydantic: null, an integer, or a string or float with an integer value.
    fn integer(&mut self, node: &Node, key: &str, least: i128, most: i128) {
        let int = match &node.value {
            Tree::Null => return,
            Tree::Text(_) if node.is_interpolation() => return,
            Tree::Int(int) => Some(*int),
            Tree::Float(float) if float.fract() == 0.0 => Some(*float as i128),
            Tree::Text(text) => text.trim().parse().ok(),
            _ => None,
        };
        match int {
            Some(int) if (least..=most).contains(&int) => {}
            Some(int) => {
                self.wrong(&node.origin, key, format!("{int} is out of range"), format!("use {least} to {most}"))
            }
            None => {
                let what = format!("expected an integer, found {}", node.kind());
                self.wrong(&node.origin, key, what, format!("write {key}: {}", if key == "port" { 8000 } else { 1 }));
            }
        }
    }

    fn dataset(&mut self, item: &Node, index: usize) {
        let at = |key: &str| format!("datasets[{index}].{key}");
        let Some(map) = item.as_map() else {
            if !item.is_interpolation() {
                let what = format!("expected a mapping, found {}", item.kind());
                self.wrong(
                    &item.origin,
                    &format!("datasets[{index}]"),
                    what,
                    "write {name: …, type: …, jsonl_fpath: …}",
                );
            }
            return;
        };
        for key in ["name", "type", "jsonl_fpath"] {
            match map.get(key) {
                Some(node) if node.as_text().is_some() => {}
                Some(node) => {
                    let what = format!("expected a string, found {}", node.kind());
                    self.wrong(&node.origin, &at(key), what, "put it in quotes");
                }
                None => self.wrong(&item.origin, &at(key), "the dataset has no such key", format!("add {key}: …")),
            }
        }
        let kind = map.get("type").and_then(Node::as_text).unwrap_or_default();
        let origin = |key: &str| map.get(key).map_or(&item.origin, |node| &node.origin);
        if !kind.is_empty() && !DATASET_TYPES.contains(&kind) && !kind.contains("${") {
            let fix = suggest(kind, &DATASET_TYPES, "dataset types");
            self.wrong(origin("type"), &at("type"), format!("unknown dataset type '{kind}'"), fix);
        }
        if kind == "benchmark" && map.get("prepare_script").is_none_or(|node| matches!(node.value, Tree::Null)) {
            self.wrong(
                &item.origin,
                &at("prepare_script"),
                "the benchmark has no prepare_script",
                "add prepare_script: prepare.py",
            );
        }
        if kind != "benchmark" {
            let license = map.get("license").filter(|node| !matches!(node.value, Tree::Null));
            match license {
                None if matches!(kind, "train" | "validation") => {
                    let fix = format!("add license: one of {}", LICENSES.join(", "));
                    self.wrong(&item.origin, &at("license"), format!("the {kind} dataset has no license"), fix);
                }
                Some(node) if !node.is_interpolation() && !LICENSES.contains(&node.python_str().as_str()) => {
                    let license = node.python_str();
                    let fix = suggest(&license, &LICENSES, "licenses");
                    self.wrong(&node.origin, &at("license"), format!("unknown license '{license}'"), fix);
                }
                _ => {}
            }
        }
        if let Some(node) = map.get("num_repeats") {
            match node.value {
                Tree::Null => {
                    self.wrong(&node.origin, &at("num_repeats"), "expected an integer, found null", "use 1 or more")
                }
                _ => {
                    let before = self.problems.len();
                    self.integer(node, &at("num_repeats"), 1, i128::from(u32::MAX));
                    debug_assert!(self.problems.len() <= before + 1);
                }
            }
        }
    }
}

/// Returns the `type` and `name` of a reference to another server.
pub(crate) fn reference(node: &Node) -> Option<(ServerKind, &str)> {
    let map = node.as_map()?;
    let kind = ServerKind::from_key(map.get("type")?.as_text()?)?;
    Some((kind, map.get("name")?.as_text()?))
}

/// Returns `true` for a reference to another server, also if its kind is misspelled.
pub(crate) fn is_reference(node: &Node) -> bool {
    let text = |key: &str| node.as_map()?.get(key)?.as_text();
    text("name").is_some()
        && text("type").is_some_and(|kind| nearest(kind, ServerKind::ALL.map(ServerKind::as_str)).is_some())
}

/// Collects every reference of a server's block, with its dotted key. A reference without a type, under a key that composes servers,
/// has the kind of the key.
pub(crate) fn references_of(kind: ServerKind, node: &Node) -> Vec<(String, ServerKind, String, Origin)> {
    let mut found = Vec::new();
    references(node, "", &mut found);
    for (key, kind) in composed_kinds(kind) {
        let Some(map) = node.step(key).and_then(Node::as_map) else { continue };
        let untyped = map.get("type").is_none_or(|node| matches!(node.value, Tree::Null));
        if let Some(name) = map.get("name").filter(|name| untyped && !name.is_missing() && !name.is_interpolation())
            && let Some(text) = name.as_text()
        {
            found.push((key.to_owned(), kind, text.to_owned(), name.origin.clone()));
        }
    }
    found
}

/// Returns the keys by which a server of a kind names others, each with the kind that it names.
pub(crate) fn composed_kinds(kind: ServerKind) -> impl Iterator<Item = (&'static str, ServerKind)> {
    composition_keys(kind).iter().filter_map(|known| match known.name {
        "resources_server" => Some((known.name, ServerKind::Resources)),
        "model_server" => Some((known.name, ServerKind::Model)),
        "agent_server" => Some((known.name, ServerKind::Agent)),
        _ => None,
    })
}

/// Collects every reference below a node, with its dotted key.
fn references(node: &Node, key: &str, out: &mut Vec<(String, ServerKind, String, Origin)>) {
    if let Some((kind, name)) = reference(node) {
        let origin = node.step("name").map_or(&node.origin, |name| &name.origin);
        out.push((key.to_owned(), kind, name.to_owned(), origin.clone()));
    }
    match &node.value {
        Tree::Map(map) => {
            for (step, child) in &map.0 {
                references(child, &if key.is_empty() { step.to_string() } else { format!("{key}.{step}") }, out);
            }
        }
        Tree::List(items) => {
            for (index, child) in items.iter().enumerate() {
                references(child, &format!("{key}[{index}]"), out);
            }
        }
        _ => {}
    }
}

/// Collects every `???` below a node, with its dotted path and origin.
pub(crate) fn missing(node: &Node, path: &str, out: &mut Vec<(String, Origin)>) {
    match &node.value {
        Tree::Text(text) if text == "???" => out.push((path.to_owned(), node.origin.clone())),
        Tree::Map(map) => {
            for (key, child) in &map.0 {
                missing(child, &if path.is_empty() { key.to_string() } else { format!("{path}.{key}") }, out);
            }
        }
        Tree::List(items) => {
            for (index, child) in items.iter().enumerate() {
                missing(child, &format!("{path}[{index}]"), out);
            }
        }
        _ => {}
    }
}

/// Returns the fix of a reference to another kind of server than its key names.
pub(crate) fn right_name(kind: ServerKind, servers: &[FoundServer]) -> String {
    let names: Vec<&str> = servers.iter().filter(|other| other.kind == kind).map(|other| other.name.as_str()).collect();
    match names.as_slice() {
        [] => format!("write type: {kind}, and the name of such a server"),
        [name] => format!("write {{type: {kind}, name: {name}}}"),
        names => format!("write type: {kind}, and one of the names {}", names.join(", ")),
    }
}

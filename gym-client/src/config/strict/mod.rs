//! Mistakes that NeMo Gym's loader accepts: they change what runs, or end a rollout, and nothing says so.

mod misplaced;
mod typed;

pub(crate) use misplaced::misplaced;

use std::collections::BTreeSet;
use std::path::PathBuf;

use gym_core::server::ServerKind;

use crate::config::check::{self, FoundServer, composed_kinds, has_entrypoint, references_of};
use crate::config::compose::{COPY, INHERIT};
use crate::config::params::{self, ParamMistake};
use crate::config::problem::{Mistake, Origin, Problem, nearest, suggest};
use crate::config::reference::{
    COLLECT_IGNORED_KEYS, COLLECT_KEYS, COLLECT_UNSUPPORTED_KEYS, ConfigKey, KeyType, TOP_LEVEL_KEYS,
};
use crate::config::resolve::overrides::COMMAND_LINE;
use crate::config::yaml::node::{Map, Node, Tree};

/// Returns the words of all interpolations and of all sources of inheritance. A variable whose name is not among them is used by nothing.
pub(crate) fn used_names(root: &Node) -> BTreeSet<String> {
    let mut used = BTreeSet::new();
    collect_names(root, &mut used);
    used
}

fn collect_names(node: &Node, used: &mut BTreeSet<String>) {
    let mut add = |text: &str| {
        let words = text.split(|letter: char| !(letter.is_alphanumeric() || matches!(letter, '_' | '-')));
        used.extend(words.map(str::to_owned));
    };
    match &node.value {
        Tree::Text(text) => text.split("${").skip(1).for_each(&mut add),
        Tree::Map(map) => {
            for (key, child) in &map.0 {
                if key.text().is_some_and(|key| [INHERIT, COPY].contains(&key)) {
                    child.as_text().into_iter().for_each(&mut add);
                }
            }
            map.0.iter().for_each(|(_, child)| collect_names(child, used));
        }
        Tree::List(items) => items.iter().for_each(|child| collect_names(child, used)),
        _ => {}
    }
}

/// Returns the mistakes, and adds warnings about what has no effect. `files` are those of the command; values from elsewhere, such as
/// `env.yaml`, serve several commands.
pub(crate) fn check(
    resolved: &Node,
    servers: &[FoundServer],
    used: &BTreeSet<String>,
    files: &[PathBuf],
    warnings: &mut Vec<Problem>,
) -> Vec<Problem> {
    let mut mistakes = Vec::new();
    for server in servers {
        references(server, resolved, servers, &mut mistakes);
    }
    let top = resolved.as_map().map(|map| map.0.as_slice()).unwrap_or_default();
    let files: BTreeSet<String> = files.iter().map(|file| file.display().to_string()).collect();
    let referenced = referenced(resolved, servers);
    let (mut idle, mut unused) = (Vec::new(), Vec::new());
    let mut above = None;
    for (key, node) in top {
        let key = key.to_string();
        let empty = matches!(node.value, Tree::Null).then(|| key.clone());
        let above = std::mem::replace(&mut above, empty);
        for (place, name) in named_servers(&key, node) {
            mistakes.extend(absent(&place, name, &key, resolved, servers));
        }
        let find = |keys: &'static [ConfigKey]| keys.iter().find(|known| known.name == key);
        let collected = find(&COLLECT_KEYS);
        let known = find(&TOP_LEVEL_KEYS).or(collected);
        mistakes.extend(collected.and_then(|known| count(known, node)));
        mistakes.extend(known.and_then(|known| typed::mistyped(known, node)));
        if key == "responses_create_params" {
            mistakes.extend(wrong_params(node));
        }
        if key == "head_server" {
            mistakes.extend(unknown_address_keys(node));
        }
        let source = node.origin.source.as_deref();
        let of_command_line = source == Some(COMMAND_LINE);
        let of_file = source.is_some_and(|source| files.contains(source));
        let mut unread = COLLECT_IGNORED_KEYS.iter().chain(&COLLECT_UNSUPPORTED_KEYS);
        if known.is_some()
            || unread.any(|known| *known == key)
            || used.contains(&key)
            || servers.iter().any(|server| server.name == key)
        {
            continue;
        }
        if !of_file && !of_command_line {
            // Other keys of `env.yaml` may serve other commands.
            let near = near_key(&key).filter(|_| source.is_some());
            warnings.extend(near.map(|near| unknown_key(&key, near, node)));
            continue;
        }
        if let Some(mistake) = misplaced(&key, node, above.as_deref()) {
            unused.retain(|(unused, _)| above.as_ref() != Some(unused));
            mistakes.push(mistake);
            continue;
        }
        match node.as_map() {
            Some(_) if of_command_line && near_key(&key).is_none() => {
                warnings.push(override_without_effect(&key, node, servers))
            }
            // A reference to it is an error already.
            Some(map) if is_idle(map) && !referenced.contains(&key) => idle.push((key, node)),
            Some(map) if !ServerKind::ALL.into_iter().any(|kind| map.contains(kind.as_str())) => {
                mistakes.extend(near_key(&key).map(|near| unknown_key(&key, near, node)));
            }
            Some(_) => {}
            None => match meant_key(&key) {
                Some(meant) => mistakes.push(unknown_key(&key, meant, node)),
                None if of_command_line => warnings.push(override_without_effect(&key, node, servers)),
                None => unused.push((key, node)),
            },
        }
    }
    let names =
        |keys: &[(String, &Node)]| keys.iter().map(|(key, _)| format!("'{key}'")).collect::<Vec<_>>().join(", ");
    if let Some((first, node)) = idle.first() {
        let what = match idle.len() {
            1 => format!("{} has no entrypoint, so it is no server, and no file uses it", names(&idle)),
            _ => format!("{} have no entrypoint, so they are no servers, and no file uses them", names(&idle)),
        };
        let fix = "add 'entrypoint: app.py' to the implementation, or remove the block";
        warnings.push(Problem::new(Mistake::Value, &node.origin, "", what).instance(first).fix(fix));
    }
    if let Some((first, node)) = unused.first() {
        let names = names(&unused);
        let what = match unused.len() {
            1 => format!("no file uses the variable {names}, and it is no known key"),
            _ => format!("no file uses the variables {names}, and they are no known keys"),
        };
        warnings.push(
            Problem::new(Mistake::Value, &node.origin, first.clone(), what).fix("remove it, or use it as ${name}"),
        );
    }
    mistakes
}

/// Keys that users of `rgym collect` write for those of NeMo Gym: its options, and parameters of a request.
const MEANT_KEYS: [(&str, &str); 10] = [
    ("agent", "agent_name"),
    ("concurrency", "num_samples_in_parallel"),
    ("input", "input_jsonl_fpath"),
    ("max_concurrency", "num_samples_in_parallel"),
    ("max_output_tokens", "responses_create_params.max_output_tokens"),
    ("max_tokens", "responses_create_params.max_output_tokens"),
    ("output", "output_jsonl_fpath"),
    ("repeats", "num_repeats"),
    ("temperature", "responses_create_params.temperature"),
    ("top_p", "responses_create_params.top_p"),
];

/// Returns the key that `key` probably stands for.
fn meant_key(key: &str) -> Option<&'static str> {
    let synonym = MEANT_KEYS.iter().find(|(written, _)| *written == key).map(|(_, meant)| *meant);
    synonym.or_else(|| near_key(key))
}

fn unknown_key(key: &str, meant: &str, node: &Node) -> Problem {
    Problem::new(Mistake::Value, &node.origin, key, format!("unknown key '{key}'"))
        .fix(format!("did you mean '{meant}'?"))
}

/// Returns the warning about an override of a key that nothing reads.
fn override_without_effect(key: &str, node: &Node, servers: &[FoundServer]) -> Problem {
    let names: Vec<&str> = servers.iter().map(|server| server.name.as_str()).collect();
    let near = nearest(key, names.iter().copied()).filter(|_| node.as_map().is_some());
    let (what, fix) = match (near, node.as_map()) {
        (Some(near), _) => (format!("no server has the name '{key}'"), format!("did you mean '{near}'?")),
        (None, Some(_)) => ("no server has this name, and no file uses the block".to_owned(), "remove it".to_owned()),
        (None, None) => (
            "no file uses this variable: it has no effect".to_owned(),
            format!("remove it, or write ${{{key}}} in the file where the value belongs"),
        ),
    };
    Problem::new(Mistake::Override, &node.origin, key, what).fix(fix)
}

/// Returns the keys of the head server's address that nothing reads.
fn unknown_address_keys(node: &Node) -> Vec<Problem> {
    const KEYS: [&str; 2] = ["host", "port"];
    let given = node.as_map().map(|map| map.0.as_slice()).unwrap_or_default();
    let unknown = given.iter().map(|(key, node)| (key.to_string(), node)).filter(|(key, _)| !KEYS.contains(&&**key));
    unknown
        .map(|(key, node)| {
            Problem::new(Mistake::Value, &node.origin, format!("head_server.{key}"), format!("unknown key '{key}'"))
                .fix(suggest(&key, &KEYS, "keys"))
        })
        .collect()
}

/// Returns the known key from which `key` differs by a typing mistake.
fn near_key(key: &str) -> Option<&'static str> {
    let known = TOP_LEVEL_KEYS.iter().chain(&COLLECT_KEYS).map(|known| known.name);
    let distance = |name: &&str| strsim::damerau_levenshtein(key, name);
    let near = known.filter(|name| name.len() >= 5).min_by_key(distance)?;
    let allowed = if near.len() > 10 { 2 } else { 1 };
    (distance(&near) <= allowed).then_some(near)
}

/// Returns what each agent rejects in the parameters of a request.
fn wrong_params(node: &Node) -> Vec<Problem> {
    let given = node.as_map().map(|map| map.0.as_slice()).unwrap_or_default();
    let given = given.iter().map(|(key, node)| (key.to_string(), node));
    let wrong = given.filter(|(_, node)| !node.is_interpolation() && !node.is_missing()).filter_map(|(key, node)| {
        let key_path = format!("responses_create_params.{key}");
        let (path, what, fix) = match params::check(&key, &node.to_json().to_string()).err()? {
            ParamMistake::UnknownKey(fix) => (key_path, "unknown key".to_owned(), fix),
            ParamMistake::Value(path, problem) => {
                let (what, fix) = problem.split_once("; ").unwrap_or((&problem, ""));
                let what = if what.starts_with("is ") { format!("the value {what}") } else { what.to_owned() };
                (key_path + &path, what, fix.to_owned())
            }
        };
        Some(Problem::new(Mistake::Value, &node.origin, path, what).fix(fix))
    });
    wrong.collect()
}

/// Returns the servers that a key of the collector names, each with its dotted key.
fn named_servers<'a>(key: &str, node: &'a Node) -> Vec<(String, &'a Node)> {
    let below = |node: &'a Node| node.as_map().map(|map| map.0.as_slice()).unwrap_or_default().iter();
    match key {
        "agent_name" | "environment_server_name" => vec![(key.to_owned(), node)],
        "agent_map" | "environment_server_routes" => {
            below(node).map(|(from, node)| (format!("{key}.{from}"), node)).collect()
        }
        "fan_out" => below(node)
            .flat_map(|(from, list)| match &list.value {
                Tree::List(items) => items.iter().map(|node| (format!("{key}.{from}"), node)).collect(),
                _ => Vec::new(),
            })
            .collect(),
        _ => Vec::new(),
    }
}

/// Returns the mistake of a name that no server has. Without any agent in the files, they may be those of running servers.
fn absent(place: &str, node: &Node, key: &str, resolved: &Node, servers: &[FoundServer]) -> Option<Problem> {
    let name = node.as_text().filter(|_| !node.is_interpolation() && !node.is_missing())?;
    let kinds: &[ServerKind] = match key {
        "environment_server_name" | "environment_server_routes" => &[ServerKind::Environment],
        _ => &[ServerKind::Agent, ServerKind::Environment],
    };
    let known: Vec<&str> =
        servers.iter().filter(|server| kinds.contains(&server.kind)).map(|server| server.name.as_str()).collect();
    if known.contains(&name) {
        return None;
    }
    let (what, fix) = match resolved.step(name).and_then(Node::as_map) {
        Some(block) if !servers.iter().any(|server| server.name == name) && is_idle(block) => {
            (format!("'{name}' has no entrypoint, so it is not a server"), "add 'entrypoint: app.py' to it".to_owned())
        }
        _ if known.is_empty() => return None,
        _ => (format!("there is no agent or environment server '{name}'"), suggest(name, &known, "servers")),
    };
    Some(Problem::new(Mistake::Value, &node.origin, place.to_owned(), what).fix(fix))
}

/// Returns the mistake of a count that allows nothing.
fn count(known: &ConfigKey, node: &Node) -> Option<Problem> {
    let least = match known.value {
        KeyType::Integer(least, _) => i128::from(least),
        KeyType::Counts => 1,
        _ => return None,
    };
    let wrong = |key: String, node: &Node| {
        let what = match &node.value {
            Tree::Null => return None,
            Tree::Int(int) if *int >= least => return None,
            Tree::Float(float) if float.fract() == 0.0 && *float as i128 >= least => return None,
            Tree::Text(text) if text.trim().parse::<i128>().is_ok_and(|int| int >= least) => return None,
            Tree::Text(_) if node.is_interpolation() => return None,
            Tree::Int(int) => format!("{int} is out of range"),
            _ => format!("expected an integer, found {}", node.kind()),
        };
        Some(
            Problem::new(Mistake::Value, &node.origin, key, what)
                .fix(format!("use {least} or more, or remove the key")),
        )
    };
    match (&node.value, known.value) {
        (Tree::Map(map), KeyType::Counts) => {
            map.0.iter().find_map(|(agent, node)| wrong(format!("{}.{agent}", known.name), node))
        }
        _ => wrong(known.name.to_owned(), node),
    }
}

/// Returns `true` for a block with a kind of server that is no server.
fn is_idle(block: &Map) -> bool {
    let mut kinds = ServerKind::ALL.into_iter().map(ServerKind::as_str).filter(|kind| block.contains(kind)).peekable();
    kinds.peek().is_some() && !kinds.any(|kind| has_entrypoint(block, kind))
}

/// Returns the names in the references of all servers.
fn referenced(resolved: &Node, servers: &[FoundServer]) -> BTreeSet<String> {
    let names = servers.iter().flat_map(|server| {
        let block = block_of(server, resolved);
        block.map(|block| references_of(server.kind, block)).unwrap_or_default().into_iter().map(|(_, _, name, _)| name)
    });
    names.collect()
}

fn block_of<'a>(server: &FoundServer, resolved: &'a Node) -> Option<&'a Node> {
    let path = [&server.name, server.kind.as_str(), &server.implementation];
    path.into_iter().try_fold(resolved, |node, step| node.step(step))
}

/// Returns the mistake of a reference that is only a name.
pub(crate) fn bare_reference(kind: ServerKind, name: &str, key: String, origin: &Origin) -> Problem {
    let fix = format!("write {{type: {kind}, name: {name}}}");
    Problem::new(Mistake::Value, origin, key, format!("expected a reference, found the string \"{name}\"")).fix(fix)
}

/// Checks that each reference has a type, and that of its key.
fn references(server: &FoundServer, resolved: &Node, servers: &[FoundServer], mistakes: &mut Vec<Problem>) {
    let path = [&server.name, server.kind.as_str(), &server.implementation];
    let Some(block) = block_of(server, resolved) else { return };
    for (key, node) in block.as_map().map(|map| map.0.as_slice()).unwrap_or_default() {
        let key = key.to_string();
        let wanted = composed_kinds(server.kind).find(|(known, _)| *known == key).map(|(_, kind)| kind);
        if let (Some(kind), Some(name)) = (wanted, node.as_text())
            && !node.is_interpolation()
            && !node.is_missing()
        {
            let key = [path.join(".").as_str(), &key].join(".");
            mistakes.push(bare_reference(kind, name, key, &node.origin).instance(&server.name));
            continue;
        }
        let Some(map) = node.as_map() else { continue };
        let Some(name) = map.get("name").and_then(Node::as_text) else { continue };
        let written = map.get("type").filter(|node| !matches!(node.value, Tree::Null));
        let (mistake, origin, what, fix) = match (written.map(|node| (node, node.python_str())), wanted) {
            (Some((node, _)), _) if node.is_interpolation() => continue,
            (None, Some(kind)) => {
                let fix = format!("write {key}: {{type: {kind}, name: {name}}}");
                (Mistake::Value, &node.origin, "the reference has no type".to_owned(), fix)
            }
            (Some((node, text)), Some(kind)) if ServerKind::from_key(&text).is_none() => {
                (Mistake::Value, &node.origin, format!("unknown server kind '{text}'"), format!("write type: {kind}"))
            }
            // A name that no server of the written kind has is an error already.
            (Some((node, text)), Some(kind))
                if text != kind.as_str()
                    && servers.iter().any(|other| other.kind.as_str() == text && other.name == name) =>
            {
                let what = format!("the reference is to one of the {text}, and {key} names one of the {kind}");
                (Mistake::Reference, &node.origin, what, check::right_name(kind, servers))
            }
            // In a key of the implementation's own, a type may mean something else.
            (Some((node, text)), None) if ServerKind::from_key(&text).is_none() => {
                let Some(near) = nearest(&text, ServerKind::ALL.map(ServerKind::as_str)) else { continue };
                let what = format!("unknown server kind '{text}'");
                (Mistake::Value, &node.origin, what, format!("did you mean '{near}'?"))
            }
            _ => continue,
        };
        let key = [path.join(".").as_str(), &key].join(".");
        mistakes.push(Problem::new(mistake, origin, key, what).instance(&server.name).fix(fix));
    }
}

//! Blocks that are no server only because a key stands on the wrong level.

use gym_core::server::ServerKind;

use crate::config::check::has_entrypoint;
use crate::config::problem::{Mistake, Origin, Problem, nearest};
use crate::config::yaml::node::{Map, Node, Tree};

/// Returns the mistake of a top-level block with an `entrypoint` that does not stand below a kind of server and an implementation. `above`
/// is the key before the block, if that key has no value.
pub(crate) fn misplaced(name: &str, block: &Node, above: Option<&str>) -> Option<Problem> {
    if is_kind(name) {
        let below = match above {
            Some(above) => format!("'{above}'"),
            None => "the name of the server".to_owned(),
        };
        let what = format!("'{name}' is a kind of server, and stands at the top level");
        return Some(mistake(&block.origin, name, what, format!("indent it, and the lines below it, under {below}")));
    }
    let map = block.as_map()?;
    if map.contains("entrypoint") {
        let what = "the entrypoint stands directly in the block, so the block is no server".to_owned();
        return Some(mistake(&block.origin, name, what, full_form(name, kind_of(map))));
    }
    if ServerKind::ALL.into_iter().any(|kind| has_entrypoint(map, kind.as_str())) {
        return None;
    }
    map.0.iter().find_map(|(key, child)| {
        let key = key.to_string();
        let settings = child.as_map()?;
        let (what, fix) = if settings.contains("entrypoint") {
            let given = map.0.iter().map(|(key, _)| key.to_string()).find(|key| is_kind(key));
            match given {
                Some(kind) if kind == key => (
                    format!("there is no implementation between '{kind}' and 'entrypoint'"),
                    format!("write {kind}: {{IMPLEMENTATION: {{entrypoint: app.py, …}}}}"),
                ),
                Some(kind) => (
                    format!("'{key}' stands beside '{kind}', not below it"),
                    format!("indent it, and the lines below it, under '{kind}'"),
                ),
                None => (
                    format!("there is no kind of server above '{key}'"),
                    full_form(name, kind_of(settings)).replacen("IMPLEMENTATION", &key, 1),
                ),
            }
        } else if !is_kind(&key) && has_entrypoint(map, &key) {
            // A misspelled kind is an error of the loader.
            if nearest(&key, ServerKind::ALL.map(ServerKind::as_str)).is_some() {
                return None;
            }
            let kinds = ServerKind::ALL.map(ServerKind::as_str).join(", ");
            (format!("'{key}' is no kind of server"), format!("write one of {kinds}"))
        } else {
            return None;
        };
        Some(mistake(&child.origin, &format!("{name}.{key}"), what, fix).instance(name))
    })
}

fn is_kind(key: &str) -> bool {
    ServerKind::from_key(key).is_some()
}

fn mistake(origin: &Origin, key: &str, what: String, fix: String) -> Problem {
    Problem::new(Mistake::Value, origin, key, what).fix(fix)
}

fn full_form(name: &str, kind: &str) -> String {
    format!("write {name}: {{{kind}: {{IMPLEMENTATION: {{entrypoint: app.py, …}}}}}}")
}

/// Returns the kind of server that has these keys.
fn kind_of(settings: &Map) -> &'static str {
    let has = |key: &str| settings.get(key).is_some_and(|node| !matches!(node.value, Tree::Null));
    let kind = if has("domain") {
        Some(ServerKind::Resources)
    } else if has("agent_server") {
        Some(ServerKind::Environment)
    } else if has("model_server") || has("resources_server") {
        Some(ServerKind::Agent)
    } else if settings.0.iter().any(|(key, _)| key.to_string().ends_with("base_url")) {
        Some(ServerKind::Model)
    } else {
        None
    };
    kind.map_or("KIND", ServerKind::as_str)
}

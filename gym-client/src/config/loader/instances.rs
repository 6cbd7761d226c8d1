//! The instances of a configuration, and what their settings refer to.

use gym_core::transport::bare_host;
use serde_json::Value;

use crate::config::check;
use crate::config::loader::tree::{at, port_at};
use crate::config::problem::{ConfigError, Mistake, Origin, Problem};
use crate::config::resolve::interpolation::InterpolationFailure;
use crate::config::schema::{InstanceConfig, MissingServer, ServerReference};
use crate::config::strict::misplaced;
use crate::config::yaml::node::{Node, Tree};

/// Reports references to servers that do not exist: on the first level an error as in NeMo Gym, on deeper levels a
/// warning. A reference to a server with a reported mistake is right. Returns the references on the first level to servers
/// that other files may define.
pub(super) fn dangling(
    resolved: &Node,
    servers: &[check::FoundServer],
    problems: &mut Vec<Problem>,
    warnings: &mut Vec<Problem>,
) -> Vec<MissingServer> {
    let mut missing = Vec::new();
    for server in servers {
        let Some(settings) = at(resolved, &server.path("")[..3]) else { continue };
        for (field, kind, name, origin) in check::references_of(server.kind, settings) {
            let mistaken = problems.iter().any(|problem| {
                problem.mistake != Mistake::Reference && problem.instance.as_deref() == Some(name.as_str())
            });
            if field.is_empty() || mistaken || servers.iter().any(|other| other.kind == kind && other.name == name) {
                continue;
            }
            let same: Vec<&str> = servers.iter().filter(|s| s.kind == kind).map(|s| s.name.as_str()).collect();
            let other = servers.iter().find(|other| other.name == name);
            let composed = check::composed_kinds(server.kind).find(|(key, _)| *key == field).map(|(_, kind)| kind);
            let fix = match other {
                // The key says which kind is meant, and the name is of another one.
                Some(other) if composed.is_some_and(|wanted| wanted == kind && wanted != other.kind) => {
                    format!("'{name}' is one of the {}; {}", other.kind, check::right_name(kind, servers))
                }
                Some(other) => format!("'{name}' belongs to {}; write type: {}", other.kind, other.kind),
                // The mistake of the block says how to mend it.
                None if let Some(mistake) = resolved.step(&name).and_then(|block| misplaced(&name, block, None)) => {
                    format!("mend the block '{name}': {}", mistake.what)
                }
                None if resolved.step(&name).is_some() => {
                    let others = match same.as_slice() {
                        [] => String::new(),
                        same => format!(", or name one of: {}", same.join(", ")),
                    };
                    format!("'{name}' has no entrypoint, so it is not a server; add 'entrypoint: app.py' to it{others}")
                }
                None => String::new(),
            };
            let key = server.path(&field).join(".");
            let what = format!("the reference names '{name}' of {kind}, which no file defines");
            let problem = Problem::new(Mistake::Reference, &origin, key, what).instance(&server.name);
            let deep = field.contains(['.', '[']);
            if fix.is_empty() {
                let known = same.into_iter().map(str::to_owned).collect();
                let server = MissingServer { kind, name, known, problem };
                if deep { warnings.push(server.problem(&[])) } else { missing.push(server) }
            } else if deep {
                warnings.push(problem.fix(fix));
            } else {
                problems.push(problem.fix(fix));
            }
        }
    }
    missing
}

pub(super) fn failure_problem(failure: &InterpolationFailure, servers: &[check::FoundServer]) -> Problem {
    let problem =
        Problem::new(Mistake::Interpolation, &failure.origin, failure.path.join("."), failure.why.what.as_str())
            .fix(&failure.why.fix);
    match servers.iter().find(|server| server.holds(&failure.path)) {
        Some(server) => problem.instance(&server.name),
        None => problem,
    }
}

pub(super) fn instance(
    server: &check::FoundServer,
    resolved: &Node,
    unresolved: Vec<Problem>,
) -> Result<InstanceConfig, ConfigError> {
    let path = server.path("");
    let node = at(resolved, &path[..3]).cloned().unwrap_or_else(|| Node::map(Vec::new(), &Origin::default()));
    let found = check::references_of(server.kind, &node);
    let references = found.into_iter().map(|(field, kind, name, _)| ServerReference { field, kind, name }).collect();
    let text = |key: &str| node.step(key).and_then(Node::as_text).map(str::to_owned);
    let settings = match node.to_settings() {
        Value::Object(map) => map,
        _ => serde_json::Map::new(),
    };
    let num_workers = settings.get("num_workers").and_then(|value| match value {
        Value::String(text) => text.trim().parse().ok(),
        value => value.as_u64().or_else(|| value.as_f64().map(|float| float as u64)),
    });
    let mut config = InstanceConfig {
        name: server.name.clone(),
        kind: server.kind,
        implementation: server.implementation.clone(),
        host: text("host").map(|host| bare_host(&host).to_owned()).unwrap_or_default(),
        port: match node.step("port").map(|node| &node.value) {
            Some(Tree::Int(-1)) => None,
            _ => port_at(resolved, &server.path("port"))?,
        },
        port_chosen: false,
        num_workers,
        entrypoint: text("entrypoint"),
        domain: text("domain"),
        references,
        datasets: Vec::new(),
        settings,
        origin: node.origin.clone(),
        unresolved,
        node,
    };
    config.datasets = match config.settings.get("datasets") {
        Some(Value::Array(items)) if !items.is_empty() => config.read("datasets")?,
        _ => Vec::new(),
    };
    Ok(config)
}

//! Composes agents with the servers in front of them: updates references to moved agents, inserts a standalone agent
//! into an environment, and gives each agent an environment server for its rollouts.

use crate::config::compose::directives;
use crate::config::compose::merge;
use crate::config::problem::{Mistake, Origin, Problem, suggest};
use crate::config::resolve::interpolation::{Resolver, VariableLookup};
use crate::config::yaml::node::{Key, Map, Node, Tree};
use gym_core::server::ServerKind;

/// Keys of the environment's agent that a standalone agent takes over when it replaces that agent.
const CARRIED: [&str; 3] = ["resources_server", "model_server", "datasets"];
const RELAY_SUFFIX: &str = "_environment_server";
/// Agents that NeMo Gym renamed: old and new instance name.
const RENAMED_AGENTS: [(&str, &str); 6] = [
    ("reasoning_gym_claude_code_agent", "claude_code_reasoning_gym_agent"),
    ("reasoning_gym_hermes_agent", "hermes_reasoning_gym_agent"),
    ("reasoning_gym_orchestrator_agent", "langgraph_orchestrator_reasoning_gym_agent"),
    ("reasoning_gym_parallel_thinking_agent", "langgraph_parallel_thinking_reasoning_gym_agent"),
    ("reasoning_gym_reflection_agent", "langgraph_reflection_reasoning_gym_agent"),
    ("reasoning_gym_rewoo_agent", "langgraph_rewoo_reasoning_gym_agent"),
];

/// A top-level agent with its only implementation.
#[derive(Clone, Debug)]
pub(crate) struct AgentBlock {
    pub(crate) name: String,
    pub(crate) implementation: String,
    pub(crate) block: Node,
}

/// Returns the implementation of a kind in an instance block if there is exactly one.
pub(crate) fn single(block: &Map, kind: ServerKind) -> Option<(String, &Node)> {
    match block.get(kind.as_str())?.as_map()?.0.as_slice() {
        [(key, node)] => Some((key.to_string(), node)),
        _ => None,
    }
}

pub(crate) fn agents(root: &Node) -> Vec<AgentBlock> {
    let top = root.as_map().map(|map| map.0.as_slice()).unwrap_or_default();
    top.iter()
        .filter(|(name, _)| !crate::config::check::is_reserved(&name.to_string()))
        .filter_map(|(name, block)| {
            let (implementation, node) = single(block.as_map()?, ServerKind::Agent)?;
            node.as_map()?;
            Some(AgentBlock { name: name.to_string(), implementation, block: node.clone() })
        })
        .collect()
}

impl AgentBlock {
    fn reference(&self, field: &str) -> Option<&Map> {
        self.block.as_map()?.get(field)?.as_map()
    }

    /// Returns `true` if the agent is standalone: the name of its resources server is `???`.
    fn is_unbound(&self) -> bool {
        self.reference("resources_server").and_then(|map| map.get("name")).is_some_and(Node::is_missing)
    }
}

/// A field of an environment server that names an agent.
struct AgentReference {
    path: Vec<String>,
    name: String,
}

fn text_at(root: &Node, environment: &VariableLookup<'_>, path: &[String]) -> Option<String> {
    let raw = root.at(path)?;
    if raw.is_interpolation() {
        let path: Vec<&str> = path.iter().map(String::as_str).collect();
        return Resolver::new(root, environment).value_at(&path).and_then(|node| node.as_text().map(str::to_owned));
    }
    raw.as_text().filter(|_| !raw.is_missing()).map(str::to_owned)
}

/// Returns the fields of all environment servers that name an agent: those of type `responses_api_agents`, and
/// `agent_server` without a type.
fn agent_references(root: &Node, environment: &VariableLookup<'_>) -> Vec<AgentReference> {
    let mut found = Vec::new();
    let top = root.as_map().map(|map| map.0.as_slice()).unwrap_or_default();
    for (instance, block) in top {
        let Some(servers) = block.step(ServerKind::Environment.as_str()).and_then(Node::as_map) else { continue };
        for (implementation, server) in &servers.0 {
            for (field, reference) in server.as_map().map(|map| map.0.as_slice()).unwrap_or_default() {
                if reference.as_map().is_none() {
                    continue;
                }
                let mut path = vec![
                    instance.to_string(),
                    ServerKind::Environment.as_str().to_owned(),
                    implementation.to_string(),
                    field.to_string(),
                    "type".to_owned(),
                ];
                let kind = text_at(root, environment, &path);
                let untyped = root.at(&path).is_none_or(|node| matches!(node.value, Tree::Null));
                if kind.as_deref() != Some(ServerKind::Agent.as_str())
                    && !(field.text() == Some("agent_server") && untyped)
                {
                    continue;
                }
                path.pop();
                path.push("name".to_owned());
                if let Some(name) = text_at(root, environment, &path) {
                    found.push(AgentReference { path, name });
                }
            }
        }
    }
    found
}

fn node_mut<'a>(root: &'a mut Node, path: &[String]) -> Option<&'a mut Node> {
    path.iter().try_fold(root, |node, step| node.as_map_mut()?.get_mut(step))
}

fn retarget(root: &mut Node, renames: &[(String, String)], environment: &VariableLookup<'_>) {
    for reference in agent_references(root, environment) {
        if let Some((_, new)) = renames.iter().find(|(old, _)| *old == reference.name)
            && let Some(node) = node_mut(root, &reference.path)
        {
            node.value = Tree::Text(new.clone());
        }
    }
}

/// Returns the names that inherit from each agent, before the directives run.
pub(crate) fn agent_moves(frozen: &Node) -> Vec<(String, Vec<String>)> {
    let mut moves: Vec<(String, Vec<String>)> =
        agents(frozen).into_iter().map(|agent| (agent.name, Vec::new())).collect();
    for (name, value) in frozen.as_map().map(|map| map.0.as_slice()).unwrap_or_default() {
        if let Some(source) = directives::inherited(value)
            && let Some((_, targets)) = moves.iter_mut().find(|(agent, _)| agent == source)
        {
            targets.push(name.to_string());
        }
    }
    moves
}

/// Updates environment servers whose agent was moved to a new name by inheritance.
pub(crate) fn follow_moves(
    root: &mut Node,
    moves: Vec<(String, Vec<String>)>,
    environment: &VariableLookup<'_>,
) -> Result<(), Vec<Problem>> {
    let agents: Vec<String> = agents(root).into_iter().map(|agent| agent.name).collect();
    let mut renames = Vec::new();
    let mut ambiguous = Vec::new();
    for (source, mut targets) in moves {
        targets.retain(|target| agents.contains(target));
        if root.step(&source).is_some() {
            continue;
        }
        match targets.len() {
            0 => {}
            1 => renames.push((source, targets.remove(0))),
            _ => ambiguous.push((source, targets)),
        }
    }
    let mut problems = Vec::new();
    for reference in agent_references(root, environment) {
        if let Some((source, targets)) = ambiguous.iter().find(|(source, _)| *source == reference.name) {
            let origin = root.at(&reference.path).map(|node| node.origin.clone()).unwrap_or_default();
            let what = format!("several instances inherit from agent '{source}': {}", targets.join(", "));
            problems.push(
                Problem::new(Mistake::Composition, &origin, reference.path.join("."), what)
                    .instance(&reference.path[0])
                    .fix("name one of them in this field, and give each of the others its own environment server"),
            );
        }
    }
    if !problems.is_empty() {
        return Err(problems);
    }
    retarget(root, &renames, environment);
    Ok(())
}

/// Returns the base name of an agent: `gpqa` for `gpqa_simple_agent` with `simple_agent`; other names lose a trailing
/// `_agent`.
fn stem<'a>(name: &'a str, implementation: &str) -> &'a str {
    let without = name.strip_suffix(&format!("_{implementation}")).unwrap_or(name);
    let without = without.strip_suffix(implementation).unwrap_or(without).trim_end_matches('_');
    if without == name { name.strip_suffix("_agent").unwrap_or(name).trim_end_matches('_') } else { without }
}

fn composed_name(agent: &AgentBlock, implementation: &str) -> String {
    match stem(&agent.name, &agent.implementation) {
        "" => implementation.to_owned(),
        stem => format!("{stem}_{implementation}"),
    }
}

/// Returns the names that [`standalone_agent`] will create; command-line overrides of these names are applied
/// afterwards.
pub(crate) fn composed_names(root: &Node) -> Vec<String> {
    let all = agents(root);
    let mut sources = all.iter().filter(|agent| agent.is_unbound());
    let (Some(source), None) = (sources.next(), sources.next()) else { return Vec::new() };
    all.iter().filter(|a| a.name != source.name).map(|agent| composed_name(agent, &source.implementation)).collect()
}

/// Replaces every other agent that has a resources server by the standalone agent, whose resources server is `???`.
pub(crate) fn standalone_agent(
    root: &mut Node,
    mut held: Map,
    environment: &VariableLookup<'_>,
) -> Result<(), Vec<Problem>> {
    let all = agents(root);
    let sources: Vec<&AgentBlock> = all.iter().filter(|agent| agent.is_unbound()).collect();
    let source = match sources.as_slice() {
        [] => return Ok(()),
        [source] => *source,
        several => {
            let names: Vec<&str> = several.iter().map(|agent| agent.name.as_str()).collect();
            let what = format!("{} agents leave their resources_server unset: {}", names.len(), names.join(", "));
            return Err(vec![
                Problem::new(Mistake::Composition, &several[0].block.origin, "", what)
                    .fix("load only one standalone agent, or set the resources server of the others"),
            ]);
        }
    };
    let wrong = |origin: &Origin, what: String, fix: &str| {
        vec![Problem::new(Mistake::Composition, origin, "", what).instance(&source.name).fix(fix)]
    };
    let targets: Vec<&AgentBlock> =
        all.iter().filter(|agent| agent.name != source.name && agent.reference("resources_server").is_some()).collect();
    if targets.is_empty() {
        return Err(wrong(
            &source.block.origin,
            "the agent has no resources_server, and there is no other agent that it could replace".to_owned(),
            "also load an environment, benchmark or resources server, or set resources_server.name of the agent",
        ));
    }
    unsupported_agents(root, source, &targets, environment)?;
    let renames: Vec<(String, String)> =
        targets.iter().map(|agent| (agent.name.clone(), composed_name(agent, &source.implementation))).collect();
    for (old, new) in &renames {
        let taken = root.step(new).is_some() && *new != source.name && !renames.iter().any(|(old, _)| old == new);
        if taken || renames.iter().filter(|(_, other)| other == new).count() > 1 {
            let what = format!("after composition, two instances would have the name '{new}' (one was '{old}')");
            return Err(wrong(&source.block.origin, what, "rename the environment's agent"));
        }
    }
    let top = root.as_map_mut().expect("the root is a mapping");
    top.remove(&source.name);
    let mut problems = Vec::new();
    for (target, (_, name)) in targets.iter().zip(&renames) {
        let mut composed = source.block.clone();
        if let (Some(into), Some(from)) = (composed.as_map_mut(), target.block.as_map()) {
            for key in CARRIED {
                if let Some(value) = from.get(key) {
                    into.set(Key::from(key), value.clone());
                }
            }
        }
        if let Some(over) = held.remove(name)
            && let Some(over) = over.step(ServerKind::Agent.as_str()).and_then(|kind| kind.step(&source.implementation))
        {
            unknown_fields(&composed, over, name, &mut problems);
            if let Err(more) = merge::merge(&mut composed, over, environment) {
                problems.extend(more);
            }
        }
        let Some(mut instance) = top.remove(&target.name) else { continue };
        if let Some(kinds) = instance.as_map_mut().and_then(|map| map.get_mut(ServerKind::Agent.as_str())) {
            let origin = kinds.origin.clone();
            *kinds = Node::map(vec![(Key::Text(source.implementation.clone()), composed)], &origin);
        }
        top.set(Key::Text(name.clone()), instance);
    }
    for (name, node) in &held.0 {
        problems.push(
            Problem::new(
                Mistake::Override,
                &node.origin,
                name.to_string(),
                "no instance has this name after composition",
            )
            .fix(suggest(
                &name.to_string(),
                &renames.iter().map(|(_, new)| new.as_str()).collect::<Vec<_>>(),
                "agents",
            )),
        );
    }
    retarget(root, &renames, environment);
    outdated_routes(root, &renames, &mut problems);
    if !problems.is_empty() {
        return Err(problems);
    }
    let origin = source.block.origin.clone();
    let mut routes = Map(renames.into_iter().map(|(old, new)| (Key::Text(old), Node::text(new, &origin))).collect());
    let top = root.as_map_mut().expect("the root is a mapping");
    if let Some(declared) = top.get("agent_map").and_then(Node::as_map) {
        for (key, node) in &declared.0 {
            routes.set(Key::Text(key.to_string()), node.clone());
        }
    }
    top.set(Key::from("agent_map"), Node::new(Tree::Map(routes), origin));
    Ok(())
}

/// Reports overrides of a composed agent that name a field which the agent does not have.
fn unknown_fields(composed: &Node, over: &Node, name: &str, problems: &mut Vec<Problem>) {
    let (Some(known), Some(given)) = (composed.as_map(), over.as_map()) else { return };
    for (key, node) in &given.0 {
        if known.get_key(key).is_none() {
            let names: Vec<String> = known.0.iter().map(|(key, _)| key.to_string()).collect();
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            problems.push(
                Problem::new(Mistake::Override, &node.origin, key.to_string(), "the composed agent has no such field")
                    .instance(name)
                    .fix(suggest(&key.to_string(), &names, "fields")),
            );
        }
    }
}

fn outdated_routes(root: &Node, renames: &[(String, String)], problems: &mut Vec<Problem>) {
    let mut check = |place: String, node: &Node| {
        if let Some((old, new)) = renames.iter().find(|(old, _)| node.as_text() == Some(old)) {
            problems.push(
                Problem::new(Mistake::Composition, &node.origin, place, format!("the agent '{old}' is now '{new}'"))
                    .fix(format!("write '{new}'")),
            );
        }
    };
    if let Some(node) = root.step("agent_name") {
        check("agent_name".to_owned(), node);
    }
    for (key, node) in root.step("agent_map").and_then(Node::as_map).map(|map| map.0.as_slice()).unwrap_or_default() {
        check(format!("agent_map.{key}"), node);
    }
    for (key, list) in root.step("fan_out").and_then(Node::as_map).map(|map| map.0.as_slice()).unwrap_or_default() {
        if let Tree::List(items) = &list.value {
            items.iter().for_each(|node| check(format!("fan_out.{key}"), node));
        }
    }
}

/// Returns `true` if the checks of declared pairings are disabled.
fn pairing_allowed(root: &Node, environment: &VariableLookup<'_>) -> bool {
    let set = match root.step("allow_unsupported_pairing").map(|node| &node.value) {
        Some(Tree::Bool(flag)) => *flag,
        Some(Tree::Text(text)) => !text.is_empty(),
        Some(Tree::Int(int)) => *int != 0,
        _ => false,
    };
    let variable = environment("NEMO_GYM_ALLOW_UNSUPPORTED_PAIRING").unwrap_or_default().to_lowercase();
    set || !matches!(variable.as_str(), "" | "0" | "false")
}

/// Returns the strings, or the one string, that a resources server declares under `field`.
fn declared(
    root: &Node,
    environment: &VariableLookup<'_>,
    agent: &AgentBlock,
    field: &str,
) -> Option<(String, Vec<String>)> {
    let path =
        [agent.name.as_str(), ServerKind::Agent.as_str(), &agent.implementation, "resources_server"].map(str::to_owned);
    let server = text_at(root, environment, &[path.as_slice(), &["name".to_owned()]].concat())?;
    let (_, block) = single(root.step(&server)?.as_map()?, ServerKind::Resources)?;
    let list = match &block.step(field)?.value {
        Tree::Text(text) if !text.is_empty() => vec![text.clone()],
        Tree::List(items) if !items.is_empty() => items.iter().map(Node::python_str).collect(),
        _ => return None,
    };
    Some((server, list))
}

fn unsupported_agents(
    root: &Node,
    source: &AgentBlock,
    targets: &[&AgentBlock],
    environment: &VariableLookup<'_>,
) -> Result<(), Vec<Problem>> {
    if pairing_allowed(root, environment) {
        return Ok(());
    }
    let mut problems = Vec::new();
    for target in targets {
        if let Some((server, allowed)) = declared(root, environment, target, "allowed_agents")
            && !allowed.contains(&source.implementation)
        {
            let what = format!(
                "resources server '{server}' accepts only the agents {}, not '{}'",
                allowed.join(", "),
                source.implementation
            );
            problems.push(
                Problem::new(Mistake::Composition, &target.block.origin, "", what)
                    .instance(&target.name)
                    .fix("load one of these agents, or set +allow_unsupported_pairing=true"),
            );
        }
    }
    if problems.is_empty() { Ok(()) } else { Err(problems) }
}

/// Reports model servers whose implementation a resources server does not accept.
pub(crate) fn unsupported_models(root: &Node, environment: &VariableLookup<'_>) -> Vec<Problem> {
    if pairing_allowed(root, environment) {
        return Vec::new();
    }
    let mut problems = Vec::new();
    for agent in agents(root) {
        let Some((server, allowed)) = declared(root, environment, &agent, "allowed_model_types") else { continue };
        let path = [agent.name.as_str(), ServerKind::Agent.as_str(), &agent.implementation, "model_server", "name"];
        let Some(model) = text_at(root, environment, &path.map(str::to_owned)) else { continue };
        let Some((implementation, _)) =
            root.step(&model).and_then(Node::as_map).and_then(|map| single(map, ServerKind::Model))
        else {
            continue;
        };
        if implementation != "dummy_model" && !allowed.contains(&implementation) {
            let what = format!(
                "model server '{model}' is a '{implementation}', but resources server '{server}' accepts only {}",
                allowed.join(", ")
            );
            problems.push(
                Problem::new(Mistake::Composition, &agent.block.origin, "model_server", what)
                    .instance(&agent.name)
                    .fix("name a model server of such a type, or set +allow_unsupported_pairing=true"),
            );
        }
    }
    problems
}

/// Returns the agents whose implementation their resources server does not list. NeMo Gym compares only agents that it composes itself.
pub(crate) fn unlisted_agents(root: &Node, environment: &VariableLookup<'_>) -> Vec<Problem> {
    if pairing_allowed(root, environment) {
        return Vec::new();
    }
    let unlisted = agents(root).into_iter().filter_map(|agent| {
        let (server, allowed) = declared(root, environment, &agent, "allowed_agents")?;
        let implementation = &agent.implementation;
        let what = format!(
            "the agent is a '{implementation}', but resources server '{server}' accepts only {}",
            allowed.join(", ")
        );
        (!allowed.contains(implementation)).then(|| {
            Problem::new(Mistake::Composition, &agent.block.origin, "resources_server", what)
                .instance(&agent.name)
                .fix("use an agent of such a type, or set +allow_unsupported_pairing=true")
        })
    });
    unlisted.collect()
}

/// Routes rows that name a renamed agent to its new name.
pub(crate) fn renamed_agents(root: &mut Node) {
    let declared = root.step("agent_map").and_then(Node::as_map).cloned().unwrap_or_default();
    let route = |name: &str| declared.get(name).and_then(Node::as_text).map_or_else(|| name.to_owned(), str::to_owned);
    let active: Vec<(&str, String)> = RENAMED_AGENTS
        .iter()
        .map(|(old, new)| (*old, route(new)))
        .filter(|(old, new)| root.step(old).is_none() && root.step(new).is_some())
        .collect();
    if active.is_empty() {
        return;
    }
    let replace = |node: &mut Node| {
        if let Some((_, new)) = active.iter().find(|(old, _)| node.as_text() == Some(old)) {
            node.value = Tree::Text(new.clone());
        }
    };
    let origin = root.origin.clone();
    let Some(top) = root.as_map_mut() else { return };
    if let Some(node) = top.get_mut("agent_name") {
        replace(node);
    }
    let mut routes = declared;
    routes.0.iter_mut().for_each(|(_, node)| replace(node));
    for (old, new) in &active {
        if !routes.contains(old) {
            routes.set(Key::from(*old), Node::text(new.clone(), &origin));
        }
    }
    top.set(Key::from("agent_map"), Node::new(Tree::Map(routes), origin));
    if let Some(fan_out) = top.get_mut("fan_out").and_then(Node::as_map_mut) {
        for (_, list) in &mut fan_out.0 {
            if let Tree::List(items) = &mut list.value {
                items.iter_mut().for_each(replace);
            }
        }
    }
}

/// Creates a `legacy_agent` relay for each agent that no environment server names; returns (agent, relay) pairs.
pub(crate) fn relays(root: &mut Node, environment: &VariableLookup<'_>) -> Result<Vec<(String, String)>, Vec<Problem>> {
    let named: Vec<String> = agent_references(root, environment).into_iter().map(|reference| reference.name).collect();
    let mut bare: Vec<AgentBlock> = agents(root)
        .into_iter()
        .filter(|agent| !agent.is_unbound() && !named.contains(&agent.name))
        .filter(|agent| agent.block.step("entrypoint").is_some_and(|node| !matches!(node.value, Tree::Null)))
        .collect();
    bare.sort_by(|a, b| a.name.cmp(&b.name));
    let strict = root.step("error_on_agent_without_environment_server");
    if matches!(strict.map(|node| &node.value), Some(Tree::Bool(true))) {
        let problem = |agent: &AgentBlock| {
            Problem::new(Mistake::Composition, &agent.block.origin, "", "no environment server names this agent")
                .instance(&agent.name)
                .fix(format!(
                    "add one: {}: {{environment_servers: {{legacy_agent: {{entrypoint: app.py, agent_server: {{type: \
                     responses_api_agents, name: {}}}}}}}}}",
                    relay_name(agent),
                    agent.name
                ))
        };
        return if bare.is_empty() { Ok(Vec::new()) } else { Err(bare.iter().map(problem).collect()) };
    }
    let mut made: Vec<(String, String)> = Vec::new();
    for agent in bare {
        let mut name = relay_name(&agent);
        if root.step(&name).is_some() {
            name = format!("{}{RELAY_SUFFIX}", agent.name);
        }
        while root.step(&name).is_some() {
            name.push_str(RELAY_SUFFIX);
        }
        let origin = agent.block.origin.clone();
        let entry = |key: &str, node: Node| (Key::from(key), node);
        let reference = Node::map(
            vec![
                entry("type", Node::text(ServerKind::Agent.as_str(), &origin)),
                entry("name", Node::text(agent.name.clone(), &origin)),
            ],
            &origin,
        );
        let relay = Node::map(
            vec![entry("entrypoint", Node::text("app.py", &origin)), entry("agent_server", reference)],
            &origin,
        );
        let implementation = Node::map(vec![entry("legacy_agent", relay)], &origin);
        let block = Node::map(vec![entry(ServerKind::Environment.as_str(), implementation)], &origin);
        root.as_map_mut().expect("the root is a mapping").set(Key::Text(name.clone()), block);
        made.push((agent.name, name));
    }
    Ok(made)
}

fn relay_name(agent: &AgentBlock) -> String {
    let stem = stem(&agent.name, &agent.implementation);
    format!("{}{RELAY_SUFFIX}", if stem.is_empty() { &agent.implementation } else { stem })
}

//! Applies `_inherit_from`, `_copy`, `_delete_key` and their forms `${inherit_from:…}` and `${copy:…}`.
//!
//! `_inherit_from` moves: the source is removed from its position, and environment servers that named a moved agent
//! name it by its new name. `_copy` keeps the source. Both read the configuration as it was before any directive ran.

use crate::config::compose::merge;
use crate::config::problem::{Mistake, Origin, Problem, nearest};
use crate::config::resolve::interpolation::{Resolver, VariableLookup};
use crate::config::yaml::node::{Key, Map, Node, Tree};

pub(crate) const INHERIT: &str = "_inherit_from";
pub(crate) const COPY: &str = "_copy";
pub(crate) const DELETE: &str = "_delete_key";

/// Runs every directive of the tree.
pub(super) fn run(root: &mut Node, environment: &VariableLookup<'_>) -> Result<(), Vec<Problem>> {
    let frozen = root.clone();
    let mut directives = Directives { root, frozen: &frozen, environment, problems: Vec::new() };
    directives.mapping(&mut Vec::new());
    let problems = directives.problems;
    if problems.is_empty() { Ok(()) } else { Err(problems) }
}

struct Directives<'a> {
    root: &'a mut Node,
    frozen: &'a Node,
    environment: &'a VariableLookup<'a>,
    problems: Vec<Problem>,
}

/// The result of a path lookup.
enum PathTarget {
    Value(Node),
    /// The path contains a value `???`.
    Missing,
    /// A key does not exist: the first absent step, and its siblings.
    Absent(String, Vec<String>),
}

impl Directives<'_> {
    fn here(&self, path: &[String]) -> Option<&Node> {
        self.root.at(path)
    }

    fn here_mut(&mut self, path: &[String]) -> Option<&mut Node> {
        let mut node = &mut *self.root;
        for step in path {
            node = match &mut node.value {
                Tree::Map(map) => map.0.iter_mut().find(|(key, _)| key.to_string() == *step).map(|(_, node)| node)?,
                Tree::List(items) => items.get_mut(step.parse::<usize>().ok()?)?,
                _ => return None,
            };
        }
        Some(node)
    }

    fn mapping(&mut self, path: &mut Vec<String>) {
        let Some(entries) = self.here(path).and_then(Node::as_map).map(|map| map.0.clone()) else { return };
        for (key, before) in entries {
            path.push(key.to_string());
            self.entry(path, &key, before);
            path.pop();
        }
    }

    fn entry(&mut self, path: &mut Vec<String>, key: &Key, before: Node) {
        let mut value = self.here(path).cloned().unwrap_or(before);
        let mut delete = Vec::new();
        let deletes = value.as_map_mut().and_then(|map| map.remove(DELETE));
        if let Some(names) = &deletes {
            let Some(names) = names.as_text() else {
                let what = format!("{DELETE} is {}; expected a string", names.kind());
                let origin = names.origin.clone();
                return self.problem(&origin, path, what, format!("write {DELETE}: 'a, b'"));
            };
            let map = value.as_map_mut().expect("a key was removed from it above");
            for name in names.split(',').map(str::trim) {
                if map.remove(name).is_none() {
                    delete.push(name.to_owned());
                }
            }
            if let Some(here) = self.here_mut(path) {
                *here = value.clone();
            }
        }
        match &value.value {
            Tree::Map(_) => self.mapping(path),
            Tree::List(items) => {
                for index in 0..items.len() {
                    path.push(index.to_string());
                    if self.here(path).is_some_and(|node| node.as_map().is_some()) {
                        self.mapping(path);
                    }
                    path.pop();
                }
            }
            _ => {}
        }
        if let Some(now) = self.here(path) {
            value = now.clone();
        }
        self.swap(path, key, value, &delete, deletes.is_some());
    }

    fn swap(&mut self, path: &[String], key: &Key, mut value: Node, delete: &[String], deletes: bool) {
        let origin = value.origin.clone();
        let mut source = None;
        let mut moves = false;
        let mut property = false;
        for (name, prefix, is_move) in [(INHERIT, "${inherit_from:", true), (COPY, "${copy:", false)] {
            if let Some(rest) = value.as_text().and_then(|text| text.strip_prefix(prefix)) {
                source = Some(Node::text(rest.strip_suffix('}').unwrap_or(rest), &origin));
                moves |= is_move;
            } else if let Some(named) = value.as_map_mut().and_then(|map| map.remove(name)) {
                source = Some(named);
                moves |= is_move;
                property = true;
            }
        }
        let Some(source) = source else { return };
        let Some(from) = source.as_text().map(str::trim) else {
            let what = format!("the source of the inheritance is {}; expected a path", source.kind());
            return self.problem(
                &source.origin,
                path,
                what,
                "write a dotted path, for example other_server.resources_servers",
            );
        };
        let steps: Vec<String> = from.split('.').map(str::to_owned).collect();
        let (leaf, parent) = steps.split_last().expect("split gives at least one part");
        // The parent of the source is looked up in the current tree, without the keys that were moved away.
        let (missing, gone) = match self.target(self.root, parent) {
            PathTarget::Missing => (true, None),
            PathTarget::Absent(step, siblings) => (false, Some((step, siblings))),
            PathTarget::Value(_) => (false, None),
        };
        let found = match gone {
            Some((step, siblings)) => PathTarget::Absent(step, siblings),
            None => self.target(self.frozen, &steps),
        };
        let swapped = match found {
            PathTarget::Value(node) if !missing => node,
            PathTarget::Value(_) | PathTarget::Missing => return self.put(path, key, Node::text("???", &origin)),
            PathTarget::Absent(step, siblings) => {
                let near = nearest(&step, siblings.iter().map(String::as_str));
                let fix = match near {
                    Some(near) => format!("did you mean '{near}' instead of '{step}'?"),
                    None => format!("load the file that defines '{from}' as well, or correct the path"),
                };
                return self.problem(
                    &source.origin,
                    path,
                    format!("'{from}' does not exist: there is no '{step}'"),
                    fix,
                );
            }
        };
        if moves && let Some(map) = self.here_mut(parent).and_then(Node::as_map_mut) {
            map.remove(leaf);
        }
        let mut result = swapped;
        if property {
            if result.as_map().is_none() {
                let what = format!("a mapping cannot inherit from '{from}', which is {}", result.kind());
                return self.problem(
                    &source.origin,
                    path,
                    what,
                    format!("replace the mapping by the value ${{copy:{from}}}"),
                );
            }
            if let Err(problems) = merge::merge(&mut result, &value, self.environment) {
                self.problems.extend(problems);
                return;
            }
        }
        if deletes {
            for name in delete {
                if result.as_map_mut().and_then(|map| map.remove(name)).is_none() {
                    let names: Vec<String> =
                        result.as_map().into_iter().flat_map(|map| &map.0).map(|(key, _)| key.to_string()).collect();
                    let near = nearest(name, names.iter().map(String::as_str));
                    let fix =
                        near.map_or_else(|| "remove it from the list".to_owned(), |n| format!("did you mean '{n}'?"));
                    self.problem(&origin, path, format!("{DELETE} names '{name}', which '{from}' does not have"), fix);
                }
            }
        }
        self.put(path, key, result);
    }

    fn put(&mut self, path: &[String], key: &Key, node: Node) {
        let Some((_, parent)) = path.split_last() else { return };
        if let Some(map) = self.here_mut(parent).and_then(Node::as_map_mut) {
            map.set(key.clone(), node);
        }
    }

    fn target(&self, root: &Node, steps: &[String]) -> PathTarget {
        let mut node = root.clone();
        let mut so_far: Vec<&str> = Vec::new();
        for step in steps {
            let Some(next) = node.as_map().and_then(|map| map.get(step)) else {
                let siblings = node.as_map().map(|map| map.0.iter().map(|(key, _)| key.to_string()).collect());
                return PathTarget::Absent(step.clone(), siblings.unwrap_or_default());
            };
            if next.is_missing() {
                return PathTarget::Missing;
            }
            so_far.push(step);
            node = if next.is_interpolation() {
                Resolver::new(root, self.environment).value_at(&so_far).unwrap_or_else(|| next.clone())
            } else {
                next.clone()
            };
        }
        PathTarget::Value(node)
    }

    fn problem(&mut self, origin: &Origin, path: &[String], what: impl Into<Box<str>>, fix: impl AsRef<str>) {
        self.problems.push(Problem::new(Mistake::Inheritance, origin, path.join("."), what).fix(fix));
    }
}

/// Returns the source from which a top-level value inherits, if any.
pub(crate) fn inherited(value: &Node) -> Option<&str> {
    match &value.value {
        Tree::Text(text) => text.strip_prefix("${inherit_from:").map(|rest| rest.strip_suffix('}').unwrap_or(rest)),
        Tree::Map(Map(entries)) => {
            entries.iter().find(|(key, _)| key.text() == Some(INHERIT)).and_then(|(_, node)| node.as_text())
        }
        _ => None,
    }
}

//! Resolves OmegaConf's interpolations: `${a.b}`, `${.x}`, `${..x}`, `${oc.env:X,default}`, `${oc.select:a.b,default}`.

use std::cell::Cell;
use std::fmt;

use crate::config::problem::Origin;
use crate::config::resolve::grammar::{Inserted, ValueParser, braces};
use crate::config::yaml::node::{Node, Tree};

/// Looks up an environment variable.
pub(crate) type VariableLookup<'a> = dyn Fn(&str) -> Option<String> + 'a;

/// Maximum number of interpolations that lead to one value; detects cycles.
const DEPTH_MAX: usize = 64;
/// Maximum number of values that resolving creates, because each `${…}` of a mapping can double their number.
const NODES_MAX: usize = 1_000_000;

/// The reason why an interpolation has no value, and the fix.
#[derive(Clone, Debug)]
pub(crate) struct Unresolved {
    pub(crate) what: String,
    pub(crate) fix: String,
}

impl Unresolved {
    fn new(what: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { what: what.into(), fix: fix.into() }
    }
}

/// An interpolation that could not be resolved, with its path.
#[derive(Clone, Debug)]
pub(crate) struct InterpolationFailure {
    pub(crate) path: Vec<String>,
    pub(crate) origin: Origin,
    pub(crate) why: Unresolved,
}

/// A value in the tree, or a value that a resolver created.
pub(crate) enum Resolved<'a> {
    At(Vec<String>, &'a Node),
    Made(Node),
}

pub(crate) struct Resolver<'a> {
    root: &'a Node,
    environment: &'a VariableLookup<'a>,
    depth: Cell<usize>,
    nodes: Cell<usize>,
}

impl fmt::Debug for Resolver<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Resolver").finish_non_exhaustive()
    }
}

impl<'a> Resolver<'a> {
    pub(crate) fn new(root: &'a Node, environment: &'a VariableLookup<'a>) -> Self {
        Self { root, environment, depth: Cell::new(0), nodes: Cell::new(0) }
    }

    /// Returns the whole tree with every interpolation replaced. Unresolved interpolations keep their text and are
    /// returned.
    pub(crate) fn all(&self) -> (Node, Vec<InterpolationFailure>) {
        let mut failures = Vec::new();
        let node = self.expand(&mut Vec::new(), self.root, &mut failures);
        (node, failures)
    }

    /// Returns the value at a path, with the interpolations at and below it replaced.
    pub(crate) fn value_at(&self, path: &[&str]) -> Option<Node> {
        let mut found = Resolved::At(Vec::new(), self.root);
        for step in path {
            found = self.child(found, step).ok()??;
        }
        let mut failures = Vec::new();
        let node = self.owned(found, &mut failures);
        failures.is_empty().then_some(node)
    }

    fn owned(&self, found: Resolved<'_>, failures: &mut Vec<InterpolationFailure>) -> Node {
        match found {
            Resolved::At(mut path, node) => self.expand(&mut path, node, failures),
            Resolved::Made(node) => node,
        }
    }

    fn expand(&self, path: &mut Vec<String>, node: &Node, failures: &mut Vec<InterpolationFailure>) -> Node {
        self.nodes.set(self.nodes.get() + 1);
        let value = match &node.value {
            Tree::Map(map) => {
                let mut out = Vec::with_capacity(map.0.len());
                for (key, child) in &map.0 {
                    path.push(key.to_string());
                    out.push((key.clone(), self.expand(path, child, failures)));
                    path.pop();
                }
                Tree::Map(crate::config::yaml::node::Map(out))
            }
            Tree::List(items) => {
                let mut out = Vec::with_capacity(items.len());
                for (index, child) in items.iter().enumerate() {
                    path.push(index.to_string());
                    out.push(self.expand(path, child, failures));
                    path.pop();
                }
                Tree::List(out)
            }
            Tree::Text(_) if node.is_interpolation() => {
                let container = &path[..path.len().saturating_sub(1)];
                let result = self.deeper(|| {
                    let found = self.text(container, node)?;
                    let mut below = Vec::new();
                    let out = self.owned(found, &mut below);
                    match below.into_iter().next() {
                        Some(failure) => Err(failure.why),
                        None => Ok(out),
                    }
                });
                return match result {
                    Ok(mut out) => {
                        out.origin = node.origin.clone();
                        out
                    }
                    Err(why) => {
                        failures.push(InterpolationFailure { path: path.clone(), origin: node.origin.clone(), why });
                        node.clone()
                    }
                };
            }
            _ => return node.clone(),
        };
        Node::new(value, node.origin.clone())
    }

    fn deeper<T>(&self, work: impl FnOnce() -> Result<T, Unresolved>) -> Result<T, Unresolved> {
        if self.depth.get() >= DEPTH_MAX || self.nodes.get() > NODES_MAX {
            return Err(Unresolved::new(
                "the interpolation refers to itself",
                "break the cycle: give one of the keys a value",
            ));
        }
        self.depth.set(self.depth.get() + 1);
        let result = work();
        self.depth.set(self.depth.get() - 1);
        result
    }

    /// Resolves a string with interpolations; `container` is the path of the mapping or list that contains it.
    pub(crate) fn text(&self, container: &[String], node: &Node) -> Result<Resolved<'a>, Unresolved> {
        let text = node.as_text().unwrap_or_default();
        if let Some(length) = text.starts_with("${").then(|| braces(text)).flatten()
            && length == text.len()
        {
            return self.interpolation(container, text, &node.origin);
        }
        let mut out = String::new();
        let mut rest = text;
        while let Some(at) = rest.find("${") {
            let before = &rest[..at];
            let backslashes = before.len() - before.trim_end_matches('\\').len();
            out.push_str(&before[..at - backslashes]);
            out.extend(std::iter::repeat_n('\\', backslashes / 2));
            rest = &rest[at..];
            if backslashes % 2 == 1 {
                out.push_str("${");
                rest = &rest[2..];
                continue;
            }
            let length = braces(rest).ok_or_else(|| {
                Unresolved::new(format!("'{rest}' has no closing '}}'"), "close it, or write \\${ for a literal ${")
            })?;
            let found = self.interpolation(container, &rest[..length], &node.origin)?;
            match found {
                // Python's string of a container shows its values unresolved.
                Resolved::At(_, node) if node.is_container() => out.push_str(&node.python_str()),
                found => out.push_str(&self.complete(found)?.python_str()),
            }
            rest = &rest[length..];
        }
        out.push_str(rest);
        Ok(Resolved::Made(Node::text(out, &node.origin)))
    }

    fn complete(&self, found: Resolved<'_>) -> Result<Node, Unresolved> {
        let mut failures = Vec::new();
        let node = self.owned(found, &mut failures);
        failures.into_iter().next().map_or(Ok(node), |failure| Err(failure.why))
    }

    /// Resolves one `${…}`.
    fn interpolation(&self, container: &[String], whole: &str, origin: &Origin) -> Result<Resolved<'a>, Unresolved> {
        let inner = whole[2..whole.len() - 1].trim();
        if let Some((name, arguments)) = resolver_call(inner) {
            return self.deeper(|| self.call(container, name, arguments, origin));
        }
        let mut key = String::new();
        let mut rest = inner;
        while let Some(at) = rest.find("${") {
            key.push_str(&rest[..at]);
            let length = braces(&rest[at..]).ok_or_else(|| {
                Unresolved::new(format!("'{whole}' has no closing '}}'"), "close the inner interpolation")
            })?;
            let found = self.deeper(|| self.interpolation(container, &rest[at..at + length], origin))?;
            key.push_str(&self.complete(found)?.python_str());
            rest = &rest[at + length..];
        }
        key.push_str(rest);
        if key.is_empty() || key.contains(|c: char| c.is_whitespace() || "\\{}()'\":,".contains(c)) {
            return Err(Unresolved::new(
                format!("'{whole}' is not a valid interpolation"),
                "write ${a.b} for another key, ${oc.env:NAME,default} for the environment, \\${ for a literal ${",
            ));
        }
        self.deeper(|| {
            self.select(container, &key)?.ok_or_else(|| {
                Unresolved::new(
                    format!("'{whole}' refers to '{key}', which is not set after merging"),
                    format!(
                        "set it in a file or in env.yaml, or on the command line: ++{}=<value>",
                        key.trim_start_matches('.')
                    ),
                )
            })
        })
    }

    /// Returns the value at a key path, or `None` if it does not exist.
    fn select(&self, container: &[String], key: &str) -> Result<Option<Resolved<'a>>, Unresolved> {
        let dots = key.len() - key.trim_start_matches('.').len();
        let base = if dots == 0 {
            Vec::new()
        } else {
            let up = dots - 1;
            let keep = container.len().checked_sub(up).ok_or_else(|| {
                Unresolved::new(format!("'{key}' leads above the top level of the configuration"), "remove a dot")
            })?;
            container[..keep].to_vec()
        };
        let node = self.root.at(&base).unwrap_or(self.root);
        let mut found = Resolved::At(base, node);
        for step in steps(&key[dots..]) {
            match self.child(found, step)? {
                Some(next) => found = next,
                None => return Ok(None),
            }
        }
        Ok(Some(found))
    }

    fn child(&self, found: Resolved<'a>, step: &str) -> Result<Option<Resolved<'a>>, Unresolved> {
        match found {
            Resolved::At(mut path, node) => {
                let Some(child) = node.step(step) else { return Ok(None) };
                if child.is_missing() {
                    path.push(step.to_owned());
                    return Err(Unresolved::new(
                        format!("the reference '{}' is not set (???)", path.join(".")),
                        format!("set ++{}=<value>", path.join(".")),
                    ));
                }
                if child.is_interpolation() {
                    return self.deeper(|| self.text(&path, child)).map(Some);
                }
                path.push(step.to_owned());
                Ok(Some(Resolved::At(path, child)))
            }
            Resolved::Made(node) => Ok(node.step(step).cloned().map(Resolved::Made)),
        }
    }

    fn call(
        &self,
        container: &[String],
        name: &str,
        arguments: &str,
        origin: &Origin,
    ) -> Result<Resolved<'a>, Unresolved> {
        if matches!(name, "inherit_from" | "copy") {
            // NeMo Gym does not resolve such an interpolation, for example in an entry of a list, so it remains a
            // string.
            return Ok(Resolved::Made(Node::text(format!("${{{name}:{}}}", arguments.trim()), origin)));
        }
        let failure: Cell<Option<Unresolved>> = Cell::new(None);
        let values = ValueParser::new(arguments.trim(), origin, |whole| {
            let node =
                self.deeper(|| self.interpolation(container, whole, origin)).and_then(|found| self.complete(found));
            node.map(Inserted::Value).map_err(|why| {
                let what = why.what.clone();
                failure.set(Some(why));
                what
            })
        })
        .sequence();
        let values = values.map_err(|what| {
            failure.take().unwrap_or_else(|| {
                Unresolved::new(format!("cannot read ${{{name}:{arguments}}}: {what}"), "quote the argument")
            })
        })?;
        let usage = |form: &str| {
            Unresolved::new(
                format!("${{{name}:{arguments}}} has the wrong number of arguments ({})", values.len()),
                format!("write {form}"),
            )
        };
        match name {
            "oc.env" => {
                let (variable, default) = match values.as_slice() {
                    [variable] => (variable.python_str(), None),
                    [variable, default] => (variable.python_str(), Some(default)),
                    _ => return Err(usage("${oc.env:NAME} or ${oc.env:NAME,default}")),
                };
                match ((self.environment)(&variable), default) {
                    (Some(value), _) => Ok(Resolved::Made(Node::text(value, origin))),
                    (None, Some(Node { value: Tree::Null, .. })) => {
                        Ok(Resolved::Made(Node::new(Tree::Null, origin.clone())))
                    }
                    (None, Some(default)) => Ok(Resolved::Made(Node::text(default.python_str(), origin))),
                    (None, None) => Err(Unresolved::new(
                        format!("environment variable '{variable}' not found"),
                        format!("export {variable}, or give a default: ${{oc.env:{variable},default}}"),
                    )),
                }
            }
            "oc.select" => {
                let (key, default) = match values.as_slice() {
                    [key] => (key.python_str(), None),
                    [key, default] => (key.python_str(), Some(default.clone())),
                    _ => return Err(usage("${oc.select:a.b} or ${oc.select:a.b,default}")),
                };
                let otherwise =
                    || Resolved::Made(default.clone().unwrap_or_else(|| Node::new(Tree::Null, origin.clone())));
                if self.raw_missing(container, &key) {
                    return Ok(otherwise());
                }
                Ok(self.select(container, &key)?.unwrap_or_else(otherwise))
            }
            "oc.decode" => match values.as_slice() {
                [Node { value: Tree::Null, .. }] => Ok(Resolved::Made(Node::new(Tree::Null, origin.clone()))),
                [value] => {
                    let text = value.python_str();
                    let node = ValueParser::new(&text, origin, |whole| {
                        self.deeper(|| self.interpolation(container, whole, origin))
                            .and_then(|found| self.complete(found))
                            .map(Inserted::Value)
                            .map_err(|why| why.what)
                    })
                    .only();
                    node.map(Resolved::Made).map_err(|what| {
                        Unresolved::new(
                            format!("cannot decode the value of ${{oc.decode:{arguments}}}: {what}"),
                            "quote it",
                        )
                    })
                }
                _ => Err(usage("${oc.decode:${oc.env:NAME}}")),
            },
            _ => Err(Unresolved::new(
                format!("unknown resolver '{name}'"),
                "use one of oc.env, oc.select, oc.decode, inherit_from, copy",
            )),
        }
    }

    fn raw_missing(&self, container: &[String], key: &str) -> bool {
        let dots = key.len() - key.trim_start_matches('.').len();
        let Some(keep) = container.len().checked_sub(dots.saturating_sub(1)) else { return false };
        let mut path = if dots == 0 { Vec::new() } else { container[..keep].to_vec() };
        path.extend(steps(&key[dots..]).map(str::to_owned));
        self.root.at(&path).is_some_and(Node::is_missing)
    }
}

/// Splits `a.b[0].c` into its steps.
fn steps(key: &str) -> impl Iterator<Item = &str> {
    key.split(['.', '[', ']']).filter(|step| !step.is_empty())
}

/// Splits `name:arguments`, where the name consists of dotted words.
fn resolver_call(inner: &str) -> Option<(&str, &str)> {
    let (name, arguments) = inner.split_once(':')?;
    let name = name.trim();
    let word = |word: &str| {
        word.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
            && word.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-'))
    };
    name.split('.').all(word).then_some((name, arguments))
}

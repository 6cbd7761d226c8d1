//! Values of a merged configuration by their path, with the mistakes that name it.

use crate::config::check;
use crate::config::problem::{Mistake, Origin, Problem};
use crate::config::yaml::node::{Key, Map, Node, Tree};

impl check::FoundServer {
    pub(super) fn path<'a>(&'a self, key: &'a str) -> [&'a str; 4] {
        [&self.name, self.kind.as_str(), &self.implementation, key]
    }

    pub(super) fn holds(&self, path: &[String]) -> bool {
        path.len() >= 3 && path[0] == self.name && path[1] == self.kind.as_str() && path[2] == self.implementation
    }
}

pub(super) fn at<'a>(root: &'a Node, path: &[&str]) -> Option<&'a Node> {
    path.iter().try_fold(root, |node, step| node.step(step))
}

pub(super) fn set(root: &mut Node, key: &str, node: Node) {
    root.as_map_mut().expect("the root is a mapping").set(Key::from(key), node);
}

/// Sets a key that is absent; an explicit null is kept, as with Python's `setdefault`.
pub(super) fn set_default(root: &mut Node, key: &str, value: Tree) {
    if root.step(key).is_none() {
        set(root, key, Node::new(value, Origin::default()));
    }
}

pub(super) fn settings_mut<'a>(root: &'a mut Node, server: &check::FoundServer) -> Option<&'a mut Map> {
    let kinds = root.as_map_mut()?.get_mut(&server.name)?.as_map_mut()?;
    let implementations = kinds.get_mut(server.kind.as_str())?.as_map_mut()?;
    implementations.0.iter_mut().find(|(key, _)| key.to_string() == server.implementation)?.1.as_map_mut()
}

pub(super) fn place(root: &Node, key: &str, what: impl Into<Box<str>>) -> Problem {
    let mut path = key.split('.').collect::<Vec<_>>();
    let mut origin = Origin::default();
    while !path.is_empty() {
        if let Some(node) = at(root, &path) {
            origin = node.origin.clone();
            break;
        }
        path.pop();
    }
    Problem::new(Mistake::Value, &origin, key, what)
}

pub(super) fn truthy(root: &Node, path: &[&str]) -> Option<String> {
    at(root, path)?.as_text().filter(|text| !text.is_empty()).map(str::to_owned)
}

pub(super) fn text_or(root: &Node, path: &[&str], default: &str) -> Result<String, Problem> {
    match at(root, path) {
        None | Some(Node { value: Tree::Null, .. }) => Ok(default.to_owned()),
        Some(node) => node.as_text().map(str::to_owned).ok_or_else(|| {
            place(root, &path.join("."), format!("expected a string, found {}", node.kind())).fix("put it in quotes")
        }),
    }
}

pub(super) fn port_at(root: &Node, path: &[&str]) -> Result<Option<u16>, Problem> {
    let Some(node) = at(root, path) else { return Ok(None) };
    let port = match &node.value {
        Tree::Null => return Ok(None),
        Tree::Int(int) => u16::try_from(*int).ok(),
        Tree::Float(float) if float.fract() == 0.0 => u16::try_from(*float as i128).ok(),
        Tree::Text(text) => text.trim().parse().ok(),
        _ => None,
    };
    port.map(Some).ok_or_else(|| {
        place(root, &path.join("."), format!("'{}' is not a port", node.python_str()))
            .fix("use a number from 1 to 65535")
    })
}

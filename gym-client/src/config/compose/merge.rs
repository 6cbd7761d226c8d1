//! Merges as `OmegaConf.merge` does: later values override earlier ones, mappings are merged, lists are replaced, and
//! `???` never overrides.

use crate::config::problem::{Mistake, Problem};
use crate::config::resolve::interpolation::{Resolved, Resolver, VariableLookup};
use crate::config::yaml::node::{Key, Map, Node, Tree};

/// Merges `over` into `root`; both are mappings.
pub(crate) fn merge(root: &mut Node, over: &Node, environment: &VariableLookup<'_>) -> Result<(), Vec<Problem>> {
    let mut problems = Vec::new();
    if let Some(map) = over.as_map() {
        merge_at(root, &mut Vec::new(), map, environment, &mut problems);
    }
    if problems.is_empty() { Ok(()) } else { Err(problems) }
}

fn place<'a>(root: &'a mut Node, path: &[Key]) -> Option<&'a mut Map> {
    let mut node = root;
    for key in path {
        node = node.as_map_mut()?.get_key_mut(key)?;
    }
    node.as_map_mut()
}

fn merge_at(
    root: &mut Node,
    path: &mut Vec<Key>,
    over: &Map,
    environment: &VariableLookup<'_>,
    problems: &mut Vec<Problem>,
) {
    for (key, above) in &over.0 {
        let Some(map) = place(root, path) else { return };
        let Some(below) = map.get_key(key) else {
            map.set(key.clone(), above.clone());
            continue;
        };
        if above.is_missing() {
            continue;
        }
        // A mapping that overrides `${other}` is merged into a copy of the value of `other`.
        if above.is_container() && below.is_interpolation() {
            let container: Vec<String> = path.iter().map(ToString::to_string).collect();
            let below = below.clone();
            let target = match Resolver::new(root, environment).text(&container, &below) {
                Ok(Resolved::At(_, node)) if node.is_container() => Some(node.clone()),
                Ok(Resolved::Made(node)) if node.is_container() => Some(node),
                _ => None,
            };
            if let (Some(target), Some(map)) = (target, place(root, path)) {
                map.set(key.clone(), target);
            }
        }
        let Some(map) = place(root, path) else { return };
        let Some(below) = map.get_key_mut(key) else { continue };
        match (&mut below.value, &above.value) {
            (Tree::Map(_), Tree::Map(over)) => {
                path.push(key.clone());
                merge_at(root, path, over, environment, problems);
                path.pop();
            }
            (Tree::Map(_), Tree::List(_)) | (Tree::List(_), Tree::Map(_)) => {
                let name = path.iter().chain([key]).map(ToString::to_string).collect::<Vec<_>>().join(".");
                let what = format!("{} cannot override {} from {}", above.kind(), below.kind(), below.origin);
                problems.push(
                    Problem::new(Mistake::Merge, &above.origin, name, what).fix(
                        "give both values the same type; a list can only be replaced as a whole, not entry by entry",
                    ),
                );
            }
            _ => *below = above.clone(),
        }
    }
}

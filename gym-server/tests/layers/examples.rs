//! The items of the preludes and of the crate roots, and their examples: blocks of code in the documentation of their definitions.

use std::collections::BTreeMap;
use std::path::Path;

use crate::documents;

/// Returns the names that a prelude or a crate root re-exports, as their definitions have them. Without constants and other preludes.
pub(crate) fn names(text: &str) -> Vec<String> {
    let uses = text.split("pub use ").skip(1).filter_map(|rest| rest.split(';').next());
    let mut found = Vec::new();
    for tree in uses {
        let list = tree.split_once('{').map_or(tree, |(_, list)| list.trim_end().trim_end_matches('}'));
        let items = list.split(',').filter_map(|item| item.split_whitespace().next()?.rsplit("::").next());
        found.extend(items.filter(|name| name.contains(char::is_lowercase)).map(str::to_owned));
    }
    found
}

/// Returns, for each name that is defined in a folder with sources, whether the documentation of a definition has a block of code.
pub(crate) fn definitions(folder: &Path) -> BTreeMap<String, bool> {
    let mut found = BTreeMap::new();
    for path in documents::entries(folder).into_iter().filter(|path| path.ends_with(".rs")) {
        let text = std::fs::read_to_string(folder.join(&path)).expect("a source");
        // A module's own page.
        let page = path.trim_end_matches("/mod.rs").trim_end_matches(".rs");
        let module = page.rsplit('/').next().unwrap_or(page).to_owned();
        *found.entry(module).or_default() |= text.lines().any(|line| line.starts_with("//! ```"));
        let mut example = false;
        for line in text.lines().map(str::trim) {
            if let Some(name) = defined(line) {
                *found.entry(name.to_owned()).or_default() |= example;
            }
            // Documentation and attributes belong to the definition that follows.
            let belongs = line.starts_with("///") || line.starts_with("#[") || line == ")]";
            example = belongs && (example || line.starts_with("/// ```"));
        }
    }
    found
}

/// Returns the name of the public type, trait, function or macro that a line defines.
fn defined(line: &str) -> Option<&str> {
    let rest = line.strip_prefix("macro_rules! ").or_else(|| {
        let kinds = ["async fn ", "enum ", "fn ", "struct ", "trait ", "type "];
        line.strip_prefix("pub ").and_then(|rest| kinds.iter().find_map(|kind| rest.strip_prefix(kind)))
    })?;
    let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
    Some(&rest[..end])
}

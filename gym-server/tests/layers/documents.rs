//! The documents of the workspace: their relative links, and the paths in their code spans.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Folders that hold no sources: outputs of builds and runs, and files that are shared between checkouts.
const OUTPUTS: [&str; 3] = ["results", "shared", "target"];

/// Returns all files and folders of the workspace, relative to its root, without outputs and hidden ones (but with `.ci`).
pub(crate) fn entries(root: &Path) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut folders = vec![PathBuf::new()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(root.join(&folder)).expect("a folder of the workspace").flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let kind = entry.file_type().expect("the kind of an entry");
            if kind.is_symlink() || OUTPUTS.contains(&&*name) || (name.starts_with('.') && name != ".ci") {
                continue;
            }
            let path = folder.join(name);
            found.insert(path.to_string_lossy().into_owned());
            if kind.is_dir() {
                folders.push(path);
            }
        }
    }
    found
}

/// Returns the text without its blocks of code.
pub(crate) fn prose(text: &str) -> String {
    let mut inside = false;
    let kept = text.lines().filter(|line| {
        let fence = line.trim_start().starts_with("```");
        inside ^= fence;
        !inside && !fence
    });
    kept.map(|line| format!("{line}\n")).collect()
}

/// Returns the targets of the links: `[text](target)`.
pub(crate) fn links(text: &str) -> impl Iterator<Item = &str> {
    text.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(target, _)| target)
}

/// Returns the anchors of the headings, as GitHub forms them.
pub(crate) fn anchors(text: &str) -> BTreeSet<String> {
    let headings = text.lines().filter(|line| line.starts_with('#')).map(|line| line.trim_start_matches('#').trim());
    let anchor = |heading: &str| {
        let kept = heading.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
        kept.flat_map(char::to_lowercase).map(|c| if c == ' ' { '-' } else { c }).collect()
    };
    headings.map(anchor).collect()
}

/// Returns the paths of sources in the code spans. `{a,b}` stands for each of its parts.
pub(crate) fn paths(text: &str) -> Vec<String> {
    let spans = text.split('`').skip(1).step_by(2);
    let is_path = |span: &&str| {
        let plain = span.chars().all(|c| c.is_ascii_alphanumeric() || "/._-{},".contains(c));
        let named = span.contains('/') || [".rs", ".md", ".py"].iter().any(|end| span.ends_with(end));
        plain && named && !span.starts_with('/')
    };
    let mut found = Vec::new();
    for span in spans.filter(is_path) {
        match (span.split_once('{'), span.split_once('}')) {
            (Some((before, rest)), Some((_, after))) => {
                let inner = rest.split('}').next().unwrap_or_default();
                found.extend(inner.split(',').map(|part| format!("{before}{part}{after}")));
            }
            _ => found.push(span.to_owned()),
        }
    }
    found
}

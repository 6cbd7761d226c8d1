//! Reads the dependencies between the modules of a crate from the paths in its sources.
//!
//! A unit is a module with its submodules. A path to a re-export counts as a path to the module that defines the item. Test modules
//! are ignored: a test may use any module.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

/// The segments of a path, starting at the root of the crate.
type Segments = Vec<String>;

/// The modules of a crate, and the paths between them.
pub(crate) struct Crate {
    modules: BTreeSet<Segments>,
    /// For each module, the names that it re-exports and the paths to their definitions.
    exports: BTreeMap<Segments, BTreeMap<String, Segments>>,
    /// Pairs of a module and a path that it uses.
    paths: Vec<(Segments, Segments)>,
}

/// The dependencies between two modules of the same level, each with an example: the module that contains the path, and the path.
pub(crate) type Edges = BTreeMap<(String, String), (String, String)>;

impl Crate {
    /// Reads the sources in `folder`, the `src` directory of a crate.
    pub(crate) fn read(folder: &Path) -> Self {
        let mut sources = BTreeMap::new();
        read_folder(folder, &[], &mut sources);
        assert!(sources.len() > 3, "{} has sources", folder.display());
        let modules = sources.keys().cloned().collect();
        let mut read = Self { modules, exports: BTreeMap::new(), paths: Vec::new() };
        for (module, text) in &sources {
            let (uses, rest) = split_uses(text);
            for (is_public, tree) in uses {
                for path in expand(&tree) {
                    let Some(absolute) = read.absolute(&path, module) else { continue };
                    if let (true, Some(name)) = (is_public, absolute.last()) {
                        read.exports.entry(module.clone()).or_default().insert(name.clone(), absolute.clone());
                    }
                    // A module page may re-export its submodules' items.
                    if !(is_public && absolute.starts_with(module)) {
                        read.paths.push((module.clone(), absolute));
                    }
                }
            }
            for path in paths_in(&rest) {
                let absolute = read.absolute(&path, module);
                read.paths.extend(absolute.map(|absolute| (module.clone(), absolute)));
            }
        }
        read
    }

    /// Returns the modules that have submodules, including the root.
    pub(crate) fn levels(&self) -> BTreeSet<Segments> {
        self.modules.iter().filter_map(|module| module.split_last()).map(|(_, parent)| parent.to_vec()).collect()
    }

    /// Returns the submodules of a module.
    pub(crate) fn modules(&self, level: &[String]) -> BTreeSet<String> {
        let below = self.modules.iter().filter(|module| module.len() == level.len() + 1 && module.starts_with(level));
        below.filter_map(|module| module.last().cloned()).collect()
    }

    /// Returns the dependencies between the submodules of a module.
    pub(crate) fn edges(&self, level: &[String]) -> Edges {
        let mut edges = Edges::new();
        for (module, path) in &self.paths {
            let path = self.definition(path.clone());
            if let (Some(from), Some(to)) = (self.module(level, module), self.module(level, &path))
                && from != to
            {
                edges.entry((from, to)).or_insert_with(|| (module.join("::"), path.join("::")));
            }
        }
        edges
    }

    /// Returns the submodule of `level` that contains `path`. Returns `None` for an item that `level` itself defines.
    fn module(&self, level: &[String], path: &[String]) -> Option<String> {
        let rest = path.strip_prefix(level)?;
        let name = rest.first()?;
        let module: Segments = level.iter().chain([name]).cloned().collect();
        self.modules.contains(&module).then(|| name.clone())
    }

    fn absolute(&self, path: &[String], module: &[String]) -> Option<Segments> {
        let (first, rest) = path.split_first()?;
        match first.as_str() {
            "crate" => Some(rest.to_vec()),
            "self" => Some([module, rest].concat()),
            "super" => {
                let ups = path.iter().take_while(|segment| *segment == "super").count();
                let kept = module.len().checked_sub(ups)?;
                Some([&module[..kept], &path[ups..]].concat())
            }
            _ => {
                let child: Segments = module.iter().chain([first]).cloned().collect();
                self.modules.contains(&child).then(|| [module, path].concat())
            }
        }
    }

    /// Follows re-exports to the module that defines the item.
    fn definition(&self, mut path: Segments) -> Segments {
        // Bounded, because a re-export of itself is not a valid program.
        for _ in 0..16 {
            let module = (0..=path.len()).rev().find(|length| self.modules.contains(&path[..*length])).unwrap_or(0);
            let Some(name) = path.get(module) else { return path };
            let target = self.exports.get(&path[..module]).and_then(|names| names.get(name));
            match target {
                Some(target) if target[..] != path[..=module] => path = [target, &path[module + 1..]].concat(),
                _ => return path,
            }
        }
        path
    }
}

/// Returns the modules of each cycle, with the paths of their dependencies. The result is empty if there is no cycle.
pub(crate) fn cycles(edges: &Edges) -> String {
    let mut reachable: BTreeSet<(&str, &str)> = edges.keys().map(|(from, to)| (from.as_str(), to.as_str())).collect();
    loop {
        let longer: Vec<_> = reachable
            .iter()
            .flat_map(|(from, middle)| {
                reachable.iter().filter(move |(next, _)| next == middle).map(move |(_, to)| (*from, *to))
            })
            .filter(|edge| !reachable.contains(edge))
            .collect();
        if longer.is_empty() {
            break;
        }
        reachable.extend(longer);
    }
    let mut report = String::new();
    for ((from, to), (module, path)) in edges {
        if reachable.contains(&(to.as_str(), from.as_str())) {
            writeln!(report, "  {from} -> {to}: {module} names {path}").expect("a string takes everything");
        }
    }
    report
}

fn read_folder(folder: &Path, module: &[String], sources: &mut BTreeMap<Segments, String>) {
    let entries = fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    for entry in entries {
        let path = entry.expect("an entry of a folder").path();
        let name = path.file_stem().expect("a name").to_string_lossy().into_owned();
        let child = || [module, std::slice::from_ref(&name)].concat();
        if matches!(name.as_str(), "tests" | "bin") || name.ends_with("_tests") {
            continue;
        }
        if path.is_dir() {
            read_folder(&path, &child(), sources);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let key = if matches!(name.as_str(), "lib" | "mod") { module.to_vec() } else { child() };
            let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            sources.insert(key, code_of(&text));
        }
    }
}

/// Returns the source without comments and without the test module at its end.
fn code_of(text: &str) -> String {
    let end = text.find("#[cfg(test)]\nmod tests {").unwrap_or(text.len());
    let lines = text[..end].lines().map(|line| line.find("//").map_or(line, |at| &line[..at]));
    lines.collect::<Vec<_>>().join("\n")
}

/// Returns the `use` declarations, each with a flag for re-exports, and the rest of the source.
fn split_uses(text: &str) -> (Vec<(bool, String)>, String) {
    let (mut uses, mut rest, mut from) = (Vec::new(), String::new(), 0);
    for (at, _) in text.match_indices("use ") {
        let line_start = text[..at].rfind('\n').map_or(0, |newline| newline + 1);
        let before = text[line_start..at].trim();
        let is_declaration =
            before.is_empty() || before == "pub" || (before.starts_with("pub(") && before.ends_with(')'));
        if at < from || !is_declaration {
            continue;
        }
        let Some(length) = text[at..].find(';') else { continue };
        rest += &text[from..line_start];
        uses.push((!before.is_empty(), text[at + 4..at + length].to_owned()));
        from = at + length + 1;
    }
    rest += &text[from..];
    (uses, rest)
}

/// Returns the paths of a `use` tree.
fn expand(tree: &str) -> Vec<Segments> {
    fn segments(text: &str) -> Segments {
        let path = text.split(" as ").next().unwrap_or_default();
        path.split("::").map(str::trim).filter(|segment| !segment.is_empty()).map(str::to_owned).collect()
    }
    let tree = tree.trim();
    let Some((prefix, group)) = tree.split_once('{') else { return vec![segments(tree)] };
    let group = &group[..group.rfind('}').unwrap_or(group.len())];
    let (mut paths, mut depth, mut from) = (Vec::new(), 0_usize, 0);
    for (at, character) in group.char_indices().chain([(group.len(), ',')]) {
        match character {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                let item = group[from..at].trim();
                if !item.is_empty() {
                    paths.extend(expand(item).into_iter().map(|path| [segments(prefix), path].concat()));
                }
                from = at + 1;
            }
            _ => {}
        }
    }
    paths
}

/// Returns the paths that begin with `crate::` or `super::`, except those of `use` declarations and of macros (`$crate::`).
fn paths_in(text: &str) -> Vec<Segments> {
    let is_name = |character: char| character.is_alphanumeric() || character == '_';
    let mut paths = Vec::new();
    for keyword in ["crate::", "super::"] {
        for (at, _) in text.match_indices(keyword) {
            let before = text[..at].chars().next_back();
            // `super::super::` is found at its first segment.
            if before.is_some_and(|before| is_name(before) || matches!(before, '$' | ':')) {
                continue;
            }
            let end = text[at..].find(|character: char| !is_name(character) && character != ':');
            let path = &text[at..end.map_or(text.len(), |end| at + end)];
            paths.push(path.split("::").filter(|segment| !segment.is_empty()).map(str::to_owned).collect());
        }
    }
    paths
}

#[test]
fn use_trees_are_expanded() {
    let paths: Vec<String> = expand("crate::{a::{B, c::D as E}, f}").iter().map(|path| path.join("::")).collect();
    assert_eq!(paths, ["crate::a::B", "crate::a::c::D", "crate::f"]);
}

#[test]
fn a_cycle_over_three_modules_is_found_and_a_chain_is_none() {
    let edges = |pairs: &[(&str, &str)]| -> Edges {
        let example = || (String::new(), String::new());
        pairs.iter().map(|(from, to)| (((*from).to_owned(), (*to).to_owned()), example())).collect()
    };
    assert_eq!(cycles(&edges(&[("a", "b"), ("b", "c"), ("d", "a")])), "");
    let report = cycles(&edges(&[("a", "b"), ("b", "c"), ("c", "a"), ("d", "a")]));
    assert_eq!(report.lines().count(), 3, "{report}");
}

//! Finds configuration files, follows their `config_paths`, and orders them for merging.

use std::io;
use std::path::{Path, PathBuf};

use crate::config::problem::{ConfigError, LET_READ, Mistake, Origin, Problem};
use crate::config::resolve::interpolation::{Resolver, VariableLookup};
use crate::config::yaml::node::{Node, Tree};
use crate::config::yaml::parser;

/// Maximum size of a configuration file; a larger file was named by mistake.
const FILE_BYTES_MAX: u64 = 16 << 20;

/// Files that NeMo Gym moved: old and new path.
const MOVED: [(&str, &str); 9] = [
    ("environments/reasoning_gym_claude_code/config.yaml", "environments/claude_code_reasoning_gym/config.yaml"),
    ("environments/reasoning_gym_hermes/config.yaml", "environments/hermes_reasoning_gym/config.yaml"),
    (
        "environments/reasoning_gym_orchestrator/config.yaml",
        "environments/langgraph_orchestrator_reasoning_gym/config.yaml",
    ),
    (
        "environments/reasoning_gym_parallel_thinking/config.yaml",
        "environments/langgraph_parallel_thinking_reasoning_gym/config.yaml",
    ),
    (
        "environments/reasoning_gym_reflection/config.yaml",
        "environments/langgraph_reflection_reasoning_gym/config.yaml",
    ),
    ("environments/reasoning_gym_rewoo/config.yaml", "environments/langgraph_rewoo_reasoning_gym/config.yaml"),
    (
        "responses_api_agents/stirrup_agent/configs/stirrup_gdpval.yaml",
        "responses_api_agents/stirrup_agent/configs/stirrup_agent.yaml",
    ),
    ("responses_api_agents/tau2/configs/tau2_agent.yaml", "responses_api_agents/tau2/configs/tau2.yaml"),
    (
        "responses_api_agents/verifiers_agent/configs/acereason-math.yaml",
        "responses_api_agents/verifiers_agent/configs/verifiers_agent.yaml",
    ),
];

/// The directories in which relative paths are searched, in this order.
#[derive(Clone, Debug)]
pub(crate) struct SearchRoots {
    pub(crate) searched: Vec<PathBuf>,
    pub(crate) working_dir: PathBuf,
    pub(crate) installed: Vec<PathBuf>,
}

impl SearchRoots {
    fn candidates(&self, path: &Path) -> Vec<PathBuf> {
        if path.is_absolute() {
            return vec![path.to_owned()];
        }
        let roots = self.searched.iter().chain([&self.working_dir]).chain(&self.installed);
        let mut out: Vec<PathBuf> = Vec::new();
        for candidate in roots.map(|root| root.join(path)) {
            if !out.contains(&candidate) {
                out.push(candidate);
            }
        }
        out
    }

    fn find(&self, path: &Path) -> Option<PathBuf> {
        self.candidates(path).into_iter().find(|candidate| candidate.exists())
    }
}

/// The files of one load. Each is read once and lists the files that it includes.
pub(crate) struct ConfigFiles<'a> {
    roots: &'a SearchRoots,
    environment: &'a VariableLookup<'a>,
    entries: Vec<ConfigFile>,
    warnings: Vec<Problem>,
    roots_count: usize,
}

struct ConfigFile {
    name: String,
    origin: Origin,
    path: PathBuf,
    children: Vec<usize>,
    config: Node,
}

/// Returns the `config_paths` of a layer, as strings with their origin.
pub(crate) fn listed(layer: &Node, environment: &VariableLookup<'_>) -> Result<Vec<Node>, ConfigError> {
    let Some(raw) = layer.step("config_paths") else { return Ok(Vec::new()) };
    let resolved = Resolver::new(layer, environment).value_at(&["config_paths"]);
    let wrong = |node: &Node| {
        Problem::new(
            Mistake::Value,
            &node.origin,
            "config_paths",
            format!("expected a list of paths, found {}", node.kind()),
        )
        .fix("write config_paths: [a.yaml, b.yaml]")
    };
    match resolved.unwrap_or_else(|| raw.clone()).value {
        Tree::Null => Ok(Vec::new()),
        Tree::List(items) => {
            for item in &items {
                if item.as_text().is_none() || item.is_interpolation() {
                    return Err(wrong(item).into());
                }
            }
            Ok(items)
        }
        _ => Err(wrong(raw).into()),
    }
}

impl<'a> ConfigFiles<'a> {
    pub(crate) fn new(roots: &'a SearchRoots, environment: &'a VariableLookup<'a>) -> Self {
        Self { roots, environment, entries: Vec::new(), warnings: Vec::new(), roots_count: 0 }
    }

    /// Reads `env.yaml`, if it exists.
    pub(crate) fn env_file(&self) -> Result<Option<Node>, ConfigError> {
        let Some(path) = self.roots.find(Path::new("env.yaml")) else { return Ok(None) };
        let origin = Origin::of(&path.display().to_string());
        read(&path, &path.display().to_string(), &origin).map(Some).map_err(ConfigError::from)
    }

    /// Reads the named files and all files that they include; reports all missing files together.
    pub(crate) fn read(&mut self, named: Vec<Node>) -> Result<(), ConfigError> {
        for node in named {
            let name = node.as_text().unwrap_or_default().to_owned();
            // As in NeMo Gym, a file that is named twice is merged twice, so it can override the files in between.
            self.push(name, node.origin);
        }
        self.roots_count = self.entries.len();
        let mut problems = Vec::new();
        let mut index = 0;
        while index < self.entries.len() {
            if let Err(error) = self.open(index) {
                match error {
                    ConfigError::Invalid(more) => problems.extend(more),
                    other @ ConfigError::Unsupported { .. } => return Err(other),
                }
            }
            index += 1;
        }
        if problems.is_empty() { Ok(()) } else { Err(ConfigError::Invalid(problems)) }
    }

    fn push(&mut self, name: String, origin: Origin) {
        let config = Node::map(Vec::new(), &Origin::default());
        self.entries.push(ConfigFile { name, origin, path: PathBuf::new(), children: Vec::new(), config });
    }

    fn open(&mut self, index: usize) -> Result<(), ConfigError> {
        let (name, origin) = (self.entries[index].name.clone(), self.entries[index].origin.clone());
        let mut path = self.roots.find(Path::new(&name));
        if path.is_none()
            && let Some((_, moved)) = MOVED.iter().find(|(old, _)| *old == name)
            && let Some(found) = self.roots.find(Path::new(moved))
        {
            self.warnings.push(
                Problem::new(Mistake::File, &origin, "config_paths", format!("'{name}' has moved"))
                    .fix(format!("write '{moved}'")),
            );
            (*moved).clone_into(&mut self.entries[index].name);
            path = Some(found);
        }
        let Some(path) = path else { return Err(self.absent(&name, &origin).into()) };
        let config = read(&path, &path.display().to_string(), &origin)?;
        for child in listed(&config, self.environment)? {
            let name = child.as_text().unwrap_or_default().to_owned();
            if self.entries.iter().any(|entry| entry.name == name) {
                self.warnings.push(
                    Problem::new(
                        Mistake::File,
                        &child.origin,
                        "config_paths",
                        format!("'{name}' is included more than once"),
                    )
                    .fix("give each server of the same file its own name with '_inherit_from: NAME'"),
                );
                continue;
            }
            self.push(name, child.origin);
            let last = self.entries.len() - 1;
            self.entries[index].children.push(last);
        }
        self.entries[index].path = path;
        self.entries[index].config = config;
        Ok(())
    }

    fn absent(&self, name: &str, origin: &Origin) -> Problem {
        let path = Path::new(name);
        let looked = self.roots.candidates(path);
        let unreadable = looked.iter().find_map(|path| Some((path, path.try_exists().err()?)));
        if let Some((path, error)) = unreadable {
            return unread(&path.display().to_string(), &error, origin);
        }
        let list = looked.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ");
        let near = looked.iter().find_map(|candidate| {
            let wanted = candidate.file_name()?.to_str()?.to_owned();
            let mut names: Vec<String> = std::fs::read_dir(candidate.parent()?)
                .ok()?
                .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
                .filter(|name| name.ends_with(".yaml") || name.ends_with(".yml"))
                .collect();
            names.sort();
            let near = crate::config::problem::nearest(&wanted, names.iter().map(String::as_str))?;
            Some(path.with_file_name(near).display().to_string())
        });
        let fix = match near {
            Some(near) => format!("did you mean '{near}'?"),
            None => {
                "check the spelling; relative paths are searched in the search directories, the working directory and the \
                     directories of packages that the Python interpreter has installed"
                    .to_owned()
            }
        };
        Problem::new(Mistake::File, origin, "config_paths", format!("'{name}' was not found; searched {list}")).fix(fix)
    }

    /// Returns the contents of the files, lowest layer first: a file follows all files that it includes, and siblings
    /// keep their order.
    pub(crate) fn layers(&self) -> impl Iterator<Item = &Node> {
        self.order().into_iter().map(|index| &self.entries[index].config)
    }

    fn order(&self) -> Vec<usize> {
        let mut order = Vec::new();
        let mut pending: Vec<(usize, bool)> = (0..self.roots_count).rev().map(|root| (root, false)).collect();
        while let Some((index, visited)) = pending.pop() {
            if visited {
                order.push(index);
                continue;
            }
            pending.push((index, true));
            pending.extend(self.entries[index].children.iter().rev().map(|child| (*child, false)));
        }
        order
    }

    /// Returns the merged `config_paths`: all files as they were named, in the order in which they were found.
    pub(crate) fn config_paths(&self) -> Node {
        let items = self.entries.iter().map(|entry| Node::text(entry.name.clone(), &entry.origin)).collect();
        Node::new(Tree::List(items), Origin::default())
    }

    pub(crate) fn warnings(&mut self) -> Vec<Problem> {
        std::mem::take(&mut self.warnings)
    }

    pub(crate) fn into_paths(self) -> Vec<PathBuf> {
        let order = self.order();
        order.into_iter().map(|index| self.entries[index].path.clone()).collect()
    }
}

fn unread(shown: &str, error: &io::Error, listed_at: &Origin) -> Problem {
    let fix = match error.kind() {
        io::ErrorKind::PermissionDenied => LET_READ,
        _ => "check the path and its permissions",
    };
    Problem::new(Mistake::File, listed_at, "config_paths", format!("cannot read '{shown}': {error}")).fix(fix)
}

fn read(path: &Path, shown: &str, listed_at: &Origin) -> Result<Node, Problem> {
    let wrong = |what: String, fix: &str| Problem::new(Mistake::File, listed_at, "config_paths", what).fix(fix);
    let io_problem = |error: &io::Error| unread(shown, error, listed_at);
    let size = std::fs::metadata(path).map_err(|error| io_problem(&error))?;
    if size.is_dir() {
        return Err(wrong(format!("'{shown}' is a directory"), "name a YAML file in it"));
    }
    if size.len() > FILE_BYTES_MAX {
        return Err(wrong(format!("'{shown}' has more than {FILE_BYTES_MAX} bytes"), "name a configuration file"));
    }
    let bytes = std::fs::read(path).map_err(|error| io_problem(&error))?;
    let text = String::from_utf8(bytes).map_err(|error| {
        let line = error.as_bytes()[..error.utf8_error().valid_up_to()].iter().filter(|b| **b == b'\n').count() + 1;
        let origin = Origin { line: u32::try_from(line).unwrap_or(0), ..Origin::of(shown) };
        Problem::new(Mistake::Syntax, &origin, "", "the file is not valid UTF-8").fix("save it as UTF-8")
    })?;
    parser::parse(&text, shown)
}

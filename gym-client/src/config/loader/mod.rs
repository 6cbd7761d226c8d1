//! Loads files, `env.yaml` and overrides into one [`GymConfig`], in NeMo Gym's order.

mod instances;
mod network;
mod tree;

use std::fmt;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::config::check;
use crate::config::compose::files::{ConfigFiles, SearchRoots};
use crate::config::compose::merge;
use crate::config::compose::{self, agents};
use crate::config::loader::instances::{dangling, failure_problem, instance};
use crate::config::loader::network::{NetworkSettings, shared_ports};
use crate::config::loader::tree::{at, place, set, set_default};
use crate::config::problem::{ConfigError, Mistake, Origin, Problem};
use crate::config::resolve::interpolation::{InterpolationFailure, Resolver};
use crate::config::resolve::overrides::Overrides;
use crate::config::schema::transport;
use crate::config::schema::{GeneratedRelay, GymConfig, MissingServer, PortRequest, RayCluster};
use crate::config::strict;
use crate::config::yaml::node::{Key, Map, Node, Tree};
use crate::config::yaml::parser;
use crate::transport::BUILT_IN;
use gym_core::transport::Transport;

type OwnedLookup = Box<dyn Fn(&str) -> Option<String> + Send>;
type PickPort = Box<dyn FnMut(&PortRequest<'_>) -> Option<u16> + Send>;

/// Loads NeMo Gym's configuration.
///
/// ```no_run
/// use gym_client::config::{ConfigLoader, Overrides};
///
/// let overrides = Overrides::parse(["+policy_model_name=my-model"])?;
/// let config = ConfigLoader::new("/the/working/dir").load(&["env.yaml", "model.yaml"], &overrides)?;
/// for instance in &config.instances {
///     println!("{} is a {}", instance.name, instance.kind);
/// }
/// # Ok::<(), gym_client::config::ConfigError>(())
/// ```
pub struct ConfigLoader {
    roots: SearchRoots,
    environment: OwnedLookup,
    pick_port: Option<PickPort>,
    own_head: bool,
    env_file: bool,
    base: Option<(String, String)>,
    elsewhere: bool,
    initial: Option<Value>,
    defaults: Vec<(String, Value)>,
    absolute_ip: Option<String>,
    transports: Vec<Transport>,
}

impl fmt::Debug for ConfigLoader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConfigLoader").field("roots", &self.roots).finish_non_exhaustive()
    }
}

impl ConfigLoader {
    /// Creates a loader that resolves relative paths from `working_dir` and reads the environment variables of the
    /// process.
    #[must_use]
    pub fn new(working_dir: impl Into<PathBuf>) -> Self {
        Self {
            roots: SearchRoots { searched: Vec::new(), working_dir: working_dir.into(), installed: Vec::new() },
            environment: Box::new(|name| std::env::var(name).ok()),
            pick_port: None,
            own_head: false,
            env_file: true,
            base: None,
            elsewhere: false,
            initial: None,
            defaults: Vec::new(),
            absolute_ip: None,
            transports: BUILT_IN.to_vec(),
        }
    }

    /// Sets directories that are searched before the working directory: `--search-dir` and `NEMO_GYM_EXTRA_ROOTS`.
    #[must_use]
    pub fn search_dirs<P: Into<PathBuf>>(mut self, dirs: impl IntoIterator<Item = P>) -> Self {
        self.roots.searched.extend(dirs.into_iter().map(Into::into));
        self
    }

    /// Sets directories that are searched last: those in which a Python interpreter has `nemo-gym` installed.
    #[must_use]
    pub fn installed_dirs<P: Into<PathBuf>>(mut self, dirs: impl IntoIterator<Item = P>) -> Self {
        self.roots.installed.extend(dirs.into_iter().map(Into::into));
        self
    }

    /// Replaces the environment variables of the process by `lookup`.
    #[must_use]
    pub fn environment(mut self, lookup: impl Fn(&str) -> Option<String> + Send + 'static) -> Self {
        self.environment = Box::new(lookup);
        self
    }

    /// Chooses a port for each instance without one. By default, [`InstanceConfig::port`](crate::config::InstanceConfig::port) of such an instance is
    /// `None`, and the global YAML contains -1, as in `gym env resolve`.
    #[must_use]
    pub fn pick_port(mut self, pick: impl FnMut(&PortRequest<'_>) -> Option<u16> + Send + 'static) -> Self {
        self.pick_port = Some(Box::new(pick));
        self
    }

    /// Chooses a port for the head server too, unless the configuration sets one, instead of NeMo Gym's 11000: for a program whose
    /// servers nobody else looks for. Needs [`ConfigLoader::pick_port`].
    #[must_use]
    pub fn with_own_head(mut self) -> Self {
        self.own_head = true;
        self
    }

    /// Ignores `env.yaml`.
    #[must_use]
    pub fn without_env_file(mut self) -> Self {
        self.env_file = false;
        self
    }

    /// Adds the configuration of another machine, from [`GymConfig::to_shared_yaml`], below all files. `source` is its name in messages.
    #[must_use]
    pub fn base(mut self, yaml: impl Into<String>, source: impl Into<String>) -> Self {
        self.base = Some((yaml.into(), source.into()));
        self
    }

    /// Allows references to servers of other files, and lists them in [`GymConfig::elsewhere`]. By default they are errors.
    #[must_use]
    pub fn with_servers_elsewhere(mut self) -> Self {
        self.elsewhere = true;
        self
    }

    /// Adds a configuration from a program. It overrides files and `env.yaml`, and is overridden by command-line
    /// overrides.
    #[must_use]
    pub fn initial(mut self, value: Value) -> Self {
        self.initial = Some(value);
        self
    }

    /// Sets the default of a top-level key, such as `python_version`.
    #[must_use]
    pub fn default_value(mut self, key: impl Into<String>, value: Value) -> Self {
        self.defaults.push((key.into(), value));
        self
    }

    /// Sets the address of this machine, which is the default host under `use_absolute_ip: true`.
    #[must_use]
    pub fn absolute_ip(mut self, ip: impl Into<String>) -> Self {
        self.absolute_ip = Some(ip.into());
        self
    }

    /// Sets the transports that `transport` and `require_transport` may name: [`Transports::known`](crate::Transports::known) of the
    /// program. By default those that the SDK ships.
    #[must_use]
    pub fn transports(mut self, known: impl IntoIterator<Item = Transport>) -> Self {
        self.transports = known.into_iter().collect();
        self
    }

    /// Reads, merges and checks the configuration.
    ///
    /// # Errors
    /// [`ConfigError::Invalid`] with all mistakes that were found together.
    pub fn load<P: AsRef<str>>(&mut self, paths: &[P], overrides: &Overrides) -> Result<GymConfig, ConfigError> {
        match self.examine(paths, overrides)? {
            (config, problems) if problems.is_empty() => Ok(config),
            (_, problems) => Err(ConfigError::Invalid(problems)),
        }
    }

    /// Reads, merges and checks the configuration as [`ConfigLoader::load`] does. Returns the mistakes of servers beside the configuration
    /// of all other servers, so that a caller can check those too and report everything at once.
    ///
    /// # Errors
    /// [`ConfigError::Invalid`] if a mistake leaves no configuration, such as one in the syntax of a file.
    pub fn examine<P: AsRef<str>>(
        &mut self,
        paths: &[P],
        overrides: &Overrides,
    ) -> Result<(GymConfig, Vec<Problem>), ConfigError> {
        let (mut command_line, late) = overrides.tree()?;
        let initial = match &self.initial {
            Some(value) => Node::from_json(value, &Origin::of("initial configuration")),
            None => Node::map(Vec::new(), &Origin::default()),
        };
        let mut files = ConfigFiles::new(&self.roots, &*self.environment);
        let env_file = if self.env_file { files.env_file()? } else { None };
        let env_file = env_file.unwrap_or_else(|| Node::map(Vec::new(), &Origin::default()));

        let named = self.named_paths(paths, &env_file, &initial, &command_line)?;
        files.read(named)?;
        let mut root = match &self.base {
            Some((yaml, source)) => parser::parse(yaml, source)?,
            None => Node::map(Vec::new(), &Origin::default()),
        };
        for layer in files.layers().chain([&env_file, &initial]) {
            self.lay(&mut root, layer)?;
        }
        let held = hold_back(&mut command_line, &root);
        self.lay(&mut root, &command_line)?;
        let config_paths = files.config_paths();
        let mut warnings = files.warnings();
        let files = files.into_paths();
        set(&mut root, "config_paths", config_paths);
        late.apply(&mut root)?;

        let used = strict::used_names(&root);
        compose::inherit(&mut root, &*self.environment).map_err(ConfigError::Invalid)?;
        agents::standalone_agent(&mut root, held, &*self.environment).map_err(ConfigError::Invalid)?;
        agents::renamed_agents(&mut root);
        let absent = missing(&root);
        let relays = agents::relays(&mut root, &*self.environment).map_err(ConfigError::Invalid)?;
        let ray = self.ray(&root)?;

        let (resolved, _) = Resolver::new(&root, &*self.environment).all();
        let (mut servers, mut problems) = check::servers(&resolved);
        if matches!(resolved.step("error_on_almost_servers").map(|node| &node.value), Some(Tree::Bool(false))) {
            warnings.append(&mut problems);
        }
        problems.extend(agents::unsupported_models(&root, &*self.environment));
        let missing = dangling(&resolved, &servers, &mut problems, &mut warnings);
        let mut elsewhere = Vec::new();
        if self.elsewhere {
            elsewhere = missing;
        } else {
            problems.extend(missing.into_iter().map(|missing| missing.problem(&[])));
        }
        let mut mistakes = strict::check(&resolved, &servers, &used, &files, &mut warnings);
        mistakes.extend(agents::unlisted_agents(&root, &*self.environment));
        // A value that is not set is one mistake, not also a value of the wrong type.
        problems.retain(|problem| absent.iter().all(|unset| unset.key != problem.key));
        problems.splice(0..0, absent);
        servers.retain(|server| !problems.iter().any(|problem| problem.instance.as_deref() == Some(&*server.name)));

        let given = root.clone();
        let also = |error: ConfigError| match error {
            ConfigError::Invalid(more) => ConfigError::Invalid(problems.iter().cloned().chain(more).collect()),
            unsupported @ ConfigError::Unsupported { .. } => unsupported,
        };
        let network = self.network(&mut root, &resolved, &servers).map_err(also)?;
        self.defaults(&mut root, &resolved).map_err(also)?;
        let loaded = LoadedFiles { relays, warnings, files, elsewhere, ray, given, mistakes };
        let (config, more) = self.finish(root, servers, network, loaded).map_err(also)?;
        for problem in more {
            if problems.iter().all(|known| known.key != problem.key) {
                problems.push(problem);
            }
        }
        Ok((config, problems))
    }

    fn lay(&self, root: &mut Node, layer: &Node) -> Result<(), ConfigError> {
        merge::merge(root, layer, &*self.environment).map_err(ConfigError::Invalid)
    }

    /// Returns the files to read: the given paths, then `config_paths` of the highest layer that has the key.
    fn named_paths<P: AsRef<str>>(
        &self,
        paths: &[P],
        env_file: &Node,
        initial: &Node,
        command_line: &Node,
    ) -> Result<Vec<Node>, ConfigError> {
        let origin = Origin::of(crate::config::resolve::overrides::COMMAND_LINE);
        let mut named: Vec<Node> = paths.iter().map(|path| Node::text(path.as_ref(), &origin)).collect();
        let listed = if command_line.step("config_paths").is_some() || !named.is_empty() {
            command_line.clone()
        } else {
            let mut early = env_file.clone();
            self.lay(&mut early, initial)?;
            early
        };
        named.extend(crate::config::compose::files::listed(&listed, &*self.environment)?);
        Ok(named)
    }

    /// Returns the Ray cluster. Nothing of it is contacted.
    fn ray(&self, root: &Node) -> Result<Option<RayCluster>, ConfigError> {
        let text = |key: &str| {
            let Some(node) = root.step(key) else { return Ok(None) };
            let resolved = Resolver::new(root, &*self.environment).value_at(&[key]);
            match resolved.as_ref().map(|resolved| (&resolved.value, resolved.as_text())) {
                None | Some((Tree::Null, _)) => Ok(None),
                Some((_, Some(text))) if !text.trim().is_empty() => Ok(Some((text.to_owned(), node.origin.clone()))),
                Some(_) => {
                    Err(place(root, key, "expected an address").fix("write ray://HOST:10001, or remove the key"))
                }
            }
        };
        let dashboard = text("ray_dashboard_address")?.map(|(dashboard, _)| dashboard);
        Ok(text("ray_head_node_address")?.map(|(address, origin)| RayCluster { address, origin, dashboard }))
    }

    /// Sets the other keys that NeMo Gym's servers require.
    fn defaults(&self, root: &mut Node, resolved: &Node) -> Result<(), ConfigError> {
        for (key, value) in &self.defaults {
            set_default(root, key, Node::from_json(value, &Origin::default()).value);
        }
        for key in ["allow_openai_version_skew", "skip_venv_if_present", "dry_run"] {
            set_default(root, key, Tree::Bool(false));
        }
        for key in ["server_spinup_timeout_seconds", "model_endpoint_readiness_timeout_seconds"] {
            set_default(root, key, Tree::Int(600));
        }
        let working_dir =
            std::path::absolute(&self.roots.working_dir).unwrap_or_else(|_| self.roots.working_dir.clone());
        for (key, folder) in [("results_dir", "results"), ("cache_dir", "cache")] {
            let path = match resolved.step(key) {
                None => working_dir.join(folder),
                Some(node) => match node.as_text().filter(|text| !text.is_empty()) {
                    Some(text) => working_dir.join(self.home(text)),
                    None => {
                        return Err(place(resolved, key, "expected a path")
                            .fix("write the name of a directory")
                            .into());
                    }
                },
            };
            let origin = root.step(key).map(|node| node.origin.clone()).unwrap_or_default();
            set(root, key, Node::text(settled(&path).to_string_lossy(), &origin));
        }
        let cache = root.step("cache_dir").and_then(Node::as_text).map(PathBuf::from).unwrap_or_default();
        set_default(root, "uv_cache_dir", Tree::Text(cache.join("uv").to_string_lossy().into_owned()));
        let exported = (self.environment)("UV_LOCK_TIMEOUT").and_then(|text| text.trim().parse::<u64>().ok());
        set_default(root, "uv_lock_timeout_seconds", Tree::Int(i128::from(exported.unwrap_or(1_800))));
        set_default(root, "uv_venv_dir", Tree::Text(working_dir.to_string_lossy().into_owned()));
        Ok(())
    }

    fn home(&self, path: &str) -> PathBuf {
        match path.strip_prefix("~/").and_then(|rest| Some(PathBuf::from((self.environment)("HOME")?).join(rest))) {
            Some(path) => path,
            None => PathBuf::from(path),
        }
    }

    fn finish(
        &self,
        root: Node,
        mut servers: Vec<check::FoundServer>,
        network: NetworkSettings,
        loaded: LoadedFiles,
    ) -> Result<(GymConfig, Vec<Problem>), ConfigError> {
        let (resolved, failures) = Resolver::new(&root, &*self.environment).all();
        let mut problems = Vec::new();
        let mut later: Vec<(InterpolationFailure, Problem)> = Vec::new();
        for failure in failures {
            let problem = failure_problem(&failure, &servers);
            // NeMo Gym checks the top level and the first level of each server. It resolves deeper values when a server
            // reads them.
            let first = servers.iter().any(|server| failure.path.len() == 4 && server.holds(&failure.path));
            if failure.path.len() == 1 || first {
                problems.push(problem);
            } else {
                later.push((failure, problem));
            }
        }
        servers.retain(|server| !problems.iter().any(|problem| problem.instance.as_deref() == Some(&*server.name)));
        let mut instances = Vec::new();
        for server in &servers {
            let unresolved =
                later.iter().filter(|(failure, _)| server.holds(&failure.path)).map(|(_, p)| p.clone()).collect();
            let mut instance = instance(server, &resolved, unresolved)?;
            instance.port_chosen = at(&loaded.given, &server.path("port"))
                .is_none_or(|node| matches!(node.value, Tree::Null | Tree::Int(0)));
            instances.push(instance);
        }
        let transport_policy = transport::transport_policy(&resolved, &self.transports)?;
        let mut warnings = loaded.warnings;
        warnings.extend(later.into_iter().map(|(_, problem)| problem));
        shared_ports(&instances, &network.head, &mut warnings);
        let top = resolved.as_map().map(|map| map.0.as_slice()).unwrap_or_default();
        let variables = top
            .iter()
            .map(|(key, node)| (key.to_string(), node))
            .filter(|(key, _)| !check::is_reserved(key) && !servers.iter().any(|server| server.name == *key))
            .map(|(key, node)| (key, node.to_json()))
            .collect();
        let config = GymConfig {
            instances,
            head: network.head,
            transport_policy,
            default_host: network.default_host,
            ports: network.ports,
            disallowed_ports: network.disallowed,
            variables,
            merged: resolved.to_json(),
            relays: loaded.relays.into_iter().map(|(agent, name)| GeneratedRelay { agent, name }).collect(),
            files: loaded.files,
            warnings,
            mistakes: loaded.mistakes,
            elsewhere: loaded.elsewhere,
            ray: loaded.ray,
            given: loaded.given,
            raw: root,
        };
        Ok((config, problems))
    }
}

struct LoadedFiles {
    relays: Vec<(String, String)>,
    warnings: Vec<Problem>,
    mistakes: Vec<Problem>,
    files: Vec<PathBuf>,
    elsewhere: Vec<MissingServer>,
    ray: Option<RayCluster>,
    given: Node,
}

/// Returns an absolute path without `.`, `..` and, where the path exists, symbolic links.
fn settled(path: &Path) -> PathBuf {
    if let Ok(path) = std::fs::canonicalize(path) {
        return path;
    }
    let mut out = PathBuf::new();
    for part in path.components() {
        match part {
            std::path::Component::ParentDir => {
                out.pop();
            }
            std::path::Component::CurDir => {}
            part => out.push(part),
        }
    }
    out
}

/// Removes overrides of agents that composition will create from the command line and returns them.
fn hold_back(command_line: &mut Node, root: &Node) -> Map {
    let names = agents::composed_names(root);
    let mut held = Map::default();
    if let Some(map) = command_line.as_map_mut() {
        for name in names {
            if let Some(node) = map.remove(&name) {
                held.set(Key::Text(name), node);
            }
        }
    }
    held
}

/// Returns the values that are still `???`.
fn missing(root: &Node) -> Vec<Problem> {
    let mut missing = Vec::new();
    check::missing(root, "", &mut missing);
    let problem = |(path, origin): (String, Origin)| {
        let instance = path.split('.').next().filter(|name| path.contains('.') && root.step(name).is_some());
        let problem = Problem::new(Mistake::Missing, &origin, path.clone(), "the value is required but not set (???)")
            .fix(format!("set it on the command line (++{path}=<value>), in env.yaml or in a file"));
        match instance {
            Some(name) => problem.instance(name),
            None => problem,
        }
    };
    missing.into_iter().map(problem).collect()
}

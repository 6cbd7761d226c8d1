//! Loads the configuration of a command.

use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};

use gym_client::config::{
    ConfigError, ConfigLoader, GymConfig, InstanceConfig, Mistake, Overrides, PortRequest, Problem, ServerKind,
    free_port,
};
use serde_json::Value;

use crate::cli::args::options::Sources;
use crate::cli::exit::Failure;
use crate::cli::setup::interpreter::Interpreter;
use crate::stack::{self, HEAD_NAME, RunsAs, Servers};

/// A configuration and the locations of its Python servers.
#[derive(Debug)]
pub(in crate::cli) struct LoadedConfig {
    pub(in crate::cli) config: GymConfig,
    /// The interpreter, if a server needs it.
    pub(in crate::cli) python: Option<Interpreter>,
    /// Directories that are searched for Python servers and relative paths; the first match is used.
    pub(in crate::cli) roots: Vec<PathBuf>,
    /// The directories from `--search-dir` and `NEMO_GYM_EXTRA_ROOTS`, which are among `roots`.
    pub(in crate::cli) searched: Vec<PathBuf>,
    /// Mistakes of servers that `config` does not contain, for [`Need::Locations`] alone, and what this build lacks. A command that starts servers is refused
    /// with them.
    pub(in crate::cli) problems: Vec<String>,
    /// Errors of options for the model that no server reads; also among `problems`.
    pub(in crate::cli) idle: Vec<String>,
}

/// The parts of the configuration that a command needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cli) enum Need<'a> {
    Values,
    /// The location in which each server would run.
    Locations,
    /// Running servers: the named ones, or all if none is named. Each gets a port.
    Servers(&'a [String]),
    /// All servers, running as those of a worker: the first resources server and the first model server get the documented ports.
    Worker,
    /// All servers, running for this command alone. Each gets a port, and so does the head server, because another head server may
    /// have the default one.
    OwnServers,
}

impl Need<'_> {
    /// Returns `true` if the process has a head server elsewhere, which knows the servers of other files.
    fn others_serve(self) -> bool {
        match self {
            Self::Worker => true,
            Self::Servers(only) => !only.is_empty() && only.iter().all(|name| name != HEAD_NAME),
            Self::Values | Self::Locations | Self::OwnServers => false,
        }
    }
}

/// The documented ports of a worker: 8080 for its first resources server, 8000 for its first model server.
#[derive(Debug, Default)]
struct MemberPorts {
    resources: bool,
    model: bool,
}

impl MemberPorts {
    /// The ports that are tried above the documented one.
    const TRIED: u16 = 100;

    fn pick(&mut self, wish: &PortRequest<'_>) -> Option<u16> {
        let (from, picked) = match wish.kind? {
            ServerKind::Resources => (8_080, &mut self.resources),
            ServerKind::Model => (8_000, &mut self.model),
            ServerKind::Agent | ServerKind::Environment => return None,
        };
        if std::mem::replace(picked, true) {
            return None;
        }
        let free =
            |port: &u16| !wish.disallowed.contains(port) && TcpListener::bind((Ipv4Addr::UNSPECIFIED, *port)).is_ok();
        let port = (from..from + Self::TRIED).find(free)?;
        if port != from {
            tracing::warn!(server = wish.instance, port, "port {from} is in use; {} listens on {port}", wish.instance);
        }
        Some(port)
    }
}

/// A configuration of another machine.
pub(in crate::cli) struct SharedText {
    pub(in crate::cli) yaml: String,
    /// Its name in messages.
    pub(in crate::cli) source: String,
}

/// Loads the files and overrides of `sources` and `overrides`.
pub(in crate::cli) async fn load(
    sources: &Sources,
    overrides: &[String],
    servers: &Servers,
    need: Need<'_>,
) -> Result<LoadedConfig, Failure> {
    load_over(sources, overrides, servers, need, None).await
}

/// Loads the files and overrides over the configuration of another machine.
pub(in crate::cli) async fn load_over(
    sources: &Sources,
    overrides: &[String],
    servers: &Servers,
    need: Need<'_>,
    base: Option<&SharedText>,
) -> Result<LoadedConfig, Failure> {
    let overrides = Overrides::parse(overrides.iter().cloned().chain(shorthands(sources)))?;
    let working_dir = std::env::current_dir()
        .map_err(|error| Failure::Usage(format!("cannot determine the working directory: {error}")))?;
    if let Some(absent) = sources.search_dir.iter().find(|folder| !folder.is_dir()) {
        let text = format!(
            "--search-dir {}: there is no such directory\n  fix: correct the path, or leave out the option",
            absent.display()
        );
        return Err(Failure::Usage(text));
    }
    let searched = search_dirs(sources);
    let read = |python: Option<&Interpreter>| {
        let mut loader =
            ConfigLoader::new(&working_dir).search_dirs(&searched).transports(servers.transports().known());
        if let Some(python) = python {
            let version = Value::from(python.version.as_str());
            loader = loader.installed_dirs(&python.roots).default_value("python_version", version);
        }
        if let Some(base) = base {
            loader = loader.base(&base.yaml, &base.source);
        }
        if need.others_serve() || need == Need::Locations {
            loader = loader.with_servers_elsewhere();
        }
        if let Need::OwnServers = need {
            loader = loader.with_own_head();
        }
        if let Need::Servers(_) | Need::OwnServers | Need::Worker = need {
            let mut random = fastrand::Rng::new();
            let mut documented = (need == Need::Worker).then(MemberPorts::default);
            loader = loader.pick_port(move |wish| {
                documented.as_mut().and_then(|ports| ports.pick(wish)).or_else(|| free_port(wish, &mut random))
            });
        }
        match loader.examine(&sources.files, &overrides)? {
            (_, problems) if need != Need::Locations && !problems.is_empty() => Err(ConfigError::Invalid(problems)),
            examined => Ok(examined),
        }
    };
    let first = read(None);
    let mut python = None;
    let mut no_python = Vec::new();
    let (config, problems) = match first {
        // The missing file may be part of an installed nemo-gym.
        Err(ConfigError::Invalid(problems)) if problems.iter().any(|p| p.mistake == Mistake::File) => {
            let error = ConfigError::Invalid(problems);
            match Interpreter::find(sources.python.as_deref()).await {
                Ok(found) => python.insert(found),
                Err(why) if sources.python.is_some() => return Err(Failure::Usage(why)),
                Err(why) => {
                    return Err(Failure::Usage(format!("{error}\n  NeMo Gym's own files were not searched: {why}")));
                }
            };
            read(python.as_ref())?
        }
        first => {
            let (config, problems) = first?;
            let wanted = |instance: &&InstanceConfig| match need {
                Need::Values => false,
                Need::Locations | Need::OwnServers | Need::Worker => true,
                Need::Servers(only) => only.is_empty() || only.contains(&instance.name),
            };
            let foreign: Vec<&InstanceConfig> = config
                .instances
                .iter()
                .filter(wanted)
                .filter(|instance| {
                    instance.entrypoint.is_some() && !servers.has(instance.kind, &instance.implementation)
                })
                .collect();
            if foreign.is_empty() {
                (config, problems)
            } else {
                match Interpreter::find(sources.python.as_deref()).await {
                    Ok(found) => read(Some(python.insert(found)))?,
                    Err(why) => {
                        no_python = foreign.iter().map(|foreign| needs_python(foreign, servers, &why)).collect();
                        if need != Need::Locations {
                            return Err(Failure::Usage(no_python.join("\n")));
                        }
                        (config, problems)
                    }
                }
            }
        }
    };
    let mut config = config;
    let idle = idle_options(sources, &mut config);
    let problems = problems
        .iter()
        .map(ToString::to_string)
        .chain(idle.iter().cloned())
        .chain(no_python)
        .chain(beyond_this_build(&config))
        .collect();
    let installed = python.iter().flat_map(|python| python.roots.iter().cloned());
    let roots = searched.iter().cloned().chain([working_dir.clone()]).chain(installed).collect();
    let loaded = LoadedConfig { config, python, roots, searched, problems, idle };
    let starts: Option<&[String]> = match need {
        Need::Servers(only) => Some(only),
        Need::OwnServers | Need::Worker => Some(&[]),
        Need::Values | Need::Locations => None,
    };
    if let Some(only) = starts {
        let wanted = |instance: &InstanceConfig| only.is_empty() || only.contains(&instance.name);
        // All servers that cannot start are reported together, before any server starts.
        let (_, mut problems) = locations(&loaded, servers, wanted);
        problems.extend(unfit(&loaded.config, servers, wanted));
        problems.extend(loaded.problems.iter().cloned());
        if !problems.is_empty() {
            return Err(Failure::Usage(problems.join("\n")));
        }
    }
    Ok(loaded)
}

/// Returns what the configuration asks for and this build does not have. A transport and https are refused by those who would use them.
fn beyond_this_build(config: &GymConfig) -> Option<String> {
    let ray = config.ray.as_ref().filter(|_| cfg!(not(feature = "ray")))?;
    let what = "ray_head_node_address: this program was built without Ray";
    Some(format!(
        "{}: {what}\n  fix: build it with the feature `ray` of gym-server (`full` has it), or remove the key",
        ray.origin
    ))
}

/// Returns the references of native servers to servers that they cannot call.
fn unfit(config: &GymConfig, servers: &Servers, wanted: impl Fn(&InstanceConfig) -> bool) -> Vec<String> {
    let native = |instance: &&InstanceConfig| wanted(instance) && servers.has(instance.kind, &instance.implementation);
    let of_native = |problem: &&Problem| {
        let instance = problem.instance.as_deref().and_then(|name| config.instance(name));
        problem.mistake == Mistake::Reference && instance.as_ref().is_some_and(native)
    };
    let wrong_kinds = config.mistakes.iter().filter(of_native).map(ToString::to_string);
    let instances = config.instances.iter().filter(|instance| wanted(instance));
    wrong_kinds.chain(instances.filter_map(|instance| stack::mismatched(instance, config, servers))).collect()
}

/// Returns the way in which each wanted instance runs on this machine, and the problems of those that cannot. Instances that need an
/// interpreter are left out if there is none: that is reported already.
pub(in crate::cli) fn locations<'a>(
    loaded: &'a LoadedConfig,
    servers: &Servers,
    wanted: impl Fn(&InstanceConfig) -> bool,
) -> (Vec<(&'a InstanceConfig, RunsAs)>, Vec<String>) {
    let mut found = Vec::new();
    let mut problems = Vec::new();
    let reported = |instance: &&InstanceConfig| {
        loaded.python.is_none()
            && instance.entrypoint.is_some()
            && !servers.has(instance.kind, &instance.implementation)
    };
    let instances = loaded.config.instances.iter().filter(|instance| wanted(instance));
    for instance in instances.filter(|instance| !reported(instance)) {
        match stack::runs_as(instance, servers, &loaded.roots) {
            Ok(runs_as) => found.push((instance, runs_as)),
            Err(error) if instance.entrypoint.is_some() => {
                let note = format!("{error}\n  note: {}", not_native(instance, servers));
                problems.push(with_near(instance, servers, &note));
            }
            Err(error) => problems.push(error.to_string()),
        }
    }
    (found, problems)
}

/// Returns the error of an instance that this program does not contain and that no interpreter can run.
fn needs_python(instance: &InstanceConfig, servers: &Servers, why: &str) -> String {
    let InstanceConfig { name, kind, implementation, origin, .. } = instance;
    let not_native = not_native(instance, servers);
    with_near(
        instance,
        servers,
        &format!("{origin}: {name}.{kind}.{implementation}: {not_native}, so it needs Python: {why}"),
    )
}

/// Explains that this program does not contain the implementation.
fn not_native(instance: &InstanceConfig, servers: &Servers) -> String {
    let wanted = instance.implementation.as_str();
    let known: Vec<&str> = servers.names(instance.kind).collect();
    let hint = match servers.nearest(instance.kind, wanted) {
        None if !known.is_empty() => format!(" (it has {})", known.join(", ")),
        _ => String::new(),
    };
    format!("`{wanted}` is not one of this program's {}{hint}", instance.kind)
}

/// Puts the name of a similar implementation, or the program that may have it, before the other fix.
fn with_near(instance: &InstanceConfig, servers: &Servers, error: &str) -> String {
    let first = match servers.nearest(instance.kind, &instance.implementation) {
        Some(near) => format!("did you mean `{near}`? Otherwise "),
        None => format!(
            "if `{}` is in a program of your own, use the `config check`, `run` and `collect` of that program; otherwise ",
            instance.implementation
        ),
    };
    error.replacen("  fix: ", &format!("  fix: {first}"), 1)
}

/// Returns the directories of `--search-dir`, then those of `NEMO_GYM_EXTRA_ROOTS`, as absolute paths, because Python
/// servers run in other working directories.
fn search_dirs(sources: &Sources) -> Vec<PathBuf> {
    let more = std::env::var_os("NEMO_GYM_EXTRA_ROOTS").unwrap_or_default();
    let more = std::env::split_paths(&more).filter(|folder| !folder.as_os_str().is_empty());
    let all = sources.search_dir.iter().cloned().chain(more);
    all.map(|folder| std::path::absolute(&folder).unwrap_or(folder)).collect()
}

/// An option of the command line for the model, and the variable that it sets.
struct ModelOption<'a> {
    option: &'static str,
    variable: &'static str,
    /// The keys of model servers that usually have the value of the variable.
    keys: [&'static str; 2],
    value: Option<&'a str>,
}

fn model_options(sources: &Sources) -> [ModelOption<'_>; 3] {
    let option = |option, variable, keys, value| ModelOption { option, variable, keys, value };
    [
        option("--model", "policy_model_name", ["openai_model", "model"], sources.model.as_deref()),
        option("--model-url", "policy_base_url", ["openai_base_url", "base_url"], sources.model_url.as_deref()),
        option("--model-api-key", "policy_api_key", ["openai_api_key", "api_key"], sources.model_api_key.as_deref()),
    ]
}

/// Returns the overrides that `--model` and similar options stand for.
fn shorthands(sources: &Sources) -> impl Iterator<Item = String> {
    let set = |option: ModelOption<'_>| Some(format!("+{}={}", option.variable, Value::from(option.value?)));
    model_options(sources).into_iter().filter_map(set).chain(transport(sources))
}

/// Returns the errors of options for the model that no server reads. The loader's warnings about their variables are removed.
fn idle_options(sources: &Sources, config: &mut GymConfig) -> Vec<String> {
    let mut idle = Vec::new();
    for ModelOption { option, variable, keys, .. } in
        model_options(sources).into_iter().filter(|one| one.value.is_some())
    {
        let known = config.warnings.len();
        config
            .warnings
            .retain(|warning| warning.mistake != Mistake::Override || warning.key.as_deref() != Some(variable));
        if config.warnings.len() == known {
            continue;
        }
        let models = || config.instances.iter().filter(|instance| instance.kind == ServerKind::Model);
        let fixed = models().find_map(|model| Some((model, *keys.iter().find(|key| model.has_key(key))?)));
        let fix = match (fixed, models().next()) {
            _ if config.files.is_empty() => {
                "add --config FILE of servers that this command starts; running servers keep their model".to_owned()
            }
            (Some((model, key)), _) => {
                let InstanceConfig { name, kind, implementation, .. } = model;
                let place = model.origin_of(key);
                format!(
                    "{place} sets {key}: write {key}: ${{{variable}}} there, or in the place of {option}, override it with \
                     ++{name}.{kind}.{implementation}.{key}=VALUE"
                )
            }
            (None, Some(model)) => {
                format!("remove the option; {} is a {}, which has no such setting", model.name, model.implementation)
            }
            (None, None) => format!("write ${{{variable}}} in the block of the model server"),
        };
        idle.push(format!("{option} has no effect: no file uses ${{{variable}}}\n  fix: {fix}"));
    }
    idle
}

/// Returns the overrides for transports. They replace the values of the files, because runs are often repeated with
/// another transport.
fn transport(sources: &Sources) -> impl Iterator<Item = String> {
    let allowed = sources.transport.as_ref().map(|policy| Value::from_iter(policy.names()));
    let require = sources.require_transport.clone().map(Value::from);
    [("transport", allowed), ("require_transport", require)]
        .into_iter()
        .filter_map(|(key, value)| Some(format!("++{key}={}", value?)))
}

/// Returns the error for a command without servers: no file is given, or the files define none.
pub(in crate::cli) fn nothing_named(what: &str, files: &[PathBuf]) -> Failure {
    let files: Vec<String> = files.iter().map(|file| file.display().to_string()).collect();
    Failure::Usage(if files.is_empty() {
        format!(
            "there is nothing to {what}: no configuration is given\n  fix: add --config FILE or +config_paths=[A.yaml,B.yaml]"
        )
    } else {
        format!(
            "there is nothing to {what}: no server in {}\n  fix: a server is a block `name: {{kind: {{implementation: \
             {{entrypoint: app.py, …}}}}}}`; without `entrypoint`, a block is only a variable",
            files.join(", ")
        )
    })
}

/// Resolves a relative path of the configuration: relative to the working directory, otherwise in the first root that contains it.
pub(in crate::cli) fn find_file(path: &Path, roots: &[PathBuf]) -> PathBuf {
    let found = roots.iter().map(|root| root.join(path)).find(|candidate| candidate.exists());
    if path.exists() { path.to_owned() } else { found.unwrap_or_else(|| path.to_owned()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_models_options_are_overrides_whatever_their_text() {
        let sources = Sources {
            model: Some("org/model:7b".to_owned()),
            model_api_key: Some("a\"b, c".to_owned()),
            ..Sources::default()
        };
        let shorthands: Vec<String> = shorthands(&sources).collect();
        assert_eq!(shorthands, [r#"+policy_model_name="org/model:7b""#, r#"+policy_api_key="a\"b, c""#]);
        let folder = tempfile::tempdir().unwrap();
        let overrides = Overrides::parse(shorthands).unwrap();
        let config = ConfigLoader::new(folder.path()).load(&[] as &[&str], &overrides).unwrap();
        assert_eq!(config.variables["policy_model_name"], "org/model:7b");
        assert_eq!(config.variables["policy_api_key"], "a\"b, c");
    }

    #[test]
    fn the_transports_options_win_over_the_files() {
        let sources = Sources {
            transport: Some("http,shm".parse().unwrap()),
            require_transport: Some("shm".to_owned()),
            ..Sources::default()
        };
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("a.yaml"), "transport: http\n").unwrap();
        let overrides = Overrides::parse(shorthands(&sources)).unwrap();
        let config = ConfigLoader::new(folder.path()).load(&["a.yaml"], &overrides).unwrap();
        assert_eq!(config.transport_policy.unwrap().to_string(), "shm, http, at least shm");
    }

    #[test]
    #[cfg(not(feature = "ray"))]
    fn a_key_of_ray_is_refused_by_a_build_without_it() {
        let overrides = Overrides::parse(["+ray_head_node_address=ray://h:10001".to_owned()]).unwrap();
        let loaded = ConfigLoader::new(Path::new(".")).load(&[] as &[&str], &overrides);
        let text = beyond_this_build(&loaded.unwrap()).unwrap();
        assert!(text.contains("ray_head_node_address: this program was built without Ray"), "{text}");
        assert!(text.contains("the feature `ray` of gym-server"), "{text}");
    }

    #[test]
    fn files_without_a_server_are_named() {
        let files = [PathBuf::from("a.yaml"), PathBuf::from("b.yaml")];
        let Failure::Usage(text) = nothing_named("run", &files) else { panic!("the user's mistake") };
        assert!(text.contains("nothing to run: no server in a.yaml, b.yaml") && text.contains("entrypoint"), "{text}");
        let Failure::Usage(text) = nothing_named("run", &[]) else { panic!("the user's mistake") };
        assert!(text.contains("--config FILE"), "{text}");
    }

    #[test]
    fn a_file_is_looked_for_here_first_and_then_in_the_roots() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("prompt-of-this-test.yaml"), "user: x").unwrap();
        let named = Path::new("prompt-of-this-test.yaml");
        assert_eq!(find_file(named, &[folder.path().to_owned()]), folder.path().join(named));
        assert_eq!(find_file(named, &[]), named);
    }
}

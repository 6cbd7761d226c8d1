//! Loads the configuration that a command names.

use std::path::{Path, PathBuf};

use gym_client::config::{ConfigError, ConfigLoader, GymConfig, InstanceConfig, Mistake, Overrides, free_port};
use serde_json::Value;

use crate::cli::args::options::Sources;
use crate::cli::exit::Failure;
use crate::cli::setup::interpreter::Interpreter;
use crate::stack::{self, RunsAs, Servers};

/// A configuration, and where its Python servers are found.
#[derive(Debug)]
pub(in crate::cli) struct LoadedConfig {
    pub(in crate::cli) config: GymConfig,
    /// The interpreter, if something needs it.
    pub(in crate::cli) python: Option<Interpreter>,
    /// Folders in which Python servers and relative paths are looked for, first match wins.
    pub(in crate::cli) roots: Vec<PathBuf>,
    /// Those of them that `--search-dir` and `NEMO_GYM_EXTRA_ROOTS` name.
    pub(in crate::cli) searched: Vec<PathBuf>,
}

/// What a command needs of the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cli) enum Need<'a> {
    /// Its values.
    Values,
    /// Where each server would run.
    Locations,
    /// Servers that run: these, or all when none is named. Each gets a port.
    Servers(&'a [String]),
}

/// Reads the files that `sources` and `overrides` name.
pub(in crate::cli) async fn load(
    sources: &Sources,
    overrides: &[String],
    servers: &Servers,
    need: Need<'_>,
) -> Result<LoadedConfig, Failure> {
    let overrides = Overrides::parse(overrides.iter().cloned().chain(shorthands(sources)))?;
    let working_dir = std::env::current_dir()
        .map_err(|error| Failure::Usage(format!("the working folder cannot be found: {error}")))?;
    let searched = search_dirs(sources);
    let read = |python: Option<&Interpreter>| {
        let mut loader = ConfigLoader::new(&working_dir).search_dirs(&searched);
        if let Some(python) = python {
            let version = Value::from(python.version.as_str());
            loader = loader.installed_dirs(&python.roots).default_value("python_version", version);
        }
        if let Need::Servers(_) = need {
            let mut random = fastrand::Rng::new();
            loader = loader.pick_port(move |wish| free_port(wish, &mut random));
        }
        loader.load(&sources.files, &overrides)
    };
    let first = read(None);
    let mut python = None;
    let config = match first {
        // Perhaps it is one of the files that come with nemo-gym.
        Err(ConfigError::Invalid(problems)) if problems.iter().any(|p| p.mistake == Mistake::File) => {
            let error = ConfigError::Invalid(problems);
            match Interpreter::find(sources.python.as_deref()).await {
                Ok(found) => python.insert(found),
                Err(why) if sources.python.is_some() => return Err(Failure::Usage(why)),
                Err(why) => return Err(Failure::Usage(format!("{error}\n  nor among NeMo Gym's own files: {why}"))),
            };
            read(python.as_ref())?
        }
        first => {
            let config = first?;
            let wanted = |instance: &&InstanceConfig| match need {
                Need::Values => false,
                Need::Locations => true,
                Need::Servers(only) => only.is_empty() || only.contains(&instance.name),
            };
            let foreign = config.instances.iter().filter(wanted).find(|instance| {
                instance.entrypoint.is_some() && !servers.has(instance.kind, &instance.implementation)
            });
            match foreign {
                None => config,
                Some(foreign) => {
                    let found = Interpreter::find(sources.python.as_deref()).await.map_err(|why| {
                        Failure::Usage(format!(
                            "{}: {}.{}.{}: {}, so it needs Python: {why}",
                            foreign.origin,
                            foreign.name,
                            foreign.kind,
                            foreign.implementation,
                            not_native(foreign, servers),
                        ))
                    })?;
                    read(Some(python.insert(found)))?
                }
            }
        }
    };
    let installed = python.iter().flat_map(|python| python.roots.iter().cloned());
    let roots = searched.iter().cloned().chain([working_dir.clone()]).chain(installed).collect();
    let loaded = LoadedConfig { config, python, roots, searched };
    if let Need::Servers(only) = need {
        let wanted = |instance: &InstanceConfig| only.is_empty() || only.contains(&instance.name);
        // All that cannot start is said at once, and before anything has started.
        locations(&loaded, servers, wanted)?;
    }
    Ok(loaded)
}

/// How each wanted instance runs here.
pub(in crate::cli) fn locations<'a>(
    loaded: &'a LoadedConfig,
    servers: &Servers,
    wanted: impl Fn(&InstanceConfig) -> bool,
) -> Result<Vec<(&'a InstanceConfig, RunsAs)>, Failure> {
    let mut found = Vec::new();
    let mut problems = Vec::new();
    for instance in loaded.config.instances.iter().filter(|instance| wanted(instance)) {
        match stack::runs_as(instance, servers, &loaded.roots) {
            Ok(runs_as) => found.push((instance, runs_as)),
            Err(error) if instance.entrypoint.is_some() => {
                problems.push(format!("{error}\n  note: {}", not_native(instance, servers)));
            }
            Err(error) => problems.push(error.to_string()),
        }
    }
    if problems.is_empty() { Ok(found) } else { Err(Failure::Usage(problems.join("\n"))) }
}

/// Says that an implementation is not this program's, and what may have been meant.
fn not_native(instance: &InstanceConfig, servers: &Servers) -> String {
    let wanted = instance.implementation.as_str();
    let score = |name: &str| strsim::normalized_damerau_levenshtein(wanted, name);
    let known: Vec<&str> = servers.names(instance.kind).collect();
    let nearest = known.iter().max_by(|a, b| score(a).total_cmp(&score(b))).filter(|name| score(name) >= 0.6);
    let hint = match nearest {
        Some(name) => format!("; did you mean `{name}`?"),
        None if known.is_empty() => String::new(),
        None => format!(" (it has {})", known.join(", ")),
    };
    format!("`{wanted}` is not among this program's own {}{hint}", instance.kind)
}

/// `--search-dir` first, then `NEMO_GYM_EXTRA_ROOTS`, as absolute paths: Python servers run in folders of their own.
fn search_dirs(sources: &Sources) -> Vec<PathBuf> {
    let more = std::env::var_os("NEMO_GYM_EXTRA_ROOTS").unwrap_or_default();
    let more = std::env::split_paths(&more).filter(|folder| !folder.as_os_str().is_empty());
    let all = sources.search_dir.iter().cloned().chain(more);
    all.map(|folder| std::path::absolute(&folder).unwrap_or(folder)).collect()
}

/// `--model` and its siblings as the overrides that they stand for.
fn shorthands(sources: &Sources) -> impl Iterator<Item = String> {
    [
        ("policy_model_name", &sources.model),
        ("policy_base_url", &sources.model_url),
        ("policy_api_key", &sources.model_api_key),
    ]
    .into_iter()
    .filter_map(|(key, value)| Some(format!("+{key}={}", Value::from(value.as_deref()?))))
    .chain(transport(sources))
}

/// Over what the files say, because a run is often tried with another transport.
fn transport(sources: &Sources) -> impl Iterator<Item = String> {
    let allowed = sources
        .transport
        .as_ref()
        .map(|policy| Value::from_iter(policy.named_transports().iter().map(|transport| transport.as_str())));
    let require = sources.require_transport.map(|transport| Value::from(transport.as_str()));
    [("transport", allowed), ("require_transport", require)]
        .into_iter()
        .filter_map(|(key, value)| Some(format!("++{key}={}", value?)))
}

/// No server is configured: because no file is named, or because the files define none.
pub(in crate::cli) fn nothing_named(what: &str, files: &[PathBuf]) -> Failure {
    let files: Vec<String> = files.iter().map(|file| file.display().to_string()).collect();
    Failure::Usage(if files.is_empty() {
        format!(
            "there is nothing to {what}: no configuration is named\n  fix: add --config FILE or +config_paths=[A.yaml,B.yaml]"
        )
    } else {
        format!(
            "there is nothing to {what}: no server in {}\n  fix: a server is a block `name: {{kind: {{implementation: \
             {{entrypoint: app.py, …}}}}}}`; without `entrypoint` it is a variable like any other",
            files.join(", ")
        )
    })
}

/// A relative path of the configuration: as it is from here, else from the first root that has it.
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
            require_transport: Some(gym_core::transport::Transport::SHM),
            ..Sources::default()
        };
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("a.yaml"), "transport: http\n").unwrap();
        let overrides = Overrides::parse(shorthands(&sources)).unwrap();
        let config = ConfigLoader::new(folder.path()).load(&["a.yaml"], &overrides).unwrap();
        assert_eq!(config.transport_policy.unwrap().to_string(), "shm, http, at least shm");
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

//! `rgym config check`, `rgym config show`, `rgym config roce` and `rgym config schema`.

use std::collections::BTreeSet;
use std::process::ExitCode;
use std::time::Duration;

use gym_client::collect::ServerNames;
use gym_client::config::{GymConfig, MissingServer};
use gym_core::{CallContext, Endpoint, World};

use crate::cli::args::options::{CheckArgs, ConfigCommand, ShowArgs, ShowFormat, Sources};
use crate::cli::console::{self, Console};
use crate::cli::exit::{Failure, Outcome};
use crate::cli::setup::cluster::head_registry;
use crate::cli::setup::configuration::{LoadedConfig, Need, load, locations, nothing_named};
use crate::cli::setup::head_server;
use crate::stack::{self, Servers};

/// Time in which the head server answers. Without one, the files alone decide.
const HEAD_TIMEOUT: Duration = Duration::from_secs(2);

/// Runs `rgym config …`.
pub(in crate::cli) async fn command(
    command: ConfigCommand,
    overrides: &[String],
    head_url_given: bool,
    servers: &Servers,
    console: &Console,
) -> Outcome {
    match command {
        ConfigCommand::Check(args) => check(*args, overrides, head_url_given, servers, console).await,
        ConfigCommand::Show(args) => show(*args, overrides, servers, console).await,
        ConfigCommand::Roce(args) => of_machine::roce(&args, console).await,
        ConfigCommand::Schema => {
            console::print(&format!("{:#}", servers.config_schema()));
            Ok(ExitCode::SUCCESS)
        }
    }
}

async fn show(args: ShowArgs, overrides: &[String], servers: &Servers, console: &Console) -> Outcome {
    if args.settings {
        console::print(&of_machine::settings(args.format).await?);
        return Ok(ExitCode::SUCCESS);
    }
    let sources = with_named(args.sources, args.named);
    let LoadedConfig { config, idle, .. } = load(&sources, overrides, servers, Need::Values).await?;
    idle.iter().for_each(|idle| console.warn(idle));
    config.warnings.iter().chain(&config.mistakes).for_each(|warning| console.warn(warning));
    let text = match args.format {
        // Comments, so that programs which read the configuration read only that.
        ShowFormat::Yaml => format!("{}{}", config.masked_yaml().trim_end(), of_machine::comments().await?),
        ShowFormat::Json => format!("{:#}", config.masked()),
    };
    console::print(text.trim_end());
    Ok(ExitCode::SUCCESS)
}

async fn check(
    args: CheckArgs,
    overrides: &[String],
    head_url_given: bool,
    servers: &Servers,
    console: &Console,
) -> Outcome {
    let head_url = args.head_url;
    let sources = with_named(args.sources, args.named);
    let loaded = load(&sources, overrides, servers, Need::Locations).await?;
    let config = &loaded.config;
    if config.files.is_empty() && config.instances.is_empty() && loaded.problems.is_empty() {
        return Err(nothing_named("check", &[]));
    }
    let mut warnings = config.warnings.clone();
    let world = World::real();
    let (found, unlocated) = locations(&loaded, servers, |_| true);
    let mut problems = loaded.problems.clone();
    problems.extend(config.mistakes.iter().map(ToString::to_string));
    problems.extend(unlocated);
    for (instance, _) in &found {
        match stack::try_build(instance, servers, &world) {
            Ok(made) => warnings.extend(made.into_iter().flat_map(|made| made.ignored)),
            Err(error) => problems.push(error.to_string()),
        }
        problems.extend(stack::mismatched(instance, config, servers));
    }
    let elsewhere = match config.elsewhere.as_slice() {
        [] => None,
        missing => {
            let head = head_server::endpoint(head_url.as_deref(), head_url_given, overrides, config)?;
            let asks = head_url_given || missing.iter().any(|missing| missing.nearest(&[]).is_none());
            match of_head(missing, &head, asks, servers, &world).await {
                Ok(()) => Some((head, missing)),
                Err(more) => {
                    problems.extend(more);
                    None
                }
            }
        }
    };
    warnings.iter().for_each(|warning| console.warn(warning));
    // A mistake of a block can be found by the loader and by the server.
    let mut said = BTreeSet::new();
    problems.retain(|problem| said.insert(problem.clone()));
    if !problems.is_empty() {
        return Err(Failure::Usage(problems.join("\n")));
    }
    if config.instances.is_empty() {
        return no_servers(config, servers);
    }
    let rows: Vec<[String; 4]> = found
        .into_iter()
        .map(|(instance, runs_as)| {
            let (name, implementation) = (instance.name.clone(), instance.implementation.clone());
            [name, instance.kind.to_string(), implementation, runs_as.to_string()]
        })
        .collect();
    if args.strict && !warnings.is_empty() {
        let (count, s) = (warnings.len(), if warnings.len() == 1 { "" } else { "s" });
        return Err(Failure::Usage(format!("{count} warning{s}: --strict treats them as errors")));
    }
    console::print(&console::table(["name", "kind", "implementation", "runs as"], rows));
    if let Some((head, missing)) = elsewhere {
        let names: BTreeSet<&str> = missing.iter().map(|missing| missing.name.as_str()).collect();
        let names = names.into_iter().collect::<Vec<_>>().join(", ");
        console::print(&format!("{names}: not in these files, known to the head server {head}"));
    }
    console::print(&format!("ok: {} servers from {}", config.instances.len(), files(config)));
    Ok(ExitCode::SUCCESS)
}

fn files(config: &GymConfig) -> String {
    match config.files.len() {
        1 => "1 file".to_owned(),
        count => format!("{count} files"),
    }
}

/// Checks that the head server knows the servers that no file defines.
async fn of_head(
    missing: &[MissingServer],
    head: &Endpoint,
    asks: bool,
    servers: &Servers,
    world: &World,
) -> Result<(), Vec<String>> {
    let registry = head_registry(head.clone(), servers, world);
    let told = match asks {
        true => registry.global_configuration(&CallContext::within(HEAD_TIMEOUT)).await.ok(),
        false => None,
    };
    let known = told.and_then(|text| ServerNames::of_global_yaml(&text, head.as_str()).ok());
    let Some(known) = known else {
        let note = "if the file of another server defines it, name that file too, or the head server that knows it with --head-url";
        let problem = |missing: &MissingServer| match missing.nearest(&[]) {
            Some(_) => missing.problem(&[]).to_string(),
            None => format!("{}\n  note: {note} ({head} does not answer)", missing.problem(&[])),
        };
        return Err(missing.iter().map(problem).collect());
    };
    let of_kind = |wanted: &MissingServer| -> Vec<&str> {
        known.servers().filter(|(_, kind)| *kind == wanted.kind).map(|(name, _)| name).collect()
    };
    let absent = missing.iter().filter(|wanted| !of_kind(wanted).contains(&wanted.name.as_str()));
    let problems: Vec<String> = absent
        .map(|wanted| {
            format!("{}\n  note: the head server {head} has no such server either", wanted.problem(&of_kind(wanted)))
        })
        .collect();
    if problems.is_empty() { Ok(()) } else { Err(problems) }
}

/// The result for files without servers: they may be those of worker groups.
#[cfg_attr(not(feature = "groups"), expect(unused_variables, reason = "there are no transports of groups"))]
fn no_servers(config: &GymConfig, servers: &Servers) -> Outcome {
    #[cfg(feature = "groups")]
    if config.variables.contains_key("cluster") {
        let mut groups = 0;
        for file in &config.files {
            let file = gym_group::ClusterFile::read(file)?;
            file.check_transports(&servers.transports().known())?;
            groups += file.groups.len();
        }
        let s = if groups == 1 { "" } else { "s" };
        console::print(&format!("ok: a cluster and {groups} worker group{s} from {}, and no servers", files(config)));
        return Ok(ExitCode::SUCCESS);
    }
    Err(nothing_named("check", &config.files))
}

/// Adds the files without an option to those of `--config`.
fn with_named(mut sources: Sources, named: Vec<String>) -> Sources {
    sources.files.splice(0..0, named);
    sources
}

/// The settings that the libraries of communication get on this machine.
#[cfg(feature = "rdma")]
mod of_machine {
    use std::process::ExitCode;

    use gym_client::transport::rdma::probe::machine::Live;
    use gym_client::transport::rdma::tuning::{self, Fabric};
    use gym_core::World;
    use serde_json::{Value, json};

    use crate::cli::args::options::{RoceArgs, ShowFormat};
    use crate::cli::console::{self, Console};
    use crate::cli::exit::{Failure, Outcome};
    use crate::cli::setup::checks::settings::{self, Setting};

    async fn of_this_machine() -> Result<Vec<Setting>, Failure> {
        Ok(World::real().blocking(|| settings::settings(&Live::new())).await?)
    }

    pub(super) async fn settings(format: ShowFormat) -> Result<String, Failure> {
        let settings = of_this_machine().await?;
        Ok(match format {
            ShowFormat::Json => format!("{:#}", json!(settings)),
            ShowFormat::Yaml if settings.is_empty() => "{}  # no setting of NCCL, UCX or Gloo".to_owned(),
            // A value is quoted as in JSON, which is YAML too.
            ShowFormat::Yaml => {
                let line = |one: &Setting| format!("{}: {}  # {}", one.name, json!(one.value), one.origin());
                settings.iter().map(line).collect::<Vec<_>>().join("\n")
            }
        })
    }

    /// Returns the settings as comments, for the end of a configuration.
    pub(super) async fn comments() -> Result<String, Failure> {
        let settings = of_this_machine().await?;
        if settings.is_empty() {
            return Ok(String::new());
        }
        let lines: String = settings.iter().map(|one| format!("\n# {}", one.text())).collect();
        Ok(format!(
            "\n# Settings of NCCL, UCX and Gloo for a process that starts here, and where each comes from:{lines}"
        ))
    }

    pub(super) async fn roce(args: &RoceArgs, console: &Console) -> Outcome {
        let mut fabric = Fabric::new();
        fabric.traffic_class = args.traffic_class;
        fabric.service_level = args.service_level;
        let profile = World::real().blocking(move || tuning::profile(&Live::new(), fabric)).await?;
        let Some(profile) = profile else {
            return Err(Failure::Failed(
                "this machine has no active RoCE port with an address\n  fix: `doctor` says what is missing; in a container, pass the cards and \
                 their interfaces"
                    .to_owned(),
            ));
        };
        let text = if args.json {
            let variables: serde_json::Map<String, Value> =
                profile.variables.iter().map(|(name, value)| ((*name).to_owned(), json!(value))).collect();
            format!("{:#}", json!({ "variables": variables, "notes": profile.notes }))
        } else {
            profile.variables.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join("\n")
        };
        console::print(&text);
        if !args.json {
            profile.notes.iter().for_each(|note| console.line(&format!("note: {note}")));
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// A build without the checks of a machine reads no settings of its libraries.
#[cfg(not(feature = "rdma"))]
mod of_machine {
    use crate::cli::args::options::{RoceArgs, ShowFormat};
    use crate::cli::console::Console;
    use crate::cli::exit::{Failure, Outcome};

    #[expect(clippy::unused_async, reason = "as in a build with checks")]
    pub(super) async fn settings(_: ShowFormat) -> Result<String, Failure> {
        Err(without_rdma())
    }

    #[expect(clippy::unused_async, reason = "as in a build with checks")]
    pub(super) async fn comments() -> Result<String, Failure> {
        Ok(String::new())
    }

    #[expect(clippy::unused_async, reason = "as in a build with checks")]
    pub(super) async fn roce(_: &RoceArgs, _: &Console) -> Outcome {
        Err(without_rdma())
    }

    fn without_rdma() -> Failure {
        let fix = "build it with the feature `rdma` of gym-server";
        Failure::Usage(format!("this program was built without the checks of a machine\n  fix: {fix}"))
    }
}

//! `rgym config check`, `rgym config show`, `rgym config roce` and `rgym config schema`.

use std::process::ExitCode;

use gym_core::World;

use crate::cli::args::options::{CheckArgs, ConfigCommand, ShowArgs, ShowFormat, Sources};
use crate::cli::console::{self, Console};
use crate::cli::exit::{Failure, Outcome};
use crate::cli::setup::configuration::{LoadedConfig, Need, load, locations, nothing_named};
use crate::stack::{self, Servers};

/// Runs `rgym config …`.
pub(in crate::cli) async fn command(
    command: ConfigCommand,
    overrides: &[String],
    servers: &Servers,
    console: &Console,
) -> Outcome {
    match command {
        ConfigCommand::Check(args) => check(*args, overrides, servers, console).await,
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
    let LoadedConfig { config, .. } = load(&sources, overrides, servers, Need::Values).await?;
    config.warnings.iter().for_each(|warning| console.warn(warning));
    let text = match args.format {
        // Comments, so that programs which read the configuration read only that.
        ShowFormat::Yaml => format!("{}{}", config.masked_yaml().trim_end(), of_machine::comments().await?),
        ShowFormat::Json => format!("{:#}", config.masked()),
    };
    console::print(text.trim_end());
    Ok(ExitCode::SUCCESS)
}

async fn check(args: CheckArgs, overrides: &[String], servers: &Servers, console: &Console) -> Outcome {
    let sources = with_named(args.sources, args.named);
    let loaded = load(&sources, overrides, servers, Need::Locations).await?;
    let config = &loaded.config;
    if config.files.is_empty() && config.instances.is_empty() {
        return Err(nothing_named("check", &[]));
    }
    let mut warnings = config.warnings.clone();
    let found = locations(&loaded, servers, |_| true)?;
    let world = World::real();
    let mut problems = Vec::new();
    for (instance, _) in &found {
        match stack::try_build(instance, servers, &world) {
            Ok(made) => warnings.extend(made.into_iter().flat_map(|made| made.ignored)),
            Err(error) => problems.push(error.to_string()),
        }
    }
    warnings.iter().for_each(|warning| console.warn(warning));
    if !problems.is_empty() {
        return Err(Failure::Usage(problems.join("\n")));
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
    let files = config.files.len();
    console::print(&console::table(["name", "kind", "implementation", "runs as"], rows));
    console::print(&format!(
        "ok: {} servers from {files} file{}",
        config.instances.len(),
        if files == 1 { "" } else { "s" }
    ));
    Ok(ExitCode::SUCCESS)
}

/// Adds the files without an option to those of `--config`.
fn with_named(mut sources: Sources, named: Vec<String>) -> Sources {
    sources.files.splice(0..0, named);
    sources
}

/// What the libraries of communication get on this machine.
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

//! `rgym config check`, `rgym config show` and `rgym config schema`.

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
        ConfigCommand::Schema => {
            console::print(&format!("{:#}", servers.config_schema()));
            Ok(ExitCode::SUCCESS)
        }
    }
}

async fn show(args: ShowArgs, overrides: &[String], servers: &Servers, console: &Console) -> Outcome {
    let sources = with_named(args.sources, args.named);
    let LoadedConfig { config, .. } = load(&sources, overrides, servers, Need::Values).await?;
    config.warnings.iter().for_each(|warning| console.warn(warning));
    let text = match args.format {
        ShowFormat::Yaml => config.masked_yaml(),
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

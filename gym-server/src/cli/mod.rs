//! The command line as a function: a program passes its own servers and gets the commands of `rgym`.
//!
//! ```no_run
//! use gym_core::{CallContext, ModelResponse, ResourcesServer, Result, SessionId, Verdict};
//! use gym_server::Servers;
//!
//! struct AlwaysRight;
//!
//! impl ResourcesServer for AlwaysRight {
//!     type Task = serde_json::Value;
//!     async fn verify(&self, _: &CallContext, _: &SessionId, _: Self::Task, _: &ModelResponse) -> Result<Verdict> {
//!         Ok(Verdict::correct(true))
//!     }
//! }
//!
//! fn main() -> std::process::ExitCode {
//!     gym_server::cli::main(Servers::stock().resources("always_right", |_| Ok(AlwaysRight)))
//! }
//! ```
//!
//! Exit codes: 0 success, 1 the run failed, 2 invalid usage or configuration, 3 finished with failed or incomplete
//! rollouts.

mod args;
mod collect;
mod console;
mod exit;
mod inspect;
mod new;
mod run;
mod setup;
mod view;

use std::ffi::OsString;
use std::process::ExitCode;
use std::time::Duration;

use clap::FromArgMatches;
use futures_util::FutureExt as _;
use gym_client::config::nearest_name;
use gym_core::transport::Transport;

use crate::cli::args::aliases;
use crate::cli::args::options::{self, Cli, Command, NewCommand};
use crate::cli::args::translation;
use crate::cli::console::Console;
use crate::cli::console::otlp::export::ExportSetup;
pub use crate::cli::exit::{EXIT_CODES, ExitMeaning};
use crate::cli::exit::{Failure, Outcome, USAGE};
use crate::cli::inspect::{config, doctor, status, stuck, top, workers};
use crate::stack::Servers;

/// Runs the command in the arguments of this process with the given servers. Call it first in `main`, before any thread
/// starts: in a process that becomes a Python server, or a rank of a worker group, it does not return.
#[must_use]
pub fn main(servers: Servers) -> ExitCode {
    main_with(servers, std::env::args_os())
}

/// Runs the command as [`main`] does, but with the given arguments; the first one is the program's name.
#[must_use]
pub fn main_with(servers: Servers, arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    #[cfg(feature = "groups")]
    inspect::self_test::workers(servers.workers()).enter();
    #[cfg(not(feature = "groups"))]
    gym_client::launch::enter();
    let console = Console::new();
    match parse(arguments, &servers.transports().known()) {
        Ok(Parsed::Command { cli, overrides, head_url_given }) => {
            let ended = start(*cli, overrides, head_url_given, servers, &console);
            ended.unwrap_or_else(|failure| {
                console.line(&format!("error: {}", failure.text()));
                failure.code()
            })
        }
        Ok(Parsed::Message(error)) => {
            // clap prints help to standard output and errors to standard error, and sets the exit code to 0 or 2.
            let _ = error.print();
            ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(USAGE))
        }
        Err(failure) => {
            console.line(&format!("error: {}", failure.text()));
            failure.code()
        }
    }
}

enum Parsed {
    Command {
        cli: Box<Cli>,
        overrides: Vec<String>,
        /// `true` if `--head-url` was given as an option, not by the environment variable.
        head_url_given: bool,
    },
    /// Help, the version, or an error that clap found.
    Message(clap::Error),
}

fn parse(argv: impl IntoIterator<Item = OsString>, transports: &[Transport]) -> Result<Parsed, Failure> {
    let typed = translation::translate(argv, &options::valued_options())?;
    let program = typed.arguments[0].to_string_lossy().into_owned();
    console::set_program(&program);
    let command = options::without_empty_variables(options::command(&program, transports));
    let matched = command
        .clone()
        .try_get_matches_from(&typed.arguments)
        .and_then(|matches| Ok((Box::new(Cli::from_arg_matches(&matches)?), matches)));
    Ok(match matched {
        Ok((cli, matches)) => {
            // That of `config check` is an option of the inner command.
            let head_url_given =
                std::iter::successors(Some(&matches), |matches| Some(matches.subcommand()?.1)).any(|matches| {
                    let known = matches.try_contains_id("head_url").unwrap_or_default();
                    known && matches.value_source("head_url") == Some(clap::parser::ValueSource::CommandLine)
                });
            Parsed::Command { cli, overrides: typed.overrides, head_url_given }
        }
        Err(error) => match options::invalid_variable(&command, &error) {
            Some(text) => return Err(Failure::Usage(text)),
            None => match typed.overrides.iter().find(|text| text.contains('/') && !text.starts_with('+')) {
                Some(text) if error.use_stderr() => {
                    return Err(Failure::Usage(format!(
                        "{text}: no such file, and as an override of the configuration it is none that this command takes\n  fix: correct the path"
                    )));
                }
                _ => match mistaken(&error, &typed.arguments) {
                    Some(text) => return Err(Failure::Usage(text)),
                    None => Parsed::Message(error),
                },
            },
        },
    })
}

/// Words that are no commands, with the command that is meant.
const MEANT: [(&str, &str); 11] = [
    ("check", "config check"),
    ("environment", "new environment"),
    ("init", "new environment"),
    ("list", "status"),
    ("ls", "status"),
    ("ps", "status"),
    ("resolve", "config show"),
    ("serve", "run"),
    ("show", "config show"),
    ("start", "run"),
    ("validate", "config check"),
];

/// Returns the error for a word that clap does not know, if the command that is meant is known.
fn mistaken(error: &clap::Error, arguments: &[OsString]) -> Option<String> {
    use clap::error::{ContextKind, ContextValue, ErrorKind};

    let said = |kind| match error.get(kind) {
        Some(ContextValue::String(word)) => Some(word.as_str()),
        _ => None,
    };
    let program = console::program();
    let words: Vec<&str> = arguments.iter().skip(1).filter_map(|word| word.to_str()).collect();
    let command = words.first().copied().unwrap_or_default();
    match error.kind() {
        ErrorKind::InvalidSubcommand => {
            let word = said(ContextKind::InvalidSubcommand)?;
            let meant = match command {
                "new" | "config" => {
                    let (inner, usual) = match command {
                        "new" => (&["environment"][..], "environment"),
                        _ => (&["check", "roce", "schema", "show"][..], "check"),
                    };
                    let rest = words.iter().skip_while(|other| **other != word).skip(1).copied();
                    // A word that is nearly a command is one; another word is the name or the file.
                    let meant = match nearest_name(word, inner.iter().copied()) {
                        Some(near) => [near].into_iter().chain(rest).collect::<Vec<_>>(),
                        None => [usual, word].into_iter().chain(rest).collect(),
                    };
                    format!("{program} {command} {}", meant.join(" "))
                }
                _ if word == command => {
                    let meant = MEANT.iter().find(|(known, _)| *known == word)?.1;
                    format!("{program} {}", [&[meant], &words[1..]].concat().join(" "))
                }
                _ => return None,
            };
            Some(format!("`{word}` is no command\n  fix: {}", meant.trim_end()))
        }
        ErrorKind::UnknownArgument => {
            let word = said(ContextKind::InvalidArg)?;
            let option = match word.rsplit_once('.')?.1 {
                "yaml" | "yml" if matches!(command, "run" | "collect" | "plan" | "doctor") => "--config",
                "jsonl" if matches!(command, "collect" | "plan") => "--input",
                _ => return None,
            };
            let words: Vec<String> = words
                .iter()
                .map(|other| if *other == word { format!("{option} {word}") } else { (*other).to_owned() })
                .collect();
            Some(format!("`{word}`: a file needs its option\n  fix: {program} {}", words.join(" ")))
        }
        _ => None,
    }
}

fn start(cli: Cli, overrides: Vec<String>, head_url_given: bool, servers: Servers, console: &Console) -> Outcome {
    let serves = matches!(cli.command, Command::Run(_));
    let export = console::log_to(console, &cli.shared, serves);
    // Each of several servers may need a thousand connections.
    gym_core::base::raise_descriptors();
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    runtime.worker_threads(cli.shared.threads.map_or_else(gym_core::base::runtime_threads, usize::from));
    let runtime =
        runtime.enable_all().build().map_err(|error| Failure::Failed(format!("cannot start the runtime: {error}")))?;
    let console = console.clone();
    let command = async move {
        let export = export.map(ExportSetup::start);
        let ended = match cli.command {
            Command::Run(args) => run::run(*args, &overrides, head_url_given, &servers, &console).await,
            Command::Collect(args) => collect::collect(*args, &overrides, head_url_given, &servers, &console).await,
            Command::Plan(args) => collect::plan::plan(*args, &overrides, &servers, &console).await,
            Command::Status(args) => status::status(args, &overrides, head_url_given, &servers).await,
            Command::Stuck(args) => stuck::stuck(args, &overrides, head_url_given, &servers).await,
            Command::Workers(args) => workers::list(args, &overrides, head_url_given, &servers).await,
            Command::Top(args) => top::top(args, &overrides, head_url_given, &servers).await,
            Command::Drain(args) => workers::drain(args, &overrides, head_url_given, &servers).await,
            #[cfg(feature = "ray")]
            Command::Ray(args) => inspect::ray::ray(args, &overrides, &servers).await,
            Command::Doctor(args) => doctor::doctor(&args, &overrides, &servers).await,
            Command::Config(args) => config::command(args, &overrides, head_url_given, &servers, &console).await,
            Command::New(NewCommand::Environment(args)) => new::environment(&args),
            Command::View(args) => view::view(args),
            Command::Completions { shell } => {
                aliases::completions(shell, console::program(), &servers.transports().known())
            }
            Command::Aliases => aliases::print(),
        };
        if let Some(export) = export {
            let dropped = export.end().await;
            if dropped > 0 {
                console.warn(format!("{dropped} spans of rollouts were not exported"));
            }
        }
        ended
    };
    // Spawned, because `block_on` does not run on a worker thread, and each wake-up would then cross threads.
    let ended = runtime.block_on(async move { tokio::spawn(command.boxed()).await });
    // Remaining tasks were cancelled, or need not finish.
    runtime.shutdown_timeout(Duration::from_secs(1));
    ended.unwrap_or_else(|error| Err(Failure::Failed(format!("the command panicked: {error}"))))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &[&str]) -> Parsed {
        parse(line.iter().map(OsString::from), &gym_client::transport::BUILT_IN).unwrap()
    }

    fn command(line: &[&str]) -> (String, Vec<String>) {
        match parsed(line) {
            Parsed::Command { cli, overrides, .. } => (format!("{:?}", cli.command), overrides),
            Parsed::Message(error) => panic!("{line:?}: {error}"),
        }
    }

    #[test]
    fn the_lines_of_nemo_gyms_documentation_are_the_same_commands_as_ours() {
        for (theirs, ours) in [
            (&["ng_run", "+config_paths=[config.yaml]"][..], &["rgym", "run", "+config_paths=[config.yaml]"][..]),
            (&["ng_run", "--head-only"], &["rgym", "run", "--head-only"]),
            (
                &["ng_run", "--worker", "--head-url=http://coordinator:11000"],
                &["rgym", "run", "--worker", "--head-url", "http://coordinator:11000"],
            ),
            (
                &["ng_run", "+config_paths=[config.yaml]", "+ray_head_node_address=ray://your-cluster:10001"],
                &["rgym", "run", "+config_paths=[config.yaml]", "+ray_head_node_address=ray://your-cluster:10001"],
            ),
            (&["rgym", "env", "start", "--config", "a.yaml"], &["rgym", "run", "--config=a.yaml"]),
            (
                &["ng_collect_rollouts", "+agent_name=a", "+limit=5"],
                &["rgym", "eval", "run", "+agent_name=a", "--no-serve", "+limit=5"],
            ),
            (
                &["rgym", "eval", "run", "--no-serve", "-a", "x", "-i", "i", "-o", "o"],
                &["rgym", "collect", "--overwrite-by-default", "--no-serve", "--agent=x", "--input=i", "--output=o"],
            ),
            (&["rgym", "env", "validate", "--config", "a.yaml"], &["rgym", "config", "check", "--config=a.yaml"]),
        ] {
            assert_eq!(command(theirs), command(ours), "{theirs:?}");
        }
    }

    #[test]
    fn a_word_that_is_no_command_is_answered_with_the_command_that_is_meant() {
        for (line, fix) in [
            (&["rgym", "check"][..], "fix: rgym config check"),
            (&["rgym", "check", "a.yaml"], "fix: rgym config check a.yaml"),
            (&["rgym", "config", "a.yaml"], "fix: rgym config check a.yaml"),
            (&["rgym", "new", "bank"], "fix: rgym new environment bank"),
            (&["rgym", "new", "enviroment", "bank"], "fix: rgym new environment bank"),
            (&["rgym", "config", "chek", "a.yaml"], "fix: rgym config check a.yaml"),
            (&["rgym", "config", "schma"], "fix: rgym config schema"),
            (&["rgym", "run", "base.yaml"], "fix: rgym run --config base.yaml"),
            (&["rgym", "collect", "base.yaml", "--agent", "a"], "fix: rgym collect --config base.yaml --agent a"),
            (&["rgym", "collect", "-a", "a", "tasks.jsonl"], "fix: rgym collect -a a --input tasks.jsonl"),
        ] {
            let refused = parse(line.iter().map(OsString::from), &gym_client::transport::BUILT_IN);
            let Err(Failure::Usage(text)) = refused else { panic!("{line:?}") };
            assert!(text.ends_with(fix), "{line:?}: {text}");
        }
        for line in [&["rgym", "pln"][..], &["rgym", "run", "--confg", "a.yaml"], &["rgym", "config", "--help"]] {
            assert!(matches!(parsed(line), Parsed::Message(_)), "{line:?}: clap has its own suggestion");
        }
    }

    #[test]
    fn a_head_url_option_is_distinguished_from_the_environment_variable() {
        for (line, expected) in [
            (&["rgym", "status", "--head-url", "http://h:1"][..], true),
            (&["rgym", "status"], false),
            (&["rgym", "config", "show"], false),
        ] {
            let Parsed::Command { head_url_given, .. } = parsed(line) else { panic!("{line:?}") };
            assert_eq!(head_url_given, expected, "{line:?}");
        }
    }

    #[test]
    fn the_help_lists_the_transports_of_the_program() {
        let known = [Transport::MEM, Transport::new("quic", 150), Transport::new("slow", 160).on_request()];
        for (line, expected) in [
            (&["bank", "run", "--help"][..], "any of mem,quic,slow [default: mem,quic]"),
            (&["bank", "config", "check", "--help"], "any of mem,quic,slow [default: mem,quic]"),
            (&["bank", "collect", "--help"], "Minimum transport, one of mem,quic,slow"),
            (&["bank", "doctor", "--help"], "this machine supports the transport: mem,quic,slow"),
        ] {
            let Parsed::Message(help) = parse(line.iter().map(OsString::from), &known).unwrap() else {
                panic!("{line:?}")
            };
            let help = help.to_string();
            let words: Vec<&str> = help.split_whitespace().collect();
            assert!(words.join(" ").contains(expected) && !help.contains("ucx_tcp"), "{line:?}: {help}");
        }
    }

    #[test]
    fn a_mistyped_option_is_refused_with_the_nearest_one() {
        let Parsed::Message(error) = parsed(&["rgym", "collect", "--concurency", "4"]) else { panic!("accepted") };
        assert_eq!(error.exit_code(), 2);
        assert!(error.to_string().contains("--concurrency"), "{error}");
    }
}

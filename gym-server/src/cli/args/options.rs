//! The options, as clap has them. What they mean is in the commands' own files.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};
use gym_core::transport::{Transport, TransportPolicy};

const OVERRIDES: &str = "\
Overrides (anywhere among the options):
  +key=value      add a key to the configuration
  ++key=value     add it, or replace what the files say
  key=value       change what the files say
  ~key            remove it
  Keys are dotted (policy_model.responses_api_models.openai_model.port), values are YAML ([a, b], {a: 1}, null).";

/// Reinforcement-learning environments for language models: servers, rollouts, rewards.
#[derive(Debug, Parser)]
#[command(name = "rgym", version, propagate_version = true, subcommand_required = true, arg_required_else_help = true)]
#[command(after_help = "\
Answers to NeMo Gym's words too: env start|status|validate|resolve, eval run, and ng_run, ng_collect_rollouts, ng_status, \
ng_validate, ng_dump_config as a first argument, by a link of that name, or with the aliases of `rgym aliases`.

Exit codes: 0 all done, 1 the run failed, 2 wrong usage or configuration, 3 done with failed or open rollouts.")]
pub(in crate::cli) struct Cli {
    #[command(flatten)]
    pub(in crate::cli) shared: CommonOptions,
    #[command(subcommand)]
    pub(in crate::cli) command: Command,
}

/// Options of every command.
#[derive(Debug, Args)]
pub(in crate::cli) struct CommonOptions {
    /// Log more: -v for debug, -vv for trace. RUST_LOG says it in detail
    #[arg(short, long, global = true, help_heading = "Common options", action = clap::ArgAction::Count)]
    pub(in crate::cli) verbose: u8,
    /// How log lines are written to standard error
    #[arg(long, global = true, help_heading = "Common options", value_enum, default_value_t = LogFormat::Text, value_name = "FORMAT")]
    pub(in crate::cli) log_format: LogFormat,
    /// Threads of the runtime [default: one for each core]
    #[arg(long, global = true, help_heading = "Common options", value_name = "N", env = "TOKIO_WORKER_THREADS", value_parser = clap::value_parser!(u16).range(1..))]
    pub(in crate::cli) threads: Option<u16>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(in crate::cli) enum LogFormat {
    Text,
    Json,
}

#[derive(Debug, Subcommand)]
pub(in crate::cli) enum Command {
    /// Start the servers of a configuration and keep them until SIGINT or SIGTERM
    #[command(after_help = OVERRIDES)]
    Run(Box<RunArgs>),
    /// Collect rollouts: a JSONL of tasks becomes a JSONL of scored rollouts
    #[command(after_help = OVERRIDES)]
    Collect(Box<CollectArgs>),
    /// Show the servers of a head: health, requests in flight, uptime
    Status(StatusArgs),
    /// Report which transports this machine supports, why others are unavailable, and how to fix them
    #[command(after_help = "\
Exit codes: 0 everything present works, 1 the transport of --require-transport is unavailable, 3 something is present that does \
not work (each has a fix). Missing hardware is reported but is not an error.")]
    Doctor(DoctorArgs),
    /// Check or show a configuration without starting anything
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Print shell aliases for NeMo Gym's ng_… names: eval "$(rgym aliases)"
    Aliases,
}

/// Where the configuration comes from.
#[derive(Clone, Debug, Default, Args)]
pub(in crate::cli) struct Sources {
    /// A configuration file; repeatable, later ones win. Also +config_paths=[A.yaml,B.yaml]
    #[arg(long = "config", value_name = "FILE")]
    pub(in crate::cli) files: Vec<String>,
    /// The interpreter that has nemo-gym [default: the active virtual environment's, then python3]
    #[arg(long, value_name = "PATH")]
    pub(in crate::cli) python: Option<PathBuf>,
    /// A folder in which servers and configuration files are looked for first; repeatable. NEMO_GYM_EXTRA_ROOTS lists more
    #[arg(long, value_name = "DIR")]
    pub(in crate::cli) search_dir: Vec<PathBuf>,
    /// Model name: +policy_model_name=…
    #[arg(long, short, value_name = "NAME")]
    pub(in crate::cli) model: Option<String>,
    /// Model endpoint: +policy_base_url=…
    #[arg(long, value_name = "URL")]
    pub(in crate::cli) model_url: Option<String>,
    /// Key of the model endpoint: +policy_api_key=…; better in env.yaml, because arguments are visible to others
    #[arg(long, value_name = "KEY")]
    pub(in crate::cli) model_api_key: Option<String>,
    /// Transports between servers: auto, or some of mem,shm,rdma,ucx_tcp,http [default: mem,http]: ++transport=…
    #[arg(long, value_name = "NAMES")]
    pub(in crate::cli) transport: Option<TransportPolicy>,
    /// Minimum transport; connecting fails instead of falling back below it: ++require_transport=…
    #[arg(long, value_name = "NAME")]
    pub(in crate::cli) require_transport: Option<Transport>,
}

/// How servers are started and stopped.
#[derive(Clone, Debug, Args)]
pub(in crate::cli) struct Starting {
    /// How long a Python server may take until it answers, in seconds
    #[arg(long, value_name = "SECS", default_value = "300", value_parser = seconds)]
    pub(in crate::cli) start_timeout: Duration,
}

#[derive(Clone, Debug, Args)]
pub(in crate::cli) struct RunArgs {
    #[command(flatten)]
    pub(in crate::cli) sources: Sources,
    #[command(flatten)]
    pub(in crate::cli) starting: Starting,
    /// Serve only this instance (repeatable), registered with the head at --head-url; `head_server` is the head itself
    #[arg(long, value_name = "NAME")]
    pub(in crate::cli) serve: Vec<String>,
    /// The head to register with [default: head_server of the configuration]
    #[arg(long, value_name = "URL", env = "HEAD_SERVER_URL")]
    pub(in crate::cli) head_url: Option<String>,
    /// How long running requests may go on after a stop, in seconds
    #[arg(long, value_name = "SECS", default_value = "10", value_parser = seconds)]
    pub(in crate::cli) stop_grace: Duration,
    /// How long a request may take whose caller names no deadline (Python callers do not), in seconds
    #[arg(long, value_name = "SECS", default_value = "86400", value_parser = seconds)]
    pub(in crate::cli) request_timeout: Duration,
    /// Not supported yet
    #[arg(long, hide = true)]
    pub(in crate::cli) head_only: bool,
    /// Not supported yet
    #[arg(long, hide = true)]
    pub(in crate::cli) worker: bool,
}

#[derive(Clone, Debug, Args)]
pub(in crate::cli) struct CollectArgs {
    #[command(flatten)]
    pub(in crate::cli) sources: Sources,
    #[command(flatten)]
    pub(in crate::cli) starting: Starting,
    /// Collect from servers that run, even if configuration files are named: +agent_name=… and the like are read from them
    #[arg(long, conflicts_with = "serve")]
    pub(in crate::cli) no_serve: bool,
    /// Start the servers of the configuration, collect from them, stop them (--config alone says so too)
    #[arg(long)]
    pub(in crate::cli) serve: bool,
    /// The head of the servers that run [default: head_server of the configuration, http://127.0.0.1:11000]
    #[arg(long, value_name = "URL", env = "HEAD_SERVER_URL")]
    pub(in crate::cli) head_url: Option<String>,
    /// The agent that runs every row; without it each row names its own: +agent_name=…
    #[arg(long, short, value_name = "NAME")]
    pub(in crate::cli) agent: Option<String>,
    /// The tasks, one JSON object a line: +input_jsonl_fpath=…
    #[arg(long, short, value_name = "FILE")]
    pub(in crate::cli) input: Option<PathBuf>,
    /// The rollouts; failures, materialized inputs and statistics are written beside it: +output_jsonl_fpath=…
    #[arg(long, short, value_name = "FILE")]
    pub(in crate::cli) output: Option<PathBuf>,
    /// Rollouts of each row [default: 1]: +num_repeats=…, which also takes {agent: N, _default: M}
    #[arg(long, value_name = "N")]
    pub(in crate::cli) num_repeats: Option<u32>,
    /// Rollouts under way at once [default: 1024]: +num_samples_in_parallel=…
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(in crate::cli) concurrency: Option<u32>,
    /// Only the first rows of the input: +limit=…
    #[arg(long, value_name = "N")]
    pub(in crate::cli) limit: Option<u64>,
    /// Go on with what the output holds, instead of starting over: +resume_from_cache=true
    #[arg(long)]
    pub(in crate::cli) resume: bool,
    /// Run the repeats round by round instead of row by row: +interleave_repeats=true
    #[arg(long)]
    pub(in crate::cli) interleave_repeats: bool,
    /// Give each repeat its index as the seed: +num_repeats_add_seed=true
    #[arg(long)]
    pub(in crate::cli) add_seed: bool,
    /// Template that makes each row's input: +prompt_config=…
    #[arg(long, value_name = "FILE")]
    pub(in crate::cli) prompt_config: Option<PathBuf>,
    /// Sampling temperature: +responses_create_params.temperature=…
    #[arg(long, value_name = "X")]
    pub(in crate::cli) temperature: Option<f64>,
    /// Nucleus sampling: +responses_create_params.top_p=…
    #[arg(long, value_name = "X")]
    pub(in crate::cli) top_p: Option<f64>,
    /// Output tokens of one model call: +responses_create_params.max_output_tokens=…
    #[arg(long, value_name = "N")]
    pub(in crate::cli) max_output_tokens: Option<u64>,
    /// Attempts at one rollout, over all runs [default: 3]
    #[arg(long, value_name = "N", env = "NEMO_GYM_MAX_ROLLOUT_ATTEMPTS", value_parser = clap::value_parser!(u32).range(1..))]
    pub(in crate::cli) attempts: Option<u32>,
    /// How long one attempt may take, in seconds
    #[arg(long, value_name = "SECS", default_value = "7200", value_parser = seconds)]
    pub(in crate::cli) attempt_timeout: Duration,
    /// How long rollouts under way may go on after Ctrl-C, in seconds
    #[arg(long, value_name = "SECS", default_value = "30", value_parser = seconds)]
    pub(in crate::cli) stop_grace: Duration,
    /// Do not ask the servers for statistics at the end: +disable_aggregation=true
    #[arg(long)]
    pub(in crate::cli) disable_aggregation: bool,
    /// How progress is shown: a bar, a line every few seconds, nothing; auto is the bar on a terminal, else the lines
    #[arg(long, value_enum, default_value_t = ProgressMode::Auto, value_name = "HOW")]
    pub(in crate::cli) progress: ProgressMode,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(in crate::cli) enum ProgressMode {
    Auto,
    Bar,
    Plain,
    None,
}

#[derive(Clone, Debug, Args)]
pub(in crate::cli) struct StatusArgs {
    /// Print JSON
    #[arg(long)]
    pub(in crate::cli) json: bool,
    /// The head to ask [default: head_server of env.yaml, http://127.0.0.1:11000]
    #[arg(long, value_name = "URL", env = "HEAD_SERVER_URL")]
    pub(in crate::cli) head_url: Option<String>,
}

#[derive(Clone, Debug, Args)]
pub(in crate::cli) struct DoctorArgs {
    /// Print JSON
    #[arg(long)]
    pub(in crate::cli) json: bool,
    /// Fail (exit code 1) unless this machine supports the transport: shm, rdma, ucx_tcp
    #[arg(long, value_name = "NAME")]
    pub(in crate::cli) require_transport: Option<Transport>,
    /// How long UCX may take to load and to look at its devices, in seconds
    #[arg(long, value_name = "SECS", default_value = "20", value_parser = seconds)]
    pub(in crate::cli) ucx_timeout: Duration,
}

#[derive(Debug, Subcommand)]
pub(in crate::cli) enum ConfigCommand {
    /// Say what is wrong with configuration files, with place and fix
    #[command(after_help = OVERRIDES)]
    Check(Box<CheckArgs>),
    /// Print the merged configuration, secrets masked
    #[command(after_help = OVERRIDES)]
    Show(Box<ShowArgs>),
}

#[derive(Clone, Debug, Args)]
pub(in crate::cli) struct CheckArgs {
    /// Configuration files, later ones win
    #[arg(value_name = "FILE")]
    pub(in crate::cli) named: Vec<String>,
    #[command(flatten)]
    pub(in crate::cli) sources: Sources,
    /// Refuse what is only warned about otherwise
    #[arg(long)]
    pub(in crate::cli) strict: bool,
}

#[derive(Clone, Debug, Args)]
pub(in crate::cli) struct ShowArgs {
    /// Configuration files, later ones win
    #[arg(value_name = "FILE")]
    pub(in crate::cli) named: Vec<String>,
    #[command(flatten)]
    pub(in crate::cli) sources: Sources,
    /// How it is written
    #[arg(long, value_enum, default_value_t = ShowFormat::Yaml, value_name = "FORMAT")]
    pub(in crate::cli) format: ShowFormat,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(in crate::cli) enum ShowFormat {
    Yaml,
    Json,
}

/// Seconds, with a fraction where one is wanted.
fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "write seconds, as in 30 or 0.5".to_owned())?;
    Duration::try_from_secs_f64(seconds).map_err(|_| "use seconds from 0 on".to_owned())
}

/// The options of all commands that take a value: the argument after one is no override and no command.
pub(in crate::cli) fn valued_options() -> BTreeSet<String> {
    fn collect(command: &clap::Command, into: &mut BTreeSet<String>) {
        for option in command.get_arguments().filter(|argument| argument.get_action().takes_values()) {
            into.extend(option.get_long().map(|name| format!("--{name}")));
            into.extend(option.get_short().map(|name| format!("-{name}")));
        }
        command.get_subcommands().for_each(|command| collect(command, into));
    }
    let mut names = BTreeSet::new();
    collect(&Cli::command(), &mut names);
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_options_of_all_commands_fit_together() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_option_has_a_help_text() {
        fn check(command: &clap::Command) {
            for option in command.get_arguments() {
                assert!(option.get_help().is_some(), "{} {}", command.get_name(), option.get_id());
            }
            command.get_subcommands().for_each(check);
        }
        check(&Cli::command());
    }

    #[test]
    fn seconds_are_numbers_from_zero_on() {
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        assert!(seconds("-1").unwrap_err().contains("from 0"));
        assert!(seconds("1m").unwrap_err().contains("write seconds"));
    }
}

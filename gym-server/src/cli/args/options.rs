//! The command-line options as clap structs. The modules of the commands define their effect.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::builder::{Resettable, StyledStr};
use clap::error::{ContextKind, ContextValue};
use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};
use gym_core::transport::{Transport, TransportPolicy};

use crate::cli::args::range::{self, RewardRange};
use crate::cli::exit::{self, Failure};

const OVERRIDES: &str = "\
Overrides (at any position among the options):
  +key=value      add a key to the configuration
  ++key=value     add a key, or replace its value in the files
  key=value       change a key of the files
  ~key            remove a key of the files
  Keys are dotted (policy_model.responses_api_models.openai_model.port), values are YAML ([a, b], {a: 1}, null).";

/// Reinforcement-learning environments for language models: servers, rollouts, rewards.
#[derive(Debug, Parser)]
#[command(name = "rgym", version, propagate_version = true, subcommand_required = true, arg_required_else_help = true)]
#[command(after_help = format!("\
Also accepts NeMo Gym's commands: env start|status|validate|resolve, eval run, and ng_run, ng_collect_rollouts, ng_status, \
ng_validate, ng_dump_config as the first argument, as the name of a link, or through the aliases of `PROGRAM aliases`.

{}", exit::listed(|row| row.meaning)))]
pub(in crate::cli) struct Cli {
    #[command(flatten)]
    pub(in crate::cli) shared: CommonOptions,
    #[command(subcommand)]
    pub(in crate::cli) command: Command,
}

/// Options of every command.
#[derive(Debug, Args)]
pub(in crate::cli) struct CommonOptions {
    /// Log verbosity: -v for debug, -vv for trace; RUST_LOG sets levels per target
    #[arg(short, long, global = true, help_heading = "Common options", action = clap::ArgAction::Count)]
    pub(in crate::cli) verbose: u8,
    /// Format of the log lines on standard error
    #[arg(long, global = true, help_heading = "Common options", value_enum, default_value_t = LogFormat::Text, value_name = "FORMAT")]
    pub(in crate::cli) log_format: LogFormat,
    /// Runtime threads [default: one per core]
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
    /// Collect rollouts: turn a JSONL file of tasks into a JSONL file of scored rollouts
    #[command(after_help = OVERRIDES)]
    Collect(Box<CollectArgs>),
    /// Measure a configuration on this machine, and compute the workers that a rate of rollouts needs
    #[command(after_help = format!("\
Starts the servers of the configuration and collects the rows several times into a temporary directory: with one rollout in flight, with a \
quarter of --in-flight, and with --in-flight.

{OVERRIDES}"))]
    Plan(Box<PlanArgs>),
    /// Show the servers of a head server: health, requests in flight, uptime, transports
    Status(StatusArgs),
    /// Name the wait that blocks each of the oldest rollouts, from the collector to the leaf, across processes
    #[command(after_help = "\
Asks the servers of the head server, and the collectors and controllers of this user on this machine. A process that does not answer \
is named with its state.")]
    Stuck(StuckArgs),
    /// List the workers that have joined a head server, and those that are gone
    Workers(StatusArgs),
    /// Show the collections and workers of a head server until Ctrl-C, as its page /ui does
    Top(TopArgs),
    /// Ask a worker to finish its rollouts, take no more, and end
    Drain(DrainArgs),
    /// Show a Ray cluster and our jobs there, and stop them
    #[cfg(feature = "ray")]
    Ray(RayArgs),
    /// Create an environment that collects at once
    #[command(subcommand)]
    New(NewCommand),
    /// Show rollouts as conversations with their tool calls and rewards, and failures with their causes
    #[command(after_help = "\
Failures are read from the failures file beside FILE, if there is one. In a terminal, Enter shows the next rollout. Elsewhere, \
all of them are printed.")]
    View(ViewArgs),
    /// Report whether transports, model endpoints, ports, descriptors, disk and clock are fit, why not, and how to fix it
    #[command(after_help = format!("\
{} Missing hardware is reported but is not an error.", exit::listed(|row| row.of_doctor)))]
    Doctor(DoctorArgs),
    /// Check or show a configuration without starting anything
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Print a completion script for a shell: source <(PROGRAM completions bash)
    Completions {
        /// Shell that reads the script
        shell: clap_complete::Shell,
    },
    /// Print shell aliases for NeMo Gym's ng_… commands: eval "$(PROGRAM aliases)"
    Aliases,
}

/// Sources of the configuration.
#[derive(Clone, Debug, Default, Args)]
pub(in crate::cli) struct Sources {
    /// Configuration file; repeatable, later files override earlier ones. Also +config_paths=[A.yaml,B.yaml]
    #[arg(long = "config", value_name = "FILE")]
    pub(in crate::cli) files: Vec<String>,
    /// Python interpreter with nemo-gym installed, 3.13.14 or later [default: that of the active virtual environment, else python3]
    #[arg(long, value_name = "PATH")]
    pub(in crate::cli) python: Option<PathBuf>,
    /// Directory that is searched first for servers and configuration files; repeatable. NEMO_GYM_EXTRA_ROOTS lists
    /// more
    #[arg(long, value_name = "DIR")]
    pub(in crate::cli) search_dir: Vec<PathBuf>,
    /// Model name: +policy_model_name=…
    #[arg(long, short, value_name = "NAME")]
    pub(in crate::cli) model: Option<String>,
    /// Model endpoint: +policy_base_url=…
    #[arg(long, value_name = "URL")]
    pub(in crate::cli) model_url: Option<String>,
    /// API key of the model endpoint: +policy_api_key=…; prefer env.yaml, because other users can see arguments
    #[arg(long, value_name = "KEY")]
    pub(in crate::cli) model_api_key: Option<String>,
    /// Transports between servers: ++transport=…
    #[arg(long, value_name = "NAMES")]
    pub(in crate::cli) transport: Option<TransportPolicy>,
    /// Minimum transport; connecting fails instead of falling back below it: ++require_transport=…
    #[arg(long, value_name = "NAME")]
    pub(in crate::cli) require_transport: Option<String>,
}

impl Sources {
    /// Checks that no file of rows is given as a configuration.
    ///
    /// # Errors
    /// `Usage`, with the option that takes it.
    pub(in crate::cli) fn check_endings(&self, input: Option<&Path>) -> Result<(), Failure> {
        let is_rows = |file: &&String| {
            let ending = Path::new(file).extension().and_then(|ending| ending.to_str()).unwrap_or_default();
            ["jsonl", "ndjson", "csv", "parquet"].iter().any(|rows| ending.eq_ignore_ascii_case(rows))
        };
        let Some(rows) = self.files.iter().find(is_rows) else { return Ok(()) };
        let fix = match input {
            Some(_) => "name the YAML file of the servers with --config".to_owned(),
            None => {
                format!("give it to `collect` with --input {rows}, and name the YAML file of the servers with --config")
            }
        };
        Err(Failure::Usage(format!("--config {rows}: this is a file of rows, and no configuration\n  fix: {fix}")))
    }
}

/// Options for starting servers.
#[derive(Clone, Debug, Args)]
pub(in crate::cli) struct Starting {
    /// Seconds until a Python server must respond after its start
    #[arg(long, value_name = "SECS", default_value = "300", value_parser = seconds)]
    pub(in crate::cli) start_timeout: Duration,
    /// Seconds to wait at the start until every model endpoint responds [default: report which respond, and go on]
    #[arg(long, value_name = "SECS", value_parser = seconds)]
    pub(in crate::cli) wait_for_model: Option<Duration>,
}

/// Where a process answers `/health` and `/metrics` besides its servers.
#[derive(Clone, Debug, Args)]
pub(in crate::cli) struct MonitorArgs {
    /// Port at which this process answers /health and /metrics, in addition to its servers; 0 for a free one [default: none]
    #[arg(long, value_name = "PORT")]
    pub(in crate::cli) metrics_port: Option<u16>,
    /// Address to bind for --metrics-port; 0.0.0.0 for all
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1", requires = "metrics_port")]
    pub(in crate::cli) metrics_host: String,
}

#[derive(Clone, Debug, Subcommand)]
pub(in crate::cli) enum NewCommand {
    /// Create a crate with an environment, its configuration, rows, a test and a README
    Environment(NewEnvironmentArgs),
}

#[derive(Clone, Debug, Args)]
pub(in crate::cli) struct NewEnvironmentArgs {
    /// Name of the environment, in lower case: word_count
    #[arg(value_name = "NAME")]
    pub(in crate::cli) name: String,
    /// Create a NeMo Gym environment in Python: resources_servers/NAME
    #[arg(long)]
    pub(in crate::cli) python: bool,
    /// Folder in which to create it
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub(in crate::cli) folder: PathBuf,
    /// Checkout of this SDK that the crate depends on: the folder with gym-core and gym-server [default: the one around this program, the
    /// working directory or the new crate, or beside them]
    #[arg(long, value_name = "DIR", conflicts_with = "python")]
    pub(in crate::cli) sdk: Option<PathBuf>,
}

#[derive(Clone, Debug, Args)]
pub(in crate::cli) struct ViewArgs {
    /// File of rollouts, such as results/rollouts.jsonl
    #[arg(value_name = "FILE")]
    pub(in crate::cli) file: PathBuf,
    /// Rollout to begin with: TASK-REPEAT, such as 3-0
    #[arg(value_name = "ROLLOUT")]
    pub(in crate::cli) rollout: Option<String>,
    /// Only rollouts of this task: its _ng_task_index
    #[arg(long, value_name = "N")]
    pub(in crate::cli) task: Option<u64>,
    /// Only rollouts of this agent
    #[arg(long, value_name = "NAME")]
    pub(in crate::cli) agent: Option<String>,
    /// Only failed attempts of this class, such as tool_error
    #[arg(long, value_name = "CLASS")]
    pub(in crate::cli) class: Option<String>,
    /// Only rollouts with this reward, or in this range: 1, 0..0.5, 0.5.. or ..0.5
    #[arg(long, value_name = "RANGE", allow_hyphen_values = true)]
    pub(in crate::cli) reward: Option<RewardRange>,
    /// Only failed attempts
    #[arg(long)]
    pub(in crate::cli) failed: bool,
    /// Print one line for each rollout
    #[arg(long)]
    pub(in crate::cli) list: bool,
    /// Maximum number of rollouts; of conversations with --html [default: all; 2000 with --html]
    #[arg(long, value_name = "N")]
    pub(in crate::cli) limit: Option<usize>,
    /// Write one self-contained HTML page: list with filters, conversations, histogram of the rewards
    #[arg(long, value_name = "OUT", conflicts_with_all = ["list", "rollout"])]
    pub(in crate::cli) html: Option<PathBuf>,
    /// Replace an existing page
    #[arg(long, requires = "html")]
    pub(in crate::cli) overwrite: bool,
}

#[derive(Clone, Debug, Args)]
pub(in crate::cli) struct RunArgs {
    #[command(flatten)]
    pub(in crate::cli) sources: Sources,
    #[command(flatten)]
    pub(in crate::cli) starting: Starting,
    /// Instance to serve (repeatable); it registers with the head server at --head-url. `head_server` is the head
    /// server itself
    #[arg(long, value_name = "NAME")]
    pub(in crate::cli) serve: Vec<String>,
    /// Head server to register with [default: head_server of the configuration]
    #[arg(long, value_name = "URL", env = "HEAD_SERVER_URL")]
    pub(in crate::cli) head_url: Option<String>,
    /// Take rollouts from the pools and pulling collectors of this head server that listen on a loopback address, and run them on the servers
    /// of this process. A worker (--worker) takes those of its own head server, on whichever machine
    #[arg(long, value_name = "URL")]
    pub(in crate::cli) pull_from: Option<String>,
    /// Rollouts that this process runs at a time for --pull-from
    #[arg(long, value_name = "N", default_value = "256", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(in crate::cli) pull_capacity: u32,
    /// Seconds allowed for running requests after a stop
    #[arg(long, value_name = "SECS", default_value = "10", value_parser = seconds)]
    pub(in crate::cli) stop_grace: Duration,
    /// Seconds allowed for requests that carry no deadline, such as those of Python clients
    #[arg(long, value_name = "SECS", default_value = "86400", value_parser = seconds)]
    pub(in crate::cli) request_timeout: Duration,
    #[command(flatten)]
    pub(in crate::cli) monitor: MonitorArgs,
    #[command(flatten)]
    pub(in crate::cli) cluster: ClusterArgs,
}

/// The effect of a failed check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(in crate::cli) enum ChecksMode {
    /// An error in what is asked for ends the start with 2
    Fail,
    /// Errors are warnings
    Warn,
    /// Nothing is checked
    Off,
}

/// Options of a process that belongs to a cluster.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Cluster")]
pub(in crate::cli) struct ClusterArgs {
    /// Serve only the head server, which workers join
    #[arg(long, conflicts_with_all = ["serve", "worker"])]
    pub(in crate::cli) head_only: bool,
    /// Join the head server at --head-url with all servers of the configuration. HEAD_SERVER_URL does the same
    #[arg(long, conflicts_with = "serve")]
    pub(in crate::cli) worker: bool,
    /// Name of this worker in the cluster [default: the name of the host]
    #[arg(long, value_name = "NAME")]
    pub(in crate::cli) name: Option<String>,
    /// Address that a worker's servers bind; 0.0.0.0 for all. They have no authentication: use a trusted network [default: 127.0.0.1]
    #[arg(long, value_name = "ADDRESS")]
    pub(in crate::cli) host: Option<String>,
    /// Address at which other machines reach this worker [default: --host, or that of the route to the head server]
    #[arg(long, value_name = "ADDRESS")]
    pub(in crate::cli) advertise: Option<String>,
    /// Seconds between two heartbeats of this worker
    #[arg(long, value_name = "SECS", env = "WORKER_HEARTBEAT_INTERVAL", default_value = "30", value_parser = seconds)]
    pub(in crate::cli) heartbeat_interval: Duration,
    /// Seconds after which this worker is gone if it sends no heartbeat
    #[arg(long, value_name = "SECS", env = "WORKER_TIMEOUT", default_value = "300", value_parser = seconds)]
    pub(in crate::cli) worker_timeout: Duration,
    /// Seconds for which a worker tries to reach its head server, and for which a head server waits for --expected-workers
    #[arg(long, value_name = "SECS", default_value = "300", value_parser = seconds)]
    pub(in crate::cli) join_timeout: Duration,
    /// Checks of a worker before it joins: an error in the GPUs, NCCL, the transport or the settings that its configuration or environment
    /// asks for ends it, or is a warning; without a request, errors are warnings [default: fail]
    #[arg(long, value_enum, value_name = "MODE", env = "WORKER_CHECKS")]
    pub(in crate::cli) checks: Option<ChecksMode>,
    /// Workers that must serve before the head server reports that it is ready. It ends if they do not serve within --join-timeout
    /// [default: 1 with --head-only, for which it waits without limit; otherwise 0]
    #[arg(long, value_name = "N", env = "NUM_EXPECTED_WORKERS")]
    pub(in crate::cli) expected_workers: Option<u16>,
}

/// A worker to drain.
#[derive(Clone, Debug, Args)]
pub(in crate::cli) struct DrainArgs {
    /// Name of the worker, as `workers` lists it
    #[arg(value_name = "NAME")]
    pub(in crate::cli) name: String,
    /// Head server to query [default: head_server of env.yaml, http://127.0.0.1:11000]
    #[arg(long, value_name = "URL", env = "HEAD_SERVER_URL")]
    pub(in crate::cli) head_url: Option<String>,
}

#[cfg(feature = "ray")]
#[derive(Clone, Debug, Args)]
pub(in crate::cli) struct RayArgs {
    /// The cluster: ray://HOST:10001, HOST:6379, http://HOST:8265 or auto [default: ray_head_node_address of env.yaml, else RAY_ADDRESS]
    #[arg(long, value_name = "ADDRESS", global = true)]
    pub(in crate::cli) ray_address: Option<String>,
    /// Print JSON
    #[arg(long, global = true)]
    pub(in crate::cli) json: bool,
    #[command(subcommand)]
    pub(in crate::cli) command: RayCommand,
}

#[cfg(feature = "ray")]
#[derive(Clone, Debug, Subcommand)]
pub(in crate::cli) enum RayCommand {
    /// Show the nodes, what is in use, and our jobs
    Status,
    /// Show the resources: used and total
    Resources,
    /// Show the memory of each node
    Memory,
    /// List the tasks of the cluster
    Tasks {
        /// Maximum number of tasks
        #[arg(long, value_name = "N", default_value_t = 20)]
        limit: u32,
    },
    /// Print the log of a job
    Logs {
        /// Identifier of the job, as `ray status` lists it
        #[arg(value_name = "JOB")]
        job: String,
    },
    /// Stop a job of this SDK, or with --all every one; never the cluster, and no job of others
    Stop {
        /// Identifier of the job, as `ray status` lists it
        #[arg(value_name = "JOB", required_unless_present = "all", conflicts_with = "all")]
        job: Option<String>,
        /// Stop all jobs of this SDK that run
        #[arg(long)]
        all: bool,
    },
}

#[derive(Clone, Debug, Args)]
pub(in crate::cli) struct CollectArgs {
    #[command(flatten)]
    pub(in crate::cli) monitor: MonitorArgs,
    #[command(flatten)]
    pub(in crate::cli) sources: Sources,
    #[command(flatten)]
    pub(in crate::cli) starting: Starting,
    /// Collect from running servers even if configuration files are given; keys such as +agent_name=… are read from the
    /// files
    #[arg(long, conflicts_with = "serve")]
    pub(in crate::cli) no_serve: bool,
    /// Start the servers of the configuration, collect from them, then stop them (implied by --config)
    #[arg(long)]
    pub(in crate::cli) serve: bool,
    /// Head server of the running servers [default: head_server of the configuration, http://127.0.0.1:11000]
    #[arg(long, value_name = "URL", env = "HEAD_SERVER_URL")]
    pub(in crate::cli) head_url: Option<String>,
    /// Agent for all rows; by default, each row names its agent: +agent_name=…
    #[arg(long, short, value_name = "NAME")]
    pub(in crate::cli) agent: Option<String>,
    /// File of the tasks, one JSON object per line; with the feature parquet also a Parquet file, a directory or a pattern of them:
    /// +input_jsonl_fpath=…
    #[arg(long, short, value_name = "FILE")]
    pub(in crate::cli) input: Option<PathBuf>,
    /// File for the rollouts; failures, materialized inputs and statistics are written to the same directory:
    /// +output_jsonl_fpath=…
    #[arg(long, short, value_name = "FILE")]
    pub(in crate::cli) output: Option<PathBuf>,
    /// Rollouts per row [default: 1]: +num_repeats=…, which also accepts {agent: N, _default: M}
    #[arg(long, value_name = "N")]
    pub(in crate::cli) num_repeats: Option<u32>,
    /// Rollouts in flight [default: 1024]: +num_samples_in_parallel=…
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(in crate::cli) concurrency: Option<u32>,
    /// Maximum number of input rows: +limit=…
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(in crate::cli) limit: Option<u64>,
    /// Continue from the files of --output; more rows and repeats are added, and changed rows are rejected:
    /// +resume_from_cache=true
    #[arg(long, conflicts_with = "overwrite")]
    pub(in crate::cli) resume: bool,
    /// A --resume with other settings of models, environments or agents than those that made the recorded rewards: reject it, or mark the new
    /// rows with the version of their settings in OUTPUT_settings.json
    #[arg(long, value_enum, default_value_t = SettingsChange::Reject, value_name = "HOW")]
    pub(in crate::cli) changed_settings: SettingsChange,
    /// Replace the files of --output; without this or --resume, an existing output is rejected
    #[arg(long)]
    pub(in crate::cli) overwrite: bool,
    /// Overwrite unless --resume is given; NeMo Gym's commands and the quickstart imply this
    #[arg(long, hide = true)]
    pub(in crate::cli) overwrite_by_default: bool,
    /// Dispatch the repeats in rounds instead of row by row: +interleave_repeats=true
    #[arg(long)]
    pub(in crate::cli) interleave_repeats: bool,
    /// Set the seed of each repeat to its index: +num_repeats_add_seed=true
    #[arg(long)]
    pub(in crate::cli) add_seed: bool,
    /// Prompt template that creates the input of each row: +prompt_config=…
    #[arg(long, value_name = "FILE")]
    pub(in crate::cli) prompt_config: Option<PathBuf>,
    /// Sampling temperature: +responses_create_params.temperature=…
    #[arg(long, value_name = "X", allow_negative_numbers = true, value_parser = range::temperature)]
    pub(in crate::cli) temperature: Option<f64>,
    /// Nucleus sampling: +responses_create_params.top_p=…
    #[arg(long, value_name = "X", allow_negative_numbers = true, value_parser = range::top_p)]
    pub(in crate::cli) top_p: Option<f64>,
    /// Maximum number of output tokens per model call: +responses_create_params.max_output_tokens=…
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = range::output_tokens)]
    pub(in crate::cli) max_output_tokens: Option<u64>,
    /// Maximum number of attempts per rollout, over all runs [default: 3]
    #[arg(long, value_name = "N", env = "NEMO_GYM_MAX_ROLLOUT_ATTEMPTS", value_parser = clap::value_parser!(u32).range(1..))]
    pub(in crate::cli) attempts: Option<u32>,
    /// Seconds allowed for one attempt
    #[arg(long, value_name = "SECS", default_value = "7200", value_parser = some_seconds)]
    pub(in crate::cli) attempt_timeout: Duration,
    /// Rollouts whose last model response was cut off: keep their reward, or fail without one
    #[arg(long, value_enum, default_value_t = Truncated::Score, value_name = "HOW")]
    pub(in crate::cli) truncated: Truncated,
    /// Seconds allowed for running rollouts after Ctrl-C or --fail-fast
    #[arg(long, value_name = "SECS", default_value = "20", value_parser = seconds)]
    pub(in crate::cli) stop_grace: Duration,
    /// How rollouts reach the servers: push calls them by name; pull lets workers take them, those of the cluster and those of run
    /// --pull-from URL [default: pull if workers of the head server's cluster serve the agent, else push]
    #[arg(long, value_enum, value_name = "HOW")]
    pub(in crate::cli) dispatch: Option<DispatchMode>,
    /// Address at which workers reach this collector [default: that of the route to the workers]
    #[arg(long, value_name = "HOST")]
    pub(in crate::cli) dispatch_host: Option<String>,
    /// Share of the pulled work that an agent gets while rollouts of several agents wait (repeatable) [default: 1 for each]
    #[arg(long = "weight", value_name = "NAME=N", value_parser = weight)]
    pub(in crate::cli) weights: Vec<(String, u32)>,
    /// Maximum number of attempts per rollout whose worker was lost or which reached no server, over all runs; not counted in --attempts
    #[arg(long, value_name = "N", default_value = "10", value_parser = clap::value_parser!(u32).range(1..))]
    pub(in crate::cli) lost_attempts: u32,
    /// Stop after N failed rollouts; 0 never stops [default: stop if the first 32 rollouts all fail with the same cause]
    #[arg(long, value_name = "N")]
    pub(in crate::cli) fail_fast: Option<u64>,
    /// Skip the servers' statistics at the end: +disable_aggregation=true
    #[arg(long)]
    pub(in crate::cli) disable_aggregation: bool,
    /// File or FIFO for events while the collection runs, as JSON lines: started, finished (reward), failed (class, cause)
    #[arg(long, value_name = "FILE")]
    pub(in crate::cli) events: Option<PathBuf>,
    /// Directory for a TensorBoard event file: mean reward by agent, rollouts per second, failures by class, every 10 s
    #[arg(long, value_name = "DIR")]
    pub(in crate::cli) tensorboard: Option<PathBuf>,
    /// Progress display: a bar, a line every few seconds, or none; auto shows the bar on a terminal and lines elsewhere
    #[arg(long, value_enum, default_value_t = ProgressMode::Auto, value_name = "HOW")]
    pub(in crate::cli) progress: ProgressMode,
    /// Print the summary as JSON
    #[arg(long)]
    pub(in crate::cli) json: bool,
}

#[derive(Clone, Debug, Args)]
pub(in crate::cli) struct PlanArgs {
    #[command(flatten)]
    pub(in crate::cli) sources: Sources,
    #[command(flatten)]
    pub(in crate::cli) starting: Starting,
    /// File of the tasks, one JSON object per line
    #[arg(long, short, value_name = "FILE")]
    pub(in crate::cli) input: PathBuf,
    /// Agent for all rows; by default, each row names its agent
    #[arg(long, short, value_name = "NAME")]
    pub(in crate::cli) agent: Option<String>,
    /// Rollouts a minute that are wanted
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(in crate::cli) target: Option<u64>,
    /// Rollouts in flight on a worker, as --pull-capacity of `run`
    #[arg(long, value_name = "N", default_value = "256", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(in crate::cli) in_flight: u32,
    /// Cores of a worker [default: those of this machine]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(in crate::cli) worker_cores: Option<u32>,
    /// Seconds that the measurement takes, about; longer if rollouts are slow
    #[arg(long, value_name = "SECS", default_value = "20", value_parser = seconds)]
    pub(in crate::cli) seconds: Duration,
    /// Seconds allowed for one attempt
    #[arg(long, value_name = "SECS", default_value = "7200", value_parser = some_seconds)]
    pub(in crate::cli) attempt_timeout: Duration,
    /// Print JSON
    #[arg(long)]
    pub(in crate::cli) json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(in crate::cli) enum DispatchMode {
    Push,
    Pull,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(in crate::cli) enum Truncated {
    Score,
    Fail,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(in crate::cli) enum SettingsChange {
    Reject,
    Mark,
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
    /// Head server to query [default: head_server of env.yaml, http://127.0.0.1:11000]
    #[arg(long, value_name = "URL", env = "HEAD_SERVER_URL")]
    pub(in crate::cli) head_url: Option<String>,
}

#[derive(Clone, Debug, Args)]
pub(in crate::cli) struct TopArgs {
    /// Print one screen and end; the default if the output is not a terminal
    #[arg(long)]
    pub(in crate::cli) once: bool,
    /// Head server to query [default: head_server of env.yaml, http://127.0.0.1:11000]
    #[arg(long, value_name = "URL", env = "HEAD_SERVER_URL")]
    pub(in crate::cli) head_url: Option<String>,
}

#[derive(Clone, Debug, Args)]
pub(in crate::cli) struct StuckArgs {
    /// Only this rollout: TASK-REPEAT, such as 17-3
    #[arg(value_name = "ROLLOUT")]
    pub(in crate::cli) rollout: Option<String>,
    /// Only waits that have lasted for this number of seconds
    #[arg(long, value_name = "SECS", default_value = "5", value_parser = seconds)]
    pub(in crate::cli) older: Duration,
    /// Maximum number of rollouts and other waits that are followed
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=50))]
    pub(in crate::cli) limit: u64,
    /// Print JSON
    #[arg(long)]
    pub(in crate::cli) json: bool,
    /// Head server to query [default: head_server of env.yaml, http://127.0.0.1:11000]
    #[arg(long, value_name = "URL", env = "HEAD_SERVER_URL")]
    pub(in crate::cli) head_url: Option<String>,
}

#[derive(Clone, Debug, Args)]
pub(in crate::cli) struct DoctorArgs {
    /// Configuration file whose model endpoints are called and whose head server's port is checked; repeatable, later files override earlier ones
    #[arg(long = "config", value_name = "FILE")]
    pub(in crate::cli) files: Vec<String>,
    /// Print JSON
    #[arg(long)]
    pub(in crate::cli) json: bool,
    /// Fail (exit code 1) unless this machine supports the transport
    #[arg(long, value_name = "NAME")]
    pub(in crate::cli) require_transport: Option<String>,
    /// Rollouts in flight that the limit on file descriptors must allow
    #[arg(long, value_name = "N", default_value = "1024", value_parser = clap::value_parser!(u32).range(1..))]
    pub(in crate::cli) concurrency: u32,
    /// File for the rollouts of a collection; its disk is checked [default: the working directory]
    #[arg(long, short, value_name = "FILE")]
    pub(in crate::cli) output: Option<PathBuf>,
    /// Seconds allowed for UCX to load and to list its devices
    #[arg(long, value_name = "SECS", default_value = "20", value_parser = seconds)]
    pub(in crate::cli) ucx_timeout: Duration,
    /// Seconds allowed for NCCL to load and to choose an interface
    #[arg(long, value_name = "SECS", default_value = "20", value_parser = seconds)]
    pub(in crate::cli) nccl_timeout: Duration,
    /// Do not have two processes of this machine call each other over each transport
    #[arg(long)]
    pub(in crate::cli) no_self_test: bool,
    /// Write what the checks ask this machine, with its answers, to a file that --replay judges elsewhere. Nothing else is checked
    #[arg(long, value_name = "FILE", conflicts_with_all = ["files", "require_transport", "output"])]
    pub(in crate::cli) record: Option<PathBuf>,
    /// Replace names of hosts and users, addresses and GUIDs in the recording; no finding changes. Recordings with the same WORD have the same stand-ins, so keep it
    /// secret [default: a random word]
    #[arg(long, value_name = "WORD", num_args = 0..=1, require_equals = true, default_missing_value = "", requires = "record")]
    pub(in crate::cli) redact: Option<String>,
    /// Replace the recording if it exists
    #[arg(long, requires = "record")]
    pub(in crate::cli) overwrite: bool,
    /// Judge recordings, or folders with the root of a machine, in the place of this machine. No library is loaded and nothing else is opened
    #[arg(long, value_name = "PATH", num_args = 1.., conflicts_with_all = ["record", "files", "require_transport", "output"])]
    pub(in crate::cli) replay: Vec<PathBuf>,
}

#[derive(Debug, Subcommand)]
pub(in crate::cli) enum ConfigCommand {
    /// Report the mistakes in configuration files, with location and fix
    #[command(after_help = OVERRIDES)]
    Check(Box<CheckArgs>),
    /// Print the merged configuration with secrets masked, and who has won among the sources of the settings of NCCL
    #[command(after_help = OVERRIDES)]
    Show(Box<ShowArgs>),
    /// Print one profile for the RoCE cards of this machine: variables of NCCL and UCX that agree
    #[command(after_help = "\
The cards, ports and interfaces are those of this machine; the traffic class and the service level belong to its switches. The lines fit a file of \
variables (docker run --env-file, compose: env_file).")]
    Roce(RoceArgs),
    /// Print the JSON schema of configuration files, for editors
    #[command(after_help = "\
The schema is that of this program, with its implementations. Editors with the YAML language server read it from a line at the \
top of a configuration file:

  PROGRAM config schema > gym.schema.json
  # yaml-language-server: $schema=gym.schema.json")]
    Schema,
}

#[derive(Clone, Debug, Args)]
pub(in crate::cli) struct CheckArgs {
    /// Configuration files; later files override earlier ones
    #[arg(value_name = "FILE")]
    pub(in crate::cli) named: Vec<String>,
    #[command(flatten)]
    pub(in crate::cli) sources: Sources,
    /// Treat warnings as errors
    #[arg(long)]
    pub(in crate::cli) strict: bool,
    /// Head server that is asked for servers which no file defines [default: head_server of the files, http://127.0.0.1:11000]
    #[arg(long, value_name = "URL", env = "HEAD_SERVER_URL")]
    pub(in crate::cli) head_url: Option<String>,
}

#[derive(Clone, Debug, Args)]
pub(in crate::cli) struct ShowArgs {
    /// Configuration files; later files override earlier ones
    #[arg(value_name = "FILE")]
    pub(in crate::cli) named: Vec<String>,
    #[command(flatten)]
    pub(in crate::cli) sources: Sources,
    /// Print the settings of NCCL, UCX and Gloo alone, each with its source and with what it hides
    #[arg(long)]
    pub(in crate::cli) settings: bool,
    /// Output format
    #[arg(long, value_enum, default_value_t = ShowFormat::Yaml, value_name = "FORMAT")]
    pub(in crate::cli) format: ShowFormat,
}

#[derive(Clone, Debug, Args)]
pub(in crate::cli) struct RoceArgs {
    /// Traffic class of the switch's lossless queue, 4 · DSCP + ECN, such as 106 [default: that of the driver, if it has one]
    #[arg(long, value_name = "CLASS")]
    pub(in crate::cli) traffic_class: Option<u8>,
    /// Service level: the priority of that queue
    #[arg(long, value_name = "LEVEL", value_parser = clap::value_parser!(u8).range(0..=15))]
    pub(in crate::cli) service_level: Option<u8>,
    /// Print JSON
    #[arg(long)]
    pub(in crate::cli) json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(in crate::cli) enum ShowFormat {
    Yaml,
    Json,
}

/// Parses seconds, with an optional fraction.
fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "write seconds, such as 30 or 0.5".to_owned())?;
    Duration::try_from_secs_f64(seconds).map_err(|_| "use a number from 0".to_owned())
}

/// Parses a number of seconds that is not zero.
fn some_seconds(text: &str) -> Result<Duration, String> {
    let seconds = seconds(text)?;
    if seconds.is_zero() { Err("use more than 0".to_owned()) } else { Ok(seconds) }
}

/// Parses the weight of a server.
fn weight(text: &str) -> Result<(String, u32), String> {
    let parsed = text.rsplit_once('=').and_then(|(name, weight)| Some((name.to_owned(), weight.parse().ok()?)));
    parsed
        .filter(|(name, weight)| !name.is_empty() && *weight > 0)
        .ok_or_else(|| "write a name and a number from 1, such as math_agent=3".to_owned())
}

/// Returns the options of all commands that take a value. The argument after such an option is neither an override nor
/// a command.
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

/// Returns the command line of a program with this name and these transports.
pub(in crate::cli) fn command(program: &str, transports: &[Transport]) -> clap::Command {
    let command = Cli::command().display_name(program.to_owned()).bin_name(program.to_owned());
    let named =
        |text: Option<&StyledStr>| text.map(ToString::to_string).unwrap_or_default().replace("PROGRAM", program);
    let help = named(command.get_after_help());
    let command = command.mut_subcommands(|command| match named(command.get_about()) {
        about if about.is_empty() => command,
        about => command.about(about),
    });
    let command = command.mut_subcommand("config", |config| {
        config.mut_subcommand("schema", |schema| {
            let help = named(schema.get_after_help());
            schema.after_help(help)
        })
    });
    with_transports(command, transports).after_help(help)
}

/// Makes empty variables of the environment unset ones: compose files write `VAR: ${VAR:-}`.
pub(in crate::cli) fn without_empty_variables(command: clap::Command) -> clap::Command {
    let command = command.mut_args(|argument| {
        let value = argument.get_env().and_then(std::env::var_os);
        if value.is_some_and(|value| value.is_empty()) { argument.env(Resettable::Reset) } else { argument }
    });
    command.mut_subcommands(without_empty_variables)
}

/// Returns the message of an invalid value that a variable of the environment gave; `None` for any other error.
pub(in crate::cli) fn invalid_variable(command: &clap::Command, error: &clap::Error) -> Option<String> {
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    let (option, value) = (text(ContextKind::InvalidArg)?, text(ContextKind::InvalidValue)?);
    let found = command.get_arguments().find_map(|argument| {
        let name = argument.get_env()?.to_str()?;
        let named = option.split(' ').next()?.strip_prefix("--") == argument.get_long();
        (named && std::env::var(name).is_ok_and(|set| set == value)).then(|| name.to_owned())
    });
    let Some(name) = found else {
        return command.get_subcommands().find_map(|command| invalid_variable(command, error));
    };
    let why = std::error::Error::source(error).map(|source| format!(": {source}")).unwrap_or_default();
    Some(format!("{name}={value}: invalid value for `{option}`{why}\n  fix: correct the variable, or unset it"))
}

/// Lists the program's transports in the help of the options that name some.
fn with_transports(command: clap::Command, transports: &[Transport]) -> clap::Command {
    let list = |names: &mut dyn Iterator<Item = &Transport>| {
        names.map(|transport| transport.as_str()).collect::<Vec<_>>().join(",")
    };
    let all = list(&mut transports.iter());
    let unconfigured = TransportPolicy::unconfigured();
    let default = list(&mut transports.iter().filter(|transport| unconfigured.allows(**transport)));
    command.mut_subcommands(|command| {
        let doctor = command.get_name() == "doctor";
        let command = command.mut_args(|argument| match argument.get_id().as_str() {
            "transport" => argument.help(format!(
                "Transports between servers: auto, or any of {all} [default: {default}]: ++transport=…"
            )),
            "require_transport" if doctor => {
                argument.help(format!("Fail (exit code 1) unless this machine supports the transport: {all}"))
            }
            "require_transport" => argument.help(format!(
                "Minimum transport, one of {all}; connecting fails instead of falling back below it: ++require_transport=…"
            )),
            _ => argument,
        });
        with_transports(command, transports)
    })
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

//! The servers under test, configured by the YAML of NeMo Gym's users: one process for each, or all in one process.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use gym_client::Transports;
use gym_client::collect::input::Repeats;
use gym_client::collect::{CollectOptions, ExistingOutput, RolloutCollector, ServerNames, connect_head};
use gym_client::config::{ConfigLoader, GymConfig, Overrides};
use gym_core::transport::InProcess;
use gym_core::{CancelToken, Endpoint, World};
use gym_examples::nemo::SingleToolCall;
use gym_server::metrics::{process_cpu, resident_bytes};
use gym_server::model::ScriptedItem;
use gym_server::{Servers, Stack, StackOptions};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::{bodies, mock};

/// The servers of one rollout; callees precede their callers.
pub const INSTANCES: [&str; 4] = [
    "policy_model",
    "example_single_tool_call",
    "example_single_tool_call_simple_agent",
    "example_single_tool_call_environment_server",
];

/// The agent that receives the rows.
pub const AGENT: &str = "example_single_tool_call_simple_agent";

/// The model that the agent calls.
#[derive(Clone, Copy, Debug)]
pub enum ModelAt {
    /// The mock endpoint, behind `openai_model`.
    Mock(SocketAddr),
    /// The embedded scripted model, with this latency per response.
    Embedded(Duration),
}

/// A directory for one benchmark, which is removed when this value is dropped.
#[derive(Debug)]
pub struct Scratch(PathBuf);

impl Scratch {
    /// Creates a directory in the build directory, which is on a disk and not in memory, because the ledger syncs.
    ///
    /// # Errors
    /// An error if the directory cannot be created.
    pub fn new(name: &str) -> Result<Self> {
        let program = std::env::current_exe()?;
        let target = program.ancestors().nth(2).context("the program lies in no build folder")?;
        let folder = target.join("bench").join(format!("{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).with_context(|| format!("make {}", folder.display()))?;
        Ok(Self(folder))
    }

    /// Returns a path in the directory.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // Best effort, because the directory is part of the build output.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Writes the configuration of one stack, and returns its path.
///
/// # Errors
/// An error if the file cannot be written.
pub fn write_config(scratch: &Scratch, name: &str, model: ModelAt, head_port: u16) -> Result<PathBuf> {
    let servers = include_str!("../../examples/configs/nemo/example_single_tool_call.yaml");
    let model = match model {
        ModelAt::Mock(address) => format!(
            "    openai_model:\n      entrypoint: app.py\n      openai_base_url: http://{address}/v1\n      \
             openai_api_key: none\n      openai_model: mock\n"
        ),
        ModelAt::Embedded(latency) => {
            format!("    scripted_model:\n      entrypoint: app.py\n      latency_ms: {}\n", latency.as_millis())
        }
    };
    let text = format!(
        "head_server:\n  host: 127.0.0.1\n  port: {head_port}\n{servers}\npolicy_model:\n  responses_api_models:\n{model}"
    );
    let path = scratch.path(name);
    fs::write(&path, text)?;
    Ok(path)
}

/// Writes the tasks that the SDK and the peer collect, and returns their path.
///
/// # Errors
/// An error if the file cannot be written.
pub fn write_rows(scratch: &Scratch) -> Result<PathBuf> {
    let path = scratch.path("rows.jsonl");
    let lines: Vec<String> = bodies::rows()
        .into_iter()
        .map(|mut row| {
            row["agent_ref"] = serde_json::json!({"type": "responses_api_agents", "name": AGENT});
            row.to_string()
        })
        .collect();
    fs::write(&path, lines.join("\n") + "\n")?;
    Ok(path)
}

/// Returns a port that was free a moment ago.
///
/// # Errors
/// An error if there is none.
pub fn free_port() -> Result<u16> {
    Ok(std::net::TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port())
}

fn load(config: &str) -> Result<GymConfig> {
    let folder = Path::new(config).parent().unwrap_or(Path::new("."));
    let overrides = Overrides::parse(Vec::<String>::new())?;
    Ok(ConfigLoader::new(folder).without_env_file().load(&[config], &overrides)?)
}

fn servers() -> Servers {
    Servers::stock()
        .scripted_policy(|_: &gym_core::RawObject, _: &mut fastrand::Rng| {
            vec![ScriptedItem::message("The weather in San Francisco is cold today.")]
        })
        .resources("example_single_tool_call", |_| Ok(SingleToolCall))
}

/// Serves one instance of a configuration, or the whole configuration for `all`.
///
/// # Errors
/// An error if the configuration is invalid, or if a server does not start.
pub async fn start(config: &str, only: &str) -> Result<Stack> {
    let only = if only == "all" { Vec::new() } else { vec![only.to_owned()] };
    let mut options = StackOptions::default();
    options.only = only;
    Ok(Stack::start(load(config)?, &servers(), &World::real(), options).await?)
}

/// The parameters of a collection.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Plan {
    /// The input file of tasks.
    pub input: PathBuf,
    /// The output file of rollouts.
    pub output: PathBuf,
    /// Rollouts per task.
    pub repeats: u32,
    /// Maximum rollouts in flight.
    pub concurrency: usize,
}

impl Plan {
    /// Returns the plan as an argument of a part.
    #[must_use]
    pub fn argument(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }

    /// Returns the options of the collector.
    #[must_use]
    pub fn options(&self) -> CollectOptions {
        let mut options = CollectOptions::new(&self.input, &self.output);
        options.materialize.repeats = Repeats::Each(self.repeats);
        options.driver.concurrency = self.concurrency;
        options.aggregate = false;
        options.existing = ExistingOutput::Overwrite;
        options
    }
}

/// The result of a collection.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Collection {
    /// Rows of the output file.
    pub rows: u64,
    /// Failed attempts.
    pub failures: u64,
    /// The total time, including reading the tasks and writing the last row.
    pub wall_s: f64,
    /// CPU time of the collecting process during the collection.
    pub cpu_s: f64,
    /// Maximum rollouts in flight at any moment.
    pub in_flight_max: u64,
    /// Resident memory before the collection, in bytes.
    pub resident_before: u64,
    /// Maximum resident memory during the collection, in bytes.
    pub resident_max: u64,
}

impl Collection {
    /// Returns the rollouts per second.
    #[must_use]
    pub fn rate(&self) -> f64 {
        self.rows as f64 / self.wall_s.max(1e-9)
    }
}

/// Collects from the servers of a head server.
///
/// # Errors
/// The error of the collector.
pub async fn collect_from_head(head: &str, plan: &Plan) -> Result<Collection> {
    let world = World::real();
    let transports = Transports::from_features(InProcess::new());
    let (client, names) = connect_head(&Endpoint::parse(head)?, transports, &world).await?;
    measured(RolloutCollector::new(client, names, world), plan).await
}

/// Collects from a stack in this process.
///
/// # Errors
/// The error of the stack or of the collector.
pub async fn collect_all_in_one(config: &str, plan: &Plan) -> Result<Collection> {
    let (stack, collector) = all_in_one(config, plan.concurrency).await?;
    let collection = measured(collector, plan).await;
    stack.stop().await;
    collection
}

/// Starts a stack in this process with capacity for `concurrency` rollouts, and returns it with a collector of its servers.
///
/// # Errors
/// The error of the stack.
pub async fn all_in_one(config: &str, concurrency: usize) -> Result<(Stack, RolloutCollector)> {
    let world = World::real();
    let config = load(config)?;
    let names = ServerNames::of_config(&config);
    let mut options = StackOptions::default();
    options.in_process_calls_max = concurrency.max(16_384);
    options.http.requests_max = options.in_process_calls_max;
    let stack = Stack::start(config, &servers(), &world, options).await?;
    let collector = RolloutCollector::new(stack.client().clone(), names, world);
    Ok((stack, collector))
}

async fn measured(collector: RolloutCollector, plan: &Plan) -> Result<Collection> {
    let resident_before = resident_bytes();
    let progress = collector.progress();
    let watched = Arc::clone(&progress);
    let watch = tokio::spawn(async move {
        let mut most = (resident_before, 0);
        loop {
            let now = watched.snapshot();
            most = (most.0.max(resident_bytes()), most.1.max(now.in_flight));
            if now.total > 0 && now.done() + now.given_up >= now.total {
                return most;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    let (began, cpu) = (Instant::now(), process_cpu());
    let collected = collector.collect(plan.options(), CancelToken::new()).await?;
    let (wall, cpu) = (began.elapsed(), process_cpu().saturating_sub(cpu));
    let (resident_max, in_flight_max) = watch.await?;
    let rows = memchr::memchr_iter(b'\n', &fs::read(&collected.files.rollouts)?).count() as u64;
    ensure!(rows == collected.snapshot.completed, "{rows} rows written, {} completed", collected.snapshot.completed);
    Ok(Collection {
        rows,
        failures: collected.snapshot.failures.values().sum(),
        wall_s: wall.as_secs_f64(),
        cpu_s: cpu.as_secs_f64(),
        in_flight_max,
        resident_before,
        resident_max,
    })
}

/// Starts the mock endpoint, and returns its process and its address once it listens.
///
/// # Errors
/// An error if the mock endpoint does not start.
pub async fn start_mock(delay_ms: u64) -> Result<(crate::role::Part, SocketAddr)> {
    let mut part = crate::role::Part::start(&["mock", &delay_ms.to_string()])?;
    let address = part.told(Duration::from_secs(10)).await?;
    debug_assert!(!mock::answer().is_empty());
    Ok((part, address))
}

/// The stack in separate processes: one for the head server and for each server, or one for all of them.
#[derive(Debug)]
pub struct Served {
    /// The processes: the head server first, then in the order of [`INSTANCES`].
    pub parts: Vec<crate::role::Part>,
    /// The address of each server by its name.
    pub addresses: Vec<(String, SocketAddr)>,
    /// The URL of the head server.
    pub head: String,
}

impl Served {
    /// Starts a stack, and waits until it serves. A process with one server has one worker thread: there are more processes than
    /// cores, and a single thread never wakes another.
    ///
    /// # Errors
    /// An error if a process does not start.
    pub async fn start(config: &Path, head_port: u16, separated: bool) -> Result<Self> {
        Self::start_with(config, head_port, separated, |_, arguments| crate::role::Part::start(arguments)).await
    }

    /// Starts a process for each server under valgrind, which writes the server's instructions to `SERVER.log` in `logs` when the
    /// server stops.
    ///
    /// # Errors
    /// An error if a process does not start.
    pub async fn start_counted(config: &Path, head_port: u16, logs: &Path) -> Result<Self> {
        let start = |name: &str, arguments: &[&str]| {
            crate::role::Part::start_counted(arguments, &logs.join(name).with_extension("log"))
        };
        Self::start_with(config, head_port, true, start).await
    }

    async fn start_with(
        config: &Path,
        head_port: u16,
        separated: bool,
        start: impl Fn(&str, &[&str]) -> Result<crate::role::Part>,
    ) -> Result<Self> {
        let config = config.to_str().context("a path that is not UTF-8")?;
        let mut served =
            Self { parts: Vec::new(), addresses: Vec::new(), head: format!("http://127.0.0.1:{head_port}") };
        let alone = ["head_server"].into_iter().chain(INSTANCES);
        let names: Vec<&str> = if separated { alone.collect() } else { vec!["all"] };
        for name in names {
            let mut part = start(name, &["serve", config, name, if separated { "1" } else { "2" }])?;
            let rows: Vec<(String, String)> = part.told(Duration::from_secs(60)).await?;
            for (name, url) in rows {
                let address = url.trim_start_matches("http://").parse().with_context(|| format!("{name} at {url}"))?;
                served.addresses.push((name, address));
            }
            served.parts.push(part);
        }
        Ok(served)
    }

    /// Returns the address of a server.
    ///
    /// # Errors
    /// An error if there is no server of this name.
    pub fn address(&self, name: &str) -> Result<SocketAddr> {
        let found = self.addresses.iter().find(|(known, _)| known == name);
        found.map(|(_, address)| *address).with_context(|| format!("no server {name}"))
    }

    /// Returns the process ids.
    #[must_use]
    pub fn pids(&self) -> Vec<u32> {
        self.parts.iter().map(crate::role::Part::pid).collect()
    }

    /// Returns the process of one server.
    #[must_use]
    pub fn pid(&self, name: &str) -> u32 {
        let at = INSTANCES.iter().position(|known| *known == name).map_or(0, |at| at + 1);
        self.parts.get(at).or(self.parts.first()).map_or(0, crate::role::Part::pid)
    }

    /// Stops the processes in order.
    ///
    /// # Errors
    /// An error if a process does not stop.
    pub async fn stop(mut self) -> Result<()> {
        while let Some(part) = self.parts.pop() {
            part.end(Duration::from_secs(20)).await?;
        }
        Ok(())
    }
}

//! Runs stock NeMo Gym on the same rows and the same mock endpoint.

use std::fs;
use std::net::SocketAddr;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use serde::Deserialize;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tokio::time::{Instant, sleep, timeout};

use crate::measure;
use crate::stack::{AGENT, Plan, Scratch, free_port};

/// Maximum start time; Ray and the imports take 15 to 20 s on an idle machine.
const START_TIMEOUT: Duration = Duration::from_secs(180);

/// Directories in which NeMo Gym looks for virtual environments.
const FOLDERS: [&str; 4] = [
    "resources_servers/example_single_tool_call",
    "responses_api_agents/simple_agent",
    "responses_api_models/openai_model",
    "environment_servers/legacy_agent",
];

/// A running NeMo Gym.
#[derive(Debug)]
pub struct Peer {
    child: Child,
    gym: PathBuf,
    work: PathBuf,
    head: SocketAddr,
    instances: Vec<Instance>,
}

#[derive(Clone, Debug, Deserialize)]
struct Instance {
    server_type: String,
    url: String,
    pid: u32,
}

impl Peer {
    /// Starts the stock servers in front of the mock endpoint, and waits until they are ready.
    ///
    /// # Errors
    /// An error if this Python has no `nemo-gym`, or if NeMo Gym does not start.
    pub async fn start(python: &Path, scratch: &Scratch, mock: SocketAddr) -> Result<Self> {
        let environment = python.parent().and_then(Path::parent).context("the Python is in no virtual environment")?;
        let gym = environment.join("bin/gym");
        ensure!(gym.exists(), "{} is missing: install nemo-gym 0.7.0 into that environment", gym.display());
        let work = scratch.path("peer");
        for folder in FOLDERS {
            let folder = work.join("venvs").join(folder);
            fs::create_dir_all(&folder)?;
            std::os::unix::fs::symlink(environment, folder.join(".venv"))?;
        }
        let head_port = free_port()?;
        let mut command = std::process::Command::new("env");
        // A child of a background job would ignore SIGINT, which NeMo Gym needs for a graceful stop.
        command.arg("--default-signal=INT").arg(&gym).args(["env", "start"]);
        command.args(["--resources-server", "example_single_tool_call", "--model-type", "openai_model"]);
        command.args(["--model", "mock", "--model-api-key", "none", "--model-url"]).arg(format!("http://{mock}/v1"));
        command.arg("+skip_venv_if_present=true").arg(format!("+uv_venv_dir={}", work.join("venvs").display()));
        command.arg("+head_server.host=127.0.0.1").arg(format!("+head_server.port={head_port}"));
        let log = fs::File::create(work.join("peer.log"))?;
        command.current_dir(&work).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).process_group(0);
        quiet(&mut command, environment)?;
        let child = Command::from(command).kill_on_drop(true).spawn().context("start the peer")?;
        let head = ([127, 0, 0, 1], head_port).into();
        let mut peer = Self { child, gym, work, head, instances: Vec::new() };
        let until = Instant::now() + START_TIMEOUT;
        loop {
            // Ready means that all servers respond; the list exists earlier.
            if let Ok((200, _)) = get(head, "/readyz").await
                && let Ok((200, body)) = get(head, "/server_instances").await
                && let Ok(instances) = serde_json::from_slice::<Vec<Instance>>(&body)
                && instances.len() == FOLDERS.len()
            {
                peer.instances = instances;
                return Ok(peer);
            }
            if let Some(status) = peer.child.try_wait()? {
                bail!("the peer ended with {status}: {}", peer.log_tail());
            }
            ensure!(Instant::now() < until, "the peer is not ready: {}", peer.log_tail());
            sleep(Duration::from_millis(500)).await;
        }
    }

    fn log_tail(&self) -> String {
        let log = fs::read_to_string(self.work.join("peer.log")).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(15)..].join("\n")
    }

    /// Returns the address and the process id of its server of this kind.
    ///
    /// # Errors
    /// An error if there is no such server.
    pub fn server(&self, kind: &str) -> Result<(SocketAddr, u32)> {
        let found = self.instances.iter().find(|instance| instance.server_type == kind);
        let found = found.with_context(|| format!("the peer has no {kind}"))?;
        Ok((found.url.trim_start_matches("http://").trim_end_matches('/').parse()?, found.pid))
    }

    /// Returns the processes of its servers, without the launcher and Ray.
    #[must_use]
    pub fn pids(&self) -> Vec<u32> {
        self.instances.iter().map(|instance| instance.pid).collect()
    }

    /// Returns the number of all its processes, and their resident memory in bytes. Shared pages count for each process.
    #[must_use]
    pub fn footprint(&self) -> (usize, u64) {
        let tree = measure::tree(self.child.id().unwrap_or(0));
        (tree.len(), tree.iter().map(|pid| measure::resident(*pid)).sum())
    }

    /// Runs its own collector over its own servers. Returns the rows, and the rollouts per second from its own status line.
    ///
    /// # Errors
    /// An error if the collector fails, or takes longer than `limit`.
    pub async fn collect(&self, plan: &Plan, limit: Duration) -> Result<(u64, f64)> {
        let mut command = std::process::Command::new(&self.gym);
        command.args(["eval", "run", "--no-serve", "--agent", AGENT]).arg("--input").arg(&plan.input);
        command.arg("--output").arg(&plan.output).args(["--num-repeats", &plan.repeats.to_string()]);
        command.args(["--concurrency", &plan.concurrency.to_string(), "+disable_health_check=true"]);
        command.args(["+head_server.host=127.0.0.1".to_owned(), format!("+head_server.port={}", self.head.port())]);
        command.current_dir(&self.work).stdin(Stdio::null());
        let environment = self.gym.parent().and_then(Path::parent).unwrap_or(Path::new("/"));
        quiet(&mut command, environment)?;
        let output = Command::from(command).kill_on_drop(true).output();
        let output = timeout(limit, output).await.context("the peer's collector takes too long")??;
        let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        let rows = fs::read(&plan.output).map_or(0, |rows| memchr::memchr_iter(b'\n', &rows).count() as u64);
        // Finished 400 / 400 rollouts (100%) in 2.56s (9360.0 rollouts/min)
        let line = text.lines().rev().find(|line| line.contains("rollouts (100%)"));
        let per_minute =
            line.and_then(|line| line.rsplit_once(" rollouts/min")?.0.rsplit_once('(')?.1.parse::<f64>().ok());
        let Some(per_minute) = per_minute else {
            let tail: Vec<&str> = text.lines().rev().take(10).collect();
            bail!("the peer's collector tells no rate: {}", tail.join("\n"));
        };
        Ok((rows, per_minute / 60.0))
    }

    /// Stops NeMo Gym with SIGINT, like Ctrl-C, and then kills it.
    ///
    /// # Errors
    /// An error if it does not end.
    pub async fn stop(mut self) -> Result<()> {
        let tree = measure::tree(self.child.id().unwrap_or(0));
        let signal = |pid: u32, signal| {
            if let Some(pid) = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw) {
                // A process that has already exited is not an error.
                let _ = rustix::process::kill_process(pid, signal);
            }
        };
        signal(tree[0], rustix::process::Signal::INT);
        let ended = timeout(Duration::from_secs(30), self.child.wait()).await;
        for pid in tree {
            signal(pid, rustix::process::Signal::KILL);
        }
        ended.context("the peer does not stop")??;
        Ok(())
    }
}

/// Disables telemetry and accounts, and puts the environment's own programs first on the path.
fn quiet(command: &mut std::process::Command, environment: &Path) -> Result<()> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let path = std::env::join_paths(std::iter::once(environment.join("bin")).chain(std::env::split_paths(&path)))?;
    command.env("PATH", path).env("WANDB_MODE", "disabled").env("RAY_USAGE_STATS_ENABLED", "0");
    Ok(())
}

/// Sends a `GET` over a new connection.
///
/// # Errors
/// An error if there is no response within ten seconds.
pub async fn get(address: SocketAddr, path: &str) -> Result<(u16, Vec<u8>)> {
    let exchange = async {
        let mut stream = TcpStream::connect(address).await?;
        let request = format!("GET {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await?;
        anyhow::Ok(answer)
    };
    let answer = timeout(Duration::from_secs(10), exchange).await.context("no answer")??;
    let end = memchr::memmem::find(&answer, b"\r\n\r\n").context("an answer without a head")?;
    let status = std::str::from_utf8(answer.get(9..12).unwrap_or_default())?.parse()?;
    Ok((status, answer[end + 4..].to_vec()))
}

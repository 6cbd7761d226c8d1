//! Plants stalls in real processes, and checks that `rgym stuck` names the wait that blocks each of them.
//!
//! | stall | kinds |
//! |---|---|
//! | `servers` | a tool and a verifier that never answer, a tool that blocks its thread, stopped processes of each role, a stopped worker |
//! | `endpoints` | a model endpoint that refuses, is busy, or never responds |
//! | `collectors` | a disk that stands still, a queue without a worker, a pause, a backoff, a server that is not there |
//! | `groups` | a stopped rank, a rank that hangs, a call behind another one, a turn of another group |
//!
//! No test harness: this executable is its own command line, servers, collectors, controllers and ranks.

#![expect(clippy::disallowed_methods, reason = "other processes have no event to wait for")]

mod collectors;
mod groups;
mod servers;

use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use gym_core::testing::free_port;
use libtest_mimic::{Arguments, Trial};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// Generous: the machine may be busy with other builds.
const LONG: Duration = Duration::from_secs(60);

fn main() {
    groups::workers().enter();
    let arguments: Vec<String> = std::env::args().collect();
    let cases: [(&str, fn()); 7] = [
        ("servers_that_do_not_answer_are_named", servers::servers_that_do_not_answer_are_named),
        ("stopped_processes_are_named", servers::stopped_processes_are_named),
        ("frozen_processes_with_all_servers_are_named", servers::frozen_processes_with_all_servers_are_named),
        ("model_endpoints_that_do_not_answer_are_named", servers::model_endpoints_that_do_not_answer_are_named),
        ("pulled_rollouts_are_followed_to_their_worker", servers::pulled_rollouts_are_followed_to_their_worker),
        ("waits_of_collectors_are_named", collectors::waits_of_collectors_are_named),
        ("ranks_and_turns_are_named", groups::ranks_and_turns_are_named),
    ];
    match arguments.get(1).map(String::as_str) {
        Some("cli") => {
            let words = std::iter::once("rgym".into()).chain(arguments[2..].iter().map(Into::into));
            let ended = gym_server::cli::main_with(servers::servers(), words);
            std::process::exit(i32::from(ended != std::process::ExitCode::SUCCESS));
        }
        Some("be-collector") => collectors::be_collector(&arguments[2]),
        Some("be-controller") => groups::be_controller(&arguments[2]),
        _ => {
            let trial = |(name, case): (&str, fn())| {
                Trial::test(name, move || {
                    case();
                    Ok(())
                })
            };
            // Each case stops and starts a stack.
            let arguments = Arguments { test_threads: Some(1), ..Arguments::from_args() };
            libtest_mimic::run(&arguments, cases.into_iter().map(trial).collect()).exit()
        }
    }
}

/// A folder with its own list of local programs.
struct Ground {
    folder: tempfile::TempDir,
    head_port: u16,
}

/// A process, which is killed if the test fails.
struct Running(Child);

impl Running {
    fn pid(&self) -> i32 {
        i32::try_from(self.0.id()).expect("a pid")
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Stops a process, and waits until each of its threads has stopped: a thread on another core runs on for a moment.
fn stop(pid: i32) {
    kill_process(Pid::from_raw(pid).expect("not zero"), Signal::STOP).expect("stops");
    let stands = |task: std::fs::DirEntry| {
        let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
        stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with('T'))
    };
    let began = Instant::now();
    while !std::fs::read_dir(format!("/proc/{pid}/task")).expect("a process").flatten().all(stands) {
        assert!(began.elapsed() < LONG, "process {pid} does not stop");
        std::thread::sleep(Duration::from_millis(5));
    }
}

impl Ground {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().expect("a folder"), head_port: free_port() }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn head(&self) -> String {
        format!("http://127.0.0.1:{}", self.head_port)
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(std::env::current_exe().expect("own path"));
        command.args(arguments).current_dir(self.folder.path());
        command.env("XDG_RUNTIME_DIR", self.folder.path()).env_remove("HEAD_SERVER_URL").env_remove("RAY_ADDRESS");
        command
    }

    /// Starts a program and waits for a line of its output.
    fn start(&self, arguments: &[&str], ready: &str) -> (Running, String) {
        let mut child = self.command(arguments).stdout(Stdio::piped()).spawn().expect("starts");
        let out = BufReader::new(child.stdout.take().expect("piped"));
        let running = Running(child);
        let line = out.lines().map_while(Result::ok).find(|line| line.starts_with(ready));
        (running, line.unwrap_or_else(|| panic!("{arguments:?} ended before `{ready}`")))
    }

    /// Starts servers of the configuration.
    fn serve(&self, arguments: &[&str]) -> Running {
        let port = format!("+head_server.port={}", self.head_port);
        let words = [&["cli", "run", "--threads", "4", "--config", "gym.yaml", &port][..], arguments].concat();
        self.start(&words, "ready: ").0
    }

    /// Starts a collector that stalls.
    fn collect(&self, name: &str, dispatch: &str, inputs: &[Value]) -> Running {
        let rows: String = inputs.iter().map(|row| format!("{row}\n")).collect();
        std::fs::write(self.file(&format!("{name}.jsonl")), rows).expect("writes");
        let (input, output, head) = (format!("{name}.jsonl"), format!("out/{name}.jsonl"), self.head());
        let words = ["cli", "collect", "--agent", "room_agent", "--input", &input, "--output", &output];
        let more = ["--head-url", &head, "--dispatch", dispatch, "--concurrency", "64"];
        let mut command = self.command(&[&words[..], &more].concat());
        Running(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("starts"))
    }

    /// Asks `rgym stuck` until the leaf of this rollout, or of any call if there is none, has these words. The stall lasts, so the next answer must be
    /// the same.
    fn expect(&self, stall: &str, rollout: Option<&str>, words: &[&str]) {
        let began = Instant::now();
        loop {
            let leaf = self.leaf(rollout, words);
            if leaf.is_ok() && self.leaf(rollout, words).is_ok() {
                println!("  {stall}: {}", leaf.unwrap_or_default());
                return;
            }
            assert!(began.elapsed() < LONG, "{stall}: no leaf has {words:?}: {}", leaf.unwrap_or_else(|all| all));
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Asks `rgym stuck` until some chain has a hop with these words.
    fn expect_hop(&self, stall: &str, words: &str) {
        let began = Instant::now();
        loop {
            let text = self.leaf(None, &["no leaf has this"]).expect_err("the report");
            let report: Value = serde_json::from_str(&text).unwrap_or_default();
            let chains = report["chains"].as_array().into_iter().flatten();
            let mut hops = chains.flat_map(|chain| chain["hops"].as_array().into_iter().flatten());
            if hops.any(|hop| hop["text"].as_str().is_some_and(|text| text.contains(words))) {
                return;
            }
            assert!(began.elapsed() < LONG, "{stall}: no hop has {words:?}: {text}");
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    fn leaf(&self, rollout: Option<&str>, words: &[&str]) -> Result<String, String> {
        let head = self.head();
        let arguments = ["cli", "stuck", "--json", "--older", "0.5", "--limit", "50", "--head-url", &head];
        let out = self.command(&[&arguments[..], rollout.as_slice()].concat()).output().expect("runs");
        let text = String::from_utf8_lossy(&out.stdout).into_owned();
        let report: Value = serde_json::from_str(&text).map_err(|_| text.clone())?;
        let leaves = report["chains"].as_array().into_iter().flatten().filter_map(|chain| chain["leaf"].as_str());
        let right = leaves.into_iter().find(|leaf| words.iter().all(|word| leaf.contains(word)));
        right.map(str::to_owned).ok_or(text)
    }
}

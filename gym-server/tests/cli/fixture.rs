//! What the cases share: a folder with a configuration and tasks, the programs that run in it, and a model endpoint.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use gym_core::testing::free_port;

use crate::PROGRAM;

pub(crate) const CONFIG: &str = "\
policy_model:
  responses_api_models:
    scripted_model:
      entrypoint: app.py
digit:
  resources_servers:
    digit:
      entrypoint: app.py
      domain: math
digit_agent:
  responses_api_agents:
    simple_agent:
      entrypoint: app.py
      resources_server: {type: resources_servers, name: digit}
      model_server: {type: responses_api_models, name: policy_model}
";

/// The arguments of a collection in a [`TestFolder`].
pub(crate) const TASKS: [&str; 6] = ["-a", "digit_agent", "-i", "tasks.jsonl", "-o", "out/rollouts.jsonl"];
/// The servers of the configuration, each of which can run in its own process.
pub(crate) const SERVICES: [&str; 4] = ["policy_model", "digit", "digit_agent", "digit_environment_server"];

/// A directory with a configuration and tasks, and a port for its head server.
pub(crate) struct TestFolder {
    pub(crate) directory: tempfile::TempDir,
    pub(crate) head_port: u16,
}

impl TestFolder {
    pub(crate) fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("gym.yaml"), CONFIG).unwrap();
        // The configuration needs the port before the head server listens.
        Self { directory, head_port: free_port() }
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub(crate) fn tasks(&self, rows: impl IntoIterator<Item = serde_json::Value>) {
        let rows: String = rows.into_iter().map(|row| format!("{row}\n")).collect();
        std::fs::write(self.file("tasks.jsonl"), rows).unwrap();
    }

    pub(crate) fn head(&self) -> String {
        format!("http://127.0.0.1:{}", self.head_port)
    }

    /// Returns the option that makes the head server listen on this port.
    pub(crate) fn port(&self) -> String {
        format!("+head_server.port={}", self.head_port)
    }

    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(arguments).current_dir(self.directory.path()).env(PROGRAM, "1").env_remove("HEAD_SERVER_URL");
        command
    }

    pub(crate) fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    /// Returns the command `rgym collect` for the tasks.
    pub(crate) fn collect(&self, arguments: &[&str]) -> Command {
        self.command(&[&["collect"], &TASKS[..], arguments].concat())
    }

    /// Runs `rgym collect` to its end, with running servers.
    pub(crate) fn collected(&self, arguments: &[&str]) -> Output {
        self.collect(&[&["--head-url", &self.head()], arguments].concat()).output().unwrap()
    }

    pub(crate) fn status(&self) -> serde_json::Value {
        let (out, _) = ended_with(&self.run(&["status", "--json", "--head-url", &self.head()]), 0);
        serde_json::from_str(&out).unwrap()
    }

    /// Starts `rgym run …` and waits for its ready line.
    pub(crate) fn start(&self, arguments: &[&str]) -> Started {
        let port = self.port();
        let arguments = [&["run", "--config", "gym.yaml", &port][..], arguments].concat();
        let mut child = self.command(&arguments).stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut said = Vec::new();
        for line in lines.by_ref() {
            said.push(line.unwrap());
            if said.last().unwrap().starts_with("ready: ") {
                return Started { child, said };
            }
        }
        panic!("{arguments:?} ended before it was ready, with {:?}: {said:?}", child.wait());
    }

    /// Starts each of [`SERVICES`] in its own process; these processes find each other through the head server.
    pub(crate) fn start_services(&self, arguments: &[&str]) -> Vec<Started> {
        let head = self.head();
        let start = |name| self.start(&[&["--serve", name, "--head-url", &head], arguments].concat());
        SERVICES.into_iter().map(start).collect()
    }

    pub(crate) fn rollouts(&self) -> Vec<serde_json::Value> {
        let text = std::fs::read_to_string(self.file("out/rollouts.jsonl")).unwrap_or_default();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// Returns the text of each file, by its path.
    pub(crate) fn contents(&self) -> BTreeMap<String, Vec<u8>> {
        let files = ["", "out"].into_iter().flat_map(|folder| std::fs::read_dir(self.file(folder)).unwrap());
        let files = files.map(|entry| entry.unwrap().path()).filter(|path| path.is_file());
        let named = |path: PathBuf| path.strip_prefix(self.directory.path()).unwrap().display().to_string();
        files.map(|path| (named(path.clone()), std::fs::read(path).unwrap())).collect()
    }

    /// Replaces the model by one with an endpoint on this port.
    pub(crate) fn call_engine(&self, port: u16) {
        let model = format!(
            "vllm_model:\n      entrypoint: app.py\n      base_url: http://127.0.0.1:{port}/v1\n      model: m\n      api_key: none"
        );
        let config = CONFIG.replace("scripted_model:\n      entrypoint: app.py", &model);
        std::fs::write(self.file("gym.yaml"), config).unwrap();
    }

    /// Makes the gate that rollouts with this `wait_for` wait at.
    pub(crate) fn gate(&self) -> PathBuf {
        let gate = self.file("gate");
        let all = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(rustix::fs::CWD, &gate, rustix::fs::FileType::Fifo, all, 0).unwrap();
        gate
    }

    /// Reports the state until it is as the test expects it.
    #[track_caller]
    pub(crate) fn status_until(&self, condition: impl Fn(&serde_json::Value) -> bool) {
        until(|| {
            let status = self.status();
            if condition(&status) { Ok(()) } else { Err(status.to_string()) }
        });
    }

    /// Runs a command until it ends with 0 and says these words: a server on a busy machine may answer it too late. Returns all that it said.
    #[track_caller]
    pub(crate) fn says_in_the_end(&self, arguments: &[&str], words: &str) -> String {
        until(|| {
            let (out, _) = ended_with(&self.run(arguments), 0);
            if out.contains(words) { Ok(out) } else { Err(out) }
        })
    }
}

/// Looks again and again. What it does takes the time of a program's start, so nothing spins.
#[track_caller]
#[expect(clippy::disallowed_methods, reason = "another process has no event to wait for")]
pub(crate) fn until<T>(mut look: impl FnMut() -> Result<T, String>) -> T {
    let began = Instant::now();
    loop {
        match look() {
            Ok(found) => return found,
            Err(instead) => assert!(began.elapsed() < Duration::from_secs(60), "it did not happen: {instead}"),
        }
    }
}

/// Opens a gate for all rollouts that wait at it, and for those that come to it while the result lives.
pub(crate) fn open_gate(gate: &Path) -> File {
    // For reading too, so that it does not wait for a rollout.
    let mut opened = File::options().read(true).write(true).open(gate).unwrap();
    opened.write_all(b"open").unwrap();
    opened
}

/// A running program, which is killed if the test fails.
pub(crate) struct Started {
    pub(crate) child: Child,
    pub(crate) said: Vec<String>,
}

impl Started {
    pub(crate) fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).unwrap();
    }

    pub(crate) fn interrupt(mut self) -> Option<i32> {
        self.signal(rustix::process::Signal::INT);
        self.child.wait().unwrap().code()
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) fn get(port: u16, route: &str) -> String {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    write!(stream, "GET {route} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

pub(crate) fn row(digits: &str, number: usize) -> serde_json::Value {
    let input = format!("task {number}");
    serde_json::json!({"responses_create_params": {"input": [{"role": "user", "content": input}]}, "digits": digits})
}

#[track_caller]
pub(crate) fn ended_with(output: &Output, code: i32) -> (String, String) {
    let out = String::from_utf8(output.stdout.clone()).unwrap();
    let error = String::from_utf8(output.stderr.clone()).unwrap();
    assert_eq!(output.status.code(), Some(code), "{out}{error}");
    (out, error)
}

/// Answers requests for the list of models, and all other requests with this status and body, until the program ends.
pub(crate) fn start_engine(port: u16, status: u16, body: &'static str) {
    let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = BufReader::new(stream.unwrap());
            let (mut head, mut length) = (String::new(), 0);
            while stream.read_line(&mut head).unwrap_or(0) > 0 && !head.ends_with("\r\n\r\n") {}
            for line in head.lines() {
                length = line.strip_prefix("content-length: ").map_or(length, |length| length.parse().unwrap());
            }
            stream.read_exact(&mut vec![0; length]).unwrap();
            let (status, body) =
                if head.starts_with("GET ") { (200, r#"{"data":[{"id":"m"}]}"#) } else { (status, body) };
            let length = body.len();
            let answer = format!("HTTP/1.1 {status} x\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}");
            stream.get_mut().write_all(answer.as_bytes()).unwrap();
        }
    });
}

/// Reads the error output of a program until a line has these words; returns everything until then.
#[track_caller]
pub(crate) fn said_until(lines: &mut impl Iterator<Item = std::io::Result<String>>, words: &str) -> String {
    let mut said = String::new();
    for line in lines {
        said.push_str(&line.unwrap());
        said.push('\n');
        if said.lines().last().unwrap().contains(words) {
            return said;
        }
    }
    panic!("no line has {words:?}: {said}");
}

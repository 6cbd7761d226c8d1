//! A complete stack on free ports, a misbehaving upstream, and functions that send bad input to them.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use gym_client::collect::{CollectOptions, CollectSummary, RolloutCollector, ServerNames, connect_head};
use gym_client::transport::http::HttpConfig;
use gym_client::{ServerClient, Transports};
use gym_core::testing::bad_input;
use gym_core::transport::InProcess;
use gym_core::{CancelToken, Endpoint, Result, World};
use gym_server::{Stack, StackOptions};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::process::Command;
use tokio::time::{Instant, sleep, timeout};

use super::Got;
use super::servers;
use super::support::{self, examples};
use super::upstream::Upstream;

/// The largest request body that the stack accepts.
pub(crate) const BODY_BYTES_MAX: usize = 1 << 20;
/// Maximum silence of a client.
pub(crate) const SILENCE_MAX: Duration = Duration::from_secs(1);
/// The limit of one wait in a case.
pub(crate) const WAIT_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum characters of a message in the table.
const SHOWN_CHARS: usize = 220;

pub(crate) struct Ground {
    folder: tempfile::TempDir,
    stack: Stack,
    head: String,
    /// The address `host:port` of each instance.
    addresses: BTreeMap<String, String>,
    client: ServerClient,
    names: ServerNames,
    world: World,
    pub(crate) upstream: Upstream,
    /// A row of the math environment that the script solves.
    solved: String,
    folders: AtomicUsize,
}

/// An HTTP response.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: String,
}

impl Answer {
    pub(crate) fn got(self) -> Got {
        Got::new(format!("HTTP {}", self.status), self.body)
    }
}

impl Ground {
    pub(crate) async fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let upstream = Upstream::start().await;
        let config = folder.path().join("bad.yaml");
        std::fs::write(&config, servers::configuration(&upstream.address().to_string())).unwrap();
        let files = [examples().join("configs/quickstart.yaml"), config];
        let mut http = HttpConfig::default();
        http.request_bytes_max = BODY_BYTES_MAX;
        http.head_timeout = SILENCE_MAX;
        http.body_timeout = SILENCE_MAX;
        let mut options = StackOptions::default();
        options.http = http;
        options.stop_grace = Duration::from_secs(1);
        let (stack, head) = support::start(&files, &[], &servers::servers(), options).await;
        let addresses = stack.servers().iter().map(|row| (row.name.clone(), row.url.replace("http://", ""))).collect();
        let world = World::real();
        let endpoint = Endpoint::parse(&head).unwrap();
        // Over HTTP only, like a collector on another machine.
        let transports = Transports::from_features(InProcess::new());
        let (client, _) = connect_head(&endpoint, transports, &world).await.unwrap();
        let names = stack.names().clone();
        let tasks = std::fs::read_to_string(examples().join("data/math.jsonl")).unwrap();
        let mut ground = Self {
            folder,
            stack,
            head,
            addresses,
            client,
            names,
            world,
            upstream,
            solved: String::new(),
            folders: AtomicUsize::new(0),
        };
        for task in tasks.lines() {
            if ground.reward_of(task).await == Some(1.0) {
                ground.solved = task.to_owned();
                break;
            }
        }
        assert!(!ground.solved.is_empty(), "the script solves none of the math tasks");
        ground
    }

    pub(crate) async fn stop(self) {
        timeout(WAIT_TIMEOUT, self.stack.stop()).await.expect("the stack stops");
    }

    pub(crate) fn head(&self) -> &str {
        &self.head
    }

    pub(crate) fn address(&self, server: &str) -> &str {
        &self.addresses[server]
    }

    /// Returns a row that the script solves.
    pub(crate) fn solved(&self) -> &str {
        &self.solved
    }

    /// Returns `count` solved rows, each a separate task.
    pub(crate) fn solved_rows(&self, count: usize) -> String {
        (0..count).map(|at| format!("{{\"n\":{at},{}\n", &self.solved[1..])).collect()
    }

    /// Returns a new directory.
    pub(crate) fn fresh(&self) -> PathBuf {
        let folder = self.folder.path().join(self.folders.fetch_add(1, Ordering::Relaxed).to_string());
        std::fs::create_dir(&folder).unwrap();
        folder
    }

    async fn reward_of(&self, row: &str) -> Option<f64> {
        let answer = self.post("math_environment_server", "/run", row).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        serde_json::from_str::<Value>(&answer.body).unwrap()["reward"].as_f64()
    }

    pub(crate) async fn post(&self, server: &str, path: &str, body: &str) -> Answer {
        self.send(self.address(server), &request("POST", path, &[("content-type", "application/json")], body)).await
    }

    /// Sends bytes on a new connection, and reads the response until the server closes the connection.
    pub(crate) async fn send(&self, address: &str, bytes: &[u8]) -> Answer {
        let mut stream = connect(address).await;
        // A server can respond and close before it has read everything.
        let _ = timeout(WAIT_TIMEOUT, stream.write_all(bytes)).await.expect("the server reads");
        read_answer(&mut stream).await
    }

    /// Collects the rows, over HTTP, with one attempt each.
    pub(crate) async fn collect(&self, rows: impl AsRef<[u8]>, adjust: impl FnOnce(&mut CollectOptions)) -> Got {
        let folder = self.fresh();
        let input = folder.join("tasks.jsonl");
        std::fs::write(&input, rows).unwrap();
        let mut options = CollectOptions::new(input, folder.join("rollouts.jsonl"));
        options.driver.attempts_max = 1;
        adjust(&mut options);
        outcome(self.run(options).await)
    }

    /// Runs a collection and returns its result; panics if the run does not end.
    pub(crate) async fn run(&self, options: CollectOptions) -> Result<CollectSummary> {
        let collector = RolloutCollector::new(self.client.clone(), self.names.clone(), self.world.clone());
        let collected = timeout(WAIT_TIMEOUT, Box::pin(collector.collect(options, CancelToken::new()))).await;
        let collected = collected.expect("the collection ends")?;
        let snapshot = &collected.snapshot;
        assert_eq!(snapshot.total, snapshot.done(), "every row has a rollout or a failure: {snapshot:?}");
        Ok(collected)
    }

    /// Runs one row of one of the test's agents, with valid input.
    pub(crate) async fn roll_out(&self, agent: &str) -> Got {
        let row = format!(
            r#"{{"responses_create_params":{{"input":"2+2?"}},"expected_answer":"4","agent_ref":{{"name":"{agent}"}}}}"#
        );
        self.collect(row, |_| {}).await
    }

    /// Runs the command line with `folder` as the working directory.
    pub(crate) async fn command_line(&self, folder: &std::path::Path, arguments: &[&str]) -> Got {
        let mut command = support::gym_examples(folder);
        command.args(arguments);
        self.output_of(command).await
    }

    pub(crate) async fn output_of(&self, mut command: Command) -> Got {
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let output = timeout(WAIT_TIMEOUT, child.wait_with_output()).await.expect("the command ends").unwrap();
        let text = [output.stderr, output.stdout].concat();
        let outcome = output.status.code().map_or_else(|| output.status.to_string(), |code| format!("exit {code}"));
        Got::new(outcome, String::from_utf8_lossy(&text))
    }
}

impl bad_input::Ground for Ground {
    /// Checks that every server reports that it is healthy and idle, and that a rollout scores as before.
    async fn assert_well(&self) {
        assert_eq!(self.reward_of(&self.solved).await, Some(1.0), "a correct rollout");
        let deadline = Instant::now() + WAIT_TIMEOUT;
        for (name, address) in &self.addresses {
            loop {
                let answer = self.send(address, &request("GET", "/health", &[], "")).await;
                assert_eq!(answer.status, 200, "{name}: {answer:?}");
                let health: Value = serde_json::from_str(&answer.body).unwrap();
                assert_eq!(health["status"], "ok", "{name}");
                if health["in_flight"].as_u64().unwrap_or_default() == 0 {
                    break;
                }
                assert!(Instant::now() < deadline, "{name} still has requests in flight: {health}");
                sleep(Duration::from_millis(5)).await;
            }
        }
    }

    /// Returns the text for the table. If the relevant part is far from the start of a long text, the result begins at that part.
    fn shown(&self, text: &str, counts: &[&str]) -> String {
        let at = counts.first().and_then(|part| text.find(part)).filter(|at| *at > SHOWN_CHARS / 2);
        let text = at.map_or_else(|| text.to_owned(), |at| format!("… {}", &text[at..]));
        let own = |part: &str| part.trim_start_matches('/').trim_start_matches(|c: char| c.is_ascii_digit()).to_owned();
        let folder = self.folder.path().display().to_string();
        let mut parts = text.split(&folder);
        let first = parts.next().unwrap_or_default().to_owned();
        let text = parts.fold(first, |text, part| text + "…" + &own(part));
        let text = text.split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|");
        let parts: Vec<&str> = text.split("127.0.0.1:").collect();
        let shown = parts.iter().enumerate().map(|(at, part)| match at {
            0 => (*part).to_owned(),
            _ => format!("127.0.0.1:PORT{}", part.trim_start_matches(|c: char| c.is_ascii_digit())),
        });
        let shown: String = shown.collect();
        match shown.char_indices().nth(SHOWN_CHARS) {
            Some((end, _)) => format!("{}…", &shown[..end]),
            None => shown,
        }
    }
}

/// Describes the result of a collection: rejected, rows, or rows of the failures file.
pub(crate) fn outcome(collected: Result<CollectSummary>) -> Got {
    let collected = match collected {
        Ok(collected) => collected,
        Err(error) => return Got::refusal(&error),
    };
    let lines = |path: &std::path::Path| -> Vec<Value> {
        let text = std::fs::read_to_string(path).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let failures = lines(&collected.files.failures);
    if let Some(failure) = failures.last() {
        let kept = lines(&collected.files.rollouts).len() + failures.len();
        assert_eq!(kept as u64, collected.snapshot.total, "every row has a line in one of the two files");
        let part = |key: &str| failure[key].as_str().unwrap_or_default().to_owned();
        let text = format!("{} {}", part("_ng_failure_message"), part("_ng_failure_response_body"));
        return Got::new(format!("failures file: {}", part("_ng_failure_class")), text);
    }
    let rows = lines(&collected.files.rollouts);
    assert_eq!(rows.len() as u64, collected.snapshot.total);
    let last = rows.last().map(Value::to_string).unwrap_or_default();
    let unscored: u64 = collected.snapshot.scores.values().map(|score| score.unscored).sum();
    let without = if unscored > 0 { " without reward" } else { "" };
    Got::new(format!("recorded: {}{without}", rows.len()), last)
}

pub(crate) async fn connect(address: &str) -> TcpStream {
    timeout(WAIT_TIMEOUT, TcpStream::connect(address)).await.expect("the server accepts").unwrap()
}

/// Reads until the server closes the connection, as it must.
pub(crate) async fn read_answer(stream: &mut TcpStream) -> Answer {
    let mut bytes = Vec::new();
    // The server may reset the connection after its response if the client is still sending.
    let _ = timeout(WAIT_TIMEOUT, stream.read_to_end(&mut bytes)).await.expect("the server answers or closes");
    let text = String::from_utf8_lossy(&bytes).into_owned();
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
    Answer { status, head: head.to_owned(), body: body.to_owned() }
}

/// Returns a request that closes its connection.
pub(crate) fn request(method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> Vec<u8> {
    let mut text = format!("{method} {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n");
    for (name, value) in headers {
        text.push_str(&format!("{name}: {value}\r\n"));
    }
    text.push_str(&format!("content-length: {}\r\n\r\n{body}", body.len()));
    text.into_bytes()
}

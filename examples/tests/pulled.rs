//! Pulled work between real processes: a head server with a pool, workers, and collectors that pull and push. A worker is killed or
//! stopped in the middle of a collection; the rows are those of an undisturbed one.

#![expect(clippy::unwrap_used, reason = "an integration test: a panic is its failure")]

mod support;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use gym_client::collect::OutputFiles;
use rustix::process::{Pid, Signal, kill_process};
use support::{PATIENCE, examples, gym_examples};
use tokio::io::{AsyncBufReadExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};
use tokio::time::timeout;

const TASKS: usize = 100;
const REPEATS: usize = 4;
const ROLLOUTS: usize = TASKS * REPEATS;
const LATENCY_MS: &str = "+policy_model.responses_api_models.scripted_model.latency_ms=[50,150]";

/// A server process, killed on drop.
struct Server {
    child: Child,
    said: Lines<BufReader<ChildStdout>>,
}

impl Server {
    fn start(command: &mut Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let said = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, said }
    }

    /// Waits for the line that begins with this text, and returns the rest of it.
    async fn says(&mut self, start: &str) -> String {
        let found = async {
            while let Some(line) = self.said.next_line().await.unwrap() {
                if let Some(rest) = line.strip_prefix(start) {
                    return rest.to_owned();
                }
            }
            panic!("the server ended without `{start}`");
        };
        timeout(PATIENCE, found).await.unwrap_or_else(|_| panic!("no line `{start}`"))
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.child.id().unwrap().cast_signed()).unwrap();
        kill_process(pid, signal).unwrap();
    }
}

struct Ground {
    folder: tempfile::TempDir,
    input: PathBuf,
    /// The head server, and a pool in front of the math agent.
    _head: Server,
    url: String,
    workers: Vec<Server>,
}

impl Ground {
    async fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let input = folder.path().join("tasks.jsonl");
        let text = std::fs::read_to_string(examples().join("data/math.jsonl")).unwrap();
        let rows: Vec<&str> = text.lines().take(TASKS).collect();
        std::fs::write(&input, rows.join("\n") + "\n").unwrap();
        let pool = folder.path().join("pool.yaml");
        std::fs::write(
            &pool,
            "math_pool: {environment_servers: {pool: {entrypoint: app.py, worker_timeout_seconds: 2, agent_server: {type: \
             responses_api_agents, name: math_simple_agent}}}}\nmath_environment_server: null\n",
        )
        .unwrap();
        let config = examples().join("configs/quickstart.yaml");
        let mut command = gym_examples(folder.path());
        command.arg("run").arg("--config").arg(&config).arg("--config").arg(&pool);
        command.args(["--serve", "head_server", "--serve", "math_pool", "+head_server.port=0"]);
        let mut head = Server::start(&mut command);
        let ready = head.says("ready: ").await;
        let url = ready.rsplit(' ').next().unwrap().to_owned();
        let mut workers = Vec::new();
        for _ in 0..3 {
            let mut command = gym_examples(folder.path());
            command.arg("run").arg("--config").arg(&config).args(["+head_server.port=0", LATENCY_MS]);
            command.args(["--pull-from", &url, "--pull-capacity", "8"]);
            let mut worker = Server::start(&mut command);
            worker.says("ready: ").await;
            workers.push(worker);
        }
        Self { folder, input, _head: head, url, workers }
    }

    /// Collects, and runs `disturb` when a quarter of the rows is there. Returns the rows and the classes of failed attempts.
    async fn collect(&self, name: &str, options: &[&str], disturb: impl FnOnce()) -> (Rows, BTreeMap<String, usize>) {
        let output = self.folder.path().join(name);
        let mut command = gym_examples(self.folder.path());
        command.args(["collect", "--head-url", &self.url, "--agent", "math_simple_agent", "--add-seed"]);
        command.arg("--input").arg(&self.input).arg("--output").arg(&output);
        command
            .args(["--num-repeats", &REPEATS.to_string(), "--concurrency", "40", "--progress", "none"])
            .args(options);
        let collecting = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap().wait_with_output();
        tokio::pin!(collecting);
        let mut looks = tokio::time::interval(std::time::Duration::from_millis(2));
        let mut disturb = Some(disturb);
        let ended = timeout(PATIENCE, async {
            loop {
                tokio::select! {
                    ended = &mut collecting => break ended.unwrap(),
                    _ = looks.tick() => {
                        let rows = std::fs::read(&output).map_or(0, |text| memchr_count(&text));
                        if rows >= ROLLOUTS / 4 && let Some(disturb) = disturb.take() {
                            disturb();
                        }
                    }
                }
            }
        });
        let ended = ended.await.expect("a collection ends in time");
        let (said, complained) = (String::from_utf8_lossy(&ended.stdout), String::from_utf8_lossy(&ended.stderr));
        assert!(ended.status.success(), "{}\n{said}\n{complained}", ended.status);
        assert!(disturb.is_none(), "the collection ended before it was disturbed");
        (rows(&output), failures(&output))
    }
}

fn memchr_count(text: &[u8]) -> usize {
    text.iter().filter(|byte| **byte == b'\n').count()
}

type Rows = BTreeMap<(u64, u64), serde_json::Value>;

/// Returns the rows by task and rollout index, without times and attempts. Each row must occur once and have a reward.
fn rows(output: &Path) -> Rows {
    let mut rows = BTreeMap::new();
    for line in std::fs::read_to_string(output).unwrap().lines() {
        let mut row: serde_json::Value = serde_json::from_str(line).unwrap();
        assert!(row["reward"].is_number(), "{line}");
        let key = (row["_ng_task_index"].as_u64().unwrap(), row["_ng_rollout_index"].as_u64().unwrap());
        let fields = row.as_object_mut().unwrap();
        for name in ["_gym_episode", "_ng_attempt_index", "_ng_environment_server", "_ng_result_type"] {
            fields.remove(name);
        }
        without_times(&mut row);
        assert!(rows.insert(key, row).is_none(), "{key:?} has two rows");
    }
    assert_eq!(rows.len(), ROLLOUTS);
    rows
}

fn without_times(value: &mut serde_json::Value) {
    match value {
        serde_json::Value::Object(fields) => {
            fields.remove("created_at");
            fields.values_mut().for_each(without_times);
        }
        serde_json::Value::Array(items) => items.iter_mut().for_each(without_times),
        _ => {}
    }
}

/// Returns the number of failed attempts of each class. None of them has a reward.
fn failures(output: &Path) -> BTreeMap<String, usize> {
    let mut classes = BTreeMap::new();
    for line in std::fs::read_to_string(OutputFiles::beside(output).failures).unwrap().lines() {
        let row: serde_json::Value = serde_json::from_str(line).unwrap();
        assert!(row.get("reward").is_none(), "{line}");
        *classes.entry(row["_ng_failure_class"].as_str().unwrap().to_owned()).or_default() += 1;
    }
    classes
}

#[tokio::test]
async fn a_collection_survives_its_workers() {
    let mut ground = Ground::new().await;
    let (undisturbed, failed) = ground.collect("pulled.jsonl", &["--dispatch", "pull"], || {}).await;
    assert!(failed.is_empty(), "{failed:?}");

    // The environment server in front of the agent is the pool: a collector that knows only `/run` gets the workers.
    let (pooled, failed) = ground.collect("pooled.jsonl", &[], || {}).await;
    assert_eq!(pooled, undisturbed);
    let text = std::fs::read_to_string(ground.folder.path().join("pooled.jsonl")).unwrap();
    assert!(
        text.lines().all(|line| line.contains(r#""_ng_environment_server":"math_pool""#)),
        "the pool was passed by"
    );
    assert!(failed.is_empty(), "{failed:?}");

    let killed = ground.workers.remove(0);
    let (rows, failed) = ground
        .collect("killed.jsonl", &["--dispatch", "pull", "--attempts", "1"], || killed.signal(Signal::KILL))
        .await;
    assert_eq!(rows, undisturbed);
    assert!(failed.keys().eq(["worker_lost"]) && failed["worker_lost"] <= 8, "{failed:?}");

    // The pool has noticed by its own means too.
    let stopped = ground.workers.remove(0);
    let (rows, failed) = ground.collect("stopped.jsonl", &["--attempts", "1"], || stopped.signal(Signal::STOP)).await;
    assert_eq!(rows, undisturbed);
    assert!(failed.keys().eq(["worker_lost"]) && failed["worker_lost"] <= 8, "{failed:?}");
}

//! Collections by the command line from server processes, and what they wrote.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use gym_client::collect::OutputFiles;
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};
use tokio::time::timeout;

use super::{WAIT_TIMEOUT, examples, gym_examples};

const TASKS: usize = 100;
const REPEATS: usize = 4;
const ROLLOUTS: usize = TASKS * REPEATS;

/// A server process, killed on drop.
pub(crate) struct Server {
    child: Child,
    said: Lines<BufReader<ChildStdout>>,
    /// The file of its standard error.
    log: Option<PathBuf>,
}

impl Server {
    pub(crate) fn start(command: &mut Command) -> Self {
        command.stderr(Stdio::null());
        Self::spawned(command, None)
    }

    /// Starts the process, with its standard error in this file.
    pub(crate) fn logged(command: &mut Command, log: PathBuf) -> Self {
        command.stderr(std::fs::File::create(&log).unwrap());
        Self::spawned(command, Some(log))
    }

    fn spawned(command: &mut Command, log: Option<PathBuf>) -> Self {
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let said = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, said, log }
    }

    /// Returns what is in the log so far.
    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(self.log.as_ref().expect("a process with a log")).unwrap()
    }

    /// Waits until the log contains this text.
    pub(crate) async fn logs(&self, text: &str) {
        let found = async {
            while !self.log().contains(text) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        timeout(WAIT_TIMEOUT, found).await.unwrap_or_else(|_| panic!("`{text}` is not in:\n{}", self.log()));
    }

    /// Waits for the line that begins with this text, and returns the rest of it.
    pub(crate) async fn says(&mut self, start: &str) -> String {
        let found = async {
            while let Some(line) = self.said.next_line().await.unwrap() {
                if let Some(rest) = line.strip_prefix(start) {
                    return rest.to_owned();
                }
            }
            panic!("the server ended without `{start}`");
        };
        timeout(WAIT_TIMEOUT, found).await.unwrap_or_else(|_| panic!("no line `{start}`"))
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.child.id().unwrap().cast_signed()).unwrap();
        kill_process(pid, signal).unwrap();
    }

    /// Waits for the end of the process.
    pub(crate) async fn ended(&mut self) -> ExitStatus {
        self.child.wait().await.unwrap()
    }
}

/// A collection of math tasks from the servers of a head server.
pub(crate) struct Collecting<'a> {
    folder: &'a Path,
    url: &'a str,
    name: &'a str,
}

impl<'a> Collecting<'a> {
    pub(crate) fn new(folder: &'a Path, url: &'a str, name: &'a str) -> Self {
        Self { folder, url, name }
    }

    /// Writes the tasks, once for all collections of a folder.
    fn input(&self) -> PathBuf {
        let input = self.folder.join("tasks.jsonl");
        if !input.exists() {
            let text = std::fs::read_to_string(examples().join("data/math.jsonl")).unwrap();
            let rows: Vec<&str> = text.lines().take(TASKS).collect();
            std::fs::write(&input, rows.join("\n") + "\n").unwrap();
        }
        input
    }

    /// Collects, and runs `disturb` when a tenth of the rows is there. Returns the rows and the classes of failed attempts.
    pub(crate) async fn run(&self, options: &[&str], disturb: impl FnOnce()) -> (Rows, BTreeMap<String, usize>) {
        let (rows, failures, _) = self.run_logged(options, disturb).await;
        (rows, failures)
    }

    /// Like [`Collecting::run`], and returns the standard error too.
    pub(crate) async fn run_logged(
        &self,
        options: &[&str],
        disturb: impl FnOnce(),
    ) -> (Rows, BTreeMap<String, usize>, String) {
        let output = self.folder.join(self.name);
        let mut command = gym_examples(self.folder);
        command.args(["collect", "--head-url", self.url, "--agent", "math_simple_agent", "--add-seed"]);
        command.arg("--input").arg(self.input()).arg("--output").arg(&output);
        command
            .args(["--num-repeats", &REPEATS.to_string(), "--concurrency", "40", "--progress", "none"])
            .args(options);
        let collecting = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap().wait_with_output();
        tokio::pin!(collecting);
        let mut looks = tokio::time::interval(Duration::from_millis(2));
        let mut disturb = Some(disturb);
        let ended = timeout(WAIT_TIMEOUT, async {
            loop {
                tokio::select! {
                    ended = &mut collecting => break ended.unwrap(),
                    _ = looks.tick() => {
                        let rows = std::fs::read(&output).map_or(0, |text| memchr_count(&text));
                        if rows >= ROLLOUTS / 10 && let Some(disturb) = disturb.take() {
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
        (rows(&output), failures(&output), complained.into_owned())
    }
}

fn memchr_count(text: &[u8]) -> usize {
    text.iter().filter(|byte| **byte == b'\n').count()
}

pub(crate) type Rows = BTreeMap<(u64, u64), serde_json::Value>;

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

//! Kills a collector with `kill -9` at random moments. A resumed run keeps the rows on disk, and its result equals that of an
//! undisturbed run.
//!
//! The servers run in this process, and the collector is the command line in its own process. `GYM_KILLS` sets the number of kills
//! (5 by default; the long run has 50), and `GYM_KILL_SEED` the first seed. The test prints one line per kill.

#![expect(clippy::unwrap_used, reason = "an integration test: a panic is its failure")]

mod support;

use std::collections::BTreeMap;
use std::fmt;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use gym_client::collect::OutputFiles;
use gym_server::{Stack, StackOptions};
use support::{WAIT_TIMEOUT, examples, gym_examples, say};
use tokio::process::{Child, Command};
use tokio::time::{Instant, sleep, timeout};

/// The tasks of each of the three environments.
const TASKS_EACH: usize = 110;
const REPEATS: usize = 2;
const ROLLOUTS: usize = 3 * TASKS_EACH * REPEATS;
/// Small enough that a run takes a second or two, so that there are moments to choose from.
const CONCURRENCY: usize = 40;
const LATENCY_MS: &str = "+policy_model.responses_api_models.scripted_model.latency_ms=[5,55]";
/// The interval at which the output is checked for the moment to kill.
const POLL_INTERVAL: Duration = Duration::from_micros(500);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_collection_resumes_to_the_rows_of_an_undisturbed_one() {
    let number = |name: &str, otherwise: u64| std::env::var(name).map_or(otherwise, |text| text.parse().unwrap());
    let (kills, first_seed) = (number("GYM_KILLS", 5), number("GYM_KILL_SEED", 1));
    let ground = Ground::new().await;
    let undisturbed = ground.undisturbed().await;
    say(&format!(
        "{ROLLOUTS} rollouts, {kills} kills; undisturbed: first row after {:.0?}, all after {:.0?}",
        undisturbed.first_row, undisturbed.took
    ));
    say("kill  seed  phase      rows at kill  torn bytes  rows after resume");
    let mut midway = 0;
    for number in 0..kills {
        let seed = first_seed + number;
        // One in ten at the start or the end of a run, alternately, where there is little to choose.
        let wish = match number % 20 {
            3 => Phase::Before,
            13 => Phase::After,
            _ => Phase::Midway,
        };
        let killed = ground.kill(wish, seed, &undisturbed).await;
        midway += u64::from(killed.phase == Phase::Midway);
        let resumed = ground.resume(&killed, &undisturbed).await;
        say(&format!(
            "{:>4}  {seed:>4}  {:<9}  {:>12}  {:>10}  {resumed:>17}",
            number + 1,
            killed.phase.to_string(),
            killed.rows,
            killed.torn_bytes
        ));
    }
    say(&format!("{midway} of {kills} kills were mid-flight"));
    ground.stack.stop().await;
    // How many are, depends on the speed of this process and of the collector.
    assert!(midway > 0, "no kill was mid-flight");
}

/// The phase in which a collector was killed, determined by its written rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Before,
    Midway,
    After,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Before => "before",
            Self::Midway => "midflight",
            Self::After => "after",
        })
    }
}

/// The result of a run without a kill.
struct Undisturbed {
    /// Rows by task and rollout index.
    rows: BTreeMap<(u64, u64), String>,
    materialized: Vec<u8>,
    statistics: String,
    first_row: Duration,
    took: Duration,
}

struct Killed {
    output: PathBuf,
    /// The number of complete rows on disk.
    rows: usize,
    torn_bytes: usize,
    phase: Phase,
}

struct Ground {
    folder: tempfile::TempDir,
    stack: Stack,
    head: String,
    input: PathBuf,
}

impl Ground {
    async fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let input = folder.path().join("tasks.jsonl");
        let tasks: Vec<String> = ["math", "warehouse", "choice"]
            .iter()
            .flat_map(|name| {
                let text = std::fs::read_to_string(examples().join(format!("data/{name}.jsonl"))).unwrap();
                text.lines().take(TASKS_EACH).map(str::to_owned).collect::<Vec<_>>()
            })
            .collect();
        assert_eq!(tasks.len() * REPEATS, ROLLOUTS);
        std::fs::write(&input, tasks.join("\n") + "\n").unwrap();
        let files = [examples().join("configs/quickstart.yaml")];
        let servers = gym_examples::servers::servers();
        let (stack, head) = support::start(&files, &[LATENCY_MS], &servers, StackOptions::default()).await;
        Self { folder, stack, head, input }
    }

    fn collector(&self, output: &Path, resume: bool) -> Command {
        let mut command = gym_examples(self.folder.path());
        command.arg("collect").args(["--head-url", &self.head]).arg("--input").arg(&self.input);
        command.arg("--output").arg(output);
        command.args(["--num-repeats", &REPEATS.to_string(), "--concurrency", &CONCURRENCY.to_string()]);
        command.args(["--add-seed", "--progress", "none"]).stdout(Stdio::piped()).stderr(Stdio::piped());
        if resume {
            command.arg("--resume");
        }
        command
    }

    async fn undisturbed(&self) -> Undisturbed {
        let output = self.folder.path().join("undisturbed.jsonl");
        let began = Instant::now();
        let child = self.collector(&output, false).spawn().unwrap();
        let mut watch = Watch::new(&output);
        watch.until(1).await;
        let first_row = began.elapsed();
        finish(child).await;
        let took = began.elapsed();
        let files = OutputFiles::beside(&output);
        assert_eq!(std::fs::read(&files.failures).unwrap(), b"", "the undisturbed run has failures");
        Undisturbed {
            rows: rows(&output),
            materialized: std::fs::read(&files.materialized).unwrap(),
            statistics: std::fs::read_to_string(&files.aggregate).unwrap(),
            first_row,
            took,
        }
    }

    /// Starts a collection and kills it at the moment that the seed determines.
    async fn kill(&self, wish: Phase, seed: u64, undisturbed: &Undisturbed) -> Killed {
        let mut random = fastrand::Rng::with_seed(seed);
        let output = self.folder.path().join(format!("killed-{seed}.jsonl"));
        let mut child = self.collector(&output, false).spawn().unwrap();
        let mut watch = Watch::new(&output);
        match wish {
            Phase::Before => sleep(undisturbed.first_row.mul_f64(random.f64() * 0.8)).await,
            Phase::Midway => {
                // Half of the kills at any row but the last ones, which arrive almost at once; the others so early that a busy machine sends them
                // midway too.
                let latest = if seed.is_multiple_of(2) { ROLLOUTS * 95 / 100 } else { ROLLOUTS / 2 };
                watch.until(random.usize(1..=latest)).await;
                sleep(Duration::from_micros(random.u64(0..5_000))).await;
            }
            Phase::After => {
                watch.until(ROLLOUTS).await;
                sleep(Duration::from_micros(random.u64(0..20_000))).await;
            }
        }
        // Sends SIGKILL, and waits until the process has exited.
        timeout(WAIT_TIMEOUT, child.kill()).await.expect("a killed process ends").unwrap();
        let text = std::fs::read(&output).unwrap_or_default();
        let rows = text.iter().filter(|byte| **byte == b'\n').count();
        let torn_bytes = text.len() - text.iter().rposition(|byte| *byte == b'\n').map_or(0, |last| last + 1);
        let phase = match rows {
            0 => Phase::Before,
            ROLLOUTS => Phase::After,
            _ => Phase::Midway,
        };
        Killed { output, rows, torn_bytes, phase }
    }

    /// Resumes the collection and compares its result. Returns the number of rows.
    async fn resume(&self, killed: &Killed, undisturbed: &Undisturbed) -> usize {
        let said = finish(self.collector(&killed.output, true).spawn().unwrap()).await;
        let by_earlier_runs = format!("{ROLLOUTS} of {ROLLOUTS} rollouts are recorded");
        assert!(said.contains(&by_earlier_runs), "{said}");
        if killed.rows > 0 {
            let kept = format!("({} of them by earlier runs)", killed.rows);
            assert!(said.contains(&kept), "{kept} is not in what the resumed run said: {said}");
        }
        let files = OutputFiles::beside(&killed.output);
        assert_eq!(std::fs::read(&files.failures).unwrap(), b"", "a resumed run has failures");
        assert_eq!(std::fs::read(&files.materialized).unwrap(), undisturbed.materialized);
        let rows = rows(&killed.output);
        for (key, row) in &undisturbed.rows {
            assert_eq!(rows.get(key), Some(row), "the row of {key:?}");
        }
        assert_eq!(rows.len(), undisturbed.rows.len());
        assert_eq!(std::fs::read_to_string(&files.aggregate).unwrap(), undisturbed.statistics);
        rows.len()
    }
}

/// Waits until a collector exits normally, and returns its standard output.
async fn finish(child: Child) -> String {
    let output = timeout(WAIT_TIMEOUT, child.wait_with_output()).await.expect("a collection ends in time").unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}\n{said}\n{complained}", output.status);
    said
}

/// Returns the rows by task and rollout index, without timestamps. Each row must occur once and be complete.
fn rows(output: &Path) -> BTreeMap<(u64, u64), String> {
    let text = std::fs::read_to_string(output).unwrap();
    assert!(text.ends_with('\n'), "the last line is torn");
    let mut rows = BTreeMap::new();
    for line in text.lines() {
        let row: serde_json::Value = serde_json::from_str(line).unwrap();
        let index = |key: &str| row[key].as_u64().unwrap();
        let key = (index("_ng_task_index"), index("_ng_rollout_index"));
        assert!(row["reward"].is_number(), "{line}");
        assert!(rows.insert(key, timeless(line)).is_none(), "{key:?} has two rows");
    }
    assert_eq!(rows.len(), ROLLOUTS);
    rows
}

/// Returns the text with 0 for each `created_at`, for the duration of the attempt, and for the times of its calls.
fn timeless(row: &str) -> String {
    let row = ["\"created_at\":", "\"seconds\":"].iter().fold(row.to_owned(), |row, key| {
        let mut parts = row.split(key);
        let mut text = parts.next().unwrap_or_default().to_owned();
        for part in parts {
            text.push_str(key);
            text.push('0');
            text.push_str(part.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.'));
        }
        text
    });
    let Some((before, (phases, after))) =
        row.split_once("\"phases\":[").and_then(|(before, rest)| Some((before, rest.split_once(']')?)))
    else {
        return row;
    };
    let phases: Vec<&str> = phases.split("\"phase\":\"").skip(1).filter_map(|span| span.split('"').next()).collect();
    format!("{before}\"phases\":\"{}\"{after}", phases.join(" "))
}

/// Counts the rows of a growing file.
struct Watch {
    path: PathBuf,
    file: Option<std::fs::File>,
    rows: usize,
}

impl Watch {
    fn new(path: &Path) -> Self {
        Self { path: path.to_owned(), file: None, rows: 0 }
    }

    async fn until(&mut self, rows: usize) {
        let seen = async {
            while self.look() < rows {
                sleep(POLL_INTERVAL).await;
            }
        };
        timeout(WAIT_TIMEOUT, seen).await.unwrap_or_else(|_| panic!("no {rows} rows within {WAIT_TIMEOUT:?}"));
    }

    fn look(&mut self) -> usize {
        if self.file.is_none() {
            self.file = std::fs::File::open(&self.path).ok();
        }
        if let Some(file) = &mut self.file {
            let mut fresh = Vec::new();
            file.read_to_end(&mut fresh).unwrap();
            self.rows += fresh.iter().filter(|byte| **byte == b'\n').count();
        }
        self.rows
    }
}

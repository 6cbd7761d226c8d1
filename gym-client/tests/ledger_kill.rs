//! A collector that is killed while it writes: its lock goes with it, and what it acknowledged is there.

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use gym_client::collect::ledger::{JsonlLedger, OpenMode, RecoveryReport};
use gym_core::base::RealFiles;
use gym_core::rollout::{KeyState, Ledger as _, Outcome, TaskKey};
use gym_core::{CallContext, Code, RawObject, Result};
use tokio::task::JoinSet;

/// Names the output file to the process that is to be killed.
const OUTPUT: &str = "GYM_TEST_LEDGER_OUTPUT";

async fn open(output: &Path) -> Result<(JsonlLedger, RecoveryReport)> {
    JsonlLedger::open(&CallContext::default(), Arc::new(RealFiles::new()), output, OpenMode::Resume).await
}

/// Not a test of its own: the process that the test below kills. It never ends by itself.
#[tokio::test]
async fn the_process_to_be_killed() {
    let Some(output) = std::env::var_os(OUTPUT).map(PathBuf::from) else { return };
    let ledger = Arc::new(open(&output).await.unwrap().0);
    let next = Arc::new(AtomicU32::new(0));
    let mut writing = JoinSet::new();
    for _ in 0..16 {
        let (ledger, next) = (Arc::clone(&ledger), Arc::clone(&next));
        writing.spawn(async move {
            loop {
                let task = next.fetch_add(1, Ordering::Relaxed);
                let Ok(attempt) = ledger.begin(TaskKey::new(task, 0)) else { continue };
                let padding = "x".repeat(task as usize * 37 % 50_000);
                let row = format!(r#"{{"_ng_task_index":{task},"_ng_rollout_index":0,"padding":"{padding}"}}"#);
                let row = RawObject::parse(row).unwrap();
                ledger.record(&CallContext::default(), attempt, Outcome::Completed(row)).await.unwrap();
                // One write call a line, past the capture of the test harness.
                std::io::stderr().write_all(format!("acknowledged {task}\n").as_bytes()).unwrap();
            }
        });
    }
    writing.join_next().await;
}

#[tokio::test]
async fn what_a_killed_collector_acknowledged_is_there_once_and_its_lock_is_free() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("rollouts.jsonl");
    let mut acknowledged = BTreeSet::new();
    for round in 0..6 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "the_process_to_be_killed", "--nocapture"])
            .env(OUTPUT, &output)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut told = BufReader::new(child.stderr.take().unwrap()).lines().map_while(|line| line.ok());
        let task_of = |line: &str| line.strip_prefix("acknowledged ").and_then(|task| task.parse::<u32>().ok());
        // Killed in the middle of its work, each time at another place.
        let enough = 20 + round * 61;
        acknowledged.extend(told.by_ref().filter_map(|line| task_of(&line)).take(enough));
        assert_eq!(open(&output).await.unwrap_err().code(), Code::FailedPrecondition, "held while it lives");
        child.kill().unwrap();
        child.wait().unwrap();
        acknowledged.extend(told.filter_map(|line| task_of(&line)));

        let (ledger, opened) = open(&output).await.unwrap();
        for task in &acknowledged {
            assert_eq!(ledger.state(TaskKey::new(*task, 0)), KeyState::Completed, "round {round}, task {task}");
        }
        ledger.close(&CallContext::default()).await.unwrap();
        let rows = std::fs::read_to_string(&output).unwrap();
        let distinct: BTreeSet<u32> = rows
            .lines()
            .map(|row| RawObject::parse(row.to_owned()).unwrap().get_as("_ng_task_index").unwrap().unwrap())
            .collect();
        assert_eq!(distinct.len(), rows.lines().count(), "no row twice");
        assert_eq!(distinct.len() as u64, opened.completed);
    }
}

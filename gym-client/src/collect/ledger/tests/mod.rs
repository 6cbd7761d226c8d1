//! The ledger over real and simulated files: the common contract, and the properties of line-based files.

mod crash;
mod damage;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use gym_core::base::{Files, RealFiles};
use gym_core::rollout::{Attempt, FailureClass, Ledger, Outcome, TaskKey};
use gym_core::testing::{SimFiles, conformance};
use gym_core::{CallContext, Code, RawObject, Result};

use crate::collect::ledger::jsonl::one_line;
use crate::collect::ledger::{JsonlLedger, MemoryLedger, OpenMode, RecoveryReport, failures_path, index_path};

fn output() -> PathBuf {
    PathBuf::from("results/rollouts.jsonl")
}

async fn open(files: &SimFiles) -> Result<(JsonlLedger, RecoveryReport)> {
    JsonlLedger::open(&CallContext::default(), Arc::new(files.clone()), output(), OpenMode::Resume).await
}

fn row(attempt: Attempt, padding: usize) -> RawObject {
    let TaskKey { task_index, rollout_index } = attempt.key;
    let text = format!(
        r#"{{"reward": 1E0, "_ng_task_index": {task_index}, "_ng_rollout_index": {rollout_index}, "_ng_attempt_index": {}, "text": "{}"}}"#,
        attempt.number,
        "x".repeat(padding)
    );
    RawObject::parse(text).unwrap()
}

fn failed(attempt: Attempt, padding: usize, terminal: bool) -> Outcome {
    let row = row(attempt, padding);
    let edit = row.edit().remove("reward").set("_ng_failure_class", "\"agent_run_error\"");
    let edit = if terminal { edit.set("_ng_failure_terminal", "true") } else { edit };
    Outcome::Failed { class: FailureClass::AgentRunError, terminal, row: edit.to_object().unwrap() }
}

async fn complete(ledger: &JsonlLedger, task: u32) -> Result<()> {
    let attempt = ledger.begin(TaskKey::new(task, 0))?;
    ledger.record(&CallContext::default(), attempt, Outcome::Completed(row(attempt, 100))).await
}

async fn fail(ledger: &JsonlLedger, task: u32) -> Result<()> {
    let attempt = ledger.begin(TaskKey::new(task, 0))?;
    ledger.record(&CallContext::default(), attempt, failed(attempt, 100, false)).await
}

async fn close(ledger: JsonlLedger) {
    ledger.close(&CallContext::default()).await.unwrap();
}

fn lines(bytes: &[u8]) -> Vec<String> {
    String::from_utf8(bytes.to_vec()).unwrap().lines().map(str::to_owned).collect()
}

#[derive(Debug)]
struct SimBench {
    files: SimFiles,
    open: Option<Arc<JsonlLedger>>,
}

#[async_trait]
impl conformance::LedgerFixture for SimBench {
    async fn open(&mut self) -> Result<Arc<dyn Ledger>> {
        let ledger = Arc::new(open(&self.files).await?.0);
        self.open = Some(Arc::clone(&ledger));
        Ok(ledger)
    }

    async fn close(&mut self) {
        close(Arc::into_inner(self.open.take().unwrap()).unwrap()).await;
    }

    async fn crash(&mut self) -> bool {
        self.files = self.files.crash();
        true
    }

    async fn rows(&mut self) -> Vec<String> {
        lines(&self.files.contents(&output()))
    }
}

#[derive(Debug)]
struct RealBench {
    folder: tempfile::TempDir,
    open: Option<Arc<JsonlLedger>>,
}

impl RealBench {
    fn output(&self) -> PathBuf {
        self.folder.path().join("results/rollouts.jsonl")
    }
}

#[async_trait]
impl conformance::LedgerFixture for RealBench {
    async fn open(&mut self) -> Result<Arc<dyn Ledger>> {
        let files = Arc::new(RealFiles::new());
        let ledger = JsonlLedger::open(&CallContext::default(), files, self.output(), OpenMode::Resume).await?.0;
        let ledger = Arc::new(ledger);
        self.open = Some(Arc::clone(&ledger));
        Ok(ledger)
    }

    async fn close(&mut self) {
        close(Arc::into_inner(self.open.take().unwrap()).unwrap()).await;
    }

    async fn crash(&mut self) -> bool {
        // Only another process can be killed.
        false
    }

    async fn rows(&mut self) -> Vec<String> {
        lines(&std::fs::read(self.output()).unwrap())
    }
}

#[tokio::test(start_paused = true)]
async fn the_ledger_over_simulated_files_keeps_the_contract() {
    let mut seed = 0;
    conformance::ledger(|| {
        seed += 1;
        SimBench { files: SimFiles::new(seed), open: None }
    })
    .await;
}

#[tokio::test]
async fn the_ledger_over_real_files_keeps_the_contract() {
    conformance::ledger(|| RealBench { folder: tempfile::tempdir().unwrap(), open: None }).await;
}

#[derive(Debug, Default)]
struct MemoryBench {
    ledger: Arc<MemoryLedger>,
    rows: Vec<String>,
}

#[async_trait]
impl conformance::LedgerFixture for MemoryBench {
    async fn open(&mut self) -> Result<Arc<dyn Ledger>> {
        Ok(Arc::<MemoryLedger>::clone(&self.ledger))
    }

    async fn close(&mut self) {}

    async fn crash(&mut self) -> bool {
        // This ledger exists only as long as its process.
        false
    }

    async fn rows(&mut self) -> Vec<String> {
        for outcome in self.ledger.take_outcomes().into_values() {
            if let Outcome::Completed(row) = outcome {
                self.rows.push(String::from_utf8(row.into_text().to_vec()).unwrap());
            }
        }
        self.rows.clone()
    }
}

#[tokio::test]
async fn the_ledger_in_memory_keeps_the_contract() {
    conformance::ledger(MemoryBench::default).await;
}

#[tokio::test]
async fn a_second_collector_is_refused_and_told_why() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("rollouts.jsonl");
    let cx = CallContext::default();
    let (ledger, _) = JsonlLedger::open(&cx, Arc::new(RealFiles::new()), &output, OpenMode::Resume).await.unwrap();
    complete(&ledger, 0).await.unwrap();
    for start in [OpenMode::Resume, OpenMode::Fresh] {
        let error = JsonlLedger::open(&cx, Arc::new(RealFiles::new()), &output, start).await.unwrap_err();
        assert_eq!(error.code(), Code::FailedPrecondition);
        assert!(error.to_string().contains("rollouts.jsonl: another collector writes to this file"), "{error}");
    }
    close(ledger).await;
    let (ledger, opened) = JsonlLedger::open(&cx, Arc::new(RealFiles::new()), &output, OpenMode::Resume).await.unwrap();
    assert_eq!(opened, RecoveryReport { completed: 1, ..RecoveryReport::default() });
    close(ledger).await;
}

#[tokio::test(start_paused = true)]
async fn a_fresh_start_forgets_and_a_closed_ledger_refuses() {
    let files = SimFiles::new(1);
    let (ledger, opened) = open(&files).await.unwrap();
    assert_eq!(opened, RecoveryReport::default());
    complete(&ledger, 0).await.unwrap();
    fail(&ledger, 1).await.unwrap();
    let cx = CallContext::default();
    ledger.close(&cx).await.unwrap();
    assert_eq!(complete(&ledger, 2).await.unwrap_err().code(), Code::Unavailable);
    let (again, opened) = open(&files).await.unwrap();
    assert_eq!(opened, RecoveryReport { completed: 1, failed: 1, ..RecoveryReport::default() });
    close(again).await;
    let (fresh, opened) = JsonlLedger::open(&cx, Arc::new(files.clone()), output(), OpenMode::Fresh).await.unwrap();
    assert_eq!(opened, RecoveryReport::default());
    close(fresh).await;
    assert_eq!(files.length(&output()).await.unwrap(), Some(0));
    assert_eq!(files.length(&failures_path(&output())).await.unwrap(), Some(0), "the sidecar is always there");
}

#[tokio::test(start_paused = true)]
async fn a_row_of_several_lines_becomes_one() {
    let files = SimFiles::new(1);
    let (ledger, _) = open(&files).await.unwrap();
    let attempt = ledger.begin(TaskKey::new(0, 0)).unwrap();
    let text = "{\n  \"_ng_task_index\": 0,\r\n  \"_ng_rollout_index\": 0,\n  \"text\": \"a\\nb\", \"n\": 1E5\n}\n";
    let row = RawObject::parse(text).unwrap();
    ledger.record(&CallContext::default(), attempt, Outcome::Completed(row)).await.unwrap();
    close(ledger).await;
    let contents = files.contents(&output());
    assert_eq!(contents.iter().filter(|byte| matches!(byte, b'\n' | b'\r')).count(), 1, "{contents:?}");
    assert!(lines(&contents)[0].contains(r#""text": "a\nb", "n": 1E5"#));
    // A raw line break within a string is not valid JSON, so it cannot arrive here and be replaced by a space.
    RawObject::parse("{\"text\": \"a\nb\"}").unwrap_err();
    assert_eq!(one_line("{}".into()), "{}");
}

#[tokio::test(start_paused = true)]
async fn a_group_shares_one_sync() {
    let files = SimFiles::new(1);
    let (ledger, _) = open(&files).await.unwrap();
    let before = files.counts();
    let cx = CallContext::default();
    let records = (0..500).map(|task| {
        let attempt = ledger.begin(TaskKey::new(task, 0)).unwrap();
        // Rows of all sizes: copied together, and written from their own buffers.
        let outcome = Outcome::Completed(row(attempt, if task % 50 == 7 { 40_000 } else { 10 }));
        ledger.record(&cx, attempt, outcome)
    });
    for done in futures_util::future::join_all(records).await {
        done.unwrap();
    }
    assert!(files.counts().syncs - before.syncs <= 3, "{:?}", files.counts());
    close(ledger).await;
    let (ledger, opened) = open(&files).await.unwrap();
    assert_eq!(opened, RecoveryReport { completed: 500, ..RecoveryReport::default() });
    close(ledger).await;
}

#[tokio::test(start_paused = true)]
async fn a_newer_attempt_begun_while_an_outcome_waits_makes_it_late() {
    let files = SimFiles::new(1);
    let (ledger, _) = open(&files).await.unwrap();
    let cx = CallContext::default();
    let key = TaskKey::new(0, 0);
    let old = ledger.begin(key).unwrap();
    // After one poll, the record has passed the first check and waits for the writer, which has not run yet.
    let mut waiting = std::pin::pin!(ledger.record(&cx, old, Outcome::Completed(row(old, 10))));
    assert!(futures_util::poll!(waiting.as_mut()).is_pending());
    let new = ledger.begin(key).unwrap();
    assert_eq!(waiting.await.unwrap_err().code(), Code::FailedPrecondition);
    ledger.record(&cx, new, Outcome::Completed(row(new, 10))).await.unwrap();
    ledger.close(&cx).await.unwrap();
    assert_eq!(lines(&files.contents(&output())).len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_row_that_would_be_taken_for_another_is_refused() {
    let files = SimFiles::new(1);
    let (ledger, _) = open(&files).await.unwrap();
    let attempt = ledger.begin(TaskKey::new(4, 2)).unwrap();
    let other = |key: &'static str, json: &'static str| row(attempt, 0).edit().set(key, json).to_object().unwrap();
    let untold = Outcome::Failed { class: FailureClass::JudgeFailed, terminal: true, row: row(attempt, 0) };
    for (outcome, why) in [
        (Outcome::Completed(RawObject::empty()), "no `_ng_task_index`"),
        (Outcome::Completed(other("_ng_rollout_index", "3")), "rollout 4-3"),
        (Outcome::Completed(other("_ng_attempt_index", "1")), "`_ng_attempt_index` is 1"),
        (Outcome::Completed(other("_ng_task_index", "4.5")), "`_ng_task_index` is not an integer"),
        (untold, "`_ng_failure_terminal`"),
    ] {
        let error = ledger.record(&CallContext::default(), attempt, outcome).await.unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument);
        assert!(error.to_string().starts_with("record 4-2: ") && error.to_string().contains(why), "{error}");
    }
    close(ledger).await;
    assert!(files.contents(&output()).is_empty());
}

#[test]
fn the_files_are_named_as_nemo_gym_names_them() {
    assert_eq!(failures_path(Path::new("a/b.c.jsonl")), Path::new("a/b.c_failures.jsonl"));
    assert_eq!(failures_path(Path::new("rollouts")), Path::new("rollouts_failures.jsonl"));
    assert_eq!(index_path(Path::new("a/b.jsonl")), Path::new("a/b.jsonl.index"));
}

#[tokio::test(start_paused = true)]
async fn a_wait_for_the_disk_that_times_out_names_the_file_and_the_fix() {
    let files = SimFiles::new(3);
    let (ledger, _) = open(&files).await.unwrap();
    files.set_latency_max(std::time::Duration::from_secs(10_000));
    let attempt = ledger.begin(TaskKey::new(0, 0)).unwrap();
    let cx = CallContext::within(std::time::Duration::from_secs(1));
    let error = ledger.record(&cx, attempt, Outcome::Completed(row(attempt, 100))).await.unwrap_err();
    assert_eq!(error.code(), Code::DeadlineExceeded);
    let error = error.to_string();
    assert!(
        error.contains("write results/rollouts.jsonl: the disk has not written") && error.contains("resume"),
        "{error}"
    );
}

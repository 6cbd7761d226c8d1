//! The conformance suite of [`Ledger`].

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;

use crate::base::error::{Code, Result};
use crate::message::CallContext;
use crate::message::RawObject;
use crate::rollout::{Attempt, FailureClass, TaskKey};
use crate::rollout::{KeyState, Ledger, Outcome};

/// A ledger under test, and a way to end its process.
#[async_trait]
pub trait LedgerFixture: fmt::Debug + Send + Sync {
    /// Opens the ledger with all its durable contents.
    async fn open(&mut self) -> Result<Arc<dyn Ledger>>;

    /// Closes the last opened ledger cleanly.
    async fn close(&mut self);

    /// Kills the process of the ledger. Returns `false` if the fixture cannot do so.
    async fn crash(&mut self) -> bool;

    /// Returns the recorded rows of completed rollouts.
    async fn rows(&mut self) -> Vec<String>;
}

/// Checks an implementation. `make` returns an empty ledger for each case.
///
/// # Panics
/// Panics if the implementation violates the contract of [`Ledger`].
pub async fn ledger<B: LedgerFixture>(mut make: impl FnMut() -> B) {
    an_empty_ledger_is_open_everywhere(make()).await;
    a_completed_rollout_stays_completed(make()).await;
    failures_count_and_attempts_go_on_from_them(make()).await;
    a_terminal_failure_ends_a_rollout(make()).await;
    late_attempts_are_refused(make()).await;
    of_two_records_of_one_attempt_one_counts(make()).await;
    what_was_acknowledged_survives(make()).await;
    opening_again_changes_nothing(make()).await;
}

fn key(task: u32, rollout: u32) -> TaskKey {
    TaskKey::new(task, rollout)
}

/// The row of a completed attempt.
fn row(attempt: Attempt) -> RawObject {
    let TaskKey { task_index, rollout_index } = attempt.key;
    let text = format!(
        r#"{{"_ng_task_index":{task_index},"_ng_rollout_index":{rollout_index},"_ng_attempt_index":{},"reward":1E0}}"#,
        attempt.number
    );
    RawObject::parse(text).expect("an object")
}

fn failure(attempt: Attempt, terminal: bool) -> Outcome {
    let class = FailureClass::AgentRunError;
    let scored = row(attempt);
    let row = scored.edit().remove("reward").set("_ng_failure_class", format!("\"{class}\""));
    let row = if terminal { row.set("_ng_failure_terminal", "true") } else { row };
    Outcome::Failed { class, terminal, row: row.to_object().expect("an object") }
}

async fn record(ledger: &Arc<dyn Ledger>, attempt: Attempt, outcome: Outcome) -> Result<()> {
    ledger.record(&CallContext::default(), attempt, outcome).await
}

async fn refused(ledger: &Arc<dyn Ledger>, attempt: Attempt, outcome: Outcome, why: &str) {
    let error = record(ledger, attempt, outcome).await.expect_err(why);
    assert_eq!(error.code(), Code::FailedPrecondition, "{why}: {error}");
}

async fn an_empty_ledger_is_open_everywhere(mut fixture: impl LedgerFixture) {
    let ledger = fixture.open().await.expect("opens");
    assert_eq!(ledger.state(key(0, 0)), KeyState::Open { failures: 0, lost: 0 });
    assert_eq!(ledger.state(key(u32::MAX, u32::MAX)), KeyState::Open { failures: 0, lost: 0 });
    ledger.flush(&CallContext::default()).await.expect("nothing to flush");
    drop(ledger);
    fixture.close().await;
    assert!(fixture.rows().await.is_empty());
}

async fn a_completed_rollout_stays_completed(mut fixture: impl LedgerFixture) {
    let ledger = fixture.open().await.expect("opens");
    let attempt = ledger.begin(key(3, 1)).expect("begins");
    assert_eq!(attempt, Attempt { key: key(3, 1), number: 0 });
    assert_eq!(ledger.state(key(3, 1)), KeyState::Open { failures: 0, lost: 0 }, "a begun attempt is no outcome");
    record(&ledger, attempt, Outcome::Completed(row(attempt))).await.expect("records");
    for _ in 0..2 {
        assert_eq!(ledger.state(key(3, 1)), KeyState::Completed);
        assert_eq!(ledger.state(key(3, 0)), KeyState::Open { failures: 0, lost: 0 });
        assert_eq!(ledger.state(key(1, 3)), KeyState::Open { failures: 0, lost: 0 });
    }
    assert_eq!(ledger.begin(key(3, 1)).expect_err("done is done").code(), Code::FailedPrecondition);
    drop(ledger);
    fixture.close().await;
    let ledger = fixture.open().await.expect("opens again");
    assert_eq!(ledger.state(key(3, 1)), KeyState::Completed);
    assert_eq!(ledger.begin(key(3, 1)).expect_err("done is done").code(), Code::FailedPrecondition);
    drop(ledger);
    fixture.close().await;
    let text = String::from_utf8(row(attempt).into_text().to_vec()).expect("text");
    assert_eq!(fixture.rows().await, [text], "the row as it was, bit for bit");
}

async fn failures_count_and_attempts_go_on_from_them(mut fixture: impl LedgerFixture) {
    let ledger = fixture.open().await.expect("opens");
    for number in 0..2 {
        let attempt = ledger.begin(key(7, 0)).expect("begins");
        assert_eq!(attempt.number, number);
        record(&ledger, attempt, failure(attempt, false)).await.expect("records");
        assert_eq!(ledger.state(key(7, 0)), KeyState::Open { failures: number + 1, lost: 0 });
    }
    drop(ledger);
    fixture.close().await;
    let ledger = fixture.open().await.expect("opens again");
    assert_eq!(ledger.state(key(7, 0)), KeyState::Open { failures: 2, lost: 0 });
    let attempt = ledger.begin(key(7, 0)).expect("begins");
    assert_eq!(attempt.number, 2, "the number of earlier failures");
    record(&ledger, attempt, Outcome::Completed(row(attempt))).await.expect("records");
    assert_eq!(ledger.state(key(7, 0)), KeyState::Completed);
    drop(ledger);
    fixture.close().await;
    assert_eq!(fixture.rows().await.len(), 1, "failures are no rows");
}

async fn a_terminal_failure_ends_a_rollout(mut fixture: impl LedgerFixture) {
    let ledger = fixture.open().await.expect("opens");
    let attempt = ledger.begin(key(0, 5)).expect("begins");
    record(&ledger, attempt, failure(attempt, true)).await.expect("records");
    assert_eq!(ledger.state(key(0, 5)), KeyState::Terminal);
    assert_eq!(ledger.begin(key(0, 5)).expect_err("over").code(), Code::FailedPrecondition);
    drop(ledger);
    fixture.close().await;
    let ledger = fixture.open().await.expect("opens again");
    assert_eq!(ledger.state(key(0, 5)), KeyState::Terminal);
    drop(ledger);
    fixture.close().await;
}

async fn late_attempts_are_refused(mut fixture: impl LedgerFixture) {
    let ledger = fixture.open().await.expect("opens");
    let first = ledger.begin(key(1, 1)).expect("begins");
    let second = ledger.begin(key(1, 1)).expect("begins another");
    assert_eq!(second.number, 1);
    refused(&ledger, first, Outcome::Completed(row(first)), "a newer attempt has begun").await;
    refused(&ledger, first, failure(first, false), "a newer attempt has begun").await;
    let unknown = Attempt { key: key(1, 1), number: 9 };
    refused(&ledger, unknown, Outcome::Completed(row(unknown)), "it never began").await;
    record(&ledger, second, Outcome::Completed(row(second))).await.expect("the newest counts");
    refused(&ledger, second, Outcome::Completed(row(second)), "there is an outcome").await;
    refused(&ledger, second, failure(second, true), "there is an outcome").await;
    let failed = ledger.begin(key(1, 2)).expect("begins");
    record(&ledger, failed, failure(failed, false)).await.expect("records");
    refused(&ledger, failed, Outcome::Completed(row(failed)), "that attempt has its outcome").await;
    assert_eq!(ledger.state(key(1, 2)), KeyState::Open { failures: 1, lost: 0 });
    drop(ledger);
    fixture.close().await;
    assert_eq!(fixture.rows().await.len(), 1);
}

async fn of_two_records_of_one_attempt_one_counts(mut fixture: impl LedgerFixture) {
    let ledger = fixture.open().await.expect("opens");
    let attempt = ledger.begin(key(2, 2)).expect("begins");
    let (one, two) = tokio::join!(
        record(&ledger, attempt, Outcome::Completed(row(attempt))),
        record(&ledger, attempt, Outcome::Completed(row(attempt))),
    );
    assert_eq!(u32::from(one.is_ok()) + u32::from(two.is_ok()), 1, "{one:?} {two:?}");
    drop(ledger);
    fixture.close().await;
    assert_eq!(fixture.rows().await.len(), 1);
}

async fn what_was_acknowledged_survives(mut fixture: impl LedgerFixture) {
    let ledger = fixture.open().await.expect("opens");
    for task in 0..20 {
        let attempt = ledger.begin(key(task, 0)).expect("begins");
        record(&ledger, attempt, Outcome::Completed(row(attempt))).await.expect("records");
    }
    if !fixture.crash().await {
        return;
    }
    drop(ledger);
    let ledger = fixture.open().await.expect("opens after the crash");
    for task in 0..20 {
        assert_eq!(ledger.state(key(task, 0)), KeyState::Completed, "task {task}");
    }
    drop(ledger);
    fixture.close().await;
    assert_eq!(fixture.rows().await.len(), 20);
}

async fn opening_again_changes_nothing(mut fixture: impl LedgerFixture) {
    let ledger = fixture.open().await.expect("opens");
    for task in 0..10 {
        let attempt = ledger.begin(key(task, 0)).expect("begins");
        let outcome = if task % 3 == 0 { failure(attempt, false) } else { Outcome::Completed(row(attempt)) };
        record(&ledger, attempt, outcome).await.expect("records");
    }
    ledger.flush(&CallContext::default()).await.expect("flushes");
    drop(ledger);
    fixture.close().await;
    let rows = fixture.rows().await;
    for _ in 0..3 {
        let ledger = fixture.open().await.expect("opens again");
        for task in 0..10 {
            let wanted = if task % 3 == 0 { KeyState::Open { failures: 1, lost: 0 } } else { KeyState::Completed };
            assert_eq!(ledger.state(key(task, 0)), wanted);
        }
        drop(ledger);
        fixture.close().await;
        assert_eq!(fixture.rows().await, rows);
    }
}

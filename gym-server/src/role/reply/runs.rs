//! The rollouts that an agent or an environment server is running, for `/health` and `rgym status`.

use gym_core::Rope;
use gym_core::observe::waits::{WaitKind, WaitQuery, WaitReport};
use gym_core::observe::{InFlight, WorkKey};
use gym_core::rollout::metrics::{ROLLOUT_INDEX, TASK_INDEX};
use gym_core::rollout::{Attempt, TaskKey};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

/// The route of a rollout.
pub(crate) const RUN: &str = "/run";

/// Maximum requests that `/waits` reads; each can be a megabyte.
const WAITS_MAX: usize = 200;

/// The requests for `/run` in flight. Their rows are read only when somebody asks.
#[derive(Debug, Default)]
pub(crate) struct RunsInFlight(InFlight<(u128, Rope)>);

/// The request that has been in flight for the longest time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct OldestRun {
    pub(crate) route: String,
    /// NeMo Gym's id of the rollout: `3-0`, and `3-0-a1` for its second attempt. `None` if the request does not name one.
    pub(crate) rollout: Option<String>,
    /// Time since the request arrived.
    pub(crate) seconds: u64,
}

/// One request in flight. It ends when this is dropped, as it is when the caller disconnects.
#[derive(Debug)]
pub(crate) struct RunGuard<'a> {
    runs: &'a RunsInFlight,
    key: WorkKey,
}

impl RunsInFlight {
    pub(crate) fn begin(&self, began: Instant, trace_id: u128, row: &Rope) -> RunGuard<'_> {
        RunGuard { runs: self, key: self.0.begin(began, (trace_id, row.clone())) }
    }

    /// Returns the requests as waits of this server, with their rollouts.
    pub(crate) fn waits(&self, server: &str, query: &WaitQuery) -> Vec<WaitReport> {
        let runs = self.0.list().into_iter();
        let mut runs: Vec<_> = runs.filter(|(began, (trace_id, _))| query.wants(*trace_id, began.elapsed())).collect();
        runs.sort_by_key(|(began, _)| *began);
        // Rows can be large, so only those that are shown are read.
        runs.truncate(WAITS_MAX);
        let report = |(began, (trace_id, row)): (Instant, (u128, Rope))| {
            let mut report = WaitReport::new(WaitKind::Handler, trace_id, began.elapsed());
            report.rollout = rollout(&row).map(|attempt| attempt.to_string());
            report.server = server.to_owned();
            report.route = RUN.to_owned();
            report
        };
        runs.into_iter().map(report).collect()
    }

    /// Returns the request that arrived first.
    pub(crate) fn oldest(&self) -> Option<OldestRun> {
        let (began, (_, row)) = self.0.oldest()?;
        let rollout = rollout(&row).map(|attempt| attempt.to_string());
        Some(OldestRun { route: RUN.to_owned(), rollout, seconds: began.elapsed().as_secs() })
    }
}

impl Drop for RunGuard<'_> {
    fn drop(&mut self) {
        self.runs.0.end(self.key);
    }
}

fn rollout(row: &Rope) -> Option<Attempt> {
    let row = row.to_object().ok()?;
    let index = |key: &str| row.get_as::<u32>(key).ok().flatten();
    let key = TaskKey::new(index(TASK_INDEX)?, index(ROLLOUT_INDEX)?);
    Some(Attempt { key, number: index("_ng_attempt_index").unwrap_or(0) })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_oldest_request_is_named_by_its_rollout() {
        let runs = RunsInFlight::default();
        let start = Instant::now();
        let row = |text: &'static str| Rope::from(text);
        let nameless = runs.begin(start, 0, &row(r#"{"x":1}"#));
        let second = runs.begin(start, 5, &row(r#"{"_ng_task_index":3,"_ng_rollout_index":0,"_ng_attempt_index":1}"#));
        let first = runs.begin(start, 6, &row(r#"{"_ng_task_index":17,"_ng_rollout_index":2}"#));
        tokio::time::advance(Duration::from_secs(45)).await;
        let oldest = |rollout: Option<&str>| {
            Some(OldestRun { route: "/run".to_owned(), rollout: rollout.map(str::to_owned), seconds: 45 })
        };
        assert_eq!(runs.oldest(), oldest(None));
        drop(nameless);
        assert_eq!(runs.oldest(), oldest(Some("3-0-a1")));
        let [wait] = &runs.waits("shop", &WaitQuery::parse("trace=5"))[..] else { panic!("one has this trace") };
        assert_eq!((wait.rollout.as_deref(), &*wait.server, wait.age_us), (Some("3-0-a1"), "shop", 45_000_000));
        drop(second);
        assert_eq!(runs.oldest(), oldest(Some("17-2")));
        drop(first);
        assert_eq!(runs.oldest(), None);
    }
}

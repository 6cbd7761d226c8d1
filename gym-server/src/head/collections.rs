//! The collections that report to a head server: what its page shows of them.
//!
//! The state is soft and bounded. After a restart of the head server, the next reports restore it, except for attempts that ended before.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use gym_client::collect::monitor::{
    CollectionMonitor, CollectionReport, EndedAttempt, ReportReply, ReportedRow, WantedRow,
};
use gym_core::{CallContext, Code, Error, Result};
use parking_lot::{Mutex, MutexGuard};
use serde::{Deserialize, Serialize};
use tokio::sync::{oneshot, watch};
use tokio::time::Instant;

/// Collections that are kept. Those that ended longest ago are dropped first.
const COLLECTIONS_MAX: usize = 32;
/// Ended attempts of a collection that are kept: about 300 kB.
const ENDED_MAX: usize = 2_000;
/// Points of a collection's history; when it is full, each second point is dropped.
const HISTORY_MAX: usize = 480;
/// Rows of a collection that people wait for.
const WAITING_MAX: usize = 16;
/// Bytes of the texts of a report, without the rows: a report of this SDK has some tens of kilobytes.
const REPORT_BYTES_MAX: usize = 2 << 20;
/// Attempts and agents of one report.
const ENTRIES_MAX: usize = 4_096;
/// Time after which a collection that does not report is called silent.
pub(crate) const SILENT_AFTER: Duration = Duration::from_secs(10);

/// The collections of a head server. Cheap to clone; clones share the state.
#[derive(Clone, Debug)]
pub(crate) struct Collections(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// Counts the reports.
    version: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct State {
    collections: BTreeMap<String, Entry>,
    /// The number of the newest attempt that ended, over all collections.
    ended: u64,
}

#[derive(Debug)]
struct Entry {
    /// Without attempts and rows.
    report: CollectionReport,
    reported: Instant,
    ended: VecDeque<NumberedAttempt>,
    history: Vec<HistoryPoint>,
    /// Reports between two points of the history.
    stride: u64,
    reports: u64,
    waiting: Vec<(WantedRow, oneshot::Sender<ReportedRow>)>,
}

/// An attempt that ended, with its number at the head server.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct NumberedAttempt {
    pub(crate) number: u64,
    pub(crate) collection: String,
    #[serde(flatten)]
    pub(crate) attempt: EndedAttempt,
}

/// A collection at one time: milliseconds since the Unix epoch, finished rollouts, failed rollouts, rollouts in flight, mean reward.
type HistoryPoint = (u64, u64, u64, u64, Option<f64>);

/// A collection, for the page.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct CollectionView {
    #[serde(flatten)]
    pub(crate) report: CollectionReport,
    /// Milliseconds since the last report.
    pub(crate) silent_ms: u64,
    /// No report came for a while, and none said that the run ended.
    pub(crate) silent: bool,
    pub(crate) history: Vec<HistoryPoint>,
}

impl Default for Collections {
    fn default() -> Self {
        Self(Arc::new(Shared { state: Mutex::default(), version: watch::Sender::new(0) }))
    }
}

impl Collections {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock()
    }

    /// Returns the number of reports so far.
    pub(crate) fn version(&self) -> u64 {
        *self.0.version.borrow()
    }

    /// Returns the machines and processes of the collections that have not ended.
    pub(crate) fn collectors(&self) -> BTreeSet<(String, u32)> {
        let state = self.state();
        let running = state.collections.values().map(|entry| &entry.report).filter(|report| report.end.is_none());
        running.map(|report| (report.host.clone(), report.pid)).collect()
    }

    /// Waits until there were more reports than `seen`.
    pub(crate) async fn changed(&self, seen: u64) {
        let mut version = self.0.version.subscribe();
        // The sender lives as long as `self`.
        let _ = version.wait_for(|version| *version != seen).await;
    }

    /// Returns the collections, the newest first, and the attempts that ended after the one with this number, oldest first.
    pub(crate) fn view(&self, now: Instant, seen: u64) -> (Vec<CollectionView>, Vec<NumberedAttempt>) {
        let state = self.state();
        let mut ended: Vec<NumberedAttempt> = Vec::new();
        let views = state.collections.values().map(|entry| {
            let newer = entry.ended.partition_point(|ended| ended.number <= seen);
            ended.extend(entry.ended.range(newer..).cloned());
            let silent = now.duration_since(entry.reported);
            CollectionView {
                report: entry.report.clone(),
                silent_ms: u64::try_from(silent.as_millis()).unwrap_or(u64::MAX),
                silent: entry.report.end.is_none() && silent >= SILENT_AFTER,
                history: entry.history.clone(),
            }
        });
        let mut views: Vec<CollectionView> = views.collect();
        views.sort_by(|a, b| b.report.began_ms.cmp(&a.report.began_ms).then_with(|| a.report.id.cmp(&b.report.id)));
        ended.sort_by_key(|ended| ended.number);
        (views, ended)
    }

    /// Asks the collector for a row, and waits for it.
    ///
    /// # Errors
    /// `NotFound` for an unknown collection; `ResourceExhausted` if too many rows are waited for; `Unavailable` if the collector ended or
    /// does not report; `DeadlineExceeded`.
    pub(crate) async fn row(&self, cx: &CallContext, id: &str, wanted: WantedRow) -> Result<ReportedRow> {
        let row = {
            let mut state = self.state();
            let Some(entry) = state.collections.get_mut(id) else {
                return Err(Error::not_started(
                    Code::NotFound,
                    format!("no collection {id} reports to this head server"),
                ));
            };
            if entry.report.end.is_some() || entry.reported.elapsed() >= SILENT_AFTER {
                let text = format!(
                    "the collector of {output} is gone; use `rgym view {output} {}-{}` on {host}",
                    wanted.attempt.task,
                    wanted.attempt.repeat,
                    output = entry.report.output,
                    host = entry.report.host,
                );
                return Err(Error::not_started(Code::Unavailable, text));
            }
            entry.waiting.retain(|(_, waiting)| !waiting.is_closed());
            if entry.waiting.len() >= WAITING_MAX {
                let text = format!("{WAITING_MAX} rows are waited for already; repeat the request later");
                return Err(Error::not_started(Code::ResourceExhausted, text));
            }
            let (sender, row) = oneshot::channel();
            entry.waiting.push((wanted, sender));
            row
        };
        match tokio::time::timeout_at(cx.deadline, row).await {
            Ok(Ok(row)) => Ok(row),
            Ok(Err(_)) => Err(Error::not_started(Code::Unavailable, "the collection was dropped")),
            Err(_) => Err(Error::not_started(Code::DeadlineExceeded, "the collector did not send the row in time")),
        }
    }
}

#[async_trait]
impl CollectionMonitor for Collections {
    async fn report(&self, _: &CallContext, report: &CollectionReport) -> Result<ReportReply> {
        let reply = self.state().take(report.clone(), Instant::now())?;
        self.0.version.send_modify(|version| *version += 1);
        Ok(reply)
    }
}

impl State {
    fn take(&mut self, mut report: CollectionReport, now: Instant) -> Result<ReportReply> {
        check(&report)?;
        let (ended, rows) = (std::mem::take(&mut report.ended), std::mem::take(&mut report.rows));
        if !self.collections.contains_key(&report.id) && self.collections.len() >= COLLECTIONS_MAX {
            let oldest = self.collections.iter().min_by_key(|(_, entry)| (entry.report.end.is_none(), entry.reported));
            if let Some(id) = oldest.map(|(id, _)| id.clone()) {
                self.collections.remove(&id);
            }
        }
        let entry = self.collections.entry(report.id.clone()).or_insert_with(|| Entry {
            report: CollectionReport::default(),
            reported: now,
            ended: VecDeque::new(),
            history: Vec::new(),
            stride: 1,
            reports: 0,
            waiting: Vec::new(),
        });
        for attempt in ended {
            self.ended += 1;
            if entry.ended.len() >= ENDED_MAX {
                entry.ended.pop_front();
            }
            entry.ended.push_back(NumberedAttempt { number: self.ended, collection: report.id.clone(), attempt });
        }
        let last = entry.history.last().map_or(report.began_ms, |point| point.0);
        // Not the clock of this machine, which may differ: reports come once a second.
        let time = last + u64::try_from(now.duration_since(entry.reported).as_millis()).unwrap_or(0);
        if entry.reports.is_multiple_of(entry.stride) || report.end.is_some() {
            let done = report.completed + report.already_completed;
            entry.history.push((time, done, report.failed, report.in_flight, report.mean_reward));
        } else if let Some(point) = entry.history.last_mut() {
            point.0 = time;
        }
        if entry.history.len() >= HISTORY_MAX {
            let mut keep = false;
            entry.history.retain(|_| {
                keep = !keep;
                keep
            });
            entry.stride *= 2;
        }
        entry.reports += 1;
        (entry.report, entry.reported) = (report, now);
        for row in rows {
            let (answered, waiting) =
                std::mem::take(&mut entry.waiting).into_iter().partition(|(w, _)| *w == row.wanted);
            entry.waiting = waiting;
            for (_, waiting) in answered as Vec<(WantedRow, oneshot::Sender<ReportedRow>)> {
                // Its reader may have left.
                let _ = waiting.send(row.clone());
            }
        }
        entry.waiting.retain(|(_, waiting)| !waiting.is_closed());
        let mut wanted: Vec<WantedRow> = entry.waiting.iter().map(|(wanted, _)| *wanted).collect();
        wanted.sort_unstable();
        wanted.dedup();
        Ok(ReportReply { wanted })
    }
}

/// Checks the bounds of a report.
fn check(report: &CollectionReport) -> Result<()> {
    let texts = [&report.id, &report.host, &report.input, &report.output].iter().map(|text| text.len()).sum::<usize>();
    let agents = report.agents.iter().map(|(name, summary)| name.len() + summary.to_string().len()).sum::<usize>();
    let causes =
        report.causes.iter().flat_map(|cause| &cause.causes).map(|link| link.subject.len() + link.message.len());
    let bytes = texts + agents + causes.sum::<usize>();
    let entries = report.ended.len().max(report.agents.len()).max(report.oldest.len()).max(report.causes.len());
    if report.id.is_empty() || bytes > REPORT_BYTES_MAX || entries > ENTRIES_MAX {
        return Err(Error::invalid(format!(
            "a report needs an id, at most {REPORT_BYTES_MAX} bytes and at most {ENTRIES_MAX} attempts; this one has {bytes} bytes and {entries}"
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use gym_client::collect::monitor::AttemptId;
    use serde_json::value::RawValue;

    use super::*;

    fn report(id: &str, completed: u64) -> CollectionReport {
        let mut report = CollectionReport::default();
        (report.id, report.completed, report.rollouts) = (id.to_owned(), completed, 100_000);
        report
    }

    fn ended(task: u32) -> EndedAttempt {
        let attempt = AttemptId { task, repeat: 0, attempt: 0 };
        EndedAttempt {
            attempt,
            agent: "a".into(),
            ended_ms: 0,
            seconds: 1.0,
            reward: Some(1.0),
            class: None,
            tokens: None,
            truncated: None,
            phases: None,
        }
    }

    fn wanted(task: u32) -> WantedRow {
        WantedRow { attempt: AttemptId { task, repeat: 0, attempt: 0 }, failed: false }
    }

    #[tokio::test(start_paused = true)]
    async fn memory_is_bounded_whatever_collectors_report() {
        let (collections, cx) = (Collections::default(), CallContext::default());
        for id in 0..100_u64 {
            let mut ending = report(&format!("c{id}"), id);
            ending.end = (id % 2 == 0).then(|| "exhausted".to_owned());
            ending.ended = (0..3_000).map(ended).collect();
            collections.report(&cx, &ending).await.unwrap();
            tokio::time::advance(Duration::from_secs(1)).await;
        }
        let (views, attempts) = collections.view(Instant::now(), 0);
        assert_eq!((views.len(), attempts.len()), (COLLECTIONS_MAX, COLLECTIONS_MAX * ENDED_MAX));
        assert!(views.iter().all(|view| view.report.end.is_none()), "ended ones are dropped first");
        for second in 0..5_000 {
            collections.report(&cx, &report("long", second)).await.unwrap();
            tokio::time::advance(Duration::from_secs(1)).await;
        }
        let (views, _) = collections.view(Instant::now(), u64::MAX);
        let long = views.iter().find(|view| view.report.id == "long").unwrap();
        assert!(long.history.len() < HISTORY_MAX && long.history.len() > HISTORY_MAX / 3, "{}", long.history.len());
        assert!(long.history.is_sorted_by_key(|point| point.0));
        let (first, last) = (long.history[0], long.history.last().unwrap());
        assert!(first.1 < 20 && last.1 > 4_900 && last.0 > 4_900_000, "{first:?} {last:?}");
        let mut large = report("large", 0);
        large.output = "x".repeat(REPORT_BYTES_MAX + 1);
        assert_eq!(collections.report(&cx, &large).await.unwrap_err().code(), Code::InvalidArgument);
        assert_eq!(collections.report(&cx, &report("", 0)).await.unwrap_err().code(), Code::InvalidArgument);
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_gets_only_attempts_that_it_has_not_seen() {
        let (collections, cx) = (Collections::default(), CallContext::default());
        let mut first = report("c", 2);
        first.ended = vec![ended(0), ended(1)];
        collections.report(&cx, &first).await.unwrap();
        let (_, attempts) = collections.view(Instant::now(), 0);
        assert_eq!(attempts.iter().map(|a| (a.number, a.attempt.attempt.task)).collect::<Vec<_>>(), [(1, 0), (2, 1)]);
        first.ended = vec![ended(2)];
        collections.report(&cx, &first).await.unwrap();
        let (_, attempts) = collections.view(Instant::now(), 2);
        assert_eq!(attempts.iter().map(|a| a.attempt.attempt.task).collect::<Vec<_>>(), [2]);
    }

    #[tokio::test(start_paused = true)]
    async fn collectors_are_the_processes_whose_collection_has_not_ended() {
        let (collections, cx) = (Collections::default(), CallContext::default());
        for (id, pid, end) in [("a", 7, None), ("b", 8, Some("exhausted".to_owned())), ("c", 7, None)] {
            let mut report = report(id, 0);
            (report.host, report.pid, report.end) = ("h".to_owned(), pid, end);
            collections.report(&cx, &report).await.unwrap();
        }
        assert_eq!(collections.collectors(), BTreeSet::from([("h".to_owned(), 7)]));
    }

    #[tokio::test(start_paused = true)]
    async fn a_row_is_asked_for_in_a_reply_and_comes_with_a_report() {
        let (collections, cx) = (Collections::default(), CallContext::within(Duration::from_secs(5)));
        assert_eq!(collections.row(&cx, "c", wanted(7)).await.unwrap_err().code(), Code::NotFound);
        collections.report(&cx, &report("c", 0)).await.unwrap();
        let collector = async {
            let mut reply = ReportReply::default();
            while reply.wanted.is_empty() {
                tokio::time::sleep(Duration::from_secs(1)).await;
                reply = collections.report(&cx, &report("c", 1)).await.unwrap();
            }
            let mut answer = report("c", 1);
            let row = RawValue::from_string(r#"{"reward":1E0}"#.to_owned()).unwrap();
            answer.rows = vec![ReportedRow { wanted: reply.wanted[0], row: Some(row), problem: None }];
            assert!(collections.report(&cx, &answer).await.unwrap().wanted.is_empty());
            reply.wanted
        };
        let (a, b, asked) =
            tokio::join!(collections.row(&cx, "c", wanted(7)), collections.row(&cx, "c", wanted(7)), collector);
        assert_eq!(asked, [wanted(7)]);
        for row in [a.unwrap(), b.unwrap()] {
            assert_eq!(row.row.unwrap().get(), r#"{"reward":1E0}"#);
        }
        assert_eq!(collections.row(&cx, "c", wanted(8)).await.unwrap_err().code(), Code::DeadlineExceeded);
        tokio::time::advance(SILENT_AFTER).await;
        let error = collections.row(&CallContext::default(), "c", wanted(8)).await.unwrap_err();
        assert_eq!(error.code(), Code::Unavailable);
        assert!(collections.view(Instant::now(), 0).0[0].silent);
    }
}

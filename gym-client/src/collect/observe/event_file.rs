//! Writes events to a file: a bounded queue, and a task that writes it.
//!
//! A rollout never waits for the file. While the file takes nothing (a full disk, a pipe whose reader stands still), the queue fills;
//! further events are dropped and counted, and a `dropped` line stands in their place.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::FutureExt as _;
use gym_core::{Result, World};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use crate::collect::observe::line::{self, RunEnded, RunStarted};
use crate::collect::observe::target::{EventTarget, Written};
use crate::collect::run::{RolloutEvent, RolloutObserver};

/// Events that wait for the file: a second of 16,000 rollouts that start or end, about 4 MB.
const QUEUE_EVENTS: usize = 16_384;
/// Interval of the writes. A reader sees a line within this time, and thousands of rollouts share one write.
const WRITE_INTERVAL: Duration = Duration::from_millis(100);
const WRITE_BYTES: usize = 256 << 10;
/// Limit for the last writes of a run.
const END_TIMEOUT: Duration = Duration::from_secs(5);

/// The events file of one run.
#[derive(Debug)]
pub(in crate::collect) struct EventFile {
    path: String,
    queue: Arc<EventQueue>,
    end: Option<oneshot::Sender<RunEnded>>,
    writer: JoinSet<Lost>,
}

/// The driver's end of the queue.
#[derive(Debug)]
struct EventQueue {
    events: mpsc::Sender<RolloutEvent>,
    dropped: AtomicU64,
}

/// Events that are not in the file, and the last error.
#[derive(Debug, Default)]
struct Lost {
    events: u64,
    error: Option<String>,
}

impl RolloutObserver for EventQueue {
    fn observe(&self, event: RolloutEvent) {
        if self.events.try_send(event).is_err() {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl EventFile {
    /// Removes the contents of the file, unless the run is a resumed one, and writes its first line.
    ///
    /// # Errors
    /// The error of the disk.
    pub(in crate::collect) fn start(
        path: &Path,
        mut target: EventTarget,
        world: &World,
        run: &RunStarted,
    ) -> Result<Self> {
        target.begin(run.resumed).map_err(|error| error.about(format!("write events to {}", path.display())))?;
        line::run_started(world.now(), run, target.pending());
        let (events, waiting) = mpsc::channel(QUEUE_EVENTS);
        let queue = Arc::new(EventQueue { events, dropped: AtomicU64::new(0) });
        let (end, ends) = oneshot::channel();
        let path = path.display().to_string();
        let writer = EventWriter {
            path: path.clone(),
            waiting,
            queue: Arc::clone(&queue),
            world: world.clone(),
            target: Some(target),
            told: 0,
            lost: Lost::default(),
        };
        let mut task = JoinSet::new();
        task.spawn(writer.run(ends).boxed());
        Ok(Self { path, queue, end: Some(end), writer: task })
    }

    /// Returns the observer for the driver.
    pub(in crate::collect) fn observer(&self) -> Arc<dyn RolloutObserver> {
        Arc::clone(&self.queue) as _
    }

    /// Writes the last line. Returns a warning and the number of dropped events if the file does not have all events.
    pub(in crate::collect) async fn end(mut self, run: RunEnded) -> Option<(u64, String)> {
        if let Some(end) = self.end.take() {
            // The writer waits for it until it is sent.
            let _ = end.send(run);
        }
        let lost = match timeout(3 * END_TIMEOUT, self.writer.join_next()).await {
            Ok(Some(Ok(lost))) => lost,
            ended => {
                let why = if ended.is_err() { "a write did not end" } else { "the writer panicked" };
                // At least those that were dropped, and the last line.
                Lost { events: self.queue.dropped.load(Ordering::Relaxed) + 1, error: Some(why.to_owned()) }
            }
        };
        let why = lost.error.unwrap_or_else(|| "the file or its reader was too slow".to_owned());
        (lost.events > 0).then(|| {
            let text =
                format!("{}: {} events are missing: {why}; the rollouts are not affected", self.path, lost.events);
            (lost.events, text)
        })
    }
}

struct EventWriter {
    path: String,
    waiting: mpsc::Receiver<RolloutEvent>,
    queue: Arc<EventQueue>,
    world: World,
    /// `None` while a write runs, and after a write that did not end.
    target: Option<EventTarget>,
    /// Dropped events that have a line.
    told: u64,
    lost: Lost,
}

impl EventWriter {
    async fn run(mut self, mut ends: oneshot::Receiver<RunEnded>) -> Lost {
        // A write that does not end has its limit in `EventFile::end`.
        let far = Duration::from_secs(86_400);
        let ended = loop {
            while self.write(far).await == Some(true) && !self.waiting.is_empty() {}
            tokio::select! {
                biased;
                ended = &mut ends => break ended,
                () = tokio::time::sleep(WRITE_INTERVAL) => {}
            }
        };
        let Ok(run) = ended else { return self.lost };
        let deadline = Instant::now() + END_TIMEOUT;
        self.write_all(deadline).await;
        let dropped = self.queue.dropped.load(Ordering::Relaxed) + self.lost.events;
        if let Some(target) = &mut self.target {
            line::run_ended(self.world.now(), &run, dropped, target.pending());
        }
        self.write_all(deadline).await;
        // The last line counts as an event, so that its absence is reported too.
        let unwritten = self.target.as_ref().map_or(1, EventTarget::lines_pending) + self.waiting.len() as u64;
        self.lost.events += self.queue.dropped.load(Ordering::Relaxed) + unwritten;
        self.lost
    }

    /// Writes until nothing waits, the deadline passes, or a write fails.
    async fn write_all(&mut self, deadline: Instant) {
        loop {
            let taking = self.write(END_TIMEOUT).await;
            let idle = self.waiting.is_empty() && self.target.as_ref().is_none_or(|target| target.lines_pending() == 0);
            if idle || Instant::now() >= deadline || taking == Some(false) {
                return;
            }
            if taking.is_none() {
                tokio::time::sleep(WRITE_INTERVAL).await;
            }
        }
    }

    /// Takes events from the queue and writes them. Returns `Some(true)` if the file took them, `None` if it is full for now, and
    /// `Some(false)` if it fails.
    async fn write(&mut self, limit: Duration) -> Option<bool> {
        let target = self.target.as_mut()?;
        while target.pending().len() < WRITE_BYTES {
            match self.waiting.try_recv() {
                Ok(event) => line::event(&event, target.pending()),
                Err(_) => {
                    // After the events that were queued before them.
                    let dropped = self.queue.dropped.load(Ordering::Relaxed);
                    if dropped > self.told {
                        line::dropped(self.world.now(), dropped - self.told, target.pending());
                        self.told = dropped;
                    }
                    break;
                }
            }
        }
        if target.pending().is_empty() {
            return Some(true);
        }
        let lines = target.lines_pending();
        let mut target = self.target.take()?;
        let writing = tokio::task::spawn_blocking(move || {
            let written = target.write();
            (target, written)
        });
        let Ok(Ok((target, written))) = timeout(limit, writing).await else {
            self.lost.events += lines;
            self.fail("a write did not end".to_owned());
            return Some(false);
        };
        self.target = Some(target);
        match written {
            Written::All => Some(true),
            Written::Full => None,
            Written::Failed { error, lines_lost } => {
                self.lost.events += lines_lost;
                self.fail(error.to_string());
                Some(false)
            }
        }
    }

    fn fail(&mut self, error: String) {
        if self.lost.error.is_none() {
            let file = &self.path;
            tracing::warn!(
                file,
                error,
                "events cannot be written now; rollouts continue, and missing events are counted"
            );
        }
        self.lost.error = Some(error);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::os::unix::fs::OpenOptionsExt as _;

    use gym_core::rollout::{Attempt, TaskKey};
    use serde_json::Value;

    use super::*;
    use crate::collect::run::RolloutEventKind;

    fn started(task: u32) -> RolloutEvent {
        let attempt = Attempt { key: TaskKey::new(task, 0), number: 0 };
        RolloutEvent { time: Duration::ZERO, attempt, agent: "a".into(), kind: RolloutEventKind::Started }
    }

    fn lines(text: &[u8]) -> Vec<Value> {
        text.split_inclusive(|byte| *byte == b'\n').map(|line| serde_json::from_slice(line).unwrap()).collect()
    }

    async fn start(path: &Path) -> EventFile {
        let target = EventTarget::open(path).await.unwrap();
        EventFile::start(path, target, &World::real(), &RunStarted::default()).unwrap()
    }

    #[tokio::test]
    async fn all_events_are_in_the_file_between_the_first_line_and_the_last() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("events.jsonl");
        let events = start(&path).await;
        let observer = events.observer();
        for task in 0..10_000 {
            observer.observe(started(task));
        }
        assert_eq!(events.end(RunEnded { end: "exhausted", ..RunEnded::default() }).await, None);
        let lines = lines(&std::fs::read(&path).unwrap());
        assert_eq!(lines.len(), 10_002);
        assert_eq!((&lines[0]["event"], &lines[0]["format"]), (&"run_started".into(), &1.into()));
        for (task, line) in lines[1..=10_000].iter().enumerate() {
            assert_eq!(line["task_index"], task);
        }
        assert_eq!((&lines[10_001]["event"], &lines[10_001]["end"]), (&"run_ended".into(), &"exhausted".into()));
    }

    #[tokio::test]
    async fn a_reader_sees_a_line_while_the_run_goes_on() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("events.jsonl");
        let events = start(&path).await;
        events.observer().observe(started(0));
        let deadline = Instant::now() + Duration::from_secs(60);
        while lines(&std::fs::read(&path).unwrap()).len() < 2 {
            assert!(Instant::now() < deadline, "the line is not in the file");
            tokio::task::yield_now().await;
        }
        events.end(RunEnded::default()).await;
    }

    #[tokio::test]
    async fn a_reader_that_stands_still_costs_events_and_no_time_and_the_loss_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pipe");
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap();
        let nonblocking = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
        let mut reader = std::fs::OpenOptions::new().read(true).custom_flags(nonblocking).open(&path).unwrap();
        let events = start(&path).await;
        let observer = events.observer();
        let sent = 3 * QUEUE_EVENTS as u32;
        (0..sent).for_each(|task| observer.observe(started(task)));
        let (dropped, warning) = events.end(RunEnded::default()).await.expect("events are missing");
        let mut text = vec![0; 1 << 20];
        let read = reader.read(&mut text).unwrap();
        let whole = text[..read].iter().rposition(|byte| *byte == b'\n').unwrap() + 1;
        // All but the line that tells the start of the run.
        let arrived = lines(&text[..whole]).len() as u64 - 1;
        // The last line is missing too, and lines that tell of the loss.
        let missing = u64::from(sent) + 1 - arrived;
        assert!((missing..missing + 3).contains(&dropped), "{missing} are missing; {warning}");
        assert!(warning.contains("pipe") && warning.contains("too slow"), "{warning}");
    }

    #[tokio::test]
    async fn a_full_disk_is_told_with_its_cause() {
        let events = start(Path::new("/dev/full")).await;
        events.observer().observe(started(0));
        let (dropped, warning) = events.end(RunEnded::default()).await.expect("events are missing");
        assert_eq!(dropped, 3, "with the first and the last line");
        assert!(warning.contains("/dev/full") && warning.contains("No space left"), "{warning}");
    }
}

//! Displays the progress of a collection: a bar on a terminal, and a line every few seconds elsewhere.

use std::collections::VecDeque;
use std::fmt::Write;
use std::io::IsTerminal;
use std::sync::Arc;
use std::time::Duration;

use gym_client::collect::{CollectProgress, ProgressSnapshot};
use gym_core::CancelToken;
use gym_core::observe::waits::turns_of;
use gym_core::rollout::{Attempt, FailureClass};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior, interval};

use crate::cli::args::options::ProgressMode;
use crate::cli::collect::causes;
use crate::cli::collect::figures::duration;
use crate::cli::console::Console;

/// Interval of the bar's updates.
const BAR_INTERVAL: Duration = Duration::from_millis(100);
/// Interval at which a new cause of failures is noticed without a bar.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Interval of the lines: rare enough for a log file.
const LINE_INTERVAL: Duration = Duration::from_secs(5);
/// Causes that are described when they first occur.
const CAUSES_DESCRIBED_MAX: usize = 8;
/// Characters up to which a line has all its details: beside a bar, it fits into a terminal of 140 columns.
const LINE_CHARS_MAX: usize = 118;
/// Age from which the oldest rollout in flight is shown. Those of short episodes change too fast to be read.
const OLD_AFTER: Duration = Duration::from_secs(5);
/// Time span over which the rate is measured, so that a slow start does not affect the estimate.
const RATE_WINDOW: Duration = Duration::from_secs(15);

/// An attempt and the turns that the model has had in it.
type TurnsOf = (Attempt, u32);

/// Displays `progress` until `ended` fires, and prints one line when `stop` fires. `waits_for` is the text about model endpoints that do
/// not respond, empty if there are none; its first text is displayed at once.
pub(super) async fn show(
    progress: Arc<CollectProgress>,
    mut waits_for: watch::Receiver<String>,
    mode: ProgressMode,
    console: Console,
    stop_grace: Duration,
    stop: CancelToken,
    ended: CancelToken,
) {
    let bar = match mode {
        ProgressMode::Bar => true,
        ProgressMode::Auto => std::io::stderr().is_terminal(),
        ProgressMode::Plain | ProgressMode::None => false,
    };
    let every = if bar { BAR_INTERVAL } else { POLL_INTERVAL };
    let bar = bar.then(|| {
        let bar = ProgressBar::with_draw_target(Some(1), ProgressDrawTarget::stderr());
        // The template is a constant with known keys; if it were invalid, the default style would be used.
        if let Ok(style) = ProgressStyle::with_template("{bar:20} {msg}") {
            bar.set_style(style);
        }
        console.keep_below(&bar);
        bar
    });
    let mut ticks = interval(every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut rate = Rate::default();
    let mut stopping = false;
    let mut described = 0;
    let mut next_line = Instant::now();
    let (mut watched, mut waited) = (true, false);
    let (mut turns, mut next_turns) = (None, next_line);
    loop {
        tokio::select! {
            biased;
            () = ended.cancelled() => break,
            () = stop.cancelled(), if !stopping => {
                stopping = true;
                let in_flight = progress.snapshot().in_flight;
                console.line(&format!(
                    "stopping: {in_flight} rollouts in flight may take up to {stop_grace:?}; repeat the signal to stop at once"
                ));
            }
            changed = waits_for.changed(), if watched => {
                watched = changed.is_ok();
                let waits = !waits_for.borrow_and_update().is_empty();
                // The seconds of the text change all the time; only a new failure is shown between the ticks.
                if waits && !waited {
                    next_line = Instant::now();
                    ticks.reset_immediately();
                }
                waited = waits;
            }
            now = ticks.tick() => {
                let snapshot = progress.snapshot();
                if mode != ProgressMode::None {
                    // A cause is described once, when it first occurs; the summary lists all.
                    let causes = snapshot.causes.iter().take(CAUSES_DESCRIBED_MAX).skip(described);
                    described += causes.map(|cause| console.line(&causes::line(cause))).count();
                }
                let waits_for = waits_for.borrow().clone();
                rate.add(now, snapshot.completed + snapshot.given_up);
                if now >= next_turns {
                    next_turns = now + LINE_INTERVAL;
                    turns = turns_of_oldest(&snapshot);
                }
                match &bar {
                    Some(bar) if snapshot.total == 0 => bar.set_message("reading the tasks"),
                    Some(bar) => {
                        bar.set_length(snapshot.total);
                        bar.set_position(snapshot.done());
                        bar.set_message(line(&snapshot, rate.per_second(), turns, &waits_for));
                    }
                    // Nothing is printed before the rows are counted.
                    None if mode != ProgressMode::None && snapshot.total > 0 && now >= next_line => {
                        next_line = now + LINE_INTERVAL;
                        console.line(&line(&snapshot, rate.per_second(), turns, &waits_for));
                    }
                    None => {}
                }
            }
        }
    }
    console.clear();
}

/// Measures rollouts per second over [`RATE_WINDOW`].
#[derive(Debug, Default)]
struct Rate {
    seen: VecDeque<(Instant, u64)>,
}

impl Rate {
    fn add(&mut self, now: Instant, done: u64) {
        self.seen.push_back((now, done));
        // The oldest sample stays until the next one is also older than the window, so that the window is covered.
        while self.seen.get(1).is_some_and(|(at, _)| now.duration_since(*at) >= RATE_WINDOW) {
            self.seen.pop_front();
        }
    }

    fn per_second(&self) -> Option<f64> {
        let ((began, before), (now, done)) = (self.seen.front()?, self.seen.back()?);
        let took = now.duration_since(*began).as_secs_f64();
        (took > 0.0).then(|| done.saturating_sub(*before) as f64 / took)
    }
}

/// The details of a line that are left out, one after another, until it is short enough.
#[derive(Clone, Copy)]
struct Detail {
    /// Classes of failures that are named; the others are counted.
    classes_max: usize,
    /// The agent and the attempt of the oldest rollout.
    oldest_agent: bool,
    /// The percentage of ended rollouts.
    percent: bool,
}

const DETAILS: [Detail; 4] = [
    Detail { classes_max: 3, oldest_agent: true, percent: true },
    Detail { classes_max: 1, oldest_agent: true, percent: true },
    Detail { classes_max: 1, oldest_agent: false, percent: true },
    Detail { classes_max: 1, oldest_agent: false, percent: false },
];

/// Formats `120/1000 rollouts (12.0%), 350.2/s, ETA 00:00:02, mean reward 0.532, 16 in flight, 3 failed (attempts: 5 model_error)`, and
/// the oldest rollout in flight once it is old.
fn line(snapshot: &ProgressSnapshot, rate: Option<f64>, turns: Option<TurnsOf>, waits_for: &str) -> String {
    let turns = turns.filter(|(attempt, _)| snapshot.oldest.as_ref().is_some_and(|oldest| oldest.attempt == *attempt));
    let turns = turns.map(|(_, turns)| turns);
    let texts = DETAILS.map(|detail| counts(snapshot, rate, turns, detail));
    let fits = |text: &&String| text.chars().count() <= LINE_CHARS_MAX;
    let mut text = texts.iter().find(fits).unwrap_or(&texts[DETAILS.len() - 1]).clone();
    if !waits_for.is_empty() {
        // Writing to a string cannot fail.
        let _ = write!(text, "; {waits_for}");
    }
    text
}

/// Returns the turns of the oldest rollout in flight, if its agent runs in this process.
fn turns_of_oldest(snapshot: &ProgressSnapshot) -> Option<TurnsOf> {
    let oldest = snapshot.oldest.as_ref().filter(|oldest| oldest.age >= OLD_AFTER)?;
    Some((oldest.attempt, turns_of(&oldest.attempt.to_string(), OLD_AFTER)?))
}

fn counts(snapshot: &ProgressSnapshot, rate: Option<f64>, turns: Option<u32>, detail: Detail) -> String {
    let (done, total) = (snapshot.done(), snapshot.total);
    let mut text = format!("{done}/{total} rollouts");
    if total > 0 && detail.percent {
        let _ = write!(text, " ({:.1}%)", 100.0 * done as f64 / total as f64);
    }
    if let Some(rate) = rate {
        let _ = write!(text, ", {rate:.1}/s");
    }
    if let Some(rate) = rate.filter(|rate| *rate > 0.0)
        && done < total
    {
        let seconds = ((total - done) as f64 / rate).ceil() as u64;
        let _ = write!(text, ", ETA {:02}:{:02}:{:02}", seconds / 3_600, seconds / 60 % 60, seconds % 60);
    }
    if let Some(mean) = snapshot.mean_reward() {
        let _ = write!(text, ", mean reward {mean:.3}");
    }
    let _ = write!(text, ", {} in flight", snapshot.in_flight);
    if let Some(pool) = &snapshot.pool {
        let suspect = match pool.workers.iter().filter(|worker| worker.suspect.is_some()).count() {
            0 => String::new(),
            suspect => format!(", {suspect} suspect"),
        };
        let _ = write!(text, " ({} wait; {} workers{suspect})", pool.waiting, pool.workers.len());
        if pool.workers_lost > 0 {
            let _ = write!(text, ", {} workers lost", pool.workers_lost);
        }
    }
    let failed = snapshot.given_up + snapshot.already_given_up;
    if failed > 0 {
        let _ = write!(text, ", {failed} failed");
    }
    if let Some(classes) = failed_attempts(snapshot, detail.classes_max) {
        let _ = write!(text, " ({classes})");
    }
    if let Some(oldest) = snapshot.oldest.as_ref().filter(|oldest| oldest.age >= OLD_AFTER) {
        let _ = write!(text, ", oldest {} {}", oldest.attempt.key, duration(oldest.age));
        if let Some(turns) = turns {
            let _ = write!(text, ", {turns} turns");
        }
        if detail.oldest_agent {
            let _ = write!(text, " ({}", oldest.agent);
            if oldest.attempt.number > 0 {
                let _ = write!(text, ", attempt {}", oldest.attempt.number + 1);
            }
            text.push(')');
        }
    }
    text
}

/// Formats the failed attempts, the most frequent classes first: `attempts: 3 model_error, 1 tool_error, 1 other`.
fn failed_attempts(snapshot: &ProgressSnapshot, classes_max: usize) -> Option<String> {
    let mut classes: Vec<(&FailureClass, &u64)> = snapshot.failures.iter().collect();
    classes.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
    let (named, others) = classes.split_at(classes_max.min(classes.len()));
    let mut words: Vec<String> = named.iter().map(|(class, count)| format!("{count} {class}")).collect();
    let others: u64 = others.iter().map(|(_, count)| **count).sum();
    words.extend((others > 0).then(|| format!("{others} other")));
    (!words.is_empty()).then(|| format!("attempts: {}", words.join(", ")))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use gym_client::collect::{AgentScore, OldestRollout};
    use gym_client::work::{WorkPoolSnapshot, WorkerSnapshot};
    use gym_core::Incarnation;
    use gym_core::rollout::TaskKey;

    use super::*;

    #[test]
    fn the_line_says_how_far_how_fast_how_well_and_how_long() {
        let score = AgentScore { count: 100, reward_sum: 53.2, unscored: 0 };
        let mut snapshot = ProgressSnapshot::default();
        snapshot.total = 1_000;
        snapshot.completed = 100;
        snapshot.already_completed = 17;
        snapshot.given_up = 3;
        snapshot.in_flight = 16;
        snapshot.scores = BTreeMap::from([(Arc::from("a"), score)]);
        let expected = "120/1000 rollouts (12.0%), 0.5/s, ETA 00:29:20, mean reward 0.532, 16 in flight, 3 failed";
        assert_eq!(line(&snapshot, Some(0.5), None, ""), expected);
        let mut worker = WorkerSnapshot::new("w", Incarnation(1), 8);
        worker.held = 8;
        worker.suspect = Some("no heartbeat for 2.0 s".to_owned());
        let mut pool = WorkPoolSnapshot::default();
        pool.waiting = 8;
        pool.held = 8;
        pool.workers = vec![worker];
        let mut pulled = ProgressSnapshot::default();
        pulled.total = 20;
        pulled.in_flight = 16;
        pulled.pool = Some(pool);
        assert_eq!(line(&pulled, None, None, ""), "0/20 rollouts (0.0%), 16 in flight (8 wait; 1 workers, 1 suspect)");
        let waits = line(&ProgressSnapshot::default(), None, None, "m: http://h/v1 is unavailable");
        assert_eq!(waits, "0/0 rollouts, 0 in flight; m: http://h/v1 is unavailable");
    }

    fn oldest(seconds: u64) -> Option<OldestRollout> {
        let attempt = Attempt { key: TaskKey::new(17, 3), number: 1 };
        Some(OldestRollout { attempt, agent: Arc::from("math_agent"), age: Duration::from_secs(seconds) })
    }

    #[test]
    fn the_line_names_failures_by_class_and_the_oldest_rollout_once_it_is_old() {
        let mut snapshot = ProgressSnapshot::default();
        snapshot.in_flight = 1;
        snapshot.oldest = oldest(4);
        assert_eq!(line(&snapshot, None, None, ""), "0/0 rollouts, 1 in flight");
        snapshot.oldest = oldest(45);
        snapshot.failures = BTreeMap::from([(FailureClass::ToolError, 1), (FailureClass::ModelError, 2)]);
        assert_eq!(
            line(&snapshot, None, None, ""),
            "0/0 rollouts, 1 in flight (attempts: 2 model_error, 1 tool_error), oldest 17-3 45.0 s (math_agent, attempt 2)"
        );
        let turns = Some((Attempt { key: TaskKey::new(17, 3), number: 1 }, 231));
        assert!(line(&snapshot, None, turns, "").ends_with(", oldest 17-3 45.0 s, 231 turns (math_agent, attempt 2)"));
        let of_another = Some((Attempt { key: TaskKey::new(17, 3), number: 0 }, 9));
        assert!(!line(&snapshot, None, of_another, "").contains("turns"));
    }

    #[test]
    fn a_long_line_leaves_out_details_and_no_count() {
        let score = AgentScore { count: 100, reward_sum: 53.2, unscored: 0 };
        let mut snapshot = ProgressSnapshot::default();
        snapshot.total = 1_000_000;
        snapshot.completed = 120_000;
        snapshot.given_up = 3_000;
        snapshot.in_flight = 1_024;
        snapshot.oldest = oldest(7_200);
        snapshot.scores = BTreeMap::from([(Arc::from("a"), score)]);
        snapshot.failures = BTreeMap::from([
            (FailureClass::ToolError, 7),
            (FailureClass::TransportUnreachable, 9_000),
            (FailureClass::ModelError, 3),
            (FailureClass::JudgeFailed, 1),
        ]);
        let expected = "123000/1000000 rollouts, 350.2/s, ETA 00:41:45, mean reward 0.532, 1024 in flight, 3000 failed (attempts: \
                        9000 transport_unreachable, 11 other), oldest 17-3 2.0 h";
        assert_eq!(line(&snapshot, Some(350.2), None, ""), expected);
    }

    #[tokio::test(start_paused = true)]
    async fn the_rate_ignores_samples_before_the_window() {
        let mut rate = Rate::default();
        let began = Instant::now();
        for second in 0..=60 {
            // No rollouts for half a minute, then ten per second.
            rate.add(began + Duration::from_secs(second), 10 * second.saturating_sub(30));
        }
        assert_eq!(rate.per_second(), Some(10.0));
        assert_eq!(rate.seen.len(), 16);
    }
}

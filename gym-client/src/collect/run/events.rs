//! Events of running rollouts, for programs that watch a collection: attempts that start, finish and fail.
//!
//! Events are no record of a run: the ledger is. An event is built only if an observer is set.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use gym_core::message::shorten;
use gym_core::rollout::{Attempt, EPISODE_KEY, FailureClass, Phases};
use gym_core::{RawObject, World};
use serde::{Deserialize, Serialize};

use crate::collect::run::failure::AttemptFailure;
use crate::collect::run::outcome::{AttemptResult, cut_off};
use crate::collect::run::progress::EpisodeFigures;
use crate::collect::run::row::RolloutRow;

/// Characters of a cause: enough for the chain of calls. The failures file has the whole text.
const CAUSE_CHARS_MAX: usize = 2_000;

/// Receives the events of a [`Driver`](crate::collect::Driver).
///
/// The driver calls it from the tasks of the rollouts, concurrently. The events of one rollout come in order. An implementation must
/// return at once: what it waits for, the rollout waits for.
pub trait RolloutObserver: fmt::Debug + Send + Sync + 'static {
    /// Returns `true` if the observer wants the events of an attempt, which starts now. Called once for each attempt; an event that no
    /// observer wants is not built. With several observers, each gets the events that one of them wants.
    fn wants(&self, attempt: Attempt) -> bool {
        let _ = attempt;
        true
    }

    /// Takes one event.
    fn observe(&self, event: RolloutEvent);
}

/// Two observers of one driver.
#[derive(Debug)]
pub(super) struct BothObservers(pub(super) Arc<dyn RolloutObserver>, pub(super) Arc<dyn RolloutObserver>);

impl RolloutObserver for BothObservers {
    fn wants(&self, attempt: Attempt) -> bool {
        // Each is asked, because each may count.
        let (first, second) = (self.0.wants(attempt), self.1.wants(attempt));
        first || second
    }

    fn observe(&self, event: RolloutEvent) {
        self.0.observe(event.clone());
        self.1.observe(event);
    }
}

/// One event of an attempt at a rollout.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RolloutEvent {
    /// The time of day, since the Unix epoch.
    pub time: Duration,
    /// The attempt.
    pub attempt: Attempt,
    /// The agent of the rollout.
    pub agent: Arc<str>,
    /// The event.
    pub kind: RolloutEventKind,
}

/// An event of an attempt. Each attempt that starts has one more event, unless the run ends first. An attempt that exceeded its
/// deadline fails, and may still finish later.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum RolloutEventKind {
    /// The attempt started.
    Started,
    /// The scored row is on the disk.
    Finished(FinishedAttempt),
    /// The failure is on the disk, or the attempt exceeded its deadline.
    Failed(FailedAttempt),
    /// The environment asked to keep no row (`_ng_no_persist`). A resumed run tries the rollout again.
    Unrecorded,
}

/// A scored attempt.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct FinishedAttempt {
    /// The reward; `None` if the environment gave none, or masked it.
    pub reward: Option<f64>,
    /// Duration of the attempt.
    pub duration: Duration,
    /// The usage of tokens, if it is known.
    pub tokens: Option<TokenUsage>,
    /// The limit that cut the episode or its last response off, if one did.
    pub truncated: Option<String>,
    /// Failed tool calls that the model did not cause.
    pub tool_failures: u32,
    /// The calls of the episode with their times, as [`Phases`](gym_core::rollout::Phases) has them; `None` if the agent does not report them.
    pub phases: Option<String>,
}

/// A failed attempt.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct FailedAttempt {
    /// The class of the failure.
    pub class: FailureClass,
    /// The innermost server whose call failed.
    pub server: String,
    /// The route of that call.
    pub route: String,
    /// The causes, from that call on, in one text.
    pub cause: String,
    /// Duration of the attempt.
    pub duration: Duration,
    /// Whether this run attempts the rollout again.
    pub retried: bool,
}

/// Tokens of one rollout: of all turns, if its agent counts them, or else those of `response.usage`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct TokenUsage {
    /// Tokens of the prompts.
    #[serde(rename = "input_tokens")]
    pub input: u64,
    /// Generated tokens.
    #[serde(rename = "output_tokens")]
    pub output: u64,
}

/// The observer of a driver, with the clock of its events.
#[derive(Clone, Debug)]
pub(super) struct Observed {
    pub(super) observer: Arc<dyn RolloutObserver>,
    pub(super) world: World,
}

impl Observed {
    pub(super) fn tell(&self, row: &RolloutRow, attempt: Attempt, kind: RolloutEventKind) {
        let (time, agent) = (self.world.now(), Arc::clone(&row.agent));
        self.observer.observe(RolloutEvent { time, attempt, agent, kind });
    }
}

impl RolloutEventKind {
    /// Returns the event for the result of an attempt. Whether a failed one is retried is decided later.
    pub(super) fn of(result: &AttemptResult, duration: Duration) -> Self {
        match result {
            AttemptResult::Completed { row, figures } => {
                let course = row.get_object(EPISODE_KEY).ok().flatten();
                let text = |key: &str| course.as_ref()?.get_as::<Option<String>>(key).ok()??;
                Self::Finished(FinishedAttempt {
                    reward: figures.reward,
                    duration,
                    tokens: tokens(row, figures.episode),
                    truncated: text("truncated").or_else(|| cut_off(row).map(|details| details.why())),
                    tool_failures: figures.episode.map_or(0, |episode| episode.tool_failures),
                    phases: course
                        .as_ref()
                        .and_then(|course| course.get_as::<Phases>("phases").ok()?)
                        .map(|phases| phases.to_string()),
                })
            }
            AttemptResult::Failed { failure, .. } => Self::failed(failure, duration),
            AttemptResult::Lost => Self::Unrecorded,
        }
    }

    pub(super) fn failed(failure: &AttemptFailure, duration: Duration) -> Self {
        let causes: Vec<String> = failure.own_causes().map(ToString::to_string).collect();
        let mut cause = causes.join(": ");
        shorten(&mut cause, CAUSE_CHARS_MAX);
        let (server, route) = (failure.server.clone(), failure.route.clone());
        Self::Failed(FailedAttempt { class: failure.class, server, route, cause, duration, retried: false })
    }

    pub(super) fn with_retried(self, retried: bool) -> Self {
        match self {
            Self::Failed(failed) => Self::Failed(FailedAttempt { retried, ..failed }),
            other => other,
        }
    }
}

/// Returns the tokens of all turns as the agent counted them, or else those that the row's response tells.
fn tokens(row: &RawObject, episode: Option<EpisodeFigures>) -> Option<TokenUsage> {
    if let Some((input, output)) = episode.and_then(|episode| episode.tokens) {
        return Some(TokenUsage { input: input.into(), output: output.into() });
    }
    row.get_object("response").ok()??.get_as("usage").ok()?
}

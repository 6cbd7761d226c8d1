//! Who is in a group at one moment. A view never changes: ranks, incarnations, states and channels change together, so that a
//! call and a restart cannot race.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::channel::Channel;
use crate::context::Incarnation;
use crate::error::{Code, Error};
use crate::layout::Rank;

/// A group at one moment.
#[derive(Clone, Debug, Default)]
pub struct GroupView {
    /// Grows with every change.
    pub generation: u64,
    /// One for each rank, ascending by rank.
    members: Vec<Member>,
}

/// One rank at one moment.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Member {
    /// Which rank.
    pub rank: Rank,
    /// Which life of it: the present one, or the last one.
    pub incarnation: Incarnation,
    /// How it is.
    pub state: RankState,
    /// How it is reached; `None` while it has no address.
    pub channel: Option<Channel>,
    /// How the last of its lives that ended did.
    pub exit: Option<Arc<RankExit>>,
}

/// How a rank is. Only [`RankState::Healthy`] ones are called.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum RankState {
    /// Not ready for the first time.
    Starting,
    /// Takes calls.
    Healthy,
    /// Late with a sign of life; what it runs is still waited for.
    Suspect,
    /// Its process has ended.
    Dead,
    /// Another life of it is starting.
    Restarting,
    /// Restarted, and without what it needs to serve, such as the current weights.
    Stale,
    /// Ended more often than its budget allows.
    Retired,
    /// Ended because it was told to.
    Stopped,
}

/// How one life of a rank ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RankExit {
    /// Which life.
    pub incarnation: u64,
    /// Why, as far as that is known.
    pub cause: ExitCause,
    /// The process's exit code, if it ended by itself.
    pub code: Option<i32>,
    /// The signal that ended the process, if one did.
    pub signal: Option<i32>,
    /// What else is known, with the fix; may be empty.
    pub detail: String,
    /// What it wrote last to its standard error, a line each.
    pub stderr_tail: Vec<String>,
}

/// Why a life of a rank ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ExitCause {
    /// Its process ended, or its host was killed.
    Died,
    /// It did not get as far as taking calls.
    StartFailed,
    /// It was ended because it used more memory than it may.
    MemoryLimitExceeded,
    /// It was ended because a rank that it is tied to had ended.
    Tied,
    /// It was told to.
    Stopped,
}

impl GroupView {
    /// A view of these members, put in the order of their ranks.
    #[must_use]
    pub fn new(generation: u64, mut members: Vec<Member>) -> Self {
        members.sort_by_key(|member| member.rank);
        Self { generation, members }
    }

    /// One for each rank, ascending by rank.
    #[must_use]
    pub fn members(&self) -> &[Member] {
        &self.members
    }

    /// The member of that rank, if the group has one.
    #[must_use]
    pub fn member(&self, rank: Rank) -> Option<&Member> {
        // Ranks are 0..n in all but the strangest layouts.
        let at = self.members.get(rank as usize).filter(|member| member.rank == rank);
        at.or_else(|| self.members.iter().find(|member| member.rank == rank))
    }

    /// The next view, with these members in the place of those of their ranks.
    #[must_use]
    pub fn with(&self, changed: impl IntoIterator<Item = Member>) -> Self {
        let mut next = Self { generation: self.generation + 1, members: self.members.clone() };
        for member in changed {
            match next.members.iter_mut().find(|known| known.rank == member.rank) {
                Some(known) => *known = member,
                None => next.members.push(member),
            }
        }
        next.members.sort_by_key(|member| member.rank);
        next
    }
}

impl Member {
    /// A rank that is starting its life `incarnation`.
    #[must_use]
    pub fn starting(rank: Rank, incarnation: Incarnation) -> Self {
        Self { rank, incarnation, state: RankState::Starting, channel: None, exit: None }
    }

    /// The same rank in another state.
    #[must_use]
    pub fn in_state(mut self, state: RankState) -> Self {
        self.state = state;
        self
    }

    /// The same rank, reached over this channel, which is fenced to its incarnation.
    #[must_use]
    pub fn reached_over(mut self, channel: Channel) -> Self {
        self.channel = Some(channel.fenced(Some(self.incarnation)));
        self
    }

    /// The same rank, with the end of its last life.
    #[must_use]
    pub fn ended(mut self, exit: RankExit) -> Self {
        self.exit = Some(Arc::new(exit));
        self
    }

    /// The channel, if the rank takes calls.
    pub(crate) fn open(&self) -> Result<&Channel, Error> {
        match &self.channel {
            Some(channel) if self.state == RankState::Healthy => Ok(channel),
            _ => Err(Error::not_started(Code::Unavailable, format!("the rank is {} and takes no calls", self.state))),
        }
    }

    /// Whether a call that was handed over to life `incarnation` can still be answered.
    pub(crate) fn may_answer(&self, incarnation: Incarnation) -> bool {
        let alive =
            matches!(self.state, RankState::Healthy | RankState::Suspect | RankState::Stale | RankState::Starting);
        self.incarnation == incarnation && alive
    }
}

impl RankState {
    /// The name used in statuses and errors.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Healthy => "healthy",
            Self::Suspect => "suspect",
            Self::Dead => "dead",
            Self::Restarting => "restarting",
            Self::Stale => "stale",
            Self::Retired => "retired",
            Self::Stopped => "stopped",
        }
    }
}

impl fmt::Display for RankState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl RankExit {
    /// The end of life `incarnation`, without an exit status.
    #[must_use]
    pub fn new(incarnation: Incarnation, cause: ExitCause) -> Self {
        let detail = String::new();
        Self { incarnation: incarnation.0, cause, code: None, signal: None, detail, stderr_tail: Vec::new() }
    }

    /// A life that did not get as far as taking calls, and why.
    #[must_use]
    pub fn start_failed(incarnation: Incarnation, why: impl Into<String>) -> Self {
        Self { detail: why.into(), ..Self::new(incarnation, ExitCause::StartFailed) }
    }

    /// A life that ran, but did not say in time where it serves.
    #[must_use]
    pub fn not_ready(incarnation: Incarnation, waited: Duration) -> Self {
        let why =
            format!("it did not say within {waited:?} where it serves; raise the start timeout if it needs longer");
        Self::start_failed(incarnation, why)
    }

    /// A life that was ended with that of `rank`, to which it is tied.
    #[must_use]
    pub fn tied(incarnation: Incarnation, rank: Rank, exit: &Self) -> Self {
        let detail = format!("rank {rank} {exit}");
        Self { detail, ..Self::new(incarnation, ExitCause::Tied) }
    }

    /// A life that was ended at its memory limit; `resident_bytes` is `None` when the kernel did it.
    #[must_use]
    pub fn over_memory_limit(incarnation: Incarnation, resident_bytes: Option<u64>, limit_bytes: u64) -> Self {
        let used = resident_bytes.map_or_else(|| "all".to_owned(), |bytes| bytes.to_string());
        let detail = format!("it used {used} of {limit_bytes} bytes; raise its memory limit, or use less");
        Self { detail, ..Self::new(incarnation, ExitCause::MemoryLimitExceeded) }
    }
}

impl fmt::Display for RankExit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.cause == ExitCause::Tied {
            return write!(f, "was ended with a rank to which it is tied: {}", self.detail);
        }
        f.write_str(match self.cause {
            ExitCause::Died => "died",
            ExitCause::StartFailed => "failed to start",
            ExitCause::MemoryLimitExceeded => "exceeded its memory limit",
            ExitCause::Tied | ExitCause::Stopped => "was stopped",
        })?;
        match (self.code, self.signal) {
            (_, Some(signal)) => write!(f, " by signal {signal}")?,
            (Some(code), None) => write!(f, " with exit code {code}")?,
            (None, None) => {}
        }
        if !self.detail.is_empty() {
            write!(f, ": {}", self.detail)?;
        }
        match self.stderr_tail.last() {
            Some(line) => write!(f, "; its last line: {line}"),
            None => Ok(()),
        }
    }
}

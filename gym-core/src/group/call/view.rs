//! The members of a group at one moment. A view is immutable: ranks, incarnations, states and channels change together, so that a
//! call and a restart cannot race.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::base::error::{Code, Error};
use crate::base::unusual_process_state;
use crate::group::health::RankState;
use crate::group::layout::Rank;
use crate::group::worker::host::WorkerStatus;
use crate::message::Incarnation;
use crate::transport::Channel;

/// A group at one moment.
#[derive(Clone, Debug, Default)]
pub struct GroupView {
    /// Increases with every change.
    pub generation: u64,
    /// One for each rank, ascending by rank.
    members: Vec<Member>,
}

/// One rank at one moment.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Member {
    /// The rank.
    pub rank: Rank,
    /// The current incarnation, or the last one.
    pub incarnation: Incarnation,
    /// The health state.
    pub state: RankState,
    /// The channel to the rank; `None` while the rank has no address.
    pub channel: Option<Channel>,
    /// The channel to the rank's status, if it has one of its own.
    pub(crate) control: Option<Channel>,
    /// The exit of the last incarnation that ended.
    pub exit: Option<Arc<RankExit>>,
    /// `true` if the node of the rank is about to be taken away. The rank accepts calls; balancers choose others if they can.
    pub draining: bool,
    /// Reports what the rank is doing, for the errors of calls that it does not answer.
    pub(crate) monitor: Option<Arc<dyn RankMonitor>>,
}

/// Reports what a rank is doing, from memory: it never waits for the rank.
#[doc(hidden)]
pub trait RankMonitor: fmt::Debug + Send + Sync {
    /// Returns the last known status of the rank, and its age; `None` before the first one.
    fn last_status(&self) -> Option<(WorkerStatus, Duration)>;

    /// Returns the time since the last heartbeat; `None` before the rank was reached.
    fn silent_for(&self) -> Option<Duration> {
        None
    }

    /// Returns the process of the rank on this machine, if it is known.
    fn pid(&self) -> Option<u32> {
        None
    }

    /// Returns the call that ends ranks that hang; `None` if nothing does.
    fn restart(&self) -> Option<&'static str> {
        None
    }
}

/// The exit of one incarnation of a rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RankExit {
    /// The incarnation.
    pub incarnation: u64,
    /// The cause, as far as it is known.
    pub cause: ExitCause,
    /// The process's exit code, if it ended by itself.
    pub code: Option<i32>,
    /// The signal that ended the process, if one did.
    pub signal: Option<i32>,
    /// Further details, with the fix; may be empty.
    pub detail: String,
    /// The last lines that the process wrote to standard error.
    pub stderr_tail: Vec<String>,
}

/// The reason why an incarnation of a rank ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ExitCause {
    /// The process ended, or the host was killed. A kill by the kernel because the memory of a container or of the machine was used up is told in
    /// [`RankExit::detail`]: the kernel chooses the process, so the rank need not have exceeded a limit of its own.
    Died,
    /// The rank failed before it accepted calls.
    StartFailed,
    /// The rank was ended because it exceeded its memory limit.
    MemoryLimitExceeded,
    /// The rank was ended because another rank, to which it is tied, had ended.
    Tied,
    /// The rank was stopped on request.
    Stopped,
    /// The node of the rank is lost: it has crashed, or cannot be reached. The rank may run until its lease ends.
    NodeLost,
}

impl GroupView {
    /// Creates a view of these members, sorted by rank.
    #[must_use]
    pub fn new(generation: u64, mut members: Vec<Member>) -> Self {
        members.sort_by_key(|member| member.rank);
        Self { generation, members }
    }

    /// Returns the members, one for each rank, ascending by rank.
    #[must_use]
    pub fn members(&self) -> &[Member] {
        &self.members
    }

    /// Returns the member of a rank, if the group has that rank.
    #[must_use]
    pub fn member(&self, rank: Rank) -> Option<&Member> {
        // In nearly all layouts, ranks are 0..n.
        let at = self.members.get(rank as usize).filter(|member| member.rank == rank);
        at.or_else(|| self.members.iter().find(|member| member.rank == rank))
    }

    /// Returns the next view, in which these members replace those of the same ranks.
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
    /// Creates the member of a rank whose `incarnation` is starting.
    #[must_use]
    pub fn starting(rank: Rank, incarnation: Incarnation) -> Self {
        Self {
            rank,
            incarnation,
            state: RankState::Starting,
            channel: None,
            control: None,
            exit: None,
            draining: false,
            monitor: None,
        }
    }

    /// Returns the member with a monitor of its rank.
    #[doc(hidden)]
    #[must_use]
    pub fn monitored_by(mut self, monitor: Arc<dyn RankMonitor>) -> Self {
        self.monitor = Some(monitor);
        self
    }

    /// Returns the member in another state.
    #[must_use]
    pub fn in_state(mut self, state: RankState) -> Self {
        self.state = state;
        self
    }

    /// Returns the member with this channel, fenced to the rank's incarnation.
    #[must_use]
    pub fn reached_over(mut self, channel: Channel) -> Self {
        self.channel = Some(channel.fenced(Some(self.incarnation)));
        self
    }

    /// Returns the member with this channel to its status, fenced to the rank's incarnation.
    #[doc(hidden)]
    #[must_use]
    pub fn asked_over(mut self, control: Channel) -> Self {
        self.control = Some(control.fenced(Some(self.incarnation)));
        self
    }

    /// Returns the member with the exit of its last incarnation.
    #[must_use]
    pub fn ended(mut self, exit: RankExit) -> Self {
        self.exit = Some(Arc::new(exit));
        self
    }

    /// Returns the channel, if the rank accepts calls.
    pub(crate) fn open(&self) -> Result<&Channel, Error> {
        match &self.channel {
            Some(channel) if self.state == RankState::Healthy => Ok(channel),
            _ if self.state == RankState::Suspect => {
                let text = format!("the rank is suspect and takes no calls: {}", self.silence());
                Err(Error::not_started(Code::Unavailable, text))
            }
            _ => Err(Error::not_started(Code::Unavailable, format!("the rank is {} and takes no calls", self.state))),
        }
    }

    /// Returns `true` if a call that was sent to `incarnation` can still be answered, as far as is known. A suspect rank has been silent for as long as a
    /// call may wait for it.
    pub(crate) fn may_answer(&self, incarnation: Incarnation) -> bool {
        let alive = matches!(self.state, RankState::Healthy | RankState::Stale | RankState::Starting);
        self.incarnation == incarnation && alive
    }

    /// Returns `true` if `incarnation` has been silent for so long that the rank is suspect.
    pub(crate) fn is_silent(&self, incarnation: Incarnation) -> bool {
        self.incarnation == incarnation && self.state == RankState::Suspect
    }

    /// Describes the silence of a suspect rank, with the state of its process if that is on this machine.
    pub(crate) fn silence(&self) -> String {
        let monitor = self.monitor.as_ref();
        let mut text = match monitor.and_then(|monitor| monitor.silent_for()) {
            Some(silence) => format!("no heartbeat for {:.1} s", silence.as_secs_f64()),
            None => "no heartbeat".to_owned(),
        };
        if let Some(pid) = monitor.and_then(|monitor| monitor.pid()) {
            match unusual_process_state(pid) {
                Some(state) => text.push_str(&format!("; process {pid} {state}")),
                None => text.push_str(&format!(
                    "; process {pid} runs: its machine is overloaded, or its memory is swapped out"
                )),
            }
        }
        text
    }
}

impl RankExit {
    /// Creates the exit of an incarnation, without an exit status.
    #[must_use]
    pub fn new(incarnation: Incarnation, cause: ExitCause) -> Self {
        let detail = String::new();
        Self { incarnation: incarnation.0, cause, code: None, signal: None, detail, stderr_tail: Vec::new() }
    }

    /// Creates the exit of an incarnation that failed before it accepted calls, with the reason.
    #[must_use]
    pub fn start_failed(incarnation: Incarnation, why: impl Into<String>) -> Self {
        Self { detail: why.into(), ..Self::new(incarnation, ExitCause::StartFailed) }
    }

    /// Creates the exit of an incarnation that ran, but did not report its endpoints in time.
    #[must_use]
    pub fn not_ready(incarnation: Incarnation, waited: Duration) -> Self {
        let why =
            format!("it did not say within {waited:?} where it serves; raise the start timeout if it needs longer");
        Self::start_failed(incarnation, why)
    }

    /// Creates the exit of an incarnation that was ended because `rank`, to which it is tied, had ended.
    #[must_use]
    pub fn tied(incarnation: Incarnation, rank: Rank, exit: &Self) -> Self {
        let detail = format!("rank {rank} {exit}");
        Self { detail, ..Self::new(incarnation, ExitCause::Tied) }
    }

    /// Creates the exit of an incarnation whose node is lost, with the name of the node and the reason.
    #[must_use]
    pub fn node_lost(incarnation: Incarnation, node: &str, why: &str) -> Self {
        Self { detail: format!("{node} is lost: {why}"), ..Self::new(incarnation, ExitCause::NodeLost) }
    }

    /// Creates the exit of an incarnation that was ended at its memory limit; `resident_bytes` is `None` if the kernel ended it.
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
            ExitCause::NodeLost => "ended with its node",
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

//! A group of ranks, and its ranks at one moment. A view is immutable: ranks, incarnations, states and channels change together, so that a
//! call and a restart cannot race.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::base::watch;
use crate::group::layout::{Rank, RankLayout};
use crate::group::state::RankState;
use crate::message::Incarnation;
use crate::transport::Channel;

/// A group of ranks. Implemented by backends, object-safe, and called through `WorkerGroupExt`.
///
/// ```
/// use gym_core::group::WorkerGroup;
///
/// fn describe(group: &dyn WorkerGroup) -> String {
///     format!("{} has {} ranks", group.name(), group.layout().size())
/// }
/// ```
pub trait WorkerGroup: fmt::Debug + Send + Sync + 'static {
    /// Returns the name of the group, for logs and errors. Every call keeps it for its errors.
    fn name(&self) -> &Arc<str>;

    /// Returns the ranks and their axes.
    fn layout(&self) -> &RankLayout;

    /// Returns the current members and notifies of every change. A call keeps the view it started with, and ends if a rank it
    /// waits for is replaced.
    fn view(&self) -> watch::Receiver<Arc<GroupView>>;
}

impl<G: WorkerGroup + ?Sized> WorkerGroup for Arc<G> {
    fn name(&self) -> &Arc<str> {
        (**self).name()
    }

    fn layout(&self) -> &RankLayout {
        (**self).layout()
    }

    fn view(&self) -> watch::Receiver<Arc<GroupView>> {
        (**self).view()
    }
}

/// A group at one moment.
#[derive(Clone, Debug, Default)]
pub struct GroupView {
    /// Increases with every change.
    pub generation: u64,
    /// One for each rank, ascending by rank.
    members: Vec<RankView>,
}

/// One rank at one moment.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RankView {
    /// The rank.
    pub rank: Rank,
    /// The current incarnation, or the last one.
    pub incarnation: Incarnation,
    /// The health state.
    pub state: RankState,
    /// The channel to the rank; `None` while the rank has no address.
    pub channel: Option<Channel>,
    /// The channel to the rank's status, if it has one of its own.
    pub control: Option<Channel>,
    /// The exit of the last incarnation that ended.
    pub exit: Option<Arc<RankExit>>,
    /// `true` if the node of the rank is about to be taken away. The rank accepts calls; balancers choose others if they can.
    pub draining: bool,
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
    pub fn new(generation: u64, mut members: Vec<RankView>) -> Self {
        members.sort_by_key(|member| member.rank);
        Self { generation, members }
    }

    /// Returns the members, one for each rank, ascending by rank.
    #[must_use]
    pub fn members(&self) -> &[RankView] {
        &self.members
    }

    /// Returns the member of a rank, if the group has that rank.
    #[must_use]
    pub fn member(&self, rank: Rank) -> Option<&RankView> {
        // In nearly all layouts, ranks are 0..n.
        let at = self.members.get(rank as usize).filter(|member| member.rank == rank);
        at.or_else(|| self.members.iter().find(|member| member.rank == rank))
    }

    /// Returns the next view, in which these members replace those of the same ranks.
    #[must_use]
    pub fn with(&self, changed: impl IntoIterator<Item = RankView>) -> Self {
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

impl RankView {
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
        }
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

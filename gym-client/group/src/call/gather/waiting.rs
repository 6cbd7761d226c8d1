//! The waits of a group call in flight: for a turn, or ranks and the calls that they run.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use gym_core::base::watch;
use gym_core::group::GroupView;
use gym_core::group::layout::Rank;
use gym_core::group::worker::Method;
use gym_core::observe::stall::HandlerLabel;
use gym_core::observe::waits::{Wait, WaitKind, WaitTarget};

use crate::call::gate::Gate;
use crate::call::gather::Stages;
use crate::call::monitor::RankMonitor;

/// Maximum ranks that a description names.
const RANKS_MAX: usize = 4;

/// A gate, and the check whether the call still waits before it.
pub(crate) type TurnCheck = (Arc<dyn Gate>, Box<dyn Fn() -> bool + Send + Sync>);

/// The ranks that a call waits for.
pub(crate) struct RanksWait {
    pub(crate) method: &'static str,
    pub(crate) view: watch::Receiver<Arc<GroupView>>,
    pub(crate) ranks: Vec<Rank>,
    /// `None` for a call to one rank.
    pub(crate) stages: Option<Arc<Stages>>,
    pub(crate) turn: Option<TurnCheck>,
    pub(crate) monitor: Option<Arc<dyn RankMonitor>>,
}

/// Creates the wait of a group call.
pub(crate) fn wait<M: Method>(group: &str, cx: (u128, tokio::time::Instant), ranks: RanksWait) -> Wait {
    let label = HandlerLabel::new(group, M::NAME);
    Wait::new(WaitKind::Ranks, cx.0).until(cx.1).of(label).on(Arc::new(ranks))
}

impl RanksWait {
    fn gate(&self) -> Option<&Arc<dyn Gate>> {
        self.turn.as_ref().filter(|(_, waits)| waits()).map(|(gate, _)| gate)
    }

    fn unanswered(&self) -> impl Iterator<Item = Rank> {
        let answered = |at| self.stages.as_ref().is_some_and(|stages| stages.has_answered(at));
        self.ranks.iter().enumerate().filter(move |(at, _)| !answered(*at)).map(|(_, rank)| *rank)
    }

    /// Describes what a rank does, as its last heartbeat said.
    fn rank(&self, view: &GroupView, rank: Rank) -> String {
        let mut text = format!("rank {rank}");
        let Some(member) = view.member(rank) else { return text };
        let (monitor, incarnation) = (self.monitor.as_ref(), member.incarnation);
        if let Some(pid) = monitor.and_then(|monitor| monitor.pid(rank, incarnation)) {
            let _ = write!(text, " (pid {pid})");
        }
        let Some((status, age)) = monitor.and_then(|monitor| monitor.last_status(rank, incarnation)) else {
            let _ = write!(text, " is {}", member.state);
            return text;
        };
        let since = |ms: u64| (Duration::from_millis(ms) + age).as_secs_f64();
        match status.running.first() {
            None if status.waiting == 0 => text.push_str(" runs no call"),
            None => text.push_str(" has not begun its calls"),
            Some(call) if call.method == self.method => {
                let _ =
                    write!(text, " has run `{}` call {} for {:.1} s", call.method, call.number, since(call.elapsed_ms));
                if call.still_ms < call.elapsed_ms {
                    let _ = write!(text, ", without progress for {:.1} s", since(call.still_ms));
                }
            }
            Some(call) => {
                let (method, number, elapsed) = (&call.method, call.number, since(call.elapsed_ms));
                let _ = write!(text, " is held by `{method}` call {number}, which has run for {elapsed:.1} s");
            }
        }
        if let Some(operation) = status.collectives.waiting.first() {
            let _ = write!(text, "; it {operation}");
        }
        if status.waiting > 0 {
            let _ = write!(text, ", {} wait", status.waiting);
        }
        if let Some(blocks) = status.running.iter().find_map(|call| call.blocks(age)) {
            let _ = write!(text, "; {blocks}");
        }
        if age > Duration::from_secs(3) {
            let _ = write!(text, "; its last heartbeat was {:.1} s ago", age.as_secs_f64());
        }
        text
    }
}

impl WaitTarget for RanksWait {
    fn describe(&self) -> String {
        if let Some(gate) = self.gate() {
            return gate.holder().unwrap_or_default();
        }
        let view = Arc::clone(&self.view.borrow());
        let mut unanswered = self.unanswered();
        let named: Vec<String> = unanswered.by_ref().take(RANKS_MAX).map(|rank| self.rank(&view, rank)).collect();
        match unanswered.count() {
            0 => named.join("; "),
            more => format!("{}; and {more} more ranks", named.join("; ")),
        }
    }

    fn kind(&self) -> Option<WaitKind> {
        self.gate().map(|_| WaitKind::Turn)
    }

    fn holder(&self) -> Option<Arc<str>> {
        self.gate()?.holding_group()
    }

    fn pids(&self) -> Vec<u32> {
        if self.gate().is_some() {
            return Vec::new();
        }
        let view = Arc::clone(&self.view.borrow());
        let pid = |rank: Rank| self.monitor.as_ref()?.pid(rank, view.member(rank)?.incarnation);
        self.unanswered().take(RANKS_MAX).filter_map(pid).collect()
    }
}

//! Kills and restarts of ranks in this process: for tests of what calls do then.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use gym_core::group::layout::Rank;
use gym_core::group::worker::Worker;
use gym_core::group::{ExitCause, RankExit, RankState, RankView};
use gym_core::message::Incarnation;
use gym_core::{Code, Error, Result};

use crate::call::in_process::{InProcessGroup, RunningRank};

impl InProcessGroup {
    /// Kills a rank, as the end of its process would. Its running calls are lost, and it stays dead until it is restarted. Has no effect on
    /// a group that has stopped. Only with the feature `testing`.
    ///
    /// # Errors
    /// `NotFound` if the group has no such rank.
    pub fn kill(&self, rank: Rank) -> Result<()> {
        self.end(rank, RankState::Dead, |_| Ok(())).map(drop)
    }

    /// Ends a rank if it still runs, and starts it again from `init`, with a higher incarnation. Only with the feature `testing`.
    ///
    /// # Errors
    /// `NotFound` if the group has no such rank; `Unavailable` if the group is stopped before or during the restart; the error of
    /// [`Worker::start`], after which the rank is dead.
    pub async fn restart<W: Worker>(&self, rank: Rank, init: W::Init) -> Result<()> {
        let last = self.end(rank, RankState::Restarting, Self::check_open)?;
        let incarnation = Incarnation(last.0 + 1);
        let started = self.start_rank::<W>(rank, incarnation, init).await;
        // Held while the view changes: either a concurrent stop finds the new incarnation, or this finds the stop.
        let mut ranks = self.ranks();
        if let Err(error) = self.check_open() {
            if let Ok((running, _)) = started {
                running.end();
            }
            return Err(error);
        }
        match started {
            Ok((running, mut member)) => {
                if let Some(known) = ranks.iter_mut().find(|known| known.host.env().rank == rank) {
                    *known = running;
                }
                let exit = self.view.borrow().member(rank).and_then(|member| member.exit.clone());
                member.exit = exit;
                self.change(&ranks, member);
                Ok(())
            }
            Err(error) => {
                let exit = RankExit::new(incarnation, ExitCause::StartFailed);
                self.change(&ranks, RankView::starting(rank, incarnation).in_state(RankState::Dead).ended(exit));
                Err(error)
            }
        }
    }

    /// Ends the current incarnation of a rank, if `may` allows it, and returns that incarnation.
    fn end(&self, rank: Rank, state: RankState, may: fn(&Self) -> Result<()>) -> Result<Incarnation> {
        let (host, closed) = {
            // Held while the view changes, so that a concurrent stop decides the final state.
            let ranks = self.ranks();
            may(self)?;
            let running = ranks.iter().find(|running| running.host.env().rank == rank).ok_or_else(|| {
                Error::not_started(Code::NotFound, format!("no rank {rank}; there are {} ranks", self.layout.size()))
                    .about(self.name.to_string())
            })?;
            if !self.has_stopped(rank) {
                let incarnation = running.host.env().incarnation;
                let exit = RankExit::new(incarnation, ExitCause::Died);
                self.change(&ranks, RankView::starting(rank, incarnation).in_state(state).ended(exit));
            }
            (running.host.clone(), running.closed.clone())
        };
        host.kill();
        closed.cancel();
        Ok(host.env().incarnation)
    }

    fn check_open(&self) -> Result<()> {
        if self.stopped.load(Ordering::Relaxed) {
            let error = Error::not_started(Code::Unavailable, "the group is stopped");
            return Err(error.about(self.name.to_string()));
        }
        Ok(())
    }

    fn has_stopped(&self, rank: Rank) -> bool {
        self.view.borrow().member(rank).is_some_and(|member| member.state == RankState::Stopped)
    }

    fn change(&self, ranks: &[RunningRank], member: RankView) {
        self.view.send_modify(|view| *view = Arc::new(view.with([member])));
        self.seat(ranks);
    }
}

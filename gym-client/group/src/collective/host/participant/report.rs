//! The report of a meeting on its operations.

use gym_core::group::Rank;
use gym_core::group::collective::{Collective, Moving, WaitingOperation};
use tokio::time::Instant;

use super::super::wire::Stream;
use super::{Participant, Place, Running, State};

impl Participant {
    /// Records that an operation begins.
    pub(in crate::collective::host) fn begin(&self, operation: Collective, place: Place, began: Instant) {
        self.lock().running.push(Running { operation, place, began, agreed: false });
    }

    /// Records that all of its ranks have called an operation.
    pub(in crate::collective::host) fn agreed(&self, place: Place) {
        let mut state = self.lock();
        state.running.iter_mut().filter(|running| running.place == place).for_each(|running| running.agreed = true);
    }

    /// Records the end of an operation, and what it has moved, if it succeeded.
    pub(in crate::collective::host) fn ended(
        &self,
        operation: Collective,
        place: Place,
        path: Option<&'static str>,
        moved: Option<&Moving>,
    ) {
        self.lock().running.retain(|running| running.place != place);
        if let (Some(moved), Some(registry)) = (moved, self.registry.upgrade()) {
            let path = path.unwrap_or_else(|| match place {
                Place::Round(_) if self.shared().is_some() => "shm",
                _ => self.path(),
            });
            registry.totals.count(operation.name(), path, moved);
        }
    }

    /// Returns the scheme or the transport over which the elements go.
    pub(super) fn path(&self) -> &'static str {
        let next = self.others().next().and_then(|next| self.peer(next));
        next.map_or("none", |peer| {
            let path = peer.channel.path();
            path.transport.map_or(path.scheme, |transport| transport.as_str())
        })
    }

    /// Returns the operations under way.
    pub(in crate::collective::host) fn waiting(&self) -> Vec<WaitingOperation> {
        let state = self.lock();
        let waiting = state.running.iter().map(|running| {
            let subject = self.meeting.subject(running.operation, running.place.number());
            let mut missing: Vec<Rank> =
                self.unheard(&state, running.place).into_iter().map(|position| self.rank_at(position)).collect();
            missing.sort_unstable();
            WaitingOperation::new(subject, running.began.elapsed(), missing)
        });
        waiting.collect()
    }

    /// Returns the positions that have not been heard to call an operation.
    pub(in crate::collective::host) fn unheard(&self, state: &State, place: Place) -> Vec<usize> {
        if state.running.iter().any(|running| running.place == place && running.agreed) {
            return Vec::new();
        }
        match place {
            // What was heard is taken when all have been.
            Place::Round(number) if state.heard > number => Vec::new(),
            Place::Round(number) => match self.shared() {
                Some(shared) => shared.behind(),
                None => {
                    let unheard = |position: &usize| Self::call_of(state, *position, Stream::Round, number).is_none();
                    self.others().filter(unheard).collect()
                }
            },
            Place::Send { to, .. } => vec![to],
            Place::Receive { from, .. } => vec![from],
        }
    }
}

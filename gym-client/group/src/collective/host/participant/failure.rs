//! How a meeting ends: the ranks agree on one cause.

use std::sync::Arc;

use futures_util::future::join_all;
use gym_core::Error;
use gym_core::group::Rank;
use gym_core::group::collective::{has, named};

use super::super::wire::{AbortPacket, Called, Cause, Packet};
use super::{ANSWER_TIMEOUT, Participant, Peer, Place, SeatState, tell};

impl Participant {
    /// Ends the meeting with a cause, unless it has failed. The lowest rank that lives decides which of several causes was the first, so that all ranks
    /// have the same.
    pub(in crate::collective::host) fn fail(self: &Arc<Self>, why: Error) {
        if std::mem::replace(&mut self.lock().failing, true) {
            return;
        }
        if self.decider().is_some() {
            drop(self.runtime.spawn(Arc::clone(self).agree(why)));
        } else {
            self.adopt(why);
            self.tell(None);
        }
    }

    /// Returns the lowest of the ranks that live; `None` if it is this one.
    pub(super) fn decider(&self) -> Option<(usize, Peer)> {
        let position = self.living(0..self.position()).into_iter().next()?;
        Some((position, self.peer(position)?.clone()))
    }

    /// Returns the positions of those ranks that have neither gone nor failed to answer.
    pub(super) fn living(&self, positions: impl IntoIterator<Item = usize>) -> Vec<usize> {
        let state = self.lock();
        let lives = |seat: &SeatState| seat.left.is_none() && seat.lost.is_none() && !seat.silent;
        positions.into_iter().filter(|position| lives(&state.seats[*position])).collect()
    }

    /// Adopts what the lowest rank that lives decides. If that rank does not answer, others may be silent, too: all are asked at once, and the lowest
    /// that answers decides. Otherwise two ranks that find two causes while it stands still would end with one each.
    pub(super) async fn agree(self: Arc<Self>, why: Error) {
        for asks_all in [true, false] {
            let Some((position, peer)) = self.decider() else { break };
            if let Some(first) = self.ask_decider(&peer, &why).await {
                return self.adopt(first);
            }
            self.lock().seats[position].silent = true;
            if asks_all {
                self.ask_where(&self.living(self.others())).await;
            }
        }
        if self.cause.get().is_none() {
            self.adopt(why);
            self.tell(None);
        }
    }

    pub(super) async fn ask_decider(&self, peer: &Peer, why: &Error) -> Option<Error> {
        let (from, cause) = (self.position(), Cause::of(why));
        let packet = Packet::Abort(AbortPacket { to: peer.id, from, cause, decide: true });
        let answer = peer.ask(ANSWER_TIMEOUT, &packet).await?;
        Some(serde_json::from_slice::<Cause>(&answer).ok()?.into_error())
    }

    pub(super) fn adopt(&self, why: Error) {
        self.lock().failing = true;
        if self.cause.get().is_none()
            && let Some(registry) = self.registry.upgrade()
        {
            registry.totals.count_abort();
        }
        self.cause.set(why);
        if let Some(shared) = self.shared.get() {
            shared.abort();
        }
        self.changed.notify_waiters();
    }

    /// Tells all other ranks the cause.
    pub(in crate::collective::host) fn tell(&self, except: Option<usize>) {
        let (Some(peers), Some(first)) = (self.peers.get(), self.cause.get()) else { return };
        let others = peers.iter().enumerate().filter(|(position, _)| Some(*position) != except);
        let told = others.filter_map(|(_, peer)| peer.clone()).map(|peer| {
            let (to, from, cause) = (peer.id, self.position(), Cause::of(&first));
            (peer, Packet::Abort(AbortPacket { to, from, cause, decide: false }))
        });
        tell(&self.runtime, told.collect());
    }

    /// Ends the meeting because a call still waits at its deadline, or was cancelled. Asks all ranks where they are: the error names those that were not
    /// heard and have not called it, and those that do not answer, for which the others may be waiting in another operation.
    pub(in crate::collective::host) async fn expire(
        self: &Arc<Self>,
        late: &Error,
        subject: String,
        place: Place,
        has_called: impl Fn(Called) -> bool + Send,
    ) {
        let unheard = self.unheard(&self.lock(), place);
        let others: Vec<usize> = self.others().collect();
        let (mut missing, mut silent): (Vec<Rank>, Vec<Rank>) = (Vec::new(), Vec::new());
        for (position, called) in self.ask_where(&others).await {
            let waits_for = unheard.is_empty() || unheard.contains(&position);
            match called {
                Some(called) if waits_for && !has_called(called) => missing.push(self.rank_at(position)),
                Some(_) => {}
                None => silent.push(self.rank_at(position)),
            }
        }
        missing.sort_unstable();
        silent.sort_unstable();
        let mut why = late.message().to_owned();
        if !missing.is_empty() {
            why += &format!("; {} not called it", has(&missing));
        }
        if !silent.is_empty() {
            let verb = if silent.len() == 1 { "does" } else { "do" };
            let own = self.meeting.rank;
            why += &format!("; {} {verb} not answer rank {own}: stopped, or cut off", named(&silent));
        }
        if missing.is_empty() && silent.is_empty() {
            why += "; all ranks have called it, and it was not over";
        }
        self.fail(Error::unknown(late.code(), why).about(subject));
    }

    /// Asks ranks what they have called. One that does not answer takes no part in the agreement on the cause.
    pub(super) async fn ask_where(&self, positions: &[usize]) -> Vec<(usize, Option<Called>)> {
        let own = self.position();
        let asked = positions.iter().map(|position| async move {
            if *position == own {
                return (own, Some(self.lock().called_towards(own)));
            }
            let peer = self.peer(*position);
            let answer = match peer {
                Some(peer) => peer.ask(ANSWER_TIMEOUT, &Packet::Where { to: peer.id, from: own }).await,
                None => None,
            };
            (*position, answer.and_then(|answer| serde_json::from_slice(&answer).ok()))
        });
        let answers = join_all(asked).await;
        let mut state = self.lock();
        let silent = answers.iter().filter(|(_, called)| called.is_none());
        silent.for_each(|(position, _)| state.seats[*position].silent = true);
        answers
    }
}

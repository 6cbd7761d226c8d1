//! The state of concurrent episodes, bounded in number and expired by age.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::base::error::{Code, Error, Result};
use crate::server::SessionId;
use tokio::time::Instant;

/// Room for 100,000 rollouts in flight and some that nobody closed.
pub const SESSIONS_MAX: usize = 131_072;

/// A session may be dropped to make room when nobody called for this long: longer than a slow model's turn.
pub const IDLE_MIN: Duration = Duration::from_secs(1_200);

/// Scored sessions are kept for a moment, because a caller whose connection broke asks for the score again.
pub const SCORED_MAX: usize = 4_096;

/// State by session. All methods lock for the length of their closure only; nothing awaits inside.
#[derive(Debug)]
pub struct Sessions<T> {
    table: Mutex<Table<T>>,
    sessions_max: usize,
}

#[derive(Debug)]
struct Table<T> {
    entries: HashMap<SessionId, Entry<T>>,
    /// In the order of their last call; the number makes equal instants distinct.
    active: BTreeMap<(Instant, u64), SessionId>,
    scored: BTreeMap<(Instant, u64), SessionId>,
    calls: u64,
}

#[derive(Debug)]
struct Entry<T> {
    state: T,
    position: (Instant, u64),
    scored: bool,
}

impl<T> Default for Sessions<T> {
    fn default() -> Self {
        Self::bounded(SESSIONS_MAX)
    }
}

impl<T> Sessions<T> {
    /// At most that many.
    #[must_use]
    pub fn bounded(sessions_max: usize) -> Self {
        let table = Table { entries: HashMap::new(), active: BTreeMap::new(), scored: BTreeMap::new(), calls: 0 };
        Self { table: Mutex::new(table), sessions_max }
    }

    /// Begins a session, or leaves it alone if it began already.
    ///
    /// # Errors
    /// `ResourceExhausted` when every session is in use.
    pub fn begin(&self, session: &SessionId, state: impl FnOnce() -> T) -> Result<()> {
        self.with_or(session, state, |_| ())
    }

    /// Looks at and changes a session's state.
    ///
    /// # Errors
    /// [`session_lost`] when there is no such session.
    pub fn with<R>(&self, session: &SessionId, act: impl FnOnce(&mut T) -> R) -> Result<R> {
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        table.touch(session, false);
        table.entries.get_mut(session).map(|entry| act(&mut entry.state)).ok_or_else(|| session_lost(session))
    }

    /// Like [`Sessions::with`], beginning the session if need be.
    ///
    /// # Errors
    /// `ResourceExhausted` when every session is in use.
    pub fn with_or<R>(
        &self,
        session: &SessionId,
        state: impl FnOnce() -> T,
        act: impl FnOnce(&mut T) -> R,
    ) -> Result<R> {
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        if !table.entries.contains_key(session) {
            if table.entries.len() >= self.sessions_max && !table.evict() {
                let message = format!("all {} sessions are in use; send fewer rollouts at once", self.sessions_max);
                return Err(Error::not_started(Code::ResourceExhausted, message));
            }
            let position = table.next_position();
            table.active.insert(position, session.clone());
            table.entries.insert(session.clone(), Entry { state: state(), position, scored: false });
        }
        table.touch(session, false);
        table.entries.get_mut(session).map(|entry| act(&mut entry.state)).ok_or_else(|| session_lost(session))
    }

    /// Looks at the final state; the session is among the first to go from now on.
    ///
    /// # Errors
    /// [`session_lost`] when there is no such session.
    pub fn score<R>(&self, session: &SessionId, look: impl FnOnce(&T) -> R) -> Result<R> {
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        let verdict =
            table.entries.get(session).map(|entry| look(&entry.state)).ok_or_else(|| session_lost(session))?;
        table.touch(session, true);
        while table.scored.len() > SCORED_MAX {
            table.drop_first_scored();
        }
        Ok(verdict)
    }

    /// Lets go of a session; one that is not there is fine.
    pub fn end(&self, session: &SessionId) {
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        table.remove(session);
    }

    /// How many there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.table.lock().unwrap_or_else(PoisonError::into_inner).entries.len()
    }
}

impl<T> Table<T> {
    fn next_position(&mut self) -> (Instant, u64) {
        self.calls += 1;
        (Instant::now(), self.calls)
    }

    fn touch(&mut self, session: &SessionId, scored: bool) {
        let position = self.next_position();
        let Some(entry) = self.entries.get_mut(session) else { return };
        let (was, now) = (std::mem::replace(&mut entry.position, position), scored || entry.scored);
        let from = if std::mem::replace(&mut entry.scored, now) { &mut self.scored } else { &mut self.active };
        let id = from.remove(&was).unwrap_or_else(|| session.clone());
        if now { &mut self.scored } else { &mut self.active }.insert(position, id);
    }

    fn remove(&mut self, session: &SessionId) {
        if let Some(entry) = self.entries.remove(session) {
            if entry.scored { &mut self.scored } else { &mut self.active }.remove(&entry.position);
        }
    }

    fn drop_first_scored(&mut self) -> bool {
        let Some((_, session)) = self.scored.pop_first() else { return false };
        self.entries.remove(&session);
        true
    }

    /// Drops a scored session, or else the one that was quiet longest if that was long.
    fn evict(&mut self) -> bool {
        if self.drop_first_scored() {
            return true;
        }
        match self.active.first_key_value() {
            Some(((last_call, _), session)) if last_call.elapsed() >= IDLE_MIN => {
                let session = session.clone();
                self.remove(&session);
                true
            }
            _ => false,
        }
    }
}

/// The error of a session that this server does not have: it was never begun here, was closed, or was dropped for its age.
#[must_use]
pub fn session_lost(session: &SessionId) -> Error {
    let message = format!("session {session} is not known here: never begun, closed, or dropped for its age");
    Error::not_started(Code::FailedPrecondition, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(text: &str) -> SessionId {
        SessionId::new(text)
    }

    #[tokio::test(start_paused = true)]
    async fn a_full_table_drops_the_scored_then_the_quiet_and_refuses_when_all_are_in_use() {
        let sessions = Sessions::bounded(2);
        sessions.begin(&id("a"), || 1).unwrap();
        sessions.begin(&id("b"), || 2).unwrap();
        assert_eq!(sessions.begin(&id("c"), || 3).unwrap_err().code(), Code::ResourceExhausted);

        sessions.score(&id("b"), |_| ()).unwrap();
        sessions.begin(&id("c"), || 3).unwrap();
        assert_eq!(sessions.with(&id("b"), |state| *state).unwrap_err().code(), Code::FailedPrecondition);

        tokio::time::advance(IDLE_MIN / 2).await;
        sessions.with(&id("a"), |state| *state += 1).unwrap();
        tokio::time::advance(IDLE_MIN / 2).await;
        sessions.begin(&id("d"), || 4).unwrap();
        assert_eq!(sessions.with(&id("a"), |state| *state).unwrap(), 2);
        assert!(sessions.with(&id("c"), |_| ()).is_err());
        assert_eq!(sessions.count(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn a_score_can_be_asked_for_again_and_old_scores_are_dropped() {
        let sessions = Sessions::default();
        for number in 0..SCORED_MAX + 10 {
            let session = id(&number.to_string());
            sessions.begin(&session, || number).unwrap();
            assert_eq!(sessions.score(&session, |state| *state).unwrap(), number);
            assert_eq!(sessions.score(&session, |state| *state).unwrap(), number);
        }
        assert_eq!(sessions.count(), SCORED_MAX);
        sessions.end(&id("4100"));
        sessions.end(&id("4100"));
        assert_eq!(sessions.count(), SCORED_MAX - 1);
    }
}

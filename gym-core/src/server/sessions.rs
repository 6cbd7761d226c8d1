//! The state of concurrent episodes, bounded in number and expired by age.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use crate::base::error::{Code, Error, Result};
use crate::base::failure::FailureClass;
use tokio::time::Instant;

/// Default number of sessions: 100,000 rollouts in flight, plus some that were not closed.
pub const SESSIONS_MAX: usize = 131_072;

/// Minimum idle time after which a full table may drop a session; longer than a turn of a slow model. A scored session expires
/// after this idle time.
pub const IDLE_MIN: Duration = Duration::from_secs(1_200);

/// Maximum idle time of a session that has not been scored; it then expires.
pub const IDLE_MAX: Duration = Duration::from_secs(4 * 3_600);

/// Maximum scored sessions that are kept, because a caller whose connection broke requests the score again.
pub const SCORED_MAX: usize = 4_096;

/// Identifies the episode of a call: equal for all calls that carry the same session cookie.
///
/// ```
/// use gym_core::SessionId;
///
/// assert_eq!(SessionId::new("episode-1").as_str(), "episode-1");
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SessionId(Arc<str>);

impl SessionId {
    /// Creates a session id from its text.
    #[must_use]
    pub fn new(id: impl Into<Arc<str>>) -> Self {
        Self(id.into())
    }

    /// Returns the text of the id.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The state of each session of a server. All methods hold a lock while their closure runs; closures cannot await.
///
/// The table is bounded. A session ends when it is [closed](Sessions::end) or when it expires: after [`IDLE_MAX`] without a call,
/// or after [`IDLE_MIN`] once it has been scored. Return the table from
/// [`ResourcesServer::sessions`](super::ResourcesServer::sessions), and the SDK closes the sessions and counts them in the metrics.
///
/// ```
/// use gym_core::SessionId;
/// use gym_core::server::{SessionTable, Sessions};
///
/// let (carts, session) = (Sessions::<Vec<String>>::default(), SessionId::new("a"));
/// let items = carts.with_or(&session, Vec::new, |cart| {
///     cart.push("pen".to_owned());
///     cart.len()
/// })?;
/// carts.end(&session);
/// assert_eq!((items, carts.counts().open), (1, 0));
/// # Ok::<(), gym_core::Error>(())
/// ```
#[derive(Debug)]
pub struct Sessions<T> {
    table: Mutex<Table<T>>,
    sessions_max: usize,
}

/// A table of sessions with any type of state. Implemented by [`Sessions`]; called by the server that serves the environment.
///
/// ```
/// use gym_core::SessionId;
/// use gym_core::server::{SessionTable, Sessions};
///
/// fn end(table: &dyn SessionTable, session: &SessionId) -> u64 {
///     table.end(session);
///     table.counts().open
/// }
///
/// let (carts, session) = (Sessions::<u32>::default(), SessionId::new("a"));
/// carts.begin(&session, || 0)?;
/// assert_eq!(end(&carts, &session), 0);
/// # Ok::<(), gym_core::Error>(())
/// ```
pub trait SessionTable: Send + Sync {
    /// Closes a session. Does nothing if there is no such session.
    fn end(&self, session: &SessionId);

    /// Removes expired sessions, and returns the current counts.
    fn counts(&self) -> SessionCounts;
}

/// The counts of a [`SessionTable`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SessionCounts {
    /// Sessions that are open.
    pub open: u64,
    /// Sessions that were closed, since the start.
    pub closed: u64,
    /// Sessions that expired, or were dropped because the table was full, since the start.
    pub expired: u64,
}

impl SessionCounts {
    /// Creates counts of open, closed and expired sessions.
    #[must_use]
    pub fn new(open: u64, closed: u64, expired: u64) -> Self {
        Self { open, closed, expired }
    }
}

#[derive(Debug)]
struct Table<T> {
    entries: HashMap<SessionId, Entry<T>>,
    /// Sessions in the order of their last call; the number makes equal instants distinct.
    active: BTreeMap<(Instant, u64), SessionId>,
    scored: BTreeMap<(Instant, u64), SessionId>,
    calls: u64,
    closed: u64,
    expired: u64,
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
    /// Creates a table of at most `sessions_max` sessions.
    #[must_use]
    pub fn bounded(sessions_max: usize) -> Self {
        let table = Table {
            entries: HashMap::new(),
            active: BTreeMap::new(),
            scored: BTreeMap::new(),
            calls: 0,
            closed: 0,
            expired: 0,
        };
        Self { table: Mutex::new(table), sessions_max }
    }

    /// Begins a session. If it has already begun, keeps its state.
    ///
    /// # Errors
    /// `ResourceExhausted` if the table is full of sessions in use.
    pub fn begin(&self, session: &SessionId, state: impl FnOnce() -> T) -> Result<()> {
        self.with_or(session, state, |_| ())
    }

    /// Calls `act` with the state of a session.
    ///
    /// # Errors
    /// [`session_lost`] if there is no such session.
    pub fn with<R>(&self, session: &SessionId, act: impl FnOnce(&mut T) -> R) -> Result<R> {
        let mut table = self.lock();
        table.touch(session, false);
        table.entries.get_mut(session).map(|entry| act(&mut entry.state)).ok_or_else(|| session_lost(session))
    }

    /// Calls `act` with the state of a session. If there is no such session, it begins with `state`.
    ///
    /// # Errors
    /// `ResourceExhausted` if the table is full of sessions in use.
    pub fn with_or<R>(
        &self,
        session: &SessionId,
        state: impl FnOnce() -> T,
        act: impl FnOnce(&mut T) -> R,
    ) -> Result<R> {
        let mut table = self.lock();
        if !table.entries.contains_key(session) {
            if table.entries.len() >= self.sessions_max && !table.evict() {
                let message = format!("all {} sessions are in use; run fewer rollouts at once", self.sessions_max);
                return Err(Error::not_started(Code::ResourceExhausted, message));
            }
            let position = table.next_position();
            table.active.insert(position, session.clone());
            table.entries.insert(session.clone(), Entry { state: state(), position, scored: false });
        }
        table.touch(session, false);
        table.entries.get_mut(session).map(|entry| act(&mut entry.state)).ok_or_else(|| session_lost(session))
    }

    /// Calls `look` with the final state of a session, and marks the session as scored. A full table drops scored sessions first.
    ///
    /// # Errors
    /// [`session_lost`] if there is no such session.
    pub fn score<R>(&self, session: &SessionId, look: impl FnOnce(&T) -> R) -> Result<R> {
        let mut table = self.lock();
        let verdict =
            table.entries.get(session).map(|entry| look(&entry.state)).ok_or_else(|| session_lost(session))?;
        table.touch(session, true);
        while table.scored.len() > SCORED_MAX {
            table.drop_first_scored();
        }
        Ok(verdict)
    }

    /// Closes a session. Does nothing if there is no such session.
    pub fn end(&self, session: &SessionId) {
        let mut table = self.lock();
        if table.remove(session) {
            table.closed += 1;
        }
    }

    /// Returns the number of open sessions.
    #[must_use]
    pub fn count(&self) -> usize {
        self.lock().entries.len()
    }

    /// Locks the table, and removes the sessions that have expired by now.
    fn lock(&self) -> MutexGuard<'_, Table<T>> {
        let mut table = self.table.lock();
        table.expire();
        table
    }
}

impl<T: Send> SessionTable for Sessions<T> {
    fn end(&self, session: &SessionId) {
        Self::end(self, session);
    }

    fn counts(&self) -> SessionCounts {
        let table = self.lock();
        SessionCounts { open: table.entries.len() as u64, closed: table.closed, expired: table.expired }
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

    fn remove(&mut self, session: &SessionId) -> bool {
        let Some(entry) = self.entries.remove(session) else { return false };
        if entry.scored { &mut self.scored } else { &mut self.active }.remove(&entry.position);
        true
    }

    fn drop_first_scored(&mut self) -> bool {
        let Some((_, session)) = self.scored.pop_first() else { return false };
        self.entries.remove(&session);
        self.expired += 1;
        true
    }

    fn drop_first_active(&mut self) -> bool {
        let Some((_, session)) = self.active.pop_first() else { return false };
        self.entries.remove(&session);
        self.expired += 1;
        true
    }

    /// Drops a scored session, or otherwise the longest idle session if it has been idle long enough.
    fn evict(&mut self) -> bool {
        self.drop_first_scored() || (is_idle(&self.active, IDLE_MIN) && self.drop_first_active())
    }

    /// Drops the expired sessions. Each session is dropped once, so a call pays only for the expired sessions that it finds.
    fn expire(&mut self) {
        while is_idle(&self.scored, IDLE_MIN) && self.drop_first_scored() {}
        while is_idle(&self.active, IDLE_MAX) && self.drop_first_active() {}
    }
}

/// Returns `true` if the first session in the order has been idle for `limit`.
fn is_idle(order: &BTreeMap<(Instant, u64), SessionId>, limit: Duration) -> bool {
    order.first_key_value().is_some_and(|((last_call, _), _)| last_call.elapsed() >= limit)
}

/// Returns the error of a session that this server does not have: it never began here, was closed, or expired.
#[must_use]
pub fn session_lost(session: &SessionId) -> Error {
    let message = format!("session {session} is unknown: it never began here, was closed, or expired");
    Error::not_started(Code::FailedPrecondition, message).with_class(FailureClass::SessionLost)
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

    #[tokio::test(start_paused = true)]
    async fn sessions_expire_by_age_and_are_counted() {
        let sessions = Sessions::default();
        for name in ["closed", "scored", "idle", "used"] {
            sessions.begin(&id(name), || 1).unwrap();
        }
        sessions.end(&id("closed"));
        sessions.score(&id("scored"), |_| ()).unwrap();
        assert_eq!(sessions.counts(), SessionCounts { open: 3, closed: 1, expired: 0 });

        tokio::time::advance(IDLE_MIN).await;
        assert_eq!(sessions.score(&id("scored"), |_| ()).unwrap_err().code(), Code::FailedPrecondition);
        sessions.with(&id("used"), |state| *state += 1).unwrap();
        assert_eq!(sessions.counts(), SessionCounts { open: 2, closed: 1, expired: 1 });

        tokio::time::advance(IDLE_MAX - IDLE_MIN).await;
        assert_eq!(sessions.counts(), SessionCounts { open: 1, closed: 1, expired: 2 });
        assert_eq!(sessions.with(&id("used"), |state| *state).unwrap(), 2);

        tokio::time::advance(IDLE_MAX).await;
        assert_eq!(sessions.counts(), SessionCounts { open: 0, closed: 1, expired: 3 });
    }
}

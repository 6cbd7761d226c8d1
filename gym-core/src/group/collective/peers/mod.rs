//! A worker's way to the other ranks of its group.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use tokio::sync::OnceCell;
use tokio::task::AbortHandle;

use crate::base::error::{Code, Error, Execution, Result};
use crate::base::watch;
use crate::group::collective::communicator::{Collectives, Communicator};
use crate::group::collective::meeting::{Meeting, Seat};
use crate::group::collective::operation::named;
use crate::group::layout::{Rank, RankLayout};
use crate::message::CallContext;

/// The ranks of a group in one epoch.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Seats {
    /// Increases whenever a rank of the group is replaced.
    pub epoch: u64,
    /// The ranks, ascending.
    pub seats: Vec<Seat>,
}

impl Seats {
    /// Creates the seats of an epoch, sorted by rank.
    #[must_use]
    pub fn new(epoch: u64, mut seats: Vec<Seat>) -> Self {
        seats.sort_by_key(|seat| seat.rank);
        Self { epoch, seats }
    }

    fn of(&self, ranks: &[Rank]) -> Vec<Seat> {
        self.seats.iter().filter(|seat| ranks.contains(&seat.rank)).cloned().collect()
    }
}

/// The communicators of one rank of a group. Clones share them. The default is empty: its host does not connect ranks.
///
/// Every rank of a meeting must ask for it, because a communicator exists once all of its ranks have joined. The communicators live as
/// long as the last clone, and end when the group has a newer epoch.
#[derive(Clone, Default)]
pub struct Peers(Option<Arc<Inner>>);

struct Inner {
    group: Arc<str>,
    rank: Rank,
    layout: RankLayout,
    backend: Arc<dyn Collectives>,
    seats: watch::Receiver<Option<Arc<Seats>>>,
    joined: Mutex<Joined>,
}

/// The communicators of the newest epoch that was asked for, by the names of their meetings.
#[derive(Default)]
struct Joined {
    epoch: u64,
    slots: HashMap<Arc<str>, Arc<OnceCell<Slot>>>,
}

struct Slot {
    communicator: Arc<dyn Communicator>,
    _follower: Follower,
}

/// The task that aborts a communicator when the group has a newer epoch. Ends with its slot.
struct Follower(AbortHandle);

impl Drop for Follower {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Peers {
    /// Creates the peers of `rank`. `seats` has the ranks of the group once they are known, and those of every newer epoch.
    #[must_use]
    pub fn new(
        group: impl Into<Arc<str>>,
        rank: Rank,
        layout: RankLayout,
        backend: Arc<dyn Collectives>,
        seats: watch::Receiver<Option<Arc<Seats>>>,
    ) -> Self {
        Self(Some(Arc::new(Inner { group: group.into(), rank, layout, backend, seats, joined: Mutex::default() })))
    }

    /// Returns the communicator of the ranks that differ from this one only on `axis`, in the newest epoch. Waits until the group's
    /// seats are known and all of these ranks have asked. Within an epoch, returns the same communicator every time.
    ///
    /// A newer epoch aborts the communicators of older ones with `FailedPrecondition`.
    ///
    /// # Errors
    /// - `InvalidArgument`: the layout has no such axis; the error names its axes.
    /// - `Unimplemented`: the host of the worker does not connect ranks.
    /// - `DeadlineExceeded`, `Cancelled`: the error says what was missing.
    /// - `Unavailable`: the host has stopped, so that there are no newer seats.
    /// - The errors of [`Collectives::join`].
    pub async fn communicator(&self, cx: &CallContext, axis: &str) -> Result<Arc<dyn Communicator>> {
        let inner = self.inner()?;
        let (name, ranks) = inner.along(axis)?;
        inner.communicator(cx, name, &ranks).await
    }

    /// Like [`communicator`](Self::communicator), for all ranks of the group.
    ///
    /// # Errors
    /// Those of [`communicator`](Self::communicator).
    pub async fn all(&self, cx: &CallContext) -> Result<Arc<dyn Communicator>> {
        let inner = self.inner()?;
        let mut ranks = inner.layout.ranks().to_vec();
        ranks.sort_unstable();
        inner.communicator(cx, Arc::clone(&inner.group), &ranks).await
    }

    fn inner(&self) -> Result<&Arc<Inner>> {
        self.0.as_ref().ok_or_else(|| {
            let why = "the host of this worker does not connect ranks; start the group with one that does";
            Error::not_started(Code::Unimplemented, why).about("peers")
        })
    }
}

impl Inner {
    /// Returns the name of the meeting along an axis, and its ranks, ascending.
    fn along(&self, axis: &str) -> Result<(Arc<str>, Vec<Rank>)> {
        let own = self.layout.axis_index(axis)?;
        let coordinates = self.layout.coordinates(self.rank)?;
        let axes = self.layout.axes().iter().zip(coordinates).enumerate();
        let others: Vec<(&str, usize)> =
            axes.filter(|(index, _)| *index != own).map(|(_, (axis, at))| (axis.name.as_str(), at)).collect();
        let ranks = self.layout.ranks_by_coordinates(&others)?;
        let fixed: Vec<String> = others.iter().map(|(axis, at)| format!("{axis}={at}")).collect();
        let fixed = if fixed.is_empty() { String::new() } else { format!("[{}]", fixed.join(",")) };
        Ok((format!("{}/{axis}{fixed}", self.group).into(), ranks))
    }

    async fn communicator(
        self: &Arc<Self>,
        cx: &CallContext,
        name: Arc<str>,
        ranks: &[Rank],
    ) -> Result<Arc<dyn Communicator>> {
        let subject = || format!("rank {} meets {name}", self.rank);
        let mut seats = self.seats.clone();
        loop {
            let known = self.known_seats(cx, &mut seats, ranks).await.map_err(|error| error.about(subject()))?;
            let Some(slot) = self.slot(&name, known.epoch) else { continue };
            let joined = slot.get_or_try_init(|| self.join(cx, &name, &known, ranks));
            let bound =
                cx.bound(Execution::NotStarted, async { joined.await.map(|slot| Arc::clone(&slot.communicator)) });
            tokio::select! {
                biased;
                // The ranks of an older epoch will never all join.
                Ok(_) = seats.wait_for(|now| epoch_of(now.as_ref()) > known.epoch) => {}
                joined = bound => return joined,
            }
        }
    }

    /// Waits until the seats of these ranks are known.
    async fn known_seats(
        &self,
        cx: &CallContext,
        seats: &mut watch::Receiver<Option<Arc<Seats>>>,
        ranks: &[Rank],
    ) -> Result<Arc<Seats>> {
        let newest = self.lock().epoch;
        let has_all = |now: &Option<Arc<Seats>>| {
            now.as_ref().is_some_and(|now| now.epoch >= newest && now.of(ranks).len() == ranks.len())
        };
        let known = async {
            let known = seats.wait_for(has_all).await;
            known.map(|known| known.clone().expect("the seats are known")).map_err(|closed| {
                Error::not_started(Code::Unavailable, "the host of this worker has stopped").caused_by(closed)
            })
        };
        let late = match cx.bound(Execution::NotStarted, known).await {
            Err(error) if matches!(error.code(), Code::DeadlineExceeded | Code::Cancelled) => error,
            known => return known,
        };
        let missing = match &*self.seats.borrow() {
            None => "the seats of the group are not known yet".to_owned(),
            Some(now) => {
                let missing = |rank: &Rank| now.seats.iter().all(|seat| seat.rank != *rank);
                let missing: Vec<Rank> = ranks.iter().copied().filter(missing).collect();
                format!("epoch {} has no seat for {}", now.epoch, named(&missing))
            }
        };
        Err(Error::not_started(late.code(), format!("{}: {missing}", late.message())))
    }

    /// Returns the place of a communicator. Gives up the communicators of older epochs. Returns `None` if the epoch is an older one itself.
    fn slot(&self, name: &Arc<str>, epoch: u64) -> Option<Arc<OnceCell<Slot>>> {
        let mut joined = self.lock();
        if epoch > joined.epoch {
            for slot in std::mem::take(&mut joined.slots).into_values() {
                if let Some(slot) = slot.get() {
                    slot.communicator.abort(replaced(&slot.communicator, epoch));
                }
            }
            joined.epoch = epoch;
        }
        (epoch == joined.epoch).then(|| Arc::clone(joined.slots.entry(Arc::clone(name)).or_default()))
    }

    async fn join(self: &Arc<Self>, cx: &CallContext, name: &Arc<str>, known: &Seats, ranks: &[Rank]) -> Result<Slot> {
        let meeting = Meeting::new(Arc::clone(name), known.epoch, self.rank, known.of(ranks))?;
        let communicator = self.backend.join(cx, meeting).await?;
        let follower = tokio::spawn(follow(self.seats.clone(), known.epoch, Arc::downgrade(&communicator)));
        Ok(Slot { communicator, _follower: Follower(follower.abort_handle()) })
    }

    fn lock(&self) -> MutexGuard<'_, Joined> {
        self.joined.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Aborts a communicator when the group has a newer epoch: its ranks may wait for one that is gone.
async fn follow(mut seats: watch::Receiver<Option<Arc<Seats>>>, epoch: u64, communicator: Weak<dyn Communicator>) {
    let Ok(newer) = seats.wait_for(|now| epoch_of(now.as_ref()) > epoch).await.map(|now| epoch_of(now.as_ref())) else {
        return;
    };
    if let Some(communicator) = communicator.upgrade() {
        communicator.abort(replaced(&communicator, newer));
    }
}

fn epoch_of(seats: Option<&Arc<Seats>>) -> u64 {
    seats.map_or(0, |seats| seats.epoch)
}

fn replaced(communicator: &Arc<dyn Communicator>, epoch: u64) -> Error {
    let why = format!("the group is in epoch {epoch}, because its ranks have changed; ask for a new communicator");
    Error::unknown(Code::FailedPrecondition, why).about(communicator.meeting().to_string())
}

impl PartialEq for Peers {
    /// Returns `true` for clones of the same peers.
    fn eq(&self, other: &Self) -> bool {
        match (&self.0, &other.0) {
            (Some(own), Some(others)) => Arc::ptr_eq(own, others),
            (own, others) => own.is_none() && others.is_none(),
        }
    }
}

impl Eq for Peers {}

impl fmt::Debug for Peers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Some(inner) => write!(f, "Peers(rank {} of {} over {})", inner.rank, inner.group, inner.backend.name()),
            None => f.write_str("Peers(none)"),
        }
    }
}

#[cfg(test)]
mod tests;

//! A worker's way to the other ranks of its group.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Weak};

use futures_util::FutureExt as _;
use parking_lot::Mutex;
use tokio::sync::OnceCell;
use tokio::task::AbortHandle;

use crate::base::error::{Code, Error, Execution, Result};
use crate::base::watch;
use crate::group::collective::communicator::{Collectives, Communicator};
use crate::group::collective::compress::CompressedCommunicator;
use crate::group::collective::meeting::{Meeting, Seats};
use crate::group::collective::report::CollectiveReport;
use crate::group::layout::{Rank, RankLayout};
use crate::message::CallContext;
use crate::transport::Handler;

/// The communicators of one rank of a group. Clones share them. The default is empty: its host does not connect ranks.
///
/// Every rank of a meeting must ask for it, because a communicator exists once all of its ranks have joined. The communicators live as
/// long as the last clone, and end when the group has a newer epoch.
#[derive(Clone, Default)]
pub struct Peers {
    inner: Option<Arc<Inner>>,
    compresses: bool,
}

struct Inner {
    group: Arc<str>,
    rank: Rank,
    backend: Arc<dyn Collectives>,
    seats: watch::Sender<Option<Arc<Seats>>>,
    joined: Mutex<Joined>,
}

/// The communicators of the newest epoch that was asked for, by the names of their meetings.
#[derive(Default)]
struct Joined {
    epoch: u64,
    slots: BTreeMap<Arc<str>, Slots>,
}

/// The communicators of one name: the newest, which may be forming, and how many before it have failed.
#[derive(Default)]
struct Slots {
    newest: Arc<OnceCell<Slot>>,
    failed: u32,
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
    /// Creates the peers of `rank`, whose seats are not known yet.
    #[must_use]
    pub fn new(group: impl Into<Arc<str>>, rank: Rank, backend: Arc<dyn Collectives>) -> Self {
        let (group, seats) = (group.into(), watch::Sender::new(None));
        let inner = Inner { group, rank, backend, seats, joined: Mutex::default() };
        Self { inner: Some(Arc::new(inner)), compresses: false }
    }

    /// Returns the communicator of the ranks that differ from this one only on `axis`, in the newest epoch. Waits until the group's
    /// seats are known and all of these ranks have asked. Within an epoch, returns the same communicator until it fails, and then a new one:
    /// the ranks have all seen the failure. The name of its meeting ends with `#2`.
    ///
    /// A newer epoch aborts the communicators of older ones: with `Unavailable` and the end of each lost rank, or with `FailedPrecondition` if only
    /// ranks outside of the meeting have changed.
    ///
    /// # Errors
    /// - `InvalidArgument`: the layout has no such axis; the error names its axes.
    /// - `Unimplemented`: the host of the worker does not connect ranks.
    /// - `Unavailable`: a rank of the meeting was lost or replaced while this one waited for it.
    /// - `DeadlineExceeded`, `Cancelled`: the error says what was missing.
    /// - The errors of [`Collectives::join`].
    pub async fn communicator(&self, cx: &CallContext, axis: &str) -> Result<Arc<dyn Communicator>> {
        let inner = self.inner()?;
        inner.communicator(cx, axis, |layout| inner.along(layout, axis)).await
    }

    /// Like [`communicator`](Self::communicator), for all ranks of the group.
    ///
    /// # Errors
    /// Those of [`communicator`](Self::communicator).
    pub async fn all(&self, cx: &CallContext) -> Result<Arc<dyn Communicator>> {
        let inner = self.inner()?;
        let all = |layout: &RankLayout| {
            let mut ranks = layout.ranks().to_vec();
            ranks.sort_unstable();
            Ok((Arc::clone(&inner.group), ranks))
        };
        inner.communicator(cx, "all", all).await
    }

    /// Like [`communicator`](Self::communicator), for gradients: its sums of `F32` travel as bf16 if the group has `enable_gradient_compression`. See
    /// [`CompressedCommunicator`] for the error.
    ///
    /// # Errors
    /// Those of [`communicator`](Self::communicator).
    pub async fn gradients(&self, cx: &CallContext, axis: &str) -> Result<Arc<dyn Communicator>> {
        let communicator = self.communicator(cx, axis).await?;
        Ok(if self.compresses { Arc::new(CompressedCommunicator::new(communicator)) } else { communicator })
    }

    /// For hosts of workers: sets whether [`gradients`](Self::gradients) compresses. Default: `false`.
    #[must_use]
    pub fn compressing_gradients(mut self, compresses: bool) -> Self {
        self.compresses = compresses;
        self
    }

    /// For hosts of workers: returns `true` unless the peers are empty.
    #[must_use]
    pub fn connects(&self) -> bool {
        self.inner.is_some()
    }

    /// For hosts of workers: tells who meets from now on. Returns `false` if these seats or newer ones are known.
    #[expect(clippy::must_use_candidate, reason = "a host need not know whether the seats are new")]
    pub fn seat(&self, seats: Seats) -> bool {
        let newer = |known: &mut Option<Arc<Seats>>| {
            let newer = epoch_of(known.as_ref()) < seats.epoch;
            if newer {
                *known = Some(Arc::new(seats));
            }
            newer
        };
        self.inner.as_ref().is_some_and(|inner| inner.seats.send_if_modified(newer))
    }

    /// For hosts of workers: returns what serves the messages of other ranks, whatever the worker is doing; see [`Collectives::handler`].
    #[must_use]
    pub fn handler(&self) -> Option<Arc<dyn Handler>> {
        self.inner.as_ref()?.backend.handler()
    }

    /// For hosts of workers: returns what the rank's collective operations do, and their totals.
    #[must_use]
    pub fn report(&self) -> CollectiveReport {
        self.inner.as_ref().map(|inner| inner.backend.report(inner.rank)).unwrap_or_default()
    }

    /// For hosts of workers: the rank has ended. Aborts its communicators with `Unavailable`.
    pub fn close(&self) {
        let Some(inner) = &self.inner else { return };
        let slots = std::mem::take(&mut inner.joined.lock().slots);
        for slot in slots.values().filter_map(|slots| slots.newest.get()) {
            let why = Error::unknown(Code::Unavailable, format!("rank {} has ended", inner.rank));
            slot.communicator.abort(why.about(slot.communicator.meeting().to_string()));
        }
    }

    fn inner(&self) -> Result<&Arc<Inner>> {
        self.inner.as_ref().ok_or_else(|| {
            let why = "the host of this worker does not connect ranks; start the group with one that does";
            Error::not_started(Code::Unimplemented, why).about("peers")
        })
    }
}

impl Inner {
    /// Returns the name of the meeting along an axis, and its ranks, ascending.
    fn along(&self, layout: &RankLayout, axis: &str) -> Result<(Arc<str>, Vec<Rank>)> {
        let own = layout.axis_index(axis)?;
        let coordinates = layout.coordinates(self.rank)?;
        let axes = layout.axes().iter().zip(coordinates).enumerate();
        let others: Vec<(&str, usize)> =
            axes.filter(|(index, _)| *index != own).map(|(_, (axis, at))| (axis.name.as_str(), at)).collect();
        let ranks = layout.ranks_by_coordinates(&others)?;
        let fixed: Vec<String> = others.iter().map(|(axis, at)| format!("{axis}={at}")).collect();
        let fixed = if fixed.is_empty() { String::new() } else { format!("[{}]", fixed.join(",")) };
        Ok((format!("{}/{axis}{fixed}", self.group).into(), ranks))
    }

    /// Joins the meeting that `which` names, in the newest epoch in which all of its ranks can meet.
    async fn communicator(
        self: &Arc<Self>,
        cx: &CallContext,
        asked: &str,
        which: impl Fn(&RankLayout) -> Result<(Arc<str>, Vec<Rank>)> + Send + Sync,
    ) -> Result<Arc<dyn Communicator>> {
        let about = |error: Error| error.about(format!("rank {} of {} meets {asked}", self.rank, self.group));
        let mut seats = self.seats.subscribe();
        let mut passed = 0;
        loop {
            let known = self.newer_seats(cx, &mut seats, passed).await.map_err(about)?;
            passed = known.epoch;
            let (name, ranks) = which(&known.layout).map_err(about)?;
            if known.of(&ranks).len() < ranks.len() {
                continue;
            }
            let Some((name, slot)) = self.slot(&name, &known) else { continue };
            let joined = slot.get_or_try_init(|| self.join(cx, &name, &known, &ranks));
            let bound =
                cx.bound(Execution::NotStarted, async { joined.await.map(|slot| Arc::clone(&slot.communicator)) });
            tokio::select! {
                biased;
                // The ranks of an older epoch will never all join.
                Ok(newer) = seats.wait_for(|now| epoch_of(now.as_ref()) > known.epoch) => {
                    if let Some(changes) = newer.as_ref().and_then(|newer| newer.changes(&known.of(&ranks))) {
                        return Err(about(Error::not_started(Code::Unavailable, changes)));
                    }
                }
                joined = bound => return joined,
            }
        }
    }

    /// Waits for seats of a newer epoch than `passed`.
    async fn newer_seats(
        &self,
        cx: &CallContext,
        seats: &mut watch::Receiver<Option<Arc<Seats>>>,
        passed: u64,
    ) -> Result<Arc<Seats>> {
        let newer = async {
            let known = seats.wait_for(|now| epoch_of(now.as_ref()) > passed).await;
            let known = known.ok().and_then(|known| known.clone());
            known.ok_or_else(|| Error::internal("peers hold the seats for as long as they are asked"))
        };
        let late = match cx.bound(Execution::NotStarted, newer).await {
            Err(error) if matches!(error.code(), Code::DeadlineExceeded | Code::Cancelled) => error,
            known => return known,
        };
        let missing = match &*self.seats.borrow() {
            None => "the supervisor of the group has not told its seats: some ranks have not started".to_owned(),
            Some(now) => now.lost.keys().filter_map(|rank| now.end_of(*rank)).collect::<Vec<_>>().join("; "),
        };
        Err(Error::not_started(late.code(), format!("{}: {missing}", late.message())))
    }

    /// Returns the name of a meeting and the place of its communicator: a new place, if the last communicator has failed. Gives up the communicators of older
    /// epochs. Returns `None` if the epoch is an older one itself.
    fn slot(&self, name: &Arc<str>, known: &Seats) -> Option<(Arc<str>, Arc<OnceCell<Slot>>)> {
        let epoch = known.epoch;
        let mut joined = self.joined.lock();
        if epoch > joined.epoch {
            for slot in std::mem::take(&mut joined.slots).into_values() {
                if let Some(slot) = slot.newest.get() {
                    slot.communicator.abort(replaced(&slot.communicator, known));
                }
            }
            joined.epoch = epoch;
        }
        if epoch < joined.epoch {
            return None;
        }
        let slots = joined.slots.entry(Arc::clone(name)).or_default();
        if slots.newest.get().is_some_and(|slot| slot.communicator.closed().now_or_never().is_some()) {
            *slots = Slots { newest: Arc::default(), failed: slots.failed + 1 };
        }
        let name = match slots.failed {
            0 => Arc::clone(name),
            failed => format!("{name}#{}", failed + 1).into(),
        };
        Some((name, Arc::clone(&slots.newest)))
    }

    async fn join(self: &Arc<Self>, cx: &CallContext, name: &Arc<str>, known: &Seats, ranks: &[Rank]) -> Result<Slot> {
        let meeting = Meeting::new(Arc::clone(name), known.epoch, self.rank, known.of(ranks))?;
        let communicator = self.backend.join(cx, meeting).await?;
        let follower = tokio::spawn(follow(self.seats.subscribe(), known.epoch, Arc::downgrade(&communicator)));
        Ok(Slot { communicator, _follower: Follower(follower.abort_handle()) })
    }
}

/// Aborts a communicator when the group has a newer epoch: its ranks may wait for one that is gone.
async fn follow(mut seats: watch::Receiver<Option<Arc<Seats>>>, epoch: u64, communicator: Weak<dyn Communicator>) {
    let newer = seats.wait_for(|now| epoch_of(now.as_ref()) > epoch).await.ok().and_then(|now| now.clone());
    if let (Some(newer), Some(communicator)) = (newer, communicator.upgrade()) {
        communicator.abort(replaced(&communicator, &newer));
    }
}

fn epoch_of(seats: Option<&Arc<Seats>>) -> u64 {
    seats.map_or(0, |seats| seats.epoch)
}

fn replaced(communicator: &Arc<dyn Communicator>, newer: &Seats) -> Error {
    let error = match newer.changes(&communicator.meeting().seats) {
        Some(changes) => Error::unknown(Code::Unavailable, changes),
        None => {
            let why = format!("the group is in epoch {}, because other ranks have changed; ask again", newer.epoch);
            Error::unknown(Code::FailedPrecondition, why)
        }
    };
    error.about(communicator.meeting().to_string())
}

impl PartialEq for Peers {
    /// Returns `true` for clones of the same peers.
    fn eq(&self, other: &Self) -> bool {
        match (&self.inner, &other.inner) {
            (Some(own), Some(others)) => Arc::ptr_eq(own, others),
            (own, others) => own.is_none() && others.is_none(),
        }
    }
}

impl Eq for Peers {}

impl fmt::Debug for Peers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.inner {
            Some(inner) => write!(f, "Peers(rank {} of {} over {})", inner.rank, inner.group, inner.backend.name()),
            None => f.write_str("Peers(none)"),
        }
    }
}

#[cfg(test)]
mod tests;

//! Who can meet: the ranks of a group as its supervisor tells them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::Seat;
use crate::group::layout::{Rank, RankLayout};

/// The ranks of a group in one epoch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Seats {
    /// Increases whenever a rank of the group is lost or replaced.
    pub epoch: u64,
    /// The axes of the group.
    pub layout: RankLayout,
    /// The ranks that can meet, ascending.
    pub seats: Vec<Seat>,
    /// The ranks that have been lost and are not replaced yet, and how each of them ended.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub lost: BTreeMap<Rank, String>,
}

impl Seats {
    /// Creates the seats of an epoch, sorted by rank.
    #[must_use]
    pub fn new(epoch: u64, layout: RankLayout, mut seats: Vec<Seat>) -> Self {
        seats.sort_by_key(|seat| seat.rank);
        Self { epoch, layout, seats, lost: BTreeMap::new() }
    }

    /// Adds ranks that have been lost, and how each of them ended.
    #[must_use]
    pub fn without(mut self, lost: impl IntoIterator<Item = (Rank, String)>) -> Self {
        self.lost.extend(lost);
        self
    }

    /// Says which of these ranks have been lost or replaced since, and how each of them ended. `None` if none has.
    pub(in crate::group::collective) fn changes(&self, before: &[Seat]) -> Option<String> {
        let change = |seat: &Seat| {
            self.end_of(seat.rank).or_else(|| {
                let now = self.seats.iter().find(|now| now.rank == seat.rank)?;
                let replaced = format!("rank {} was replaced by its incarnation {}", now.rank, now.incarnation);
                (now.incarnation != seat.incarnation).then_some(replaced)
            })
        };
        let changes: Vec<String> = before.iter().filter_map(change).collect();
        (!changes.is_empty()).then(|| changes.join("; "))
    }

    /// Says how a rank has ended, if it is lost.
    pub(in crate::group::collective) fn end_of(&self, rank: Rank) -> Option<String> {
        self.lost.get(&rank).map(|end| format!("rank {rank} {end}"))
    }

    pub(in crate::group::collective) fn of(&self, ranks: &[Rank]) -> Vec<Seat> {
        self.seats.iter().filter(|seat| ranks.contains(&seat.rank)).cloned().collect()
    }
}

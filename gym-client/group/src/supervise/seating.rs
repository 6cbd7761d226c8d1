//! The seats of a group: which incarnations meet for collective operations, and which ranks have been told.
//!
//! A group whose ranks are all connected has an epoch. When one of them is lost, the others are told at once, in a newer epoch without it; when it is back,
//! all are told again. Pure: the supervisor sends the posts.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use gym_core::group::collective::{Seat, Seats};
use gym_core::group::{Rank, RankLayout, RankState};
use gym_core::{Channel, Code, Endpoint, Error, Incarnation};

use crate::placement::machine_of;
use crate::supervise::record::RankRecord;

/// The seats of a group, and which ranks know them.
#[derive(Debug)]
pub(super) struct Seating {
    layout: RankLayout,
    seats: Option<Seats>,
    /// The seats as JSON.
    text: Bytes,
    /// The epoch that a rank was last told, or that its host cannot be told.
    told: BTreeMap<Rank, (Incarnation, u64)>,
    posting: BTreeSet<(Rank, Incarnation)>,
    /// Ranks whose last post failed. They are told again after a pause.
    failed: BTreeSet<(Rank, Incarnation)>,
}

/// Seats for one rank.
#[derive(Debug)]
pub(super) struct SeatsPost {
    pub(super) rank: Rank,
    pub(super) incarnation: Incarnation,
    pub(super) channel: Channel,
    pub(super) epoch: u64,
    pub(super) seats: Bytes,
}

/// A rank that can be told, as the records have it.
struct Present<'r> {
    rank: Rank,
    incarnation: Incarnation,
    channel: &'r Channel,
    endpoints: &'r [Endpoint],
    node: Option<&'r str>,
}

impl<'r> Present<'r> {
    fn of(record: &'r RankRecord) -> Option<Self> {
        let channel = record.channel.as_ref()?;
        let (rank, incarnation, endpoints) = (record.place.rank, record.incarnation, &record.endpoints[..]);
        Some(Self { rank, incarnation, channel, endpoints, node: record.node_name.as_deref() })
    }

    fn seat(&self) -> Seat {
        let seat = Seat::new(self.rank, self.incarnation).serving_at(self.endpoints.iter().cloned());
        // Ranks of one machine can share memory, whichever agents of it have started them.
        seat.on_node(self.node.map(machine_of).unwrap_or_default())
    }
}

impl Seating {
    pub(super) fn new(layout: RankLayout) -> Self {
        Self {
            layout,
            seats: None,
            text: Bytes::new(),
            told: BTreeMap::new(),
            posting: BTreeSet::new(),
            failed: BTreeSet::new(),
        }
    }

    /// Returns the posts that are due now. Each of them ends with [`posted`](Self::posted).
    pub(super) fn due(&mut self, records: &[RankRecord]) -> Vec<SeatsPost> {
        // A group that stops lets its calls finish: a rank that has none left ends before the others, and is not lost.
        if records.iter().any(|record| record.state() == RankState::Stopped) {
            return Vec::new();
        }
        let present: Vec<Present<'_>> = records.iter().filter_map(Present::of).collect();
        if let Some(newer) = self.newer(records, &present) {
            self.text = serde_json::to_vec(&newer).expect("seats have no map with other keys than numbers").into();
            self.seats = Some(newer);
        }
        let Some(seats) = &self.seats else { return Vec::new() };
        let untold = |rank: &&Present<'_>| self.told.get(&rank.rank) != Some(&(rank.incarnation, seats.epoch));
        let due: Vec<SeatsPost> = present
            .iter()
            .filter(|rank| {
                [&self.posting, &self.failed].iter().all(|set| !set.contains(&(rank.rank, rank.incarnation)))
            })
            .filter(untold)
            .map(|rank| SeatsPost {
                rank: rank.rank,
                incarnation: rank.incarnation,
                channel: rank.channel.clone(),
                epoch: seats.epoch,
                seats: self.text.clone(),
            })
            .collect();
        self.posting.extend(due.iter().map(|post| (post.rank, post.incarnation)));
        due
    }

    /// Lets the posts that have failed be due again.
    pub(super) fn retry(&mut self) {
        self.failed.clear();
    }

    /// Records the end of a post. The host of a rank may not know such posts; any other failure is [tried again](Self::retry).
    pub(super) fn posted(&mut self, rank: Rank, incarnation: Incarnation, epoch: u64, ended: Result<(), &Error>) {
        self.posting.remove(&(rank, incarnation));
        match ended {
            Err(error) if error.code() != Code::NotFound => {
                self.failed.insert((rank, incarnation));
            }
            _ => {
                self.told.insert(rank, (incarnation, epoch));
            }
        }
    }

    /// Returns the seats of the next epoch, if the ranks have changed since the last one.
    fn newer(&self, records: &[RankRecord], present: &[Present<'_>]) -> Option<Seats> {
        let epoch = self.seats.as_ref().map_or(1, |seats| seats.epoch + 1);
        let has =
            |seat: &&Seat| present.iter().any(|rank| (rank.rank, rank.incarnation) == (seat.rank, seat.incarnation));
        let known = self.seats.as_ref().map(|seats| seats.seats.as_slice()).unwrap_or_default();
        let stay: Vec<&Seat> = known.iter().filter(has).collect();
        if present.len() == records.len() {
            let all = || present.iter().map(Present::seat).collect();
            return (stay.len() < records.len()).then(|| Seats::new(epoch, self.layout.clone(), all()));
        }
        let lost = known.iter().filter(|seat| !has(seat));
        let why = |seat: &Seat| {
            let record = records.iter().find(|record| record.place.rank == seat.rank);
            let exit = record.and_then(|record| record.exit.as_deref());
            let exit = exit.filter(|exit| exit.incarnation == seat.incarnation.0);
            (seat.rank, exit.map_or_else(|| "it is not connected".to_owned(), ToString::to_string))
        };
        let mut gone: BTreeMap<Rank, String> = lost.map(why).collect();
        if gone.is_empty() {
            return None;
        }
        gone.extend(self.seats.iter().flat_map(|seats| seats.lost.clone()));
        let seats = Seats::new(epoch, self.layout.clone(), stay.into_iter().cloned().collect());
        Some(seats.without(gone))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use gym_client::transport::Transports;
    use gym_core::group::{ExitCause, RankExit};
    use gym_core::transport::handler_fn;
    use gym_core::transport::mem::channel_to;
    use gym_core::{CancelToken, Response};
    use tokio::time::Instant;

    use super::*;
    use crate::health::HealthEvent;
    use crate::provision::RankPlace;
    use crate::supervise::options::GroupOptions;

    /// The seats of three ranks, which a test connects and ends.
    struct Played {
        seating: Seating,
        records: Vec<RankRecord>,
    }

    impl Played {
        fn new() -> Self {
            let records = (0..3).map(|rank| RankRecord::new(RankPlace::on_one_node(rank, 3))).collect();
            Self { seating: Seating::new(RankLayout::line(3).unwrap()), records }
        }

        fn connect(&mut self, rank: usize) {
            let handler = Arc::new(handler_fn(|_| async { Ok(Response::json("true")) }));
            let channel = channel_to("rank", handler, false, CancelToken::new());
            self.records[rank].reached(channel.clone(), Vec::new(), channel, Instant::now());
        }

        fn lose(&mut self, rank: usize) {
            let options = GroupOptions::new(Transports::new());
            let exit = RankExit::new(self.records[rank].incarnation, ExitCause::Died);
            self.records[rank].ended(exit, Instant::now(), &options);
        }

        fn restart(&mut self, rank: usize) {
            self.records[rank].restarting(&GroupOptions::new(Transports::new()));
            self.connect(rank);
        }

        /// Returns the ranks that are told something now, and what. All of them take it.
        fn told(&mut self) -> (Vec<Rank>, Option<Seats>) {
            let posts = self.seating.due(&self.records);
            let seats = posts.first().map(|post| serde_json::from_slice(&post.seats).unwrap());
            for post in &posts {
                self.seating.posted(post.rank, post.incarnation, post.epoch, Ok(()));
            }
            (posts.iter().map(|post| post.rank).collect(), seats)
        }
    }

    fn incarnations(seats: &Seats) -> Vec<(Rank, u64)> {
        seats.seats.iter().map(|seat| (seat.rank, seat.incarnation.0)).collect()
    }

    #[test]
    fn ranks_are_told_when_all_are_there_when_one_is_lost_and_when_it_is_back() {
        let mut played = Played::new();
        played.connect(2);
        played.connect(0);
        assert_eq!(played.told(), (vec![], None), "rank 1 is missing");
        played.connect(1);
        let (ranks, seats) = played.told();
        let seats = seats.unwrap();
        assert_eq!((ranks, seats.epoch), (vec![0, 1, 2], 1));
        assert_eq!(incarnations(&seats), [(0, 1), (1, 1), (2, 1)]);
        assert_eq!(played.told(), (vec![], None), "nothing has changed");

        played.lose(1);
        let (ranks, seats) = played.told();
        let seats = seats.unwrap();
        assert_eq!((ranks, seats.epoch), (vec![0, 2], 2));
        assert_eq!(incarnations(&seats), [(0, 1), (2, 1)]);
        assert_eq!(seats.lost, BTreeMap::from([(1, "died".to_owned())]));
        played.lose(2);
        let (ranks, seats) = played.told();
        assert_eq!((ranks, seats.unwrap().lost.len()), (vec![0], 2));
        played.restart(1);
        assert_eq!(
            played.told(),
            (vec![1], Some(played.seating.seats.clone().unwrap())),
            "it learns that rank 2 is lost"
        );
        played.restart(2);
        let (ranks, seats) = played.told();
        let seats = seats.unwrap();
        assert_eq!((ranks, seats.epoch, seats.lost.len()), (vec![0, 1, 2], 4, 0));
        assert_eq!(incarnations(&seats), [(0, 1), (1, 2), (2, 2)]);
    }

    #[test]
    fn ranks_of_a_group_that_stops_are_not_lost() {
        let mut played = Played::new();
        (0..3).for_each(|rank| played.connect(rank));
        assert_eq!(played.told().0, [0, 1, 2]);
        let options = GroupOptions::new(Transports::new());
        for record in &mut played.records {
            record.note(HealthEvent::Stopped, &options);
        }
        played.lose(1);
        assert_eq!(played.told(), (vec![], None), "the calls of the others go on");
    }

    #[test]
    fn a_restarted_rank_does_not_wait_for_a_post_to_its_last_incarnation() {
        let mut played = Played::new();
        (0..3).for_each(|rank| played.connect(rank));
        let posts = played.seating.due(&played.records);
        played.lose(1);
        let broken = Error::unknown(Code::Unavailable, "the connection broke");
        played.seating.posted(1, posts[1].incarnation, posts[1].epoch, Err(&broken));
        played.restart(1);
        assert_eq!(played.told().0, [1], "the posts to the others are under way");
    }

    #[test]
    fn ranks_of_two_nodes_of_a_machine_have_one_place_to_meet() {
        let mut played = Played::new();
        for (rank, node) in [(0, "share0000@a"), (1, "share0001@a"), (2, "b")] {
            played.records[rank].node_name = Some(node.into());
            played.connect(rank);
        }
        let seats = played.told().1.unwrap().seats;
        assert_eq!(seats.iter().map(|seat| &*seat.node).collect::<Vec<_>>(), ["a", "a", "b"]);
    }

    #[test]
    fn a_post_that_failed_is_sent_again_later_and_never_to_a_host_that_does_not_know_it() {
        let mut played = Played::new();
        (0..3).for_each(|rank| played.connect(rank));
        let posts = played.seating.due(&played.records);
        assert_eq!(posts.len(), 3);
        assert!(played.seating.due(&played.records).is_empty(), "they are under way");
        let unknown = Error::not_started(Code::NotFound, "no method");
        let broken = Error::unknown(Code::Unavailable, "the connection broke");
        for (post, ended) in posts.iter().zip([Ok(()), Err(&unknown), Err(&broken)]) {
            played.seating.posted(post.rank, post.incarnation, post.epoch, ended);
        }
        assert!(played.seating.due(&played.records).is_empty(), "not at once");
        played.seating.retry();
        assert_eq!(played.told().0, [2]);
    }
}

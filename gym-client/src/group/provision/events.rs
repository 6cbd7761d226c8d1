//! What happens to ranks, as their provisioner tells it.

use std::sync::{Arc, Mutex, PoisonError};

use futures_util::stream::{self, BoxStream, StreamExt};
use gym_core::group::{Rank, RankExit};
use gym_core::{Endpoint, Incarnation};
use tokio::sync::watch;

/// Something that happened to a rank.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum RankEvent {
    /// Its process (or task) exists; the worker is being made.
    Started {
        /// Which rank.
        rank: Rank,
        /// Which life of it.
        incarnation: Incarnation,
        /// Its process; `None` for a rank that has none of its own.
        pid: Option<u32>,
    },
    /// It can be called.
    Ready {
        /// Which rank.
        rank: Rank,
        /// Which life of it.
        incarnation: Incarnation,
        /// Where, best first.
        endpoints: Vec<Endpoint>,
    },
    /// It uses more than nine tenths of the memory that it may; told once for each life.
    MemoryHigh {
        /// Which rank.
        rank: Rank,
        /// Which life of it.
        incarnation: Incarnation,
        /// Resident bytes.
        resident_bytes: u64,
        /// The limit in bytes.
        limit_bytes: u64,
    },
    /// It is gone, with everything it had started.
    Exited {
        /// Which rank.
        rank: Rank,
        /// How.
        exit: RankExit,
    },
}

/// The events of one deployment. Each reader gets those so far, then the others as they come.
///
/// Nothing is ever dropped: a life of a rank makes at most four events, and the restart budget bounds the lives.
#[derive(Clone, Debug)]
pub(crate) struct EventLog {
    events: Arc<Mutex<Vec<RankEvent>>>,
    count: watch::Sender<usize>,
}

impl EventLog {
    pub(crate) fn new() -> Self {
        Self { events: Arc::default(), count: watch::Sender::new(0) }
    }

    pub(crate) fn push(&self, event: RankEvent) {
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        events.push(event);
        self.count.send_replace(events.len());
    }

    /// Ends when the last clone of the log is gone.
    pub(crate) fn stream(&self) -> BoxStream<'static, RankEvent> {
        let start = (Arc::clone(&self.events), self.count.subscribe(), 0);
        let next = |(events, mut count, read): (Arc<Mutex<Vec<RankEvent>>>, watch::Receiver<usize>, usize)| async move {
            // An error means that no more can come; what is there is read all the same.
            let _ = count.wait_for(|count| *count > read).await;
            let event = events.lock().unwrap_or_else(PoisonError::into_inner).get(read).cloned();
            event.map(|event| (event, (events, count, read + 1)))
        };
        stream::unfold(start, next).boxed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn started(rank: Rank) -> RankEvent {
        RankEvent::Started { rank, incarnation: Incarnation(1), pid: None }
    }

    #[tokio::test]
    async fn a_late_reader_gets_all_events_and_the_end() {
        let log = EventLog::new();
        log.push(started(0));
        let reader = log.stream();
        log.push(started(1));
        drop(log);
        let ranks: Vec<Rank> = reader
            .map(|event| match event {
                RankEvent::Started { rank, .. } => rank,
                other => panic!("{other:?}"),
            })
            .collect()
            .await;
        assert_eq!(ranks, [0, 1]);
    }
}

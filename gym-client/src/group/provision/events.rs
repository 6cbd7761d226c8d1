//! Events of ranks, as their provisioner reports them.

use std::sync::{Arc, Mutex, PoisonError};

use futures_util::stream::{self, BoxStream, StreamExt};
use gym_core::group::{Rank, RankExit};
use gym_core::{Endpoint, Incarnation};
use tokio::sync::watch;

/// An event of a rank.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum RankEvent {
    /// The rank's process or task runs; the worker is being created.
    Started {
        /// The rank.
        rank: Rank,
        /// The incarnation.
        incarnation: Incarnation,
        /// Process id; `None` for a rank without its own process.
        pid: Option<u32>,
    },
    /// The rank accepts calls.
    Ready {
        /// The rank.
        rank: Rank,
        /// The incarnation.
        incarnation: Incarnation,
        /// The endpoints, in order of preference.
        endpoints: Vec<Endpoint>,
    },
    /// The rank uses more than 90 % of its memory limit. Reported once for each incarnation.
    MemoryHigh {
        /// The rank.
        rank: Rank,
        /// The incarnation.
        incarnation: Incarnation,
        /// Resident memory in bytes.
        resident_bytes: u64,
        /// The limit in bytes.
        limit_bytes: u64,
    },
    /// The rank and all its descendants have exited.
    Exited {
        /// The rank.
        rank: Rank,
        /// How the rank ended.
        exit: RankExit,
    },
}

/// The events of one deployment. Each reader receives the events so far, then new ones as they happen.
///
/// No event is dropped. An incarnation has at most four events, and the restart budget bounds the incarnations.
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

    /// Returns the events as a stream, which ends when the last clone of the log is dropped.
    pub(crate) fn stream(&self) -> BoxStream<'static, RankEvent> {
        let start = (Arc::clone(&self.events), self.count.subscribe(), 0);
        let next = |(events, mut count, read): (Arc<Mutex<Vec<RankEvent>>>, watch::Receiver<usize>, usize)| async move {
            // An error means that no more events follow; those in the log are still read.
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

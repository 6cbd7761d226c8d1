//! Events of ranks and nodes, as their provisioner reports them.

use std::fmt;
use std::sync::Arc;

use futures_util::stream::{self, BoxStream, StreamExt};
use gym_core::base::watch;
use gym_core::group::{Rank, RankExit};
use gym_core::{Endpoint, Incarnation};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::placement::NodeResources;
use crate::usage::node::NodeUsage;

/// A node, and its state as the reservation's holder knows it.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct NodeStatus {
    /// Its name, and what it has.
    pub resources: NodeResources,
    /// Its address; `None` for this machine.
    pub address: Option<Endpoint>,
    /// Its state.
    pub state: NodeState,
    /// Its memory and GPUs, as its agent last sampled them. `None` for a lost node, for a cluster without `monitor_memory`, and for this machine, whose usage
    /// is [`VirtualCluster::node_usage`](crate::VirtualCluster::node_usage).
    pub usage: Option<NodeUsage>,
}

/// The state of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NodeState {
    /// Its agent responds.
    Serving,
    /// Its agent does not respond, for this reason. Its ranks may run.
    Suspect(String),
    /// It was given up, for this reason.
    Lost(String),
}

/// An event of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NodeEvent {
    /// The node responds: it was reserved, or is no longer suspect.
    Serving {
        /// The name of the node.
        node: String,
    },
    /// The node does not respond.
    Suspect {
        /// The name of the node.
        node: String,
        /// The reason.
        why: String,
    },
    /// The node is to be taken away, says the engine that placed it. Its ranks serve until then, and balancers choose others if they can.
    Draining {
        /// The name of the node.
        node: String,
        /// The reason.
        why: String,
    },
    /// The node was given up: its ranks have ended, or end with their lease.
    Lost {
        /// The name of the node.
        node: String,
        /// The reason.
        why: String,
    },
    /// Bundles of a lost node moved.
    Moved {
        /// The name of the lost node.
        from: String,
        /// The names of the nodes that have the bundles now.
        to: Vec<String>,
    },
}

impl fmt::Display for NodeState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Serving => f.write_str("serving"),
            Self::Suspect(why) => write!(f, "suspect: {why}"),
            Self::Lost(why) => write!(f, "lost: {why}"),
        }
    }
}

/// An event of a rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum RankEvent {
    /// The rank is about to start on this node; without this event, it starts on this machine with the GPUs of its place.
    Placed {
        /// The rank.
        rank: Rank,
        /// The incarnation.
        incarnation: Incarnation,
        /// The name of the node.
        node: String,
        /// Its GPUs, as in `CUDA_VISIBLE_DEVICES`.
        gpus: Vec<String>,
    },
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
        /// The memory that the limit counts, in bytes.
        resident_bytes: u64,
        /// The limit in bytes.
        limit_bytes: u64,
    },
    /// The node of the rank is about to be taken away.
    Draining {
        /// The rank.
        rank: Rank,
        /// The incarnation.
        incarnation: Incarnation,
    },
    /// The rank and all its descendants have exited.
    Exited {
        /// The rank.
        rank: Rank,
        /// How the rank ended.
        exit: RankExit,
    },
}

/// A log of events. Each reader receives the events so far, then new ones as they happen.
///
/// No event is dropped. An incarnation has at most six events, and the restart budget bounds the incarnations.
#[derive(Debug)]
pub(crate) struct EventLog<E = RankEvent> {
    events: Arc<Mutex<Vec<E>>>,
    count: watch::Sender<usize>,
}

impl<E> Clone for EventLog<E> {
    fn clone(&self) -> Self {
        Self { events: Arc::clone(&self.events), count: self.count.clone() }
    }
}

impl<E: Clone + Send + 'static> EventLog<E> {
    pub(crate) fn new() -> Self {
        Self { events: Arc::default(), count: watch::Sender::new(0) }
    }

    pub(crate) fn push(&self, event: E) {
        let mut events = self.events.lock();
        events.push(event);
        self.count.send_replace(events.len());
    }

    /// Returns the events after the first `read`, which may be none.
    pub(crate) fn after(&self, read: usize) -> Vec<E> {
        let events = self.events.lock();
        events.get(read..).unwrap_or_default().to_vec()
    }

    /// Returns the number of events.
    pub(crate) fn count(&self) -> usize {
        *self.count.borrow()
    }

    /// Waits until there are more events than `read`.
    pub(crate) async fn beyond(&self, read: usize) {
        // The sender is part of this log, so the channel is open.
        let _ = self.count.subscribe().wait_for(|count| *count > read).await;
    }

    /// Returns the events as a stream, which ends when the last clone of the log is dropped.
    pub(crate) fn stream(&self) -> BoxStream<'static, E> {
        let start = (Arc::clone(&self.events), self.count.subscribe(), 0);
        let next = |(events, mut count, read): (Arc<Mutex<Vec<E>>>, watch::Receiver<usize>, usize)| async move {
            // An error means that no more events follow; those in the log are still read.
            let _ = count.wait_for(|count| *count > read).await;
            let event = events.lock().get(read).cloned();
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

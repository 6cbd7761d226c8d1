//! What happens to ranks, as their provisioner tells it.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::stream::{self, BoxStream, StreamExt};
use gym_core::{Endpoint, Incarnation, Rank};
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
    Exited(RankExit),
}

/// How a life of a rank ended.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RankExit {
    /// Which rank.
    pub rank: Rank,
    /// Which life of it.
    pub incarnation: Incarnation,
    /// Why, as far as its provisioner knows.
    pub cause: ExitCause,
    /// Its exit status, if it ended by itself.
    pub code: Option<i32>,
    /// The signal that ended it, if one did.
    pub signal: Option<i32>,
    /// The last lines of its standard error, oldest first.
    pub stderr_tail: Arc<[String]>,
}

/// Why a life of a rank ended.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ExitCause {
    /// It ended by itself, or somebody else killed it.
    Died,
    /// It was asked to.
    Stopped,
    /// It used more memory than it may, and was killed for it.
    MemoryLimitExceeded {
        /// Resident bytes when that was seen; `None` when the kernel did it.
        resident_bytes: Option<u64>,
        /// The limit in bytes.
        limit_bytes: u64,
    },
    /// The process could not be started, or the worker could not be made: why.
    StartFailed(String),
    /// It ran, but did not say within this time where it serves; then it was killed.
    NotReady(std::time::Duration),
}

impl RankExit {
    /// The last life of a rank that did not come to be.
    #[must_use]
    pub fn start_failed(rank: Rank, incarnation: Incarnation, why: impl Into<String>) -> Self {
        let cause = ExitCause::StartFailed(why.into());
        Self { rank, incarnation, cause, code: None, signal: None, stderr_tail: Arc::default() }
    }
}

impl fmt::Display for RankExit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} (incarnation {}) ", self.rank, self.incarnation)?;
        match &self.cause {
            ExitCause::Died => f.write_str("died")?,
            ExitCause::Stopped => f.write_str("was stopped")?,
            ExitCause::MemoryLimitExceeded { resident_bytes: Some(used), limit_bytes } => {
                write!(f, "used {used} of {limit_bytes} bytes of memory and was killed; raise its memory limit")?;
            }
            ExitCause::MemoryLimitExceeded { resident_bytes: None, limit_bytes } => {
                write!(f, "was killed by the kernel at its limit of {limit_bytes} bytes of memory; raise it")?;
            }
            ExitCause::StartFailed(why) => write!(f, "did not start: {why}")?,
            ExitCause::NotReady(waited) => {
                write!(f, "did not say within {waited:?} where it serves; raise the start timeout if it needs longer")?;
            }
        }
        match (self.code, self.signal) {
            (Some(code), _) => write!(f, " (exit status {code})")?,
            (None, Some(signal)) => write!(f, " (signal {signal})")?,
            (None, None) => {}
        }
        for line in self.stderr_tail.iter() {
            write!(f, "\n  {line}")?;
        }
        Ok(())
    }
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

    /// Ends when the last clone of the log that is no reader is gone.
    pub(crate) fn stream(&self) -> BoxStream<'static, RankEvent> {
        let start = (Arc::clone(&self.events), self.count.subscribe(), 0);
        let next = |(events, mut count, read): (Arc<Mutex<Vec<RankEvent>>>, watch::Receiver<usize>, usize)| async move {
            let more = count.wait_for(|count| *count > read).await.is_ok();
            let event = events.lock().unwrap_or_else(PoisonError::into_inner).get(read).cloned();
            // A log that ended may still hold events that were not read.
            event.filter(|_| more || read < *count.borrow()).map(|event| (event, (events, count, read + 1)))
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

    #[test]
    fn an_exit_tells_who_why_and_the_last_words() {
        let exit = RankExit {
            cause: ExitCause::MemoryLimitExceeded { resident_bytes: Some(9), limit_bytes: 8 },
            signal: Some(9),
            stderr_tail: Arc::from(["loading".to_owned()]),
            ..RankExit::start_failed(3, Incarnation(2), "")
        };
        let text = exit.to_string();
        for word in ["rank 3", "incarnation 2", "9 of 8 bytes", "raise", "signal 9", "loading"] {
            assert!(text.contains(word), "{word:?} missing in {text}");
        }
    }
}

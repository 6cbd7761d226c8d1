//! The reports of a job's driver, and their sum. Uses no clock and no sockets.

use std::fmt::Write as _;

use gym_core::Endpoint;
use serde::Deserialize;
use tokio::time::Instant;

/// Prefix of an event in the log of a job.
pub(super) const MARK: &str = "@gym ";

/// An event of the driver, with its number.
#[derive(Debug, Deserialize)]
struct ShimEvent {
    seq: u64,
    #[serde(flatten)]
    kind: ShimEventKind,
}

#[derive(Debug, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
enum ShimEventKind {
    Shim {
        ray: String,
        /// The node of the driver.
        node_id: String,
    },
    Waiting {
        attempt: u32,
    },
    Placed {
        nodes: Vec<String>,
    },
    Agent {
        share: usize,
        node_id: String,
        ip: String,
        endpoints: Vec<Endpoint>,
    },
    Exited {
        share: usize,
        code: Option<i32>,
        error: Option<String>,
        #[serde(default)]
        stderr: Vec<String>,
    },
    Suspect {
        share: usize,
    },
    Draining {
        share: usize,
        node_id: String,
        /// Until the machine is taken away; `None` if that is not known.
        seconds: Option<f64>,
    },
    Lost {
        share: usize,
        cause: String,
        node_id: Option<String>,
        why: String,
    },
    Failed {
        share: usize,
        why: String,
    },
    Ended {
        code: i32,
        why: String,
    },
    #[serde(other)]
    Other,
}

/// The state of a job, as its events describe it.
#[derive(Clone, Debug, Default)]
pub(super) struct RunState {
    seen: u64,
    /// The node on which the driver runs, once it is connected.
    pub(super) driver: Option<String>,
    /// Ray's message about the job while it has not started its driver.
    pub(super) pending: Option<PendingJob>,
    /// The number of the attempt to place the bundles, while they wait for room.
    pub(super) waiting: Option<u32>,
    pub(super) shares: Vec<ShareState>,
    /// Why the job has ended.
    pub(super) ended: Option<RunEnd>,
}

/// A job whose driver Ray has not started.
#[derive(Clone, Debug)]
pub(super) struct PendingJob {
    /// When Ray first said so.
    pub(super) since: Instant,
    pub(super) why: String,
}

/// The end of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RunEnd {
    pub(super) code: Option<i32>,
    pub(super) why: String,
}

/// Exit status of a driver whose bundles were not placed in time.
pub(super) const NOT_PLACED: i32 = 3;

/// The state of a share.
#[derive(Clone, Debug, Default)]
pub(super) struct ShareState {
    pub(super) agent: Option<ShareAgent>,
    /// Why the node of the agent is about to be taken away.
    pub(super) draining: Option<String>,
    /// The last failure, for errors.
    pub(super) failure: Option<String>,
}

/// The agent of a share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ShareAgent {
    pub(super) node_id: String,
    pub(super) ip: String,
    pub(super) endpoints: Vec<Endpoint>,
}

impl RunState {
    pub(super) fn new(shares: usize) -> Self {
        Self { shares: vec![ShareState::default(); shares], ..Self::default() }
    }

    /// Takes the events of a log that are new. A log is complete or a beginning of it, and may contain other lines.
    pub(super) fn read(&mut self, log: &str) -> bool {
        let mut changed = false;
        for line in log.lines() {
            let Some(event) = line.strip_prefix(MARK) else { continue };
            match serde_json::from_str::<ShimEvent>(event) {
                Ok(event) if event.seq > self.seen => {
                    self.seen = event.seq;
                    self.pending = None;
                    self.take(event.kind);
                    changed = true;
                }
                Ok(_) => {}
                // The last line may be incomplete.
                Err(error) => tracing::debug!(%error, line, "an event of the Ray job that cannot be read"),
            }
        }
        changed
    }

    /// Notes what Ray says about a job that it has not started. A driver that has written something runs, although Ray may say so later.
    pub(super) fn note_pending(&mut self, now: Instant, why: String) {
        if self.seen == 0 {
            let since = self.pending.as_ref().map_or(now, |pending| pending.since);
            self.pending = Some(PendingJob { since, why });
        }
    }

    fn take(&mut self, event: ShimEventKind) {
        match event {
            ShimEventKind::Shim { ray, node_id } => {
                tracing::debug!(ray, node_id, "the driver of the Ray job runs");
                self.driver = Some(node_id);
            }
            ShimEventKind::Waiting { attempt } => self.waiting = Some(attempt),
            ShimEventKind::Placed { nodes } => {
                self.waiting = None;
                tracing::debug!(?nodes, "Ray has placed the bundles");
            }
            ShimEventKind::Agent { share, node_id, ip, endpoints } => {
                if let Some(state) = self.shares.get_mut(share) {
                    *state = ShareState {
                        agent: Some(ShareAgent { node_id, ip, endpoints }),
                        draining: None,
                        failure: None,
                    };
                }
            }
            ShimEventKind::Exited { share, code, error, stderr } => {
                let mut failure = match (error, code) {
                    (Some(error), _) => error,
                    (None, Some(code)) if code < 0 => format!("the agent was killed by signal {}", -code),
                    (None, code) => format!("the agent exited with status {}", code.unwrap_or_default()),
                };
                for line in &stderr {
                    let _ = write!(failure, "\n  | {line}");
                }
                self.failed(share, failure);
            }
            ShimEventKind::Suspect { share } => tracing::warn!(share, "a process of the Ray job does not respond"),
            ShimEventKind::Draining { share, node_id, seconds } => {
                let state = self.shares.get_mut(share);
                let on_node =
                    |state: &&mut ShareState| state.agent.as_ref().is_some_and(|agent| agent.node_id == node_id);
                if let Some(state) = state.filter(on_node) {
                    let when = seconds.map_or(String::new(), |seconds| format!(" in {:.0} s", seconds.max(0.0)));
                    state.draining = Some(format!("Ray drains it: it is to be taken away{when}"));
                }
            }
            ShimEventKind::Lost { share, cause, node_id, why } => {
                let node = node_id.unwrap_or_default();
                tracing::warn!(share, cause, node, why, "Ray has lost a share of the job, and starts it again");
                self.failed(share, format!("Ray lost its {cause}: {why}"));
            }
            ShimEventKind::Failed { share, why } => {
                if let Some(state) = self.shares.get_mut(share) {
                    let before = state.failure.take().map(|failure| format!("\n  {failure}")).unwrap_or_default();
                    state.failure = Some(format!("{why}{before}"));
                }
            }
            ShimEventKind::Ended { code, why } => {
                self.waiting = None;
                self.ended = Some(RunEnd { code: Some(code), why });
            }
            ShimEventKind::Other => {}
        }
    }

    fn failed(&mut self, share: usize, failure: String) {
        if let Some(state) = self.shares.get_mut(share) {
            *state = ShareState { agent: None, draining: None, failure: Some(failure) };
        }
    }

    /// Returns `true` if every share has an agent.
    pub(super) fn is_ready(&self) -> bool {
        self.shares.iter().all(|share| share.agent.is_some())
    }

    /// Returns a warning if all shares are on one node.
    pub(super) fn crowded(&self) -> Option<String> {
        let mut agents = self.shares.iter().filter_map(|share| share.agent.as_ref());
        let first = agents.next()?;
        if self.shares.len() < 2 || agents.any(|agent| agent.node_id != first.node_id) {
            return None;
        }
        Some(format!(
            "SPREAD was asked for, and all {} shares are on the node {}, because there is no other node with room for one\n  fix: see `rgym ray status` for nodes and \
             `rgym ray resources` for what is in use; STRICT_SPREAD waits for room on other nodes instead",
            self.shares.len(),
            first.ip
        ))
    }

    /// Describes the shares without an agent.
    pub(super) fn missing(&self) -> String {
        let missing = (0..).zip(&self.shares).filter(|(_, share): &(usize, _)| share.agent.is_none());
        let describe = |(number, share): (usize, &ShareState)| {
            format!("share {number}: {}", share.failure.as_deref().unwrap_or("its agent has not started yet"))
        };
        missing.map(describe).collect::<Vec<_>>().join("\n  ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_taken_once_and_in_their_order_from_a_log_that_grows() {
        let mut state = RunState::new(2);
        let log = "2026-01-01 INFO something else\n@gym {\"seq\":1,\"t\":1,\"kind\":\"shim\",\"pid\":7,\"ray\":\"2.60.0\",\"node_id\":\"n\"}\n\
                   @gym {\"seq\":2,\"t\":1,\"kind\":\"waiting\",\"attempt\":1}\n@gym {\"seq\":3,\"t\":2,\"ki";
        assert!(state.read(log));
        assert_eq!((state.driver.as_deref(), state.waiting, state.is_ready()), (Some("n"), Some(1), false));
        assert!(!state.read(log));
        let agent = |seq: u64, share: usize, port: u16| {
            format!(
                "@gym {{\"seq\":{seq},\"t\":2,\"kind\":\"agent\",\"share\":{share},\"incarnation\":1,\"node_id\":\"n\",\"ip\":\"10.0.0.{share}\",\"pid\":1,\"gpus\":[],\
                 \"endpoints\":[\"http://10.0.0.{share}:{port}\"]}}\n"
            )
        };
        let log = format!(
            "@gym {{\"seq\":3,\"t\":2,\"kind\":\"placed\",\"nodes\":[\"n\",\"n\"]}}\n{}{}@gym {{\"seq\":6,\"t\":3,\"kind\":\"news\"}}\n",
            agent(4, 0, 1),
            agent(5, 1, 2)
        );
        assert!(state.read(&log));
        assert!(state.is_ready() && state.waiting.is_none());
        let crowded = state.crowded().unwrap();
        assert!(crowded.contains("all 2 shares are on the node 10.0.0.0") && crowded.contains("fix: "), "{crowded}");
        let more = format!(
            "{log}@gym {{\"seq\":7,\"t\":4,\"kind\":\"exited\",\"share\":1,\"incarnation\":1,\"code\":-9,\"stderr\":[\"out of memory\"]}}\n"
        );
        assert!(state.read(&more));
        assert_eq!(state.missing(), "share 1: the agent was killed by signal 9\n  | out of memory");
        assert!(state.read(&format!("{more}{}", agent(8, 1, 3))));
        assert_eq!(state.shares[1].agent.as_ref().unwrap().endpoints[0].as_str(), "http://10.0.0.1:3");
        assert!(state.read("@gym {\"seq\":9,\"t\":9,\"kind\":\"ended\",\"code\":3,\"why\":\"no room\"}\n"));
        assert_eq!(state.ended, Some(RunEnd { code: Some(NOT_PLACED), why: "no room".to_owned() }));

        let draining = |seq: u64, node: &str| {
            format!(
                "@gym {{\"seq\":{seq},\"t\":9,\"kind\":\"draining\",\"share\":1,\"node_id\":\"{node}\",\"seconds\":29.6}}\n"
            )
        };
        assert!(state.read(&draining(10, "another")));
        assert_eq!(state.shares[1].draining, None);
        assert!(state.read(&draining(11, "n")));
        assert_eq!(state.shares[1].draining.as_deref(), Some("Ray drains it: it is to be taken away in 30 s"));
        state.shares[1].agent.as_mut().unwrap().node_id = "m".to_owned();
        assert_eq!(state.crowded(), None);
        state.shares.pop();
        assert_eq!(state.crowded(), None, "one share has nothing to be spread");
    }
}

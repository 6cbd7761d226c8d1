//! The health state machine of one rank or replica.

use gym_core::group::RankState;

/// Limits of the health state machine. Each is at least 1, except `restarts_max`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct HealthPolicy {
    /// Consecutive failures after which a replica is dead. The default is 3.
    pub unhealthy_after: u32,
    /// Consecutive successful probes after which a suspect replica is healthy. The default is 2.
    pub healthy_after: u32,
    /// Maximum restarts of each replica, over all its incarnations. The default is 5.
    pub restarts_max: u32,
    /// Minimum number of replicas that can serve. The default is 1.
    pub serving_min: usize,
}

impl Default for HealthPolicy {
    /// Returns the limits: dead after three failures, healthy after two successes, five restarts, and at least one replica that
    /// can serve.
    fn default() -> Self {
        Self { unhealthy_after: 3, healthy_after: 2, restarts_max: 5, serving_min: 1 }
    }
}

/// An observation of a rank, or a step of its restart. An event that the current state does not allow has no effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HealthEvent {
    /// A probe was answered, or failed.
    Probed {
        /// `true` if the rank answered.
        ok: bool,
    },
    /// A request was answered, or failed because of the rank.
    Requested {
        /// `true` if the rank answered.
        ok: bool,
    },
    /// The rank ended.
    Ended,
    /// A restart is granted, to begin later, and deducted from the budget. Retires the rank if the budget is spent.
    RestartGranted,
    /// A restart begins. Deducts it from the budget unless it was granted before. Retires the rank if the budget is spent.
    RestartBegun,
    /// Something that is not the fault of the rank, such as the loss of another node, ended a restart before the rank served. Returns that restart to the
    /// budget.
    RestartInterrupted,
    /// The restarted rank runs, but lacks state that it needs to serve, such as the current weights.
    Loaded,
    /// The rank serves, and its state differs from that of the others.
    Outdated,
    /// The rank received the weights of this version.
    Refit(u64),
    /// The rank accepts calls and has all the state that it needs. Follows the first start, or a restart.
    Ready,
    /// The rank was stopped on request.
    Stopped,
}

/// The health of one rank or replica, over all its incarnations.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankHealth {
    pub(super) state: RankState,
    pub(super) weight_version: Option<u64>,
    pub(super) restarts: u32,
    restart_granted: bool,
    probe_failures: u32,
    probe_successes: u32,
    request_failures: u32,
}

impl RankHealth {
    /// Creates the health of a rank that starts for the first time.
    #[must_use]
    pub fn starting() -> Self {
        Self::new(RankState::Starting)
    }

    /// Creates the health of a rank that serves.
    #[must_use]
    pub fn healthy() -> Self {
        Self::new(RankState::Healthy)
    }

    fn new(state: RankState) -> Self {
        Self {
            state,
            weight_version: None,
            restarts: 0,
            restart_granted: false,
            probe_failures: 0,
            probe_successes: 0,
            request_failures: 0,
        }
    }

    /// Returns the current state.
    #[must_use]
    pub fn state(&self) -> RankState {
        self.state
    }

    /// Returns the version of the last weights that the rank received, if it received any.
    #[must_use]
    pub fn weight_version(&self) -> Option<u64> {
        self.weight_version
    }

    /// Returns the number of restarts deducted from the budget so far.
    #[must_use]
    pub fn restarts(&self) -> u32 {
        self.restarts
    }

    /// Returns `true` if a restart was granted and has not begun.
    #[must_use]
    pub fn restart_granted(&self) -> bool {
        self.restart_granted
    }

    /// Returns `true` if the rank can serve requests.
    #[must_use]
    pub fn serves(&self) -> bool {
        matches!(self.state, RankState::Healthy | RankState::Suspect)
    }

    /// Applies an event.
    pub fn note(&mut self, event: HealthEvent, policy: &HealthPolicy) {
        match event {
            HealthEvent::Probed { ok: true } if self.serves() => {
                self.probe_failures = 0;
                self.probe_successes = self.probe_successes.saturating_add(1);
                if self.probe_successes >= policy.healthy_after && self.request_failures == 0 {
                    self.state = RankState::Healthy;
                }
            }
            HealthEvent::Probed { ok: false } if self.serves() => {
                self.probe_successes = 0;
                self.probe_failures = self.probe_failures.saturating_add(1);
                self.failed(self.probe_failures, policy);
            }
            HealthEvent::Requested { ok: true } => self.request_failures = 0,
            HealthEvent::Requested { ok: false } if self.serves() => {
                self.request_failures = self.request_failures.saturating_add(1);
                self.failed(self.request_failures, policy);
            }
            HealthEvent::Ended if !self.is_final() => self.state = RankState::Dead,
            HealthEvent::RestartGranted if !self.is_final() => self.take_restart(policy),
            HealthEvent::RestartBegun if !self.is_final() => {
                self.take_restart(policy);
                if std::mem::take(&mut self.restart_granted) {
                    self.state = RankState::Restarting;
                }
            }
            HealthEvent::RestartInterrupted if !self.is_final() && !self.restart_granted => {
                self.restarts = self.restarts.saturating_sub(1);
            }
            HealthEvent::Loaded if self.state == RankState::Restarting => self.state = RankState::Stale,
            HealthEvent::Outdated if self.serves() => self.state = RankState::Stale,
            HealthEvent::Refit(version) if self.serves() || self.state == RankState::Stale => {
                self.weight_version = Some(version);
                self.serve();
            }
            HealthEvent::Ready
                if matches!(self.state, RankState::Starting | RankState::Restarting | RankState::Stale) =>
            {
                self.serve();
            }
            HealthEvent::Stopped => self.state = RankState::Stopped,
            _ => {}
        }
    }

    fn is_final(&self) -> bool {
        matches!(self.state, RankState::Retired | RankState::Stopped)
    }

    fn take_restart(&mut self, policy: &HealthPolicy) {
        if self.restart_granted {
            return;
        }
        if self.restarts < policy.restarts_max {
            self.restarts += 1;
            self.restart_granted = true;
        } else {
            self.state = RankState::Retired;
        }
    }

    fn serve(&mut self) {
        self.state = RankState::Healthy;
        (self.probe_failures, self.probe_successes, self.request_failures) = (0, 0, 0);
    }

    fn failed(&mut self, failures: u32, policy: &HealthPolicy) {
        self.state = if failures >= policy.unhealthy_after { RankState::Dead } else { RankState::Suspect };
    }
}

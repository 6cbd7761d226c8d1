//! Health of ranks and replicas: which of them may serve, and how failures are classified. Rules without clock or network.
//!
//! ```text
//!   Healthy ─ a failure ─► Suspect ─ failures in a row ─► Dead ─► Restarting ─► Stale ─ refit ─► Healthy
//!      ▲                      │ successes in a row                    │ budget spent
//!      └──────────────────────┘                                       ▼
//!                                                                  Retired
//! ```
//!
//! Healthy and suspect replicas serve. Nothing leads from dead to healthy but a restart *and* a refit: a replica with old weights
//! must not serve. Probes that fail and requests that fail are counted apart, because a wedged engine still answers probes.

mod failure;
mod state;
#[cfg(test)]
mod tests;

use crate::base::error::{Code, Error, Result};
use crate::registry::{Load, Picker};

pub use failure::{Disposition, FailureOrigin, RetryBudget, RetryBudgets, Skips};
pub use state::RankState;

/// When a replica changes its state. All at least 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HealthPolicy {
    /// Failures in a row after which a replica is dead.
    pub unhealthy_after: u32,
    /// Successful probes in a row after which a suspect one is healthy.
    pub healthy_after: u32,
    /// Restarts of each replica in the life of the fleet.
    pub restarts_max: u32,
    /// Replicas that must serve.
    pub serving_min: usize,
}

impl Default for HealthPolicy {
    /// Dead after three failures, healthy after two successes, five restarts, one must serve.
    fn default() -> Self {
        Self { unhealthy_after: 3, healthy_after: 2, restarts_max: 5, serving_min: 1 }
    }
}

/// One replica, as it is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Replica {
    /// How it is; one of those in this module's picture.
    pub state: RankState,
    /// The version of the weights that it was last given.
    pub weight_version: Option<u64>,
    /// Requests under way at it.
    pub in_flight: usize,
    /// Restarts so far.
    pub restarts: u32,
    probe_failures: u32,
    probe_successes: u32,
    request_failures: u32,
}

/// What was seen of a replica, or done to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HealthEvent {
    /// It answered a probe, or did not.
    Probed {
        /// Whether it answered.
        ok: bool,
    },
    /// It answered a request, or failed it.
    Requested {
        /// Whether it answered.
        ok: bool,
    },
    /// A restart begins; one beyond the budget retires it instead.
    RestartBegun,
    /// It is up again, with whatever weights it was started with.
    Loaded,
    /// It was given the weights of this version.
    Refit(u64),
}

/// The replicas of a fleet.
#[derive(Clone, Debug)]
pub struct Fleet {
    policy: HealthPolicy,
    replicas: Vec<Replica>,
    epoch: u64,
}

impl Fleet {
    /// This many healthy replicas.
    ///
    /// # Errors
    /// `InvalidArgument` for a fleet without replicas and for a limit of 0.
    pub fn new(replicas: usize, policy: HealthPolicy) -> Result<Self> {
        let limits = [
            ("replicas", replicas),
            ("unhealthy_after", policy.unhealthy_after as usize),
            ("healthy_after", policy.healthy_after as usize),
            ("serving_min", policy.serving_min),
        ];
        if let Some((name, _)) = limits.into_iter().find(|(_, limit)| *limit == 0) {
            return Err(Error::invalid(format!("{name} must be at least 1")).about("fleet health"));
        }
        let replica = Replica {
            state: RankState::Healthy,
            weight_version: None,
            in_flight: 0,
            restarts: 0,
            probe_failures: 0,
            probe_successes: 0,
            request_failures: 0,
        };
        Ok(Self { policy, replicas: vec![replica; replicas], epoch: 0 })
    }

    /// The replicas by index.
    #[must_use]
    pub fn replicas(&self) -> &[Replica] {
        &self.replicas
    }

    /// Grows whenever another set of replicas serves.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Those that serve, ascending.
    #[must_use]
    pub fn serving(&self) -> Vec<usize> {
        (0..self.replicas.len()).filter(|index| self.replicas[*index].serves()).collect()
    }

    /// Takes note of what happened to a replica. What its state does not allow changes nothing.
    ///
    /// # Panics
    /// On an index that the fleet has not.
    pub fn note(&mut self, index: usize, event: HealthEvent) {
        let replica = &mut self.replicas[index];
        let served = replica.serves();
        replica.note(event, &self.policy);
        self.epoch += u64::from(served != replica.serves());
    }

    /// Takes a serving replica that is `fit`, by the picker's rule, and counts one more request for it until [`Fleet::release`].
    ///
    /// # Errors
    /// `Unavailable`, not started, when none serves: it may be tried again.
    pub fn acquire(&mut self, picker: &Picker, fit: impl Fn(usize, &Replica) -> bool) -> Result<usize> {
        self.take(picker, |index, replica| replica.serves() && fit(index, replica))
    }

    /// As [`Fleet::acquire`], whether or not it serves: where none does, one has to be tried.
    ///
    /// # Errors
    /// `Unavailable`, not started, when none is fit.
    pub fn take(&mut self, picker: &Picker, fit: impl Fn(usize, &Replica) -> bool) -> Result<usize> {
        let all = self.replicas.iter().enumerate().filter(|(index, replica)| fit(*index, replica));
        let open: Vec<Load> = all.map(|(index, replica)| Load { index, pending: replica.in_flight }).collect();
        let index = picker.pick(&open);
        let index = index
            .ok_or_else(|| Error::not_started(Code::Unavailable, "no healthy replica").about("choose a replica"))?;
        self.replicas[index].in_flight += 1;
        Ok(index)
    }

    /// Ends a request; more ends than beginnings count nothing.
    ///
    /// # Panics
    /// On an index that the fleet has not.
    pub fn release(&mut self, index: usize) {
        let in_flight = &mut self.replicas[index].in_flight;
        *in_flight = in_flight.saturating_sub(1);
    }

    /// An error when so many replicas are retired that the least number can never serve again.
    ///
    /// # Errors
    /// `ResourceExhausted` that says how many are left and how many are needed.
    pub fn check_exhausted(&self) -> Result<()> {
        let left = self.replicas.iter().filter(|replica| replica.state != RankState::Retired).count();
        if left >= self.policy.serving_min {
            return Ok(());
        }
        let (all, min) = (self.replicas.len(), self.policy.serving_min);
        let text = format!("{left} of {all} replicas have restarts left, at least {min} must serve");
        Err(Error::not_started(Code::ResourceExhausted, text).about("fleet health"))
    }
}

impl Replica {
    /// Whether it is given requests.
    #[must_use]
    pub fn serves(&self) -> bool {
        matches!(self.state, RankState::Healthy | RankState::Suspect)
    }

    fn note(&mut self, event: HealthEvent, policy: &HealthPolicy) {
        match event {
            HealthEvent::Probed { ok: true } if self.serves() => {
                self.probe_failures = 0;
                self.probe_successes += 1;
                if self.probe_successes >= policy.healthy_after && self.request_failures == 0 {
                    self.state = RankState::Healthy;
                }
            }
            HealthEvent::Probed { ok: false } if self.serves() => {
                self.probe_successes = 0;
                self.probe_failures += 1;
                self.doubt(self.probe_failures, policy);
            }
            HealthEvent::Requested { ok: true } => self.request_failures = 0,
            HealthEvent::Requested { ok: false } if self.serves() => {
                self.request_failures += 1;
                self.doubt(self.request_failures, policy);
            }
            HealthEvent::RestartBegun if self.state != RankState::Retired => {
                self.state =
                    if self.restarts < policy.restarts_max { RankState::Restarting } else { RankState::Retired };
                self.restarts = (self.restarts + 1).min(policy.restarts_max);
            }
            HealthEvent::Loaded if self.state == RankState::Restarting => self.state = RankState::Stale,
            HealthEvent::Refit(version) if self.serves() || self.state == RankState::Stale => {
                self.weight_version = Some(version);
                self.state = RankState::Healthy;
                (self.probe_failures, self.probe_successes, self.request_failures) = (0, 0, 0);
            }
            _ => {}
        }
    }

    fn doubt(&mut self, failures: u32, policy: &HealthPolicy) {
        self.state = if failures >= policy.unhealthy_after { RankState::Dead } else { RankState::Suspect };
    }
}

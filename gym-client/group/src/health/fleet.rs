//! The health and the load of several replicas.

use gym_core::group::RankState;
use gym_core::registry::{Load, Picker};
use gym_core::{Code, Error, Result};

use crate::health::{HealthEvent, HealthPolicy, RankHealth};

/// One replica of a [`Fleet`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Replica {
    /// The health.
    pub health: RankHealth,
    /// Number of requests in flight to the replica.
    pub in_flight: usize,
}

/// The replicas of a fleet, by index.
#[derive(Clone, Debug)]
pub struct Fleet {
    policy: HealthPolicy,
    pub(super) replicas: Vec<Replica>,
    epoch: u64,
}

impl Fleet {
    /// Creates a fleet of this many healthy replicas.
    ///
    /// # Errors
    /// `InvalidArgument` if there are no replicas, or if a limit is 0.
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
        let replica = Replica { health: RankHealth::healthy(), in_flight: 0 };
        Ok(Self { policy, replicas: vec![replica; replicas], epoch: 0 })
    }

    /// Returns the replicas, by index.
    #[must_use]
    pub fn replicas(&self) -> &[Replica] {
        &self.replicas
    }

    /// Returns a number that increases whenever a replica begins or ceases to serve.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Returns the indices of the replicas that serve, ascending.
    #[must_use]
    pub fn serving(&self) -> Vec<usize> {
        (0..self.replicas.len()).filter(|index| self.replicas[*index].health.serves()).collect()
    }

    /// Applies an event to the health of a replica.
    ///
    /// # Panics
    /// If the fleet has no replica of this index.
    pub fn note(&mut self, index: usize, event: HealthEvent) {
        let policy = self.policy;
        self.change(index, |health| health.note(event, &policy));
    }

    /// Replaces a replica by another one, which is healthy. Its requests in flight keep counting until [`Fleet::release`].
    ///
    /// # Panics
    /// If the fleet has no replica of this index.
    pub fn replace(&mut self, index: usize) {
        self.change(index, |health| *health = RankHealth::healthy());
    }

    fn change(&mut self, index: usize, change: impl FnOnce(&mut RankHealth)) {
        let health = &mut self.replicas[index].health;
        let served = health.serves();
        change(health);
        self.epoch += u64::from(served != health.serves());
    }

    /// Chooses a serving replica that is `fit`, by the picker's rule, and counts one more request for it until [`Fleet::release`].
    ///
    /// # Errors
    /// `Unavailable`, not started, if no such replica serves: the request may be sent again.
    pub fn acquire(&mut self, picker: &Picker, fit: impl Fn(usize, &Replica) -> bool) -> Result<usize> {
        self.take(picker, |index, replica| replica.health.serves() && fit(index, replica))
    }

    /// Like [`Fleet::acquire`], among all replicas: if none serves, a request can still be tried.
    ///
    /// # Errors
    /// `Unavailable`, not started, if no replica is fit.
    pub fn take(&mut self, picker: &Picker, fit: impl Fn(usize, &Replica) -> bool) -> Result<usize> {
        let all = self.replicas.iter().enumerate().filter(|(index, replica)| fit(*index, replica));
        let open: Vec<Load> = all.map(|(index, replica)| Load { index, pending: replica.in_flight }).collect();
        let index = picker.pick(&open);
        let index = index
            .ok_or_else(|| Error::not_started(Code::Unavailable, "no healthy replica").about("choose a replica"))?;
        self.replicas[index].in_flight += 1;
        Ok(index)
    }

    /// Decrements the number of requests of a replica. Has no effect if none is in flight.
    ///
    /// # Panics
    /// If the fleet has no replica of this index.
    pub fn release(&mut self, index: usize) {
        let in_flight = &mut self.replicas[index].in_flight;
        *in_flight = in_flight.saturating_sub(1);
    }

    /// Checks that enough replicas can still serve.
    ///
    /// # Errors
    /// `ResourceExhausted` if fewer than `serving_min` replicas are not retired.
    pub fn check_exhausted(&self) -> Result<()> {
        let left = self.replicas.iter().filter(|replica| replica.health.state() != RankState::Retired).count();
        if left >= self.policy.serving_min {
            return Ok(());
        }
        let (all, min) = (self.replicas.len(), self.policy.serving_min);
        let text = format!("{left} of {all} replicas have restarts left, at least {min} must serve");
        Err(Error::not_started(Code::ResourceExhausted, text).about("fleet health"))
    }
}

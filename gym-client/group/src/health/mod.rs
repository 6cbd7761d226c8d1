//! Health of ranks and replicas: a state machine, the counts of a fleet, and the classification of failures. Uses no clock and no
//! network.
//!
//! ```text
//!   Starting ─ Ready ─► Healthy ◄─ successes ─┐
//!                          │  └── a failure ─► Suspect ── failures in a row ─┐
//!                          └──── Ended ─────────────────────────────────────►│
//!                                                                            ▼
//!   Healthy ◄─ Ready ─ Restarting ◄── RestartBegun ──────────────────────── Dead
//!      ▲                   │ Loaded                                          │ budget spent
//!      └─ Refit, Ready ─ Stale                        Stopped (on request)   ▼
//!                                                                         Retired
//! ```
//!
//! Healthy and suspect replicas can serve. A dead rank serves again only after a restart: a replica with old weights is stale until a
//! [refit](HealthEvent::Refit), or until [everything it needs](HealthEvent::Ready) is loaded. Failed probes and failed requests are
//! counted separately, because an engine that hangs can still answer probes.
//!
//! ```
//! use gym_group::RankState;
//! use gym_group::health::{HealthEvent, HealthPolicy, RankHealth};
//!
//! let (mut health, policy) = (RankHealth::starting(), HealthPolicy::default());
//! let events = [HealthEvent::Ready, HealthEvent::Ended, HealthEvent::RestartBegun, HealthEvent::Loaded];
//! events.into_iter().for_each(|event| health.note(event, &policy));
//! assert_eq!((health.state(), health.restarts()), (RankState::Stale, 1));
//! health.note(HealthEvent::Refit(42), &policy);
//! assert!(health.serves());
//! ```
//!
//! The supervisor of a group applies the events of its ranks' processes. A [`Balancer`](crate::Balancer) applies the
//! results of its own calls to a [`Fleet`], and so ejects ranks that its calls cannot use.

mod failure;
mod fleet;
mod rank;
#[cfg(test)]
mod tests;

pub use failure::{Disposition, FailureOrigin, RetryBudget, RetryBudgets, Skips};
pub use fleet::{Fleet, Replica};
pub use rank::{HealthEvent, HealthPolicy, RankHealth};

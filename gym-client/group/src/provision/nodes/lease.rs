//! The lease under which a node runs ranks for a controller, without clock and sockets.
//!
//! The agent ends the ranks of a controller that it has not heard from for the lease. The controller must know a time at which that has
//! certainly happened, however long a message was under way, or how long a process was stopped. So the agent counts from the time at which it
//! *sent* a response, and only once the controller has confirmed it:
//!
//! ```text
//!   agent       ── response 7, sent at t ──►   received at r ≥ t                   controller
//!   lease ends at t + lease   ◄── "received 7" ──  the lease ends no later than r + lease
//! ```
//!
//! A confirmation that arrives late extends nothing: the end is counted from `t`.

use std::collections::VecDeque;
use std::ops::RangeInclusive;
use std::time::Duration;

use gym_core::{Error, Result};

/// Leases that a controller may request. A shorter one would end living ranks whenever a machine is busy; a longer one would hold the resources of
/// a dead controller.
const LEASES: RangeInclusive<Duration> = Duration::from_millis(200)..=Duration::from_secs(300);

/// Checks the lease that a controller requests. An agent must not grant another one, because the controller counts on it.
///
/// # Errors
/// `InvalidArgument` with the limits.
pub(super) fn check_lease(lease: Duration) -> Result<()> {
    if LEASES.contains(&lease) {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "the lease of nodes is {lease:?}; it must be from {:?} to {:?}",
        LEASES.start(),
        LEASES.end()
    )))
}

/// Responses whose confirmation may be outstanding. A controller has one poll in flight; older ones were given up.
const OUTSTANDING_MAX: usize = 16;

/// The lease of a controller, as the agent counts it. Times are since the start of the machine.
#[derive(Debug)]
pub(super) struct AgentLease {
    lease: Duration,
    until: Duration,
    number: u64,
    sent: VecDeque<(u64, Duration)>,
}

impl AgentLease {
    /// Begins a lease with the response of the reservation, whose number is 0.
    pub(super) fn begin(lease: Duration, now: Duration) -> Self {
        Self { lease, until: now + lease, number: 0, sent: VecDeque::from([(0, now)]) }
    }

    /// Returns the number of a response that is sent now.
    pub(super) fn respond(&mut self, now: Duration) -> u64 {
        self.number += 1;
        if self.sent.len() == OUTSTANDING_MAX {
            self.sent.pop_front();
        }
        self.sent.push_back((self.number, now));
        self.number
    }

    /// Extends the lease: the controller has received the response of this number. Returns the end of the lease.
    pub(super) fn confirm(&mut self, number: u64) -> Duration {
        if let Some((_, sent)) = self.sent.iter().find(|(known, _)| *known == number) {
            self.until = self.until.max(*sent + self.lease);
        }
        self.until
    }

    /// Returns the end of the lease.
    pub(super) fn until(&self) -> Duration {
        self.until
    }

    pub(super) fn duration(&self) -> Duration {
        self.lease
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_lease_that_no_agent_grants_is_an_error_with_the_limits() {
        for granted in [Duration::from_millis(200), 10 * SECOND, 300 * SECOND] {
            assert!(check_lease(granted).is_ok(), "{granted:?}");
        }
        for refused in [Duration::ZERO, Duration::from_millis(199), 301 * SECOND] {
            let error = check_lease(refused).expect_err("refused");
            assert!(error.to_string().contains("it must be from 200ms to 300s"), "{error}");
        }
    }

    #[test]
    fn a_late_confirmation_extends_nothing() {
        let mut lease = AgentLease::begin(10 * SECOND, SECOND);
        assert_eq!(lease.until(), 11 * SECOND);
        let first = lease.respond(3 * SECOND);
        assert_eq!(lease.until(), 11 * SECOND, "the response may be lost");
        assert_eq!(lease.confirm(first), 13 * SECOND);
        let second = lease.respond(4 * SECOND);
        // The confirmation arrives after the agent was stopped for an hour.
        assert_eq!(lease.confirm(second), 14 * SECOND);
        assert_eq!(lease.confirm(first), 14 * SECOND, "an old one does not shorten it");
        assert_eq!(lease.confirm(99), 14 * SECOND, "one that was never sent");
    }

    proptest! {
        /// Whatever is delayed or lost, the agent's lease ends no later than the controller expects: the lease after it received the last
        /// response that it has confirmed.
        #[test]
        fn the_controller_knows_a_time_at_which_the_lease_is_over(
            steps in proptest::collection::vec((0_u64..400, 0_u64..3_000, 0_u64..3_000, any::<bool>(), any::<bool>()), 1..60),
        ) {
            let lease = Duration::from_secs(2);
            let mut now = Duration::from_secs(5);
            let mut agent = AgentLease::begin(lease, now);
            // The controller receives the response of the reservation after some time.
            let mut expected = now + lease + Duration::from_millis(steps[0].1);
            for (pause, there, back, response_lost, confirmation_lost) in steps {
                now += Duration::from_millis(pause);
                let number = agent.respond(now);
                if response_lost {
                    continue;
                }
                let received = now + Duration::from_millis(there);
                // The controller confirms: from here on it expects this end.
                expected = expected.max(received + lease);
                if !confirmation_lost {
                    now = received + Duration::from_millis(back);
                    agent.confirm(number);
                }
                prop_assert!(agent.until() <= expected);
            }
        }
    }
}

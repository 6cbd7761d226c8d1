//! Backoff of the fabric's thread: how long it polls before it sleeps, and how long it then sleeps.

use std::time::Duration;

use tokio::time::Instant;

use crate::fabric::options::driver::Driver;

/// Time since the last work, and the length of the next sleep.
pub(crate) struct Backoff {
    driver: Driver,
    last_work: Instant,
    /// Next sleep. It doubles while nothing happens. On a device without events, a response therefore waits at most
    /// about as long again as it has taken. An idle fabric wakes up ten times a second.
    sleep: Duration,
    /// Next nap while UCX refuses to be armed although it makes no progress.
    nap: Duration,
    /// Until this time, the thread sleeps instead of polling.
    crowded_until: Instant,
}

impl Backoff {
    pub(crate) fn new(driver: Driver) -> Self {
        let now = Instant::now();
        let mut backoff =
            Self { driver, last_work: now, sleep: Duration::ZERO, nap: Duration::ZERO, crowded_until: now };
        backoff.worked(now);
        backoff
    }

    pub(crate) fn worked(&mut self, now: Instant) {
        self.last_work = now;
        self.nap = Duration::ZERO;
        if let Driver::Hybrid { tick, .. } = self.driver {
            self.sleep = tick;
        }
    }

    pub(crate) fn is_over(&self, now: Instant) -> bool {
        match self.driver {
            Driver::Busy => false,
            Driver::Hybrid { spin, .. } => now < self.crowded_until || now.duration_since(self.last_work) >= spin,
        }
    }

    /// Pauses between two polls by yielding, because the thread that provides the work may need this core.
    ///
    /// On a machine with more runnable threads than cores, a yield can take milliseconds, but a sleeping thread is
    /// woken at once. After such a yield, the thread sleeps for a while instead of polling.
    pub(crate) fn pause(&mut self, now: Instant) {
        if self.driver == Driver::Busy {
            std::hint::spin_loop();
            return;
        }
        std::thread::yield_now();
        self.yielded(now, Instant::now());
    }

    fn yielded(&mut self, from: Instant, until: Instant) {
        let lost = until.duration_since(from);
        if lost > YIELD_MAX {
            self.crowded_until = until + (lost * CROWDED_TIMES).min(CROWDED_MAX);
        }
    }

    pub(crate) fn next_sleep(&mut self, timers: bool) -> Duration {
        let Driver::Hybrid { tick, idle_tick, .. } = self.driver else { return Duration::ZERO };
        let sleep = self.sleep;
        self.sleep = (sleep * 2).min(idle_tick).max(tick);
        if timers { sleep.min(TIMER_INTERVAL.max(tick)) } else { sleep }
    }

    /// Returns the next wait while a send waits for its peer: a full queue in shared memory whose owner is slow,
    /// stopped or dead.
    ///
    /// Zero the first time, because an event may have just arrived; then it doubles up to the tick.
    pub(crate) fn next_nap(&mut self) -> Duration {
        let Driver::Hybrid { tick, .. } = self.driver else { return Duration::ZERO };
        let nap = self.nap;
        self.nap = (nap * 2).max(NAP_MIN).min(tick);
        nap
    }
}

/// A longer yield means that another thread had much work.
const YIELD_MAX: Duration = Duration::from_micros(200);
/// Time for which the thread then sleeps instead of yielding, as a multiple of the lost time. At most a hundredth of
/// the time is lost, and a short burst of load has no lasting effect.
const CROWDED_TIMES: u32 = 100;
const CROWDED_MAX: Duration = Duration::from_secs(1);
/// First nap: as long as the polling before it.
const NAP_MIN: Duration = Duration::from_micros(50);
/// Precision of deadlines.
const TIMER_INTERVAL: Duration = Duration::from_millis(5);

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn backoff() -> Backoff {
        Backoff::new(Driver::Hybrid { spin: Duration::from_micros(50), tick: ms(1), idle_tick: ms(100) })
    }

    #[test]
    fn sleeps_double_up_to_the_idle_tick_and_begin_anew_with_work() {
        let mut backoff = backoff();
        let sleeps: Vec<_> = (0..9).map(|_| backoff.next_sleep(false)).collect();
        assert_eq!(sleeps, [1, 2, 4, 8, 16, 32, 64, 100, 100].map(ms));
        backoff.worked(Instant::now());
        assert_eq!(backoff.next_sleep(false), ms(1));
    }

    #[test]
    fn a_worker_that_waits_for_its_peer_naps_instead_of_spinning_and_looks_at_once_the_first_time() {
        let mut backoff = backoff();
        let naps: Vec<_> = (0..7).map(|_| backoff.next_nap()).collect();
        assert_eq!(naps, [0, 50, 100, 200, 400, 800, 1000].map(Duration::from_micros));
        backoff.worked(Instant::now());
        assert_eq!(backoff.next_nap(), Duration::ZERO);
    }

    /// On a device without events, a tick finds the response after at most about the time that it has taken.
    #[test]
    fn an_answer_without_an_event_waits_no_longer_than_it_took() {
        for answer_after in [ms(1), ms(5), ms(40), ms(90)] {
            let (mut backoff, mut waited) = (backoff(), Duration::ZERO);
            while waited < answer_after {
                waited += backoff.next_sleep(false);
            }
            assert!(waited <= answer_after * 2 + ms(1), "{answer_after:?} {waited:?}");
        }
    }

    #[test]
    fn a_minute_of_silence_costs_some_six_hundred_wake_ups_and_deadlines_are_kept_meanwhile() {
        let (mut backoff, mut waited, mut wakeups) = (backoff(), Duration::ZERO, 0);
        while waited < ms(60_000) {
            waited += backoff.next_sleep(false);
            wakeups += 1;
        }
        assert!(wakeups < 610, "{wakeups}");
        assert_eq!(backoff.next_sleep(true), TIMER_INTERVAL);
    }

    #[test]
    fn one_that_lost_its_core_sleeps_instead_of_yielding_for_a_while() {
        let mut backoff = backoff();
        let now = Instant::now();
        backoff.worked(now);
        backoff.yielded(now, now + Duration::from_micros(20));
        assert!(!backoff.is_over(now + Duration::from_micros(20)), "to those who have little to do");
        backoff.yielded(now, now + ms(3));
        backoff.worked(now + ms(4));
        assert!(backoff.is_over(now + ms(4)), "to one who has much to do");
        backoff.worked(now + ms(302));
        assert!(backoff.is_over(now + ms(302)));
        backoff.worked(now + ms(303));
        assert!(!backoff.is_over(now + ms(303)), "it tries again");
        backoff.yielded(now, now + ms(5_000));
        backoff.worked(now + ms(6_000));
        assert!(backoff.is_over(now + ms(5_999)) && !backoff.is_over(now + ms(6_000)), "after a second at the most");
    }

    #[test]
    fn a_busy_driver_never_rests() {
        assert!(!Backoff::new(Driver::Busy).is_over(Instant::now() + ms(1000)));
    }
}

//! Deadlines. The waits are those of the kernel, so that their clock is the real one.

use std::time::{Duration, Instant};

use rustix::thread::futex::Timespec;

/// Returns the time after a duration: a deadline for the calls of this crate.
#[must_use]
pub fn deadline_in(duration: Duration) -> Instant {
    let now = now();
    // Ten years are as good as the end of time, which the clock may not have.
    now.checked_add(duration).unwrap_or_else(|| now + Duration::from_secs(10 * 365 * 86_400))
}

/// Returns the time until a deadline; `None` if it has passed.
pub(crate) fn until(deadline: Instant) -> Option<Duration> {
    Some(deadline.saturating_duration_since(now())).filter(|left| !left.is_zero())
}

/// Returns a duration as the kernel takes it. It is at most some seconds.
pub(crate) fn timespec(duration: Duration) -> Timespec {
    Timespec { tv_sec: duration.as_secs() as i64, tv_nsec: i64::from(duration.subsec_nanos()) as _ }
}

#[expect(clippy::disallowed_methods, reason = "the kernel's waits know no paused clock")]
fn now() -> Instant {
    Instant::now()
}

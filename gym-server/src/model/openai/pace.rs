//! Whether an endpoint has more requests than it serves at once, as the durations of its calls show.
//!
//! A busy engine answers late, and calls then fail at their deadlines. It is distinguished from a slow engine by its own fastest call. A call is
//! measured in seconds for each token of its response, because a long response takes longer than a short one.

use std::sync::atomic::{AtomicU32, Ordering};

use gym_core::RawObject;
use parking_lot::Mutex;
use serde_json::Value;
use tokio::time::Instant;

/// Calls in flight from which an endpoint counts as crowded.
const CROWD: u32 = 32;
/// Calls that ended in a crowd, before it is judged.
const CALLS: u32 = 64;
/// Mean seconds of these calls below which no endpoint is slow.
const SLOW_SECONDS: f64 = 2.0;
/// An engine that batches takes some times longer for each of its calls, and serves more of them. With this factor, they wait.
const SLOWER: f64 = 8.0;

/// The durations of the calls to one endpoint.
#[derive(Debug, Default)]
pub(super) struct Pace {
    in_flight: AtomicU32,
    seen: Mutex<Seen>,
}

#[derive(Debug, Default)]
struct Seen {
    /// The fewest seconds for each token.
    fastest: Option<f64>,
    crowd: Crowd,
    hinted: bool,
}

/// Sums over the calls that ended in a crowd.
#[derive(Clone, Copy, Debug, Default)]
struct Crowd {
    calls: u32,
    in_flight: f64,
    seconds: f64,
    tokens: f64,
}

/// The signs of a crowded endpoint.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Hint {
    /// Mean number of calls in flight.
    in_flight: f64,
    /// Mean seconds of a call.
    seconds: f64,
    /// The seconds of a call of the same length at the pace of the fastest call.
    fastest_seconds: f64,
    /// The calls that the endpoint serves at once, by Little's law.
    served_at_once: f64,
}

/// A call in flight.
#[derive(Debug)]
pub(super) struct PacedCall<'a> {
    pace: &'a Pace,
    began: Instant,
    in_flight: u32,
}

impl Pace {
    /// Counts a call as in flight until it is dropped.
    pub(super) fn begin(&self) -> PacedCall<'_> {
        let in_flight = self.in_flight.fetch_add(1, Ordering::Relaxed).saturating_add(1);
        PacedCall { pace: self, began: Instant::now(), in_flight }
    }

    /// Adds a call that was answered. Returns a hint once: when it is clear that the calls wait at the endpoint.
    fn add(&self, in_flight: u32, seconds: f64, tokens: Option<u64>) -> Option<Hint> {
        let tokens = tokens.unwrap_or(1).max(1) as f64;
        let mut seen = self.seen.lock();
        let fastest = seen.fastest.unwrap_or(f64::INFINITY).min(seconds / tokens);
        seen.fastest = Some(fastest);
        if in_flight < CROWD {
            return None;
        }
        let crowd = &mut seen.crowd;
        crowd.calls = crowd.calls.saturating_add(1);
        crowd.in_flight += f64::from(in_flight);
        crowd.seconds += seconds;
        crowd.tokens += tokens;
        let Crowd { calls, in_flight, seconds, tokens } = *crowd;
        let (slower, calls) = (seconds / tokens / fastest, f64::from(calls));
        if seen.hinted || calls < f64::from(CALLS) || seconds / calls < SLOW_SECONDS || slower < SLOWER {
            return None;
        }
        seen.hinted = true;
        let in_flight = in_flight / calls;
        let fastest_seconds = seconds / calls / slower;
        Some(Hint { in_flight, seconds: seconds / calls, fastest_seconds, served_at_once: in_flight / slower })
    }
}

impl PacedCall<'_> {
    /// Records the response, and logs a hint at `max_concurrent_requests` when its use is clear.
    pub(super) fn answered(self, endpoint: impl FnOnce() -> String, response: &RawObject) {
        let usage: Option<Value> = response.get_as("usage").ok().flatten();
        let count = |key: &str| usage.as_ref()?.get(key)?.as_u64();
        let tokens = count("output_tokens").or_else(|| count("completion_tokens"));
        if let Some(hint) = self.pace.add(self.in_flight, self.began.elapsed().as_secs_f64(), tokens) {
            let Hint { in_flight, seconds, fastest_seconds, served_at_once } = hint;
            tracing::warn!(
                endpoint = endpoint(),
                in_flight = format!("{in_flight:.0}"),
                seconds_each = format!("{seconds:.1}"),
                fastest_seconds = format!("{fastest_seconds:.2}"),
                fix = format!(
                    "set `max_concurrent_requests` in the block of the model server, or lower `--concurrency`: calls beyond it wait before they \
                     are sent; about {:.0} were served at once",
                    served_at_once.max(1.0)
                ),
                "the model endpoint answers slowly at this concurrency: it seems to have more requests than it serves at once"
            );
        }
    }
}

impl Drop for PacedCall<'_> {
    fn drop(&mut self) {
        self.pace.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the hints of an endpoint that serves `slots` of `in_flight` calls at once, first come, first served.
    fn hints(
        slots: u32,
        in_flight: u32,
        seconds_of: impl Fn(u32) -> f64,
        tokens: impl Fn(u32) -> Option<u64>,
    ) -> Vec<Hint> {
        let pace = Pace::default();
        let ended = (0..1_000_u32).filter_map(|call| {
            let ahead = f64::from(call.min(in_flight) / slots);
            pace.add(in_flight, seconds_of(call) + ahead * seconds_of(0), tokens(call))
        });
        ended.collect()
    }

    #[test]
    fn calls_that_wait_at_the_endpoint_cause_one_hint_with_the_number_that_it_serves() {
        let hints = hints(8, 256, |_| 1.0, |_| None);
        assert_eq!(hints.len(), 1);
        let Hint { in_flight, seconds, fastest_seconds, served_at_once } = hints[0];
        assert!((in_flight - 256.0).abs() < 1e-9 && (fastest_seconds - 1.0).abs() < 1e-9 && seconds >= SLOW_SECONDS);
        assert!(served_at_once <= 256.0 / SLOWER, "{served_at_once}");
    }

    #[test]
    fn an_endpoint_that_serves_all_its_calls_gets_no_hint_fast_or_slow() {
        // Fast; slow for all; and with responses of very different lengths.
        assert_eq!(hints(1_000, 256, |_| 0.05, |_| None), []);
        assert_eq!(hints(1_000, 256, |_| 60.0, |_| Some(100)), []);
        let tokens = |call: u32| u64::from(call % 50) * 40 + 10;
        assert_eq!(hints(1_000, 256, |call| tokens(call) as f64 * 0.02, |call| Some(tokens(call))), []);
        // Calls that wait, but not for long: nobody would notice.
        assert_eq!(hints(8, 256, |_| 0.01, |_| None), []);
        // Few calls: their number is not the reason.
        assert_eq!(hints(1, CROWD - 1, |_| 5.0, |_| None), []);
    }

    #[test]
    fn a_call_counts_as_in_flight_until_it_is_dropped() {
        let pace = Pace::default();
        let (first, second) = (pace.begin(), pace.begin());
        assert_eq!((first.in_flight, second.in_flight), (1, 2));
        drop((first, second));
        assert_eq!(pace.begin().in_flight, 1);
    }
}

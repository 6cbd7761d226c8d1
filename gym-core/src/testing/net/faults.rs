//! The faults of a simulated network, as probabilities and durations.

use std::fmt;
use std::time::Duration;

/// The faults of a simulated network. Probabilities are per message or per connection attempt, from 0 to 1.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Faults {
    /// Probability that a request is lost: its caller waits until the deadline.
    pub loss_request: f64,
    /// Probability that a reply is lost after the handler has finished.
    pub loss_reply: f64,
    /// Minimum delay of a message.
    pub delay_min: Duration,
    /// Maximum delay of an ordinary message.
    pub delay_max: Duration,
    /// Probability that a message is delayed by up to `long_way_max`.
    pub long_way: f64,
    /// Maximum delay of such a message.
    pub long_way_max: Duration,
    /// Probability that a message may overtake earlier ones on its connection.
    pub reorder: f64,
    /// Probability that a message breaks its connection: all calls on it end with `Unavailable, Unknown`.
    pub reset: f64,
    /// Probability that a connection attempt is refused although there is a listener: `Unavailable, NotStarted`.
    pub refuse_connect: f64,
    /// Timeout of a connection attempt without a response.
    pub connect_timeout: Duration,
    /// Mean time between partitions of two hosts; zero for none.
    pub partition_every: Duration,
    /// Mean duration of a partition.
    pub partition_for: Duration,
    /// Probability that a crash is silent, as a power failure is. Otherwise the system closes the connections of the
    /// process.
    pub silent_crash: f64,
    /// Probability that a message arrives damaged: its receiver closes the connection, and the sender learns of it later.
    pub corrupt: f64,
    /// Probability that a request arrives twice, as when a proxy sends it again.
    pub duplicate: f64,
    /// Beginnings of the routes of requests that may arrive twice.
    pub duplicate_routes: &'static [&'static str],
}

impl Faults {
    /// A network without faults and without delay.
    pub const NONE: Self = Self {
        loss_request: 0.0,
        loss_reply: 0.0,
        delay_min: Duration::ZERO,
        delay_max: Duration::ZERO,
        long_way: 0.0,
        long_way_max: Duration::ZERO,
        reorder: 0.0,
        reset: 0.0,
        refuse_connect: 0.0,
        connect_timeout: Duration::from_secs(10),
        partition_every: Duration::ZERO,
        partition_for: Duration::ZERO,
        silent_crash: 0.0,
        corrupt: 0.0,
        duplicate: 0.0,
        duplicate_routes: &[],
    };

    /// A network without faults in which messages are delayed.
    #[must_use]
    pub fn calm() -> Self {
        Self { delay_min: Duration::from_millis(1), delay_max: Duration::from_millis(4), ..Self::NONE }
    }

    /// A network with random faults of random strength. Some faults are absent, which reveals bugs that only occur
    /// without them.
    #[must_use]
    pub fn drawn(rng: &mut fastrand::Rng) -> Self {
        let mut chance = |max: f64| if rng.u8(..3) > 0 { max * rng.f64() } else { 0.0 };
        let (loss_request, loss_reply) = (chance(0.04), chance(0.04));
        let (long_way, reorder, reset) = (chance(0.05), chance(0.3), chance(0.03));
        let (refuse_connect, silent_crash) = (chance(0.3), chance(1.5).min(1.0));
        let partitions = rng.u8(..3) > 0;
        let millis = |rng: &mut fastrand::Rng, from, to| Duration::from_millis(rng.u64(from..=to));
        Self {
            loss_request,
            loss_reply,
            long_way,
            reorder,
            reset,
            refuse_connect,
            silent_crash,
            delay_min: Duration::from_millis(1),
            delay_max: millis(rng, 1, 60),
            long_way_max: millis(rng, 1_000, 12_000),
            connect_timeout: Duration::from_secs(3),
            partition_every: if partitions { millis(rng, 2_000, 15_000) } else { Duration::ZERO },
            partition_for: millis(rng, 200, 6_000),
            ..Self::NONE
        }
    }
}

impl fmt::Display for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "loss {:.3} out {:.3} back, delay {:?} to {:?}, long way {:.3} up to {:?}, reorder {:.2}, reset {:.3}, \
             refuse {:.2}, partition every {:?} for {:?}, silent crash {:.2}, corrupt {:.3}, duplicate {:.3}",
            self.loss_request,
            self.loss_reply,
            self.delay_min,
            self.delay_max,
            self.long_way,
            self.long_way_max,
            self.reorder,
            self.reset,
            self.refuse_connect,
            self.partition_every,
            self.partition_for,
            self.silent_crash,
            self.corrupt,
            self.duplicate,
        )
    }
}

/// The kinds of faults that a simulated network counts.
pub mod kind {
    /// A request that never arrived.
    pub const REQUEST_LOST: &str = "request lost";
    /// A reply that never arrived.
    pub const REPLY_LOST: &str = "reply lost";
    /// A message that was delayed beyond the ordinary maximum.
    pub const DELAYED: &str = "message delayed";
    /// A message that overtook another.
    pub const REORDERED: &str = "message reordered";
    /// A connection that broke.
    pub const RESET: &str = "connection reset";
    /// A connection attempt that was refused although there was a listener.
    pub const REFUSED: &str = "connect refused";
    /// A pair of hosts whose messages are lost, in one direction or both.
    pub const PARTITION: &str = "partition";
    /// A message or connection attempt that a partition blocked.
    pub const CUT_OFF: &str = "message cut off";
    /// A host that crashed and whose system notified its peers.
    pub const CRASH: &str = "crash";
    /// A host that crashed silently.
    pub const SILENT_CRASH: &str = "silent crash";
    /// A message that arrived damaged.
    pub const CORRUPTED: &str = "message corrupted";
    /// A request that arrived twice.
    pub const DUPLICATED: &str = "request duplicated";
    /// A message that a slow host delayed. Only a scenario makes hosts slow.
    pub const SLOWED: &str = "message slowed";
    /// A host whose messages are lost while it receives those of others. Only a scenario has such hosts.
    pub const MUTE: &str = "half-open link";
    /// A host whose earlier incarnation goes on beside the new one. Only a scenario has such hosts.
    pub const TWICE: &str = "two incarnations of a host";
    /// A host that was stopped, and whose messages waited. Only a scenario stops hosts.
    pub const FROZEN: &str = "host frozen";
    /// The kinds that a network with [`Faults::drawn`](super::Faults::drawn) injects by itself.
    pub const ALL: [&str; 10] =
        [REQUEST_LOST, REPLY_LOST, DELAYED, REORDERED, RESET, REFUSED, PARTITION, CUT_OFF, CRASH, SILENT_CRASH];
}

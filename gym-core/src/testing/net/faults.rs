//! The faults of a simulated network, as probabilities and durations.

use std::fmt;
use std::time::Duration;

/// How bad a simulated network is. Probabilities are per message or per connect, 0 to 1.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Faults {
    /// A request never arrives: its caller waits until its deadline.
    pub loss_request: f64,
    /// A reply never arrives, although the handler ran to its end.
    pub loss_reply: f64,
    /// The shortest way of a message.
    pub delay_min: Duration,
    /// The longest way of an ordinary message.
    pub delay_max: Duration,
    /// A message takes the long way.
    pub long_way: f64,
    /// The longest long way.
    pub long_way_max: Duration,
    /// A message may overtake those before it on its connection.
    pub reorder: f64,
    /// The connection breaks under a message: everything on it ends as `Unavailable, Unknown`.
    pub reset: f64,
    /// A connect is refused although somebody listens: `Unavailable, NotStarted`.
    pub refuse_connect: f64,
    /// How long a connect waits for an answer that never comes.
    pub connect_timeout: Duration,
    /// The mean time between partitions of two hosts; zero: never.
    pub partition_every: Duration,
    /// The mean time that a partition lasts.
    pub partition_for: Duration,
    /// A crash is silent: nobody is told, as when the power fails. Otherwise the system closes the process's connections.
    pub silent_crash: f64,
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
    };

    /// A network whose only fault is that messages take a time.
    #[must_use]
    pub fn calm() -> Self {
        Self { delay_min: Duration::from_millis(1), delay_max: Duration::from_millis(4), ..Self::NONE }
    }

    /// A network with some of the faults, each as strong as chance has it: what only shows when one fault is absent and
    /// another strong is found too.
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
        }
    }
}

impl fmt::Display for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "loss {:.3} out {:.3} back, delay {:?} to {:?}, long way {:.3} up to {:?}, reorder {:.2}, reset {:.3}, \
             refuse {:.2}, partition every {:?} for {:?}, silent crash {:.2}",
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
        )
    }
}

/// The kinds of faults that a simulated network counts.
pub mod kind {
    /// A request that never arrived.
    pub const REQUEST_LOST: &str = "request lost";
    /// A reply that never arrived.
    pub const REPLY_LOST: &str = "reply lost";
    /// A message that took the long way.
    pub const DELAYED: &str = "message delayed";
    /// A message that overtook another.
    pub const REORDERED: &str = "message reordered";
    /// A connection that broke.
    pub const RESET: &str = "connection reset";
    /// A connect that was refused although somebody listened.
    pub const REFUSED: &str = "connect refused";
    /// A pair of hosts that stopped hearing each other, one way or both.
    pub const PARTITION: &str = "partition";
    /// A message or connect that met a partition.
    pub const CUT_OFF: &str = "message cut off";
    /// A host that crashed and whose system said so to its peers.
    pub const CRASH: &str = "crash";
    /// A host that crashed silently.
    pub const SILENT_CRASH: &str = "silent crash";
    /// All of them.
    pub const ALL: [&str; 10] =
        [REQUEST_LOST, REPLY_LOST, DELAYED, REORDERED, RESET, REFUSED, PARTITION, CUT_OFF, CRASH, SILENT_CRASH];
}

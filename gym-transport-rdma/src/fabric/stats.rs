//! What is counted.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($(#[$public_doc:meta])* $public:ident from $private:ident { $($(#[$doc:meta])* $name:ident,)* }) => {
        $(#[$public_doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct $public {
            $($(#[$doc])* pub $name: u64,)*
        }

        #[derive(Debug, Default)]
        pub(super) struct $private {
            $(pub(super) $name: Counter,)*
        }

        impl $private {
            pub(super) fn read(&self) -> $public {
                $public { $($name: self.$name.0.load(Ordering::Relaxed),)* }
            }
        }
    };
}

/// Written by the fabric's thread alone, read by any.
#[derive(Debug, Default)]
pub(super) struct Counter(AtomicU64);

impl Counter {
    pub(super) fn add(&self, more: u64) {
        // One writer: no locked instruction is needed.
        self.0.store(self.0.load(Ordering::Relaxed) + more, Ordering::Relaxed);
    }
}

counters! {
    /// What a fabric did so far.
    FabricStats from FabricCounters {
        /// Rounds of the thread that found work.
        rounds_busy,
        /// Times that UCX had something to do when the thread was about to sleep.
        arm_busy,
        /// Sleeps that an event of UCX ended.
        woken_by_event,
        /// Sleeps that a command ended.
        woken_by_command,
        /// Sleeps that ended by themselves.
        woken_by_tick,
        /// Messages for a connection that is not known, or not any more.
        dropped_unknown,
        /// Messages that are not ours, or say nonsense before a connection is known.
        dropped_malformed,
        /// First messages with a wrong, used or expired token.
        refused_tokens,
        /// Peers from the listener that were turned away: no first message in time, or too many at once.
        refused_strangers,
        /// Bytes of payloads of a page or more that lay outside of the pool, so that UCX had to copy or register them.
        bytes_unregistered,
        /// Regions of the pool that could not be registered, and are used as they are.
        registrations_failed,
        /// Workers that were opened for a peer on this host.
        berths_opened,
        /// Of these, the ones that were given back.
        berths_closed,
        /// Peers on this host that were turned away, because there were too many.
        berths_refused,
    }
}

counters! {
    /// What went over a connection so far.
    ConnectionStats from ConnectionCounters {
        /// Parcels that UCX has taken.
        parcels_sent,
        /// Bytes of their payloads.
        bytes_sent,
        /// Parcels whose payload came with them.
        eager_received,
        /// Parcels whose payload was announced, to come by rendezvous.
        rendezvous_received,
        /// Bytes of payloads of both.
        bytes_received,
        /// Messages that came ahead of their turn.
        held,
    }
}

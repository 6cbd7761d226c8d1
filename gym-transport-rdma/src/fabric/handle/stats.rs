//! Counters of a fabric and of its connections.

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
        pub(crate) struct $private {
            $(pub(crate) $name: Counter,)*
        }

        impl $private {
            pub(crate) fn read(&self) -> $public {
                $public { $($name: self.$name.0.load(Ordering::Relaxed),)* }
            }
        }
    };
}

/// Written only by the fabric's thread, read by any thread.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, more: u64) {
        // One writer: no locked instruction is needed.
        self.0.store(self.0.load(Ordering::Relaxed) + more, Ordering::Relaxed);
    }
}

counters! {
    /// Counters of a fabric.
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
        /// Peers from the listener that were refused: no first message in time, or too many at once.
        unidentified_refused,
        /// Bytes of payloads of a page or more that lay outside of the pool, so that UCX had to copy or register them.
        bytes_unregistered,
        /// Regions of the pool that could not be registrations, and are used as they are.
        registrations_failed,
        /// Workers opened for a peer on this host.
        peer_workers_opened,
        /// Of these, the workers that were closed.
        peer_workers_closed,
        /// Peers on this host that were refused because there were too many.
        peer_workers_refused,
    }
}

counters! {
    /// Counters of a connection.
    ConnectionStats from ConnectionCounters {
        /// Active messages that UCX has taken.
        messages_sent,
        /// Bytes of their payloads.
        bytes_sent,
        /// Active messages whose payload came with them.
        eager_received,
        /// Active messages whose payload was announced, to come by rendezvous.
        rendezvous_received,
        /// Bytes of payloads of both.
        bytes_received,
        /// Messages that arrived out of order.
        out_of_order,
    }
}

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

/// Counter that only the fabric's thread writes and any thread reads.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, more: u64) {
        // There is a single writer, so no atomic read-modify-write is needed.
        self.0.store(self.0.load(Ordering::Relaxed) + more, Ordering::Relaxed);
    }
}

counters! {
    /// Counters of a fabric.
    FabricStats from FabricCounters {
        /// Rounds of the thread that did work.
        rounds_busy,
        /// Times that UCX still had work when the thread was about to sleep.
        arm_busy,
        /// Sleeps ended by a UCX event.
        woken_by_event,
        /// Sleeps ended by a command.
        woken_by_command,
        /// Sleeps that reached their timeout.
        woken_by_tick,
        /// Messages for a connection that is unknown or has ended.
        dropped_unknown,
        /// Malformed messages that belong to no known connection.
        dropped_malformed,
        /// First messages with a wrong, used or expired token.
        refused_tokens,
        /// Peers of the listener that were rejected: they sent no first message in time, or there were too many.
        unidentified_refused,
        /// Bytes of payloads of at least one page outside the pool, which UCX had to copy or register.
        bytes_unregistered,
        /// Regions of the pool that could not be registered and are used unregistered.
        registrations_failed,
        /// Workers opened for peers on this host.
        peer_workers_opened,
        /// Workers of peers on this host that were closed.
        peer_workers_closed,
        /// Peers on this host that were rejected because there were too many.
        peer_workers_refused,
    }
}

counters! {
    /// Counters of a connection.
    ConnectionStats from ConnectionCounters {
        /// Active messages that UCX has sent.
        messages_sent,
        /// Bytes of payloads that UCX has sent.
        bytes_sent,
        /// Active messages received with their payload.
        eager_received,
        /// Active messages received with an announced payload, which follows by rendezvous.
        rendezvous_received,
        /// Bytes of received payloads, eager and announced.
        bytes_received,
        /// Messages that arrived out of order.
        out_of_order,
    }
}

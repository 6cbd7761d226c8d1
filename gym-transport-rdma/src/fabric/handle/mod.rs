//! What other threads hold of a fabric: connections, peer workers, commands and counters.

pub(crate) mod command;
pub(crate) mod connection;
pub(crate) mod events;
pub(crate) mod message;
pub(crate) mod peer_worker;
pub(crate) mod queue;
pub(crate) mod stats;
pub(crate) mod target;

//! Handles for other threads: connections, peer workers, commands and counters of a fabric.

pub(crate) mod command;
pub(crate) mod connection;
pub(crate) mod events;
pub(crate) mod message;
pub(crate) mod peer_worker;
pub(crate) mod queue;
pub(crate) mod stats;
pub(crate) mod target;

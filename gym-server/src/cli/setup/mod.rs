//! The setup that commands share: configuration, Python interpreter, head server address, stack options,
//! model endpoints, the checks and the node of a worker, and signals.

pub(super) mod checks;
pub(super) mod cluster;
pub(super) mod configuration;
pub(super) mod head_server;
mod interpreter;
pub(super) mod models;
pub(super) mod monitor;
#[cfg(feature = "ray")]
pub(super) mod ray;
pub(super) mod signals;
pub(super) mod stack_options;

//! Commands that only report on servers, on this machine, and on configurations.

pub(super) mod config;
pub(super) mod doctor;
mod finding;
mod machine;
#[cfg(feature = "ray")]
pub(super) mod ray;
pub(super) mod status;
pub(super) mod stuck;
pub(super) mod top;
pub(super) mod workers;

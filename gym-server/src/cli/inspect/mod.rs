//! Commands that only look: at servers, at this machine, at configurations.

pub(super) mod config;
pub(super) mod doctor;
pub(super) mod status;

//! What commands need before they do their work: the configuration, Python, the head's address, a stack's options, signals.

pub(super) mod configuration;
pub(super) mod head_server;
mod interpreter;
pub(super) mod signals;
pub(super) mod stack_options;

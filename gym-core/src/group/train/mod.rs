//! Computations of a training step outside the model.

pub mod advantages;
pub mod message_log;

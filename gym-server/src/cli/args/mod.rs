//! What was typed: the options of the commands, and NeMo Gym's commands translated into ours.

pub(super) mod aliases;
pub(super) mod options;
pub(super) mod translation;

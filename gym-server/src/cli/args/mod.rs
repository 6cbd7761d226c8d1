//! Parses the command line: the options of the commands, and the translation of NeMo Gym's commands.

pub(super) mod aliases;
pub(super) mod options;
pub(super) mod range;
pub(super) mod translation;

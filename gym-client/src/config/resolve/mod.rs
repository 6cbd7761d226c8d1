//! Interpolations (`${…}`), and the overrides of the command line, which share their grammar of values.

mod grammar;
pub(crate) mod interpolation;
pub(crate) mod overrides;

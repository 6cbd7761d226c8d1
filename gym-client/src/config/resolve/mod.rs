//! Interpolations (`${…}`) and command-line overrides, which share a grammar of values.

mod grammar;
pub(crate) mod interpolation;
pub(crate) mod overrides;

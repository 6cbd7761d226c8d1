//! YAML as OmegaConf reads it: a tree of values with their locations, its parser, its writer, and its deserializer.

pub(crate) mod deserialize;
mod float;
pub(crate) mod node;
pub(crate) mod parser;
pub(crate) mod writer;

//! YAML as OmegaConf reads it, as a tree in which each value keeps its place; read from text, written as text, read as types.

pub(crate) mod deserialize;
mod float;
pub(crate) mod node;
pub(crate) mod parser;
pub(crate) mod writer;

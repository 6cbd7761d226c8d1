//! Frame layout, and the decoder that reads frames.

pub(crate) mod decoder;
pub(crate) mod frame;

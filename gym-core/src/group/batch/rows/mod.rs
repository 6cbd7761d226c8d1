//! Operations on the rows of a batch: select, concatenate, pad, truncate, assemble and validate.

mod assemble;
pub(super) mod concat;
mod media;
mod pad;
pub(super) mod select;
mod sides;
mod truncate;
mod validate;

pub use assemble::Assembly;
pub use pad::Padding;
